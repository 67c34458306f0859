"""The database on a PostgreSQL server: what a file promises, and what a server adds: it goes away and comes back."""

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from typer.testing import CliRunner

from coordinator.cli.main import app
from coordinator.state_directory import State
from coordinator.storage import database, lease, postgres, server_errors, server_url, tables
from coordinator.storage.database import Store
from coordinator.storage.lease import LeadLost, LedByAnother, Server
from coordinator.storage.schema import migrate, newest_schema
from coordinator.storage.watched import StoreLost
from tests.coordinator.conftest import SITES, Place, on_server
from tests.coordinator.postgres import Postgres
from tests.coordinator.test_rounds import expected_model, model_bytes
from tools.world import wait_until
from wardround.errors import (
    BadData,
    CannotWrite,
    NeedsPerson,
    NotPermitted,
    TryAgain,
    Unavailable,
    UsageProblem,
    WardroundError,
)
from wardround.local.durable import StorageFailed

WAIT_S = 60


def server_at(url: str, folder: Path, holder: str = "one", lease_s: float = 30) -> Server:
    return Server(url, folder / "password", holder, lease_s)


@pytest.fixture
def server(tmp_path: Path, postgres: Postgres) -> Server:
    """A database with the coordinator's tables."""
    return server_at(postgres.database_with_tables(), tmp_path)


@pytest.fixture
def store(server: Server) -> Iterator[Store]:
    """One that leads."""
    opened = Store(server)
    opened.lead()
    yield opened
    opened.close()


def model(digest: str) -> tables.Model:
    return tables.Model(digest=digest, manifest="[]", made_s=1)


def digests(store: Store) -> list[str]:
    with store.read() as session:
        return list(session.scalars(sa.select(tables.Model.digest).order_by(tables.Model.digest)))


def note(failed: list[Any], over: threading.Event) -> Callable[[Exception], None]:
    """What a service is told that must end."""

    def end(error: Exception) -> None:
        failed.append(error)
        over.set()

    return end


def add(store: Store, digest: str) -> None:
    with store.write() as session:
        session.add(model(digest))


def break_connections(postgres: Postgres, server: Server) -> None:
    name = sa.make_url(server.url).database
    postgres.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'")


# What a file promises too.


def test_the_migrations_make_exactly_the_tables_that_the_program_uses(server: Server) -> None:
    engine = server_url.new_engine(server, 1)
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), tables.Base.metadata) == []
    engine.dispose()


def test_a_transaction_that_fails_leaves_nothing(store: Store) -> None:
    def fail() -> None:
        with store.write() as session:
            session.add(model("d"))
            session.flush()
            raise ValueError("in the middle")

    with pytest.raises(ValueError, match="in the middle"):
        fail()
    assert digests(store) == []
    add(store, "e")
    assert digests(store) == ["e"]


