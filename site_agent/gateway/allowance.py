"""How often a line is written that a peer can cause without end: a token bucket, for the ledger and for the log.

What leaves has a line in the ledger always, and is no business of this module.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

AT_ONCE = 20  # lines of one kind
PER_MINUTE = 4.0  # after these


class Allowance:
    """Room for ``AT_ONCE`` lines, which fills again by ``PER_MINUTE``."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._room = float(AT_ONCE)
        self._at = monotonic()

    def take(self) -> bool:
        """Whether there is room for one more; if so, it is taken."""
        now = self._monotonic()
        self._room = min(float(AT_ONCE), self._room + (now - self._at) * PER_MINUTE / 60)
        self._at = now
        if self._room < 1:
            return False
        self._room -= 1
        return True


class SparingLog(logging.LoggerAdapter[logging.Logger]):
    """A log with an ``Allowance`` for each message, whatever its arguments; the next one that is written says how many
    were left out. Safe to use from several threads."""

    def __init__(self, log: logging.Logger, monotonic: Callable[[], float] = time.monotonic) -> None:
        super().__init__(log)
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._allowances: dict[object, Allowance] = {}
        self._left_out: dict[object, int] = {}

    def log(self, level: int, msg: object, *args: Any, **more: Any) -> None:
        """Write it, or count it."""
        with self._lock:
            if not self._allowances.setdefault(msg, Allowance(self._monotonic)).take():
                self._left_out[msg] = self._left_out.get(msg, 0) + 1
                return
            left_out = self._left_out.pop(msg, 0)
        self.logger.log(level, f"{msg} ({left_out} more like it were not logged)" if left_out else msg, *args, **more)
