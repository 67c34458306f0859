"""Long transfers take turns, so that what gRPC holds for them does not grow with the number of sites.

For a stream under way gRPC holds as many bytes as its line has in flight: several MiB where the line is fast. Two fast
transfers at a time keep processors and network as busy as sixteen, and take less memory. A transfer over a slow line
holds little and lasts long, so it waits for nobody, and nobody for it: one that turns out to be slow, or that stands
still, gives its place up, and the site's next ones go at once until one of them is fast again. Where this machine's
processors have no time left, it is not the line that is slow, and more at a time would bring nothing: then two go,
however long it takes.
"""

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

PLACES = 2
SMALL = 1024 * 1024  # bytes; what is shorter takes no turn
FAST = 32 * 1024 * 1024  # bytes a second, from which a transfer counts as fast
JUDGED_S = 0.25  # after which that is looked at
SPARE = 0.25  # processors that were idle meanwhile, from which a transfer that is not fast is the line's fault
STANDING = 1024 * 1024  # bytes a second, under which it is, however busy the processors are,
STANDING_S = 1.0  # after this time
STILL_S = 5.0  # without a byte, after which it stands, however much went before
PATIENCE_S = 20.0  # after which a transfer goes without a turn
LOOK_S = 0.05  # how often the first of those who wait looks at those who go
GONE_S = 1.0  # how often each of the others looks whether its peer is still there
STAT = Path("/proc/stat")
TICKS = os.sysconf("SC_CLK_TCK")  # a second


def idle_seconds() -> float:
    """For how long this machine's processors have been idle since it started, all of them together.

    Infinite where the system does not say so; a sandbox may have zeros alone there.
    """
    try:
        with STAT.open("rb") as file:
            return int(file.readline().split()[4]) / TICKS or math.inf  # cpu, user, nice, system, idle
    except (OSError, IndexError, ValueError):
        return math.inf


class Turn:
    """One transfer, which goes at once unless it waits first. ``idle``: as ``idle_seconds``."""

    def __init__(self, idle: Callable[[], float] = idle_seconds) -> None:
        self._idle = idle
        self._bytes = 0
        self.begin()

    def begin(self) -> None:
        """It can move from now on."""
        self._began, self._idle_before = time.monotonic(), self._idle()
        self._moved = self._began

    def moved(self, size: int) -> None:
        """So many bytes went."""
        self._bytes += size
        self._moved = time.monotonic()

    @property
    def is_slow(self) -> bool:
        """Whether it stands still, or has gone for a while and not fast, for another reason than this machine's
        processors.
        """
        now = time.monotonic()
        seconds = now - self._began
        if now - self._moved > STILL_S:
            return True
        if seconds < JUDGED_S or self._bytes > FAST * seconds:
            return False
        stands = seconds > STANDING_S and self._bytes < STANDING * seconds
        return stands or not self._idle() - self._idle_before < SPARE * seconds  # infinite less infinite is no number


class Turns:
    """Who goes now, and who waits, first come, first served. For any number of threads."""

    def __init__(
        self, places: int = PLACES, patience_s: float = PATIENCE_S, idle: Callable[[], float] = idle_seconds
    ) -> None:
        self._idle = idle
        self._places = places
        self._patience_s = patience_s
        self._changed = threading.Condition()
        self._going: set[Turn] = set()
        self._waiting: deque[Turn] = deque()
        self._slow: set[str] = set()  # sites whose last long transfer was

    @contextmanager
    def taken(self, site: str, size: int, is_active: Callable[[], bool] = lambda: True) -> Iterator[Turn]:
        """Wait for a turn to move ``size`` bytes from or to ``site``, and give it up at the end of the block.

        Nobody waits any more whose transfer is not active: the block begins without a turn, and its first step fails.
        """
        if size < SMALL:
            yield Turn(lambda: math.inf)  # nobody looks at it
            return
        turn = Turn(self._idle)
        if site not in self._slow:
            self._wait(turn, is_active)
        try:
            yield turn
        finally:
            (self._slow.add if turn.is_slow else self._slow.discard)(site)
            self._leave(turn)

    def _wait(self, turn: Turn, is_active: Callable[[], bool]) -> None:
        until = time.monotonic() + self._patience_s
        with self._changed:
            self._waiting.append(turn)
            while (left := until - time.monotonic()) > 0 and is_active():
                first = self._waiting[0] is turn
                if first:  # it looks for all: what it reads, the processors that are short must make
                    self._going = {going for going in self._going if not going.is_slow}
                    if len(self._going) < self._places:
                        self._going.add(turn)
                        break
                self._changed.wait(min(left, LOOK_S if first else GONE_S))
            turn.begin()  # before any other looks at it
            self._waiting.remove(turn)
            self._changed.notify_all()

    def _leave(self, turn: Turn) -> None:
        with self._changed:
            self._going.discard(turn)
            self._changed.notify_all()
