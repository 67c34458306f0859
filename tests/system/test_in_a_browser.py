"""The pages of both programs in a real Chromium: by the keyboard alone, on a phone, live, and asking no other host.

``WARDROUND_SCREENSHOTS`` names a folder to write the pictures of docs/screenshots into.
"""

import datetime
import ipaddress
import json
import os
import shutil
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from playwright.sync_api import Browser, Page, Request, expect, sync_playwright
from prometheus_client.parser import text_string_to_metric_families

from site_agent.gateway.monitoring import METRICS
from site_agent.gateway.service import RequestDispatcher
from tests.browser import PASSWORD
from tests.coordinator.conftest import Place
from tests.coordinator.fake_site import FakeSite, delta
from tests.site_agent.site_world import STUDY, SiteWorld
from tests.site_agent.test_policy_enforcement import EVERY, held
from tools.world import Service, command, free_port
from wardround.local.control import ControlServer
from wardround.signing.certificates import key_pem

CHROMIUM = os.environ.get("WARDROUND_CHROMIUM", "/usr/bin/chromium")
SITES = ("ashford", "birchwood", "calder", "dunmore")
DESK, PHONE = {"width": 1100, "height": 760}, {"width": 360, "height": 720}
WAIT_MS = 30_000
MOST_TABS = 60

if not Path(CHROMIUM).exists() and not os.environ.get("CI"):
    pytest.skip(f"no Chromium at {CHROMIUM}", allow_module_level=True)
pytestmark = [pytest.mark.chaos, pytest.mark.system]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


class Visitor:
    """Somebody at a browser, who asks ``url`` and nobody else."""

    def __init__(self, chromium: Browser, url: str, viewport: dict[str, int], **options: bool) -> None:
        self.url = url
        self.context = chromium.new_context(viewport=viewport, **options)  # type: ignore[arg-type]
        self.page: Page = self.context.new_page()
        self.page.set_default_timeout(WAIT_MS)
        self.asked: list[str] = []
        self.faults: list[str] = []
        self.page.on("request", self._note)
        self.page.on("console", lambda said: self.faults.append(said.text) if said.type == "error" else None)
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))

    def _note(self, request: Request) -> None:
        self.asked.append(request.url)

    def log_in(self, name: str = "dana") -> None:
        """By the keyboard alone."""
        self.page.goto(self.url)
        self.page.keyboard.press("Tab")
        self.tab_to("Name")
        self.page.keyboard.type(name)
        self.page.keyboard.press("Tab")
        self.page.keyboard.type(PASSWORD)
        self.page.keyboard.press("Enter")
        expect(self.page.get_by_role("button", name="Log out")).to_be_visible()

    def tab_to(self, text: str) -> None:
        """Press Tab until something of that text, or of that label, has the focus; it is seen to have it."""
        script = """() => { const one = document.activeElement;
            return [(one.labels && one.labels.length ? one.labels[0].textContent : one.textContent).trim(),
                    getComputedStyle(one).outlineStyle]; }"""
        for _ in range(MOST_TABS):
            found, outline = self.page.evaluate(script)
            if found == text:
                assert outline != "none", f"{text}: nobody sees that it has the focus"
                return
            self.page.keyboard.press("Tab")
        raise AssertionError(f"no {text!r} within {MOST_TABS} tabs")

    def fits(self) -> None:
        """Nothing of the page is beyond the right edge; a wide table scrolls inside itself."""
        wide = self.page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert wide[0] <= wide[1], wide

    def shot(self, name: str) -> None:
        folder = os.environ.get("WARDROUND_SCREENSHOTS")
        if folder:
            self.page.screenshot(path=str(Path(folder) / name))

    def close(self) -> None:
        self.context.close()
        assert {url.split("/")[2] for url in self.asked} == {self.url.split("/")[2]}
        assert self.faults == []


@contextmanager
def visiting(chromium: Browser, url: str, viewport: dict[str, int], **options: bool) -> Iterator[Visitor]:
    visitor = Visitor(chromium, url, viewport, **options)
    yield visitor
    visitor.close()


