"""Killed at any durable step: the final model is the same, no accepted update is lost, none counts twice."""

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
import sqlalchemy as sa
from safetensors.numpy import load_file

from coordinator import state_directory as places
from coordinator.administration import Administration
from coordinator.context import Context, raise_fatal
from coordinator.state_directory import State, Storage
from coordinator.storage import database, tables
from coordinator.storage.blobs import Blobs
from coordinator.studies import conclusion
from coordinator.studies.history import uploads_of
from coordinator.updates.receipts import Receipts
from tests.coordinator.conftest import Place, on_both, study_document
from tests.coordinator.fake_site import FakeSite, Update, delta, write_initial
from tests.coordinator.test_downloads import kept_after, same
from tests.coordinator.test_rounds import SPECS, expected_model, model_bytes
from tests.coordinator.toy_half import toy_half
from tools.world import free_port
from wardround import __version__, rpc
from wardround.errors import CannotWrite, NeedsPerson
from wardround.local.durable import StorageFailed
from wardround.records.receipts import Receipt
from wardround.tensors.files import TensorFile
from wardround.v1 import federation_pb2 as pb

SITES = ("alpha", "bravo")
ROUNDS = 3
LIMIT_S = 120  # without a kill and without an accepted update
BOUND_S = 600


class Stubborn:
    """A site that goes on until the study has ended, whatever becomes of the coordinator."""

    def __init__(self, site: FakeSite, study: str) -> None:
        self.site = site
        self.study = study
        self.accepted: dict[int, Receipt] = {}
        self._sent: dict[tuple[int, int], tuple[Any, Update]] = {}
        self._deadline = time.monotonic() + BOUND_S
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while time.monotonic() < self._deadline:
            try:
                request = pb.StudiesRequest(agent_version=__version__)
                self.site.federation.Studies(request, timeout=20, wait_for_ready=True)
                self._resolve()
                if not self._is_offered():
                    return  # it ended with the last coordinator, before the word reached this site
                self.site.declare(self.study)
                for event in self.site.federation.Watch(pb.WatchRequest(agent_version=__version__), timeout=LIMIT_S):
                    if not event.HasField("assignment"):
                        continue
                    if event.assignment.HasField("stop"):
                        return
                    self._answer(event.assignment)
            except grpc.RpcError as error:
                if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:  # nothing goes on it: an agent leaves it, too
                    self.site.channel.close()
                    self.site.channel = self.site.open_channel()

    def _is_offered(self) -> bool:
        return any(offer.study == self.study for page in self.site.pages() for offer in page)

    def _answer(self, assignment: Any) -> None:
        """The same upload id for the same update, however often it must be sent, until it was not received."""
        key = (assignment.round, assignment.attempt)
        if key not in self._sent:
            update = delta(self.site.name, assignment.round, SPECS if assignment.HasField("train") else ())
            self._sent[key] = (self.site.opening(assignment, update), update)
        opening, update = self._sent[key]
        receipt = self.site.send(opening, update.payload)
        if receipt is not None:
            self._keep(receipt)

    def _resolve(self) -> None:
        """A receipt may have been lost with the line: ask."""
        for (number, attempt), (opening, _) in list(self._sent.items()):
            if number not in self.accepted:
                reply = self.site.inquire(opening.upload_id)
                if reply.HasField("receipt"):
                    receipt = self.site.take(reply.receipt)
                    if receipt.decision == "not_received":
                        del self._sent[number, attempt]  # as an agent does: what is sent again has a new id
                    else:
                        self._keep(receipt)

    def _keep(self, receipt: Receipt) -> None:
        assert receipt.decision == "accepted"
        assert self.accepted.setdefault(receipt.round, receipt) == receipt


def serve(state: Path, where: str, steps: int, half: str) -> subprocess.Popen[str]:
    line = [sys.executable, "-m", "tests.coordinator.crashing", str(state), where, str(steps), half]
    return subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL, text=True
    )


