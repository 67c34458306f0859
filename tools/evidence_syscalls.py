"""Each durable system call of a round made to fail, or to be the last: `python -m tools.evidence_syscalls`.

Two sites train a long study. One side (the coordinator, a gateway or a trainer) is started under `strace` for a start
and a round, and what it does to its state directory is listed: fsync, fdatasync, rename, link, the making of folders
and files, every write and truncation. Then that side is started once for each of these calls and each fault: EIO,
ENOSPC, and SIGKILL before the call. It is started again as a service manager would, and the study must go on. It must
end in the model of the same study in the lab, no receipted update may be missing, and both verifiers must accept every
ledger. Linux counts `when=` for each thread, so the call that was really hit is read from `strace`'s own record, and
what no start hit is counted as not reached. Needs `strace` and the right to trace one's own processes.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from coordinator.requests import StopStudy
from coordinator.study_answers import StudyStatus
from tools.faults import NEEDS_PERSON, Disturbed, Plan, Stuck, Template, lab_digest

SIDES = {"coordinator": "coordinator", "gateway": "gateway:alpha", "trainer": "trainer:alpha"}
FAULTS = {"EIO": "error=EIO", "ENOSPC": "error=ENOSPC", "SIGKILL": "signal=SIGKILL"}
SYNCS = ("fsync", "fdatasync")
CALLS = (
    *SYNCS, "rename", "renameat", "renameat2", "link", "linkat", "mkdir", "write", "pwrite64", "ftruncate",
    "copy_file_range", "openat",
)  # fmt: skip
LINE = re.compile(r"(\d+) +(\w+)\((.*)")
MANY = ("coordinator.db", "coordinator.db-wal", "coordinator.db-shm")
FIRED = re.compile(r"\(INJECTED\)|\+\+\+ killed by SIGKILL")
TRIAL_S = 90
CHECKED_EACH = 8  # trials


@dataclass(frozen=True, order=True)
class Call:
    """The ``count``-th call of one kind in a thread of one side. ``file``: what it was done to, without its own ids."""

    name: str
    count: int
    file: str


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


def available() -> bool:
    """Whether `strace` is here and may inject into a process of ours."""
    if shutil.which("strace") is None:
        return False
    line = ["strace", "-qq", "-o", "/dev/null", "-e", "inject=fsync:error=EIO", sys.executable, "-c"]
    program = "import os, tempfile\nwith tempfile.TemporaryFile() as file: os.fsync(file)"
    return subprocess.run([*line, program], capture_output=True, timeout=60, check=False).returncode == 1


def durable_calls(trace: Path, state: Path) -> Iterator[Call]:
    """What ``trace`` has of calls that change ``state``, in order."""
    counts: Counter[tuple[str, str]] = Counter()
    inside = re.compile(rf'[<"]{re.escape(str(state))}/([^>"]*)[>"]')
    for line in trace.read_text(errors="replace").splitlines():
        if (found := LINE.match(line)) is None:
            continue
        thread, name, rest = found.groups()
        counts[thread, name] += 1
        file = inside.search(rest)
        if file is None or (name == "openat" and "O_CREAT" not in rest):
            continue
        yield Call(name, counts[thread, name], _plain(file[1]))


def _plain(file: str) -> str:
    file = re.sub(r"\.\d+\.\d+\.tmp$", ".tmp", file)
    return re.sub(r"[0-9a-f]{12,}|\d+(?=[-./]|$)", "#", file)


def strace(out: Path, inject: str = "", names: tuple[str, ...] = CALLS) -> tuple[str, ...]:
    """What stands before the command line of a side. ``inject``: as `strace` has it."""
    quick = () if "signal=" in inject else ("--seccomp-bpf",)  # with that, strace 6.1 sends no signal but at `when=1`
    words = ("strace", "-f", "-y", "-qq", *quick, "-o", str(out), "-e", f"trace={','.join(names)}")
    return (*words, "-e", f"inject={inject}") if inject else words


class Campaign:
    """One side, a federation that goes on for as long as it can, and what is injected into it."""

    def __init__(self, template: Template, side: str, kept: Path | None = None) -> None:
        self.tally = Tally()
        self._template = template
        self._side = side
        self._unit = SIDES[side]
        self._kept = kept
        self._study = template.plan.study_names[0]
        self._world: Disturbed | None = None

    def run(self, faults: Sequence[str], every: int, ends: float = float("inf"), most: int | None = None) -> Tally:
        """Inject each of ``faults`` at each call; of the database's many alike writes at each ``every``-th.

        Args:
            ends: when no further start begins, by the monotonic clock.
            most: how many calls; None: all.
        """
        calls = sorted(set(self._reference()))
        self.tally.calls = len(calls)
        bulk = [call for call in calls if call.name == "pwrite64" and call.file in MANY]
        chosen = [call for call in calls if call not in set(bulk)] + bulk[::every]
        for call in _unlike_first(chosen)[:most]:
            for fault in faults:
                if time.monotonic() > ends:
                    break
                self._trial(call, fault)
        self._judge()
        self._close()
        return self.tally

    def _reference(self) -> list[Call]:
        """What the side does in its start and the next round."""
        world = self._running()
        trace = world.state / "reference.trace"
        world.stop(self._unit)
        world.prefixes[self._unit] = strace(trace)
        world.spawn(self._unit)
        self._two_rounds(world)
        world.stop(self._unit)
        world.prefixes.pop(self._unit)
        return list(durable_calls(trace, self._state(world)))

    def _trial(self, call: Call, fault: str) -> None:
        self.tally.trials += 1
        world = self._running()
        trace = world.state / "trial.trace"
        trace.unlink(missing_ok=True)
        try:
            if self._unit in world.units:
                world.stop(self._unit)
            world.prefixes[self._unit] = strace(trace, f"{call.name}:{FAULTS[fault]}:when={call.count}", (call.name,))
            world.spawn(self._unit)
            fired = self._wait(world, trace)
            code = world.stop(self._unit)
            world.prefixes.pop(self._unit, None)
            if code in NEEDS_PERSON:
                raise Stuck(f"ended with {code}, and waits for a person: {world.tail(self._unit)}")
            hit = _hit(trace, self._state(world), fault) if fired else ""
            self.tally.reached[fault] += bool(hit)
            self.tally.missed[fault] += not hit
            if hit:
                self.tally.kinds.add((call.name, hit))
                self.tally.exits[f"{fault} {code}"] += 1
            text = f"{call.name} {call.count} {fault}: {hit or 'not reached'}, ended with {code}"
            print(f"{self._side} {self.tally.trials}: {text}", file=sys.stderr, flush=True)
            if self.tally.trials % CHECKED_EACH == 0:
                self._go_on(world)
        except (Stuck, TimeoutError) as stuck:
            self._failed(f"{call.name} {call.count} {fault} ({call.file}): {stuck}")

    def _wait(self, world: Disturbed, trace: Path) -> bool:
        """Wait until the fault was injected and its side has ended or gone on for a round; or three rounds passed."""
        began, first, fired_in = time.monotonic(), None, None
        while time.monotonic() - began < TRIAL_S:
            if self._unit not in world.units or world.units[self._unit].process.poll() is not None:
                return _fired(trace)
            status = world.look(self._study)
            if status is not None:
                if status.state == "finished":
                    return _fired(trace)
                if status.state == "paused":
                    self.tally.paused += 1
                    world.start_study(self._study)
                first = status.round if first is None else first
                if fired_in is None and _fired(trace):
                    fired_in = status.round
                if status.round > (first + 2 if fired_in is None else fired_in):
                    return fired_in is not None
            time.sleep(0.05)
        if _fired(trace):
            return True
        raise Stuck(f"nothing for {TRIAL_S} s: {world.units[self._unit].tail(6)}")

    def _go_on(self, world: Disturbed) -> None:
        """With every side started plainly, two more rounds close and the ledgers verify."""
        world.spawn(self._unit)
        self._two_rounds(world)
        wrong = world.torn_ledgers()
        if wrong:
            raise Stuck("; ".join(wrong))

    def _running(self) -> Disturbed:
        """The federation of before, unless its study is over: then what came of it is judged and another begins."""
        if self._world is not None:
            status = self._world.look(self._study)
            if status is None or status.round < self._template.plan.rounds - 8:
                return self._world
            self._judge()
            self._close()
        self._world = Disturbed(self._template.copy(), self._template.plan)
        self._world.begin()
        self._world.until(self._study, lambda status: status.round >= 1)
        return self._world

    def _judge(self) -> None:
        world = self._world
        if world is None:
            return
        try:
            if self._unit not in world.units:
                world.spawn(self._unit)
            self._two_rounds(world)
            world.ask(StopStudy(study=self._study), StudyStatus)
            last = max(row.round for row in world.report(self._study).rounds_closed)
            digests = {last: lab_digest(self._template, last)}
            wrong = [text for text in world.judge(self._study, digests) if not text.startswith("it is stopped")]
        except (Stuck, TimeoutError) as stuck:
            wrong = [str(stuck)]
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

    def _state(self, world: Disturbed) -> Path:
        return world.coordinator_state if self._side == "coordinator" else world.state / "alpha"

    def _two_rounds(self, world: Disturbed) -> None:
        """Wait until the round under way and the next one have closed."""
        before = world.until(self._study, lambda status: True, plainly=False).round
        world.until(self._study, lambda status: status.round > before + 1, plainly=False)


def _unlike_first(calls: list[Call]) -> list[Call]:
    """Each once for a name and a count, one of each kind before the others, so that a short run sees all kinds."""
    once = {(call.name, call.count): call for call in calls}.values()
    first = {(call.name, call.file): call for call in sorted(once, reverse=True)}
    others = [call for call in sorted(once, key=lambda call: (call.count, call.name)) if call not in first.values()]
    return [*sorted(first.values(), key=lambda call: (call.count, call.name)), *others]


def _fired(trace: Path) -> bool:
    return trace.exists() and FIRED.search(trace.read_text(errors="replace")) is not None


def _hit(trace: Path, state: Path, fault: str) -> str:
    """What the injected call was done to; "" if it was nothing in ``state``."""
    lines = trace.read_text(errors="replace").splitlines()
    if fault == "SIGKILL":  # every thread is said to be killed: what was under way then?
        ended = next(index for index, line in enumerate(lines) if "+++ killed by SIGKILL" in line)
        own = [line for line in lines[:ended] if line.endswith(("= ?", "<unfinished ...>"))]
    else:
        at = next((index for index, line in enumerate(lines) if "(INJECTED)" in line), None)
        if at is None:
            return ""  # it was killed from elsewhere, before it came to that call
        own = [line for line in lines[: at + 1] if line.split()[0] == lines[at].split()[0]][-2:]
    inside = re.compile(rf'[<"]{re.escape(str(state))}/([^>"]*)[>"]')
    found = [match[1] for line in own if (match := inside.search(line))]
    return _plain(found[-1]) if found else ""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.evidence_syscalls", description=__doc__)
    parser.add_argument("--sides", nargs="+", choices=sorted(SIDES), default=sorted(SIDES))
    parser.add_argument("--faults", nargs="+", choices=sorted(FAULTS), default=sorted(FAULTS))
    parser.add_argument("--every", type=int, default=8, help="of the database's many alike writes, each N-th")
    parser.add_argument(
        "--rounds", type=int, default=200, help="of a study; when it is over, another federation begins"
    )
    parser.add_argument("--minutes", type=float, default=1e6, help="for a side; begin no further start after this time")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="copy the state of what failed here")
    chosen = parser.parse_args()
    if not available():
        raise SystemExit("error: strace is not here, or may not trace\nhint: install it; containers need SYS_PTRACE")
    wrong = False
    with tempfile.TemporaryDirectory(prefix="wardround-syscalls-") as folder:
        template = Template(Path(folder), Plan(sites=2, rounds=chosen.rounds))
        for side in chosen.sides:
            ends = time.monotonic() + 60 * chosen.minutes
            tally = Campaign(template, side, chosen.keep).run(chosen.faults, chosen.every, ends)
            wrong |= bool(tally.wrong)
            print(json.dumps({
                "evidence": "syscalls", "side": side, "calls": tally.calls, "starts": tally.trials,
                "reached": tally.reached, "not_reached": tally.missed, "kinds": len(tally.kinds),
                "exits": tally.exits, "paused": tally.paused, "wrong": tally.wrong,
            }), flush=True)  # fmt: skip
    sys.exit(wrong)


if __name__ == "__main__":
    main()
