"""What the two programs say to each other, as plain values: protobuf stays in here and in ``connection``.

What comes from the coordinator is checked here, once; behind this module it can be trusted to have its form.
"""

import logging
from dataclasses import dataclass

from site_agent.state import Offer
from wardround import canonical, rpc
from wardround.errors import BadData, WardroundError
from wardround.networks import own_part
from wardround.receipts import LedgerHead
from wardround.study import STUDY_NAME, StudyFile, study_digest
from wardround.tensors import Manifest
from wardround.v1 import federation_pb2 as pb

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

    @property
    def key(self) -> tuple[str, int, str, int, int, str]:
        return self.study, self.revision, self.digest, self.round, self.attempt, self.kind


@dataclass(frozen=True)
class Goodbye:
    """The coordinator is going down."""


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
    head = pb.LedgerHead(
        ledger_id=opening.ledger.ledger_id, lines=opening.ledger.lines, head=bytes.fromhex(opening.ledger.head),
        signature=opening.ledger_signature,
    )  # fmt: skip
    return pb.UploadOpen(
        upload_id=bytes.fromhex(opening.upload_id), study=opening.study, revision=opening.revision,
        digest=bytes.fromhex(opening.digest), round=opening.round, attempt=opening.attempt,
        manifest=rpc.manifest_message(opening.manifest),
        metrics=[pb.Metric(name=name, value=value) for name, value in sorted(opening.metrics.items())],
        num_examples=opening.num_examples, num_validation=opening.num_validation, ledger=head,
        new_line_hashes=opening.new_line_hashes,
    )  # fmt: skip


def offer_from(message: pb.StudyOffer, site: str) -> Offer:
    """An offer whose parts agree. Of the initial model it has the part that is of ``site``.

    Raises:
        BadData: a name, document or manifest of another form, or a digest that is not over them.
    """
    study, digest = message.study, message.digest.hex()
    if not STUDY_NAME.fullmatch(study):
        raise BadData("the coordinator offers a study whose name is not of our form", code="MESSAGE_MALFORMED")
    document = canonical.loads(message.document)
    parsed = StudyFile.from_document(document, f"study `{study}`")
    manifest = rpc.manifest_from(message.initial_model)
    if parsed.document() != document:  # each key is there, in the form that is hashed and shown
        raise BadData(
            f"the coordinator offers `{study}` with a document that is not resolved", code="MESSAGE_MALFORMED"
        )
    if parsed.study.name != study:
        raise BadData(f"the coordinator offers `{study}` with another study's file", code="MESSAGE_MALFORMED")
    if study_digest(document, manifest.digest()) != digest:
        raise BadData(
            f"the coordinator offers `{study}` under a digest that is not its own: {digest[:12]}…",
            code="REVISION_CHANGED",
        )
    return Offer(study, message.revision, digest, message.state, document, own_part(parsed, site, manifest).document())


def offer_or_none(message: pb.StudyOffer, site: str) -> Offer | None:
    """One offer that cannot be believed does not hide the others: it is logged and left out."""
    try:
        return offer_from(message, site)
    except WardroundError as error:
        log.error("an offer was left out: %s", error.message)
        return None


def assignment_from(message: pb.Assignment) -> Assignment:
    kind = message.WhichOneof("kind")
    known = message.stop.reason in pb.Stop.Reason.values()  # an open enum: any number comes through
    if kind is None or not STUDY_NAME.fullmatch(message.study) or not known:
        raise BadData("the coordinator's assignment is of no known kind", code="MESSAGE_MALFORMED")
    return Assignment(
        study=message.study, revision=message.revision, digest=message.digest.hex(), round=message.round,
        attempt=message.attempt, kind=kind,
        base=_ref(message.base) if message.HasField("base") else None,
        best=_ref(message.best) if message.HasField("best") else None,
        reason=pb.Stop.Reason.Name(message.stop.reason).lower() if kind == STOP else "",
        contributed=tuple((row.site, tuple(row.rounds)) for row in message.stop.contributions),
    )  # fmt: skip


def _ref(message: pb.ModelRef) -> ModelRef:
    return ModelRef(message.round, message.digest.hex())