@pytest.mark.timeout(BOUND_S + LIMIT_S)
@pytest.mark.parametrize(
    ("where", "half", "database"),
    [
        ("sync", "mean", "file"),
        ("sync", "toy", "file"),
        # beside the disk that fails at the same steps, in the attacks
        ("before-commit", "mean", "file"),
        ("after-commit", "mean", "file"),
        ("after-commit", "mean", "server"),
    ],
)
@pytest.mark.chaos
def test_killed_at_one_durable_step_after_the_other_the_model_is_the_same(
    tmp_path: Path, where: str, half: str, database: str, request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    storage, rounds = Storage(), ROUNDS
    if database == "server":
        storage, rounds = Storage(database=request.getfixturevalue("postgres").new_database()), 1
    interrupted_at_one_step_after_the_other(tmp_path, where, half, monkeypatch, code=-9, storage=storage, rounds=rounds)


def interrupted_at_one_step_after_the_other(
    tmp_path: Path,
    where: str,
    half: str,
    monkeypatch: pytest.MonkeyPatch,
    *,
    code: int,
    storage: Storage = Storage(),
    rounds: int = ROUNDS,
) -> None:
    """Let the coordinator end at its 3rd, 4th ... durable step with ``code``, until its study is done and whole."""
    if half == "toy":
        monkeypatch.setattr("coordinator.studies.study.server_aggregator", toy_half)
    soon = {**dict(rpc.CHANNEL_OPTIONS), "grpc.max_reconnect_backoff_ms": 200}  # the sites' channels alone
    monkeypatch.setattr(rpc, "CHANNEL_OPTIONS", list(soon.items()))
    state = State(tmp_path / "state")
    places.create(state, "north", f"127.0.0.1:{free_port()}", time.time(), storage)
    write_initial(tmp_path / "initial.safetensors")
    context = Context(state, wall_clock=time.time, monotonic=time.monotonic, fatal=raise_fatal)
    commands = Administration(context)
    invitations = [commands.invite(site, 3600).invitation for site in SITES]
    study = commands.studies.create(
        study_document(sites=list(SITES), rounds=rounds), str(tmp_path / "initial.safetensors")
    )
    commands.studies.start("trial")
    context.close()

    with serve(state.root, where, 0, half) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("ready")
        sites = [FakeSite(invitation) for invitation in invitations]
        process.kill()
    workers = [Stubborn(site, study.id) for site in sites]
    kills, moved, since = 0, (0, 0), time.monotonic()
    while any(worker.thread.is_alive() for worker in workers):
        with serve(state.root, where, 3 + kills, half) as process:
            try:
                while process.poll() is None and any(worker.thread.is_alive() for worker in workers):
                    workers[0].thread.join(0.05)
                    workers[1].thread.join(0.05)
                    if moved != (moved := (kills, sum(len(worker.accepted) for worker in workers))):
                        since = time.monotonic()
                    assert time.monotonic() - since < LIMIT_S, f"nothing has changed since {moved}"
                assert process.poll() in (None, code)
                kills += process.poll() == code
            finally:
                process.kill()  # else what was found wrong is never said
    assert kills >= 3

    context = Context(state, wall_clock=time.time, monotonic=time.monotonic, fatal=raise_fatal)
    status = Administration(context).studies.status("trial").document()
    assert status["state"] == "finished"
    assert {site: row["rounds_contributed"] for site, row in status["sites"].items()} == {
        site: list(range(1, rounds + 1)) for site in SITES
    }
    if half == "toy":
        assert same(load_file(context.blobs.model(status["model_digest"])), kept_after([SITES] * rounds, SITES))
    else:
        with TensorFile(context.blobs.model(status["model_digest"])) as model:
            found = b"".join(data for _, data in model.chunks())
        assert found == b"".join(expected_model([SITES] * rounds))
    with context.store.read() as session:
        kept = [upload for upload in uploads_of(session, "trial", 1) if upload.decision == "accepted"]
    said = {json.loads(json.loads(str(upload.receipt))["payload"])["receipt_id"] for upload in kept}
    assert said == {receipt.receipt_id for worker in workers for receipt in worker.accepted.values()}
    assert list((state.blobs / "uploads").iterdir()) == []
    context.close()
    for site in sites:
        site.close()


@on_both
def test_a_restart_in_the_middle_of_an_aggregation_makes_the_same_model(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The accepted set is frozen before the aggregation begins; whoever comes next does it again."""
    sites = place.begin(sites=list(SITES), rounds=1)
    reached = threading.Event()
    monkeypatch.setattr("coordinator.studies.conclusion.aggregate", lambda *_: reached.set() or held())
    gate = threading.Event()

    def held() -> None:
        gate.wait(20)
        raise StorageFailed("as if the process had ended here")

    for site in sites:
        site.answer(site.next_assignment())
    assert reached.wait(20)
    monkeypatch.undo()
    gate.set()
    place.restart()
    assert isinstance(place.failures.pop(), StorageFailed)
    place.until(lambda status: status["closing"])
    with TensorFile(place.coordinator.context.blobs.model(place.status()["model_digest"])) as model:
        assert b"".join(data for _, data in model.chunks()) == b"".join(expected_model([SITES]))


def test_half_written_models_and_orphaned_spools_are_cleared_at_the_next_start(place: Place) -> None:
    blobs = place.state.blobs
    (blobs / "models" / ".trial-1-1.safetensors").write_bytes(b"half")
    (blobs / "uploads" / f"{'0' * 32}.safetensors").write_bytes(b"nobody's")
    place.restart()
    assert list((blobs / "uploads").iterdir()) == []
    assert list((blobs / "models").iterdir()) == []


def test_a_failed_disk_ends_the_process(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    from wardround.local import durable

    (site,) = place.begin(sites=["alpha"])
    assignment = site.next_assignment()

    def fails(descriptor: int, path: Path) -> None:
        raise durable.StorageFailed(f"{path}: the disk failed to keep what was written")

    monkeypatch.setattr(durable, "_sync", fails)
    with pytest.raises(grpc.RpcError):
        site.answer(assignment)
    assert any(isinstance(error, durable.StorageFailed) for error in place.failures)
    place.failures.clear()


def test_a_decision_that_cannot_be_written_is_no_decision(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (site,) = place.begin(sites=["alpha"])
    assignment = site.next_assignment()
    update = delta("alpha", 1, SPECS)
    opening = site.opening(assignment, update)

    def fails(*_: object) -> None:
        raise OSError("no receipt")

    monkeypatch.setattr(Receipts, "sign", fails)
    with pytest.raises(grpc.RpcError, match="COORDINATOR_TROUBLE") as failed:
        site.send(opening, update.payload)
    assert failed.value.details() == "COORDINATOR_TROUBLE"
    assert "no receipt" in caplog.text
    monkeypatch.undo()
    assert site.inquire(opening.upload_id).offset == len(update.payload)
    assert place.status()["sites"]["alpha"]["state"] == "training"
    receipt = site.send(opening, update.payload)
    assert receipt
    assert receipt.decision == "accepted"


def test_a_byte_that_changes_in_a_spool_is_never_averaged_and_its_site_is_asked_again(place: Place) -> None:
    """The receipt is given and stays true: the round waits for the same update once more and goes on without none."""
    sites = place.begin(rounds=1, quorum=2)
    assignments = [site.next_assignment() for site in sites]
    first = sites[0].answer(assignments[0])
    path = Blobs(place.state.blobs).spool(first.upload_id)
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
    for site, assignment in zip(sites[1:], assignments[1:], strict=True):
        site.answer(assignment)
    again = sites[0].next_assignment()
    assert (again.round, again.attempt) == (1, 2)
    attempt = place.ask("report", study="trial")["attempts"][0]
    assert attempt["answers"]["alpha"] | {"metrics": {}} == {
        "answer": "left_out", "code": "PAYLOAD_DIGEST", "tensor": "", "metrics": {},
    }  # fmt: skip
    assert not path.exists()
    assert sites[0].answer(again).decision == "accepted"
    place.until(lambda status: status["closing"])
    with TensorFile(place.coordinator.context.blobs.model(place.status()["model_digest"])) as model:
        assert b"".join(data for _, data in model.chunks()) == b"".join(expected_model([("alpha", "bravo", "charlie")]))


def test_a_disk_that_goes_on_changing_a_spool_pauses_the_study_and_says_whose(place: Place) -> None:
    (site,) = place.begin(sites=["alpha"])
    real = Blobs.spool

    def damaging(blobs: Blobs, upload_id: str) -> Path:
        path = real(blobs, upload_id)
        if path.exists() and threading.current_thread().name.startswith("aggregation"):
            path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
        return path

    Blobs.spool = damaging  # type: ignore[method-assign]
    try:
        for _ in range(2):
            site.answer(site.next_assignment())
        status = place.until(lambda status: status["state"] == "paused")
    finally:
        Blobs.spool = real  # type: ignore[method-assign]
    assert status["why"] == "what is kept here of the accepted update of `alpha` is damaged; it was not averaged"
    assert status["sites"]["alpha"] | {"code": "PAYLOAD_DIGEST", "state": "left_out"} == status["sites"]["alpha"]
    place.ask("start", study="trial")
    assert site.next_assignment().stop.reason == pb.Stop.PAUSED
    assert site.answer(site.next_assignment()).decision == "accepted"
    place.until(lambda status: status["round"] == 2)


def test_a_full_disk_while_averaging_is_waited_out_and_the_round_goes_on(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It ended the process, and later paused the study until a person came."""
    monkeypatch.setattr("coordinator.studies.aggregations.LATER_S", 0.05)
    sites = place.begin(sites=list(SITES), rounds=1)
    tried: list[object] = []
    real = conclusion.aggregate

    def full(*arguments: Any) -> Any:
        tried.append(arguments)
        if len(tried) < 3:
            raise CannotWrite("blobs: no space left")
        return real(*arguments)

    monkeypatch.setattr(conclusion, "aggregate", full)
    for site in sites:
        site.answer(site.next_assignment())
    assert place.until(lambda status: status["closing"])["sites"]["alpha"]["rounds_contributed"] == [1]
    said = "trial: round 1 cannot be aggregated now: blobs: no space left; trying again in 0.05 s, free some space"
    assert caplog.text.count(said) == 2


def test_a_service_that_waits_for_room_stops_at_once_and_the_next_one_aggregates(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    sites = place.begin(sites=list(SITES), rounds=1)
    asked = threading.Event()

    def full(*_: object) -> None:
        asked.set()
        raise CannotWrite("blobs: no space left")

    monkeypatch.setattr(conclusion, "aggregate", full)
    for site in sites:
        site.answer(site.next_assignment())
    assert asked.wait(20)
    place.coordinator.stop()
    monkeypatch.undo()
    place.serve()
    place.until(lambda status: status["closing"])
    assert model_bytes(place) == expected_model([SITES])


def test_a_step_that_cannot_be_written_now_is_tried_again_and_stops_no_other_study(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.studies.engine.LATER_S", 0.05)
    place.begin(sites=["alpha"], round_deadline_s=1)
    engine, real, failed = place.coordinator.engine, database.Store.write, []

    def full(records: database.Store) -> object:
        if threading.current_thread().name == "engine" and len(failed) < 3:
            failed.append(True)
            raise CannotWrite("coordinator.db: no space left")
        return real(records)

    monkeypatch.setattr(database.Store, "write", full)
    assert place.until(lambda status: status["attempt"] == 2)["state"] == "running"
    assert len(failed) == 3
    assert engine.find("trial") is not None


def test_a_study_that_cannot_be_read_keeps_its_files_and_every_command_on_it_says_so(place: Place) -> None:
    (site,) = place.begin(sites=["alpha", "bravo"][:1])
    site.answer(site.next_assignment())
    place.until(lambda status: status["round"] == 2)
    update = delta("alpha", 2, SPECS)
    opening = site.opening(site.next_assignment(), update)
    assert site.send(opening, update.payload, chunk=8, stop_at=8) is None
    with place.coordinator.context.store.write() as session:
        session.execute(sa.update(tables.Study).values(state="{}"))
    models = set((place.state.blobs / "models").iterdir())
    place.restart()
    assert set((place.state.blobs / "models").iterdir()) == models
    assert site.inquire(opening.upload_id).offset == 8  # whether the study has ended is not known
    with pytest.raises(NeedsPerson) as refusal:
        place.status()
    assert refusal.value.message.startswith("the record of study `trial` is damaged here: ")
    assert refusal.value.hint == (
        "the other studies go on; restore the state directory from a backup, or give the new study another name"
    )
    with pytest.raises(NeedsPerson, match="the record of study `trial` is damaged here"):
        place.create(sites=["alpha"])
