"""Worker processes that run cases, so that a crash of the process is a finding and not the end.

A worker gets one job after the other as lines of JSON, and answers each with its tally and findings. Which case it is
at stands in memory that it shares with the pool: when it dies, or does not move for a minute, that is the culprit.
"""

import json
import mmap
import os
import selectors
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tools.fuzz.engine import ROOT, Door, Finding, Hung, Runner, Tally, Target, limit_memory, scratch

STUCK_S = 60.0  # a worker whose case does not end, nor hears its own alarms
OPENING_S = 180.0
KEPT = 200  # findings that are kept of a run; more are counted


@dataclass(frozen=True)
class Job:
    target: str
    seed: int
    first: int
    count: int


@dataclass
class Results:
    """Of a whole run."""

    tallies: dict[str, Tally] = field(default_factory=dict)
    findings: dict[tuple[str, str, str], Finding] = field(default_factory=dict)
    times: dict[tuple[str, str, str], int] = field(default_factory=dict)

    def add(self, finding: Finding) -> None:
        self.times[finding.cause] = self.times.get(finding.cause, 0) + 1
        known = self.findings.get(finding.cause)
        if known is None and len(self.findings) >= KEPT:
            return
        if known is None or finding.number < known.number:
            self.findings[finding.cause] = finding

    @property
    def cases(self) -> int:
        return sum(tally.cases for tally in self.tallies.values())


class _Worker:
    def __init__(self, place: Path) -> None:
        self._file = place.open("w+b")
        self._file.write(bytes(16))
        self._file.flush()
        self._shared = mmap.mmap(self._file.fileno(), 16)
        self._started = 0
        self.job: Job | None = None
        self.next = 0
        self._start()

    def _start(self) -> None:
        self._shared[:16] = struct.pack("<qq", -1, 0)
        line = [sys.executable, "-m", "tools.fuzz.pool", str(self._file.name)]
        self.process = subprocess.Popen(
            line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": "0"}
        )
        self._buffer = b""

    def give(self, job: Job) -> None:
        self.job = job
        self._shared[:8] = struct.pack("<q", -1)
        self._moved, self._seen = time.monotonic(), (-1, 0)
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(asdict(job)).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it died; its end of the other pipe says so

    def read(self) -> list[dict[str, Any]] | None:
        """Whole answers that came; None: it ended."""
        assert self.process.stdout is not None
        data = os.read(self.process.stdout.fileno(), 1 << 20)
        if not data:
            return None
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return [json.loads(line) for line in lines]

    @property
    def at(self) -> int:
        return int(struct.unpack_from("<q", self._shared)[0])

    def stuck(self) -> bool:
        seen = struct.unpack("<qq", self._shared[:16])
        now = time.monotonic()
        if seen != self._seen:
            self._seen, self._moved = seen, now
        return now - self._moved > (STUCK_S if seen[0] >= 0 else OPENING_S)

    def again(self) -> None:
        self.end()
        self._start()

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    pass

    def close(self) -> None:
        self._shared.close()
        self._file.close()


class Pool:
    """``jobs`` workers. ``next_job()`` gives the next job, or None at the end; ``told(results)`` hears of progress."""

    def __init__(self, jobs: int) -> None:
        self._folder = tempfile.TemporaryDirectory(dir=scratch(), prefix="wardround-fuzz-")
        folder = Path(self._folder.name)
        self._workers = [_Worker(folder / f"worker-{number}") for number in range(jobs)]

    def run(self, next_job: Callable[[], Job | None], told: Callable[[Results], object]) -> Results:
        results = Results()
        idle, busy = list(self._workers), set[_Worker]()
        selector = selectors.DefaultSelector()
        pending: list[Job] = []
        while True:
            while idle and (job := pending.pop() if pending else next_job()) is not None:
                worker = idle.pop()
                worker.give(job)
                assert worker.process.stdout is not None
                selector.register(worker.process.stdout, selectors.EVENT_READ, worker)
                busy.add(worker)
            if not busy:
                return results
            for key, _ in selector.select(timeout=1):
                worker = key.data
                answers = worker.read()
                if answers is None:
                    self._died(worker, selector, results, pending, "the process ended")
                    busy.discard(worker)
                    idle.append(worker)
                for answer in answers or []:
                    self._take(answer, results)
                    if answer.get("done"):
                        selector.unregister(worker.process.stdout)
                        busy.discard(worker)
                        idle.append(worker)
            for worker in list(busy):
                if worker.stuck():
                    self._died(worker, selector, results, pending, f"no end in {STUCK_S:.0f} s; the process was killed")
                    busy.discard(worker)
                    idle.append(worker)
            told(results)

    def _take(self, answer: dict[str, Any], results: Results) -> None:
        if "finding" in answer:
            results.add(Finding(**answer["finding"]))
        if "tally" in answer:
            results.tallies.setdefault(answer["target"], Tally()).add(Tally(**answer["tally"]))

    def _died(
        self, worker: _Worker, selector: selectors.BaseSelector, results: Results, pending: list[Job], how: str
    ) -> None:
        assert worker.process.stdout is not None
        assert worker.job is not None
        selector.unregister(worker.process.stdout)
        job, at = worker.job, worker.at
        worker.end()
        how = f"{how} ({worker.process.returncode})"
        results.add(Finding(job.target, job.seed, max(at, 0), "died", "opening" if at < 0 else "", how))
        results.tallies.setdefault(job.target, Tally()).add(Tally(cases=max(0, at + 1 - job.first)))
        if at >= 0 and (left := job.first + job.count - at - 1) > 0:
            pending.append(Job(job.target, job.seed, at + 1, left))
        worker.again()

    def close(self) -> None:
        for worker in self._workers:
            worker.end()
            worker.close()
        self._folder.cleanup()


def serve(shared: Path) -> None:
    """A worker's loop: jobs in on stdin, answers out on stdout."""
    from tools.fuzz.targets import BY_NAME

    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nothing that a library prints may be taken for an answer
    with shared.open("r+b") as file:
        place = mmap.mmap(file.fileno(), 16)
    doors: dict[str, tuple[Target, Door, Path]] = {}
    moves = 0

    def began(number: int) -> None:
        nonlocal moves
        moves += 1
        place[:16] = struct.pack("<qq", number, moves)

    def say(answer: dict[str, Any]) -> None:
        out.write(json.dumps(answer).encode() + b"\n")
        out.flush()

    with tempfile.TemporaryDirectory(dir=shared.parent) as root:
        limit_memory()
        for line in sys.stdin.buffer:
            job = Job(**json.loads(line))
            if job.target not in doors:
                target = BY_NAME[job.target]
                folder = Path(tempfile.mkdtemp(dir=root))
                doors[job.target] = (target, target.opens(folder), folder)
            target, door, _ = doors[job.target]
            runner = Runner(target, door, job.seed, began)
            try:
                for finding in runner.run(range(job.first, job.first + job.count)):
                    if finding is not None:
                        say({"finding": asdict(finding)})
                        if finding.kind == "hang":  # it may have left a lock taken
                            doors.pop(job.target, None)
                            folder = Path(tempfile.mkdtemp(dir=root))
                            door = runner.door = target.opens(folder)
                            doors[job.target] = (target, door, folder)
            except Hung:
                pass  # an alarm that came after its case had ended
            place[:8] = struct.pack("<q", -1)
            say({"target": job.target, "tally": runner.tally.document(), "done": True})


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
