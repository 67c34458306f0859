"""A study's life as a state machine without I/O: what happened goes in, what to do next comes out.

    created ──start──▶ waiting ──all ready, or deadline and quorum──▶ running ──after the closing round──▶ finished
                          ▲                                            │   ▲
                          └──────start, too few ready──── paused ◀─────┘   └──start
    stopped: by the operator. Nothing that a site sends ends a study: what it spoils is left out, or the study pauses.

A round is open until every site that was asked has answered, or until its deadline. It closes when enough answers are
accepted updates; else it is tried once more, and then the study pauses. An accepted update has a receipt, so it counts:
a further attempt at the round keeps it and asks only the others. An update that cannot be averaged is left out by name,
and the round goes on if enough are left; what fails in the coordinator itself pauses the study. After the last round
comes one that only validates.

Time is a number of seconds on any clock that does not jump; the caller brings it, and who is connected.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

from pydantic import TypeAdapter

ATTEMPTS = 2  # of a round, before the study pauses
GRACE_S = 60.0  # after a restart a deadline is at least this far away: the sites must first come back


class Phase(StrEnum):
    CREATED = "created"
    WAITING = "waiting"
    RUNNING = "running"
    PAUSED = "paused"
    FINISHED = "finished"
    STOPPED = "stopped"


ENDED = (Phase.FINISHED, Phase.STOPPED)


class Kind(StrEnum):
    """What a site that was asked did."""

    ACCEPTED = "accepted"
    REFUSED = "refused"
    DECLINED = "declined"
    WITHDRAWN = "withdrawn"
    LEFT_OUT = "left_out"  # it was accepted, has its receipt, and could not be averaged; the code says why


class Outcome(StrEnum):
    """How an attempt at a round ended."""

    CLOSED = "closed"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(frozen=True)
class Rules:
    """What the study file says about time and numbers."""

    sites: tuple[str, ...]
    rounds: int
    needed: int
    round_deadline_s: float
    start_deadline_s: float


@dataclass(frozen=True)
class Answer:
    """``code`` is a name of RefusalCode where a site or the coordinator said no; ``upload`` an id in hex."""

    kind: Kind
    code: str = ""
    upload: str = ""


@dataclass(frozen=True)
class Round:
    """One attempt at a round. ``closing`` is the round after the last: validate, and send no tensors."""

    number: int
    attempt: int
    asked: tuple[str, ...]
    answers: Mapping[str, Answer]
    deadline: float
    closing: bool = False

    @property
    def accepted(self) -> tuple[str, ...]:
        """In site order."""
        return tuple(site for site in sorted(self.answers) if self.answers[site].kind == Kind.ACCEPTED)

    @property
    def unanswered(self) -> tuple[str, ...]:
        return tuple(site for site in self.asked if site not in self.answers)


@dataclass(frozen=True)
class Life:
    """All that a study's future depends on.

    Attributes:
        models: the number of the newest model; model 0 is the initial one.
        ready: the sites that approved this revision and did not withdraw.
        missed: the sites that did not answer when they were last asked.
        round: the attempt under way, also while it is aggregated.
        last: the attempt before it, for those who ask how it went.
        tries: attempts at the present round since the study was last started.
        why: in words of our own, why the study paused.
    """

    phase: Phase = Phase.CREATED
    models: int = 0
    ready: frozenset[str] = frozenset()
    missed: frozenset[str] = frozenset()
    round: Round | None = None
    aggregating: bool = False
    last: Round | None = None
    tries: int = 0
    start_by: float = 0.0
    why: str = ""

    @property
    def next_deadline(self) -> float | None:
        """When ``Clock`` must come at the latest; None when nothing waits for time."""
        if self.phase == Phase.WAITING:
            return self.start_by
        if self.phase == Phase.RUNNING and self.round and not self.aggregating:
            return self.round.deadline
        return None

    def document(self) -> dict[str, Any]:
        """Plain JSON for the store."""
        return {**asdict(self), "ready": sorted(self.ready), "missed": sorted(self.missed)}

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> "Life":
        """What ``document`` gave. Raises ValueError: it is not that."""
        return _LIFE.validate_python(document)


_LIFE = TypeAdapter(Life)


# What happened.


@dataclass(frozen=True)
class Ready:
    site: str


@dataclass(frozen=True)
class Gone:
    """The site withdrew, or was revoked."""

    site: str
    code: str


@dataclass(frozen=True)
class Answered:
    """An answer in the round and attempt that are open. The caller has checked that the site was asked.

    While the round is averaged none is taken: the model that is being made is of the round as it was.
    """

    site: str
    answer: Answer


@dataclass(frozen=True)
class Start:
    pass


@dataclass(frozen=True)
class Stop:
    pass


@dataclass(frozen=True)
class Aggregated:
    """The round's model is durable. ``left_out``: accepted updates that are not in it, site -> code."""

    left_out: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Unusable:
    """Without the updates ``left_out`` (site -> code) too few are left; ``why`` says it in words of our own."""

    why: str
    left_out: Mapping[str, str]


