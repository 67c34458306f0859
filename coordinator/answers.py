"""What the coordinator answers its commands, one record for each answer, and how it stands on the control socket.

``document()`` is also what ``--json`` prints. Light enough for a command's start: no gRPC, no database, no numpy.
"""

from collections.abc import Mapping
from typing import Self

from pydantic import JsonValue, ValidationError

from wardround.errors import Unavailable
from wardround.records.schema import Strict


class Answer(Strict):
    """What all answers have in common."""

    def document(self) -> dict[str, JsonValue]:
        """Plain JSON; ``from_document`` reads it."""
        return self.model_dump(mode="json")

    @classmethod
    def from_document(cls, document: object) -> Self:
        """What ``document()`` gave. Raises Unavailable: it is no such answer, the service is of another version."""
        try:
            return cls.model_validate(document)
        except ValidationError:
            raise Unavailable(
                "the running service gave an answer that this command does not know",
                hint="the service and the command are of different versions: restart the service",
            ) from None


class InvitationMade(Answer):
    """A new invitation, as the line that the site uses.

    Attributes:
        expires: until when it can be used (UTC).
        replaces: the site is enrolled; using the invitation replaces its identity.
    """

    invitation: str
    expires: str
    replaces: bool


class SiteRow(Answer):
    """One site in the list of sites.

    Attributes:
        state: invited, enrolled (and not connected), connected, ready (approved a study that goes on) or revoked.
        certificate_expires: when its newest certificate does (UTC).
        last_seen: when it last connected or disconnected (UTC).
        certificate_fork_since: since when two machines hold its keys (UTC).
        copied_since: since when two programs with its identity were connected in turn (UTC).
        ledger_key: SHA-256 fingerprint of the key that signs its ledger.
    """

    site: str
    state: str
    certificate_expires: str | None = None
    last_seen: str | None = None
    certificate_fork_since: str | None = None
    copied_since: str | None = None
    ledger_key: str | None = None


class SiteList(Answer):
    """Every site. ``receipt_key`` is the fingerprint of the key that signs receipts."""

    sites: tuple[SiteRow, ...]
    receipt_key: str


class Revoked(Answer):
    """A site that is refused from now on. ``was_enrolled``: until now it had valid certificates."""

    site: str
    was_enrolled: bool


class StudyCreated(Answer):
    """A study that its sites are offered. ``new``: False where it was known with exactly this content.

    Attributes:
        bytes_per_round: of the largest update.
        not_enrolled: its sites that have not enrolled, or were revoked.
    """

    id: str
    revision: int
    study_digest: str
    initial_digest: str
    bytes_per_round: int
    new: bool
    not_enrolled: tuple[str, ...]


class StudyRow(Answer):
    """A study in the list of studies.

    Attributes:
        round: of its newest model. archived: no site is told of it.
        sites: how many it lists. approved: how many of these approved this revision and did not withdraw.
        why: why it paused, "" otherwise.
    """

    id: str
    revision: int
    state: str
    round: int
    rounds: int
    archived: bool
    title: str = ""
    sites: int = 0
    approved: int = 0
    why: str = ""


class StudyList(Answer):
    """The studies of a coordinator, by their names."""

    studies: tuple[StudyRow, ...]


class Changed(Answer):
    """Something is not as it was: a study, or who is connected. ``times``: how often since the watch began."""

    times: int


class StudyRenewed(Answer):
    """A new revision of a study. ``model``: the round of the old one that it begins from, 0 for its first model."""

    id: str
    revision: int
    study_digest: str
    model: int
    rounds: int


class StudyEdited(StudyRenewed):
    """A new revision of a study with other settings.

    Attributes:
        changes: the settings that are others, as ``study.rounds: 20 -> 30``.
        approve_again: the sites that had approved the revision before. approve_first: the others.
        gone: the sites that are not in it any more.
        started: it waits for its sites, for the one before was waiting or running.
    """

    changes: tuple[str, ...]
    approve_again: tuple[str, ...]
    approve_first: tuple[str, ...]
    gone: tuple[str, ...]
    started: bool


class SnapshotMade(Answer):
    """A folder in the state directory with all that a backup is made of beside keys and settings.

    Attributes:
        made_s: Unix time of the copy.
        models: their digests. uploads: each accepted update's id, and its manifest's digest.
    """

    folder: str
    made_s: int
    federation: str
    models: tuple[str, ...]
    uploads: Mapping[str, str]


class BestRound(Answer):
    """The round of the best global model, its mean validation loss, and the model's digest."""

    round: int
    val_loss: float
    digest: str


class SiteFit(Answer):
    """What a site said of its data: whether it fits, and its rows in the form of the study's counts.

    ``said``: when it was (UTC).
    """

    fits: bool
    rows: int
    said: str


