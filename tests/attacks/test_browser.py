"""Who would gain by the pages: another page in the same browser, a name with markup, and whoever finds the port."""

import datetime
import re
from pathlib import Path

import pytest

from coordinator.answers import SiteList, SiteRow, StudyFits, StudyReport
from coordinator.dashboard import pages
from site_agent.audit.left import Left, Update
from site_agent.gateway.consent.rows import StudyRow
from site_agent.gateway.requests import ServiceStatus
from site_agent.page.pages import home_page, left_page
from site_agent.page.source import Here
from site_agent.state.site import Site
from tests.browser import CHEAP, ORIGIN, PASSWORD, Browser
from tests.coordinator.conftest import study_document
from tests.coordinator.test_page import EVIL, report
from wardround.pages import rendering
from wardround.pages.blocks import Form, Page
from wardround.web.application import Application, Moved, View, Visit
from wardround.web.guard import Guard
from wardround.web.live import Live
from wardround.web.passwords import Users
from wardround.web.sessions import MOST_OF_A_NAME

GUARD = "proto/wardround/web/guard.py"
APPLICATION = "proto/wardround/web/application.py"


class Pages:
    """Pages of which one does something; ``done`` has what."""

    def __init__(self, folder: Path) -> None:
        self.users = Users(folder / "users.json", CHEAP)
        self.users.put("dana", PASSWORD, "decide")
        self.done: list[str] = []
        views = (
            View("/", lambda visit: Page("Home", "Test", (Form("/act", "Act"),))),
            View("/act", self._act, method="POST", decides=True),
        )
        application = Application("Test", "test", (("Home", "/"),), views, self.users, Live())
        self.app = Guard(application.app, {ORIGIN})

    def _act(self, visit: Visit) -> Moved:
        self.done.append(visit.user.name)
        return Moved("/", "done")

    def browser(self) -> Browser:
        browser = Browser(self.app)
        assert browser.log_in() == (303, "/")
        return browser


@pytest.fixture
def served(tmp_path: Path) -> Pages:
    return Pages(tmp_path)


@pytest.mark.attack(promise="P6", refused_by=GUARD)
def test_form_of_another_page(served: Pages) -> None:
    """A page elsewhere sends our form from the browser of somebody who is logged in, with and without an origin."""
    browser = served.browser()
    csrf = browser.fields(browser.get("/"), "/act")["csrf"]
    for origin in ("https://evil.example", "null", "http://127.0.0.1:9999", "http://127.0.0.1:8080.evil.example"):
        answer = browser.client.post("/act", data={"csrf": csrf}, headers={"Origin": origin})
        assert answer.status_code == 403
    assert browser.client.post("/act", data={"csrf": csrf}).status_code == 403
    form = {"Origin": ORIGIN, "Content-Type": "text/plain"}
    assert browser.client.post("/act", content=f"csrf={csrf}", headers=form).status_code == 415
    assert served.done == []
    assert browser.press(browser.get("/"), "/act") == (303, "/")
    assert served.done == ["dana"]


@pytest.mark.attack(promise="P6", refused_by=APPLICATION)
def test_form_with_the_token_of_another_session(served: Pages) -> None:
    """Somebody who may log in gives another person's browser a form with a token of their own session, or with none."""
    mine, other = served.browser(), served.browser()
    token = mine.fields(mine.get("/"), "/act")["csrf"]
    for fields in ({"csrf": token}, {"csrf": ""}, {"another": "field"}):
        status, said = other.post("/act", **fields)
        assert (status, "This form was not made for this session." in said) == (403, True)
    assert served.done == []


@pytest.mark.attack(promise="P6", refused_by=APPLICATION)
def test_session_after_log_out(served: Pages) -> None:
    """A cookie that was copied is used after its owner logged out, was removed, or has another password."""
    for ends in ("log out", "another password", "removed"):
        browser = served.browser()
        cookies = dict(browser.client.cookies)
        csrf = browser.fields(browser.get("/"), "/act")["csrf"]
        if ends == "log out":
            assert browser.press(browser.get("/"), "/logout") == (303, "/login")
        elif ends == "another password":
            served.users.put("dana", PASSWORD, "look")
            served.users.put("dana", PASSWORD, "decide")
        else:
            served.users.remove("dana")
        thief = Browser(served.app)
        thief.client.cookies.update(cookies)
        assert thief.post("/act", csrf=csrf) == (303, "/login")
        assert thief.client.get("/").headers["location"] == "/login"
        assert thief.client.get("/events").status_code == 401
    assert served.done == []


