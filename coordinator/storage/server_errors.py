"""What a PostgreSQL server's errors mean for the coordinator, by their SQLSTATE. No message repeats a password."""

import sqlalchemy as sa

from coordinator.storage.watched import StoreLost
from wardround.errors import BadData, CannotWrite, NeedsPerson, NotPermitted, TryAgain, Unavailable, WardroundError
from wardround.local.durable import StorageFailed

AWAY = ("57P01", "57P02", "57P03", "25006", "25P03")  # shuts down, crashed, starts, is a replica, was idle
AGAIN = ("40001", "40P01", "55P03", "57014")  # serialization, deadlock, lock timeout, canceled
DAMAGED = ("XX001", "XX002")
MISSING_TABLE = "42P01"
NO_RIGHT = "42501"
REFUSED = (
    "authentication failed", "no password supplied", "no pg_hba.conf entry", "not permitted to log in",
    "permission denied",
)  # fmt: skip
NOT_THERE = "does not exist"


def is_lost(error: sa.exc.DBAPIError) -> bool:
    """Whether the server is away, or the connection to it broke."""
    if error.connection_invalidated:
        return True
    state = _state(error)
    operational = isinstance(error, sa.exc.OperationalError)
    return (operational and not state) or state.startswith("08") or state in AWAY


def explain(error: sa.exc.SQLAlchemyError, name: str, *, led: bool) -> WardroundError | None:
    """Our error for one of the server ``name``; None where our own statement is at fault.

    Args:
        led: whether this process is the leader: then what broke is tried again.
    """
    if isinstance(error, sa.exc.TimeoutError):
        return TryAgain(f"{name}: all connections are in use now", code="TOO_BUSY")
    if not isinstance(error, sa.exc.DBAPIError):
        return None
    state = _state(error)
    if is_lost(error):
        if not led:
            return _unreachable(error, name)
        return TryAgain(f"{name}: the connection broke or cannot be made: {reason(error)}", code="TOO_BUSY")
    if state in AGAIN:
        return TryAgain(f"{name}: the server gave a transaction up ({state})", code="TOO_BUSY")
    if state in DAMAGED:
        return StoreLost(f"{name} is damaged ({state})", hint="restore it: `coordinator restore BACKUP --database URL`")
    if state == MISSING_TABLE:
        return StoreLost(f"{name} has not the coordinator's tables", hint="is it another database?")
    if state.startswith("53"):
        return CannotWrite(f"{name}: the server has no room ({state})", hint="free some space there; nothing was lost")
    if state.startswith("58"):
        return StorageFailed(f"{name}: the server's disk failed ({state})", hint="see the server's log")
    if state == NO_RIGHT:
        return NeedsPerson(
            f"{name}: this user may not do that there", hint="let it own the database: `createdb --owner`"
        )
    if isinstance(error, sa.exc.DataError):
        return BadData(f"{name}: a value does not fit into its column ({state or 'a NUL'})", code="MESSAGE_MALFORMED")
    return None


def _unreachable(error: sa.exc.DBAPIError, name: str) -> WardroundError:
    said = reason(error)
    if any(words in said for words in REFUSED) or (NOT_THERE in said and 'role "' in said):
        return NotPermitted(
            f"{name}: the server lets this user not in: {said}",
            hint="the password is the first line of keys/database-password in the state directory, or in PGPASSWORD or "
            "~/.pgpass",
        )
    if NOT_THERE in said and "database" in said:
        return NeedsPerson(f"{name}: {said}", hint="make it: `createdb --owner USER NAME`")
    return Unavailable(f"{name} cannot be reached: {said}", hint="does the server run, and does it listen there?")


def _state(error: sa.exc.DBAPIError) -> str:
    return str(getattr(error.orig, "sqlstate", None) or "")


def reason(error: sa.exc.DBAPIError) -> str:
    """What the driver said first; it names host, user and database, and nothing else of the connection."""
    return next((line.strip() for line in str(error.orig).splitlines() if line.strip()), "no reason given")
