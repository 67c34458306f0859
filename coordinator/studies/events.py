"""What happens to a study, and what is to be done about it; ``lifecycle.advance`` says what follows from what."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from coordinator.studies.state import Answer, Outcome, Phase, Round, Step

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
class Expected:
    """A site that trains says how long it will still take."""

    site: str
    round_number: int
    attempt: int
    left_s: float


@dataclass(frozen=True)
class Told:
    """A site did what a step of secure aggregation wants. ``is_open``: what was opened is enough for the sum."""

    site: str
    step: Step
    is_open: bool = False


@dataclass(frozen=True)
class Unwilling:
    """A site does not sign or open the set that was chosen."""

    site: str
    code: str


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
    """The process began again ``away_s`` seconds after it last wrote this state; old times mean nothing now."""

    away_s: float
    round_left_s: float  # until the round's deadline when the state was written
    start_left_s: float


Event = (
    Ready
    | Gone
    | Answered
    | Expected
    | Told
    | Unwilling
    | Start
    | Stop
    | Aggregated
    | Unusable
    | Halted
    | Clock
    | Restarted
)


@dataclass(frozen=True)
class Now:
    """``arriving``: the sites whose update of the attempt under way is being received."""

    time: float
    connected: frozenset[str] = field(default_factory=frozenset)
    arriving: frozenset[str] = field(default_factory=frozenset)


# What to do.


@dataclass(frozen=True)
class Opened:
    """Tell the sites of this attempt that have not answered."""

    round: Round


@dataclass(frozen=True)
class Entered:
    """An attempt with secure aggregation is in another step: show its sites what follows from the one before."""

    round: Round


@dataclass(frozen=True)
class Resumed:
    """An attempt whose set was chosen goes on after a pause: show its sites again what they were shown."""

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


Action = Opened | Entered | Resumed | Aggregate | Closed | Tell
