"""The dashboard against a coordinator in this process: what its pages say, and that they are live."""

import datetime
import os
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coordinator import reading
from coordinator.answers import Changed, SiteList, SiteRow, StudyRow
from coordinator.cli import dashboard as commands
from coordinator.dashboard import pages
from coordinator.dashboard.application import application
from coordinator.dashboard.source import ANSWER_S, Source
from coordinator.journal_records import WaitingList
from coordinator.study_answers import StudyStatus
from tests.browser import CHEAP, ORIGIN, PASSWORD, Browser
from tests.coordinator.conftest import WAIT_S, Place
from tools.world import Service, wait_until
from wardround.errors import NotPermitted, Unavailable, UsageProblem
from wardround.local import control
from wardround.local.sockets import listen
from wardround.web import serving
from wardround.web.guard import Guard
from wardround.web.live import Live
from wardround.web.passwords import Users

NOTHING_WAITS = WaitingList(waiting=(), needed_for=(), config=(), lapse_s=86400)


class Dashboard:
    """The dashboard of a coordinator of this process, watching it."""

    def __init__(self, place: Place, folder: Path) -> None:
        self.users = Users(folder / "users.json", CHEAP)
        self.users.put("dana", PASSWORD, "look")
        self.live = Live()
        self.source = Source(place.state.read, self.live)
        self.app = Guard(application("north", self.source, self.users, self.live).app, {ORIGIN})
        self.source.watch()

    def browser(self) -> Browser:
        browser = Browser(self.app)
        assert browser.log_in() == (303, "/")
        return browser

    def until_told(self, version: int) -> None:
        wait_until(lambda: self.live.version > version, "the pages are told of a change", WAIT_S)


@pytest.fixture
def dashboard(place: Place, tmp_path: Path) -> Iterator[Dashboard]:
    dashboard = Dashboard(place, tmp_path)
    yield dashboard
    dashboard.source.end()


def test_studies_sites_and_rounds_are_shown_as_they_are(place: Place, dashboard: Dashboard) -> None:
    browser = dashboard.browser()
    assert "No study yet." in browser.get("/")
    before = dashboard.live.version
    place.begin(quorum=2)
    dashboard.until_told(before)
    wait_until(lambda: "1 study, 1 running" in browser.get("/"), "the study is shown", WAIT_S)
    page = browser.get("/")
    assert '<a href="/studies/trial">trial</a>' in page
    assert "training: alpha, bravo, charlie" in page
    assert "3 of 3 are connected" in page
    shown = browser.get("/studies/trial")
    assert "Running: round 1 of 2." in shown
    sites = browser.get("/sites")
    assert all(site in sites for site in ("alpha", "bravo", "charlie"))
    assert "each is renewed in time" in sites
    assert "404" not in browser.get("/studies/none", 404)
    assert "There is no study <code>none</code> here." in browser.get("/studies/none", 404)


def test_a_page_is_told_of_a_site_that_comes_and_of_a_service_that_goes(place: Place, dashboard: Dashboard) -> None:
    browser = dashboard.browser()
    wait_until(lambda: "No site has joined yet" in browser.get("/sites"), "the empty list is shown", WAIT_S)
    version = dashboard.live.version
    place.join("alpha")
    dashboard.until_told(version)
    wait_until(lambda: "1 of 1 site connected" in browser.get("/sites"), "the site is shown", WAIT_S)
    version = dashboard.live.version
    place.coordinator.stop()
    dashboard.until_told(version)
    assert "No service listens at" in browser.get("/", 503)
    assert browser.client.get("/readyz").status_code == 503
    assert browser.client.get("/healthz").status_code == 200
    place.serve()
    assert browser.client.get("/readyz").status_code == 200


def test_the_service_is_asked_once_for_each_change(place: Place, dashboard: Dashboard) -> None:
    place.create()
    dashboard.source.end()
    asked: list[object] = []
    ask = dashboard.source._asked
    dashboard.source._asked = lambda request: asked.append(request) or ask(request)  # type: ignore[method-assign,func-returns-value]
    browser = dashboard.browser()
    wait_until(lambda: control.is_listening(place.state.read), "it listens", WAIT_S)
    version, pages_seen = dashboard.live.version, [browser.get("/") for _ in range(5)]
    assert dashboard.live.version == version
    assert len(pages_seen) == 5
    assert len(asked) == 4  # studies, the study's status, sites, what waits for a second person


