"""The database deleted, replaced or written over under a running service: it acknowledges nothing more, and stops."""

import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import sqlalchemy as sa

from coordinator import state_directory as places
from coordinator.state_directory import State
from coordinator.storage import sqlite, tables, watched
from coordinator.storage.database import Store
from coordinator.storage.watched import StoreLost
from tests.coordinator.conftest import Place
from tests.coordinator.test_database import store
from tools.world import free_port
from wardround.errors import NeedsPerson
from wardround.local import control
from wardround.local.durable import StorageFailed

__all__ = ["store"]


def beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def replaced(path: Path) -> None:
    """As by a person who puts an older copy in its place."""
    shutil.copy(path, beside(path, ".copy"))
    beside(path, ".copy").replace(path)


SPOILS = {
    "deleted": (lambda path: path.unlink(), ""),
    "replaced": (replaced, ""),
    "written over": (lambda path: path.write_bytes(path.read_bytes()), ""),
    "emptied": (lambda path: path.write_bytes(b""), ""),
    "its log deleted": (lambda path: beside(path, "-wal").unlink(), "-wal"),
    "its log replaced": (lambda path: replaced(beside(path, "-wal")), "-wal"),
    "the folder moved": (lambda path: path.parent.rename(path.parent.with_name("away")), ""),
}


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    yield place
    assert place.failures
    for site in place.sites.values():
        site.close()
    place.coordinator.stop()


@pytest.mark.parametrize("spoil", SPOILS)
def test_no_receipt_is_given_for_what_the_next_process_would_not_find(place: Place, spoil: str) -> None:
    """22 more rounds were closed with receipts, and all of them were gone."""
    act, suffix = SPOILS[spoil]
    (site,) = place.begin(sites=["alpha"])
    assignment = site.next_assignment()
    act(place.state.database)
    with pytest.raises(grpc.RpcError):
        site.answer(assignment)
    assert site.receipts == []
    failure = place.failures[0]
    assert isinstance(failure, StoreLost)
    assert failure.message == (
        f"{place.state.database}{suffix} was deleted, replaced or written over while the coordinator used it; nothing "
        "that came after is acknowledged"
    )
    assert failure.hint == (
        f"if you have the file, put it back; else keep {place.state.root} aside as it is, then `coordinator restore "
        f"BACKUP --state {place.state.root}`; a new empty one would forget every site"
    )


def test_a_service_that_is_stopped_then_does_not_say_that_all_is_well(tmp_path: Path) -> None:
    """It "stopped with 0"."""
    place = Place(tmp_path)
    place.state.database.unlink()
    with pytest.raises(StoreLost):
        place.coordinator.stop()


def test_the_service_ends_with_78_and_says_so_in_its_own_log(tmp_path: Path) -> None:
    """Nothing stood in its log."""
    state = State(tmp_path / "state")
    places.create(state, "north", f"127.0.0.1:{free_port()}", time.time())
    line = [sys.executable, "-m", "coordinator.cli.main", "serve", "--state", str(state.root)]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as service:
        try:
            assert service.stdout is not None
            assert service.stdout.readline().startswith("ready")
            state.database.unlink()
            with pytest.raises(NeedsPerson, match="was deleted, replaced or written over"):
                control.call(state.control, {"command": "invite", "site": "alpha", "expires_s": 60})
            _, errors = service.communicate(timeout=60)
        finally:
            service.kill()
    assert service.returncode == 78
    assert "coordinator.db was deleted, replaced or written over while the coordinator used it" in errors
    assert "hint: if you have the file, put it back" in errors


def test_a_database_that_sqlite_finds_damaged_is_refused_from_then_on(store: Store) -> None:
    class Malformed(sqlite3.DatabaseError):
        sqlite_errorcode = sqlite3.SQLITE_CORRUPT

    with pytest.raises(NeedsPerson, match="is damaged"), store.read():
        raise sa.exc.DatabaseError("SELECT", {}, Malformed())
    with pytest.raises(StorageFailed, match="is damaged"), store.write():
        pass


def test_what_is_committed_moves_into_the_main_file_before_the_log_is_long(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No connection makes a checkpoint by itself, so that whoever else writes the main file is noticed."""
    monkeypatch.setattr(watched, "LOG_BYTES", 64 * 1024)
    store.lead()
    before = Path(store.name).stat().st_size
    for number in range(40):
        with store.write() as session:
            session.add(tables.Model(digest=str(number), manifest="[" + " " * 20_000 + "]", made_s=1))
    assert Path(store.name).stat().st_size > before + 400_000
    assert beside(Path(store.name), "-wal").stat().st_size < 200_000
    with store.read() as session:
        assert session.scalar(sa.select(sa.func.count()).select_from(tables.Model)) == 40


def test_a_log_that_was_long_once_is_not_moved_after_every_write(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite keeps a log's file as long as it ever was, unless it is told not to; its size says how much is in it."""
    moved = []
    checkpoint = sqlite.SQLiteFile._move_log
    monkeypatch.setattr(watched, "LOG_BYTES", 64 * 1024)
    monkeypatch.setattr(sqlite.SQLiteFile, "_move_log", lambda file, how: (moved.append(how), checkpoint(file, how)))
    store.lead()
    for number in range(200):
        with store.write() as session:
            session.add(tables.Restore(restored_s=number, backup_s=number))
    assert 2 <= moved.count("PASSIVE") <= 40  # a write takes two pages of 4 KiB at least
