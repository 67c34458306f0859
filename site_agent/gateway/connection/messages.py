"""What the two programs say to each other, as plain values: protobuf stays in here and in ``connection``.

What comes from the coordinator is checked here, once; behind this module it can be trusted to have its form.
"""

import datetime
import logging
from dataclasses import dataclass

from site_agent.gateway.consent.offers import too_deep
from site_agent.state.directory import Offer
from wardround import rpc
from wardround.errors import BadData, WardroundError
from wardround.records.architectures import own_manifest
from wardround.records.receipts import LedgerHead
from wardround.records.study import SITE_NAME, STUDY_NAME, StudyFile, study_digest
from wardround.signing import canonical
from wardround.tensors.manifests import Manifest
from wardround.terminal import quoted
from wardround.v1 import federation_pb2 as pb

STATES = ("created", "waiting", "running", "paused", "finished", "stopped", "failed")
MAX_ROUNDS = 100_001  # of a study, and its closing validation
TRAIN, VALIDATE, STOP = "train", "validate", "stop"
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelRef:
    """A model by the round that made it. ``digest`` is hex."""

    round: int
    digest: str


@dataclass(frozen=True)
class Assignment:
    """What the coordinator asks. ``kind``: train, validate, stop; ``reason`` is Stop's, in lower case."""

    study: str
    revision: int
    digest: str
    round: int
    attempt: int
    kind: str
    base: ModelRef | None = None
    best: ModelRef | None = None
    reason: str = ""
    contributed: tuple[tuple[str, tuple[int, ...]], ...] = ()  # (site, rounds), of a finished study
    capped: tuple[tuple[str, tuple[int, ...]], ...] = ()  # of these, where it counted for less than its rows
    left_out: tuple[tuple[str, tuple[int, ...]], ...] = ()  # where its accepted update is in no model

    @property
    def key(self) -> tuple[str, int, str, int, int, str]:
        return self.study, self.revision, self.digest, self.round, self.attempt, self.kind


@dataclass(frozen=True)
class Goodbye:
    """The coordinator is going down."""


@dataclass(frozen=True)
class TwoLines:
    """The coordinator sees two lines of this site's certificates in use."""

    since: datetime.datetime


@dataclass(frozen=True)
class Opening:
    """What an upload says before its first byte."""

    upload_id: str
    study: str
    revision: int
    digest: str
    round: int
    attempt: int
    manifest: Manifest
    metrics: dict[str, str]
    num_examples: int
    num_validation: int
    ledger: LedgerHead
    ledger_signature: bytes
    new_line_hashes: list[bytes]


@dataclass
class Tried:
    """What one try to send an upload let out, counted as it is given to the line.

    ``answered``: the coordinator heard the opening.
    """

    answered: bool = False
    payload_bytes: int = 0


@dataclass(frozen=True)
class Enrolled:
    """The reply to Enrol or Renew. PEM bytes; times are Unix."""

    certificate: bytes
    authority: bytes
    server_time_s: int
    renew_after_s: int
    coordinator_version: str
    site: str = ""
    federation: str = ""
    receipt_key: bytes = b""


def open_message(opening: Opening) -> pb.UploadOpen:
    return pb.UploadOpen(
        upload_id=bytes.fromhex(opening.upload_id), study=opening.study, revision=opening.revision,
        digest=bytes.fromhex(opening.digest), round=opening.round, attempt=opening.attempt,
        manifest=rpc.manifest_message(opening.manifest),
        metrics=[pb.Metric(name=name, value=value) for name, value in sorted(opening.metrics.items())],
        num_examples=opening.num_examples, num_validation=opening.num_validation,
        ledger=head_message(opening.ledger, opening.ledger_signature),
        new_line_hashes=opening.new_line_hashes,
    )  # fmt: skip


def head_message(head: LedgerHead, signature: bytes) -> pb.LedgerHead:
    return pb.LedgerHead(ledger_id=head.ledger_id, lines=head.lines, head=bytes.fromhex(head.head), signature=signature)