def test_a_dashboard_of_a_user_of_its_own_may_not_look_into_the_state_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container the default place exists, and is another user's: no command was taken there."""
    state, apart, access = tmp_path / "state", tmp_path / "apart", os.access
    state.mkdir()
    apart.mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != state and access(path, mode))
    monkeypatch.setenv("WARDROUND_STATE", str(state))
    Users(apart / "users.json", CHEAP).put("dana", PASSWORD, "look")
    done = CliRunner().invoke(commands.app, ["user", "list", "--users", str(apart)])
    assert (done.exit_code, done.output) == (0, "dana\n")


def test_a_provider_needs_to_know_where_the_dashboard_is(tmp_path: Path) -> None:
    file = tmp_path / "oidc.toml"
    file.write_text('issuer = "https://login.example"\nclient_id = "us"\n[look]\ngroups = ["operators"]\n')
    nowhere = serving.place("127.0.0.1:0", origin="", certificate=None, key=None, only_loopback=True)
    with pytest.raises(UsageProblem) as refused:
        commands._provider(file, nowhere)
    assert refused.value.message == (
        "with --oidc the dashboard must know its own address, to which the provider sends people back"
    )
    assert refused.value.hint == "--origin https://NAME, as people type it"
    there = serving.place("127.0.0.1:0", origin="https://fed.example", certificate=None, key=None, only_loopback=True)
    provider = commands._provider(file, there)
    assert (provider.name, provider._redirect) == ("login.example", "https://fed.example/login/provider/back")


def test_readers_may_ask_and_change_nothing(place: Place) -> None:
    place.create()
    assert control.call(place.state.read, {"command": "studies", "archived": False})["studies"][0]["id"] == "trial"
    for request in ({"command": "start", "study": "trial"}, {"command": "revoke", "site": "alpha"}):
        with pytest.raises(NotPermitted) as refused:
            control.call(place.state.read, request)
        assert refused.value.message.startswith(f"a reader asked for `{request['command']}`")
    assert place.status()["state"] == "created"


def test_whoever_watches_all_hears_of_studies_and_of_sites(place: Place) -> None:
    told: list[object] = []
    heard = threading.Event()

    def hear(item: object) -> None:
        told.append(item)
        heard.set()

    def watch() -> None:
        with pytest.raises(Unavailable):  # when the coordinator goes down
            control.call(place.state.read, {"command": "watch"}, hear, timeout_s=WAIT_S)

    threading.Thread(target=watch, daemon=True).start()
    assert heard.wait(WAIT_S)
    for change in (place.create, lambda: place.join("alpha")):
        heard.clear()
        change()
        assert heard.wait(WAIT_S)
    assert [item["times"] for item in told] == list(range(len(told)))  # type: ignore[index]


def test_a_reader_that_went_away_is_noticed_without_a_change(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "AGAIN_S", 0.01)
    monkeypatch.setattr(reading, "REST_S", 0.0)
    told: list[object] = []

    class Gone(Exception):
        pass

    def hear(item: object) -> None:
        told.append(item)
        if len(told) == 3:
            raise Gone

    with pytest.raises(Gone):
        reading.watch(place.coordinator.engine, hear)
    assert told == [Changed(times=0)] * 3


def test_another_user_may_read_where_the_operator_says_so(tmp_path: Path) -> None:
    alone, other = reading.Readers(tmp_path), reading.Readers(tmp_path, 3_999_999_999)
    assert (alone.mode, alone.users) == (0o600, {os.geteuid(), 0})
    assert (other.mode, other.users) == (0o666, {os.geteuid(), 0, 3_999_999_999})


def status(**changes: object) -> StudyStatus:
    site = {"state": "training", "code": "", "ready": True, "rounds_contributed": [], "rounds_left_out": []}
    document = {
        "id": "trial", "title": "", "state": "running", "why": "", "round": 3, "rounds": 9, "attempt": 2,
        "closing": False, "revision": 1, "study_digest": "a", "model_digest": "b", "best": None, "incomplete": [],
        "deadline": "2026-01-31T10:15:59Z", "sites": {"alpha": {**site, "rounds_capped": []}}, **changes,
    }  # fmt: skip
    return StudyStatus.from_document(document)


