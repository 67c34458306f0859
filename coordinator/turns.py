"""Long transfers over fast lines take turns, so that what gRPC holds for them does not grow with the number of sites.

For a stream under way gRPC holds as many bytes as its line has in flight: several MiB where the line is fast. Two fast
transfers at a time keep processors and network as busy as sixteen, and take less memory. A transfer over a slow line
holds little and lasts long, so it waits for nobody, and nobody for it: one that turns out to be slow, or that stands
still, gives its place up, and the site's next ones go at once until one of them is fast again.
"""

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

PLACES = 2
SMALL = 1024 * 1024  # bytes; what is shorter takes no turn
FAST = 32 * 1024 * 1024  # bytes a second, from which a transfer counts as fast
JUDGED_S = 0.25  # after which that is looked at
PATIENCE_S = 10.0  # after which a transfer goes without a turn
LOOK_S = 0.05  # how often those who wait look at those who go


class Turn:
    """One transfer, which goes at once unless it waits first."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._bytes = 0

    def begin(self) -> None:
        """It has waited, and can move from now on."""
        self._began = time.monotonic()

    def moved(self, size: int) -> None:
        """So many bytes went."""
        self._bytes += size

    @property
    def is_slow(self) -> bool:
        """Whether it has gone for a while, and not fast; also if it stands still."""
        seconds = time.monotonic() - self._began
        return seconds > JUDGED_S and self._bytes < FAST * seconds


class Turns:
    """Who goes now, and who waits, first come, first served. For any number of threads."""

    def __init__(self, places: int = PLACES, patience_s: float = PATIENCE_S) -> None:
        self._places = places
        self._patience_s = patience_s
        self._changed = threading.Condition()
        self._going: set[Turn] = set()
        self._waiting: deque[Turn] = deque()
        self._slow: set[str] = set()  # sites whose last long transfer was

    @contextmanager
    def taken(self, site: str, size: int) -> Iterator[Turn]:
        """Wait for a turn to move ``size`` bytes from or to ``site``, and give it up at the end of the block."""
        turn = Turn()
        if size < SMALL:
            yield turn
            return
        if site not in self._slow:
            self._wait(turn)
        try:
            yield turn
        finally:
            (self._slow.add if turn.is_slow else self._slow.discard)(site)
            self._leave(turn)

    def _wait(self, turn: Turn) -> None:
        until = time.monotonic() + self._patience_s
        with self._changed:
            self._waiting.append(turn)
            while (now := time.monotonic()) < until:
                self._going = {going for going in self._going if not going.is_slow}
                if self._waiting[0] is turn and len(self._going) < self._places:
                    self._going.add(turn)
                    break
                self._changed.wait(min(LOOK_S, until - now))
            turn.begin()  # before any other looks at it
            self._waiting.remove(turn)
            self._changed.notify_all()

    def _leave(self, turn: Turn) -> None:
        with self._changed:
            self._going.discard(turn)
            self._changed.notify_all()
