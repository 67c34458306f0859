"""What a site is to tell, or to answer, of attempts with secure aggregation: a queue that no coordinator makes long."""

import threading

from wardround.records.secure_messages import SecureShown, SecureTold

MOST = 64  # that wait; all that is left out is shown again with the next connection, if it still counts


class Due:
    """Of each step of a study the newest message alone waits, in the order in which they came. Safe to use from several
    threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: dict[tuple[str, str, str], SecureTold | SecureShown] = {}
        self._closed = False

    def put(self, due: SecureTold | SecureShown) -> None:
        """Let it wait in place of an older one. What is shown is left out while too much waits."""
        key = (type(due).__name__, due.attempt.study, due.kind)
        with self._changed:
            self._waiting.pop(key, None)
            if isinstance(due, SecureTold) or len(self._waiting) < MOST:
                self._waiting[key] = due
            self._changed.notify_all()

    def get(self) -> SecureTold | SecureShown | None:
        """The next one; waits for it. None once after ``close``, when nothing is left."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            if self._waiting:
                return self._waiting.pop(next(iter(self._waiting)))
            self._closed = False
            return None

    def close(self) -> None:
        """End a ``get`` when nothing is left."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
