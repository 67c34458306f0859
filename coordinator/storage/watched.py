"""Whether the database's files are still those that this process opened.

SQLite goes on with files that somebody deleted, replaced or wrote over: what it commits then is in no file that the
next process finds. So the files are compared after each transaction, before anybody hears of it. The main file changes
at checkpoints alone, and no connection of ours makes one by itself: they are made here.
"""

import threading
from collections.abc import Callable
from pathlib import Path

from wardround.errors import NeedsPerson
from wardround.local.directory import quoted
from wardround.local.durable import StorageFailed

LOG_BYTES = 4 * 1024 * 1024  # of the write-ahead log, before it is moved into the main file
BESIDE = ("-wal", "-shm")


class StoreLost(StorageFailed, NeedsPerson):
    """The database is damaged, or not the one that was opened. The process must end, and a person must look."""

    exit_code = NeedsPerson.exit_code


class WatchedFiles:
    """The files of one open database, from ``begin`` on.

    Args:
        checkpoint: moves what is committed from the log into the main file, as far as no reader needs it there.
    """

    def __init__(self, path: Path, checkpoint: Callable[[], None]) -> None:
        self._path = path
        self._checkpoint = checkpoint
        self._lock = threading.Lock()
        self._known: dict[str, tuple[int, ...]] = {}
        self._paths = {suffix: Path(f"{path}{suffix}") for suffix in ("", *BESIDE)}

    def begin(self) -> None:
        """From now on the files that are there are the right ones."""
        with self._lock:
            self._known = {suffix: self._look(suffix) for suffix in self._paths}

    def refuse_changed(self) -> None:
        """Raises StoreLost: a file is not there any more, or is another, or was written by somebody else."""
        if self._changed() is None:
            return
        with self._lock:  # a checkpoint changes the main file, and then notes it
            changed = self._changed()
        if changed is not None:
            raise self._lost(self._paths[changed])

    def _changed(self) -> str | None:
        """The suffix of a file that is not as it was noted."""
        return next((suffix for suffix, known in self._known.items() if self._look(suffix) != known), None)

    def move_log(self) -> None:
        """Make a checkpoint if the log is long."""
        if not self._known or self._size("-wal") < LOG_BYTES:
            return
        with self._lock:
            try:
                self._checkpoint()
            finally:
                self._known[""] = self._look("")

    def _lost(self, file: Path) -> StoreLost:
        return StoreLost(
            f"{file} was deleted, replaced or written over while the coordinator used it; nothing that came after is "
            "acknowledged",
            hint=f"if you have the file, put it back; else {way_back(self._path)}",
        )

    def _look(self, suffix: str) -> tuple[int, ...]:
        """What tells the file from another; of the main file also what changes when it is written."""
        try:
            found = self._paths[suffix].stat()
        except FileNotFoundError:
            return ()
        same = (found.st_dev, found.st_ino)
        return same if suffix else (*same, found.st_size, found.st_mtime_ns)

    def _size(self, suffix: str) -> int:
        try:
            return self._paths[suffix].stat().st_size
        except FileNotFoundError:
            return 0


def damaged(path: Path) -> StoreLost:
    """The error for a database that SQLite cannot read."""
    return StoreLost(f"{path} is damaged", hint=way_back(path))


def way_back(path: Path) -> str:
    """What a person does without a good database."""
    return (
        f"keep {path.parent} aside as it is, then `coordinator restore BACKUP --state {quoted(path.parent)}`; a new "
        "empty one would forget every site"
    )
