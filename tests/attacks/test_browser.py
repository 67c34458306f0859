"""Who would gain by the pages: another page in the same browser, a name with markup, and whoever finds the port."""

import asyncio
import datetime
import logging
import os
import re
import socket
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
import uvicorn
from starlette.testclient import TestClient
from starlette.types import Message

from coordinator.answers import SiteList, SiteRow
from coordinator.dashboard import pages
from coordinator.study_answers import StudyFits, StudyReport
from site_agent.audit.left import Left, Update
from site_agent.gateway.consent.rows import StudyRow
from site_agent.gateway.policy_requests import Proposed
from site_agent.gateway.requests import Waiting
from site_agent.gateway.service_requests import ServiceStatus
from site_agent.page.pages import home_page, left_page, policy_page, waiting_page
from site_agent.page.source import Here
from site_agent.state.site import Site
from tests.browser import CHEAP, ORIGIN, PASSWORD, Browser
from tests.coordinator.conftest import study_document
from tests.coordinator.test_page import EVIL, report
from tools.world import free_port
from wardround.errors import Unavailable
from wardround.local.logs import log_to_stderr
from wardround.local.rate_limit import BURST
from wardround.pages import rendering
from wardround.pages.blocks import Form, Page
from wardround.records.ledger.entries import TensorRow
from wardround.web import application, metrics_server
from wardround.web.application import Application, Moved, View, Visit
from wardround.web.guard import Guard
from wardround.web.live import Live
from wardround.web.monitoring import monitored
from wardround.web.passwords import Users
from wardround.web.peer import owner
from wardround.web.serving import prompt
from wardround.web.sessions import MOST_IN_ALL, MOST_OF_A_NAME

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
            View("/rounds/{round:int}", lambda visit: Page("Round", "Test", ())),
        )
        application = Application("Test", "test", (("Home", "/"),), views, self.users, Live(), add_user="add NAME")
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


def log_ins(app: Guard, names: list[str]) -> list[int]:
    """As many log-ins at once; the password is right each time. Their answers' numbers."""

    async def all_of_them() -> list[int]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=ORIGIN) as client:
            forms = [{"name": name, "password": PASSWORD} for name in names]
            sent = [client.post("/login", data=form, headers={"Origin": ORIGIN}) for form in forms]
            return [answer.status_code for answer in await asyncio.gather(*sent)]

    return asyncio.run(all_of_them())


