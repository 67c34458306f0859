"""What is known of a study's course: its rules, its rounds with the sites' answers, and its state as a whole.

All of it is immutable. ``coordinator.studies.lifecycle`` says how one state follows from another.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any

from pydantic import TypeAdapter


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
    EVALUATED = "evaluated"  # a site that only evaluates has judged the round's model; it is in no model
    REFUSED = "refused"
    DECLINED = "declined"
    WITHDRAWN = "withdrawn"
    LEFT_OUT = "left_out"  # it was accepted, has its receipt, and could not be averaged; the code says why


class Step(StrEnum):
    """Where an attempt with secure aggregation is; one without is training all the time."""

    KEYS = "keys"  # the sites tell their keys
    SHARES = "shares"  # they deal shares
    TRAINING = "training"  # their updates come
    AGREEMENT = "agreement"  # the set is chosen, and they sign it
    OPENING = "opening"  # enough have signed, and they open it


class Outcome(StrEnum):
    """How an attempt at a round ended."""

    CLOSED = "closed"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(frozen=True)
class Rules:
    """What the study file says about time and numbers.

    Attributes:
        evaluators: the sites that only evaluate: asked in each round, and never counted.
        threshold: how many must agree before a sum is opened; 0 without secure aggregation.
        measured: a round's deadline follows from how long its sites took before.
        finish_late: an update that is on its way at the deadline may arrive.
    """

    sites: tuple[str, ...]
    rounds: int
    needed: int
    round_deadline_s: float
    start_deadline_s: float
    measured: bool = False
    finish_late: bool = False
    evaluators: frozenset[str] = frozenset()
    threshold: int = 0


@dataclass(frozen=True)
class Answer:
    """``code`` is a name of RefusalCode where a site or the coordinator said no; ``upload`` an id in hex."""

    kind: Kind
    code: str = ""
    upload: str = ""

    @cached_property
    def document(self) -> dict[str, Any]:
        """Plain JSON, made once: a study is written down at each answer, with those that came before."""
        return {"kind": self.kind.value, "code": self.code, "upload": self.upload}


@dataclass(frozen=True)
class Round:
    """One attempt at a round. ``closing`` is the round after the last: validate, and send no tensors.

    ``expected``: when a site that trains expects to be done, as it says. With secure aggregation there is more:

    Attributes:
        step: where the attempt is; ``step_by``: when keys or shares are closed.
        told: the sites that have done what the step wants.
        group: of whom keys, then shares have come in time; empty before.
        unwilling: site -> the code with which it does not sign or open.
        is_open: what was opened is enough for the sum.
    """

    number: int
    attempt: int
    asked: tuple[str, ...]
    answers: Mapping[str, Answer]
    deadline: float
    closing: bool = False
    opened: float = field(default=0.0, compare=False)
    expected: Mapping[str, float] = field(default_factory=dict, compare=False)
    step: Step = Step.TRAINING
    step_by: float = field(default=0.0, compare=False)
    told: tuple[str, ...] = ()
    group: tuple[str, ...] = ()
    unwilling: Mapping[str, str] = field(default_factory=dict, compare=False)
    is_open: bool = False

    @property
    def waits(self) -> bool:
        """Whether its set is chosen: it is neither void nor repeated any more, and takes no update."""
        return self.step in (Step.AGREEMENT, Step.OPENING)

    @property
    def awaited(self) -> tuple[str, ...]:
        """With secure aggregation: the sites that have not done yet what the step wants."""
        if self.waits:
            return tuple(site for site in self.group if site not in self.told)
        return tuple(site for site in self.unanswered if site not in self.told)

    @property
    def uploads(self) -> tuple[str, ...]:
        """The ids of its accepted updates."""
        return tuple(self.answers[site].upload for site in self.accepted)

    @property
    def accepted(self) -> tuple[str, ...]:
        """In site order."""
        return tuple(site for site in sorted(self.answers) if self.answers[site].kind == Kind.ACCEPTED)

    @property
    def unanswered(self) -> tuple[str, ...]:
        """Whose answer may still come."""
        return tuple(site for site in self.group or self.asked if site not in self.answers)

    @property
    def late(self) -> tuple[str, ...]:
        """Who was asked and has not answered."""
        return tuple(site for site in self.asked if site not in self.answers)

    @cached_property
    def document(self) -> dict[str, Any]:
        """Plain JSON, made once."""
        answers = {site: answer.document for site, answer in self.answers.items()}
        return {**vars(self), "asked": list(self.asked), "answers": answers}


@dataclass(frozen=True)
class StudyState:
    """All that a study's future depends on.

    Attributes:
        models: the number of the newest model; model 0 is the initial one.
        ready: the sites that approved this revision and did not withdraw.
        missed: the sites that did not answer when they were last asked.
        round: the attempt under way, also while it is aggregated.
        last: the attempt before it, for those who ask how it went.
        tries: attempts at the present round since the study was last started.
        took: site -> seconds to its accepted update, in each of the last rounds.
        why: in words of our own, why the study paused.
        summed: the attempts whose sum any member may still check.
    """

    phase: Phase = Phase.CREATED
    models: int = 0
    ready: frozenset[str] = frozenset()
    missed: frozenset[str] = frozenset()
    round: Round | None = None
    aggregating: bool = False
    last: Round | None = None
    tries: int = 0
    took: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    start_by: float = 0.0
    why: str = ""
    summed: tuple[Round, ...] = ()

    @property
    def open_round(self) -> Round | None:
        """The attempt in which answers are taken now."""
        return None if self.aggregating or (self.round and self.round.waits) else self.round

    @property
    def next_deadline(self) -> float | None:
        """When ``Clock`` must come at the latest; None when nothing waits for time."""
        if self.phase == Phase.WAITING:
            return self.start_by
        if self.phase != Phase.RUNNING or not self.round or self.aggregating:
            return None
        if self.round.step in (Step.KEYS, Step.SHARES):
            return min(self.round.step_by, self.round.deadline)
        return None if self.round.waits and not self.round.closing else self.round.deadline

    def document(self) -> dict[str, Any]:
        """Plain JSON for the store."""
        return {
            **vars(self),
            "ready": sorted(self.ready),
            "missed": sorted(self.missed),
            "round": self.round.document if self.round else None,
            "last": self.last.document if self.last else None,
            "summed": [one.document for one in self.summed],
        }

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> "StudyState":
        """What ``document`` gave. Raises ValueError: it is not that."""
        return _STATE.validate_python(document)


_STATE = TypeAdapter(StudyState)


def site_states(
    state: StudyState, rules: Rules, busy: frozenset[str] = frozenset(), held: frozenset[str] = frozenset()
) -> dict[str, str]:
    """Each site in one word: waiting, training, evaluating, held, uploaded, accepted, evaluated, refused, declined,
    late or absent.

    ``busy`` are the sites whose update is complete here and not yet judged, ``held`` those where it waits for a person.
    """
    states = {site: _site_state(site, state, busy, held) for site in rules.sites}
    return {
        site: "evaluating" if word == "training" and site in rules.evaluators else word for site, word in states.items()
    }


def _site_state(site: str, state: StudyState, busy: frozenset[str], held: frozenset[str]) -> str:
    shown = state.round or state.last
    answer = shown.answers.get(site) if shown else None
    if answer and answer.kind != Kind.WITHDRAWN:
        return "held" if answer.code == "DECLINED_HELD" else answer.kind.value
    if shown is None or state.phase in (Phase.CREATED, Phase.WAITING):
        return "waiting"
    if site not in state.ready:
        return "absent"
    if site in shown.asked:
        if state.round is None or state.aggregating or site not in state.round.unanswered or state.round.waits:
            return "late"
        if site in busy:
            return "uploaded"
        return "held" if site in held else "training"
    return "late" if site in state.missed else "waiting"
