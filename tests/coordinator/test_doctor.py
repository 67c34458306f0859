"""``coordinator doctor``: each failure is caused, and found with its cause and its fix."""

import datetime
import errno
import json
import os
import socket
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coordinator import doctor
from coordinator import state_directory as places
from coordinator.answers import SiteList, SiteRow, StudyList, StudyRow
from coordinator.cli.main import app
from coordinator.doctor import Answers, examine
from coordinator.member_answers import AuthorityStatus
from coordinator.members.authority import Authority
from coordinator.state_directory import State
from tests.coordinator.conftest import Place
from tools.world import free_port
from wardround.checkup import OK, PROBLEM, WARNING, Finding
from wardround.errors import NeedsPerson
from wardround.local import control
from wardround.local.durable import StateLock

NOW = datetime.datetime(2026, 11, 22, 12, tzinfo=datetime.UTC)
DAY_S = 86400


def of(findings: list[Finding], about: str) -> Finding:
    """The first that is no success, of what is looked at under one name; else the first."""
    found = [one for one in findings if one.about == about]
    assert found, about
    return next((one for one in found if one.state != OK), found[0])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> State:
    """A coordinator as ``init`` makes it, that nothing serves. No test changes it."""
    state = State(tmp_path_factory.mktemp("doctor") / "state")
    places.create(state, "north", f"127.0.0.1:{free_port()}", time.time())
    return state


def answers(*sites: SiteRow, studies: tuple[StudyRow, ...] = (), behind: tuple[str, ...] = ()) -> Answers:
    authority = AuthorityStatus(signs="the root", expires="", roots=(), sites={}, behind=behind)
    return Answers(
        lambda: SiteList(sites=sites, receipt_key="k"), lambda: StudyList(studies=studies), lambda: authority
    )


def test_a_coordinator_in_order_has_no_problem(place: Place) -> None:
    place.join("alpha")
    asked = Answers(
        lambda: SiteList.from_document(place.ask("sites")),
        lambda: StudyList.from_document(place.ask("studies", archived=False)),
        lambda: AuthorityStatus.from_document(place.ask("authority")),
    )
    server = control.ControlServer(place.state.control, lambda document, reply: {})
    try:
        findings = list(examine(place.state, asked))
    finally:
        server.close()
    assert [one for one in findings if one.state == PROBLEM] == []
    assert of(findings, "port").text == f"{place.address} is answered by this coordinator"
    assert of(findings, "database").text == "1 site, 0 studies"
    assert of(findings, "service").text == "runs"


def test_the_command_prints_cause_and_fix_and_exits_78(made: State, tmp_path: Path) -> None:
    give = ["doctor", "--state", str(made.root)]
    done = CliRunner().invoke(app, give)
    assert done.exit_code == 0, done.output
    assert (
        "warning  service: does not run: no site is served\n         fix: `coordinator serve`, as a serv" in done.output
    )
    with socket.create_server(("127.0.0.1", int(made.config().address.rpartition(":")[2]))):
        done = CliRunner().invoke(app, give)
        assert done.exit_code == 78
        assert f"problem  port: another program listens at {made.config().address}\n" in done.output
        found = json.loads(CliRunner().invoke(app, [*give, "--json"]).output)["findings"]
    assert [one["about"] for one in found if one["state"] == PROBLEM] == ["port"]


def test_a_state_that_is_damaged_or_open_to_others(tmp_path: Path) -> None:
    state = State(tmp_path / "state")
    places.create(state, "north", "127.0.0.1:1", time.time())
    state.receipt_key_file.chmod(0o644)
    found = of(list(examine(state, answers())), "keys")
    assert (found.state, "`chmod 600 " in found.fix) == (PROBLEM, True)
    state.config_file.write_text("federation = 1\n")
    assert of(list(examine(state, answers())), "state").state == PROBLEM


def test_a_service_that_holds_its_place_and_does_not_answer(made: State) -> None:
    with StateLock(made.root, "coordinator serve"):
        found = of(list(examine(made, answers())), "service")
    assert (found.state, "is in use by coordinator serve (process" in found.text) == (PROBLEM, True)


