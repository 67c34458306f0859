"""What fails by itself: a full table, a race, an answer that grew."""

import json
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bench.processes import cpu_seconds
from coordinator.members.authority import Authority
from coordinator.members.certificate_status import CertificateStatus, Peer
from coordinator.storage import tables
from site_agent import audit
from site_agent.state.directory import Journal, SiteState
from tests.attacks import failing_disk
from tests.attacks.places import placed
from tests.coordinator.fake_site import FakeSite
from tests.coordinator.test_crash import interrupted_at_one_step_after_the_other
from tests.site_agent.site_world import PERSON, STUDY, SiteWorld
from tools import verify_ledger
from tools.evidence_tamper import SEGMENT
from tools.world import Service, World, free_port, wait_until
from wardround import __version__
from wardround.errors import CannotWrite, NeedsPerson, NotPermitted, TryAgain, WardroundError
from wardround.local import control, durable, sockets
from wardround.signing import certificates
from wardround.v1 import federation_pb2

PLACES = ("before it read", "after it read")


@pytest.mark.attack(promise="P10", refused_by="proto/wardround/local/control.py")
@pytest.mark.chaos
def test_report_over_8_mib(tmp_path: Path) -> None:
    """A study of many rounds and sites has a report longer than the control socket took; the command crashed."""
    with placed(tmp_path) as place:
        name = place.create()
        answers = json.dumps({f"site-{n}": ["refused", "TENSOR_NORM", ""] for n in range(250)})
        asked = json.dumps([f"site-{n}" for n in range(250)])
        row: dict[str, Any] = {"closing": False, "base": "0" * 64, "opened_s": 0.0, "closed_s": 1.0}
        row |= {"study": name, "revision": 1, "asked": asked, "outcome": "failed", "answers": answers}
        with place.coordinator.context.store.write() as session:
            for number in range(1, 500):
                session.add(tables.Round(**row, number=number, attempt=1, model=None))
        told = control.call(place.state.control, {"command": "report", "study": name})
        assert len(json.dumps(told)) > 8 * 1024 * 1024
        assert [attempt["round"] for attempt in told["attempts"]] == list(range(1, 500))


def coordinator_socket(world: World) -> tuple[Service, Path]:
    return world.serve(), world.coordinator_state / "control.sock"


def agent_socket(only: str) -> Callable[[World], tuple[Service, Path]]:
    def start(world: World) -> tuple[Service, Path]:
        world.serve()
        world.join("alpha")
        state = world.state / "alpha"
        agent = Service(world.logs / f"{only}.log", "site-agent", "run", "--only", only, "--state", state)
        world.agents[only] = agent
        agent.wait_line("ready")
        return agent, state / ("control.sock" if only == "gateway" else "staging/trainer.sock")

    return start


@pytest.mark.chaos
@pytest.mark.attack(promise="P11", refused_by="proto/wardround/local/sockets.py")
@pytest.mark.parametrize(
    ("start", "ask"),
    [
        pytest.param(coordinator_socket, "sites", id="coordinator"),
        pytest.param(agent_socket("gateway"), "status", id="gateway"),
        pytest.param(agent_socket("trainer"), "status", id="trainer"),
    ],
)
def test_descriptors_run_out(world: World, start: Callable[[World], tuple[Service, Path]], ask: str) -> None:
    """One moment without a free descriptor ended the thread that accepts: every later command hung."""
    world.init()
    service, path = start(world)
    assert control.call(path, {"command": ask})
    starve(service.process.pid, 8)
    held = [sockets.connect(path) for _ in range(30)]
    wait_until(lambda: "cannot be accepted now" in service.log.read_text(), "it says that it cannot accept", 20)
    for connection in held:
        connection.close()
    assert control.call(path, {"command": ask}, timeout_s=30)