@contextmanager
def serving(folder: Path, program: str, page: str, state: Path) -> Iterator[str]:
    """The page's address, as a person begins it."""
    command(program, page, "user", "add", "dana", "--state", state, "--password-file", "-", stdin=f"{PASSWORD}\n")
    service = Service(
        folder / "page.log", program, page, "serve", "--state", state, "--listen", f"127.0.0.1:{free_port()}"
    )
    try:
        yield service.wait_line("ready").removeprefix("ready ")
    finally:
        assert service.stop() == 0


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    yield place
    place.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[SiteWorld]:
    world = SiteWorld(tmp_path)
    yield world
    world.close()


def one_round(sites: list[FakeSite], without: tuple[str, ...] = ()) -> None:
    """Each site does what it is asked; ``without`` some, which decline."""
    for site in sites:
        assignment = site.next_assignment()
        if site.name in without:
            site.decline(assignment, "DECLINED_OFFLINE")
        else:
            loss = 0.62 / (1 + assignment.round / 4) + 0.01 * len(site.name)
            update = delta(site.name, assignment.round, site.specs("trial"))
            site.answer(assignment, type(update)(update.tensors, (("val_loss", f"{loss:.4g}"),), 40, 10))


def test_an_operator_sees_a_study_go_on_without_loading_a_page_again(
    place: Place, chromium: Browser, tmp_path: Path
) -> None:
    with serving(tmp_path, "coordinator", "dashboard", place.state.root) as url:
        with visiting(chromium, url, DESK) as visitor:
            visitor.log_in()
            page = visitor.page
            expect(page.get_by_text("No study yet.")).to_be_visible()
            expect(page.get_by_text("Live: changes are shown at once")).to_be_visible()
            page.evaluate("window.same = true")
            sites = place.begin(sites=list(SITES), rounds=8, quorum=2, title="Readmission within 30 days")
            expect(page.get_by_role("cell", name="1 of 8")).to_be_visible()
            visitor.tab_to("trial")
            page.keyboard.press("Enter")
            expect(page.get_by_text("Running: round 1 of 8.")).to_be_visible()
            page.evaluate("window.same = true")
            for _ in range(5):
                one_round(sites)
            expect(page.get_by_text("Running: round 6 of 8.")).to_be_visible()
            expect(page.locator("svg circle")).to_have_count(5)
            assert page.evaluate("window.same"), "the page was loaded again"
            page.set_viewport_size({"width": 900, "height": 1380})
            visitor.shot("dashboard-study.png")
            page.set_viewport_size(DESK)
            visitor.tab_to("Log out")
            page.keyboard.press("Enter")
            expect(page.get_by_role("heading", name="Log in")).to_be_visible()
            page.go_back()
            expect(page.get_by_role("heading", name="Log in")).to_be_visible()  # nothing is shown from a cache
        with visiting(chromium, url, PHONE, has_touch=True, is_mobile=True) as phone:
            phone.page.goto(url)
            phone.fits()
            phone.log_in()
            phone.fits()
            for path in ("/sites", "/studies/trial"):
                phone.page.goto(url + path)
                phone.fits()
            phone.shot("dashboard-phone.png")


def test_a_page_says_that_its_server_went_away_and_comes_back_by_itself(
    place: Place, chromium: Browser, tmp_path: Path
) -> None:
    with (
        serving(tmp_path, "coordinator", "dashboard", place.state.root) as url,
        visiting(chromium, url, DESK) as visitor,
    ):
        visitor.log_in()
        expect(visitor.page.get_by_text("No study yet.")).to_be_visible()
        place.coordinator.stop()
        expect(visitor.page.get_by_text("No service listens at")).to_be_visible()
        place.serve()
        expect(visitor.page.get_by_text("No study yet.")).to_be_visible()
        visitor.faults = [fault for fault in visitor.faults if "503" not in fault]


