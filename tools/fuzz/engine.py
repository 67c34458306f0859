"""One case at a time: made from (target, seed, number), run under limits, judged.

A case passes when it is taken, or refused by an error of ours with an exit code of its own. Anything else is a
``Finding``: another exception, an error without a code, more than a second, more than 64 MiB.

Time is the process's own processor time, so that a busy machine finds nothing; what waits for ever is found by a wall
clock of 20 s. Memory is the highest resident size during a case above that before it, where the system tells it.
"""

import gc
import logging
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

from tools.fuzz.mutate import LARGEST, Mutator
from wardround.errors import WardroundError

CASE_S = 1.0  # of processor time
WAIT_S = 20.0  # of waiting
GROWTH = 64 * 1024 * 1024
MEMORY = 2 * 1024 * 1024 * 1024  # above what the process has when it begins; more is a MemoryError
LONGEST_MESSAGE = 4096  # a sentence for a person, and a trailer of gRPC
WARM_UP = 30  # cases before memory is measured: caches, imports
ROOT = Path(__file__).resolve().parents[2]


class Hung(BaseException):
    """The case took longer than it may."""


class Broken(Exception):
    """A door found by itself that something is wrong: two verifiers that disagree, a slot that is not given back."""


class Uncoded(Broken):
    """An error reached the other side without a code."""


@dataclass(frozen=True)
class Door:
    """Where one kind of foreign bytes comes in.

    Attributes:
        seeds: valid examples; each must be taken.
        take: does what the program does with such bytes.
        allowed: what may be raised beside errors of ours.
        refusals: seeds' numbers that are refused, as they should be.
        close: end what ``take`` stands on.
    """

    seeds: Sequence[bytes]
    mutate: Mutator
    take: Callable[[bytes], object]
    allowed: tuple[type[BaseException], ...] = ()
    refusals: frozenset[int] = frozenset()
    close: Callable[[], object] = lambda: None


@dataclass(frozen=True)
class Target:
    """A door by name. ``opens(folder)`` makes it; ``weight``: its share of the cases."""

    name: str
    about: str
    opens: Callable[[Path], Door]
    weight: int = 10


@dataclass(frozen=True)
class Finding:
    """What must not happen. ``kind``: crash, uncoded, hang, memory, died, broken, seed."""

    target: str
    seed: int
    number: int
    kind: str
    where: str  # the innermost line of ours, so that two of one cause are told once
    detail: str

    @property
    def cause(self) -> tuple[str, str, str]:
        return self.target, self.kind, self.where

    def command(self) -> str:
        return f"python -m tools.fuzz --target {self.target} --seed {self.seed} --case {self.number}"


@dataclass
class Tally:
    """What became of a target's cases."""

    cases: int = 0
    taken: int = 0
    refused: int = 0
    slowest_ms: float = 0.0
    slowest_case: int = -1
    grown: int = 0  # bytes, the most in one case
    kept: int = 0  # bytes by which the process grew over a run of cases
    seconds: float = 0.0  # of processor time
    codes: dict[str, int] = field(default_factory=dict)

    def add(self, other: "Tally") -> None:
        self.cases += other.cases
        self.taken += other.taken
        self.refused += other.refused
        if other.slowest_ms > self.slowest_ms:
            self.slowest_ms, self.slowest_case = other.slowest_ms, other.slowest_case
        self.grown, self.kept = max(self.grown, other.grown), max(self.kept, other.kept)
        self.seconds += other.seconds
        for code, count in other.codes.items():
            self.codes[code] = self.codes.get(code, 0) + count

    def document(self) -> dict[str, Any]:
        return asdict(self)


def case(door: Door, target: str, seed: int, number: int) -> bytes:
    """The case of that number, the same each time. The first ones are the examples as they are."""
    if number < len(door.seeds):
        return door.seeds[number]
    random = Random(f"{seed}:{target}:{number}")
    seed_bytes = random.choice(door.seeds)
    try:
        return door.mutate(random, seed_bytes)[:LARGEST]
    except MemoryError:  # what is doubled again and again grows beyond what this process may have
        return seed_bytes