def row(**changes: object) -> StudyRow:
    document = {"id": "trial", "revision": 1, "state": "running", "round": 3, "rounds": 9, "archived": False}
    return StudyRow.from_document({**document, **changes})


def test_what_needs_a_person_stands_first() -> None:
    sites = SiteList(sites=(SiteRow(site="alpha", state="enrolled"),), receipt_key="k")
    paused = status(state="paused", why="the quorum was missed")
    answer, grid = pages.studies_page([row(state="paused")], {"trial": paused}, sites, NOTHING_WAITS).blocks
    assert (answer.tone, answer.text) == ("bad", "1 study, 0 running; paused: trial.")  # type: ignore[union-attr]
    assert answer.detail == "trial: the quorum was missed"  # type: ignore[union-attr]
    assert [claim.text for claim in answer.claims] == [  # type: ignore[union-attr]
        "0 of 1 are connected", "no site is late, or expects to be", "none lacks a site in any round",
    ]  # fmt: skip
    assert grid.rows == (  # type: ignore[union-attr]
        ("trial", "paused", "3 of 9, attempt 2", "1 of 1", "", "2026-01-31 10:15 UTC"),
    )


def test_a_key_at_two_machines_and_a_certificate_that_ends_are_named() -> None:
    now = datetime.datetime(2026, 1, 31, 12, tzinfo=datetime.UTC)
    listed = SiteList(
        sites=(
            SiteRow(site="alpha", state="connected", certificate_expires="2026-02-01T12:00:00Z"),
            SiteRow(site="bravo", state="ready", certificate_expires="2026-02-06T12:00:00Z", copied_since="2026-01-30"),
            SiteRow(site="charlie", state="invited"),
        ),
        receipt_key="k",
    )
    answer = pages.sites_page(listed, now).blocks[0]
    assert (answer.tone, answer.text) == ("bad", "2 of 2 sites connected.")  # type: ignore[union-attr]
    assert [claim.text for claim in answer.claims] == [  # type: ignore[union-attr]
        "two machines hold the keys of bravo", "end within 36 hours: alpha"
    ]  # fmt: skip


def test_it_ends_while_a_page_waits_for_a_service_that_does_not_answer(tmp_path: Path) -> None:
    given = ("dashboard", "serve", "--users", tmp_path, "--read-socket", tmp_path / "read.sock")
    with listen(tmp_path / "read.sock") as silent:
        dashboard = Service(tmp_path / "log", "coordinator", *given, "--listen", "127.0.0.1:0")
        url = dashboard.wait_line("ready").partition(" ")[2]

        def ask() -> None:
            with suppress(OSError):
                urllib.request.urlopen(f"{url}/readyz", timeout=ANSWER_S).close()

        threading.Thread(target=ask, daemon=True).start()
        held = [silent.accept()[0] for _ in ("its watch of changes", "the page's own question")]
        assert dashboard.stop(ANSWER_S / 2) == 0
        for connection in held:
            connection.close()
    assert "ended while a page waits for an answer that does not come" in dashboard.tail()


def test_where_nobody_can_log_in_it_says_what_to_type(tmp_path: Path) -> None:
    """It was `ready`, and each log-in failed with `not known here`."""
    told = "Nobody can log in yet. This lets somebody, and counts at once: `coordinator dashboard user add NAME`"
    given = ("dashboard", "serve", "--users", tmp_path, "--read-socket", tmp_path / "read.sock")
    with listen(tmp_path / "read.sock"):
        dashboard = Service(tmp_path / "log", "coordinator", *given, "--listen", "127.0.0.1:0")
        url = dashboard.wait_line("ready").partition(" ")[2]
        wait_until(lambda: told in dashboard.tail(), "it says so", WAIT_S)
        Users(tmp_path / "users.json", CHEAP).put("dana", PASSWORD, "look")
        with urllib.request.urlopen(f"{url}/login", timeout=WAIT_S) as page:
            assert "Nobody can log in" not in page.read().decode()
        dashboard.stop(WAIT_S)
        (tmp_path / "log").unlink()
        dashboard = Service(tmp_path / "log", "coordinator", *given, "--listen", "127.0.0.1:0")
        dashboard.wait_line("ready")
        dashboard.stop(WAIT_S)
    assert "Nobody can log in" not in (tmp_path / "log").read_text()