def test_a_database_that_cannot_be_asked(made: State) -> None:
    def older() -> SiteList:
        raise NeedsPerson("coordinator.db has schema 0001, this program needs 0004", hint="`coordinator upgrade`")

    found = of(list(examine(made, Answers(older, answers().studies, answers().authority))), "database")
    assert (found.state, found.fix) == (PROBLEM, "`coordinator upgrade`")


def test_an_authority_that_ends(made: State) -> None:
    authority = Authority(made.authority, "north")
    end = authority.certificate.not_valid_after_utc
    assert doctor.signing(authority, NOW).state == OK
    assert doctor.signing(authority, end - doctor.RENEW / 2).state == WARNING
    found = doctor.signing(authority, end)
    assert (found.state, "coordinator authority request" in found.fix) == (PROBLEM, True)


@pytest.mark.parametrize(
    ("number", "state", "said"),
    [
        pytest.param(errno.EADDRINUSE, PROBLEM, "another program listens at", id="taken"),
        pytest.param(errno.EACCES, PROBLEM, "the port is below 1024", id="low"),
        pytest.param(errno.EADDRNOTAVAIL, WARNING, "is no address of this machine", id="elsewhere"),
    ],
)
def test_a_port_that_cannot_be_had(number: int, state: str, said: str) -> None:
    found = doctor._not_bound("10.0.0.1:443", OSError(number, os.strerror(number)))
    assert (found.state, said in found.text, bool(found.fix)) == (state, True, True)


def test_a_name_that_nobody_knows() -> None:
    assert doctor.port("nowhere.invalid:1").about == "name"


def test_somebody_else_answers_at_the_address(place: Place, made: State) -> None:
    others = Authority(made.authority, "north").pem
    found = doctor.reached(place.address, others)
    assert (found.about, found.state, "is not this coordinator" in found.text) == ("tls", PROBLEM, True)
    assert doctor.reached(f"127.0.0.1:{free_port()}", others).state == WARNING
    assert doctor.reached("nowhere.invalid:1", others).about == "name"


def test_too_few_open_files() -> None:
    assert doctor.open_files(1024, 20).state == OK
    found = doctor.open_files(256, 20)
    assert (found.state, "LimitNOFILE=" in found.fix) == (PROBLEM, True)


def row(state: str = "enrolled", **more: str) -> SiteRow:
    return SiteRow(site="alpha", state=state, **more)


@pytest.mark.parametrize(
    ("site", "state", "said"),
    [
        pytest.param(row(certificate_fork_since="2026-01-01"), PROBLEM, "two machines hold its keys", id="fork"),
        pytest.param(row("ready", copied_since="2026-01-01T00:00:00Z"), WARNING, "two programs run with", id="copy"),
        pytest.param(
            row(certificate_expires="2026-11-01T00:00:00Z", last_seen="2026-10-20T00:00:00Z"), WARNING,
            "its certificate ended on 2026-11-01", id="ended",
        ),
        pytest.param(
            row(certificate_expires="2026-12-01T00:00:00Z", last_seen="2026-11-10T00:00:00Z"), WARNING,
            "was not connected since 2026-11-10 00:00 UTC", id="away",
        ),
        pytest.param(row(certificate_expires="2026-12-01T00:00:00Z"), WARNING, "was not connected yet", id="never"),
    ],
)  # fmt: skip
def test_a_site_with_which_something_is(site: SiteRow, state: str, said: str) -> None:
    found = next(doctor.sites([site], NOW))
    assert (found.about, found.state, said in found.text, bool(found.fix)) == ("site alpha", state, True, True)


def test_sites_that_are_well_are_not_listed() -> None:
    fresh = row(certificate_expires="2026-12-01T00:00:00Z", last_seen="2026-11-22T00:00:00Z")
    assert list(doctor.sites([fresh, row("ready"), row("revoked"), row("invited")], NOW)) == []


def test_studies_that_do_not_go_on(made: State) -> None:
    studies = tuple(
        StudyRow(id=state, revision=1, state=state, round=2, rounds=3, archived=False)
        for state in ("paused", "waiting", "running")
    )
    findings = list(examine(made, answers(studies=studies, behind=("bravo",))))
    assert of(findings, "study paused").text == "paused after round 2 of 3"
    assert of(findings, "study waiting").state == WARNING
    assert not [one for one in findings if one.about == "study running"]
    assert "sites that have not renewed since the newest root came: bravo" in of(findings, "authority").text