def offer_from(message: pb.StudyOffer, site: str) -> Offer:
    """An offer whose parts agree. Of the initial model it has the part that is of ``site``.

    Raises:
        BadData: a name, document or manifest of another form, or a digest that is not over them.
    """
    study, digest = message.study, message.digest.hex()
    if not STUDY_NAME.fullmatch(study):
        raise BadData("the coordinator offers a study whose name is not of our form", code="MESSAGE_MALFORMED")
    document = canonical.loads(message.document)
    if too_deep(document):
        raise BadData(f"the coordinator offers `{study}` with tables too deep within tables", code="MESSAGE_MALFORMED")
    parsed = StudyFile.from_document(document, f"study `{study}`")
    manifest = rpc.manifest_from(message.initial_model)
    if parsed.document() != document:
        raise BadData(f"the coordinator offers `{study}` without some of its settings", code="MESSAGE_MALFORMED")
    if message.state not in STATES:
        raise BadData(f"the coordinator offers `{study}` in a state of no known name", code="MESSAGE_MALFORMED")
    if parsed.study.name != study:
        raise BadData(f"the coordinator offers `{study}` with another study's file", code="MESSAGE_MALFORMED")
    if study_digest(document, manifest.digest()) != digest:
        raise BadData(
            f"the coordinator offers `{study}` under a digest that is not its own: {digest[:12]}…",
            code="REVISION_CHANGED",
        )
    leaves = own_manifest(parsed, site, manifest).document()
    return Offer(study, message.revision, digest, message.state, document, leaves)


def last_of_page(reply: pb.StudiesReply, before: str) -> str:
    """The name after which the next page of studies begins. It goes back to the coordinator, so it has a name's form.

    Raises:
        BadData: there is none, or it is not after ``before``.
    """
    last = reply.studies[-1].study if reply.studies else ""
    if not STUDY_NAME.fullmatch(last) or last <= before:
        raise BadData("the coordinator's pages of studies do not go on by name", code="MESSAGE_MALFORMED")
    return last


def offer_or_none(message: pb.StudyOffer, site: str) -> Offer | None:
    """One offer that cannot be believed does not hide the others: it is logged and left out."""
    try:
        return offer_from(message, site)
    except WardroundError as error:
        log.error("an offer was left out: %s", quoted(error.message))
        return None


def assignment_or_none(message: pb.Assignment) -> Assignment | None:
    """One assignment that cannot be read does not end the line: it is logged and left out."""
    try:
        return assignment_from(message)
    except BadData as error:
        log.error("an assignment was left out: %s", quoted(error.message))
        return None


def assignment_from(message: pb.Assignment) -> Assignment:
    """An assignment whose parts have their form. Raises BadData: they have not."""
    kind = message.WhichOneof("kind")
    fits = (
        kind is not None
        and STUDY_NAME.fullmatch(message.study)
        and len(message.digest) == 32
        and all(len(ref.digest) == 32 for ref in (message.base, message.best) if ref.digest or ref.round)
        and message.stop.reason in pb.Stop.Reason.values()
        and all(SITE_NAME.fullmatch(row.site) for row in message.stop.contributions)
        and all(1 <= number <= MAX_ROUNDS for row in message.stop.contributions for number in row.rounds)
    )
    if kind is None or not fits:
        raise BadData("the coordinator's assignment has not its form", code="MESSAGE_MALFORMED")
    return Assignment(
        study=message.study, revision=message.revision, digest=message.digest.hex(), round=message.round,
        attempt=message.attempt, kind=kind,
        base=_ref(message.base) if message.HasField("base") else None,
        best=_ref(message.best) if message.HasField("best") else None,
        reason=pb.Stop.Reason.Name(message.stop.reason).lower() if kind == STOP else "",
        contributed=tuple((row.site, tuple(row.rounds)) for row in message.stop.contributions),
        capped=tuple((row.site, tuple(row.capped)) for row in message.stop.contributions if row.capped),
        left_out=tuple((row.site, tuple(row.left_out)) for row in message.stop.contributions if row.left_out),
    )  # fmt: skip


def two_lines_or_none(message: pb.TwoLines) -> TwoLines | None:
    """A warning without a time of these centuries is logged and left out."""
    if not 0 < message.since_s < 2**33:
        log.error("a warning of the coordinator was left out: it has no time")
        return None
    return TwoLines(datetime.datetime.fromtimestamp(message.since_s, datetime.UTC))


def _ref(message: pb.ModelRef) -> ModelRef:
    return ModelRef(message.round, message.digest.hex())