@dataclass(frozen=True)
class Halted:
    """Something in the coordinator failed that another attempt would not mend: a person must look."""

    why: str


@dataclass(frozen=True)
class Clock:
    """Only time went by, or someone connected."""


@dataclass(frozen=True)
class Restarted:
    """The process began again ``away_s`` seconds after it last wrote this life; old times mean nothing now."""

    away_s: float
    round_left_s: float  # until the round's deadline when the life was written
    start_left_s: float


Event = Ready | Gone | Answered | Start | Stop | Aggregated | Unusable | Halted | Clock | Restarted


@dataclass(frozen=True)
class Now:
    time: float
    connected: frozenset[str] = field(default_factory=frozenset)


# What to do.


@dataclass(frozen=True)
class Opened:
    """Tell the sites of this attempt that have not answered."""

    round: Round


@dataclass(frozen=True)
class Aggregate:
    """Make the next model of the accepted updates, then send ``Aggregated``, ``Unusable`` or ``Halted``."""

    round: Round


@dataclass(frozen=True)
class Closed:
    """Record how an attempt ended."""

    round: Round
    outcome: Outcome


@dataclass(frozen=True)
class Tell:
    """Tell the ready sites that the study is in this phase now."""

    phase: Phase


Action = Opened | Aggregate | Closed | Tell


def advance(life: Life, rules: Rules, event: Event, now: Now) -> tuple[Life, tuple[Action, ...]]:
    """The life after ``event``, and what to do about it, in order. The same input gives the same output."""
    actions: list[Action] = []
    life = _recorded(life, rules, event, now, actions)
    while True:
        settled = _settled(life, rules, now, actions)
        if settled is life:
            return life, tuple(actions)
        life = settled


def _recorded(life: Life, rules: Rules, event: Event, now: Now, actions: list[Action]) -> Life:
    """Write down what happened; draw no conclusion yet."""
    match event:
        case Ready(site):
            return replace(life, ready=life.ready | {site})
        case Gone(site, code):
            life = replace(life, ready=life.ready - {site})
            if life.round and not life.aggregating and site in life.round.unanswered:
                life = _answered(life, site, Answer(Kind.WITHDRAWN, code))
            return life
        case Answered(site, answer) if life.round and not life.aggregating:
            return _answered(life, site, answer)
        case Start() if life.phase in (Phase.CREATED, Phase.PAUSED):
            start_by = now.time + rules.start_deadline_s
            return replace(life, phase=Phase.WAITING, start_by=start_by, tries=0, why="")
        case Stop() if life.phase not in ENDED:
            if life.round:
                actions.append(Closed(life.round, Outcome.STOPPED))
            actions.append(Tell(Phase.STOPPED))
            return replace(
                life, phase=Phase.STOPPED, round=None, aggregating=False, last=life.round or life.last, why=""
            )
        case Aggregated(left_out) if life.round and life.aggregating:
            return _closed(replace(_without(life, left_out), models=life.round.number), actions)
        case Unusable(why, left_out) if life.round and life.aggregating:
            return _failed(replace(_without(life, left_out), aggregating=False), actions, why)
        case Halted(why) if life.phase in (Phase.WAITING, Phase.RUNNING):
            if life.round:
                actions.append(Closed(life.round, Outcome.FAILED))
            actions.append(Tell(Phase.PAUSED))
            return halted(life, why)
        case Restarted():
            return _restarted(life, rules, event, now, actions)
    return life


def _settled(life: Life, rules: Rules, now: Now, actions: list[Action]) -> Life:
    """The next conclusion from what is known; the same object when there is none."""
    if life.phase == Phase.WAITING:
        return _begun(life, rules, now, actions)
    if life.phase != Phase.RUNNING or life.aggregating:
        return life
    if life.round is None:
        return _opened(life, rules, now, actions)
    if life.round.unanswered and now.time < life.round.deadline:
        return life
    if life.round.closing:
        return _finished(life, actions)
    if len(life.round.accepted) >= rules.needed:
        actions.append(Aggregate(life.round))
        return replace(life, aggregating=True)
    return _failed(life, actions)


def _begun(life: Life, rules: Rules, now: Now, actions: list[Action]) -> Life:
    """Waiting ends when all are ready. At the deadline, and when a round was open before, the quorum is enough."""
    enough = len(life.ready) >= rules.needed
    if set(rules.sites) <= life.ready or (enough and (life.last or now.time >= life.start_by)):
        return replace(life, phase=Phase.RUNNING)
    if now.time >= life.start_by:
        actions.append(Tell(Phase.PAUSED))
        said = f"{len(life.ready)} of the {rules.needed} sites that it needs were ready at the start deadline"
        return replace(life, phase=Phase.PAUSED, why=said)
    return life


