"""The database as one file: SQLite in WAL mode with ``synchronous=FULL``.

A writing transaction takes the write lock at its beginning. What is committed is durable, in the file that the next
process opens: see ``coordinator.storage.watched``. Errors of the database become ours here.
"""

import logging
import os
import sqlite3
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.orm import Session

from coordinator.storage import schema
from coordinator.storage.watched import WatchedFiles, damaged, way_back
from wardround.errors import CannotWrite, NeedsPerson, TryAgain, WardroundError
from wardround.local.directory import quoted
from wardround.local.durable import AFTER, BROKEN_DISK, StorageFailed, move, remove, sync_file, unread

log = logging.getLogger(__name__)
SETTINGS = (
    "journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", "busy_timeout=10000", "wal_autocheckpoint=0",
    "journal_size_limit=0",  # the log begins again at its beginning, and its size says how much is in it
    "cache_size=-512",  # KiB of each connection: by default 2 MiB, as the database grows. The kernel has its pages
)  # fmt: skip
MOST_FREE = 16  # connections that are kept while nobody uses them


class KeptConnections:
    """Connections that stay open between transactions: one that begins on them costs half of what it costs through the
    engine's pool. One whose transaction failed goes back to the pool, which makes it as new.
    """

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        self._free: deque[sa.Connection] = deque()

    @contextmanager
    def one(self) -> Iterator[sa.Connection]:
        """One that nobody else uses meanwhile."""
        try:
            connection = self._free.pop()
        except IndexError:
            connection = self._engine.connect()
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        if len(self._free) < MOST_FREE:
            self._free.append(connection)
        else:
            connection.close()

    def close(self) -> None:
        """Close those that nobody uses."""
        while self._free:
            self._free.pop().close()


class SQLiteFile:
    """One file. Who may write in it is decided by the lock of the state directory."""

    shared = False

    def __init__(self, path: Path) -> None:
        """An existing database. ``upgrade`` makes one."""
        self.name = str(path)
        self._path = path
        self._engine = _engine(f"sqlite:///file:{path}?mode=rw&uri=true", pool_size=MOST_FREE, max_overflow=-1)
        self._connections = KeptConnections(self._engine)
        self._files = WatchedFiles(path, lambda: self._move_log("PASSIVE"))

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Errors of the database as ours. Nothing is read or written in a file that is another by now."""
        self._files.refuse_changed()
        with explained(self._path):
            yield
        self._files.refuse_changed()

    @contextmanager
    def session(self, *, writes: bool) -> Iterator[Session]:
        """One transaction. With ``writes`` it holds the write lock from its beginning."""
        with (
            self._connections.one() as connection,
            Session(connection, expire_on_commit=False) as session,
            session.begin(),
        ):
            _begin(session.connection(), writes=writes)
            yield session

    def tidy(self) -> None:
        """After a write: move the log into the main file, if it is long."""
        self._files.move_log()

    def lead(self, lost: Callable[[StorageFailed], None]) -> None:
        """Whoever holds the state directory's lock may write. What earlier processes committed is made durable."""
        with self.explained():
            self._move_log("TRUNCATE")
        self._files.begin()

    def _move_log(self, how: str) -> None:
        connection = self._engine.raw_connection()
        try:
            connection.cursor().execute(f"PRAGMA wal_checkpoint({how})").close()
        except sqlite3.DatabaseError as error:
            raise sa.exc.DatabaseError("wal_checkpoint", None, error) from error
        finally:
            connection.close()

    def copy_to(self, path: Path) -> None:
        """Write a copy of what is committed to a new file, whole and durable, while others read and write."""
        source = self._engine.raw_connection()
        try:
            assert isinstance(source.driver_connection, sqlite3.Connection)
            copy_database(source.driver_connection, path)
        finally:
            source.close()

    def schema(self) -> str | None:
        """The schema of this database; None of one that has none. Raises StoreLost: it is damaged."""
        with explained(self._path), self._engine.connect() as connection:
            found = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar()
            if found != "ok":
                raise damaged(self._path)
            return schema.schema_of(connection)

    def upgrade_hint(self) -> str:
        """What brings an older one to this program's schema."""
        return f"`coordinator upgrade --state {quoted(self._path.parent)}` changes it, and keeps a copy of it"

    def close(self, *, failed: bool) -> None:
        """Raises StoreLost: what was committed last is in no file that the next process finds."""
        try:
            if not failed:
                self._files.refuse_changed()
        finally:
            self._connections.close()
            self._engine.dispose()


