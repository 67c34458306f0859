"""An event that a signal handler may set.

``threading.Event`` may not be: a handler runs in the main thread between two of its instructions, and when those are
inside ``Event.wait``, with the event's lock held, ``Event.set`` waits for that lock for ever. A byte in a pipe needs no
lock.
"""

import os
import select
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from signal import SIGINT, SIGTERM, signal


class Latch:
    """Set once, by any thread or signal handler; waited for by any thread."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def set(self) -> None:
        """Set it. Safe to repeat, and in a signal handler."""
        with suppress(BlockingIOError):  # the pipe is full of earlier calls
            os.write(self._write, b".")

    def is_set(self) -> bool:
        return self.wait(0)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether it is set, at the latest after ``timeout_s``."""
        poll = select.poll()
        poll.register(self._read, select.POLLIN)
        return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))

    def __del__(self) -> None:
        os.close(self._read)
        os.close(self._write)


@contextmanager
def set_by_signals(latch: Latch) -> Iterator[Latch]:
    """While the block runs, SIGTERM and SIGINT set ``latch``. For the main thread."""
    before = {number: signal(number, lambda *_: latch.set()) for number in (SIGTERM, SIGINT)}
    try:
        yield latch
    finally:
        for number, handler in before.items():
            signal(number, handler)
