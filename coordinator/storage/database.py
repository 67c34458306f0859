"""The coordinator's database through SQLAlchemy sessions: one file (SQLite), or a PostgreSQL server.

What is committed is durable. A writing transaction has the write lock from its beginning, so that what it read is still
true when it writes. One coordinator at a time may write: at a file, whoever holds the state directory's lock; at a
server, whoever holds its lease. The tables are in ``coordinator.storage.tables``; errors of the database become ours in
``coordinator.storage.sqlite`` and ``coordinator.storage.postgres``.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

import sqlalchemy as sa
from sqlalchemy.orm import Session

from coordinator.storage import sqlite
from coordinator.storage.lease import Server
from coordinator.storage.schema import newest_schema, refuse_newer
from coordinator.storage.server_url import shown
from coordinator.storage.sqlite import SQLiteFile
from wardround.errors import CannotWrite, NeedsPerson, TryAgain
from wardround.local.durable import StorageFailed

log = logging.getLogger(__name__)
Place = Path | Server


class Database(Protocol):
    """What a store stands on. ``name`` is for messages; ``shared``: several coordinators may stand on it."""

    name: str
    shared: bool

    def explained(self) -> AbstractContextManager[None]:
        """While the block lasts, errors of the database are ours."""

    def session(self, *, writes: bool) -> AbstractContextManager[Session]:
        """One transaction, committed when the block ends."""

    def tidy(self) -> None:
        """After a write."""

    def lead(self, lost: Callable[[StorageFailed], None]) -> None:
        """From now on this process may write; ``lost`` is called when it turns out that it may not any more."""

    def copy_to(self, path: Path) -> None:
        """Write what is committed to a new SQLite file."""

    def schema(self) -> str | None:
        """The schema; None of a database without one."""

    def upgrade_hint(self) -> str:
        """What brings an older one to this program's schema."""

    def close(self, *, failed: bool) -> None:
        """Give it back."""


class Store:
    """One coordinator's database: one transaction at a time writes.

    After a failure that leaves unknown what is durable, it refuses everything; the process must end.
    """

    def __init__(self, place: Place) -> None:
        """Open an existing database. ``upgrade`` makes one."""
        self.place = place
        self._failed: StorageFailed | None = None
        self._database = _opened(place)
        self.name = self._database.name
        self.shared = self._database.shared

    def lead(self, fatal: Callable[[StorageFailed], None] = lambda error: None) -> None:
        """Become the one that writes. What earlier processes committed is durable from now on.

        Args:
            fatal: called when this process may not write any more; it must end.

        Raises:
            LedByAnother: another coordinator writes in this database now.
            NeedsPerson: the server is not one whose promises last.
        """

        def lost(error: StorageFailed) -> None:
            self._failed = error
            fatal(error)

        self._database.lead(lost)

    @contextmanager
    def read(self) -> Iterator[Session]:
        """A session that sees what was true at one moment. What it gave can be read after its end."""
        with self._sound(), self._database.session(writes=False) as session:
            yield session

    @contextmanager
    def write(self) -> Iterator[Session]:
        """A session that is committed and durable when the block ends, and undone when it raises.

        Raises:
            CannotWrite: the disk is full; nothing was written.
            TryAgain: the connection to the server broke; nothing was written.
            StorageFailed: the disk failed, or the database is lost or damaged; the process must end.
        """
        with self._sound(), self._database.session(writes=True) as session:
            yield session
        self._tidy()

    def _tidy(self) -> None:
        """What is committed stays so whatever comes of it."""
        try:
            with self._sound():
                self._database.tidy()
        except StorageFailed:
            raise
        except (CannotWrite, TryAgain) as error:
            log.warning("%s; the log is moved into the database later", error.message)

    @contextmanager
    def _sound(self) -> Iterator[None]:
        """Refuse after a failure that leaves unknown what is durable, and remember one."""
        if self._failed is not None:
            raise type(self._failed)(self._failed.message, hint=self._failed.hint)
        try:
            with self._database.explained():
                yield
        except StorageFailed as error:
            self._failed = error
            raise

    def copy_to(self, path: Path) -> None:
        """Write a copy of what is committed to a new SQLite file, whole and durable, while others read and write."""
        with self._sound():
            self._database.copy_to(path)

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
            refuse_newer(self.name, present)
        raise NeedsPerson(
            f"{self.name} has schema {present or 'none'}, this program needs {needed}",
            hint=self._database.upgrade_hint(),
        )

    def schema(self) -> str | None:
        """The schema of this database; None of one that has none. Raises StoreLost: it is damaged."""
        return self._database.schema()

    def close(self) -> None:
        """Close the database, and let another coordinator lead.

        Raises:
            StoreLost: what was committed last is in no file that the next process finds; nobody has heard of it yet.
        """
        self._database.close(failed=self._failed is not None)


def _opened(place: Place) -> Database:
    if isinstance(place, Path):
        return SQLiteFile(place)
    from coordinator.storage.postgres import PostgresServer

    return PostgresServer(place)


def name_of(place: Place) -> str:
    """Its name in messages; a server's without its password, which the address never has."""
    return str(place) if isinstance(place, Path) else shown(place.url)


def changed(session: Session, statement: sa.Update | sa.Delete | sa.Insert, **values: object) -> int:
    """Run a statement that changes rows; how many it changed. What the session has read of them stays as it was.

    Args:
        values: of the statement's ``bindparam``. One that is made once costs a third of one that is made each time.
    """
    session.flush()
    return session.connection().execute(statement, values or None).rowcount


def upgrade(place: Place, keep: Path | None = None) -> Path | None:
    """Bring a database to this program's tables, or make them. Whole or not at all.

    Args:
        keep: the folder for a copy of an older one on a server; one of a file is kept beside it.

    Returns:
        The copy of the older one that was kept, a SQLite file; None where there was none, or nothing to change.

    Raises:
        NeedsPerson: a newer program wrote it.
        LedByAnother: a coordinator uses it.
    """
    if isinstance(place, Path):
        return sqlite.upgrade(place)
    from coordinator.storage import postgres

    return postgres.upgrade(place, keep)


def refuse_used(place: Place) -> None:
    """Raises NeedsPerson: there is a coordinator's database on that server already. Says nothing about a file."""
    if not isinstance(place, Path):
        from coordinator.storage.postgres import PostgresServer

        server = PostgresServer(place)
        try:
            server.refuse_used()
        finally:
            server.close(failed=False)


def restore(place: Place, path: Path) -> Store:
    """Put what the SQLite file ``path`` holds, of any known schema, in its place. The store of it, which leads.

    Args:
        path: is changed to this program's schema; where ``place`` is a file, it is that file.

    Raises:
        NeedsPerson: a newer program wrote it, or there is a coordinator on that server already.
    """
    sqlite.upgrade(path)
    if not isinstance(place, Path):
        from coordinator.storage.postgres import PostgresServer

        server = PostgresServer(place)
        try:
            server.fill(path)
        finally:
            server.close(failed=False)
    store = Store(place)
    store.lead()
    return store