def upgrade(path: Path) -> Path | None:
    """Bring the database at ``path`` to this program's tables, or make it. Whole or not at all.

    Returns:
        The copy of the older one that was kept beside it; None where there was none, or nothing to change.

    Raises:
        NeedsPerson: a newer program wrote it.
    """
    kept = _keep_older(path)
    migrate(path)
    path.chmod(0o600)
    return kept


def migrate(path: Path, to: str = "head") -> None:
    """Make the tables of a schema at ``path``, or change those that are there."""
    engine = _engine(f"sqlite:///{path}")
    try:
        with explained(path), engine.connect() as connection, connection.begin():
            _begin(connection, writes=True)
            schema.migrate(connection, to)
    finally:
        engine.dispose()


def _keep_older(path: Path) -> Path | None:
    """Copy a database of an older schema, before it is changed. Raises NeedsPerson: it is of a newer one."""
    if not path.exists():
        return None
    present_file = SQLiteFile(path)
    try:
        present = present_file.schema()
        if present is None or present == schema.newest_schema():
            return None
        schema.refuse_newer(path, present)
        kept = path.with_name(f"{path.stem}-{present}{path.suffix}")
        with explained(path):
            present_file.copy_to(kept)
    finally:
        present_file.close(failed=False)
    return kept


def copy_database(source: sqlite3.Connection, path: Path) -> None:
    """Write what ``source`` has committed to ``path``, whole or not at all, durably."""
    temporary = path.with_name(f".{path.name}.copy")
    remove(temporary)
    target = sqlite3.connect(temporary)
    try:
        source.backup(target)
        target.execute("PRAGMA journal_mode=DELETE")  # one file and no log beside it
    finally:
        target.close()
    temporary.chmod(0o600)
    sync_file(temporary)
    move(temporary, path)


def _engine(url: str, **options: int) -> sa.Engine:
    engine = sa.create_engine(url, **options)
    sa.event.listen(engine, "connect", _settings)
    return engine


def _settings(connection: sqlite3.Connection, record: object) -> None:
    connection.isolation_level = None  # we say when a transaction begins: see _begin
    for setting in SETTINGS:
        connection.execute(f"PRAGMA {setting}")


def _begin(connection: sa.Connection, *, writes: bool) -> None:
    """Begin a transaction; with ``writes`` it takes the write lock."""
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn the database's errors into ours; a fault of our own statements stays what it is."""
    try:
        yield
    except WardroundError:
        raise
    except sa.exc.DatabaseError as error:
        code = getattr(error.orig, "sqlite_errorcode", 0) & 0xFF
        if code == sqlite3.SQLITE_FULL:
            raise CannotWrite(f"{path}: no space left", hint="free some space; nothing was lost") from error
        if code == sqlite3.SQLITE_IOERR:
            raise StorageFailed(
                f"{path}: the disk failed to keep what was written",
                hint=AFTER,
            ) from error
        if code == sqlite3.SQLITE_BUSY:
            raise TryAgain(f"{path} is being written by another process") from error
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            raise damaged(path) from error
        if code == sqlite3.SQLITE_CANTOPEN and no_descriptor_is_free():
            raise TryAgain(f"{path}: this process has no free file descriptor now", code="TOO_BUSY") from error
        if code == sqlite3.SQLITE_CANTOPEN:
            raise _not_opened(path) from error
        if code == sqlite3.SQLITE_READONLY:
            raise CannotWrite(f"{path}: may not be written", hint="check owner and mode of that place") from error
        raise


def _not_opened(path: Path) -> WardroundError:
    """Of a database that SQLite could not open: it waits for a person where it is gone or belongs to somebody else. If
    the disk failed, or it opens now, the next start may do."""
    try:
        for file in (path, *filter(Path.exists, (Path(f"{path}-wal"), Path(f"{path}-shm")))):
            os.close(os.open(file, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        if error.errno in BROKEN_DISK:
            return unread(path, error)
        return NeedsPerson(
            f"{path}: the database is missing or cannot be opened ({error.strerror})",
            hint=f"if you have it, put it back; else {way_back(path)}",
        )
    return StorageFailed(f"{path}: the database could not be opened, and can be by now", hint=AFTER)


def no_descriptor_is_free() -> bool:
    try:
        os.close(os.dup(2))
    except OSError:
        return True
    return False