@pytest.mark.attack(promise="P6", refused_by="proto/wardround/web/sessions.py")
def test_guessed_passwords__all_at_once(served: Pages, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many guesses are sent before the first of them is found to be wrong: each was tried."""
    tried: list[str] = []
    monkeypatch.setattr(Users, "logged_in", lambda self, name, password: tried.append(name))
    assert log_ins(served.app, ["dana"] * 3 * MOST_OF_A_NAME).count(429) == 2 * MOST_OF_A_NAME
    assert len(tried) == MOST_OF_A_NAME


class Uids:
    """Who is behind each connection: ``now`` is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now: int | None = 1000
        monkeypatch.setattr("wardround.web.application.owner", lambda client, server: self.now)


@pytest.mark.attack(promise="P6", refused_by=APPLICATION)
def test_cookie_that_went_to_another_port(served: Pages, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user of this machine serves a page at another port of the loopback. A browser sends it our cookie, for a
    cookie is for a host and all its ports; whoever has it approved studies in the name of who logged in."""
    behind = Uids(monkeypatch)
    browser = served.browser()
    csrf = browser.fields(browser.get("/"), "/act")["csrf"]
    thief = Browser(served.app)
    thief.client.cookies.update(dict(browser.client.cookies))
    for other in (1001, None):  # None: the thief's connection is closed already, and nobody knows whose it was
        behind.now = other
        assert thief.client.get("/").headers["location"] == "/login"
        assert thief.client.get("/events").status_code == 401
        assert thief.post("/act", csrf=csrf) == (303, "/login")
    behind.now = 1000
    assert browser.press(browser.get("/"), "/act") == (303, "/")
    assert served.done == ["dana"]


@pytest.mark.attack(promise="P6", refused_by="proto/wardround/web/peer.py")
def test_cookie_that_went_to_another_port__whose_is_a_connection() -> None:
    """The kernel says whose the other end of a connection on this machine is, and of no other one."""
    for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        with socket.socket(family) as listener:
            listener.bind((host, 0))
            listener.listen()
            with socket.create_connection(listener.getsockname()[:2]) as client:
                here, there = client.getsockname()[:2], client.getpeername()[:2]
                assert owner(here, there) == os.geteuid()
                assert owner((here[0], here[1] ^ 1), there) is None
            assert owner(here, there) is None  # closed before we look: nobody's, and not root's
    assert owner(("192.0.2.1", 4711), ("192.0.2.2", 80)) is None
    assert owner(None, None) is None


@pytest.mark.attack(promise="P11", refused_by="proto/wardround/web/sessions.py")
def test_everybody_locked_out(served: Pages, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user of this machine fails to log in as often as it takes until nobody may try any more."""
    behind = Uids(monkeypatch)
    behind.now = 1001
    assert log_ins(served.app, [f"name{number // 4}" for number in range(MOST_IN_ALL + 1)]).count(429) == 1
    assert Browser(served.app).log_in()[0] == 429
    behind.now = 1000
    assert Browser(served.app).log_in() == (303, "/")


async def listening(app: Guard) -> tuple[asyncio.Server, uvicorn.server.ServerState]:
    """Our HTTP at a free port of the loopback, and its requests under way."""
    config = uvicorn.Config(app, http=prompt(), ws="none", lifespan="off", log_config=None)
    config.load()
    state = uvicorn.server.ServerState()
    loop = asyncio.get_running_loop()
    return await loop.create_server(lambda: config.http_protocol_class(config, state, {}), "127.0.0.1", 0), state


@pytest.mark.attack(promise="P11", refused_by="proto/wardround/web/serving.py")
def test_hung_requests(served: Pages, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many connections as are taken say nothing, or stop in the middle: nobody else came in, for as long as that."""
    monkeypatch.setattr("wardround.web.serving.HEAD_S", 0.05)

    async def hung(*said: bytes) -> bytes:
        server, _ = await listening(served.app)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        for piece in said:
            writer.write(piece)
            await writer.drain()
        async with asyncio.timeout(10), server:
            heard = await reader.read()
        writer.close()
        return heard

    healthy = b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n"
    for said in ((), (b"GET /",), (healthy, b"GET /heal")):
        heard = asyncio.run(hung(*said))
        assert heard.count(b"HTTP/1.1 200 OK") == said.count(healthy)


@pytest.mark.attack(promise="P11", refused_by=GUARD)
@pytest.mark.parametrize("then", [(), ({"type": "http.disconnect"},)], ids=["silence", "gone"])
def test_hung_requests__in_the_middle_of_a_form(
    served: Pages, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, then: tuple[Message, ...]
) -> None:
    """A form of a hundred bytes is announced, and one byte comes. Each left fifty lines of a traceback in the log."""
    monkeypatch.setattr("wardround.web.guard.BODY_S", 0.05)
    headers = [(b"host", ORIGIN.partition("://")[2].encode()), (b"origin", ORIGIN.encode())]
    headers += [(b"content-type", b"application/x-www-form-urlencoded"), (b"content-length", b"100")]
    scope = {"type": "http", "method": "POST", "path": "/login", "headers": headers, "query_string": b""}
    sent: list[Message] = []

    async def run() -> None:
        came = asyncio.Queue[Message]()
        for message in ({"type": "http.request", "body": b"n", "more_body": True}, *then):
            await came.put(message)

        async def send(message: Message) -> None:
            sent.append(message)

        async with asyncio.timeout(10):
            await served.app(scope, came.get, send)

    asyncio.run(run())
    assert sent[0]["status"] == 408
    assert not caplog.records


@pytest.mark.attack(promise="P11", refused_by=GUARD)
def test_log_without_end(served: Pages, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever finds the port fills the disk with our log, by requests that are none and numbers that are too large."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    log_to_stderr()
    browser = TestClient(served.app, base_url=ORIGIN, raise_server_exceptions=False)
    for number in range(2 * BURST):
        assert number > BURST // 4 or browser.get("/rounds/" + "9" * 5000).status_code == 414
        logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.")
    lines = [line for line in capsys.readouterr().err.splitlines() if " INFO " not in line]
    assert len(lines) <= BURST


@pytest.mark.attack(promise="P11", refused_by=APPLICATION)
def test_log_without_end__by_forms_of_many_fields(
    served: Pages, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A form of more fields than any was a fault in the page, with 30 lines of a traceback in the log each time; and so
    may be something else that nobody has found yet."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    log_to_stderr()
    browser = TestClient(served.app, base_url=ORIGIN, raise_server_exceptions=False)
    form = {"Origin": ORIGIN, "Content-Type": "application/x-www-form-urlencoded"}
    for path in ("/login", "/logout"):
        answer = browser.post(path, content="&".join(f"name{number}=" for number in range(101)), headers=form)
        assert (answer.status_code, answer.text) == (413, "a form of more than 100 fields\n")
    assert not [line for line in capsys.readouterr().err.splitlines() if " INFO " not in line]
    for _ in range(3 * BURST):
        asyncio.run(application._failed(cast(Any, None), ValueError("a fault")))
    assert capsys.readouterr().err.count("a page failed") < 2 * BURST


@pytest.mark.attack(promise="P11", refused_by="proto/wardround/web/metrics_server.py")
def test_hung_requests__for_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight connections say a byte now and then, and never what they want: nobody else was told of metrics or health,
    and whoever restarts a coordinator that does not say that it is healthy restarted it."""
    monkeypatch.setattr(metrics_server, "REQUEST_S", 0.5)
    at = f"127.0.0.1:{free_port()}"
    host, _, port = at.partition(":")
    with monitored(at, lambda: (), lambda: True), ExitStack() as open_:
        hung = [open_.enter_context(socket.create_connection((host, int(port)))) for _ in range(metrics_server.MOST)]
        for piece in (b"GET /healthz HTTP/1.1\r\n", *[b"a"] * 8):
            for connection in hung:
                with suppress(BrokenPipeError, ConnectionResetError):
                    connection.sendall(piece)
            time.sleep(0.1)
        asked = open_.enter_context(socket.create_connection((host, int(port)), timeout=20))
        asked.sendall(f"GET /healthz HTTP/1.1\r\nHost: {at}\r\n\r\n".encode())
        assert asked.recv(64).startswith(b"HTTP/1.0 200 OK")


class StuckProvider:
    """A provider of OpenID Connect that does not answer until it is told, and then not as it should."""

    name = "login.example.org"

    def __init__(self) -> None:
        self.asked = 0
        self.answers = threading.Event()

    def begin(self) -> tuple[str, str]:
        self.asked += 1
        self.answers.wait(60)
        raise Unavailable("the provider cannot be asked: it is down")


@pytest.mark.attack(promise="P11", refused_by="proto/wardround/web/provided.py")
def test_provider_that_does_not_answer(
    served: Pages, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever finds the dashboard's port begins log-ins with a provider that is down: forty of them, without a name,
    held each thread of the pages, so that those who were logged in waited too. Each left a line in the log, at once
    where the provider refuses."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    log_to_stderr()
    provider = StuckProvider()
    application = Application("Test", "test", (), (), served.users, Live(), provider=cast(Any, provider), add_user="")
    transport = httpx.ASGITransport(Guard(application.app, {ORIGIN}))

    async def ask() -> list[int]:
        async with httpx.AsyncClient(transport=transport, base_url=ORIGIN) as client:
            begun = [asyncio.create_task(client.get("/login/provider")) for _ in range(100)]
            while not provider.asked:
                await asyncio.sleep(0)
            try:
                assert (await asyncio.wait_for(client.get("/readyz"), 30)).text == "ready\n"
            finally:
                provider.answers.set()
            again = [(await client.get("/login/provider")).status_code for _ in range(2 * BURST)]
            return [*again, *[one.status_code for one in await asyncio.gather(*begun)]]

    assert set(asyncio.run(ask())) == {503}
    lines = [line for line in capsys.readouterr().err.splitlines() if " INFO " not in line]
    assert len(lines) < 2 * BURST


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


@pytest.mark.attack(promise="P11", refused_by=APPLICATION)
def test_pages_without_end(served: Pages, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody who may only look keeps open as many pages as are told of changes: nobody else's page was."""
    Uids(monkeypatch)
    served.users.put("erin", PASSWORD, "look")
    cookies = {}
    for name in ("erin", "dana"):
        browser = Browser(served.app)
        assert browser.log_in(name) == (303, "/")
        cookies[name] = "; ".join(f"{key}={value}" for key, value in browser.client.cookies.items())

    async def watched() -> list[str]:
        """The status of each page that is opened while all before it stay open; then of one, when those are closed."""
        server, state = await listening(served.app)
        writers: list[asyncio.StreamWriter] = []

        async def status(name: str) -> str:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            writers.append(writer)
            said = ("GET /events HTTP/1.1", "Host: 127.0.0.1:8080", f"Cookie: {cookies[name]}", "", "")
            writer.write("\r\n".join(said).encode())
            return (await reader.readuntil(b"\r\n\r\n")).split()[1].decode()

        async with asyncio.timeout(30), server:
            statuses = [await status(name) for name in ["erin"] * (application.MOST_OF_A_USER + 1) + ["dana"]]
            for writer in writers:
                writer.close()
            while await status("erin") != "200":
                await asyncio.sleep(0.05)
            writers[-1].close()
            await asyncio.gather(*state.tasks)
        return statuses

    assert asyncio.run(watched()) == [*["200"] * application.MOST_OF_A_USER, "503", "200"]


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
    proposed = Proposed(EVIL, EVIL, EVIL, (EVIL,), (EVIL,), 2)
    here = Here(
        Site(EVIL, EVIL, "127.0.0.1:1", "", "", 0), ServiceStatus(True, 0, EVIL, EVIL), (row,), True, left, proposed
    )  # fmt: skip
    tensor = TensorRow(
        bundle=EVIL, name=EVIL, dtype=EVIL, shape=(1,), encoding="raw", bytes=4, sha256="", l2="1", max_abs="1",
        nonfinite=0,
    )  # fmt: skip
    waiting = Waiting(EVIL, 1, 1, EVIL, (tensor,), 4, {EVIL: EVIL}, 1, 1, 2, (EVIL,))
    for made in (
        pages.study_page(StudyReport.from_document(study.document()), StudyFits.from_document(fits)),
        pages.sites_page(sites, datetime.datetime.now(datetime.UTC)),
        home_page(here, "2026-01-31"),
        left_page(left, "2026-01-31", "2026-01-31"),
        waiting_page(waiting, may_decide=True),
        policy_page(proposed, may_decide=True),
    ):
        text = shown(made)
        assert "<script>alert" not in text
        assert str(7777 * 7) not in text
        assert "\x1b" not in text
        assert "\u202e" not in text
        assert text.count("<script") == 1  # ours, by its address
