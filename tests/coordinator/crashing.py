"""A coordinator that dies by SIGKILL at its N-th durable step, or whose disk fails there.

    python -m tests.coordinator.crashing STATE WHERE N HALF

WHERE is "sync" (before an fsync of ours), "before-commit" or "after-commit" (of a database transaction). With "fails-"
before it, the disk fails there instead: an fsync gives EIO, SQLite an I/O error. Nothing happens with N = 0. HALF is
"mean" or "toy": the server half of its studies.
"""

import errno
import os
import signal
import sqlite3
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.orm import Session

from coordinator import server
from coordinator.state_directory import State
from coordinator.storage.database import Store
from coordinator.studies import study
from tests.coordinator.toy_half import toy_half


class Countdown:
    def __init__(self, steps: int, act: Callable[[], object]) -> None:
        self._left = steps
        self._act = act
        self._lock = threading.Lock()

    def step(self) -> None:
        with self._lock:
            self._left -= 1
            due = self._left == 0
        if due:
            self._act()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail_fsync() -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def fail_commit() -> None:
    cause = sqlite3.OperationalError("disk I/O error")
    cause.sqlite_errorcode = sqlite3.SQLITE_IOERR_FSYNC
    raise sa.exc.OperationalError("COMMIT", None, cause)


def main() -> None:
    state, where = Path(sys.argv[1]), sys.argv[2].removeprefix("fails-")
    failing = fail_fsync if where == "sync" else fail_commit
    steps = Countdown(int(sys.argv[3]), failing if sys.argv[2].startswith("fails-") else die)
    real_sync, real_write = os.fsync, Store.write

    def sync(descriptor: int) -> None:
        if where == "sync":
            steps.step()
        real_sync(descriptor)

    @contextmanager
    def write(self: Store) -> Iterator[Session]:
        with real_write(self) as session:
            yield session
            session.flush()
            if where == "before-commit":
                steps.step()
        if where == "after-commit":
            with self._sound():
                steps.step()

    if sys.argv[4] == "toy":
        study.server_aggregator = toy_half
    os.fsync = sync
    Store.write = write  # type: ignore[method-assign]
    server.serve(State(state), "")


if __name__ == "__main__":
    main()
