"""Each durable system call of a round made to fail, or to be the last: `python -m tools.evidence_syscalls`.

Two sites train a long study. One side (the coordinator, a gateway or a trainer) is started under `strace` for a start
and the first round of a study, and again for a start and a later round, and what it does to its state directory is
listed: fsync, fdatasync, rename, link, the making of folders and files, every write and truncation. Then that side is
started once for each of these calls and each fault: EIO, ENOSPC, and SIGKILL before the call. (What a first round alone
does is aimed at in another study's first round.) It is started again as a service manager would, and the study must go
on. It must end in the model of the same study in the lab, no receipted update may be missing, and both verifiers must
accept every ledger. Linux counts `when=` for each thread, so the call that was really hit is read from `strace`'s own
record, and what no start hit is counted as not reached. Needs `strace` and the right to trace one's own processes.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from coordinator.requests import StopStudy
from coordinator.study_answers import StudyStatus
from tools import strace
from tools.faults import NEEDS_PERSON, Disturbed, Plan, Stuck, Template, lab_digest
from tools.world import descendants

SIDES = {"coordinator": "coordinator", "gateway": "gateway:alpha", "trainer": "trainer:alpha"}
MANY = ("coordinator.db", "coordinator.db-wal", "coordinator.db-shm")
TRIAL_S = 90
MET_S = 15  # after the fault was met, until its side has ended or gone on
CHECKED_EACH = 8  # trials


@dataclass
class Tally:
    """What was injected on one side, and what came of it."""

    calls: int = 0
    trials: int = 0
    reached: Counter[str] = field(default_factory=Counter)
    missed: Counter[str] = field(default_factory=Counter)
    kinds: set[tuple[str, str]] = field(default_factory=set)
    exits: Counter[str] = field(default_factory=Counter)
    paused: int = 0
    wrong: list[str] = field(default_factory=list)


class Campaign:
    """One side, a federation that goes on for as long as it can, and what is injected into it."""

    def __init__(self, template: Template, side: str, kept: Path | None = None) -> None:
        self.tally = Tally()
        self._template = template
        self._side = side
        self._unit = SIDES[side]
        self._kept = kept
        self._study = ""
        self._begun: list[str] = []  # studies of the federation that runs
        self._digests: dict[int, str] = {}  # of each round's model, in a study that was compared with the lab
        self._world: Disturbed | None = None

    def run(
        self, faults: Sequence[str], every: int, ends: float = float("inf"), most: int | None = None, begin: int = 1
    ) -> Tally:
        """Inject each of ``faults`` at each call; of the database's many alike writes at each ``every``-th.

        Args:
            ends: when no further start begins, by the monotonic clock.
            most: how many calls; None: all.
            begin: with which call, counted from 1.
        """
        first = {replace(call, first=True) for call in self._reference(first=True)}
        later = set(self._reference())
        known = {(call.name, call.file) for call in later}
        calls = sorted(later | {call for call in first if (call.name, call.file) not in known})
        self.tally.calls = len(calls)
        bulk = [call for call in calls if call.name == "pwrite64" and call.file in MANY]
        chosen = [call for call in calls if call not in set(bulk)] + bulk[::every]
        for call in _unlike_first(chosen)[begin - 1 :][:most]:
            for fault in faults:
                if time.monotonic() > ends:
                    break
                self._trial(call, fault)
        self._judge()
        self._close()
        return self.tally

    def _reference(self, *, first: bool = False) -> list[strace.Call]:
        """What the side does in its start and the next round; ``first``: which is the first of a study."""
        world = self._running(first=first)
        trace = world.state / "reference.trace"
        if self._unit in world.units:
            world.stop(self._unit)
        world.prefixes[self._unit] = strace.words(trace)
        world.spawn(self._unit)
        self._two_rounds(world)
        world.stop(self._unit)
        world.prefixes.pop(self._unit)
        return list(strace.durable_calls(trace, self._state(world)))

    def _trial(self, call: strace.Call, fault: str) -> None:
        self.tally.trials += 1
        began = time.monotonic()
        try:
            world = self._running(first=call.first)
            trace = world.state / "trial.trace"
            trace.unlink(missing_ok=True)
            if self._unit in world.units:
                world.stop(self._unit)
            world.prefixes[self._unit] = strace.words(
                trace, f"{call.name}:{strace.FAULTS[fault]}:when={call.count}", (call.name,)
            )
            world.spawn(self._unit)
            with strace.kill_at(trace, call.count) if fault == "SIGKILL" else nullcontext(set[int]()) as killed:
                self._wait(world, lambda: killed | strace.failed(trace))
            code = world.stop(self._unit)
            world.prefixes.pop(self._unit, None)
            if code in NEEDS_PERSON:
                raise Stuck(f"ended with {code}, and waits for a person: {world.tail(self._unit)}")
            met = strace.hit(trace, self._state(world), killed)
            self.tally.reached[fault] += bool(met)
            self.tally.missed[fault] += not met
            if met:
                self.tally.kinds.add((call.name, met))
                self.tally.exits[f"{fault} {code}"] += 1
            text = f"{call.name} {call.count} {fault}: {met or f'not reached ({call.file})'}, ended with {code}"
            took = f"{time.monotonic() - began:.0f} s"
            print(f"{self._side} {self.tally.trials}: {text}, {took}", file=sys.stderr, flush=True)
            if call.first or self.tally.trials % CHECKED_EACH == 0:
                self._go_on(world)
        except (Stuck, TimeoutError) as stuck:
            self._failed(f"{call.name} {call.count} {fault} ({call.file}): {stuck}")

    def _wait(self, world: Disturbed, met: Callable[[], set[int]]) -> None:
        """Wait until the fault was injected and its side has ended or gone on for a round; or three rounds passed.

        A child of the side that ended of it is enough: each child after it would meet the same fault at its own call,
        as each thread does at its own; so it is not waited for long.

        Args:
            met: the threads that met the fault.

        Raises:
            Stuck: nothing of all that came.
        """
        ends, first, fired_in = time.monotonic() + TRIAL_S, None, None
        children: set[int] = set()
        while time.monotonic() < ends:
            if self._unit not in world.units or world.units[self._unit].process.poll() is not None:
                return
            with suppress(ProcessLookupError):
                children |= set(descendants(world.pid(self._unit)))
            if any(not Path(f"/proc/{child}").exists() for child in children & met()):
                return
            status = world.look(self._study)
            if status is not None:
                if status.state == "finished":
                    return
                if status.state in ("created", "paused"):
                    self.tally.paused += status.state == "paused"
                    world.start_study(self._study)
                first = status.round if first is None else first
                if fired_in is None and met():
                    fired_in, ends = status.round, time.monotonic() + MET_S
                if status.round > (first + 2 if fired_in is None else fired_in):
                    return
            time.sleep(0.05)
        if not met():
            raise Stuck(f"nothing for {TRIAL_S} s: {world.units[self._unit].tail(6)}")

    def _go_on(self, world: Disturbed) -> None:
        """With every side started plainly, two more rounds close and the ledgers verify."""
        world.spawn(self._unit)
        self._two_rounds(world)
        wrong = world.torn_ledgers()
        if wrong:
            raise Stuck("; ".join(wrong))

    def _running(self, *, first: bool = False) -> Disturbed:
        """The federation of before, and a study of it that goes on; ``first``: that has not begun.

        Where it has no study left, what came of it is judged and another begins.
        """
        world = self._world
        if world is not None:
            if first and self._unit not in world.units:
                world.spawn(self._unit)
                world.until(self._study, lambda status: True)
            status = world.look(self._study)
            if not first and (status is None or status.round < self._template.plan.rounds - 8):
                return world
            if len(self._begun) < len(self._template.plan.study_names):
                world.ask(StopStudy(study=self._study), StudyStatus)
            else:
                self._judge()
                self._close()
        if self._world is None:
            self._world = Disturbed(self._template.copy(), self._template.plan)
            self._world.begin()
        self._study = self._template.plan.study_names[len(self._begun)]
        self._begun.append(self._study)
        if not first:
            self._world.until(self._study, lambda status: status.round >= 1)
        return self._world

    def _judge(self) -> None:
        world = self._world
        if world is None:
            return
        wrong = []
        try:
            if self._unit not in world.units:
                world.spawn(self._unit)
            self._two_rounds(world)
            world.ask(StopStudy(study=self._study), StudyStatus)
            for study in self._begun:
                last = max((row.round for row in world.report(study).rounds_closed), default=0)
                if last > max(self._digests, default=0):
                    digests = {last: lab_digest(self._template, last)}
                    found = world.judge(study, {**self._digests, **digests})
                    self._digests |= {row.round: str(row.model_digest) for row in world.report(study).rounds_closed}
                    self._digests |= digests
                else:
                    found = world.judge(study, self._digests)
                wrong += [f"{study}: {text}" for text in found if not text.startswith("it is stopped")]
        except (Stuck, TimeoutError) as stuck:
            wrong.append(str(stuck))
        self.tally.paused += world.seen.paused
        if wrong:
            self._failed("; ".join(wrong))

    def _failed(self, text: str) -> None:
        print(f"{self._side}: WRONG: {text}", file=sys.stderr, flush=True)
        self.tally.wrong.append(text)
        if self._world is not None and self._kept is not None:
            print(f"kept in {self._world.retain(self._kept)}", file=sys.stderr, flush=True)
        self._close()

    def _close(self) -> None:
        if self._world is not None:
            self._world.__exit__()
            shutil.rmtree(self._world.state)
            self._world = None
            self._begun = []

    def _state(self, world: Disturbed) -> Path:
        return world.coordinator_state if self._side == "coordinator" else world.state / "alpha"

    def _two_rounds(self, world: Disturbed) -> None:
        """Wait until the round under way and the next one have closed."""
        before = world.until(self._study, lambda status: True, plainly=False).round
        world.until(self._study, lambda status: status.round > before + 1, plainly=False)


def _unlike_first(calls: list[strace.Call]) -> list[strace.Call]:
    """Each once for a name and a count, one of each kind before the others, so that a short run sees all kinds."""
    once = {(call.first, call.name, call.count): call for call in calls}.values()
    first = {(call.name, call.file): call for call in sorted(once, reverse=True)}
    others = [call for call in sorted(once, key=_in_order) if call not in first.values()]
    return [*sorted(first.values(), key=_in_order), *others]


def _in_order(call: strace.Call) -> tuple[bool, int, str]:
    return call.first, call.count, call.name


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.evidence_syscalls", description=__doc__)
    parser.add_argument("--sides", nargs="+", choices=sorted(SIDES), default=sorted(SIDES))
    parser.add_argument("--faults", nargs="+", choices=sorted(strace.FAULTS), default=sorted(strace.FAULTS))
    parser.add_argument("--every", type=int, default=8, help="of the database's many alike writes, each N-th")
    parser.add_argument(
        "--rounds", type=int, default=200, help="of a study; when it is over, another federation begins"
    )
    parser.add_argument("--studies", type=int, default=6, help="of a federation; a first round can be had once in each")
    parser.add_argument("--begin", type=int, default=1, help="with this call, so that a campaign is run in pieces")
    parser.add_argument("--minutes", type=float, default=1e6, help="for a side; begin no further start after this time")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="copy the state of what failed here")
    chosen = parser.parse_args()
    if not strace.available():
        raise SystemExit("error: strace is not here, or may not trace\nhint: install it; containers need SYS_PTRACE")
    wrong = False
    with tempfile.TemporaryDirectory(prefix="wardround-syscalls-") as folder:
        template = Template(Path(folder), Plan(sites=2, rounds=chosen.rounds, studies=chosen.studies))
        for side in chosen.sides:
            ends = time.monotonic() + 60 * chosen.minutes
            tally = Campaign(template, side, chosen.keep).run(chosen.faults, chosen.every, ends, begin=chosen.begin)
            wrong |= bool(tally.wrong)
            print(json.dumps({
                "evidence": "syscalls", "side": side, "calls": tally.calls, "starts": tally.trials,
                "reached": tally.reached, "not_reached": tally.missed, "kinds": len(tally.kinds),
                "exits": tally.exits, "paused": tally.paused, "wrong": tally.wrong,
            }), flush=True)  # fmt: skip
    sys.exit(wrong)


if __name__ == "__main__":
    main()
