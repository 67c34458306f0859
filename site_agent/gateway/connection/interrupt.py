"""Stop what is under way, at once, from another thread: a call is cancelled, a training process killed."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Interrupted(Exception):
    """The work was called off. Not a failure: whoever called it off knows why."""


class Interrupt:
    """A switch that is thrown once. Work registers how to end itself; a wait on it wakes at once."""

    def __init__(self) -> None:
        self._thrown = threading.Event()
        self._lock = threading.Lock()
        self._stops: list[Callable[[], object]] = []

    def throw(self) -> None:
        """Call the work off. Safe to repeat."""
        with self._lock:
            self._thrown.set()
            stops = list(self._stops)
        for stop in stops:
            stop()

    @property
    def thrown(self) -> bool:
        return self._thrown.is_set()

    def check(self) -> None:
        """Raises Interrupted if the work was called off."""
        if self.thrown:
            raise Interrupted

    def wait(self, seconds: float) -> None:
        """Wait, and raise Interrupted as soon as the work is called off."""
        self._thrown.wait(seconds)
        self.check()

    @contextmanager
    def ending(self, stop: Callable[[], object]) -> Iterator[None]:
        """While the block runs, ``throw`` calls ``stop`` (from its own thread)."""
        with self._lock:
            self.check()
            self._stops.append(stop)
        try:
            yield
        finally:
            with self._lock:
                self._stops.remove(stop)
