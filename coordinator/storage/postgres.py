"""The database on a PostgreSQL server, for one leader at a time: see ``coordinator.storage.lease``.

Each transaction begins with the leader's row; one that writes holds it until its end, and says itself that its commit
is to be on the server's disk. A server that restarts is waited for, as long as the lease may last. Where the connection
breaks while a transaction is committed, the row's number tells whether it was: an answer is never guessed.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.orm import Session

from coordinator.storage import copies, schema
from coordinator.storage.lease import NEXT_WRITE, Fence, Lease, Server
from coordinator.storage.server_errors import explain, is_lost, reason
from coordinator.storage.server_url import new_engine, shown
from coordinator.storage.tables import Leadership
from wardround.errors import NeedsPerson, TryAgain, WardroundError
from wardround.local.durable import StorageFailed, make_folder
from wardround.local.rate_limit import RateLimitedLog

log = RateLimitedLog(logging.getLogger(__name__))
CONNECTIONS = 24


class PostgresServer:
    """One database of a server."""

    shared = True

    def __init__(self, server: Server) -> None:
        """Nothing is connected before it is used.

        Raises:
            UsageProblem: not an address of a PostgreSQL database, or with a password in it.
            NeedsPerson: the driver is not installed.
        """
        self.name = shown(server.url)
        self._server = server
        self._engine = new_engine(server, CONNECTIONS)
        self._reading = self._engine.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
        self._writing = self._engine.execution_options(isolation_level="READ COMMITTED")
        self._lease: Lease | None = None
        self._one_writer = threading.Lock()
        self._writes = 0  # transactions of all leaders that are known to be committed

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Errors of the server as ours; a fault of our own statements stays what it is."""
        try:
            yield
        except WardroundError:
            raise
        except sa.exc.SQLAlchemyError as error:
            explained = explain(error, self.name, led=self._lease is not None)
            if explained is None:
                raise
            if type(explained) is TryAgain and self._lease is not None:  # a site hears a code; the operator, why
                log.warning("%s", explained.message)
            raise explained from error

    @contextmanager
    def session(self, *, writes: bool) -> Iterator[Session]:
        """One transaction, of the leader where this process is one. With ``writes`` it is one after the other."""
        if not writes:
            with self._begun(self._reading, self._look) as session:
                yield session
                session.commit()
            return
        with self._one_writer, self._begun(self._writing, self._take_number) as session:
            yield session
            session.flush()
            self._commit(session)

    def _begun(self, engine: sa.Engine, fence: Callable[[sa.Connection], None]) -> Session:
        """A session whose transaction has passed the fence. A server that is away is waited for: nothing was done yet.

        Raises:
            LeadLost: it is away for longer than the lease lasts, or another one leads.
            sa.exc.DBAPIError: it takes no further connection for as long, although the lease is renewed over its own.
        """
        until = time.monotonic() + self._server.lease_s
        while True:
            session = Session(engine, expire_on_commit=False)
            try:
                fence(session.connection())
            except sa.exc.DBAPIError as error:
                session.close()
                if self._lease is None or not is_lost(error):
                    raise
                if not self._lease.holds:
                    raise self._lease.lapsed() from error
                log.warning("%s takes no connection now: %s; waiting for it", self.name, reason(error))
                if time.monotonic() > until:
                    raise
                self._lease.pause()
            except BaseException:
                session.close()
                raise
            else:
                return session

    def _look(self, connection: sa.Connection) -> None:
        if self._lease is not None:
            known = self._writes
            self._lease.judge(self._lease.look(connection), known)

    def _take_number(self, connection: sa.Connection) -> None:
        """Take the write lock, and the number of this transaction."""
        lease = self._lease
        assert lease is not None, "whoever writes has become the leader"
        row = connection.execute(NEXT_WRITE, {"of_token": lease.token}).first()
        if row is None:
            lease.judge(lease.look(connection), self._writes)
        elif row.writes != self._writes + 1:
            lease.judge(Fence(lease.token, -1, ""), self._writes)  # an older copy, or somebody else wrote as us

    def _commit(self, session: Session) -> None:
        number = self._writes + 1
        try:
            session.commit()
        except sa.exc.DBAPIError as error:
            if not is_lost(error) or not self._was_committed(number):
                raise
            log.warning("%s: the connection broke while transaction %d was committed; it was", self.name, number)
        self._writes = number

    def _was_committed(self, number: int) -> bool:
        """Whether the transaction with this number is durable, of which the end was not heard. Waits for its end.

        Raises:
            LeadLost: nobody can say now; the process must end.
        """
        lease = self._lease
        assert lease is not None
        while True:
            try:
                with self._writing.begin() as connection:
                    fence = lease.look_locked(connection)
            except sa.exc.DBAPIError as error:
                if not lease.holds:
                    raise lease.lapsed() from error
                log.warning(
                    "%s does not say now whether transaction %d was committed: %s; asking again", self.name, number,
                    reason(error),
                )  # fmt: skip
                lease.pause()
                continue
            lease.judge(fence, self._writes)
            assert fence is not None
            return fence.writes == number

    def tidy(self) -> None:
        """The server does that by itself."""

    def lead(self, lost: Callable[[StorageFailed], None]) -> None:
        """Take the lease, and renew it from now on.

        Raises:
            LedByAnother: another coordinator has it.
            NeedsPerson: what this server says is stored is not durable.
        """
        with self.explained():
            self._refuse_careless()
            engine = new_engine(self._server, 1)
            try:
                lease = Lease(engine, self._server, self.name)
                self._writes = lease.take()
            except BaseException:
                engine.dispose()
                raise
        self._lease = lease
        lease.keep(lost)

    def _refuse_careless(self) -> None:
        with self._reading.connect() as connection:
            fsync, encoding = connection.execute(_SETTINGS).one()
        if fsync != "on":
            raise NeedsPerson(
                f"{self.name}: the server runs with `fsync = {fsync}`: a power cut loses what it says is stored",
                hint="set `fsync = on` in its postgresql.conf: a receipt is a promise that the update is durable",
            )
        if encoding != "UTF8":
            raise NeedsPerson(
                f"{self.name} has the encoding {encoding}, not UTF8",
                hint="`createdb --encoding UTF8 --template template0`",
            )

    def copy_to(self, path: Path) -> None:
        """Write what is committed to a new SQLite file, as it is at one moment, while others read and write."""
        with self._begun(self._reading, self._look) as session:
            connection = session.connection()
            present = schema.schema_of(connection)
            assert present is not None
            copies.copy_to_file(connection, path, present)

    def fill(self, path: Path) -> None:
        """Make the tables, and put in what a SQLite file of this program's schema holds. Whole or not at all.

        Raises:
            NeedsPerson: there are tables already.
        """
        with self.explained(), self._writing.begin() as connection:
            self._refuse_used(connection)
            schema.migrate(connection)
            copies.copy_from_file(path, connection)

    def migrate(self) -> None:
        """Bring the tables to this program's schema, or make them. Whole or not at all."""
        with self.explained(), self._writing.begin() as connection:
            schema.migrate(connection)

    def refuse_used(self) -> None:
        """Raises NeedsPerson: it has tables of a coordinator already."""
        with self.explained(), self._reading.connect() as connection:
            self._refuse_used(connection)

    def _refuse_used(self, connection: sa.Connection) -> None:
        if schema.schema_of(connection) is not None:
            raise NeedsPerson(
                f"{self.name} holds a coordinator already; nothing was changed",
                hint="give a new, empty database (`createdb`); a second coordinator on the same one is a standby: "
                "`coordinator standby import`",
            )

    def schema(self) -> str | None:
        """The schema of this database; None of one that has none."""
        with self.explained(), self._reading.connect() as connection:
            return schema.schema_of(connection)

    def has_lease(self) -> bool:
        """Whether the schema is so new that a coordinator may lead on it now."""
        with self.explained(), self._reading.connect() as connection:
            return sa.inspect(connection).has_table(Leadership.__tablename__)

    def upgrade_hint(self) -> str:
        """What brings an older one to this program's schema."""
        return "`coordinator upgrade` changes it, and keeps a copy of it in the state directory"

    def close(self, *, failed: bool) -> None:
        """Let another one lead, unless that is so."""
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.release()
        self._engine.dispose()


def upgrade(server: Server, keep: Path | None) -> Path | None:
    """Bring a database to this program's tables, or make them. See ``coordinator.storage.database.upgrade``."""
    database = PostgresServer(server)
    try:
        present = database.schema()
        if present == schema.newest_schema():
            return None
        kept = None
        if present is not None:
            schema.refuse_newer(database.name, present)
            if database.has_lease():
                database.lead(lambda error: log.error("%s", error.message))
            if keep is not None:
                make_folder(keep)
                kept = keep / f"coordinator-{present}.db"
                with database.explained():
                    database.copy_to(kept)
        database.migrate()
        return kept
    finally:
        database.close(failed=False)


_SETTINGS = sa.select(sa.func.current_setting("fsync"), sa.func.current_setting("server_encoding"))
