"""May this update count? Numbered checks, one named refusal each, cheap ones before expensive ones.

The checks are in the order of ``RefusalCode``:

     1 STUDY_UNKNOWN         6 UPLOAD_ID_CONFLICT    11 METRICS_UNDECLARED   16 TENSOR_NORM
     2 REVISION_CHANGED      7 UPLOAD_DUPLICATE      12 COUNT_INVALID        17 LEDGER_ROLLBACK
     3 STUDY_NOT_RUNNING     8 MANIFEST_NAMES        13 PAYLOAD_INCOMPLETE   18 LEDGER_FORK
     4 ROUND_CLOSED          9 MANIFEST_SHAPE        14 PAYLOAD_DIGEST       19 LEDGER_SIGNATURE
     5 ROUND_NOT_ASKED      10 MANIFEST_DTYPE        15 TENSOR_NOT_FINITE

1 to 7 and 17 to 19 need what the coordinator remembers and are asked when an upload is opened; 1 to 7 again when it is
complete, because a round may have closed meanwhile. 8 to 12 need the opening message alone, 13 to 16 the payload. An
update that fails 8 or later was this site's word in this round; one that fails before says nothing about the round.

Who the sender is, is not checked here: ``coordinator.servicers`` has, on every call and chunk.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod, sqrt

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from coordinator.studies.lifecycle import Kind, Life, Phase
from wardround.errors import BadData
from wardround.records import receipts
from wardround.records.architectures import own_tensors
from wardround.records.receipts import EMPTY_HEAD, LedgerHead
from wardround.records.study import StudyFile
from wardround.signing import canonical
from wardround.tensors.manifests import Manifest, TensorFile, TensorSpec

BLOCK = 1 << 18  # float32 elements looked at together: 1 MiB, and 2 MiB more as float64

ANSWERS_THE_ROUND = frozenset(
    {
        "MANIFEST_NAMES", "MANIFEST_SHAPE", "MANIFEST_DTYPE", "METRICS_UNDECLARED", "COUNT_INVALID",
        "PAYLOAD_INCOMPLETE", "PAYLOAD_DIGEST", "TENSOR_NOT_FINITE", "TENSOR_NORM",
        "LEDGER_ROLLBACK", "LEDGER_FORK", "LEDGER_SIGNATURE",
    }
)  # fmt: skip


@dataclass(frozen=True)
class LedgerStatement:
    """What a site says of its ledger: the signed head, and the hashes of the lines before it since a head we know."""

    head: LedgerHead
    signature: bytes
    new_lines: tuple[bytes, ...]


@dataclass(frozen=True)
class Claim:
    """What a site says when it opens an upload, in our own types. Forms and lengths are checked, nothing else."""

    upload_id: str  # hex
    site: str  # from the certificate
    study: str
    revision: int
    digest: str
    round: int
    attempt: int
    manifest: Manifest
    metrics: tuple[tuple[str, str], ...]
    num_examples: int
    num_validation: int
    statement: LedgerStatement

    @property
    def ledger(self) -> LedgerHead:
        return self.statement.head

    @cached_property
    def content(self) -> str:
        """Digest of all but the ledger's head, which may have grown when the same upload is opened again."""
        return canonical.digest(
            {
                "study": self.study, "revision": self.revision, "digest": self.digest, "round": self.round,
                "attempt": self.attempt, "manifest": self.manifest.digest(),
                "metrics": [list(pair) for pair in self.metrics],
                "num_examples": self.num_examples, "num_validation": self.num_validation,
            }
        )  # fmt: skip


@dataclass(frozen=True)
class Refusal:
    """A name of RefusalCode, and of the tensor if it is about one."""

    code: str
    tensor: str = ""


@dataclass(frozen=True)
class Known:
    """A study as the coordinator has it now."""

    revision: int
    digest: str
    file: StudyFile
    shared: tuple[TensorSpec, ...]
    life: Life


def may_count(claim: Claim, known: Known | None) -> Refusal | None:
    """Checks 1 to 7: is this update expected from this site now?"""
    if known is None or claim.site not in known.file.study.sites:
        return Refusal("STUDY_UNKNOWN")  # 1
    if (claim.revision, claim.digest) != (known.revision, known.digest):
        return Refusal("REVISION_CHANGED")  # 2
    life = known.life
    if life.phase != Phase.RUNNING:
        return Refusal("STUDY_NOT_RUNNING")  # 3
    current = life.round
    if claim.round <= life.models:
        return Refusal("ROUND_CLOSED")  # 4: a model was made of it
    if current is None or (claim.round, claim.attempt) != (current.number, current.attempt):
        past = current is not None and claim.round == current.number and claim.attempt < current.attempt
        return Refusal("ROUND_CLOSED" if past else "ROUND_NOT_ASKED")
    answer = current.answers.get(claim.site)
    if answer and answer.kind == Kind.ACCEPTED and answer.upload != claim.upload_id:
        return Refusal("UPLOAD_DUPLICATE")  # 7; 6 is the caller's: only it knows the id's first use
    if life.aggregating:
        return Refusal("ROUND_CLOSED")
    if claim.site not in current.asked or (answer and answer.kind == Kind.WITHDRAWN):
        return Refusal("ROUND_NOT_ASKED")  # 5
    return None