@pytest.mark.attack(promise="P6", refused_by=APPLICATION)
def test_session_chosen_beforehand(served: Pages) -> None:
    """A browser is given a cookie before its person logs in, so that whoever chose it knows the session."""
    browser = Browser(served.app)
    browser.client.cookies.set("test", "chosen", domain="127.0.0.1", path="/")
    browser.log_in()
    tokens = [cookie.value for cookie in browser.client.cookies.jar if cookie.value != "chosen"]
    assert len(tokens) == 1
    thief = Browser(served.app)
    thief.client.cookies.set("test", "chosen")
    assert thief.client.get("/").headers["location"] == "/login"


@pytest.mark.attack(promise="P6", refused_by=GUARD)
def test_other_host_header(served: Pages) -> None:
    """A name of the attacker's is turned to our address (DNS rebinding), so that a page of that name may read ours."""
    browser = served.browser()
    for host in ("evil.example", "evil.example:8080", "127.0.0.1:8080.evil.example", "127.0.0.1", "127.0.0.1:80", ""):
        assert browser.client.get("/", headers={"Host": host}).status_code == 421
    for path in ("/healthz", "/readyz"):  # of which a machine learns nothing
        assert browser.client.get(path, headers={"Host": "10.0.0.1"}).text in ("ok\n", "ready\n")


@pytest.mark.attack(promise="P6", refused_by=APPLICATION)
def test_guessed_passwords(served: Pages) -> None:
    """Passwords are tried one after the other, also the right one at last."""
    browser = Browser(served.app)
    for number in range(MOST_OF_A_NAME):
        assert browser.log_in(password=f"guess number {number}")[0] == 403
    status, said = browser.log_in()
    assert status == 429
    assert re.search(r"Too many log-ins failed. Try again in \d+ seconds.", said)
    assert browser.client.get("/").headers["location"] == "/login"


@pytest.mark.attack(promise="P1", refused_by=APPLICATION)
def test_path_out_of_the_pages(served: Pages) -> None:
    """A path leads out of the folder of what is served, written in each way that a server might undo."""
    browser = served.browser()
    for path in (
        "/static/../passwords.py", "/static/..%2fpasswords.py", "/static/%2e%2e/%2e%2e/passwords.py",
        "/static//etc/passwd", "/static/style.css%00.py", "/static/web.html", "/../../etc/passwd", "/static/",
    ):  # fmt: skip
        answer = browser.client.get(path)
        assert answer.status_code in (303, 404), path
        assert "root:" not in answer.text
        assert "scrypt" not in answer.text


@pytest.mark.attack(promise="P11", refused_by=GUARD)
def test_endless_form(served: Pages) -> None:
    """A form that is longer than it says, or does not say how long it is."""
    browser = served.browser()
    form = {"Origin": ORIGIN, "Content-Type": "application/x-www-form-urlencoded"}
    assert browser.client.post("/login", content=b"a" * 100_000, headers=form).status_code == 413
    pieces = (b"a" * 10_000 for _ in range(100))
    assert browser.client.post("/login", content=pieces, headers=form).status_code == 413


def shown(page: Page) -> str:
    around = rendering.Around("Test", (("Home", "/"),), "/", "dana", "token", EVIL, 1)
    return rendering.served(page, around)


@pytest.mark.attack(promise="P11", refused_by="proto/wardround/pages/rendering.py")
def test_markup_in_names_on_the_pages() -> None:
    """A study, a site, a code, a user or an answer has markup, a template or a control character for a name."""
    study = report(
        id=EVIL, title=EVIL, sites={EVIL: report().sites["alpha"].document()}, why=EVIL, study=study_document()
    )
    fits = {"id": EVIL, "revision": 1, "counts": EVIL, "sites": {EVIL: {"fits": True, "rows": 1, "said": EVIL}}}
    sites = SiteList(sites=(SiteRow(site=EVIL, state=EVIL, ledger_key=EVIL),), receipt_key=EVIL)
    left = Left(updates={EVIL: Update("2026-01-31T00:00:00Z", EVIL, 1, 1, False, 1, 1, 1, 1, EVIL)})
    row = StudyRow(EVIL, EVIL, "held", 1, 2, 1, EVIL, EVIL, EVIL, (EVIL,))
    here = Here(
        Site(EVIL, EVIL, "127.0.0.1:1", "", "", 0), ServiceStatus(True, 0, EVIL, EVIL), (row,), True, left
    )  # fmt: skip
    for made in (
        pages.study_page(StudyReport.from_document(study.document()), StudyFits.from_document(fits)),
        pages.sites_page(sites, datetime.datetime.now(datetime.UTC)),
        home_page(here, "2026-01-31"),
        left_page(left, "2026-01-31", "2026-01-31"),
    ):
        text = shown(made)
        assert "<script>alert" not in text
        assert str(7777 * 7) not in text
        assert "\x1b" not in text
        assert "\u202e" not in text
        assert text.count("<script") == 1  # ours, by its address
