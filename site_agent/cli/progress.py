"""How far a long look at data is: a line on a terminal that counts up, and elsewhere a line every ten seconds."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from wardround.records.trainer import Progress

EVERY_S = 10.0  # where nobody looks at a terminal


@contextmanager
def shown(
    what: str, stream: TextIO | None = None, now: Callable[[], float] = time.monotonic
) -> Iterator[Callable[[Progress], None]]:
    """What is to be called with each step of ``what`` ("predicting"), while the block lasts.

    It counts on one line, for which it writes past the screen that takes control characters out: what it prints is its
    own words and numbers.
    """
    out = stream or sys.__stderr__ or sys.stderr
    live, last = out.isatty(), now()
    wrote = False

    def tell(progress: Progress) -> None:
        nonlocal last, wrote
        line = f"{what}: {progress.step:,} of {progress.steps:,}"
        if live:
            print(f"\r{line}\x1b[K", end="", file=out, flush=True)
            wrote = True
        elif now() - last >= EVERY_S:
            last = now()
            print(line, file=out, flush=True)

    try:
        yield tell
    finally:
        if wrote:
            print("\r\x1b[K", end="", file=out, flush=True)
