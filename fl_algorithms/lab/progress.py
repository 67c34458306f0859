"""How far something is and how long it may still take: a bar on a terminal, else a line now and then. No torch."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from wardround.cli import say

PERIOD_S = 30.0  # between two lines where no terminal is


class Estimate:
    """The time that is left, of the pace so far."""

    def __init__(self, total: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._total, self._clock = total, clock
        self._begun: tuple[float, float] | None = None  # when the first word came, and of how much

    def left_s(self, done: float) -> float | None:
        """Seconds; None while nothing was done since the first word."""
        now = self._clock()
        if self._begun is None:
            self._begun = now, done
        since, before = self._begun
        if done <= before:
            return None
        return (now - since) / (done - before) * max(self._total - done, 0)


def shown(seconds: float) -> str:
    """A duration as a person says it: "40 s", "3 min", "2 h 10 min"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


@contextmanager
def rounds_shown(seeds: int, rounds: int, clock: Callable[[], float] = time.monotonic) -> Iterator[Callable[..., None]]:
    """What is called with (seeds done, rounds done of this one, a title) as a run goes on."""
    estimate, last = Estimate(seeds * rounds, clock), clock()
    if not sys.stderr.isatty():

        def line(seeds_done: int, done: float, title: str) -> None:
            nonlocal last
            left = estimate.left_s(seeds_done * rounds + done)
            if clock() - last < PERIOD_S:
                return
            last = clock()
            about = "" if left is None else f", about {shown(left)} left"
            say(f"{title}: round {int(done)} of {rounds}{about}")

        yield line
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f} %"))
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("rounds", total=seeds * rounds)
        yield lambda seeds_done, done, title: bar.update(
            task, completed=seeds_done * rounds + done, description=f"{title}: round {int(done)} of {rounds}"
        )
