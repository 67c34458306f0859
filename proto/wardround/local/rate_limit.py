"""A rate limit (token bucket) for what a peer can cause without end, and logs that have one for each message."""

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

BURST = 20  # at once
PER_MINUTE = 4.0  # after that


class RateLimit:
    """``BURST`` at once, then ``PER_MINUTE``. Not safe for several threads."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._room = float(BURST)
        self._at = monotonic()

    def take(self) -> bool:
        """Whether one more is allowed now; if so, it is counted."""
        now = self._monotonic()
        self._room = min(float(BURST), self._room + (now - self._at) * PER_MINUTE / 60)
        self._at = now
        if self._room < 1:
            return False
        self._room -= 1
        return True


class RateLimitedLog(logging.LoggerAdapter[logging.Logger]):
    """A log with a ``RateLimit`` for each message, whatever its arguments; the next one that is written says how many
    were left out. Safe to use from several threads."""

    def __init__(self, log: logging.Logger, monotonic: Callable[[], float] = time.monotonic) -> None:
        super().__init__(log)
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._limits: dict[object, RateLimit] = {}
        self._left_out: dict[object, int] = {}

    def log(self, level: int, msg: object, *args: Any, **more: Any) -> None:
        """Write it, or count it."""
        with self._lock:
            if not self._limits.setdefault(msg, RateLimit(self._monotonic)).take():
                self._left_out[msg] = self._left_out.get(msg, 0) + 1
                return
            left_out = self._left_out.pop(msg, 0)
        self.logger.log(level, f"{msg} ({left_out} more like it were not logged)" if left_out else msg, *args, **more)


class LimitedLibrary(logging.Filter):
    """Lets what a library logs through with a ``RateLimit`` for each of its lines of code, the kind of an exception in
    place of its traceback: a peer that sends what cannot be decoded would fill the disk. All other records pass."""

    def __init__(self, library: str, monotonic: Callable[[], float] = time.monotonic) -> None:
        super().__init__(library)
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._limits: dict[object, RateLimit] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether it is written."""
        if not super().filter(record):
            return True
        kind = record.exc_info[0] if record.exc_info else None
        if kind is not None:
            record.msg, record.args = f"{record.getMessage()} ({kind.__name__})", None
        record.exc_info = record.exc_text = record.stack_info = None
        with self._lock:
            limit = self._limits.setdefault((record.name, record.lineno), RateLimit(self._monotonic))
            return limit.take()
