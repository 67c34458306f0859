"""What the coordinator asks of a site in one round, and what the site answers without an update."""

from dataclasses import dataclass
from enum import StrEnum

from wardround.errors import BadData
from wardround.records.codes import DECLINE_CODES
from wardround.records.study import SITE_NAME, STUDY_NAME
from wardround.v1 import federation_pb2 as pb

MAX_ROUNDS = 100_001  # of a study, and its closing validation
ATTEMPTS_APPROVED = 8  # of one round, by a consent: a site may send again, and a paused study may be started again
TRAIN, VALIDATE, STOP = "train", "validate", "stop"  # the kinds of an assignment
UNKNOWN = "unknown"  # a kind of a newer version: to be declined
DECLINED_UNKNOWN = "DECLINED_UNKNOWN"


class StopReason(StrEnum):
    """Why there is nothing to do; in capitals it is the contract's name."""

    UNSPECIFIED = "reason_unspecified"  # or one that this version does not know
    FINISHED = "finished"
    STOPPED = "stopped"  # by the operator
    FAILED = "failed"
    PAUSED = "paused"
    ROUND_FAILED = "round_failed"  # this attempt does not count


@dataclass(frozen=True)
class ModelRef:
    """A model of a study, by the round that made it. ``digest`` (hex) is of its manifest."""

    round: int
    digest: str

    @classmethod
    def from_message(cls, message: pb.ModelRef) -> "ModelRef":
        """Raises BadData: its digest has not 32 bytes."""
        if len(message.digest) != 32:
            raise _misshapen()
        return cls(message.round, message.digest.hex())

    def to_message(self) -> pb.ModelRef:
        return pb.ModelRef(round=self.round, digest=bytes.fromhex(self.digest))


@dataclass(frozen=True)
class Contribution:
    """Of a finished study: the rounds to whose model a site contributed.

    ``capped``: those in which its update counted for less than its rows would give. ``left_out``: the rounds in which
    its accepted update was beyond the study's limits and is in no model.
    """

    site: str
    rounds: tuple[int, ...]
    capped: tuple[int, ...] = ()
    left_out: tuple[int, ...] = ()

    @classmethod
    def from_message(cls, message: pb.Contribution) -> "Contribution":
        """Raises BadData: a site or round of no possible name or number."""
        numbers = (*message.rounds, *message.capped, *message.left_out)
        if not SITE_NAME.fullmatch(message.site) or not all(1 <= number <= MAX_ROUNDS for number in numbers):
            raise _misshapen()
        return cls(message.site, tuple(message.rounds), tuple(message.capped), tuple(message.left_out))

    def to_message(self) -> pb.Contribution:
        return pb.Contribution(site=self.site, rounds=self.rounds, capped=self.capped, left_out=self.left_out)


@dataclass(frozen=True)
class Assignment:
    """What the coordinator asks. ``digest`` (hex) is the study's.

    ``kind``: ``TRAIN``, ``VALIDATE``, ``STOP`` or ``UNKNOWN``. ``base`` is the model to begin from, ``best`` the best
    global one so far. ``reason`` and ``contributions`` are those of a stop.
    """

    study: str
    revision: int
    digest: str
    round: int
    attempt: int
    kind: str
    base: ModelRef | None = None
    best: ModelRef | None = None
    reason: StopReason | None = None
    contributions: tuple[Contribution, ...] = ()

    @property
    def key(self) -> tuple[str, int, str, int, int, str]:
        """What makes two assignments the same work."""
        return self.study, self.revision, self.digest, self.round, self.attempt, self.kind

    @classmethod
    def from_message(cls, message: pb.Assignment) -> "Assignment":
        """Raises BadData: one of its parts has not its form."""
        kind, stop = message.WhichOneof("kind"), message.stop
        if not STUDY_NAME.fullmatch(message.study) or len(message.digest) != 32:
            raise _misshapen()
        reason = stop.reason if stop.reason in pb.Stop.Reason.values() else pb.Stop.REASON_UNSPECIFIED
        return cls(
            study=message.study, revision=message.revision, digest=message.digest.hex(), round=message.round,
            attempt=message.attempt, kind=kind or UNKNOWN,
            base=ModelRef.from_message(message.base) if message.HasField("base") else None,
            best=ModelRef.from_message(message.best) if message.HasField("best") else None,
            reason=StopReason(pb.Stop.Reason.Name(reason).lower()) if kind == STOP else None,
            contributions=tuple(Contribution.from_message(row) for row in stop.contributions),
        )  # fmt: skip

    def to_message(self) -> pb.Assignment:
        message = pb.Assignment(
            study=self.study, revision=self.revision, digest=bytes.fromhex(self.digest), round=self.round,
            attempt=self.attempt,
            base=self.base.to_message() if self.base is not None else None,
            best=self.best.to_message() if self.best is not None else None,
        )  # fmt: skip
        if self.kind == STOP:
            reason = (self.reason or StopReason.UNSPECIFIED).upper()
            contributions = [contribution.to_message() for contribution in self.contributions]
            message.stop.CopyFrom(pb.Stop(reason=reason, contributions=contributions))
        elif self.kind == VALIDATE:
            message.validate.SetInParent()
        elif self.kind == TRAIN:
            message.train.SetInParent()
        return message