def test_two_writers_wait_for_each_other(store: Store) -> None:
    add(store, "0")

    def count_up() -> None:
        for _ in range(10):
            with store.write() as session:
                row = session.get(tables.Model, "0")
                assert row is not None
                row.made_s += 1

    threads = [threading.Thread(target=count_up) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    with store.read() as session:
        row = session.get(tables.Model, "0")
    assert row is not None
    assert row.made_s == 41


def test_a_reader_sees_one_moment(store: Store) -> None:
    add(store, "a")
    with store.read() as session:
        assert session.scalars(sa.select(tables.Model.digest)).all() == ["a"]
        add(store, "b")
        assert session.scalars(sa.select(tables.Model.digest)).all() == ["a"]


def test_numbers_that_a_site_may_send_fit(store: Store) -> None:
    upload = tables.Upload(
        id="a" * 32, site="alpha", study="trial", revision=2**32 - 1, round=2**32 - 1, attempt=2**32 - 1, content="c",
        manifest_sha256="m", payload_bytes=32, metrics="[]", num_examples=2**53 - 1, num_validation=3, received=8,
        opened_s=1_790_000_000.123456,
    )  # fmt: skip
    with store.write() as session:
        session.add(upload)
    with store.read() as session:
        kept = session.get(tables.Upload, "a" * 32)
    assert kept is not None
    assert (kept.round, kept.num_examples, kept.opened_s) == (2**32 - 1, 2**53 - 1, 1_790_000_000.123456)


@pytest.mark.parametrize("value", ["x" * 65, "a\0b"], ids=["too long", "with a NUL"])
def test_what_does_not_fit_into_a_column_is_bad_data_and_no_fault_of_the_program(store: Store, value: str) -> None:
    with pytest.raises(BadData, match="a value does not fit into its column") as refusal:
        add(store, value)
    assert refusal.value.code == "MESSAGE_MALFORMED"
    assert value not in refusal.value.message


# Durable.


def test_a_commit_waits_for_the_servers_disk_whatever_the_database_says_by_default(
    store: Store, server: Server, postgres: Postgres
) -> None:
    name = sa.make_url(server.url).database
    postgres.execute(f"ALTER DATABASE {name} SET synchronous_commit = off")
    break_connections(postgres, server)
    with store.read() as session:
        assert session.scalar(sa.text("SHOW synchronous_commit")) == "off"
    with store.write() as session:
        assert session.scalar(sa.text("SHOW synchronous_commit")) == "on"


def test_a_server_that_does_not_fsync_is_refused(server: Server, postgres: Postgres) -> None:
    postgres.execute("ALTER SYSTEM SET fsync = off")
    postgres.execute("SELECT pg_reload_conf()")
    try:
        with pytest.raises(NeedsPerson) as refusal:
            until_refused(server)
    finally:
        postgres.execute("ALTER SYSTEM RESET fsync")
        postgres.execute("SELECT pg_reload_conf()")
    assert refusal.value.message == (
        f"{database.name_of(server)}: the server runs with `fsync = off`: a power cut loses what it says is stored"
    )


def until_refused(server: Server) -> None:
    """The server reads its settings again a moment after it was told to."""
    for _ in range(1000):
        store = Store(server)
        try:
            store.lead()
        finally:
            store.close()


def test_a_connection_that_breaks_in_the_middle_undoes_the_transaction_and_the_next_one_goes_on(
    store: Store, server: Server, postgres: Postgres
) -> None:
    def broken() -> None:
        with store.write() as session:
            session.add(model("lost"))
            session.flush()
            break_connections(postgres, server)

    with pytest.raises(TryAgain, match="the connection broke") as refusal:
        broken()
    assert refusal.value.code == "TOO_BUSY"
    add(store, "kept")
    assert digests(store) == ["kept"]


@pytest.mark.parametrize("committed", [True, False], ids=["it was", "it was not"])
def test_whether_a_transaction_was_committed_whose_answer_was_lost_is_found_out_and_not_guessed(
    store: Store, committed: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A receipt goes out after the commit: to answer "not stored" would be as wrong as to answer "stored"."""
    real, lose = sa.engine.default.DefaultDialect.do_commit, [True]

    def loses_the_answer(dialect: Any, connection: Any) -> None:
        if threading.current_thread() is not threading.main_thread() or not lose:
            real(dialect, connection)
            return
        lose.clear()
        if committed:
            real(dialect, connection)
        connection.driver_connection.close()
        raise psycopg.OperationalError("server closed the connection unexpectedly")

    monkeypatch.setattr(sa.engine.default.DefaultDialect, "do_commit", loses_the_answer)
    if committed:
        add(store, "first")
        assert "the connection broke while transaction 1 was committed; it was" in caplog.text
    else:
        with pytest.raises(TryAgain, match="the connection broke"):
            add(store, "first")
    add(store, "second")
    assert digests(store) == (["first", "second"] if committed else ["second"])


# A server that goes away.


@on_server
def test_a_server_that_crashes_in_the_middle_of_a_round_costs_nothing_but_time(
    place: Place, postgres: Postgres
) -> None:
    """What was accepted before counts, what comes meanwhile is taken when the server is back, and nobody restarts."""
    alpha, bravo, charlie = place.begin(rounds=1)
    first = alpha.answer(alpha.next_assignment())
    postgres.stop("immediate")
    came: list[Any] = []
    late = threading.Thread(target=lambda: came.append(bravo.answer(bravo.next_assignment())))
    late.start()
    postgres.start()
    late.join(WAIT_S)
    charlie.answer(charlie.next_assignment())
    place.until(lambda status: status["closing"])
    assert model_bytes(place) == expected_model([SITES])
    assert [first.decision, *(receipt.decision for receipt in came)] == ["accepted", "accepted"]
    assert place.ask("report", study="trial")["attempts"][0]["attempt"] == 1


def test_a_server_that_stays_away_ends_the_process_which_may_be_replaced_by_then(
    tmp_path: Path, postgres: Postgres, caplog: pytest.LogCaptureFixture
) -> None:
    server, over = server_at(postgres.database_with_tables(), tmp_path, lease_s=1), threading.Event()
    failed: list[WardroundError] = []
    store = Store(server)
    store.lead(note(failed, over))
    postgres.stop("fast")
    try:
        assert over.wait(WAIT_S)
        with pytest.raises(LeadLost):
            digests(store)
        store.close()
        with pytest.raises(Unavailable, match=r"d[0-9a-f]+ cannot be reached: "):
            Store(server).refuse_other_schema()
    finally:
        postgres.start()
    (error,) = failed
    assert (error.exit_code, error.message) == (
        75, f"{store.name} was not reached for 1 s: another coordinator may have taken over",
    )  # fmt: skip
    assert "cannot be reached now" in caplog.text


def test_a_server_with_too_many_clients_is_said_and_no_transaction_waits_for_it_without_end(
    server: Server, tmp_path: Path, postgres: Postgres, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The lease has a connection of its own: it was renewed, so who needed a further one waited, and nobody knew."""
    name = sa.make_url(server.url).database
    postgres.execute("CREATE ROLE few LOGIN CONNECTION LIMIT 2")
    postgres.execute("GRANT ALL ON ALL TABLES IN SCHEMA public TO few", server.url)
    few = server_at(server.url.replace("wardround@", "few@"), tmp_path, lease_s=0.3)
    monkeypatch.setattr(lease.Lease, "keep", lambda *_: None)
    monkeypatch.setattr(lease.Lease, "holds", True)  # as renewed in time, however busy this machine is
    store = Store(few)
    try:
        store.lead()
        with store.read(), pytest.raises(TryAgain, match='too many connections for role "few"') as refusal:
            digests(store)
        assert refusal.value.code == "TOO_BUSY"
        assert f"{store.name} takes no connection now: connection failed: " in caplog.text
        assert "waiting for it" in caplog.text
        assert refusal.value.message in caplog.text
        add(store, "a")
        assert digests(store) == ["a"]
    finally:
        store.close()
    postgres.execute("ALTER ROLE few CONNECTION LIMIT 0")
    with pytest.raises(Unavailable, match=r'cannot be reached: .*too many connections for role "few"'):
        Store(few).refuse_other_schema()
    postgres.execute("ALTER ROLE few NOLOGIN CONNECTION LIMIT 2")
    with pytest.raises(NotPermitted, match=r'lets this user not in: .*role "few" is not permitted to log in'):
        Store(few).refuse_other_schema()
    postgres.execute("ALTER ROLE few LOGIN")
    postgres.execute(f"REVOKE CONNECT ON DATABASE {name} FROM PUBLIC")
    with pytest.raises(NotPermitted, match=r"lets this user not in: .*permission denied for database"):
        Store(few).refuse_other_schema()
    postgres.execute(f"GRANT CONNECT ON DATABASE {name} TO PUBLIC")
    postgres.execute("DROP OWNED BY few", server.url)
    postgres.execute("DROP ROLE few")


def test_a_server_that_only_reads_is_named_by_its_reason_and_waited_for_while_the_lease_may_last(
    tmp_path: Path, postgres: Postgres
) -> None:
    """As managed servers become when their disk is nearly full."""
    server, over = server_at(postgres.database_with_tables(), tmp_path, lease_s=1), threading.Event()
    failed: list[WardroundError] = []
    store = Store(server)
    store.lead(note(failed, over))
    add(store, "before")
    name = sa.make_url(server.url).database
    postgres.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
    break_connections(postgres, server)
    try:
        assert over.wait(WAIT_S)
        with pytest.raises(LeadLost):
            add(store, "meanwhile")
        with pytest.raises(Unavailable, match=r"cannot be reached: .*session is read-only"):
            Store(server).refuse_other_schema()
    finally:
        postgres.execute(f"SET default_transaction_read_only = off; ALTER DATABASE {name} RESET ALL")
    store.close()
    assert failed[0].exit_code == 75
    again = Store(server_at(server.url, tmp_path))
    again.lead()
    assert digests(again) == ["before"]
    again.close()


# Another database, or an older one.


@pytest.mark.parametrize(
    "older", ["writes = writes - 1", "token = token - 1, writes = writes - 1"], ids=["of this leader", "of one before"]
)
@pytest.mark.parametrize("act", [digests, lambda store: add(store, "b")], ids=["read", "write"])
def test_an_older_copy_under_a_running_coordinator_is_recognized_and_nothing_more_acknowledged(
    server: Server, postgres: Postgres, older: str, act: Callable[[Store], Any]
) -> None:
    failed: list[Exception] = []
    store = Store(server)
    store.lead(failed.append)
    add(store, "a")
    postgres.execute(f"UPDATE leadership SET {older}", server.url)
    with pytest.raises(StoreLost) as refusal:
        act(store)
    assert refusal.value.message == (
        f"{store.name} was replaced by another database or an older copy while the coordinator used it; nothing that "
        "came after is acknowledged"
    )
    assert refusal.value.exit_code == 78
    with pytest.raises(StoreLost):
        add(store, "c")
    assert postgres.execute("SELECT digest FROM models", server.url) == [("a",)]
    store.close()


def test_an_empty_database_of_the_same_name_is_recognized(tmp_path: Path, postgres: Postgres) -> None:
    server = server_at(postgres.new_database(), tmp_path)
    database.upgrade(server)
    store = Store(server)
    store.lead()
    name = sa.make_url(server.url).database
    postgres.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
    break_connections(postgres, server)
    postgres.execute(f"ALTER DATABASE {name} RENAME TO {name}_old")
    postgres.execute(f"CREATE DATABASE {name}")
    with pytest.raises(StoreLost, match="has not the coordinator's tables"):
        digests(store)
    store.close()


# One leader.


def test_a_second_coordinator_does_not_lead_while_the_first_does_and_does_at_once_when_it_ends(
    store: Store, server: Server, tmp_path: Path
) -> None:
    second = Store(server_at(server.url, tmp_path, "two"))
    with pytest.raises(LedByAnother) as refusal:
        second.lead()
    assert refusal.value.message == f"{store.name} is in use by the coordinator of one"
    store.close()
    second.lead()
    add(second, "by two")
    second.close()


def test_a_coordinator_that_was_killed_takes_its_own_lease_again_at_once(store: Store, server: Server) -> None:
    """The lock of its state directory says that the process before it is gone."""
    again = Store(server)
    again.lead()
    add(again, "by the next process")
    with pytest.raises(LeadLost, match="took over"):
        add(store, "by the one before")
    assert digests(again) == ["by the next process"]
    again.close()


@pytest.mark.parametrize("act", [digests, lambda store: add(store, "late")], ids=["read", "write"])
def test_a_leader_that_stood_still_for_longer_than_its_lease_writes_nothing_more(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: Callable[[Store], Any]
) -> None:
    """It was stopped and goes on later, and its clocks tell it nothing: the database does."""
    monkeypatch.setattr(lease.Lease, "keep", lambda *_: None)
    first = Store(server_at(server.url, tmp_path, "one", lease_s=0.05))
    second = Store(server_at(server.url, tmp_path, "two"))
    first.lead()
    add(first, "in time")
    while True:
        try:
            second.lead()
            break
        except LedByAnother:
            pass
    with pytest.raises(LeadLost, match="the coordinator of two took over; nothing that came after is acknowledged"):
        act(first)
    assert digests(second) == ["in time"]
    first.close()
    second.close()


def test_a_leader_hears_from_its_renewal_that_another_one_took_over(server: Server, tmp_path: Path) -> None:
    over = threading.Event()
    failed: list[WardroundError] = []
    first = Store(server_at(server.url, tmp_path, "one", lease_s=0.3))
    first.lead(note(failed, over))
    again = Store(server_at(server.url, tmp_path, "one"))
    again.lead()
    assert over.wait(WAIT_S)
    assert isinstance(failed[0], LeadLost)
    assert failed[0].exit_code == 75  # which systemd starts again, as standby
    first.close()
    again.close()


def test_a_lease_of_a_server_whose_clock_was_set_back_ends_all_the_same(
    server: Server, tmp_path: Path, postgres: Postgres, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Its leader is gone. By the new clock the lease would end a day later, and nobody would serve until then."""
    monkeypatch.setattr(lease.Lease, "keep", lambda *_: None)
    first = Store(server_at(server.url, tmp_path, "one"))
    first.lead()
    add(first, "by one")
    postgres.execute("UPDATE leadership SET expires_s = expires_s + 86400", server.url)
    second = Store(server_at(server.url, tmp_path, "two", lease_s=0.05))
    with pytest.raises(LedByAnother):
        second.lead()
    assert f"{second.name}: its clock was set back; the lease of one is cut" in caplog.text
    wait_until(lambda: leads(second), "the second one leads", WAIT_S)
    assert digests(second) == ["by one"]
    with pytest.raises(LeadLost, match="the coordinator of two took over"):
        add(first, "late")
    first.close()
    second.close()


def leads(store: Store) -> bool:
    """Whether it does now."""
    try:
        store.lead()
    except LedByAnother:
        return False
    return True


# The address and the password.


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("postgresql://w:geheim@db/w", "has a password in it, which others could read"),
        ("postgresql://w@db/w?password=geheim", "has a password in it, which others could read"),
        ("postgresql://w@db/w?sslpassword=geheim", "has a password in it, which others could read"),
        ("mysql://w@db/w", "begins with `mysql`, not `postgresql`"),
        ("postgresql+asyncpg://w@db/w", "begins with `postgresql+asyncpg`, not `postgresql`"),
        ("postgresql://w@db", "names no database"),
        ("no url, geheim", "is no URL"),
    ],
)
def test_an_address_that_cannot_be_used_is_refused_and_its_password_not_repeated(url: str, said: str) -> None:
    with pytest.raises(UsageProblem) as refusal:
        server_url.checked(url)
    assert said in refusal.value.message
    assert "geheim" not in refusal.value.message + refusal.value.hint


def connecting_to(url: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the driver is given."""
    given: dict[str, Any] = {}

    def connect(*_: object, **named: Any) -> None:
        given.update(named)
        raise psycopg.OperationalError("not really")

    engine = server_url.new_engine(server_at(url, folder), 1)
    monkeypatch.setattr(engine.dialect.loaded_dbapi, "connect", connect)
    with pytest.raises(sa.exc.OperationalError):
        engine.connect()
    return given


def test_a_server_elsewhere_must_show_who_it_is_unless_the_address_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "password").write_text("geheim\nand no more\n")
    (tmp_path / "password").chmod(0o600)
    far = connecting_to("postgresql://w@db.example.org/w", tmp_path, monkeypatch)
    assert (far["sslmode"], far["password"], far["target_session_attrs"]) == ("verify-full", "geheim", "read-write")
    told = connecting_to("postgresql://w@db.example.org/w?sslmode=require", tmp_path, monkeypatch)
    assert told["sslmode"] == "require"
    for near in ("postgresql://w@127.0.0.1/w", "postgresql://w@localhost/w", "postgresql:///w?host=/run/postgresql"):
        assert "sslmode" not in connecting_to(near, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("url", "environment"),
    [
        ("postgresql://w@localhost/w?hostaddr=203.0.113.7", {}),
        ("postgresql:///w?host=/run/postgresql,db.example.org", {}),
        ("postgresql:///w?service=far", {}),
        ("postgresql:///w", {"PGHOST": "db.example.org"}),
        ("postgresql://w@localhost/w", {"PGHOSTADDR": "203.0.113.7"}),
        ("postgresql:///w", {"PGSERVICE": "far"}),
    ],
)
def test_a_server_that_only_looks_near_must_show_who_it_is(
    url: str, environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """libpq is led elsewhere in more ways than by an address's host: what was in the database went there openly."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert connecting_to(url, tmp_path, monkeypatch)["sslmode"] == "verify-full"


def test_a_password_file_that_others_may_read_is_refused(server: Server, tmp_path: Path) -> None:
    (tmp_path / "password").write_text("geheim\n")
    (tmp_path / "password").chmod(0o644)
    with pytest.raises(NotPermitted, match="can be read by others than its owner"):
        Store(server).refuse_other_schema()


def test_a_wrong_password_is_said_and_neither_shown_nor_logged(
    postgres: Postgres, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a file in the state directory, the environment, or where PostgreSQL's own programs look."""
    caplog.set_level(logging.DEBUG)
    rules = postgres.data / "pg_hba.conf"
    before = rules.read_text()
    url = postgres.new_database().replace("wardround@", "guarded@")
    postgres.execute("CREATE ROLE guarded SUPERUSER LOGIN PASSWORD 'richtig'")
    rules.write_text("host all guarded 127.0.0.1/32 scram-sha-256\n" + before)
    postgres.execute("SELECT pg_reload_conf()")
    try:
        (tmp_path / "password").write_text("geheim\n")
        (tmp_path / "password").chmod(0o600)
        with pytest.raises(NotPermitted) as refusal:
            until_schema_fails(url, tmp_path)
        (tmp_path / "password").write_text("richtig\n")
        database.upgrade(server_at(url, tmp_path))
        (tmp_path / "password").unlink()
        with monkeypatch.context() as environment:
            environment.setenv("PGPASSWORD", "richtig")
            assert database.upgrade(server_at(url, tmp_path)) is None
        (tmp_path / "pgpass").write_text("*:*:*:guarded:richtig\n")
        (tmp_path / "pgpass").chmod(0o600)
        with monkeypatch.context() as environment:
            environment.setenv("PGPASSFILE", str(tmp_path / "pgpass"))
            assert database.upgrade(server_at(url, tmp_path)) is None
    finally:
        rules.write_text(before)
        postgres.execute("SELECT pg_reload_conf()")
    assert "password authentication failed" in refusal.value.message
    said = refusal.value.message + refusal.value.hint + caplog.text
    assert "geheim" not in said
    assert "richtig" not in said


def until_schema_fails(url: str, folder: Path) -> None:
    """The server reads its rules again a moment after it was told to."""
    for _ in range(1000):
        store = Store(server_at(url, folder))
        try:
            store.schema()
        finally:
            store.close()


def test_a_database_that_is_not_there_is_named(postgres: Postgres, tmp_path: Path) -> None:
    url = postgres.new_database() + "x"
    with pytest.raises(NeedsPerson, match=r'database "d[0-9a-f]+x" does not exist'):
        Store(server_at(url, tmp_path)).refuse_other_schema()


def test_without_the_driver_the_command_is_named_that_installs_it(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(*_: object, **named: object) -> None:
        raise ImportError("no psycopg")

    monkeypatch.setattr(sa, "create_engine", absent)
    with pytest.raises(NeedsPerson) as refusal:
        Store(server)
    assert refusal.value.hint == "`pip install 'wardround[postgres]'`"


# Upgrades.


def test_an_older_schema_is_brought_forward_and_a_copy_of_it_is_kept_as_a_file(
    postgres: Postgres, tmp_path: Path
) -> None:
    server = server_at(postgres.new_database(), tmp_path)
    engine = server_url.new_engine(server, 1)
    with engine.begin() as connection:
        migrate(connection, "0004")
        connection.execute(sa.text("INSERT INTO models VALUES ('d', '[]', 1)"))
    engine.dispose()
    opened = Store(server)
    with pytest.raises(NeedsPerson) as refusal:
        opened.refuse_other_schema()
    assert refusal.value.message == f"{opened.name} has schema 0004, this program needs {newest_schema()}"
    assert refusal.value.hint == "`coordinator upgrade` changes it, and keeps a copy of it in the state directory"
    assert database.upgrade(server, tmp_path) == tmp_path / "coordinator-0004.db"
    assert database.upgrade(server, tmp_path) is None
    opened.refuse_other_schema()
    assert digests(opened) == ["d"]
    kept = Store(tmp_path / "coordinator-0004.db")
    assert (kept.schema(), digests(kept)) == ("0004", ["d"])
    kept.close()
    opened.close()


def test_a_database_that_a_coordinator_leads_on_is_not_changed_under_it(
    store: Store, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres.schema, "newest_schema", lambda: "0999")
    with pytest.raises(LedByAnother):
        database.upgrade(server_at(server.url, tmp_path, "two"), tmp_path)
    assert not list(tmp_path.glob("*.db"))


def test_init_puts_the_database_on_a_server_and_its_password_where_only_the_service_reads(
    postgres: Postgres, tmp_path: Path
) -> None:
    state, secret = tmp_path / "state", tmp_path / "secret"
    url = postgres.new_database()
    secret.write_text("geheim\n")
    begin = ["init", "--state", str(state), "--federation", "north", "--address", "h:1", "--database"]
    done = CliRunner().invoke(app, [*begin, url, "--database-password", str(secret)])
    assert done.exit_code == 0, done.output
    assert "geheim" not in done.output + (state / "config.toml").read_text()
    kept = state / "keys" / "database-password"
    assert (kept.read_text(), kept.stat().st_mode & 0o777) == ("geheim\n", 0o600)
    assert State(state).config().storage.database == url
    assert not (state / "coordinator.db").exists()
    assert postgres.execute("SELECT version_num FROM alembic_version", url) == [(newest_schema(),)]
    upgraded = CliRunner().invoke(app, ["upgrade", "--state", str(state)])
    assert upgraded.output == f"{server_url.shown(url)} is ready for this version\n"
    secret.write_text("\n")
    refused = CliRunner().invoke(app, [*begin, url, "--database-password", str(secret)])
    assert isinstance(refused.exception, BadData)
    assert refused.exception.message == f"{secret} has no password in its first line, or cannot be read"


class Said(psycopg.Error):
    """An error as the server says it."""

    def __init__(self, sqlstate: str) -> None:
        super().__init__(f"as by the server {sqlstate}")
        self.sqlstate = sqlstate


@pytest.mark.parametrize(
    ("state", "kind", "said"),
    [
        ("40001", TryAgain, "the server gave a transaction up (40001)"),
        ("55P03", TryAgain, "the server gave a transaction up (55P03)"),
        ("57P03", TryAgain, "the connection broke"),
        ("25006", TryAgain, "the connection broke"),  # it became a replica
        ("53100", CannotWrite, "the server has no room (53100)"),
        ("58030", StorageFailed, "the server's disk failed (58030)"),
        ("XX001", StoreLost, "is damaged (XX001)"),
        ("42P01", StoreLost, "has not the coordinator's tables"),
        ("42501", NeedsPerson, "this user may not do that there"),
    ],
)
def test_what_the_server_says_reaches_the_operator_in_words(state: str, kind: type[WardroundError], said: str) -> None:
    error = server_errors.explain(sa.exc.OperationalError("INSERT", {}, Said(state)), "the database", led=True)
    assert type(error) is kind
    assert said in error.message


def test_a_fault_of_our_own_statement_stays_what_it_is_and_too_many_at_a_time_is_said() -> None:
    ours = sa.exc.ProgrammingError("SELEC", {}, Said("42601"))
    assert server_errors.explain(ours, "the database", led=True) is None
    crowd = server_errors.explain(sa.exc.TimeoutError("QueuePool limit"), "the database", led=True)
    assert isinstance(crowd, TryAgain)
    assert crowd.message == "the database: all connections are in use now"


def test_a_database_in_another_encoding_is_refused(postgres: Postgres, tmp_path: Path) -> None:
    postgres.execute("CREATE DATABASE ascii ENCODING 'SQL_ASCII' TEMPLATE template0")
    server = server_at(postgres.new_database().rpartition("/")[0] + "/ascii", tmp_path)
    store = Store(server)
    with pytest.raises(NeedsPerson, match="has the encoding SQL_ASCII, not UTF8"):
        store.lead()
    store.close()
