"""Programs told to end at random instants, and how long each takes: `python -m tools.evidence_stops`.

Three sites train studies one after the other. Again and again SIGTERM goes to the coordinator, a gateway or a trainer,
at a random instant after its start: while it starts, connects, downloads, trains, uploads, waits, or begins a worker.
It must end with 0, or by the signal itself where it has only just begun, within a bound; then it is started again, as a
service manager would. Where ``py-spy`` is installed, what a program that does not end was doing is said. Prints a line
for each that took long and a JSON line with the 50th, 95th and 100th percentile of each part; exits 1 if one did not
end in time or with another code, or a study did not come out as if nothing had happened.
"""

import argparse
import datetime
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tools.evidence_year import Clock
from tools.faults import PARTS, Disturbed, Plan, Stuck, Template, undisturbed

BOUND_S = 40
LATEST_S = 12.0  # of the instant, after the start before
GOOD = (0, -signal.SIGTERM)


@dataclass
class Tally:
    """How long each part took to end, in seconds, and what was wrong."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    before_ready: int = 0
    wrong: list[str] = field(default_factory=list)

    @property
    def total(self) -> int:
        return sum(map(len, self.seconds.values()))

    def percentiles(self) -> dict[str, list[float]]:
        """Of each part: the 50th, the 95th, and the longest."""
        return {part: [round(value, 2) for value in spread(taken)] for part, taken in sorted(self.seconds.items())}


def spread(taken: list[float]) -> tuple[float, float, float]:
    """The 50th and 95th percentile, and the most."""
    if len(taken) == 1:
        return (taken[0],) * 3
    cuts = statistics.quantiles(taken, n=20, method="inclusive")
    return cuts[9], cuts[18], max(taken)


class Ender:
    """Ends one part after the other while it is asked to ``act``."""

    def __init__(
        self, world: Disturbed, chance: random.Random, stops: int, bound_s: float, only: Sequence[str], tally: Tally
    ) -> None:
        self._world, self._chance, self._stops, self._tally = world, chance, stops, tally
        self._bound_s = bound_s
        self._parts = only or ("coordinator", *world.parts)
        self._next = time.monotonic() + chance.uniform(0, LATEST_S)

    def act(self) -> None:
        if self._tally.total >= self._stops or time.monotonic() < self._next:
            return
        part = self._chance.choice(self._parts)
        unit = part if part == "coordinator" else f"{part}:{self._chance.choice(self._world.plan.names)}"
        self._end(part, unit)
        self._world.spawn(unit)
        self._next = time.monotonic() + self._chance.uniform(0, LATEST_S)

    def _end(self, part: str, unit: str) -> None:
        began = time.monotonic()
        code = self._world.stop(unit, self._bound_s)
        taken = time.monotonic() - began
        self._tally.seconds[part].append(taken)
        self._tally.before_ready += code == -signal.SIGTERM
        if code not in GOOD:
            said = f"{unit} ended with {code} after {taken:.1f} s: {self._world.tail(unit)}"
            self._tally.wrong.append(said)
            print(said, file=sys.stderr, flush=True)


def campaign(
    template: Template,
    digests: Mapping[int, str],
    *,
    stops: int,
    seed: int,
    parts: Sequence[str] = PARTS,
    only: Sequence[str] = (),
    bound_s: float = BOUND_S,
    moved: bool = False,
    minutes: float = 1e6,
    kept: Path | None = None,
) -> Tally:
    """End programs of one federation until there were ``stops`` of them, its studies are over, or the time is."""
    ends = time.monotonic() + 60 * minutes
    tally = Tally()
    with Disturbed(template.copy(), template.plan, parts) as world:
        if moved:
            clock = Clock(world.state / "clock")
            clock.move(datetime.timedelta(days=1))
            world.environment = clock.environment
        world.begin()
        ender = Ender(world, random.Random(seed), stops, bound_s, only, tally)
        for study in template.plan.study_names:
            try:
                world.until(study, lambda status: False, act=ender.act)
                tally.wrong += world.judge(study, digests)
            except (Stuck, TimeoutError, subprocess.TimeoutExpired) as stuck:
                tally.wrong.append(f"{study}: {stuck}")
                break
            print(f"{study}: {tally.total} programs ended, {tally.percentiles()}", file=sys.stderr, flush=True)
            if tally.total >= stops or time.monotonic() > ends:
                break
        if tally.wrong and kept is not None:
            print(f"kept in {world.retain(kept)}", file=sys.stderr, flush=True)
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.evidence_stops", description=__doc__)
    parser.add_argument("--stops", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=60, help="of each study")
    parser.add_argument("--studies", type=int, default=4)
    parser.add_argument("--whole", action="store_true", help="each site as one program that has its trainer with it")
    parser.add_argument("--only", nargs="+", default=(), metavar="PART", help="end none but these")
    parser.add_argument("--moved-clock", action="store_true", help="with `libfaketime`, as in a year")
    parser.add_argument("--bound", type=float, default=BOUND_S, help="seconds in which each must end")
    parser.add_argument("--minutes", type=float, default=1e6, help="begin no further study after this time")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="copy the state of what failed here")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="wardround-stops-") as folder:
        template = Template(Path(folder), Plan(sites=2, rounds=chosen.rounds, studies=chosen.studies))
        tally = campaign(
            template, undisturbed(template), stops=chosen.stops, seed=chosen.seed,
            parts=("agent",) if chosen.whole else PARTS, only=chosen.only,
            bound_s=chosen.bound, moved=chosen.moved_clock, minutes=chosen.minutes,
            kept=chosen.keep,
        )  # fmt: skip
    print(json.dumps({
        "evidence": "stops", "seed": chosen.seed, "ended": tally.total, "before_ready": tally.before_ready,
        "seconds": tally.percentiles(), "load": os.getloadavg()[2], "wrong": tally.wrong,
    }))  # fmt: skip
    sys.exit(bool(tally.wrong))


if __name__ == "__main__":
    main()
