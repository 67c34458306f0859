"""The coordinator's database: SQLite in WAL mode with ``synchronous=FULL``, through SQLAlchemy sessions.

What is committed is durable, in the file that the next process opens: see ``coordinator.storage.watched``. A writing
transaction takes the write lock at its beginning, so that what it read is still true when it writes. The tables are in
``coordinator.storage.tables``; errors of the database become ours here.
"""

import logging
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy.orm import Session

from coordinator.storage.watched import WatchedFiles, damaged, way_back
from wardround.errors import CannotWrite, NeedsPerson, TryAgain, WardroundError
from wardround.local.directory import quoted
from wardround.local.durable import AFTER, StorageFailed, move, remove, sync_file

log = logging.getLogger(__name__)
SETTINGS = ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", "busy_timeout=10000", "wal_autocheckpoint=0")


class Store:
    """The database of one state directory, and who may write in it: one transaction at a time.

    After a failure that leaves unknown what the disk has, it refuses everything; the process must end.
    """

    def __init__(self, path: Path) -> None:
        """Open an existing database. ``upgrade`` makes one."""
        self.path = path
        self._failed: StorageFailed | None = None
        self._engine = sa.create_engine(f"sqlite:///file:{path}?mode=rw&uri=true", pool_size=16, max_overflow=-1)
        sa.event.listen(self._engine, "connect", _settings)
        sa.event.listen(self._engine, "begin", _begin)
        self._writing = self._engine.execution_options(writes=True)
        self._files = WatchedFiles(path, lambda: self._move_log("PASSIVE"))

    @contextmanager
    def read(self) -> Iterator[Session]:
        """A session that sees what was true at one moment. What it gave can be read after its end."""
        with self._sound(), Session(self._engine, expire_on_commit=False) as session, session.begin():
            session.connection()
            yield session

    @contextmanager
    def write(self) -> Iterator[Session]:
        """A session that is committed and durable when the block ends, and undone when it raises.

        Raises:
            CannotWrite: the disk is full; nothing was written.
            StorageFailed: the disk failed, or the database is lost or damaged; the process must end.
        """
        with self._sound(), Session(self._writing, expire_on_commit=False) as session, session.begin():
            session.connection()  # takes the write lock
            yield session
        self._keep_log_short()

    def _keep_log_short(self) -> None:
        """Move the log, if it is long. What is committed stays so whatever comes of it."""
        try:
            with self._sound():
                self._files.move_log()
        except StorageFailed:
            raise
        except (CannotWrite, TryAgain) as error:
            log.warning("%s; the log is moved into the database later", error.message)

    @contextmanager
    def _sound(self) -> Iterator[None]:
        """Refuse after a failed disk, and remember one. Nothing is read or written in a file that is another by now."""
        if self._failed is not None:
            raise type(self._failed)(self._failed.message, hint=self._failed.hint)
        try:
            self._files.refuse_changed()
            with _explained(self.path):
                yield
            self._files.refuse_changed()
        except StorageFailed as error:
            self._failed = error
            raise

    def settle(self) -> None:
        """Move what earlier processes committed from the log into the database, durably, and empty the log.

        Where an fsync of an earlier process failed, its last commits may stand in memory alone, and nobody would write
        them to the disk again.
        """
        with self._sound():
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
        with self._sound():
            source = self._engine.raw_connection()
            try:
                assert isinstance(source.driver_connection, sqlite3.Connection)
                copy_database(source.driver_connection, path)
            finally:
                source.close()

    def refuse_other_schema(self) -> None:
        """Whether this database is sound and made for this program.

        Raises:
            NeedsPerson: it is damaged, older or newer; the message names the command.
        """
        present = self.schema()
        needed = newest_schema()
        if present == needed:
            return
        if present is not None:
            refuse_newer(self.path, present)
        raise NeedsPerson(
            f"{self.path} has schema {present or 'none'}, this program needs {needed}",
            hint=f"`coordinator upgrade --state {quoted(self.path.parent)}` changes it, and keeps a copy of it",
        )

    def schema(self) -> str | None:
        """The schema of this database; None of one that has none. Raises StoreLost: it is damaged."""
        with _explained(self.path), self._engine.connect() as connection:
            found = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar()
            if found != "ok":
                raise damaged(self.path)
            return MigrationContext.configure(connection).get_current_revision()

    def close(self) -> None:
        """Close the database.

        Raises:
            StoreLost: what was committed last is in no file that the next process finds; nobody has heard of it yet.
        """
        try:
            if self._failed is None:
                self._files.refuse_changed()
        finally:
            self._engine.dispose()