def _opened(life: Life, rules: Rules, now: Now, actions: list[Action]) -> Life:
    """Open the next attempt: whoever is ready is asked, but for those that missed the last one and are still away."""
    number, closing = life.models + 1, life.models == rules.rounds
    before = life.last if life.last and life.last.number == number else None
    kept = {site: before.answers[site] for site in before.accepted} if before else {}
    candidates = life.ready - (life.missed - now.connected)
    if not closing and len(candidates | kept.keys()) < rules.needed:
        candidates = life.ready  # only with those that are away can the quorum be met: give them the time
    if not closing and len(candidates | kept.keys()) < rules.needed:
        actions.append(Tell(Phase.PAUSED))
        said = f"{len(life.ready)} of the {rules.needed} sites that it needs are ready"
        return replace(life, phase=Phase.PAUSED, why=said)
    opened = Round(
        number=number,
        attempt=before.attempt + 1 if before else 1,
        asked=tuple(sorted(candidates | kept.keys())),
        answers=kept,
        deadline=now.time + rules.round_deadline_s,
        closing=closing,
    )
    actions.append(Opened(opened))
    return replace(life, round=opened, tries=life.tries + 1)


def _closed(life: Life, actions: list[Action]) -> Life:
    assert life.round
    actions.append(Closed(life.round, Outcome.CLOSED))
    return replace(life, round=None, aggregating=False, last=life.round, missed=_missed(life, life.round), tries=0)


def _finished(life: Life, actions: list[Action]) -> Life:
    """The closing round needs no quorum: whoever validated the last model has judged it."""
    life = replace(_closed(life, actions), phase=Phase.FINISHED)
    actions.append(Tell(Phase.FINISHED))
    return life


def _failed(life: Life, actions: list[Action], why: str = "") -> Life:
    """``why``: what to say if that was the last attempt; "" where too few updates were accepted."""
    assert life.round
    actions.append(Closed(life.round, Outcome.FAILED))
    life = replace(life, round=None, last=life.round, missed=_missed(life, life.round))
    if life.tries < ATTEMPTS:
        return life
    assert life.last
    actions.append(Tell(Phase.PAUSED))
    said = why or f"round {life.last.number} had too few accepted updates, {life.last.attempt} times"
    return replace(life, phase=Phase.PAUSED, why=said)


def halted(life: Life, why: str) -> Life:
    """Paused, with what was accepted kept for the next attempt."""
    return replace(life, phase=Phase.PAUSED, round=None, aggregating=False, last=life.round or life.last, why=why)


def _without(life: Life, left_out: Mapping[str, str]) -> Life:
    for site, code in left_out.items():
        assert life.round
        life = _answered(life, site, replace(life.round.answers[site], kind=Kind.LEFT_OUT, code=code))
    return life


def _missed(life: Life, ended: Round) -> frozenset[str]:
    """Who did not answer when last asked: a site that was not asked this time is still as it was."""
    return (life.missed - set(ended.asked)) | set(ended.unanswered)


def _answered(life: Life, site: str, answer: Answer) -> Life:
    assert life.round
    return replace(life, round=replace(life.round, answers={**life.round.answers, site: answer}))


def _restarted(life: Life, rules: Rules, event: Restarted, now: Now, actions: list[Action]) -> Life:
    """Deadlines go on from where they were, by the wall's clock, but leave the sites time to come back."""

    def left(before_s: float, full_s: float) -> float:
        return now.time + min(max(before_s - event.away_s, min(GRACE_S, full_s)), full_s)

    life = replace(life, start_by=left(event.start_left_s, rules.start_deadline_s))
    if life.round is None:
        return life
    if life.aggregating:
        actions.append(Aggregate(life.round))
        return life
    return replace(life, round=replace(life.round, deadline=left(event.round_left_s, rules.round_deadline_s)))


def site_states(
    life: Life, rules: Rules, busy: frozenset[str] = frozenset(), held: frozenset[str] = frozenset()
) -> dict[str, str]:
    """Each site in one word: waiting, training, held, uploaded, accepted, refused, declined, late or absent.

    ``busy`` are the sites whose update is complete here and not yet judged, ``held`` those where it waits for a person.
    """
    return {site: _site_state(site, life, busy, held) for site in rules.sites}


def _site_state(site: str, life: Life, busy: frozenset[str], held: frozenset[str]) -> str:
    shown = life.round or life.last
    answer = shown.answers.get(site) if shown else None
    if answer and answer.kind != Kind.WITHDRAWN:
        return "held" if answer.code == "DECLINED_HELD" else answer.kind.value
    if shown is None or life.phase in (Phase.CREATED, Phase.WAITING):
        return "waiting"
    if site not in life.ready:
        return "absent"
    if site in shown.asked:
        if life.round is None or life.aggregating:
            return "late"
        if site in busy:
            return "uploaded"
        return "held" if site in held else "training"
    return "late" if site in life.missed else "waiting"
