"""One process owns a state directory: the lock that it holds, and whether somebody does."""

import fcntl
import os
import time
from pathlib import Path

from wardround.errors import CannotWrite, TryAgain
from wardround.local.durable import naming


class StateLock:
    """One process owns a state directory. Freed by the kernel when the process ends, however it ends."""

    def __init__(self, state: Path, owner: str, *, patience_s: float = 0.2) -> None:
        """Take ``state/lock`` for ``owner`` ("coordinator serve").

        Args:
            patience_s: how long a holder that is just ending may take over it; ``is_held`` holds it for a moment too.

        Raises:
            TryAgain: another process holds it; the message says which.
            CannotWrite: no such folder, another user's, or a full disk.
        """
        path = state / "lock"
        with naming(path):
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        deadline = time.monotonic() + patience_s
        while not (taken := self._try()) and time.monotonic() < deadline:
            time.sleep(0.05)
        if not taken:
            holder = os.pread(self._descriptor, 200, 0).decode(errors="replace").strip() or "another process"
            os.close(self._descriptor)
            raise TryAgain(f"{state} is in use by {holder}", hint="stop that process first, or use another --state")
        try:
            with naming(path):
                os.ftruncate(self._descriptor, 0)
                os.pwrite(self._descriptor, f"{owner} (process {os.getpid()})\n".encode(), 0)
        except CannotWrite:
            os.close(self._descriptor)
            raise

    def _try(self) -> bool:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def release(self) -> None:
        os.close(self._descriptor)

    def __enter__(self) -> "StateLock":
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()


def is_held(state: Path) -> bool:
    """Whether a process owns a state directory now, as far as this user may know."""
    try:
        descriptor = os.open(state / "lock", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False
