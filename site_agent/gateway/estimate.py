"""How long a round's training will still take, told to the coordinator while it goes on.

Only for a round that takes a while, and again only when it will take half as long again or more. So an operator hears
of a slow site before the deadline, and a deadline that follows what the sites need has something to follow. The
coordinator sees by itself when the update comes; this says no more than that, earlier.

How far a training is, the trainer says, and nobody can check it. So what is told is one of a few lengths, and a few
times a round: what a trainer could say by it is ``BITS``, whatever it does and however often the round is begun.
"""

import math
import time
from bisect import bisect_left
from collections.abc import Callable

from wardround.records.trainer import Progress

FIRST_S = 30.0  # of training, before anything is told
MINUTE_S = 60
MINUTES = tuple(sorted([*(2**power for power in range(16)), *(3 * 2**power for power in range(14))]))
MOST_TOLD = 4  # times of one round, all its attempts together
BITS = MOST_TOLD * math.ceil(math.log2(len(MINUTES) + 1))


class Estimate:
    """From a round's progress. ``tell`` gets the seconds that are left; of this round it was told ``told`` times."""

    def __init__(
        self, tell: Callable[[int], object], told: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._tell, self._told = tell, told
        self._clock = clock
        self._began = clock()
        self._ends = 0.0  # as it was told

    def note(self, progress: Progress) -> None:
        """The training has come so far."""
        now = self._clock()
        trained_s = now - self._began
        if self._told >= MOST_TOLD or trained_s < FIRST_S or not 0 < progress.step < progress.steps:
            return
        left_s = trained_s * (progress.steps - progress.step) / progress.step
        if self._ends and left_s < 1.5 * max(self._ends - now, MINUTE_S):
            return
        minutes = MINUTES[min(bisect_left(MINUTES, left_s / MINUTE_S), len(MINUTES) - 1)]
        self._ends = now + minutes * MINUTE_S
        self._told += 1
        self._tell(minutes * MINUTE_S)