@pytest.mark.chaos
@pytest.mark.attack(promise="P11", refused_by="site_agent/gateway/agent.py")
def test_descriptors_run_out__while_the_line_is_down(world: World) -> None:
    """An agent that looked for the coordinator just then could not read its own certificate, and ended with 70."""
    world.init()
    agent, path = agent_socket("gateway")(world)
    assert world.coordinator is not None
    wait_until(lambda: control.call(path, {"command": "status"})["connected"], "the line is there", 30)
    least = (4, resource.getrlimit(resource.RLIMIT_NOFILE)[1])  # those that it has go on
    before = resource.prlimit(agent.process.pid, resource.RLIMIT_NOFILE, least)
    world.coordinator.kill()
    said = "has no file descriptor left"
    wait_until(lambda: agent.process.poll() is not None or said in agent.log.read_text(), "it says what it lacks", 30)
    assert agent.process.poll() is None, agent.tail()
    resource.prlimit(agent.process.pid, resource.RLIMIT_NOFILE, before)
    world.serve()
    wait_until(lambda: control.call(path, {"command": "status"})["connected"], "the line is back", 60)


@pytest.mark.attack(promise="P11", refused_by="site_agent/state/directory.py")
def test_descriptors_run_out__and_no_file_is_called_damaged(tmp_path: Path) -> None:
    """A record that could not be opened then was "damaged": a person was told to restore it from a backup."""
    state = SiteState(tmp_path)
    durable.make_folder(tmp_path / "journal")
    state.save_journal(Journal(STUDY))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (4, limits[1]))
    try:
        with pytest.raises(TryAgain) as refused:
            state.journal(STUDY)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert refused.value.message.endswith(f"{STUDY}.json cannot be read now: no file descriptor is left")
    assert state.journal(STUDY) == Journal(STUDY)


@pytest.mark.attack(promise="P11", refused_by="site_agent/gateway/connection/relay.py")
def test_descriptors_run_out__relay(world: World) -> None:
    """The auditor's relay forgot to listen in the same way, and the site behind it was cut off."""
    with socket.create_server(("127.0.0.1", 0)) as target:
        listen, to = f"127.0.0.1:{free_port()}", f"127.0.0.1:{target.getsockname()[1]}"
        relay = Service(world.logs / "relay.log", "site-agent", "audit", "relay", "--listen", listen, "--to", to)
        world.agents["relay"] = relay
        relay.wait_line("ready")
        starve(relay.process.pid, 4)
        host, port = listen.split(":")
        relay_at = (host, int(port))
        held: list[socket.socket] = []

        def starved() -> bool:
            held.append(socket.create_connection(relay_at))  # one that lacks its way onward is dropped, so one more
            return "cannot be accepted now" in relay.log.read_text()

        wait_until(starved, "it says that it cannot accept", 20)
        for connection in held:
            connection.close()
        target.settimeout(1)
        wait_until(lambda: passed_on(relay_at, target), "it forwards again", 30)


def passed_on(relay: tuple[str, int], target: socket.socket) -> bool:
    """Whether bytes sent through the relay arrive at its target, past those that were held before and are gone."""
    with socket.create_connection(relay, timeout=5) as site:
        site.sendall(b"through")
        try:
            while True:
                connection, _ = target.accept()
                with connection:
                    connection.settimeout(5)
                    if connection.recv(100) == b"through":
                        return True
        except TimeoutError:
            return False


