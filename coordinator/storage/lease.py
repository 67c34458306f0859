"""Who may write, where several coordinators stand on one database: one at a time, by a lease with a fencing token.

The lease is a row of the database. Whoever takes it makes the token one larger; it ends by the database's clock,
unless it is renewed. The time alone proves nothing (a process may stand still and go on later): each transaction of a
leader compares the token first, and one that writes holds the row until it ends: who was replaced writes nothing more.
See ``docs/decisions/0016-one-leader.md``.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import sqlalchemy as sa

from coordinator.storage.server_errors import reason
from coordinator.storage.tables import Leadership
from coordinator.storage.watched import StoreLost
from wardround.errors import TryAgain
from wardround.local.durable import StorageFailed

RETRY_S = 0.2  # after which a database that was not reached is tried again
LONGEST_S = 600.0  # of any lease, as the settings allow
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Server:
    """A PostgreSQL database, and how this coordinator stands on it.

    Attributes:
        url: without a password.
        password_file: whose first line is the password, if there is such a file.
        holder: this state directory, and no other one, as people read it.
        lease_s: after which another coordinator may take over from one that is not heard of.
    """

    url: str
    password_file: Path
    holder: str
    lease_s: float = 30.0


class LedByAnother(TryAgain):
    """Another coordinator leads on this database now."""

    def __init__(self, name: str, holder: str) -> None:
        super().__init__(
            f"{name} is in use by the coordinator of {holder}",
            hint="give the command there, or stop that one first; it is over at the latest when its lease ends",
        )
        self.holder = holder


class LeadLost(StorageFailed, TryAgain):
    """This process may not write any more. It must end; started again, it waits until it may."""

    exit_code = TryAgain.exit_code


@dataclass(frozen=True)
class Fence:
    """The row as a transaction found it. ``writes``: how many transactions have written."""

    token: int
    writes: int
    holder: str


class Lease:
    """The lease of this process, from ``take`` to ``release``.

    Args:
        engine: for this alone, so that renewals wait for nobody.
    """

    def __init__(self, engine: sa.Engine, server: Server, name: str) -> None:
        self._engine, self._server, self._name = engine, server, name
        self.token = 0
        self._confirmed = time.monotonic()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def take(self) -> int:
        """Become the leader. How many transactions have written until now.

        A lease that is longer than any can be, because the database's clock was set back, is cut: a leader that is
        there renews it in time.

        Raises:
            LedByAnother: another one is, and its lease has not ended.
        """
        began = time.monotonic()
        with self._engine.begin() as connection:
            row = connection.execute(_LOOK.with_for_update()).one()
            led = row.holder not in ("", self._server.holder) and row.left_s > 0
            if not led:
                self.token = row.token + 1
                mine = {"holder": self._server.holder, "lease_s": self._server.lease_s}
                connection.execute(_TAKE, {"new_token": self.token, **mine})
            elif row.left_s > LONGEST_S:
                log.warning("%s: its clock was set back; the lease of %s is cut", self._name, row.holder)
                connection.execute(_RENEW, {"of_token": row.token, "lease_s": self._server.lease_s})
        if led:
            raise LedByAnother(self._name, row.holder)
        self._confirmed = began
        return int(row.writes)

    def keep(self, lost: Callable[[StorageFailed], None]) -> None:
        """Renew it from now on. ``lost`` is called when it is another's, or was not renewed for its whole length."""
        self._thread = threading.Thread(target=self._renew_until_closed, args=(lost,), name="lease", daemon=True)
        self._thread.start()

    @property
    def holds(self) -> bool:
        """Whether nobody else can have taken it yet, as far as this process knows."""
        return time.monotonic() < self._confirmed + self._server.lease_s

    def pause(self) -> None:
        """Before a database that was not reached is tried again."""
        self._closing.wait(RETRY_S)

    def judge(self, fence: Fence | None, known_writes: int) -> None:
        """Compare what a transaction found with what is known here.

        Raises:
            LeadLost: another coordinator took over.
            StoreLost: it is not the database that was led on, or an older copy of it.
        """
        if fence is not None and fence.token > self.token:
            raise LeadLost(
                f"{self._name}: the coordinator of {fence.holder or 'another place'} took over; nothing that came "
                "after is acknowledged here",
                hint="this one ends; started again, it waits as standby",
            )
        if fence is None or fence.token < self.token or fence.writes < known_writes:
            raise StoreLost(
                f"{self._name} was replaced by another database or an older copy while the coordinator used it; "
                "nothing that came after is acknowledged",
                hint="if you have the newest one, put it in its place; with an older one the coordinator can go on: "
                "the sites give back the receipts that it lacks, and `coordinator study renew` goes on with each study",
            )

    def look(self, connection: sa.Connection) -> Fence | None:
        """The row as this transaction sees it. A table or row that is not there is None, or the database's error."""
        row = connection.execute(_LOOK).first()
        return Fence(row.token, row.writes, row.holder) if row else None

    def look_locked(self, connection: sa.Connection) -> Fence | None:
        """The same, once nobody else has it locked: a transaction whose end was not heard has ended then."""
        row = connection.execute(_LOOK.with_for_update()).first()
        return Fence(row.token, row.writes, row.holder) if row else None

    def release(self) -> None:
        """Let another one lead at once."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
        try:
            with self._engine.begin() as connection:
                connection.execute(_RELEASE, {"of_token": self.token})
        except sa.exc.SQLAlchemyError as error:
            log.warning("%s: the lease ends by itself: %s", self._name, type(error).__name__)
        finally:
            self._engine.dispose()

    def _renew_until_closed(self, lost: Callable[[StorageFailed], None]) -> None:
        wait_s = self._server.lease_s / 3
        while not self._closing.wait(wait_s):
            wait_s = self._server.lease_s / 3
            try:
                self._renew()
            except StorageFailed as error:
                lost(error)
                return
            except sa.exc.SQLAlchemyError as error:
                if not self.holds:
                    lost(self.lapsed())
                    return
                why = reason(error) if isinstance(error, sa.exc.DBAPIError) else type(error).__name__
                log.warning("%s cannot be reached now (%s); waiting for it", self._name, why)
                wait_s = min(wait_s, 1.0)

    def _renew(self) -> None:
        began = time.monotonic()
        with self._engine.begin() as connection:
            if connection.execute(_RENEW, {"of_token": self.token, "lease_s": self._server.lease_s}).rowcount != 1:
                self.judge(self.look(connection), 0)
        self._confirmed = began

    def lapsed(self) -> LeadLost:
        """The error for a lease that could not be renewed."""
        return LeadLost(
            f"{self._name} was not reached for {self._server.lease_s:g} s: another coordinator may have taken over",
            hint="see to the database; started again, this one waits for it",
        )


def _left() -> sa.ColumnElement[float]:
    return Leadership.expires_s - _now()


def _now() -> sa.ColumnElement[float]:
    """By the database's clock, also in the middle of a transaction."""
    return sa.cast(sa.extract("epoch", sa.func.clock_timestamp()), sa.Float)


def _update(*which: sa.ColumnElement[bool]) -> sa.Update:
    return sa.update(Leadership).where(Leadership.id == 1, *which)


_OWN = Leadership.token == sa.bindparam("of_token")
_LATER = _now() + sa.cast(sa.bindparam("lease_s"), sa.Float)
_LOOK = sa.select(Leadership.token, Leadership.writes, Leadership.holder, _left().label("left_s")).where(
    Leadership.id == 1
)
_TAKE = _update().values(token=sa.bindparam("new_token"), holder=sa.bindparam("holder"), expires_s=_LATER)
_RENEW = _update(_OWN).values(expires_s=_LATER)
_RELEASE = _update(_OWN).values(expires_s=0.0, holder="")
NEXT_WRITE = (  # takes the write lock; by its number a transaction is known again whose end was not heard
    _update(_OWN)
    .values(writes=Leadership.writes + 1)
    .returning(Leadership.writes, sa.func.set_config("synchronous_commit", "on", True))
)