def is_as_declared(claim: Claim, known: Known, first: tuple[int, int] | None = None) -> Refusal | None:
    """Checks 8 to 12: exactly the tensors that the study has this site share, and numbers as it says.

    Args:
        first: the training and validation rows that this site told with its first accepted update of this revision:
            its data was approved once, so they may not grow beyond the study's [limits].
    """
    assert known.life.round
    closing = known.life.round.closing
    own = own_tensors(known.file, claim.site, known.shared)
    if refusal := _manifest_refusal(claim.manifest.specs, () if closing else tuple(own.values())):
        return refusal
    told = known.file.reported
    names = [name for name, _ in claim.metrics]
    if len(set(names)) != len(names) or not set(names) <= set(told.metrics):
        return Refusal("METRICS_UNDECLARED")  # 11
    if not all(told.has_form(value) and told.is_in_range(name, value) for name, value in claim.metrics):
        return Refusal("METRICS_UNDECLARED")
    limits, counts = known.file.limits, (claim.num_examples, claim.num_validation)
    if not all(0 <= count <= limits.max_examples and count == told.count(count) for count in counts if count):
        return Refusal("COUNT_INVALID")  # 12
    if first is not None and any(
        now > limits.count_growth * max(told_first, 1) for now, told_first in zip(counts, first, strict=True)
    ):
        return Refusal("COUNT_INVALID")
    if not closing and claim.num_examples < 1:
        return Refusal("COUNT_INVALID")
    return None


def _manifest_refusal(sent: tuple[TensorSpec, ...], shared: tuple[TensorSpec, ...]) -> Refusal | None:
    if [spec.key for spec in sent] != [spec.key for spec in shared]:
        strange = sorted({spec.key for spec in sent} - {spec.key for spec in shared})
        return Refusal("MANIFEST_NAMES", strange[0] if strange else "")  # 8; a receipt names what was sent, or nothing
    for found, wanted in zip(sent, shared, strict=True):
        if found.shape != wanted.shape:
            return Refusal("MANIFEST_SHAPE", found.key)  # 9
        if found.dtype != wanted.dtype:
            return Refusal("MANIFEST_DTYPE", found.key)  # 10
    return None


def is_what_was_announced(sent: Manifest, claim: Claim) -> Refusal | None:
    """Check 14, over a complete payload. Names the first tensor whose bytes are other than its digest says."""
    for found, announced in zip(sent.entries, claim.manifest.entries, strict=True):
        if found.sha256 != announced.sha256:
            return Refusal("PAYLOAD_DIGEST", announced.spec.key)
    return None


def has_usable_values(update: TensorFile, max_norm: float | None) -> Refusal | None:
    """Checks 15 and 16: every value finite, and the L2 norm over all tensors not above the study's limit.

    Reads the file in blocks; memory does not grow with it.
    """
    squares = 0.0
    for spec in update.specs:
        size = prod(spec.shape)
        for start in range(0, size, BLOCK):
            block = update.block(spec.key, start, min(BLOCK, size - start)).astype(np.float64)
            square = float(np.dot(block, block))  # nan and infinity carry through; float32 squares fit float64
            if not np.isfinite(square):
                return Refusal("TENSOR_NOT_FINITE", spec.key)
            squares += square
    if max_norm is not None and sqrt(squares) > max_norm:
        return Refusal("TENSOR_NORM")
    return None


def continues_its_ledger(
    said: LedgerStatement,
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
    head = said.head
    try:
        head.verify(said.signature, key)
    except BadData:
        return Refusal("LEDGER_SIGNATURE")  # 19, first because the others look at what was signed
    if ledger_id and head.ledger_id != ledger_id:
        return Refusal("LEDGER_FORK")
    if newest and head.lines < newest[0]:
        return Refusal("LEDGER_ROLLBACK")  # 17
    lines = head.lines - len(said.new_lines)
    reached = EMPTY_HEAD if lines == 0 else known.get(lines)
    if lines < 0 or reached is None:
        return Refusal("LEDGER_FORK")  # 18
    for hash_of_line in said.new_lines:
        lines, reached = lines + 1, receipts.next_head(reached, hash_of_line)
        if known.get(lines, reached) != reached:
            return Refusal("LEDGER_FORK")
    return None if reached == head.head else Refusal("LEDGER_FORK")
