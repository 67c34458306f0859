"""``site-agent doctor``: each failure is caused, and found with its cause and its fix."""

import datetime
import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from site_agent import handoff
from site_agent.cli import main
from site_agent.cli.doctor import _refresh
from site_agent.doctor import examination, examine, network, place, studies, trainer
from site_agent.gateway.connection import diagnosis
from site_agent.gateway.consent.rows import StudyRow
from site_agent.gateway.enrolment.identity import Identity
from site_agent.gateway.service import RequestDispatcher
from site_agent.gateway.service_requests import ServiceStatus
from site_agent.trainer.data import sources
from tests.site_agent.fake_coordinator import Authority, FakeCoordinator
from tests.site_agent.site_world import STUDY, SiteWorld
from tests.site_agent.test_proxy import proxy
from tests.site_agent.test_several_people import TWO_CHANGE
from wardround import checkup
from wardround.checkup import GIB, OK, PROBLEM, WARNING, Finding, Room
from wardround.errors import TryAgain
from wardround.local import control
from wardround.local.durable import StateLock
from wardround.records.trainer import FilesStat, FilesStatus, Status
from wardround.signing import certificates

DAY = datetime.timedelta(days=1)
GPU = trainer.Cards(1, True)
HERE = FilesStatus(data="ab" * 32, weights="")


def now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def of(findings: "Iterator[Finding] | list[Finding]", about: str) -> Finding:
    """The first that is no success, of what is looked at under one name; else the first."""
    found = [one for one in findings if one.about == about]
    assert found, about
    return next((one for one in found if one.state != OK), found[0])


def looked(world: SiteWorld, service: ServiceStatus | None = None, **environment: str) -> list[Finding]:
    site = world.state.site()
    return list(examine(world.state, site, service, lambda: _refresh(world.state), environment))


@pytest.fixture
def well(world: SiteWorld) -> SiteWorld:
    """A site that has all that it needs, and no service."""
    world.join()
    world.offer()
    assert world.trainer is not None
    world.trainer.uid = os.geteuid()
    return world


def test_a_site_in_order_has_no_problem(well: SiteWorld) -> None:
    findings = looked(well)
    assert [one for one in findings if one.state == PROBLEM] == []
    for about in ("name", "port", "tls", "coordinator", "isolation", "disk"):
        assert of(findings, about).state == OK
    assert "wardround " in of(findings, "versions").text
    assert of(findings, "service") == checkup.warning(
        "service", "does not run: no round is taken part in", "`site-agent run`, as a service"
    )


