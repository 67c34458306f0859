"""The database: its tables are those of the migrations, and a transaction is whole or not at all."""

import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext

from coordinator.storage import database
from coordinator.storage.database import Store, Upload
from wardround.errors import CannotWrite, NeedsPerson, TryAgain
from wardround.local.durable import StorageFailed


@pytest.fixture
def records(tmp_path: Path) -> Iterator[Store]:
    path = tmp_path / "coordinator.db"
    database.upgrade(path)
    opened = Store(path)
    yield opened
    opened.close()


def test_the_migrations_make_exactly_the_tables_that_the_program_uses(records: Store) -> None:
    engine = sa.create_engine(f"sqlite:///{records.path}")
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), database.metadata) == []
    engine.dispose()


def test_upgrading_twice_changes_nothing(records: Store) -> None:
    with records.write() as write:
        write.add(database.models, digest="d", manifest="[]", made_s=1)
    database.upgrade(records.path)
    records.refuse_other_schema()
    with records.read() as read:
        assert read.all(database.models) == [{"digest": "d", "manifest": "[]", "made_s": 1}]


def test_what_is_committed_survives_a_power_cut_by_the_databases_own_settings(records: Store) -> None:
    with records.read() as read:
        pragma = read._connection.exec_driver_sql
        assert pragma("PRAGMA journal_mode").scalar() == "wal"
        assert pragma("PRAGMA synchronous").scalar() == 2  # FULL
        assert pragma("PRAGMA foreign_keys").scalar() == 1


def test_a_transaction_that_fails_leaves_nothing(records: Store) -> None:
    def fail() -> None:
        with records.write() as write:
            write.add(database.models, digest="d", manifest="[]", made_s=1)
            raise ValueError("in the middle")

    with pytest.raises(ValueError, match="in the middle"):
        fail()
    with records.read() as read:
        assert read.all(database.models) == []


def test_two_writers_wait_for_each_other(records: Store) -> None:
    with records.write() as write:
        write.add(database.models, digest="0", manifest="[]", made_s=0)

    def count_up() -> None:
        for _ in range(25):
            with records.write() as write:
                row = write.get(database.models, digest="0")
                assert row is not None
                write.change(database.models, {"digest": "0"}, made_s=row["made_s"] + 1)

    threads = [threading.Thread(target=count_up) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    with records.read() as read:
        row = read.get(database.models, digest="0")
    assert row is not None
    assert row["made_s"] == 100


@pytest.mark.parametrize(
    ("code", "kind", "said"),
    [
        (sqlite3.SQLITE_FULL, CannotWrite, "no space left"),
        (sqlite3.SQLITE_IOERR | 4 << 8, StorageFailed, "the disk failed to keep what was written"),
        (sqlite3.SQLITE_READONLY, CannotWrite, "may not be written"),
    ],
)
def test_what_the_disk_says_reaches_the_operator_in_words(
    records: Store, code: int, kind: type[Exception], said: str
) -> None:
    class Failed(sqlite3.OperationalError):
        sqlite_errorcode = code

    def fail() -> None:
        with records.write():
            raise sa.exc.OperationalError("INSERT", {}, Failed())

    with pytest.raises(kind, match=said):
        fail()


def test_a_database_that_no_descriptor_is_left_for_is_not_lost(records: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    class CannotOpen(sqlite3.OperationalError):
        sqlite_errorcode = sqlite3.SQLITE_CANTOPEN

    def fail() -> None:
        with records.read():
            raise sa.exc.OperationalError("SELECT", {}, CannotOpen())

    with pytest.raises(NeedsPerson, match="the database is missing or cannot be opened"):
        fail()
    monkeypatch.setattr(database, "_no_descriptor_is_free", lambda: True)
    with pytest.raises(TryAgain, match="this process has no free file descriptor now"):
        fail()


def test_an_upload_survives_its_row(records: Store) -> None:
    upload = Upload("a" * 32, "alpha", "trial", 1, 2, 1, "c", "m", 32, (("val_loss", "0.5"),), 10, 3, received=8)
    with records.write() as write:
        write.put(database.uploads, **upload.row())
    with records.read() as read:
        assert read.upload("a" * 32) == upload
        assert read.upload("b" * 32) is None
        assert read.uploads_of("trial", 1) == [upload]
