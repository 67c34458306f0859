"""The database: its tables are those of the migrations, and a transaction is whole or not at all."""

import errno
import json
import math
import os
import re
import sqlite3
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import alembic.command
import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from hypothesis import given

from coordinator.models.kept import add_model, manifest_from_document
from coordinator.storage import database, sqlite, tables
from coordinator.storage.database import Store
from coordinator.storage.schema import alembic_config, newest_schema, schemas
from coordinator.studies.history import uploads_of
from coordinator.studies.state import Answer, Kind, Phase, Round, StudyState
from coordinator.studies.study import load_studies, new_study
from fl_algorithms.server.best import BestGlobal
from fl_algorithms.study import ResolvedStudy
from tests.coordinator.conftest import study_document
from tests.wardround.test_update import manifests
from wardround.errors import CannotWrite, NeedsPerson, TryAgain
from wardround.local.durable import StorageFailed
from wardround.records.study import StudyFile
from wardround.tensors.manifests import Entry, Manifest, TensorSpec


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    path = tmp_path / "coordinator.db"
    database.upgrade(path)
    opened = Store(path)
    yield opened
    opened.close()


def test_the_migrations_make_exactly_the_tables_that_the_program_uses(store: Store) -> None:
    engine = sa.create_engine(f"sqlite:///{store.place}")
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), tables.Base.metadata) == []
    engine.dispose()


def test_the_names_of_the_migrations_say_what_alembic_reads_in_them() -> None:
    revisions = ScriptDirectory.from_config(alembic_config()).walk_revisions()
    assert schemas() == [row.revision for row in revisions][::-1]


def test_upgrading_twice_changes_nothing(store: Store) -> None:
    with store.write() as session:
        session.add(tables.Model(digest="d", manifest="[]", made_s=1))
    database.upgrade(store.place)
    store.refuse_other_schema()
    with store.read() as session:
        rows = session.scalars(sa.select(tables.Model)).all()
    assert [(row.digest, row.manifest, row.made_s) for row in rows] == [("d", "[]", 1)]


def test_an_older_database_is_brought_forward_and_a_copy_of_it_is_kept(tmp_path: Path) -> None:
    path = older(tmp_path / "coordinator.db")
    store = Store(path)
    with pytest.raises(NeedsPerson) as refusal:
        store.refuse_other_schema()
    store.close()
    assert refusal.value.message == f"{path} has schema 0001, this program needs {newest_schema()}"
    assert refusal.value.hint == (f"`coordinator upgrade --state {tmp_path}` changes it, and keeps a copy of it")
    assert database.upgrade(path) == tmp_path / "coordinator-0001.db"
    assert database.upgrade(path) is None
    opened, kept = Store(path), Store(tmp_path / "coordinator-0001.db")
    opened.refuse_other_schema()
    with opened.read() as session:
        assert session.scalars(sa.select(tables.Model.digest)).all() == ["d"]
    assert (kept.schema(), Path(kept.name).stat().st_mode & 0o777) == ("0001", 0o600)
    with kept.read() as session:
        assert session.scalars(sa.select(tables.Model.digest)).all() == ["d"]
    opened.close()
    kept.close()


def test_a_database_of_a_newer_program_is_not_changed(tmp_path: Path) -> None:
    path = older(tmp_path / "coordinator.db", "0999")
    before = path.read_bytes()
    with pytest.raises(NeedsPerson) as refusal:
        database.upgrade(path)
    assert refusal.value.message == f"{path} has schema 0999, which this program does not know: a newer one wrote it"
    assert refusal.value.hint == (
        "install the newer version again, or put the copy back that its `coordinator upgrade` kept beside it"
    )
    assert path.read_bytes() == before


def older(path: Path, schema: str = "0001") -> Path:
    """A database as the first version made it, with one model."""
    engine = sa.create_engine(f"sqlite:///{path}")
    with engine.connect() as connection:
        connection.exec_driver_sql("PRAGMA journal_mode=WAL")
    with engine.begin() as connection:
        configuration = alembic_config()
        configuration.attributes["connection"] = connection
        alembic.command.upgrade(configuration, "0001")
        connection.exec_driver_sql("INSERT INTO models VALUES ('d', '[]', 1)")
        connection.exec_driver_sql(f"UPDATE alembic_version SET version_num = '{schema}'")
    engine.dispose()
    return path


def test_what_is_committed_survives_a_power_cut_by_the_databases_own_settings(store: Store) -> None:
    with store.read() as session:
        pragma = session.connection().exec_driver_sql
        assert pragma("PRAGMA journal_mode").scalar() == "wal"
        assert pragma("PRAGMA synchronous").scalar() == 2  # FULL
        assert pragma("PRAGMA foreign_keys").scalar() == 1


def test_a_transaction_that_fails_leaves_nothing(store: Store) -> None:
    def fail() -> None:
        with store.write() as session:
            session.add(tables.Model(digest="d", manifest="[]", made_s=1))
            raise ValueError("in the middle")

    with pytest.raises(ValueError, match="in the middle"):
        fail()
    with store.read() as session:
        assert session.scalars(sa.select(tables.Model)).all() == []


