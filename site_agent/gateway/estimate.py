"""How long a round's training will still take, told to the coordinator while it goes on.

Only for a round that takes a while, in whole minutes, and again only when it will take half as long again or more.
So an operator hears of a slow site before the deadline, and a deadline that follows what the sites need has something
to follow. The coordinator sees by itself when the update comes; this says no more than that, earlier.
"""

import math
import time
from collections.abc import Callable

from wardround.records.trainer import Progress

FIRST_S = 30.0  # of training, before anything is told
MINUTE_S = 60
MOST_S = 30 * 86400


class Estimate:
    """From a round's progress. ``tell`` gets the seconds that are left."""

    def __init__(self, tell: Callable[[int], object], clock: Callable[[], float] = time.monotonic) -> None:
        self._tell = tell
        self._clock = clock
        self._began = clock()
        self._ends = 0.0  # as it was told

    def note(self, progress: Progress) -> None:
        """The training has come so far."""
        now = self._clock()
        trained_s = now - self._began
        if trained_s < FIRST_S or not 0 < progress.step < progress.steps:
            return
        left_s = trained_s * (progress.steps - progress.step) / progress.step
        if self._ends and left_s < 1.5 * max(self._ends - now, MINUTE_S):
            return
        minutes = math.ceil(min(left_s, MOST_S) / MINUTE_S)
        self._ends = now + minutes * MINUTE_S
        self._tell(minutes * MINUTE_S)