class SiteStatus(StrEnum):
    """Where a site stands in a study, as it declares it; in capitals it is the contract's name."""

    READY = "ready"  # approved, and the data is there
    WITHDRAWN = "withdrawn"  # takes effect at once, mid-round too
    DECLINED = "declined"  # this one round and attempt
    HELD = "held"  # this one round and attempt waits for a person there; an update may still come
    FITS = "fits"  # before anybody approves: its data is what the study reads
    DOES_NOT_FIT = "does_not_fit"
    TRAINING = "training"  # this one round and attempt is under way


@dataclass(frozen=True)
class Declaration:
    """A site's word on where it stands. ``digest`` (hex) is of the study that it approved, or looked at.

    ``round`` and ``attempt`` are those of ``DECLINED``, ``HELD`` and ``TRAINING``, ``code`` (one of ``DECLINE_CODES``)
    that of ``DECLINED``; ``rows`` is that of ``FITS``, in the form of the study's counts; ``estimate_s`` that of
    ``TRAINING``, the seconds until it ends.
    """

    study: str
    revision: int
    digest: str
    status: SiteStatus
    round: int = 0
    attempt: int = 0
    code: str = ""
    rows: int = 0
    estimate_s: int = 0

    @classmethod
    def from_message(cls, message: pb.DeclareRequest) -> "Declaration | None":
        """None for a status that this version does not know; a code that it does not know is ``DECLINED_UNKNOWN``.

        Raises:
            BadData: MESSAGE_MALFORMED, no status, or a code with which nobody declines.
        """
        code = pb.RefusalCode.Name(message.code) if message.code in pb.RefusalCode.values() else DECLINED_UNKNOWN
        if not message.status:
            raise BadData("the declaration has no status", code="MESSAGE_MALFORMED")
        if message.status not in pb.SiteStatus.values():
            return None
        status = SiteStatus(pb.SiteStatus.Name(message.status).lower())
        if status == SiteStatus.DECLINED and code not in DECLINE_CODES:
            raise BadData("the declaration declines with a code that is not for that", code="MESSAGE_MALFORMED")
        return cls(
            message.study, message.revision, message.digest.hex(), status, message.round, message.attempt,
            code if status == SiteStatus.DECLINED else "", message.rows if status == SiteStatus.FITS else 0,
            message.estimate_s if status == SiteStatus.TRAINING else 0,
        )  # fmt: skip

    def to_message(self) -> pb.DeclareRequest:
        return pb.DeclareRequest(
            study=self.study, revision=self.revision, digest=bytes.fromhex(self.digest), status=self.status.upper(),
            round=self.round, attempt=self.attempt, code=self.code or "REFUSAL_UNSPECIFIED", rows=self.rows,
            estimate_s=self.estimate_s,
        )  # fmt: skip


def _misshapen() -> BadData:
    return BadData("the coordinator's assignment has not its form", code="MESSAGE_MALFORMED")
