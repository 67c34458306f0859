"""Two coordinators on one database: one serves, the other waits, and takes over when the first is gone."""

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import pytest
from typer.testing import CliRunner

from coordinator import standby, standby_file
from coordinator import state_directory as places
from coordinator.administration import Administration
from coordinator.cli.main import app
from coordinator.context import Context, raise_fatal
from coordinator.state_directory import State, Storage
from coordinator.storage.lease import LedByAnother
from coordinator.studies.history import uploads_of
from tests.coordinator.conftest import study_document
from tests.coordinator.fake_site import FakeSite, write_initial
from tests.coordinator.postgres import Postgres
from tests.coordinator.test_crash import Stubborn
from tests.coordinator.test_rounds import expected_model
from tools.world import free_port, wait_until
from wardround import rpc
from wardround.errors import BadData, NeedsPerson, TryAgain, UsageProblem
from wardround.local import control
from wardround.local.event import Latch
from wardround.local.state_lock import StateLock
from wardround.tensors.files import TensorFile

SITES = ("alpha", "bravo")
ROUNDS, GATE = 4, 2
SECRET = b"a passphrase of some length"
LIMIT_S = 90


class Two:
    """The state directories of a coordinator and of its standby. Sites know one name, which has both addresses."""

    def __init__(self, folder: Path, url: str) -> None:
        self.first, self.second = State(folder / "first"), State(folder / "second")
        storage = Storage(database=url, blobs=str(folder / "blobs"), lease_s=2)
        self.port = free_port()
        places.create(self.first, "north", f"localhost:{self.port}", time.time(), storage)
        standby_file.imported(self.second, standby_file.exported(self.first, SECRET), SECRET)


def holder(state: State) -> str:
    """As others name it."""
    return f"{socket.gethostname()}:{state.root}"


@contextmanager
def opened(state: State) -> Iterator[Context]:
    """As by a command without a service."""
    with StateLock(state.root, "a command"):
        context = Context(state, wall_clock=time.time, monotonic=time.monotonic, fatal=raise_fatal)
        try:
            yield context
        finally:
            context.close()


@pytest.fixture
def two(tmp_path: Path, postgres: Postgres) -> Two:
    return Two(tmp_path, postgres.new_database())


