"""How a study stands and what became of its rounds, as the coordinator answers it: the status, and the report.

Light enough for a command's start: no gRPC, no database, no numpy.
"""

from collections.abc import Mapping

from pydantic import JsonValue

from coordinator.answers import Answer


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
