"""May this update count? Numbered checks, one named refusal each, cheap ones before expensive ones.

The checks are in the order of ``RefusalCode``:

     1 STUDY_UNKNOWN         6 UPLOAD_ID_CONFLICT    11 METRICS_UNDECLARED   16 TENSOR_NORM
     2 REVISION_CHANGED      7 UPLOAD_DUPLICATE      12 COUNT_INVALID        17 LEDGER_ROLLBACK
     3 STUDY_NOT_RUNNING     8 MANIFEST_NAMES        13 PAYLOAD_INCOMPLETE   18 LEDGER_FORK
     4 ROUND_CLOSED          9 MANIFEST_SHAPE        14 PAYLOAD_DIGEST       19 LEDGER_SIGNATURE
     5 ROUND_NOT_ASKED      10 MANIFEST_DTYPE        15 TENSOR_NOT_FINITE    20 TENSOR_ENCODING

1 to 7 and 17 to 19 need what the coordinator remembers and are asked when an upload is opened; 1 to 7 again when it is
complete, because a round may have closed meanwhile. 8 to 12 need the header alone, 13 to 16 and 20 the payload. An
update that fails 8 or later was this site's answer in this round; one that fails before says nothing about the round.

Nothing is written here. 6 needs the id's first use, which ``coordinator.updates.decide`` looks up; who the sender is,
``coordinator.servicers`` has checked, on every call and chunk.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite, sqrt

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from coordinator.models.vectors import blocks_of
from coordinator.studies.secure_rounds import layout_for, submitted
from coordinator.studies.state import Kind, Phase, Step
from coordinator.studies.study import Study
from coordinator.studies.terms import UpdateTerms
from coordinator.updates.receive import Received
from fl_algorithms.server.limits import squares
from wardround.errors import BadData, TryAgain
from wardround.records import receipts
from wardround.records.receipts import EMPTY_HEAD
from wardround.records.secure_round import vector_specs
from wardround.records.update import LedgerStatement, UploadHeader
from wardround.secure.layout import digests
from wardround.secure.statements import Submission, known
from wardround.signing.dsse import Envelope
from wardround.tensors.codecs import Decoded, fault
from wardround.tensors.files import TensorFile
from wardround.tensors.manifests import Manifest, TensorSpec

log = logging.getLogger(__name__)

ANSWERS_THE_ROUND = frozenset(
    {
        "MANIFEST_NAMES", "MANIFEST_SHAPE", "MANIFEST_DTYPE", "METRICS_UNDECLARED", "COUNT_INVALID",
        "PAYLOAD_INCOMPLETE", "PAYLOAD_DIGEST", "TENSOR_NOT_FINITE", "TENSOR_NORM", "TENSOR_ENCODING",
        "LEDGER_ROLLBACK", "LEDGER_FORK", "LEDGER_SIGNATURE",
    }
)  # fmt: skip


@dataclass(frozen=True)
class Refusal:
    """A name of RefusalCode, and of the tensor if it is about one."""

    code: str
    tensor: str = ""

    @property
    def answers_the_round(self) -> bool:
        """Whether a site that was asked has answered with what is refused so."""
        return self.code in ANSWERS_THE_ROUND


@dataclass(frozen=True)
class Admitted:
    """Nothing speaks against the update so far. ``norm``: of its values, once those were read as they came."""

    norm: float | None = None


ADMITTED = Admitted()


def admit_header(
    site: str,
    header: UploadHeader,
    study: Study | None,
    first: tuple[int, int] | None,
    ledger: Refusal | None,
) -> Admitted | Refusal:
    """All that can be checked before the first byte: 1 to 12, and what ``ledger_refusal`` said, which was asked apart.

    Args:
        first: the training and validation rows that the site reported with its first accepted update of this revision.
        ledger: the refusal of the header's ledger statement, if it has one.
    """
    refusal = state_refusal(site, header, study)
    if refusal is None and study is not None:
        refusal = submission_refusal(site, header, study) or declaration_refusal(site, header, study, first)
    return refusal or ledger or ADMITTED


def admit_payload(received: Received, terms: UpdateTerms) -> Admitted | Refusal:
    """Checks 13 to 16 and 20, over what came and is durable. Reads the spool in blocks."""
    announced, submission = received.header.manifest, received.header.submission
    if received.committed != announced.digest():
        return Refusal("PAYLOAD_DIGEST")  # 14: the site closes another upload than it opened
    if received.spool is None:
        return ADMITTED  # a closing validation has no payload
    if received.manifest is None:
        return Refusal("PAYLOAD_INCOMPLETE")  # 13
    if refusal := digest_refusal(received.manifest, announced):
        return refusal
    with TensorFile(received.spool) as update:
        if submission is not None:
            return vector_refusal(update, submission) or ADMITTED
        if not terms.encoding.is_lossy:
            return judged_values(update, terms.max_norm)
        if strange := fault(terms.encoding, terms.specs, update):
            return Refusal("TENSOR_ENCODING", strange)  # 20, before the values are read out of it
        return judged_values(Decoded(terms.encoding, terms.specs, update), terms.max_norm)


def admit_now(site: str, header: UploadHeader, study: Study | None, payload: Admitted | Refusal) -> Admitted | Refusal:
    """The verdict on a complete upload: the round may have closed while it came."""
    return state_refusal(site, header, study) or payload


def state_refusal(site: str, header: UploadHeader, study: Study | None) -> Refusal | None:
    """Checks 1 to 7: is this update expected from this site now?"""
    if study is None or site not in study.rules.sites:
        return Refusal("STUDY_UNKNOWN")  # 1
    if (header.revision, header.digest) != (study.revision, study.digest):
        return Refusal("REVISION_CHANGED")  # 2
    state = study.state
    if state.phase != Phase.RUNNING:
        return Refusal("STUDY_NOT_RUNNING")  # 3
    current = state.round
    if header.round <= state.models:
        return Refusal("ROUND_CLOSED")  # 4: a model was made of it
    if current is None or (header.round, header.attempt) != (current.number, current.attempt):
        past = current is not None and header.round == current.number and header.attempt < current.attempt
        return Refusal("ROUND_CLOSED" if past else "ROUND_NOT_ASKED")
    answer = current.answers.get(site)
    if answer and answer.kind in (Kind.ACCEPTED, Kind.EVALUATED) and answer.upload != header.upload_id:
        return Refusal("UPLOAD_DUPLICATE")  # 7
    if state.aggregating or current.waits:
        return Refusal("ROUND_CLOSED")
    if current.step != Step.TRAINING or (current.group and site not in current.group):
        return Refusal("ROUND_NOT_ASKED")  # not yet, or its shares came too late
    if site not in current.asked or (answer and answer.kind == Kind.WITHDRAWN):
        return Refusal("ROUND_NOT_ASKED")  # 5
    return None


def submission_refusal(site: str, header: UploadHeader, study: Study) -> Refusal | None:
    """Whether with secure aggregation the vector's signed digest is there, of this attempt; and without it none is."""
    try:
        if study.rules.threshold:
            submitted(study, site, header)
        elif header.submission is not None:
            return Refusal("PAYLOAD_DIGEST")
    except BadData as error:
        log.warning("%s: %s", study.name, error.message)
        return Refusal("PAYLOAD_DIGEST")
    except TryAgain:
        return Refusal("ROUND_CLOSED")
    return None