def test_the_command_prints_cause_and_fix_and_exits_78(
    well: SiteWorld, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    give = ["doctor", "--state", str(well.state.root)]
    assert CliRunner().invoke(main.app, give).exit_code == 0
    well.coordinator.stop()
    done = CliRunner().invoke(main.app, give)
    assert done.exit_code == 78
    lines = done.output.splitlines()
    at = lines.index(f"problem  port: nobody listens at {well.coordinator.address}")
    assert lines[at + 1] == "         fix: is the coordinator running? ask its operator"
    assert lines[-1].startswith("1 problem, ")
    found = json.loads(CliRunner().invoke(main.app, [*give, "--json"]).output)["findings"]
    assert {"about", "state", "text", "fix"} == set(found[0])


# The way to the coordinator.


def way(world: SiteWorld, address: str = "", **environment: str) -> list[Finding]:
    own = Identity(world.state.identity)
    return network.way(address or world.coordinator.address, own, environment)[0]


def test_a_name_that_nobody_knows(well: SiteWorld) -> None:
    found = of(way(well, "nowhere.invalid:8443"), "name")
    assert (found.state, found.text) == (PROBLEM, "the name nowhere.invalid is not known here")
    assert "name service" in found.fix


def test_a_port_where_nobody_listens_and_a_proxy_in_the_environment(well: SiteWorld) -> None:
    well.coordinator.stop()
    findings = way(well, https_proxy="http://proxy:3128")
    assert of(findings, "port").text == f"nobody listens at {well.coordinator.address}"
    hint = of(findings, "proxy")
    assert (hint.state, "the environment names a proxy (https_proxy)" in hint.text) == (WARNING, True)
    assert "identity/proxy" in hint.fix


def test_a_firewall_that_drops_it(well: SiteWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        found = of(way(well, f"127.0.0.1:{silent.getsockname()[1]}"), "tls")
    assert (found.state, "does not answer in" in found.text) == (PROBLEM, True)
    assert "firewall" in found.fix


def test_a_proxy_that_is_not_there_or_refuses(well: SiteWorld) -> None:
    (well.state.identity / "proxy").write_text("http://127.0.0.1:1\n")
    found = of(way(well), "proxy")
    assert (found.state, "the proxy 127.0.0.1:1 cannot be reached" in found.text) == (PROBLEM, True)
    assert "identity/proxy" in found.fix
    with proxy(reply=b"HTTP/1.1 403 Forbidden\r\n\r\n") as fake:
        (well.state.identity / "proxy").write_text(f"http://{fake.address}\n")
        assert "allow CONNECT" in of(way(well), "proxy").fix
    (well.state.identity / "proxy").write_text("socks://x\n")
    assert "names no proxy" in of(way(well), "proxy").text
    with proxy() as fake:
        (well.state.identity / "proxy").write_text(f"http://{fake.address}\n")
        assert [one.state for one in way(well)] == [OK, OK, OK]


def test_a_box_that_looks_into_tls_is_named(well: SiteWorld) -> None:
    box = FakeCoordinator()
    box.stop()
    box.authority = Authority("Inspecting Proxy CA")
    box.start()
    try:
        found = of(way(well, box.address), "tls")
    finally:
        box.stop()
    assert "presents another authority than the one this site trusts" in found.text
    assert found.text.endswith("; what answers there is signed by `CN=Inspecting Proxy CA`")
    assert "it must leave this address alone; if not, do not go on" in found.fix


def test_something_that_speaks_no_tls(well: SiteWorld) -> None:
    def greet(listener: socket.socket) -> None:
        for _ in range(2):
            end, _ = listener.accept()
            with end:
                end.sendall(b"SSH-2.0-OpenSSH\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=greet, args=(listener,), daemon=True)
        thread.start()
        found = of(way(well, f"127.0.0.1:{listener.getsockname()[1]}"), "tls")
        thread.join(20)
    assert found.state == PROBLEM


def test_a_certificate_that_the_coordinator_does_not_take(well: SiteWorld) -> None:
    why = diagnosis._not_taken("a:1", well.state.identity / "certificate.pem")
    findings = network.steps("a:1", diagnosis.Look(diagnosis.CERTIFICATE, why), "", None, {})
    assert [one.state for one in findings] == [OK, OK, OK, PROBLEM]
    assert "does not take this site's certificate" in findings[-1].text


def test_a_coordinator_that_refuses_this_site_or_this_version(well: SiteWorld) -> None:
    well.coordinator.version = "9.0.0"
    found = of(looked(well), "coordinator")
    assert (found.state, "9.0.0" in found.text) == (PROBLEM, True)
    well.coordinator.revoked = True
    assert of(looked(well), "coordinator").state == PROBLEM


# Identity.


def certificate(world: SiteWorld, at: datetime.datetime) -> list[Finding]:
    return list(network.certificate(Identity(world.state.identity), at))


def test_a_certificate_that_ended_or_has_not_begun(well: SiteWorld) -> None:
    assert of(certificate(well, now()), "certificate").state == OK
    late = of(certificate(well, now() + 20 * DAY), "certificate")
    renewable = (well.state.identity / "renewal.pem").exists()
    assert (late.state, "ended on" in late.text) == (WARNING if renewable else PROBLEM, True)
    gone = of(certificate(well, now() + 900 * DAY), "certificate")
    assert (gone.state, "too long ago to be renewed" in gone.text) == (PROBLEM, True)
    assert "`site-agent join --invitation FILE`" in gone.fix
    early = of(certificate(well, now() - 20 * DAY), "certificate")
    assert (early.state, early.fix) == (PROBLEM, "set the clock: `timedatectl`")


def test_an_authority_that_ends(well: SiteWorld) -> None:
    end = min(root.not_valid_after_utc for root in Identity(well.state.identity).roots())
    found = of(certificate(well, end - DAY), "authority")
    assert (found.state, "tell the coordinator's operator" in found.fix) == (PROBLEM, True)


def test_a_certificate_of_an_older_kit(well: SiteWorld) -> None:
    """Of another generation of the authority, or over another key: two backups were mixed."""
    other = Authority()
    (well.state.identity / "authority.pem").write_bytes(other.pem)
    found = of(certificate(well, now()), "authority")
    assert (found.state, "of another authority than" in found.text) == (PROBLEM, True)
    (well.state.identity / "key.pem").write_bytes(certificates.key_pem(certificates.new_key()))
    (well.state.identity / "key.pem").chmod(0o600)
    assert "is not over the key beside it" in of(certificate(well, now()), "certificate").text
    (well.state.identity / "certificate.pem").write_text("x")
    assert of(certificate(well, now()), "certificate").state == PROBLEM
    (well.state.identity / "certificate.pem").unlink()
    assert of(certificate(well, now()), "certificate").fix == "restore the identity folder"


def test_keys_that_others_may_read_and_that_belong_to_another(well: SiteWorld) -> None:
    (well.state.identity / "ledger_key.pem").chmod(0o640)
    findings = looked(well)
    found = of(findings, "keys")
    assert (found.state, "`chmod 600 " in found.fix) == (PROBLEM, True)
    assert findings[-1].about == "memory"  # nothing is connected with them
    (taken,) = place.folders(well.state, os.geteuid() + 1)[:1]
    assert (taken.about, "needs it" in taken.text) == ("permissions", True)


def test_somebody_else_holds_the_keys(well: SiteWorld) -> None:
    service = ServiceStatus(True, os.geteuid(), "2026-09-21 14:13 UTC", "")
    found = of(looked(well, service), "identity")
    assert (found.state, "since 2026-09-21 14:13 UTC" in found.text) == (PROBLEM, True)


# This machine.


@pytest.mark.parametrize(
    ("room", "state", "said"),
    [
        pytest.param(Room(50 * GIB, 10**6, False), OK, "50.0 GiB free", id="room"),
        pytest.param(Room(GIB // 2, None, False), WARNING, "0.5 GiB free", id="little"),
        pytest.param(Room(GIB // 100, 10**6, False), PROBLEM, "0.1 GiB are needed", id="none"),
        pytest.param(Room(50 * GIB, 3, False), PROBLEM, "only 3 files more", id="inodes"),
        pytest.param(Room(50 * GIB, 10**6, True), PROBLEM, "is read-only", id="read-only"),
    ],
)
def test_a_disk(room: Room, state: str, said: str) -> None:
    found = checkup.disk(Path("/srv"), room)
    assert (found.state, said in found.text, bool(found.fix)) == (state, True, state != OK)
    for_one_model = checkup.disk(Path("/srv"), Room(8 * GIB, None, False), 9 * GIB)
    assert (for_one_model.state, "9.0 GiB are needed" in for_one_model.text) == (PROBLEM, True)


def test_a_clock_that_went_back(well: SiteWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    last = place.last_line(well.state.ledger)
    assert last is not None
    found = checkup.clock(last - DAY, last, True)
    assert (found.state, "and has said" in found.text) == (PROBLEM, True)
    assert checkup.clock(now(), last, False).state == WARNING
    assert checkup.clock(now(), None, True).state == OK
    assert checkup.is_synchronized() in (True, False, None)
    assert place.last_line(well.folder) is None
    (well.state.ledger / "000001.jsonl").write_bytes(b"no JSON\n")
    assert place.last_line(well.state.ledger) is None


def test_temporary_files_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checkup.temporary().state == OK

    @contextmanager
    def refused() -> Iterator[Any]:
        raise OSError(30, "Read-only file system")
        yield

    monkeypatch.setattr(checkup.tempfile, "TemporaryFile", refused)
    found = checkup.temporary()
    assert (found.state, "Read-only file system" in found.text, "TMPDIR" in found.fix) == (PROBLEM, True, True)


def test_too_little_shared_memory_and_memory() -> None:
    assert trainer.shared_memory(trainer.SHM_EACH, 1).state == OK
    found = trainer.shared_memory(trainer.SHM_EACH, 2)
    assert (found.state, "--shm-size" in found.fix) == (PROBLEM, True)
    assert [trainer.shared_memory(None, workers).state for workers in (0, 1)] == [WARNING, PROBLEM]
    assert trainer.memory(8 * GIB, GIB).state == OK
    assert trainer.memory(2 * GIB, GIB).state == WARNING
    assert trainer.available_memory() is not None


def test_a_service_that_holds_its_place_and_does_not_answer(well: SiteWorld) -> None:
    with StateLock(well.state.root, "site-agent run"):
        found = place.service(well.state)
    assert (found.state, "is in use by site-agent run (process" in found.text) == (PROBLEM, True)
    assert "end it by its number" in found.fix
    assert place.service(well.state).state == WARNING  # the lock of one that was killed is no lock
    dispatcher = RequestDispatcher(well.state, well.start())
    server = control.ControlServer(well.state.control, dispatcher.answer_document)
    try:
        assert place.service(well.state).state == OK
        done = CliRunner().invoke(main.app, ["doctor", "--state", str(well.state.root)])
    finally:
        server.close()
    assert "ok       coordinator: answers this site's calls" in done.output


# The trainer, its users and its data.


def test_a_trainer_that_does_not_answer(well: SiteWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    assert well.trainer is not None
    monkeypatch.setattr(handoff, "AT_ONCE_S", 0.1)
    well.trainer.deaf.set()
    found = of(looked(well), "trainer")
    assert (found.state, "it is stopped, hangs, or has ended" in found.text) == (PROBLEM, True)
    assert "systemctl restart wardround-trainer" in found.fix
    assert trainer.answers(None, "it ended (SIGKILL)")[0].text.endswith("it ended (SIGKILL)")


def test_torch_that_is_not_installed(well: SiteWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    assert well.trainer is not None
    well.trainer.close()
    well.trainer = None
    monkeypatch.setattr(examination, "find_spec", lambda name: None)
    found = of(looked(well), "trainer")
    assert (found.state, found.fix) == (PROBLEM, "`pip install 'wardround[site]'`")


def test_a_worker_that_cannot_start(well: SiteWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    assert well.trainer is not None
    well.trainer.close()
    well.trainer = None

    def dies(*given: object) -> None:
        raise TryAgain("the trainer's worker did not start")

    monkeypatch.setattr(handoff, "one_shot", dies)
    assert of(looked(well), "trainer").text == "it does not answer: the trainer's worker did not start"


def status(isolation: str = "network-namespace", *missing: str) -> Status:
    return Status.model_validate({
        "isolation": isolation, "missing": list(missing), "user": "t", "uid": 1, "worker": None, "device": "cpu",
    })  # fmt: skip


def test_isolation_that_is_not_in_force() -> None:
    (found,) = trainer.answers(status("none"), "")
    assert (found.state, "sysctl user.max_user_namespaces" in found.fix) == (PROBLEM, True)
    missing = list(trainer.MEASURES)
    findings = trainer.answers(status("seccomp", *missing), "")
    assert [one.state for one in findings] == [OK] + [WARNING] * len(missing)
    assert all(one.fix for one in findings[1:])


@pytest.mark.parametrize(
    ("wanted", "device", "cards", "state", "said"),
    [
        pytest.param("", "cpu", trainer.Cards(0, True), OK, "trains on cpu", id="no card"),
        pytest.param("", "cpu", GPU, OK, "1 GPU is not used", id="unused"),
        pytest.param("cuda", "cuda:0", GPU, OK, "trains on cuda:0", id="used"),
        pytest.param("cuda", "cuda:0", trainer.Cards(0, True), PROBLEM, "no GPU is on this machine now", id="lost"),
        pytest.param("cuda", "cpu", trainer.Cards(0, True), PROBLEM, "WARDROUND_DEVICE is cuda, and no", id="none"),
        pytest.param("cuda", "cpu", trainer.Cards(1, False), PROBLEM, "may not use the GPU", id="closed"),
    ],
)
def test_a_gpu(wanted: str, device: str, cards: trainer.Cards, state: str, said: str) -> None:
    found = trainer.gpu(wanted, device, cards)
    assert (found.state, said in found.text) == (state, True)


def test_the_cards_of_a_machine_are_its_device_files(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert trainer.cards(tmp_path) == trainer.Cards(2, True)


GATEWAY, TRAINER = 100_100, 100_200
PLACE = place.Place(Path("/site"), GATEWAY, GATEWAY, 0o750)
PLACES = {
    "state": PLACE, "staging": replace(PLACE, path=Path("/site/staging"), mode=0o2770),
    "studies": place.Place(Path("/site/studies"), TRAINER, TRAINER, 0o700),
    "data.toml": replace(PLACE, path=Path("/site/data.toml"), mode=0o640),
}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        pytest.param({"state": replace(PLACE, mode=0o700)}, "may not pass through /site (mode 700", id="state"),
        pytest.param({"staging": replace(PLACE, mode=0o2750)}, "may not write in", id="staging"),
        pytest.param({"data.toml": replace(PLACE, mode=0o600)}, "may not read", id="data.toml"),
        pytest.param({"studies": PLACE}, "belongs to 100100, and the trainer runs as 100200", id="studies"),
    ],
)
def test_permissions_between_the_two_users(changed: dict[str, place.Place], said: str) -> None:
    assert [one.state for one in place.users(GATEWAY, TRAINER, {TRAINER, GATEWAY}, PLACES)] == [OK]
    (found,) = place.users(GATEWAY, TRAINER, {TRAINER, GATEWAY}, {**PLACES, **changed})
    assert (found.state, said in found.text, found.fix.startswith("`ch")) == (PROBLEM, True, True)


def test_a_trainer_outside_of_the_group_and_one_user_for_both() -> None:
    assert len(place.users(GATEWAY, TRAINER, {TRAINER}, PLACES)) == 3
    assert place.users(GATEWAY, GATEWAY, {GATEWAY}, PLACES)[0].state == WARNING
    assert place.users(GATEWAY, 0, set(), {**PLACES, "studies": None})[0].state == OK
    assert 0 in place.groups_of(0)
    assert place.groups_of(4_000_000) == set()


def test_data_that_is_gone_or_closed_to_the_trainer(well: SiteWorld) -> None:
    def stat(missing: list[str], unreadable: list[str]) -> FilesStat:
        return FilesStat(status=HERE, bytes=1, missing=missing, unreadable=unreadable)

    def found(missing: list[str], unreadable: list[str], listens: bool) -> Finding:
        (one,) = trainer.data(["patients"], lambda _: stat(missing, unreadable), listens=listens)
        return one

    assert found([], [], True).state == OK
    assert (found(["table"], [], True).state, found([], ["table"], True).state) == (PROBLEM, PROBLEM)
    assert "is the disk mounted?" in found(["table"], [], True).fix
    assert found([], ["table"], False).state == WARNING
    assert trainer.data([], lambda _: stat([], []), listens=True)[0].state == WARNING
    source = sources.DataSource(table="/srv/t.csv", label="ill", digest="ab" * 32)
    sources.add(well.state.root, "patients", source, replace=False)
    assert well.trainer is not None
    well.trainer.missing = ["table"]
    assert "what data.toml calls table is not there" in of(looked(well), "data").text
    (well.state.root / "data.toml").write_text("[patients]\ntable = 1\n")
    assert of(looked(well), "data").state == PROBLEM


# Studies and the policy.


@pytest.mark.parametrize(
    ("state", "found", "said"),
    [
        ("offered", WARNING, "waits for a person here to approve it"),
        ("withdrawn", WARNING, "waits for a person here to approve it"),
        ("changed", PROBLEM, "the rounds are others"),
        ("held", WARNING, "round 2 waits for a person to release it"),
        ("paused", WARNING, "the coordinator has paused it"),
        ("running", OK, "running, round 2 of 3"),
    ],
)
def test_a_study_that_waits_or_cannot_go_on(state: str, found: str, said: str) -> None:
    row = StudyRow(STUDY, "", state, 2, 3, 1, "ab" * 32, "dpo", "patients", ("the rounds are others",))
    (one,) = studies.studies([row])
    assert (one.state, said in one.text) == (found, True)
    assert bool(one.fix) == (found != OK)
    assert studies.studies([replace(row, state="finished")])[0].about == "studies"


def test_approved_data_that_changed_is_a_problem(well: SiteWorld) -> None:
    well.start()
    well.approve()
    well.stop()
    assert of(looked(well), f"study {STUDY}").state == OK
    assert well.trainer is not None
    well.trainer.seen, well.trainer.digest = "b6" * 32, "cd" * 32
    found = of(looked(well), f"study {STUDY}")
    assert (found.state, "are not what was approved" in found.text) == (PROBLEM, True)


def test_no_policy_and_one_that_is_none(well: SiteWorld) -> None:
    assert of(looked(well), "policy").state == WARNING
    well.state.policy.write_text("[study]\n")
    assert of(looked(well), "policy").state == PROBLEM
    well.draft()
    assert of(looked(well), "policy").text == "studies hearts of spiffe://test/coordinator"


def test_a_policy_changed_by_hand_where_two_people_must_agree(well: SiteWorld) -> None:
    agent = well.start()
    well.wait_offered(STUDY)
    well.draft(TWO_CHANGE)
    well.approve()
    agent.stop()
    assert of(looked(well), "policy").state == OK
    well.state.policy.write_bytes(well.state.policy.read_bytes().replace(b"persons = 2", b"persons = 1"))
    found = of(looked(well), "policy")
    assert (found.state, found.text) == (
        PROBLEM,
        f"{well.state.policy} was changed by hand, and 2 different people must agree to each change: nothing leaves",
    )
    assert found.fix.startswith(f"each of them: `site-agent policy apply {well.state.policy}`; or put back what")


def test_a_receipt_that_cannot_be_believed_is_shown(well: SiteWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = SimpleNamespace(round="2", study=STUDY, why="another key signed it", file="one.json")
    monkeypatch.setattr(examination, "evidence", SimpleNamespace(read=lambda folder: [kept]))
    found = of(looked(well), "receipts")
    assert (found.state, "round 2 of hearts cannot be believed" in found.text) == (PROBLEM, True)