class Serving:
    """`coordinator serve`, in a process of its own."""

    def __init__(self, state: State, listen: str) -> None:
        line = [sys.executable, "-m", "coordinator.cli.main", "serve", "--state", str(state.root), "--listen", listen]
        self.log = state.root.with_suffix(".log")
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=log, text=True)

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(LIMIT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()


class Gated(Stubborn):
    """It has its update of round ``GATE`` ready, and sends it when the leader is gone."""

    def __init__(self, site: FakeSite, study: str, gate: threading.Event) -> None:
        self.gate, self.there = gate, threading.Event()
        super().__init__(site, study)

    def _answer(self, assignment: Any) -> None:
        if assignment.round == GATE:
            self.there.set()
            assert self.gate.wait(LIMIT_S)
        super()._answer(assignment)


def test_the_leader_is_killed_in_the_middle_of_a_round_and_the_standby_finishes_the_study(
    two: Two, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same model as without it, and each receipt that a site holds is known."""
    soon = {**dict(rpc.CHANNEL_OPTIONS), "grpc.max_reconnect_backoff_ms": 200}
    monkeypatch.setattr(rpc, "CHANNEL_OPTIONS", list(soon.items()))
    write_initial(tmp_path / "initial.safetensors")
    with opened(two.first) as context:
        commands = Administration(context)
        invitations = [commands.invite(site, 3600).invitation for site in SITES]
        document = study_document(sites=list(SITES), rounds=ROUNDS)
        study = commands.studies.create(document, str(tmp_path / "initial.safetensors"))
        commands.studies.start("trial")
    sites: list[FakeSite] = []
    with Serving(two.first, f"127.0.0.1:{two.port}") as leader:
        assert leader.line().startswith("ready")
        with Serving(two.second, f"[::1]:{two.port}") as waiting:
            assert waiting.line() == f"standby, waiting: the coordinator of {holder(two.first)} leads\n"
            with pytest.raises(TryAgain, match="this coordinator is a standby and waits: the coordinator of"):
                control.call(two.second.control, {"command": "status", "study": "trial"})
            with pytest.raises(TryAgain, match="is in use by coordinator serve"), opened(two.second):
                pass
            sites = [FakeSite(invitation) for invitation in invitations]
            gate = threading.Event()
            alpha, bravo = Gated(sites[0], study.id, gate), Stubborn(sites[1], study.id)
            assert alpha.there.wait(LIMIT_S)
            wait_until(lambda: GATE in bravo.accepted, "one of the two is accepted", LIMIT_S)
            leader.kill()
            gate.set()
            assert waiting.line().startswith("ready")
            for worker in (alpha, bravo):
                worker.thread.join(LIMIT_S)
            status = control.call(two.second.control, {"command": "status", "study": "trial"})
    for site in sites:
        site.close()
    assert status["state"] == "finished"
    assert sorted(bravo.accepted) == sorted(alpha.accepted) == list(range(1, ROUNDS + 2))
    with opened(two.second) as context:
        with TensorFile(context.blobs.model(status["model_digest"])) as model:
            found = b"".join(data for _, data in model.chunks())
        with context.store.read() as session:
            kept = [upload for upload in uploads_of(session, "trial", 1) if upload.decision == "accepted"]
    assert found == b"".join(expected_model([SITES] * ROUNDS))
    said = {json.loads(json.loads(str(upload.receipt))["payload"])["receipt_id"] for upload in kept}
    assert said == {receipt.receipt_id for worker in (alpha, bravo) for receipt in worker.accepted.values()}


@pytest.mark.chaos
def test_a_leader_that_stood_still_ends_when_it_goes_on_and_the_standby_serves(two: Two) -> None:
    """As a machine that was frozen: no clock of its own tells it in time."""
    with Serving(two.first, f"127.0.0.1:{two.port}") as leader:
        assert leader.line().startswith("ready")
        with Serving(two.second, f"[::1]:{two.port}") as waiting:
            assert waiting.line().startswith("standby, waiting")
            leader.process.send_signal(signal.SIGSTOP)
            assert waiting.line().startswith("ready")
            leader.process.send_signal(signal.SIGCONT)
            assert leader.process.wait(LIMIT_S) == 75  # which systemd starts again, as standby
            assert control.call(two.second.control, {"command": "sites"})["sites"] == []
    assert f"the coordinator of {holder(two.second)} took over" in leader.log.read_text()


def test_a_standby_ends_cleanly_while_it_waits(two: Two, capsys: pytest.CaptureFixture[str]) -> None:
    ended, got = Latch(), []
    with opened(two.first):
        waiting = threading.Thread(target=lambda: got.append(standby.wait_to_lead(two.second, ended, raise_fatal)))
        waiting.start()
        wait_until(lambda: control.is_listening(two.second.control), "it answers commands", LIMIT_S)
        ended.set()
        waiting.join(LIMIT_S)
    assert got == [None]
    assert not two.second.control.exists()
    assert capsys.readouterr().out == f"standby, waiting: the coordinator of {holder(two.first)} leads\n"


def test_a_database_that_cannot_be_reached_is_waited_for(
    two: Two, postgres: Postgres, capsys: pytest.CaptureFixture[str]
) -> None:
    ended, got = Latch(), []
    postgres.stop("fast")
    waiting = threading.Thread(target=lambda: got.append(standby.wait_to_lead(two.first, ended, raise_fatal)))
    waiting.start()
    wait_until(lambda: control.is_listening(two.first.control), "it answers commands", LIMIT_S)
    postgres.start()
    waiting.join(LIMIT_S)
    (store,) = got
    assert store is not None
    store.close()
    assert f"standby, waiting: {store.name} cannot be reached: " in capsys.readouterr().out


def test_a_command_beside_a_leader_elsewhere_changes_nothing_and_says_where_it_is_to_be_given(two: Two) -> None:
    with opened(two.first), pytest.raises(LedByAnother) as refusal, opened(two.second):
        pass
    assert refusal.value.message.endswith(f"is in use by the coordinator of {holder(two.first)}")
    assert refusal.value.hint == (
        "give the command there, or stop that one first; it is over at the latest when its lease ends"
    )


def test_a_standby_without_the_common_folder_does_not_take_over_with_an_empty_one(two: Two) -> None:
    """It would find no model of any study."""
    shared = Path(two.first.config().storage.blobs)
    shared.rename(shared.with_name("not mounted"))
    with pytest.raises(NeedsPerson, match=f"{shared} has no models and updates") as refusal, opened(two.second):
        pass
    assert refusal.value.hint == "is it mounted?"
    assert not shared.exists()


# The keys.


def test_a_standby_with_another_receipt_key_or_without_the_newest_root_does_not_take_over(two: Two) -> None:
    with opened(two.first):
        pass  # which puts its keys on record
    key = two.second.receipt_key_file
    ours = key.read_bytes()
    places.write_file(key, places._pem(places.Ed25519PrivateKey.generate()))
    with (
        pytest.raises(NeedsPerson, match="is of a coordinator with another receipt key") as refusal,
        opened(two.second),
    ):
        pass
    assert "`coordinator standby export`" in refusal.value.hint
    places.write_file(key, ours)
    for path in two.second.authority.iterdir():
        path.unlink()
    places.Authority.create(two.second.authority, "north", time.time())
    with pytest.raises(NeedsPerson, match=r"trusts root [0-9a-f]{12}…, which is not known here"), opened(two.second):
        pass


def test_the_file_for_a_standby_opens_with_its_passphrase_alone_and_shows_nothing(
    two: Two, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sealed = standby_file.exported(two.first, SECRET)
    assert b"PRIVATE KEY" not in sealed
    third = State(tmp_path / "third")
    flipped = sealed[:-1] + bytes([sealed[-1] ^ 1])
    for data, secret in ((sealed, b"another passphrase"), (flipped, SECRET), (sealed[:60], SECRET)):
        with pytest.raises(BadData, match="the file is damaged, or under another passphrase; nothing was made"):
            standby_file.imported(third, data, secret)
    with pytest.raises(BadData, match="this is no file of `coordinator standby export`"):
        standby_file.imported(third, b"something else", SECRET)
    with monkeypatch.context() as other:
        other.setattr(standby_file, "NAMES", (*standby_file.NAMES, "keys/of-a-later-version.pem"))
        with pytest.raises(BadData, match="the file has not what a standby needs; nothing was made"):
            standby_file.imported(third, sealed, SECRET)
    assert not third.root.exists()
    with pytest.raises(UsageProblem, match="the passphrase has fewer than 12 characters"):
        standby_file.exported(two.first, b"short")


def test_newer_keys_are_given_to_a_standby_that_is_there_only_when_asked_for(two: Two) -> None:
    sealed = standby_file.exported(two.first, SECRET)
    with pytest.raises(NeedsPerson, match="holds a coordinator already; nothing was changed"):
        standby_file.imported(two.second, sealed, SECRET)
    (two.second.authority / "older.pem").write_text("of an older import")
    standby_file.imported(two.second, sealed, SECRET, "/elsewhere/blobs", force=True)
    assert two.second.config().storage.blobs == "/elsewhere/blobs"
    assert {path.name for path in two.second.authority.iterdir()} == {"certificate.pem", "key.pem"}
    assert (two.second.authority / "key.pem").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("storage", "what"),
    [
        (Storage(), "database is a file"),
        (Storage(database="postgresql://w@db/w"), "models and updates are in the state directory"),
    ],
)
def test_a_standby_that_could_not_go_on_is_not_made(tmp_path: Path, storage: Storage, what: str) -> None:
    state = State(tmp_path / "state")
    places.create(state, "north", "127.0.0.1:8443", time.time())
    places.write_config(state, state.config().model_copy(update={"storage": storage}))
    with pytest.raises(NeedsPerson, match=f"the coordinator's {what} on this machine") as refusal:
        standby_file.exported(state, SECRET)
    assert "restore BACKUP --database URL --blobs FOLDER" in refusal.value.hint


def test_the_commands_of_a_standby(two: Two, tmp_path: Path) -> None:
    out, secret, third = tmp_path / "standby.bin", tmp_path / "passphrase", tmp_path / "third"
    secret.write_bytes(SECRET + b"\n")
    run = CliRunner().invoke
    made = run(
        app, ["standby", "export", "--state", str(two.first.root), "--out", str(out), "--passphrase", str(secret)]
    )
    assert made.exit_code == 0, made.output
    assert out.stat().st_mode & 0o777 == 0o600
    told = json.loads(run(app, ["journal", "show", "--state", str(two.first.root), "--json"]).stdout)["entries"]
    assert [(line["act"], line["event"]) for line in told][-2:] == [
        ("standby-export", "begun"),
        ("standby-export", "done"),
    ]
    taken = run(app, ["standby", "import", str(out), "--state", str(third), "--passphrase", str(secret)])
    assert taken.exit_code == 0, taken.output
    assert f"next: `coordinator serve --state {third}` waits here until it must take over" in taken.output
    assert State(third).config() == two.first.config()
