"""How often each site may do something in an hour."""

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable

from wardround.errors import TryAgain

HOUR_S = 3600


class Allowance:
    """How often each site may do something in an hour. In memory: a restart forgets."""

    def __init__(self, what: str, wall_clock: Callable[[], float] = time.time) -> None:
        self._what = what
        self._wall_clock = wall_clock
        self._lock = threading.Lock()
        self._times: dict[str, deque[float]] = defaultdict(deque)

    def take(self, site: str, most: int, others: int = 0) -> None:
        """Once more, if it was less than ``most`` times. ``others``: how often it was done that is not counted here.

        Raises:
            TryAgain: that is too often (TOO_BUSY).
        """
        with self._lock:
            times = self._times[site]
            while times and times[0] < self._wall_clock() - HOUR_S:
                times.popleft()
            if len(times) + others >= most:
                raise TryAgain(f"{len(times) + others} {self._what} of site `{site}` in an hour", code="TOO_BUSY")
            times.append(self._wall_clock())

    def give_back(self, site: str) -> None:
        """It came to something."""
        with self._lock:
            if self._times[site]:
                self._times[site].popleft()