def test_with_tls_of_its_own_the_session_travels_by_it_alone(place: Place, chromium: Browser, tmp_path: Path) -> None:
    port, host = free_port(), ipaddress.ip_address("127.0.0.1")
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    certificate = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        .serial_number(1).not_valid_before(now).not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(host)]), critical=False).sign(key, hashes.SHA256())
    )  # fmt: skip
    (tmp_path / "tls.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (tmp_path / "tls.key").write_bytes(key_pem(key))
    url = f"https://127.0.0.1:{port}"
    command(
        "coordinator", "dashboard", "user", "add", "dana", "--state", place.state.root, "--password-file", "-",
        stdin=f"{PASSWORD}\n",
    )  # fmt: skip
    service = Service(
        tmp_path / "page.log", "coordinator", "dashboard", "serve", "--state", place.state.root, "--listen",
        f"0.0.0.0:{port}", "--certificate", tmp_path / "tls.pem", "--key", tmp_path / "tls.key", "--origin", url,
    )  # fmt: skip
    try:
        service.wait_line("ready")
        visitor = Visitor(chromium, url, DESK, ignore_https_errors=True)
        visitor.log_in()
        expect(visitor.page.get_by_text("No study yet.")).to_be_visible()
        (cookie,) = visitor.context.cookies()
        assert cookie["name"].startswith("__Host-")
        assert (cookie["secure"], cookie["httpOnly"], cookie["sameSite"]) == (True, True, "Strict")
        visitor.close()
    finally:
        assert service.stop() == 0


def test_without_scripts_the_pages_say_the_same(place: Place, chromium: Browser, tmp_path: Path) -> None:
    place.create()
    with (
        serving(tmp_path, "coordinator", "dashboard", place.state.root) as url,
        visiting(chromium, url, PHONE, java_script_enabled=False) as visitor,
    ):
        page = visitor.page
        page.goto(url)
        page.get_by_label("Name").fill("dana")
        page.get_by_label("Password").fill(PASSWORD)
        page.get_by_role("button", name="Log in").click()
        page.get_by_role("link", name="trial").click()
        expect(page.get_by_text("Created; it has not been started.")).to_be_visible()
        assert '<meta http-equiv="refresh" content="30">' in page.content()
        assert not [url for url in visitor.asked if "live.js" in url or "events" in url]


@contextmanager
def agent_answers(world: SiteWorld) -> Iterator[None]:
    """The agent's command socket, as `site-agent run` has it."""
    assert world.agent is not None
    server = ControlServer(world.state.control, RequestDispatcher(world.state, world.agent).answer_document)
    try:
        yield
    finally:
        server.close()


def test_a_person_reads_the_account_approves_and_releases_by_the_keyboard_alone(
    world: SiteWorld, chromium: Browser, tmp_path: Path
) -> None:
    update = held(world, EVERY)
    shutil.rmtree(world.state.root / "page", ignore_errors=True)
    with (
        agent_answers(world),
        serving(tmp_path, "site-agent", "page", world.state.root) as url,
        visiting(chromium, url, DESK) as visitor,
    ):
        visitor.log_in()
        page = visitor.page
        expect(page.get_by_text("1 update waits to be released.")).to_be_visible()
        page.evaluate("window.same = true")
        visitor.tab_to(STUDY)
        page.keyboard.press("Enter")
        expect(page.get_by_role("heading", name=f"Round 1 of {STUDY} waits")).to_be_visible()
        expect(page.get_by_text(update)).to_be_visible()
        visitor.tab_to("Release: it leaves")
        page.keyboard.press("Enter")
        expect(page.get_by_text(f"Round 1 of {STUDY} released by dana. It leaves now.")).to_be_visible()
        expect(page.get_by_role("cell", name="accepted")).to_be_visible()  # without loading it again
        expect(page.get_by_text("Nothing waits for a person.")).to_be_visible()
        visitor.shot("site-home.png")
        page.goto(f"{url}/studies/{STUDY}?data=patients")
        expect(page.get_by_role("heading", name="How far this consent goes")).to_be_visible()
        visitor.tab_to("Withdraw: nothing more of this study leaves")
        page.keyboard.press("Enter")
        expect(page.get_by_text(f"Study {STUDY} withdrawn by dana")).to_be_visible()
        page.goto(f"{url}/studies/{STUDY}?data=patients")
        visitor.tab_to('Approve exactly this for the data "patients"')
        visitor.shot("site-account.png")
        page.keyboard.press("Enter")
        expect(page.get_by_text(f"Study {STUDY} approved by dana for patients, 100 rows")).to_be_visible()
    consent = world.state.consent(STUDY)
    assert consent is not None
    assert (consent.state, consent.approved_by.name, consent.approved_by.source) == ("approved", "dana", "page")


EVIL_PAGE = """<!doctype html><title>evil</title>
<form id="f" method="post" target="inner" action="{url}/studies/{study}/withdraw">
<input name="csrf" value=""></form>
<iframe name="inner"></iframe><iframe id="framed" src="{url}/"></iframe>
<script>
document.getElementById("f").submit();
fetch("{url}/", {{credentials: "include"}}).then((a) => a.text())
  .then((text) => document.title = "read " + text.length, () => document.title = "not read");
</script>"""


@contextmanager
def elsewhere(html: str) -> Iterator[str]:
    """A page of somebody else at another port of this machine: the same site to a browser, another origin."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(html.encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def test_a_page_of_somebody_else_in_the_same_browser_acts_and_reads_nothing(
    world: SiteWorld, chromium: Browser, tmp_path: Path
) -> None:
    world.ready()
    with (
        agent_answers(world),
        serving(tmp_path, "site-agent", "page", world.state.root) as url,
        elsewhere(EVIL_PAGE.format(url=url, study=STUDY)) as evil,
    ):
        visitor = Visitor(chromium, url, DESK)
        visitor.log_in()
        page = visitor.context.new_page()
        answers: list[tuple[str, int]] = []
        page.on("response", lambda answer: answers.append((answer.request.method, answer.status)))
        page.goto(evil)
        expect(page).to_have_title("not read")
        page.wait_for_load_state("networkidle")
        assert ("POST", 403) in answers  # the cookie went with it: the port is another, the site is the same
        expect(page.frame_locator("#framed").locator("h1")).not_to_have_text("Site st-olav")
        visitor.page.reload()
        expect(visitor.page.get_by_text("Nothing waits for a person.")).to_be_visible()
        visitor.context.close()
    consent = world.state.consent(STUDY)
    assert consent is not None
    assert consent.state == "approved"


def test_a_gateway_tells_metrics_and_logs_json_where_it_is_asked_to(world: SiteWorld, tmp_path: Path) -> None:
    world.join()
    at = f"127.0.0.1:{free_port()}"
    log = tmp_path / "agent.log"
    agent = Service(
        log, "site-agent", "run", "--only", "gateway", "--state", world.state.root, "--metrics", at, "--log-format",
        "json",
    )  # fmt: skip
    try:
        agent.wait_line("ready")
        with urllib.request.urlopen(f"http://{at}/metrics", timeout=20) as answer:
            told = {family.name: family for family in text_string_to_metric_families(answer.read().decode())}
        assert told["wardround_site_connected"].samples[0].value == 1
        assert set(told) >= {metric.name.removesuffix("_total") for metric in METRICS}
    finally:
        assert agent.stop() == 0
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert any(line["message"].startswith("connected to the coordinator at") for line in lines)


def test_an_account_does_not_move_under_the_eyes_of_whoever_reads_it(
    world: SiteWorld, chromium: Browser, tmp_path: Path
) -> None:
    world.join()
    world.offer()
    world.start()
    world.wait_offered(STUDY)
    world.draft()
    with (
        agent_answers(world),
        serving(tmp_path, "site-agent", "page", world.state.root) as url,
        visiting(chromium, url, PHONE, has_touch=True, is_mobile=True) as visitor,
    ):
        visitor.log_in()
        page = visitor.page
        visitor.fits()
        page.goto(f"{url}/studies/{STUDY}?data=patients")
        visitor.fits()
        digest = page.locator("input[name=digest]").input_value()
        expect(page.get_by_text("This page stays as it is")).to_be_visible()
        world.offer(rounds=4)
        expect(page.get_by_text("Something changed since: load this page again before you decide")).to_be_visible()
        assert page.locator("input[name=digest]").input_value() == digest
        page.get_by_role("button", name="Approve exactly this").click()
        expect(page.get_by_role("heading", name="This did not work")).to_be_visible()
        visitor.faults = [fault for fault in visitor.faults if "409" not in fault]
    assert world.state.consent(STUDY) is None
