"""Which sites are in a round of the lab's federation: sampled, away or late, as a coordinator would see them; or bad.

    asked    a sample of the study's sites, drawn for each round
    away     asked, and gives no answer: it does not train
    late     its answer comes after the round's deadline: it has trained in vain. Its update is in no model, and what
             it changed at the site is forgotten, as a hospital forgets it when an update is refused

A round closes with the study's quorum of updates. Where they are too few, those that are missing are asked once more;
what came in time is kept, and what was late may come in time for the second attempt. Then a coordinator would pause.
Every draw is from a stream of its own (seed, site, round), so that one site's chance changes nobody else's. No torch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

from fl_algorithms.lab.attacks import Attack
from fl_algorithms.streams import stream_seed
from fl_algorithms.study import ResolvedStudy
from wardround.errors import BadData, UsageProblem
from wardround.signing import canonical

ATTEMPTS = 2  # of a round, as at the coordinator
STREAM = 2.0**63
NUMBERS = ("sample", "dropout", "delay_s", "delay_spread")


@dataclass(frozen=True)
class Attendance:
    """Who was in a round. Each tuple is in the order of the study's sites.

    Attributes:
        accepted: their updates are averaged.
        late: their updates came after the last deadline.
        away: they were asked and gave no answer.
        attempts: how often sites were asked.
    """

    asked: tuple[str, ...]
    accepted: tuple[str, ...]
    late: tuple[str, ...] = ()
    away: tuple[str, ...] = ()
    attempts: int = 1

    def status(self, site: str) -> str:
        """One word for a site: averaged, late, away or idle (not asked)."""
        for word, sites in (("averaged", self.accepted), ("late", self.late), ("away", self.away)):
            if site in sites:
                return word
        return "idle"


@dataclass(frozen=True)
class Participation:
    """How sites take part. The default is that every site answers every round.

    Attributes:
        sample: share of the sites that a round asks, rounded up.
        dropout: the chance that a site that is asked gives no answer.
        delay_s: the median of the seconds until an answer; 0: at once.
        delay_spread: standard deviation of the logarithm of these seconds.
        attack: which sites are bad, and how.
        masked: whether sites of a study with secure aggregation run its whole protocol; the sums are the same.
    """

    sample: float = 1.0
    dropout: float = 0.0
    delay_s: float = 0.0
    delay_spread: float = 1.0
    attack: Attack | None = None
    masked: bool = False

    def __post_init__(self) -> None:
        for what, value, fits, wanted in (
            ("sample", self.sample, 0 < self.sample <= 1, "above 0 and at most 1"),
            ("dropout", self.dropout, 0 <= self.dropout < 1, "at least 0 and below 1"),
            ("delay_s", self.delay_s, 0 <= self.delay_s < math.inf, "a number of seconds, at least 0"),
            ("delay_spread", self.delay_spread, 0 <= self.delay_spread <= 10, "at least 0 and at most 10"),
        ):
            if not fits:
                raise UsageProblem(f"`{what}` is {value:g}, not {wanted}")

    @property
    def everyone(self) -> bool:
        """Whether every site is in every round, whatever the seed."""
        return self.sample == 1 and not self.dropout and not self.delay_s

    def document(self) -> dict[str, Any]:
        """Plain JSON, numbers as text."""
        numbers = {name: repr(float(getattr(self, name))) for name in NUMBERS}
        if self.masked:
            numbers["masked"] = "yes"
        if self.attack is None:
            return numbers
        return {**numbers, "attack": canonical.with_text_floats(self.attack.model_dump(mode="json"))}

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> "Participation":
        attack = document.get("attack")
        numbers = {name: float(document[name]) for name in NUMBERS}
        masked = document.get("masked") == "yes"
        return cls(**numbers, attack=None if attack is None else Attack.model_validate(attack), masked=masked)

    def asks(self, sites: int) -> int:
        """How many of ``sites`` a round asks."""
        return max(1, math.ceil(self.sample * sites - 1e-9))

    def refuse_unfit(self, study: ResolvedStudy) -> None:
        """Raises UsageProblem: a round asks fewer sites than the study needs, or attack or masks are none for it."""
        sites, needed = len(study.study.trainers), study.study.needed
        if self.masked and study.secure_aggregation is None:
            raise UsageProblem(
                "`--masked` is for a study with secure aggregation, and this one has none",
                hint="`--set secure_aggregation.range=1.0` gives it that table for one run",
            )
        if self.attack is not None:
            self.attack.refuse_unfit(study)
        if self.asks(sites) < needed:
            raise UsageProblem(
                f"a round asks {self.asks(sites)} of the {sites} sites, and the study needs {needed} updates",
                hint=f"a smaller quorum: `--set study.quorum={self.asks(sites)}`; or a larger `sample`",
            )

    def attendance(
        self, sites: Sequence[str], *, seed: int, round_number: int, needed: int, deadline_s: float
    ) -> Attendance:
        """Who is in round ``round_number``.

        Args:
            sites: the study's.
            seed: the study's.
            needed: updates that close the round.
            deadline_s: of an attempt.

        Raises:
            BadData: too few updates in every attempt: a coordinator would pause the study.
        """
        asked = self._sampled(sites, seed, round_number)
        accepted: set[str] = set()
        trained: set[str] = set()
        for attempt in range(1, ATTEMPTS + 1):
            for site in asked:
                if site not in trained and self._uniform(seed, site, round_number, f"away.{attempt}") < self.dropout:
                    continue
                trained.add(site)
                if self._delay(seed, site, round_number) <= attempt * deadline_s:
                    accepted.add(site)
            if len(accepted) >= needed:
                return Attendance(
                    asked,
                    tuple(site for site in asked if site in accepted),
                    tuple(site for site in asked if site in trained - accepted),
                    tuple(site for site in asked if site not in trained),
                    attempt,
                )
        raise BadData(
            f"round {round_number}: {len(accepted)} updates were in time, {ATTEMPTS} times; the study needs {needed}",
            hint="a coordinator would pause here: a smaller quorum, a longer `round_deadline_s` in [study], or fewer "
            "sites that are away or late",
        )

    def _sampled(self, sites: Sequence[str], seed: int, round_number: int) -> tuple[str, ...]:
        drawn = sorted(sites, key=lambda site: stream_seed(seed, site, round_number, "participation.sample"))
        chosen = set(drawn[: self.asks(len(sites))])
        return tuple(site for site in sites if site in chosen)

    def _delay(self, seed: int, site: str, round_number: int) -> float:
        """Seconds until the site's answer, of a log-normal distribution."""
        if not self.delay_s:
            return 0.0
        place = (self._uniform(seed, site, round_number, "delay") * STREAM + 0.5) / (STREAM + 1)  # never 0 or 1
        return self.delay_s * math.exp(self.delay_spread * NormalDist().inv_cdf(min(place, 1 - 1e-16)))

    @staticmethod
    def _uniform(seed: int, site: str, round_number: int, purpose: str) -> float:
        return stream_seed(seed, site, round_number, f"participation.{purpose}") / STREAM


EVERYONE = Participation()
