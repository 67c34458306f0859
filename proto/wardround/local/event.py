"""An event that a signal handler may set.

``threading.Event`` may not be: a handler runs in the main thread between two of its instructions, and when those are
inside ``Event.wait``, with the event's lock held, ``Event.set`` waits for that lock for ever. A byte in a pipe needs no
lock.

Nor is the handler what wakes: the kernel may give a signal to any thread, or just before the main one begins to wait,
and then the main thread would sleep on and run no handler. Python's own, in C, puts a byte into the pipe wherever it
runs.
"""

import os
import select
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from signal import SIGINT, SIGTERM, set_wakeup_fd, signal


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

    @contextmanager
    def woken_by_signals(self) -> Iterator[None]:
        """While the block runs, any signal that has a handler of ours sets it. For the main thread."""
        before = set_wakeup_fd(self._write, warn_on_full_buffer=False)
        try:
            yield
        finally:
            set_wakeup_fd(before)

    def __del__(self) -> None:
        os.close(self._read)
        os.close(self._write)


@contextmanager
def set_by_signals(latch: Latch) -> Iterator[Latch]:
    """While the block runs, SIGTERM and SIGINT set ``latch``. For the main thread."""
    with latch.woken_by_signals():
        before = {number: signal(number, lambda *_: latch.set()) for number in (SIGTERM, SIGINT)}
        try:
            yield latch
        finally:
            for number, handler in before.items():
                signal(number, handler)