class Runner:
    """Runs the cases of one target in this process, one after the other. ``began(number)`` is called before each."""

    def __init__(self, target: Target, door: Door, seed: int, began: Callable[[int], object] = lambda number: None):
        self.target, self.door, self.seed = target, door, seed
        self._began = began
        self._memory = Memory()
        self._heard = Heard()

    def run(self, numbers: Sequence[int]) -> Iterator[Finding | None]:
        """Each case's finding, or None. ``tally`` has the counts."""
        self.tally = Tally()
        began, start = time.process_time(), 0
        with self._heard, timers():
            for place, number in enumerate(numbers):
                if place == WARM_UP:
                    start = self._memory.resident()
                yield self.one(number)
        if start:
            gc.collect()
            self.tally.kept = max(0, self._memory.resident() - start)
        self.tally.seconds = time.process_time() - began
        if self.tally.kept > GROWTH:
            shown = f"{self.tally.kept >> 20} MiB were kept over cases {numbers[0]} to {numbers[-1]}"
            yield Finding(self.target.name, self.seed, numbers[0], "memory", "kept", shown)

    def ready(self) -> None:
        """For whoever calls ``judge`` alone."""
        self.tally = Tally()
        self._heard.__enter__()
        for which in (signal.SIGPROF, signal.SIGALRM):
            signal.signal(which, _over)

    def one(self, number: int) -> Finding | None:
        self._began(number)
        return self.judge(number, case(self.door, self.target.name, self.seed, number))

    def judge(self, number: int, data: bytes) -> Finding | None:
        """What becomes of these bytes. ``number`` is that of the case, -1 for none."""
        tally = self.tally
        tally.cases += 1
        before = self._memory.reset()
        self._heard.last = None
        began = time.process_time()
        kind, detail, error = "", "", None
        try:
            arm()
            try:
                self.door.take(data)
            finally:
                disarm()
            tally.taken += 1
            if number in self.door.refusals:
                kind, detail = "seed", "an example that must be refused was taken"
        except WardroundError as refusal:
            error = refusal
            tally.refused += 1
            said = str(refusal.code or type(refusal).__name__)[:60]
            tally.codes[said] = tally.codes.get(said, 0) + 1
            kind, detail = judged(refusal)
            if not kind and 0 <= number < len(self.door.seeds) and number not in self.door.refusals:
                kind, detail = "seed", f"an example is refused: {refusal.message}"
        except self.door.allowed as refusal:
            tally.refused += 1
            said = type(refusal).__name__
            tally.codes[said] = tally.codes.get(said, 0) + 1
        except Hung as hung:
            error, kind, detail = hung, "hang", str(hung)
        except MemoryError as spent:
            error, kind, detail = spent, "memory", "MemoryError"
        except Uncoded as uncoded:
            error, kind, detail = uncoded, "uncoded", str(uncoded)
        except Broken as broken:
            error, kind, detail = broken, "broken", str(broken)
        except BaseException as crash:
            error, kind, detail = crash, "crash", f"{type(crash).__name__}: {str(crash)[:500]}"
            if isinstance(crash, KeyboardInterrupt):
                raise
        spent_ms = (time.process_time() - began) * 1000
        if spent_ms > tally.slowest_ms:
            tally.slowest_ms, tally.slowest_case = spent_ms, number
        grown = self._memory.peak() - before
        tally.grown = max(tally.grown, grown)
        if not kind and spent_ms > CASE_S * 1000:
            kind, detail = "hang", f"{spent_ms:.0f} ms"
        if not kind and grown > GROWTH:
            kind, detail = "memory", f"{grown >> 20} MiB more than before"
        if not kind:
            return None
        cause = self._heard.last or error
        trace = "".join(traceback.format_exception(cause)[-12:]) if cause is not None else ""
        return Finding(self.target.name, self.seed, number, kind, place_of(cause), f"{detail}\n{trace}")