def declaration_refusal(
    site: str, header: UploadHeader, study: Study, first: tuple[int, int] | None = None
) -> Refusal | None:
    """Checks 8 to 12: exactly the tensors that the study has this site share, and numbers as it says.

    Args:
        first: the training and validation rows that this site reported with its first accepted update of this revision:
            its data was approved once, so they may not grow beyond the study's [limits].
    """
    assert study.state.round
    closing = study.state.round.closing
    evaluates = site in study.rules.evaluators
    if study.rules.threshold:
        return _masked_refusal(header, study, closing=closing)
    if refusal := _manifest_refusal(header.manifest.specs, () if closing else study.uploaded_by(site)):
        return refusal
    form = study.resolved.reported
    names = [name for name, _ in header.metrics]
    if len(set(names)) != len(names) or not set(names) <= set(form.metrics):
        return Refusal("METRICS_UNDECLARED")  # 11
    if not all(form.has_form(value) and form.is_in_range(name, value) for name, value in header.metrics):
        return Refusal("METRICS_UNDECLARED")
    limits, counts = study.resolved.limits, (header.num_examples, header.num_validation)
    if not all(0 <= count <= limits.max_examples and count == form.count(count) for count in counts if count):
        return Refusal("COUNT_INVALID")  # 12
    if first is not None and any(
        now > limits.count_growth * max(before, 1) for now, before in zip(counts, first, strict=True)
    ):
        return Refusal("COUNT_INVALID")
    if evaluates and header.num_examples != form.count(0):
        return Refusal("COUNT_INVALID")  # nothing is trained there
    if not closing and not evaluates and header.num_examples < 1:
        return Refusal("COUNT_INVALID")
    return None