class SiteStatus(Answer):
    """A site in a study.

    Attributes:
        state: see ``site_states``. ``code``: why it was refused or declined, "" otherwise.
        ready: it approved this revision, and did not withdraw.
        rounds_contributed: the rounds whose model has its update in it.
        rounds_left_out: the rounds in which its update was accepted, and the model was made without it.
        rounds_capped: the rounds in which its update counted for less than its rows.
        evaluates: nothing is trained there; rounds_evaluated: the rounds whose model, as it began, it has judged.
        rounds_late: the rounds in which it was asked and did not answer in time.
        always_late: it was late in each of the last three rounds in which it was asked.
        expected: when it expects to have trained the open round (UTC), as it says; None where it has not said.
        expects_to_be_late: that is after the round's deadline.
        connected: it is connected now.
        fit: what it last said of its data; None where it said nothing.
        seconds: from a round's opening to its accepted update, the median of the last rounds; None before the first.
        slow: it takes more than twice as long as the other sites do.
        absences: how often it was asked and is not in the model, by the reason: "late", or what it answered and the
            code, such as "declined DECLINED_DATA_CHANGED".
        attempts_spent: the round has been asked more often than a site approves, so it declines every further attempt.
    """

    state: str
    code: str
    ready: bool
    rounds_contributed: tuple[int, ...]
    rounds_left_out: tuple[int, ...]
    rounds_capped: tuple[int, ...]
    evaluates: bool = False
    rounds_evaluated: tuple[int, ...] = ()
    rounds_late: tuple[int, ...] = ()
    always_late: bool = False
    expected: str | None = None
    expects_to_be_late: bool = False
    connected: bool = False
    fit: SiteFit | None = None
    seconds: float | None = None
    slow: bool = False
    absences: Mapping[str, int] = {}
    attempts_spent: bool = False


class StudyStatus(Answer):
    """How a study stands.

    Attributes:
        why: why it paused, "" otherwise. deadline: of the round that is open (UTC).
        incomplete: of a finished study, the sites that are not in every round.
        attempts_left: how often the present round can still be asked before the sites' consents are spent.
    """

    id: str
    title: str
    state: str
    why: str
    round: int
    rounds: int
    attempt: int
    closing: bool
    revision: int
    study_digest: str
    model_digest: str
    best: BestRound | None
    sites: Mapping[str, SiteStatus]
    incomplete: tuple[str, ...]
    deadline: str | None = None
    attempts_left: int = 0
    step: str = ""  # with secure aggregation, where the attempt under way is; and who has not done it yet
    awaited: tuple[str, ...] = ()


class StudyFits(Answer):
    """Whose data fits a study; None of a site that has not said it. ``counts``: the form of the rows."""

    id: str
    revision: int
    counts: str
    sites: Mapping[str, SiteFit | None]


class RefusedUpload(Answer):
    """An upload that was refused, and why. ``tensor`` names the one that is to blame, if one is."""

    round: int
    attempt: int
    code: str
    tensor: str


class Absence(Answer):
    """An attempt at a round in which a site was asked and is not in the model.

    Attributes:
        why: late, refused, declined, withdrawn or left_out.
        code, tensor: as of ``RefusedUpload``; "" of one that was late.
    """

    round: int
    attempt: int
    why: str
    code: str = ""
    tensor: str = ""


class SiteReport(SiteStatus):
    """A site in a study's report.

    Attributes:
        bytes_received: of the payloads of all its uploads.
        absent: the attempts in which it was asked and is not in the model, in their order.
    """

    bytes_received: int
    refused: tuple[RefusedUpload, ...]
    absent: tuple[Absence, ...] = ()


class SiteAnswer(Answer):
    """What a site that was asked did: refused, declined, withdrawn or left out, and the code that says why."""

    answer: str
    code: str
    tensor: str


class AcceptedUpdate(SiteAnswer):
    """An accepted update, with the numbers that the site reported.

    ``seconds``: from the opening of its attempt to the verdict; None of an answer of a program that did not tell it.
    """

    attempt: int
    num_examples: int
    num_validation: int
    metrics: Mapping[str, str]
    update_digest: str
    seconds: float | None = None


class AttemptReport(Answer):
    """One attempt at a round.

    Attributes:
        seconds: from its opening to its close; None while it is open.
        contributors: the sites whose update counts.
        unanswered: the sites that were asked and did not answer before it closed.
        val_loss: the mean validation loss of the model that the sites downloaded, see ``StudyReport.best_rule``.
        norms, limits, shares, capped, left_out, metrics: see ``fl_algorithms.server.limits.Account``.
    """

    round: int
    attempt: int
    closing: bool
    outcome: str
    opened: str
    closed: str | None
    seconds: float | None
    asked: tuple[str, ...]
    contributors: tuple[str, ...]
    unanswered: tuple[str, ...]
    answers: Mapping[str, AcceptedUpdate | SiteAnswer]
    base_digest: str
    model_digest: str | None
    val_loss: float | None
    norms: Mapping[str, float]
    limits: Mapping[str, float]
    shares: Mapping[str, float]
    capped: tuple[str, ...]
    left_out: Mapping[str, str]
    metrics: Mapping[str, float] = {}


class TensorRow(Answer):
    """One tensor of the model."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class StudyReport(StudyStatus):
    """All that is known of a study: its status, and every attempt at every round.

    Attributes:
        limits: how much one site may move the model, in words.
        best_rule: which model is the best global one, in words; "" where a study has no one global model.
        rounds_closed: of the attempts, those that made a model.
        study: the resolved study file.
    """

    sites: Mapping[str, SiteReport]
    federation: str
    created: str
    told_at: str
    algorithm: str
    model: str
    quorum: int
    limits: tuple[str, ...]
    best_rule: str
    initial_digest: str
    bytes_per_update: int
    tensors: tuple[TensorRow, ...]
    rounds_closed: tuple[AttemptReport, ...]
    attempts: tuple[AttemptReport, ...]
    study: dict[str, JsonValue]
