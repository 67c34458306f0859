"""Programs killed at random instants, and what came of it: `python -m tools.evidence_kills`.

Three sites train studies of five rounds, once undisturbed. Then `kill -9` goes to the coordinator, a gateway, a
trainer's listener or its worker, again and again at random instants, and what was killed is started again as a service
manager would. A study counts as whole if each round has the model of the undisturbed run, each update whose receipt a
site holds is in it, and both verifiers accept every ledger beside the coordinator's copy of the receipts. ``--secure``:
four sites of studies with secure aggregation, of which no round may be opened twice.

Prints a line for each study and a JSON line at the end; exits 1 if one came out other than it should. ``--seed`` and
``--trial`` replay the chances of one federation, though not the machine's own timing.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tools.faults import STUCK_S, Disturbed, Plan, Stuck, Template, lab_digest, seeds, undisturbed

PARTS = ("coordinator", "gateway", "trainer", "worker")
WEIGHTS = (2, 2, 1, 1)  # of the parts: the trainer's two processes count as one program
PAUSE_S = 1.2  # at most, between two kills


@dataclass
class Tally:
    """What was done to the studies, and what came of them."""

    studies: int = 0
    kills: Counter[str] = field(default_factory=Counter)
    paused: int = 0
    wrong: list[str] = field(default_factory=list)
    slowest_s: float = 0.0

    @property
    def total(self) -> int:
        return sum(self.kills.values())


class Killer:
    """Kills one part after the other while it is asked to ``act``, ``most`` times."""

    def __init__(self, world: Disturbed, chance: random.Random, most: int, tally: Tally) -> None:
        self._world = world
        self._chance = chance
        self._left = most
        self._tally = tally
        self._next = time.monotonic() + chance.uniform(0, PAUSE_S)

    def act(self) -> None:
        if self._left <= 0 or time.monotonic() < self._next:
            return
        (part,) = self._chance.choices(PARTS, WEIGHTS)
        site = self._chance.choice(self._world.plan.names)
        pause = self._chance.uniform(0, PAUSE_S)
        if self._world.kill(part if part == "coordinator" else f"{part}:{site}"):
            self._tally.kills[part] += 1
            self._left -= 1
        self._next = time.monotonic() + pause


def campaign(
    template: Template, digests: Mapping[int, str], *, kills: int, most: int, seed: int, only: int | None = None,
    kept: Path | None = None, minutes: float = 1e6, stuck_s: float = STUCK_S,
) -> Tally:  # fmt: skip
    """Disturb studies until ``kills`` processes were killed, or the time is over.

    Args:
        digests: of the undisturbed run.
        most: kills of one study.
        only: just this federation of those that ``seed`` gives.
        kept: where to copy the state of a federation that failed.
        stuck_s: how long nothing may change in a study.
    """
    ends = time.monotonic() + 60 * minutes
    plan = template.plan
    tally = Tally()
    for number, chance in seeds(seed):
        if tally.total >= kills or time.monotonic() > ends or (only is not None and number > only):
            break
        if only is not None and number != only:
            continue
        with Disturbed(template.copy(), plan) as world:
            world.begin()
            for study in plan.study_names:
                before, began = tally.total, time.monotonic()
                killer = Killer(world, chance, min(most, kills - tally.total), tally)
                try:
                    world.until(study, lambda status: False, stuck_s, killer.act)
                    wrong = world.judge(study, digests)
                except (Stuck, TimeoutError) as stuck:
                    wrong = [str(stuck)]
                seconds = time.monotonic() - began
                tally.studies += 1
                tally.slowest_s = max(tally.slowest_s, seconds)
                found = f"federation {number} {study}: {tally.total - before} kills, {seconds:.0f} s"
                print(f"{found}: {'; '.join(wrong) or 'whole'}", file=sys.stderr, flush=True)
                if wrong:
                    tally.wrong += [f"{found}: {text}" for text in wrong]
                    if kept is not None:
                        print(f"kept in {world.retain(kept)}", file=sys.stderr, flush=True)
                    break
                if tally.total >= kills or time.monotonic() > ends:
                    break
            tally.paused += world.seen.paused
            for unit, code in world.seen.exits:
                print(f"federation {number}: {unit} ended with {code}", file=sys.stderr, flush=True)
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.evidence_kills", description=__doc__)
    parser.add_argument("--model", choices=("tiny", "8 MB"), default="tiny")
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--most", type=int, default=12, help="kills of one study")
    parser.add_argument("--studies", type=int, default=5, help="of one federation, before another begins")
    parser.add_argument("--minutes", type=float, default=1e6, help="begin no further study after this time")
    parser.add_argument("--stuck", type=float, default=STUCK_S, metavar="SECONDS", help="in which nothing may change")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--trial", type=int, help="just this federation of the seed")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="copy the state of what failed here")
    parser.add_argument("--secure", action="store_true", help="with secure aggregation")
    chosen = parser.parse_args()
    sites = 4 if chosen.secure else 3  # of four, three are enough for a sum: another set of a round would be possible
    plan = Plan(sites=sites, rounds=5, model=chosen.model, studies=chosen.studies, secure=chosen.secure)
    with tempfile.TemporaryDirectory(prefix="wardround-kills-") as folder:
        template = Template(Path(folder), plan)
        digests = undisturbed(template)
        if digests[plan.rounds] != lab_digest(template):
            raise AssertionError("without any fault: the last model is not the lab's")
        tally = campaign(
            template, digests, kills=chosen.kills, most=chosen.most, seed=chosen.seed, only=chosen.trial,
            kept=chosen.keep, minutes=chosen.minutes, stuck_s=chosen.stuck,
        )  # fmt: skip
    print(json.dumps({
        "evidence": "kills", "secure": chosen.secure, "model": chosen.model, "seed": chosen.seed,
        "kills": tally.total, **tally.kills, "studies": tally.studies, "paused": tally.paused,
        "slowest_s": round(tally.slowest_s, 1), "wrong": tally.wrong,
    }))  # fmt: skip
    sys.exit(bool(tally.wrong))


if __name__ == "__main__":
    main()