def changed(session: Session, statement: sa.Update | sa.Delete | sa.Insert, **values: object) -> int:
    """Run a statement that changes rows; how many it changed. What the session has read of them stays as it was.

    Args:
        values: of the statement's ``bindparam``. One that is made once costs a third of one that is made each time.
    """
    session.flush()
    return session.connection().execute(statement, values or None).rowcount


def upgrade(path: Path) -> Path | None:
    """Bring the database at ``path`` to this program's tables, or make it. Whole or not at all.

    Returns:
        The copy of the older one that was kept beside it; None where there was none, or nothing to change.

    Raises:
        NeedsPerson: a newer program wrote it.
    """
    kept = _keep_older(path)
    engine = sa.create_engine(f"sqlite:///{path}")
    sa.event.listen(engine, "connect", _settings)
    sa.event.listen(engine, "begin", _begin)
    try:
        with _explained(path), engine.connect().execution_options(writes=True) as connection, connection.begin():
            configuration = _alembic()
            configuration.attributes["connection"] = connection
            command.upgrade(configuration, "head")
        path.chmod(0o600)
    finally:
        engine.dispose()
    return kept


def _keep_older(path: Path) -> Path | None:
    """Copy a database of an older schema, before it is changed. Raises NeedsPerson: it is of a newer one."""
    if not path.exists():
        return None
    store = Store(path)
    try:
        present = store.schema()
        if present is None or present == newest_schema():
            return None
        refuse_newer(path, present)
        kept = path.with_name(f"{path.stem}-{present}{path.suffix}")
        store.copy_to(kept)
    finally:
        store.close()
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


def newest_schema() -> str:
    """The schema that this program works with."""
    return str(ScriptDirectory.from_config(_alembic()).get_current_head())


def refuse_newer(path: Path, present: str) -> None:
    """Raises NeedsPerson: a newer program wrote the database at ``path``."""
    if present not in {row.revision for row in ScriptDirectory.from_config(_alembic()).walk_revisions()}:
        raise NeedsPerson(
            f"{path} has schema {present}, which this program does not know: a newer one wrote it",
            hint="install the newer version again, or put the copy back that its `coordinator upgrade` kept beside it",
        )


def _alembic() -> Config:
    configuration = Config()
    configuration.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    configuration.set_main_option("path_separator", "os")
    return configuration


def _settings(connection: sqlite3.Connection, record: object) -> None:
    connection.isolation_level = None  # SQLAlchemy says when a transaction begins; see _begin
    for setting in SETTINGS:
        connection.execute(f"PRAGMA {setting}")


def _begin(connection: sa.Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE" if connection.get_execution_options().get("writes") else "BEGIN")


@contextmanager
def _explained(path: Path) -> Iterator[None]:
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
        if code == sqlite3.SQLITE_CANTOPEN and _no_descriptor_is_free():
            raise TryAgain(f"{path}: this process has no free file descriptor now", code="TOO_BUSY") from error
        if code == sqlite3.SQLITE_CANTOPEN:
            raise NeedsPerson(
                f"{path}: the database is missing or cannot be opened",
                hint=f"if you have it, put it back; else {way_back(path)}",
            ) from error
        if code == sqlite3.SQLITE_READONLY:
            raise CannotWrite(f"{path}: may not be written", hint="check owner and mode of that place") from error
        raise


def _no_descriptor_is_free() -> bool:
    try:
        os.close(os.dup(2))
    except OSError:
        return True
    return False