def _masked_refusal(header: UploadHeader, study: Study, *, closing: bool) -> Refusal | None:
    """Of a masked vector: its form is that of the round's vectors, and no number stands beside it in clear."""
    wanted = vector_specs(layout_for(study, closing=closing))
    if refusal := _manifest_refusal(header.manifest.specs, wanted):
        return refusal
    if header.metrics:
        return Refusal("METRICS_UNDECLARED")
    return Refusal("COUNT_INVALID") if header.num_examples or header.num_validation else None


def _manifest_refusal(sent: tuple[TensorSpec, ...], shared: tuple[TensorSpec, ...]) -> Refusal | None:
    if [spec.key for spec in sent] != [spec.key for spec in shared]:
        strange = sorted({spec.key for spec in sent} - {spec.key for spec in shared})
        return Refusal("MANIFEST_NAMES", strange[0] if strange else "")  # 8; a receipt names what was sent, or nothing
    for spec, wanted in zip(sent, shared, strict=True):
        if spec.shape != wanted.shape:
            return Refusal("MANIFEST_SHAPE", spec.key)  # 9
        if spec.dtype != wanted.dtype:
            return Refusal("MANIFEST_DTYPE", spec.key)  # 10
    return None


def digest_refusal(sent: Manifest, announced: Manifest) -> Refusal | None:
    """Check 14, over a complete payload. Names the first tensor whose bytes are other than its digest says."""
    for entry, wanted in zip(sent.entries, announced.entries, strict=True):
        if entry.sha256 != wanted.sha256:
            return Refusal("PAYLOAD_DIGEST", wanted.spec.key)
    return None


def judged_values(update: TensorFile | Decoded, max_norm: float | None) -> Admitted | Refusal:
    """Checks 15 and 16: every value finite, and the L2 norm over all tensors not above the study's limit.

    Reads the file in blocks; memory does not grow with it.
    """
    total = 0.0
    for spec in update.specs:
        found = squares(update, spec)
        if not isfinite(found):
            return Refusal("TENSOR_NOT_FINITE", spec.key)
        total += found
    if max_norm is not None and sqrt(total) > max_norm:
        return Refusal("TENSOR_NORM")
    return Admitted(sqrt(total))


def vector_refusal(vector: TensorFile, submission: Envelope) -> Refusal | None:
    """Whether a masked vector is the one that its site has signed, block by block."""
    found = digests(data for _, data in blocks_of(vector))
    return None if found.root == known(Submission, submission).blocks else Refusal("PAYLOAD_DIGEST")


def ledger_refusal(
    statement: LedgerStatement,
    key: Ed25519PublicKey,
    ledger_id: str,
    newest: tuple[int, str] | None,
    known: Mapping[int, str],
) -> Refusal | None:
    """Checks 17 to 19: the site's ledger only ever grew, and is now as long as it ever was.

    Args:
        key: the site's ledger key, from its enrolment.
        ledger_id: of the ledger that we witness; "" before the first upload.
        newest: (lines, head) of the longest we saw.
        known: heads that we know by their number of lines, from the statement's first new line on.
    """
    head = statement.head
    try:
        head.verify(statement.signature, key)
    except BadData:
        return Refusal("LEDGER_SIGNATURE")  # 19, first because the others look at what was signed
    if ledger_id and head.ledger_id != ledger_id:
        return Refusal("LEDGER_FORK")
    if newest and head.lines < newest[0]:
        return Refusal("LEDGER_ROLLBACK")  # 17
    lines = head.lines - len(statement.new_lines)
    reached = EMPTY_HEAD if lines == 0 else known.get(lines)
    if lines < 0 or reached is None:
        return Refusal("LEDGER_FORK")  # 18
    for hash_of_line in statement.new_lines:
        lines, reached = lines + 1, receipts.next_head(reached, hash_of_line)
        if known.get(lines, reached) != reached:
            return Refusal("LEDGER_FORK")
    return None if reached == head.head else Refusal("LEDGER_FORK")