def judged(error: WardroundError) -> tuple[str, str]:
    """What is wrong with an error of ours: ("", "") for nothing."""
    if error.exit_code == WardroundError.exit_code and not error.code:
        return "uncoded", f"{type(error).__name__} has no exit code of its own: {error.message[:300]}"
    if not isinstance(error.message, str) or not error.message.strip():
        return "uncoded", f"{type(error).__name__} says nothing"
    if len(error.message) > LONGEST_MESSAGE:
        return "broken", f"a message of {len(error.message)} characters: {error.message[:80]}…"
    return "", ""


def place_of(error: BaseException | None) -> str:
    """The innermost line of ours that an error came through."""
    if error is None:
        return ""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [one for one in frames if one.filename.startswith(str(ROOT)) and "/tools/fuzz/" not in one.filename
            and "/.venv/" not in one.filename]  # fmt: skip
    last = ours[-1] if ours else (frames[-1] if frames else None)
    return f"{Path(last.filename).name}:{last.name} {type(error).__name__}" if last else type(error).__name__


# Limits.


def arm() -> None:
    signal.setitimer(signal.ITIMER_PROF, CASE_S)
    signal.setitimer(signal.ITIMER_REAL, WAIT_S)


def disarm() -> None:
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)


def _over(number: int, frame: FrameType | None) -> None:
    how = (
        f"more than {CASE_S:.0f} s of processor time"
        if number == signal.SIGPROF
        else f"waited more than {WAIT_S:.0f} s"
    )
    raise Hung(how)


@contextmanager
def timers() -> Iterator[None]:
    before = [(which, signal.signal(which, _over)) for which in (signal.SIGPROF, signal.SIGALRM)]
    try:
        yield
    finally:
        disarm()
        for which, handler in before:
            signal.signal(which, handler)


def limit_memory() -> None:
    """From here on this process gets so much memory and no more."""
    soft = MEMORY + _data_bytes()
    resource.setrlimit(resource.RLIMIT_DATA, (soft, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def _data_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[5]) * os.sysconf("SC_PAGE_SIZE")


class Memory:
    """This process's resident memory. Where the kernel lets the high-water mark be reset, the peak of one case too."""

    def __init__(self) -> None:
        self._page = os.sysconf("SC_PAGE_SIZE")
        self._statm = os.open("/proc/self/statm", os.O_RDONLY)
        self._status = os.open("/proc/self/status", os.O_RDONLY)
        try:
            self._clear = os.open("/proc/self/clear_refs", os.O_WRONLY)
        except OSError:
            self._clear = -1

    def __del__(self) -> None:
        for descriptor in (self._statm, self._status, self._clear):
            if descriptor >= 0:
                os.close(descriptor)

    def resident(self) -> int:
        return int(os.pread(self._statm, 200, 0).split()[1]) * self._page

    def reset(self) -> int:
        """Begin anew; what is resident now."""
        if self._clear >= 0:
            try:
                os.pwrite(self._clear, b"5", 0)
            except OSError:
                os.close(self._clear)
                self._clear = -1
        return self.resident()

    def peak(self) -> int:
        """The most since ``reset``."""
        if self._clear < 0:
            return self.resident()
        text = os.pread(self._status, 8192, 0)
        at = text.index(b"VmHWM:") + 6
        return int(text[at : text.index(b"kB", at)]) * 1024


class Heard(logging.Handler):
    """Keeps the error that a program logged instead of raising it; says nothing."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.last: BaseException | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            self.last = record.exc_info[1]

    def __enter__(self) -> "Heard":
        root = logging.getLogger()
        self._before = root.handlers[:], root.level
        root.handlers[:] = [self]
        root.setLevel(logging.ERROR)
        return self

    def __exit__(self, *exception: object) -> None:
        root = logging.getLogger()
        root.handlers[:], level = self._before
        root.setLevel(level)


def scratch() -> str | None:
    """A folder in memory for what cases write; None for the usual one."""
    return "/dev/shm" if sys.platform == "linux" and Path("/dev/shm").is_dir() else None
