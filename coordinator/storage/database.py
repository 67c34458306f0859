"""What the coordinator remembers: SQLAlchemy tables, SQLite in WAL mode with ``synchronous=FULL`` by default.

What is committed is durable. A writing transaction takes the write lock at its beginning, so that what it read is still
true when it writes. The tables are made by the migrations beside this file; a test compares the two.
"""

import hashlib
import json
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import BigInteger, Boolean, Column, Float, ForeignKey, Integer, String, Table, Text

from wardround.errors import CannotWrite, NeedsPerson, TryAgain, WardroundError
from wardround.local.directory import quoted
from wardround.local.durable import StorageFailed
from wardround.records.receipts import EMPTY_HEAD, LedgerHead

metadata = sa.MetaData()

invitations = Table(
    "invitations", metadata,
    Column("id", String(64), primary_key=True),
    Column("site", String(64), nullable=False, index=True),
    Column("created_s", BigInteger, nullable=False),
    Column("expires_s", BigInteger, nullable=False),
    Column("fingerprint", String(64), nullable=False),  # of the bootstrap certificate; its key is nowhere here
    Column("withdrawn", Boolean, nullable=False, default=False),
    Column("used_s", BigInteger),
    Column("used_from", String(200)),
    Column("request_sha256", String(64)),
    Column("certificate", Text),
)  # fmt: skip
sites = Table(
    "sites", metadata,
    Column("name", String(64), primary_key=True),
    Column("enrolled_s", BigInteger, nullable=False),
    Column("revoked_s", BigInteger),
    Column("ledger_key", String(64), nullable=False),
    Column("ledger_id", String(64), nullable=False, default=""),  # of the ledger that we witness; "" before the first
    Column("last_receipt", String(64), nullable=False),  # SHA-256 of its payload
    Column("last_seen_s", BigInteger),
    Column("agent_version", String(40), nullable=False, default=""),
    Column("two_lines_s", BigInteger),  # since when two lines of its certificates live
)  # fmt: skip
certificates = Table(
    "certificates", metadata,
    Column("serial", String(64), primary_key=True),
    Column("site", String(64), ForeignKey("sites.name"), nullable=False, index=True),
    Column("issued_s", BigInteger, nullable=False),
    Column("not_after_s", BigInteger, nullable=False),
    Column("made_with", String(64), nullable=False, default=""),  # serial of the one it was renewed with
    Column("used_s", BigInteger),  # the first call with it
)  # fmt: skip
models = Table(
    "models", metadata,
    Column("digest", String(64), primary_key=True),
    Column("manifest", Text, nullable=False),
    Column("made_s", BigInteger, nullable=False),
)  # fmt: skip
studies = Table(
    "studies", metadata,
    Column("name", String(64), primary_key=True),
    Column("revision", Integer, primary_key=True),
    Column("digest", String(64), nullable=False),
    Column("document", Text, nullable=False),
    Column("initial", String(64), ForeignKey("models.digest"), nullable=False),
    Column("newest", String(64), ForeignKey("models.digest"), nullable=False),
    Column("best", Text, nullable=False),
    Column("life", Text, nullable=False),
    Column("created_s", BigInteger, nullable=False),
)  # fmt: skip
rounds = Table(
    "rounds", metadata,
    Column("study", String(64), primary_key=True),
    Column("revision", Integer, primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("attempt", Integer, primary_key=True),
    Column("closing", Boolean, nullable=False),
    Column("asked", Text, nullable=False),
    Column("base", String(64), nullable=False),
    Column("opened_s", Float, nullable=False),
    Column("closed_s", Float),
    Column("outcome", String(20)),
    Column("answers", Text),
    Column("model", String(64)),
    Column("account", Text),  # what became of each accepted update: ``fl_algorithms.server.limits.Account``
)  # fmt: skip
uploads = Table(
    "uploads", metadata,
    Column("id", String(32), primary_key=True),
    Column("site", String(64), nullable=False, index=True),
    Column("study", String(64), nullable=False),
    Column("revision", Integer, nullable=False),
    Column("round", Integer, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("content", String(64), nullable=False),  # digest of what the site opened it with
    Column("manifest_sha256", String(64), nullable=False),
    Column("payload_bytes", BigInteger, nullable=False),
    Column("metrics", Text, nullable=False),
    Column("num_examples", BigInteger, nullable=False),
    Column("num_validation", BigInteger, nullable=False),
    Column("received", BigInteger, nullable=False, default=0),  # bytes of the payload that are durable in the spool
    Column("decision", String(20), nullable=False, default=""),  # "", accepted, refused
    Column("code", String(40), nullable=False, default=""),
    Column("tensor", String(260), nullable=False, default=""),
    Column("opened_s", Float, nullable=False),
    Column("decided_s", Float),
    Column("receipt", Text),  # the envelope, so that it can be said again byte for byte
    sa.Index("uploads_of_round", "study", "revision", "round"),
    sa.Index("uploads_decided", "site", "decision", "decided_s"),
)  # fmt: skip
ledger_heads = Table(
    "ledger_heads", metadata,
    Column("site", String(64), primary_key=True),
    Column("ledger_id", String(64), primary_key=True),
    Column("lines", BigInteger, primary_key=True),
    Column("head", String(64), nullable=False),
    Column("in_receipt", Boolean, nullable=False),  # a receipt names it; of the others only the newest is kept
)  # fmt: skip

Row = dict[str, Any]


class Store:
    """The database of one state directory, and who may write in it: one transaction at a time.

    After a failure that leaves unknown what the disk has, it refuses everything; the process must end.
    """

    def __init__(self, path: Path) -> None:
        """Open an existing database. ``upgrade`` makes one."""
        self.path = path
        self._failed: StorageFailed | None = None
        self._engine = sa.create_engine(f"sqlite:///file:{path}?mode=rw&uri=true", pool_size=8, max_overflow=-1)
        sa.event.listen(self._engine, "connect", _settings)
        sa.event.listen(self._engine, "begin", _begin)

    @contextmanager
    def read(self) -> Iterator["Records"]:
        """What was true at one moment."""
        with self._sound(), self._engine.connect() as connection, connection.begin():
            yield Records(connection)

    @contextmanager
    def write(self) -> Iterator["Records"]:
        """Committed and durable when the block ends, undone when it raises.

        Raises:
            CannotWrite: the disk is full; nothing was written.
            StorageFailed: the disk failed; the process must end.
        """
        with (
            self._sound(),
            self._engine.connect().execution_options(writes=True) as connection,
            connection.begin(),
        ):
            yield Records(connection)

    @contextmanager
    def _sound(self) -> Iterator[None]:
        """Refuse after a failed disk, and remember one."""
        if self._failed is not None:
            raise StorageFailed(self._failed.message, hint=self._failed.hint)
        try:
            with _explained(self.path):
                yield
        except StorageFailed as error:
            self._failed = error
            raise

    def settle(self) -> None:
        """Move what earlier processes committed from the log into the database, durably, and empty the log.

        Where an fsync of an earlier process failed, its last commits may stand in memory alone, and nobody would write
        them to the disk again.
        """
        with self._sound():
            connection = self._engine.raw_connection()
            try:
                connection.cursor().execute("PRAGMA wal_checkpoint(TRUNCATE)").close()
            except sqlite3.DatabaseError as error:
                raise sa.exc.DatabaseError("wal_checkpoint", None, error) from error
            finally:
                connection.close()

    def refuse_other_schema(self) -> None:
        """Whether this database is sound and made for this program.

        Raises:
            NeedsPerson: it is damaged, older or newer; the message names the command.
        """
        with _explained(self.path), self._engine.connect() as connection:
            found = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar()
            if found != "ok":
                raise _damaged(self.path)
            present = MigrationContext.configure(connection).get_current_revision()
        script = ScriptDirectory.from_config(_alembic())
        if present == script.get_current_head():
            return
        known = present in {row.revision for row in script.walk_revisions()}
        if known or present is None:
            raise NeedsPerson(
                f"{self.path} has schema {present or 'none'}, this program needs {script.get_current_head()}",
                hint=f"copy {self.path.parent}, then run `coordinator upgrade --state {quoted(self.path.parent)}`",
            )
        raise NeedsPerson(
            f"{self.path} has schema {present}, which this program does not know: a newer one wrote it",
            hint="install the newer version again, or restore the copy made before its `coordinator upgrade`",
        )

    def close(self) -> None:
        self._engine.dispose()


def upgrade(path: Path) -> None:
    """Bring the database at ``path`` to this program's schema, or make it. Whole or not at all."""
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


@dataclass(frozen=True)
class Upload:
    """A row of ``uploads`` as the rest of the program sees it."""

    id: str
    site: str
    study: str
    revision: int
    round: int
    attempt: int
    content: str
    manifest_sha256: str
    payload_bytes: int
    metrics: tuple[tuple[str, str], ...]
    num_examples: int
    num_validation: int
    received: int = 0
    decision: str = ""
    code: str = ""
    tensor: str = ""
    opened_s: float = 0.0
    decided_s: float | None = None
    receipt: str | None = None

    def row(self) -> Row:
        return {**asdict(self), "metrics": json.dumps(self.metrics)}

    @classmethod
    def from_row(cls, row: Row) -> "Upload":
        return cls(**{**row, "metrics": tuple((name, value) for name, value in json.loads(row["metrics"]))})


class Records:
    """Reading and writing inside one transaction."""

    def __init__(self, connection: sa.Connection) -> None:
        self._connection = connection

    def get(self, table: Table, **key: Any) -> Row | None:
        """The one row with these values, or None."""
        found = self._connection.execute(sa.select(table).where(*_equal(table, key))).mappings().first()
        return dict(found) if found is not None else None

    def all(self, table: Table, **key: Any) -> list[Row]:
        """The rows with these values, in the order of the primary key."""
        chosen = sa.select(table).where(*_equal(table, key)).order_by(*table.primary_key.columns)
        return [dict(row) for row in self._connection.execute(chosen).mappings()]

    def add(self, table: Table, **values: Any) -> None:
        self._connection.execute(sa.insert(table).values(values))

    def add_missing(self, table: Table, **values: Any) -> None:
        """Add the row unless one with its primary key is there."""
        key = {column.name: values[column.name] for column in table.primary_key.columns}
        if self.get(table, **key) is None:
            self.add(table, **values)

    def put(self, table: Table, **values: Any) -> None:
        """Add the row, or replace the values of the one with its primary key."""
        key = {column.name: values[column.name] for column in table.primary_key.columns}
        if not self.change(table, key, **values):
            self.add(table, **values)

    def change(self, table: Table, key: Row, *conditions: sa.ColumnElement[bool], **values: Any) -> int:
        """Set values in the rows with ``key`` that meet the conditions; how many there were."""
        chosen = sa.update(table).where(*_equal(table, key), *conditions).values(values)
        return self._connection.execute(chosen).rowcount

    def drop(self, table: Table, *conditions: sa.ColumnElement[bool], **key: Any) -> int:
        return self._connection.execute(sa.delete(table).where(*_equal(table, key), *conditions)).rowcount

    def upload(self, upload_id: str) -> Upload | None:
        row = self.get(uploads, id=upload_id)
        return Upload.from_row(row) if row else None

    def uploads_of(self, study: str, revision: int) -> list[Upload]:
        """In site order."""
        rows = [Upload.from_row(row) for row in self.all(uploads, study=study, revision=revision)]
        return sorted(rows, key=lambda upload: (upload.round, upload.attempt, upload.site))

    def first_counts(self, study: str, revision: int, site: str) -> tuple[int, int] | None:
        """The training and validation rows that a site told with its first accepted update of a revision."""
        table = uploads.c
        chosen = (
            sa.select(table.num_examples, table.num_validation)
            .where(table.study == study, table.revision == revision, table.site == site, table.decision == "accepted")
            .order_by(table.decided_s)
            .limit(1)
        )
        found = self._connection.execute(chosen).first()
        return (int(found[0]), int(found[1])) if found else None

    def refused_since(self, site: str, since_s: float) -> int:
        """How many uploads of a site were refused."""
        table = uploads.c
        chosen = sa.select(sa.func.count()).where(
            table.site == site, table.decision == "refused", table.decided_s >= since_s
        )
        return int(self._connection.execute(chosen).scalar_one())

    def receipt_chain(self, site: str, last: str) -> tuple[list[str], int]:
        """The uploads whose receipts lead to ``last``, oldest first; and how many other receipts the site has.

        A site that enrolled again begins a new chain; the others are of the chains before. ``last`` is the SHA-256 of
        a receipt's payload, or EMPTY_HEAD.
        """
        chosen = sa.select(uploads.c.id, uploads.c.receipt).where(
            uploads.c.site == site, uploads.c.receipt.is_not(None)
        )
        before: dict[str, tuple[str, str]] = {}  # digest of a receipt -> (its upload, the digest of the one before it)
        for upload_id, text in self._connection.execute(chosen):
            payload = json.loads(text)["payload"]
            before[hashlib.sha256(payload.encode()).hexdigest()] = (upload_id, json.loads(payload)["previous"])
        chain = []
        while last != EMPTY_HEAD:
            upload_id, last = before[last]
            chain.append(upload_id)
        return chain[::-1], len(before) - len(chain)

    def receipt_texts(self, ids: Sequence[str]) -> dict[str, str]:
        """The receipts of these uploads, as they were signed."""
        chosen = sa.select(uploads.c.id, uploads.c.receipt).where(uploads.c.id.in_(ids))
        return {str(upload_id): str(text) for upload_id, text in self._connection.execute(chosen)}

    def newest_head(self, site: str, ledger_id: str) -> tuple[int, str] | None:
        """(lines, head) of the longest ledger that was seen."""
        chosen = (
            sa.select(ledger_heads.c.lines, ledger_heads.c.head)
            .where(ledger_heads.c.site == site, ledger_heads.c.ledger_id == ledger_id)
            .order_by(ledger_heads.c.lines.desc())
            .limit(1)
        )
        found = self._connection.execute(chosen).first()
        return (int(found[0]), str(found[1])) if found else None

    def heads(self, site: str, ledger_id: str, first: int, last: int) -> dict[int, str]:
        """The known heads after ``first`` to ``last`` lines."""
        table = ledger_heads.c
        chosen = sa.select(table.lines, table.head).where(
            table.site == site, table.ledger_id == ledger_id, table.lines >= first, table.lines <= last
        )
        return {int(lines): str(head) for lines, head in self._connection.execute(chosen)}

    def keep_head(self, site: str, head: LedgerHead, *, in_receipt: bool) -> None:
        """Note a head; the older ones go, but for those that a receipt names."""
        key = {"site": site, "ledger_id": head.ledger_id, "lines": head.lines}
        named = {"in_receipt": True} if in_receipt else {}
        if not self.change(ledger_heads, key, head=head.head, **named):
            self.add(ledger_heads, **key, head=head.head, in_receipt=in_receipt)
        older = ledger_heads.c.lines < head.lines
        self.drop(ledger_heads, older, site=site, ledger_id=head.ledger_id, in_receipt=False)


def _equal(table: Table, key: Row) -> list[sa.ColumnElement[bool]]:
    return [table.c[name] == value for name, value in key.items()]


def _alembic() -> Config:
    configuration = Config()
    configuration.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    configuration.set_main_option("path_separator", "os")
    return configuration


def _settings(connection: sqlite3.Connection, record: object) -> None:
    connection.isolation_level = None  # SQLAlchemy says when a transaction begins; see _begin
    for setting in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", "busy_timeout=10000"):
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
                hint="check the disk, then start again: what was durable before is still there",
            ) from error
        if code == sqlite3.SQLITE_BUSY:
            raise TryAgain(f"{path} is being written by another process") from error
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            raise _damaged(path) from error
        if code == sqlite3.SQLITE_CANTOPEN and _no_descriptor_is_free():
            raise TryAgain(f"{path}: this process has no free file descriptor now", code="TOO_BUSY") from error
        if code == sqlite3.SQLITE_CANTOPEN:
            raise NeedsPerson(
                f"{path}: the database is missing or cannot be opened",
                hint="restore it from a backup; a new empty one would forget every site",
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


def _damaged(path: Path) -> NeedsPerson:
    return NeedsPerson(
        f"{path} is damaged", hint=f"keep it aside, restore {path.parent} from a backup, and start again"
    )
