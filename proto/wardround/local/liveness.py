"""Whether a process that says nothing is stopped or hung, or merely busy.

A process that is at work says so every ``BEAT_S`` (a beat). One that is silent may still be at work: a library's call
can keep Python from anything else for a while. So the kernel is asked whether the process was stopped (SIGSTOP, a
debugger), and whether it has used any processor time or waits for a disk.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

BEAT_S = 5.0
SILENT_S = 20.0  # without a beat, a process that does nothing is hung
STOPPED_S = 4.0  # a process that is stopped this long was not stopped by mistake for a moment
STOPPED, WAITS_FOR_DISK = "Tt", "D"  # states, as the kernel names them


@dataclass(frozen=True)
class Look:
    """A process at one moment: its state as a letter, and the processor time (in ticks) and page faults it has had."""

    state: str
    used: tuple[int, ...]


def look(pid: int) -> Look:
    """The process as the kernel shows it; one that is not shown is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return Look("X", ())
    return Look(fields[0], (int(fields[9]), int(fields[11]), int(fields[12])))  # majflt, utime, stime


def is_stopped(pid: int) -> bool:
    """Whether it is stopped now."""
    return look(pid).state in STOPPED


class Watch:
    """Judges one process by its beats and by looks at it. Not safe for several threads."""

    def __init__(
        self, pid: int, *, see: Callable[[int], Look] = look, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._pid, self._see, self._now = pid, see, now
        self._heard = self._moved = self._looked = now()
        self._stopped: float | None = None  # since when it was seen stopped
        self._last = see(pid)

    def heard(self) -> None:
        """It said something."""
        self._heard = self._now()

    def frozen(self) -> str:
        """What is wrong with it, in words; "" while nothing is. Asked every few seconds."""
        at, seen = self._now(), self._see(self._pid)
        if at - self._looked >= SILENT_S / 2:  # this process was stopped too, or has had no time: begin anew
            self._heard, self._stopped = at, None
        self._looked = at
        if seen.state not in STOPPED:
            self._stopped = None
        elif self._stopped is None:
            self._stopped = at
        if seen.used != self._last.used or seen.state in WAITS_FOR_DISK:
            self._moved = at
        self._last = seen
        if self._stopped is not None and at - self._stopped >= STOPPED_S:
            return "is stopped"
        silent_s = at - max(self._heard, self._moved)
        return f"has said and done nothing for {silent_s:.0f} s" if silent_s >= SILENT_S else ""
