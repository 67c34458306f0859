"""A bad line between the sites and their coordinator, and what came of the rounds: `python -m tools.evidence_line`.

Eight sites train a study of twenty rounds through one proxy. A quarter of the rounds passes while it cuts connections
at random bytes, a quarter while it also brings everything 300 ms later, a quarter at 200 kB/s, and in the last it
swallows, for 60 s at a time, all that goes up, then all that comes down. Each round must have every site, or the status
must name who is missing; with every site, its model is that of an undisturbed run. What was sent again is what the
proxy carried up beyond the updates and the allowance for framing that `audit reconcile` has. Prints a line for each
phase and a JSON line at the end; exits 1 if a round came out other than it should, or a cut cost more than 8 MiB.
"""

import argparse
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tools.bad_line import BadLine, Direction
from tools.faults import MODELS, Disturbed, Plan, Stuck, Template, undisturbed
from tools.world import free_port

AGAIN = 8 * 1024 * 1024  # bytes, for each cut
DELAY_S, RATE, DEAF_S = 0.3, 200_000, 60
FRAMING = 0.005  # of what is carried, as `audit reconcile` allows


@dataclass(frozen=True)
class Came:
    """What came of a study behind a bad line."""

    rounds: int
    seconds: float
    cuts: int
    deaf: int
    carried_up: int
    payload: int
    wrong: list[str]

    @property
    def again_per_cut(self) -> float:
        return max(0.0, self.carried_up - self.payload * (1 + FRAMING)) / max(1, self.cuts)


class Phases:
    """Makes the line as bad as the round that is under way wants it."""

    def __init__(self, line: BadLine, rounds: int, cut_bytes: float, deaf_s: float) -> None:
        self._line = line
        self._quarter = max(1, rounds // 4)
        self._cut_bytes = cut_bytes
        self._deaf_s = deaf_s
        self._phase = -1
        self._until = 0.0
        self._next: list[Direction] = ["up", "down"]
        self.deaf = 0

    def at(self, number: int) -> None:
        """``number``: the round under way."""
        phase = min(3, (number - 1) // self._quarter)
        line, now = self._line, time.monotonic()
        if phase != self._phase:
            line.cut_bytes = self._cut_bytes if phase < 2 else None
            line.delay_s = DELAY_S if phase == 1 else 0.0
            line.bytes_a_second = RATE if phase == 2 else None
            line.cut()  # what is open keeps the ways of before
            self._phase = phase
            print(f"round {number}: {('cuts', 'cuts and delay', 'rate', 'black holes')[phase]}", file=sys.stderr)
        if phase == 3 and self._next and now > self._until + 1:
            direction = self._next.pop(0)
            line.black_hole(direction)
            self._until = now + self._deaf_s
            self.deaf += 1
        if self._until and now > self._until:
            line.heal()


def behind_a_bad_line(folder: Path, plan: Plan, *, seed: int = 1, cut_bytes: float = 0, deaf_s: float = DEAF_S) -> Came:
    """A study of ``plan`` through a line that gets worse. ``cut_bytes``: 0 for twice the payload."""
    template = Template(folder, plan)
    digests = undisturbed(template)
    study = plan.study_names[0]
    began, wrong = time.monotonic(), []
    with Disturbed(template.copy(), plan) as world:
        world.listen = f"127.0.0.1:{free_port()}"
        with BadLine(world.listen, listen=template.address, seed=seed) as line:
            world.begin()
            world.until(study, lambda status: status.state == "running" and status.round >= 1)
            phases = Phases(line, plan.rounds, cut_bytes or 2 * payload_of(world, study), deaf_s)

            def act() -> None:
                status = world.look(study)
                if status is not None and status.state not in ("created", "finished"):
                    phases.at(max(1, status.round))

            try:
                world.until(study, lambda status: False, stuck_s=300 + 3 * deaf_s, act=act)
                line.heal()
                line.cut_bytes, line.delay_s = None, 0.0
                wrong = world.judge(study, digests, absent=True)
            except (Stuck, TimeoutError) as stuck:
                wrong = [str(stuck)]
            finally:
                line.heal()
            report = world.report(study)
            received = sum(row.bytes_received for row in report.sites.values())
            return Came(
                len(report.rounds_closed), time.monotonic() - began, line.cuts, phases.deaf, line.carried["up"],
                received, wrong,
            )  # fmt: skip


def payload_of(world: Disturbed, study: str) -> int:
    return int(world.report(study).bytes_per_update)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.evidence_line", description=__doc__)
    parser.add_argument("--model", choices=sorted(MODELS), default="8 MB")
    parser.add_argument("--sites", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    plan = Plan(chosen.sites, chosen.rounds, chosen.model)
    with tempfile.TemporaryDirectory(prefix="wardround-line-") as folder:
        came = behind_a_bad_line(Path(folder), plan, seed=chosen.seed)
    print(json.dumps({
        "evidence": "line", "model": chosen.model, "sites": chosen.sites, "rounds": came.rounds, "seed": chosen.seed,
        "seconds": round(came.seconds), "cuts": came.cuts, "black_holes": came.deaf, "carried_up": came.carried_up,
        "payload": came.payload, "again_per_cut": round(came.again_per_cut), "wrong": came.wrong,
    }))  # fmt: skip
    sys.exit(bool(came.wrong) or came.rounds < chosen.rounds or came.again_per_cut > AGAIN)


if __name__ == "__main__":
    main()