def starve(pid: int, spare: int) -> None:
    """Leave a running process ``spare`` descriptors."""
    used = max(int(path.name) for path in Path(f"/proc/{pid}/fd").iterdir())
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (used + 1 + spare, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


class Record:
    """A coordinator's record of one site, and a reader whose thread stops wherever ``pause`` says."""

    def __init__(self, pause: Callable[[str], None]) -> None:
        self._pause = pause
        self.serials = ["1"]
        self.revoked: int | None = None

    @contextmanager
    def read(self) -> Iterator["Record"]:
        self._pause("before it read")
        yield self
        self._pause("after it read")

    def scalars(self, chosen: Any) -> "Rows":
        if chosen.column_descriptions[0]["type"] is tables.Certificate:
            return Rows(tables.Certificate(serial=one, site="alpha", used_s=1, made_with="") for one in self.serials)
        if chosen.column_descriptions[0]["type"] is tables.Restore:
            return Rows()
        return Rows([tables.Site(name="alpha", revoked_s=self.revoked, certificate_fork_s=None)])


class Rows(list[Any]):
    """What a session gives."""

    def all(self) -> list[Any]:
        return self

    def first(self) -> Any:
        return self[0] if self else None


@pytest.mark.attack(promise="P11", refused_by="coordinator/members/certificate_status.py")
@pytest.mark.chaos
def test_revocation_undone_in_memory(tmp_path: Path) -> None:
    """A renewal that had read before a revocation put its older picture in place after it: the site was good again."""
    certificate = Authority.create(tmp_path, "north", time.time()).certificate  # good now; nothing else is asked of it
    for run in range(1000):
        chance = random.Random(run)
        stops = {(who, place): chance.random() < 0.5 for who in ("renew", "revoke") for place in PLACES}
        done = {"renew": threading.Event(), "revoke": threading.Event()}

        def pause(place: str, stops: dict[Any, bool] = stops, done: dict[str, threading.Event] = done) -> None:
            """Let the other one finish first, if it can."""
            who = threading.current_thread().name
            if stops.get((who, place)):
                done["revoke" if who == "renew" else "renew"].wait(0.003)

        record = Record(pause)
        status = CertificateStatus(record, "north", time.time)  # type: ignore[arg-type]

        def act(status: CertificateStatus = status, record: Record = record, done: Any = done) -> None:
            who = threading.current_thread().name
            if who == "renew":
                record.serials.append("2")
            else:
                record.revoked = 1
            status.load()
            done[who].set()

        threads = [threading.Thread(target=act, name=who) for who in chance.sample(sorted(done), 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with pytest.raises(NotPermitted, match="site `alpha` was revoked"):
            status.check(Peer(certificates.Name("north", "site", "alpha"), "2", certificate, ""))


ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.attack(promise="P2", refused_by="site_agent/audit/files.py")
@pytest.mark.chaos
def test_verified_while_written(tmp_path: Path) -> None:
    """Both verifiers look at a healthy ledger 80 times while an agent writes it: none of them is alarmed."""
    folder = tmp_path / "ledger"
    line = [sys.executable, "-m", "tests.attacks.ledgers", str(folder)]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as writer:
        try:
            assert writer.stdin is not None
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"ready\n"
            before = (folder / SEGMENT).stat().st_size
            for _ in range(80):
                writer.stdin.write(b"go on\n")
                writer.stdin.flush()
                verdict, code = audit.verify(folder)
                assert code in (audit.CONSISTENT, audit.UNRESOLVED), verdict.reason
                code, _, said = verify_ledger.judge(folder)
                assert code in (audit.CONSISTENT, audit.UNRESOLVED), said
            assert (folder / SEGMENT).stat().st_size > before
        finally:
            writer.kill()


ROOM = 64  # descriptors with which a service does its work: each of its threads may have the database open


@pytest.mark.chaos
@pytest.mark.attack(promise="P11", refused_by="coordinator/connections.py")
def test_descriptors_run_out__at_the_port_of_the_sites(world: World) -> None:
    """More connections than descriptors: those without a call are closed first; files and members keep theirs."""
    world.init()
    service = world.serve()
    site = FakeSite(world.ask_coordinator("invite", "alpha"))
    request = federation_pb2.StudiesRequest(agent_version=__version__)
    site.federation.Studies(request, timeout=20)
    starve(service.process.pid, ROOM)
    host, port = world.address.split(":")
    held = [socket.create_connection((host, int(port)), timeout=20) for _ in range(ROOM + 20)]
    wait_until(lambda: "descriptor limit reached" in service.log.read_text(), "gRPC says that it waits", 20)
    asked = [site.federation.Studies.future(request, timeout=20) for _ in range(4)]
    for connection in held:
        connection.close()
    wait_until(lambda: answers(world), "the commands are answered", 30)
    for call in asked:
        said = call.exception().details() if call.exception() else ""
        assert not said or "TOO_BUSY" in said or "COORDINATOR_TROUBLE" in said  # an agent tries again after both
    again = FakeSite(world.ask_coordinator("invite", "bravo"))
    assert service.process.poll() is None
    for one in (site, again):
        one.close()


def answers(world: World) -> bool:
    try:
        return bool(control.call(world.coordinator_state / "control.sock", {"command": "sites"}, timeout_s=5))
    except WardroundError:
        return False


LIMIT_S = 60


@pytest.fixture
def hospital(tmp_path: Path) -> Iterator[SiteWorld]:
    """One hospital that approved a study; its agent is started by the test as a process."""
    world = SiteWorld(tmp_path)
    try:
        world.ready()
        world.stop()
        yield world
    finally:
        world.close()


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait(LIMIT_S)
    assert process.stdout is not None
    process.stdout.close()


def gateway(world: SiteWorld, part: str = "", nth: int = 0) -> subprocess.Popen[str]:
    log = world.folder / "agent.log"
    return failing_disk.start("site-agent", part, nth, log, "run", "--only", "gateway", "--state", world.state.root)


def ask(world: SiteWorld, process: subprocess.Popen[str], round_: int) -> None:
    """Ask for a round, as often as the agent connects anew, until the trainer heard that it counts or it ended."""
    assert world.trainer is not None
    asked = 0
    written = (world.state.ledger / SEGMENT, world.folder / "agent.log")

    def moved() -> object:
        assert world.trainer is not None
        sizes = [path.stat().st_size if path.exists() else 0 for path in written]
        return sizes, asked, len(world.trainer.asked), process.poll() is None and int(cpu_seconds(process.pid))

    def settled() -> bool:
        nonlocal asked
        assert world.trainer is not None
        streams = len(world.coordinator._streams)
        if streams and not asked:
            world.coordinator.assign(STUDY, round_)
            asked = streams
        rounds = {request["round"] for request in world.trainer.commands("commit")}
        journal = world.state.journal(STUDY)
        return process.poll() is not None or (round_ in rounds and journal.round == round_ and journal.applied)

    wait_until(settled, f"round {round_} counts, or the agent ended", LIMIT_S, moved)


def ends_with_73_and_goes_on(world: SiteWorld, part: str, nth: int) -> bool:
    """Run into the failing fsync and start again. Whether there was one; all that must hold has been asserted."""
    process = gateway(world, part, nth)
    try:
        ask(world, process, 1)
        asked_to_end = process.poll() is None
        if asked_to_end:
            process.terminate()
        code = process.wait(LIMIT_S)
    finally:
        end(process)
    log = (world.folder / "agent.log").read_text()
    failed = code != 0
    if failed:
        assert code == 73 or (asked_to_end and code == -signal.SIGTERM), log  # ours, while it was ending already
        assert "the disk failed to keep what was written (Input/output error)" in log
        assert "Traceback" not in log
        assert audit.verify(world.state.ledger)[1] in (audit.CONSISTENT, audit.UNRESOLVED)
        assert verify_ledger.judge(world.state.ledger)[0] in (audit.CONSISTENT, audit.UNRESOLVED)
    wait_until(lambda: not world.coordinator._streams, "the line is down", LIMIT_S)
    process = gateway(world)
    try:
        for round_ in (1, 2):
            ask(world, process, round_)
        assert process.poll() is None, (world.folder / "agent.log").read_text()
        process.terminate()
        assert process.wait(LIMIT_S) == 0
    finally:
        end(process)
    verdict, code = audit.verify(world.state.ledger)
    assert code == audit.CONSISTENT, verdict.reason
    assert verify_ledger.judge(world.state.ledger)[0] == audit.CONSISTENT
    assert verdict.accepted == 2  # once a round, whatever was asked again
    lines = world.lines()
    assert len({line["upload_id"] for line in lines if line["type"] == "upload"}) == verdict.uploads
    assert [line["seq"] for line in lines] == list(range(len(lines)))
    return failed


@pytest.mark.attack(promise="P4", refused_by="site_agent/gateway/exit/ledger.py")
@pytest.mark.parametrize(
    ("part", "nth"),
    [
        pytest.param("000001.jsonl", 3, id="the upload's line"),
        pytest.param("000001.jsonl", 4, id="the receipt's line"),
        pytest.param("heads.jsonl", 1, id="a signed head"),
        pytest.param(".tmp", 3, id="the journal"),
    ],
)
def test_fsync_fails_once(hospital: SiteWorld, part: str, nth: int) -> None:
    """A failed fsync left a line on the disk that the program did not know of: two lines later the ledger was broken
    for good."""
    assert ends_with_73_and_goes_on(hospital, part, nth)


@pytest.mark.chaos
@pytest.mark.attack(promise="P4", refused_by="proto/wardround/local/durable.py")
@pytest.mark.timeout(1200)
def test_fsync_fails_once__at_every_one_of_a_round(tmp_path: Path) -> None:
    """One after the other, until a run needs no more of them."""
    for nth in range(1, 100):
        folder = tmp_path / str(nth)
        folder.mkdir()
        world = SiteWorld(folder)
        try:
            world.ready()
            world.stop()
            if not ends_with_73_and_goes_on(world, "", nth):
                break
        finally:
            world.close()
    assert nth > 10


@pytest.mark.attack(promise="P4", refused_by="proto/wardround/local/control.py")
def test_fsync_fails_once__under_a_command(hospital: SiteWorld) -> None:
    """A person's command met the failed disk; the service answered it and went on as if nothing had happened."""
    process = gateway(hospital, "consents", 1)
    try:
        wait_until(lambda: control.is_listening(hospital.state.control), "the service listens", LIMIT_S)
        with pytest.raises(CannotWrite, match="the disk failed to keep what was written"):
            control.call(hospital.state.control, {"command": "withdraw", "study": STUDY, "by": PERSON})
        assert process.wait(LIMIT_S) == 73
    finally:
        end(process)


@pytest.mark.attack(promise="P4", refused_by="coordinator/storage/database.py")
@pytest.mark.parametrize("where", ["fails-sync", "fails-before-commit", "fails-after-commit"])
@pytest.mark.timeout(720)
@pytest.mark.chaos
def test_fsync_fails_once__at_the_coordinator(tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its disk fails at one durable step after the other: each time it ends with 73, and no accepted update is lost."""
    interrupted_at_one_step_after_the_other(tmp_path, where, "mean", monkeypatch, code=73)


@pytest.mark.attack(promise="P6", refused_by="site_agent/gateway/consent/approvals.py")
def test_withdrawn_while_it_is_approved(site: SiteWorld) -> None:
    """Somebody approves twice, as by a second click, and reading the patients takes minutes. Meanwhile the study is
    withdrawn; the second approval, which began before, put it in force again."""
    site.ready()
    assert site.trainer is not None
    site.trainer.before_check = lambda: site.command("withdraw", study=STUDY, by=PERSON)
    with pytest.raises(NeedsPerson) as overtaken:
        site.approve()
    assert overtaken.value.message == (
        "study `hearts` changed while it was approved: somebody approved or withdrew it meanwhile"
    )
    consent = site.state.consent(STUDY)
    assert consent is not None
    assert consent.state == "withdrawn"
    assert [line["event"] for line in site.lines("consent")] == ["approved", "withdrawn"]