def test_two_writers_wait_for_each_other(store: Store) -> None:
    with store.write() as session:
        session.add(tables.Model(digest="0", manifest="[]", made_s=0))

    def count_up() -> None:
        for _ in range(25):
            with store.write() as session:
                row = session.get(tables.Model, "0")
                assert row is not None
                row.made_s += 1

    threads = [threading.Thread(target=count_up) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    with store.read() as session:
        row = session.get(tables.Model, "0")
    assert row is not None
    assert row.made_s == 100


@pytest.mark.parametrize(
    ("code", "kind", "said"),
    [
        (sqlite3.SQLITE_FULL, CannotWrite, "no space left"),
        (sqlite3.SQLITE_IOERR | 4 << 8, StorageFailed, "the disk failed to keep what was written"),
        (sqlite3.SQLITE_READONLY, CannotWrite, "may not be written"),
    ],
)
def test_what_the_disk_says_reaches_the_operator_in_words(
    store: Store, code: int, kind: type[Exception], said: str
) -> None:
    class Failed(sqlite3.OperationalError):
        sqlite_errorcode = code

    def fail() -> None:
        with store.write():
            raise sa.exc.OperationalError("INSERT", {}, Failed())

    with pytest.raises(kind, match=said):
        fail()


class CannotOpen(sqlite3.OperationalError):
    sqlite_errorcode = sqlite3.SQLITE_CANTOPEN


def not_opened(store: Store) -> None:
    with store.read():
        raise sa.exc.OperationalError("SELECT", {}, CannotOpen())


@pytest.mark.parametrize(
    ("number", "kind", "said"),
    [
        (0, StorageFailed, "the database could not be opened, and can be by now"),
        (errno.EIO, StorageFailed, "the disk failed to read it (Input/output error)"),
        (errno.ENOENT, NeedsPerson, "the database is missing or cannot be opened (No such file or directory)"),
        (errno.EACCES, NeedsPerson, "the database is missing or cannot be opened (Permission denied)"),
    ],
)
def test_a_database_that_cannot_be_opened_waits_for_a_person_only_where_it_is_gone_or_anothers(
    number: int, kind: type[Exception], said: str, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    if number:
        monkeypatch.setattr(os, "open", fail)
    with pytest.raises(kind, match=re.escape(said)):
        not_opened(store)


def test_a_database_that_no_descriptor_is_left_for_is_not_lost(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite, "no_descriptor_is_free", lambda: True)
    with pytest.raises(TryAgain, match="this process has no free file descriptor now"):
        not_opened(store)


def test_an_upload_is_read_as_it_was_written(store: Store) -> None:
    upload = tables.Upload(
        id="a" * 32, site="alpha", study="trial", revision=1, round=2, attempt=1, content="c", manifest_sha256="m",
        payload_bytes=32, metrics='[["val_loss", "0.5"]]', num_examples=10, num_validation=3, received=8, opened_s=1.5,
    )  # fmt: skip
    with store.write() as session:
        session.add(upload)
    with store.read() as session:
        (kept,) = uploads_of(session, "trial", 1)
        assert session.get(tables.Upload, "b" * 32) is None
    assert kept is not upload
    assert kept.reported_metrics == (("val_loss", "0.5"),)
    assert (kept.id, kept.received, kept.decision, kept.code, kept.receipt) == ("a" * 32, 8, "", "", None)


@given(manifests())
def test_a_manifest_comes_back_from_its_document(manifest: Manifest) -> None:
    assert manifest_from_document(json.loads(json.dumps(manifest.document()))) == manifest


def test_a_study_comes_back_from_its_row(store: Store) -> None:
    manifest = Manifest((Entry(TensorSpec("weight", "F32", (2, 3)), "12" * 32),))
    state = StudyState(
        Phase.RUNNING, models=1, ready=frozenset({"alpha", "bravo"}), missed=frozenset({"bravo"}), why="",
        round=Round(2, 1, ("alpha", "bravo"), {"alpha": Answer(Kind.ACCEPTED, upload="ab" * 16)}, 12.5),
    )  # fmt: skip
    study = new_study(ResolvedStudy(StudyFile.from_document(study_document())), manifest, 2, 7)
    best = BestGlobal(1, 0.25)
    study = replace(study, state=state, best=best, best_digest=manifest.digest()).saved_at(100.0, 3.0)
    with store.write() as session:
        add_model(session, manifest, 7)
        add_model(session, manifest, 8)
        session.add(study.row())
    with store.read() as session:
        model = session.scalars(sa.select(tables.Model)).one()
    assert model.made_s == 7
    assert load_studies(store) == ({"trial": study}, {})
    paused = replace(study, state=StudyState(Phase.PAUSED, why="a model in /caf\udce9 is damaged", start_by=math.inf))
    with store.write() as session:  # why it paused may name a folder, whose name need not be Unicode
        paused.write(session)
    assert load_studies(store) == ({"trial": paused}, {})
    with store.write() as session:
        session.execute(sa.update(tables.Study).values(state="{}"))
    studies, unreadable = load_studies(store)
    assert (studies, list(unreadable)) == ({}, ["trial"])
