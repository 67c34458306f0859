"""The hospital's page against an agent in this process: what it shows, and decisions in the name of who logged in."""

import re
from collections.abc import Iterator

import pytest

from site_agent.audit.left import LedgerReader
from site_agent.gateway.service import RequestDispatcher
from site_agent.page.application import application, users_file
from site_agent.page.source import Source
from site_agent.state import person
from site_agent.state.person import Account, Person
from tests.browser import CHEAP, ORIGIN, PASSWORD, Browser
from tests.site_agent.site_world import STUDY, SiteWorld
from tests.site_agent.test_endorsing import TWO
from tests.site_agent.test_policy_enforcement import EVERY, held
from tests.site_agent.test_several_people import TWO_CHANGE, put
from tests.site_agent.test_several_people import held as held_for_two
from tools.world import wait_until
from wardround.errors import NeedsPerson
from wardround.local import person as local_person
from wardround.local.control import ControlServer
from wardround.web.guard import Guard
from wardround.web.live import Live
from wardround.web.passwords import Users

PATH = f"/studies/{STUDY}"


class SitePage:
    """The page of a world's site, and the socket of its agent."""

    def __init__(self, world: SiteWorld) -> None:
        self.world = world
        self.live = Live()
        self.users = Users(users_file(world.state.root), CHEAP)
        self.users.put("dana", PASSWORD, "decide")
        self.users.put("lou", PASSWORD, "look")
        self.source = Source(world.state, self.live)
        self.app = Guard(application("st-olav", self.source, self.users, self.live).app, {ORIGIN})
        self.socket: ControlServer | None = None

    def serve(self) -> None:
        assert self.world.agent is not None
        answer = RequestDispatcher(self.world.state, self.world.agent).answer_document
        self.socket = ControlServer(self.world.state.control, answer)

    def browser(self, name: str = "dana") -> Browser:
        browser = Browser(self.app)
        assert browser.log_in(name) == (303, "/")
        return browser

    def close(self) -> None:
        self.source.end()
        if self.socket is not None:
            self.socket.close()


@pytest.fixture
def offered(world: SiteWorld) -> Iterator[SitePage]:
    """A site that is offered a study, and has a policy for it."""
    world.join()
    world.offer()
    world.start()
    world.wait_offered(STUDY)
    world.draft()
    page = SitePage(world)
    page.serve()
    yield page
    page.close()


def test_the_whole_account_is_shown_and_exactly_that_is_approved(offered: SitePage) -> None:
    browser = offered.browser()
    home = browser.get("/")
    assert "1 study waits to be looked at." in home
    assert "Nothing left today." in home
    shown = browser.get(f"{PATH}?data=patients")
    told = offered.world.command("preview", study=STUDY, data="patients")
    for group in told["groups"]:
        assert group["heading"] in shown
        for line in group["lines"]:
            assert line["name"] in shown
            assert line["value"] in shown
    assert told["digest"] in shown
    assert browser.fields(shown, f"{PATH}/approve")["digest"] == told["digest"]
    assert browser.press(shown, f"{PATH}/approve") == (303, "/")
    said = browser.get("/")
    assert f"Study {STUDY} approved by dana for <code>patients</code>, 100 rows" in said
    assert f"Study {STUDY} approved" not in browser.get("/")  # once
    consent = offered.world.state.consent(STUDY)
    assert consent is not None
    assert (consent.approved_by.name, consent.approved_by.source) == ("dana", "page")
    (line,) = offered.world.lines("consent")
    assert line["by"]["name"] == "dana"
    assert line["by"]["source"] == "page"
    assert line["by"]["account"]["uid"] == line["by"]["uid"]


def test_where_the_policy_wants_two_people_one_log_in_is_not_two(offered: SitePage) -> None:
    offered.world.draft(TWO)
    offered.users.put("kim", PASSWORD, "decide")
    browser = offered.browser()
    shown = browser.get(f"{PATH}?data=patients")
    assert browser.press(shown, f"{PATH}/approve") == (303, "/")
    assert "1 of the 2 people that the policy wants; nothing leaves before all have." in browser.get("/")
    assert offered.world.state.consent(STUDY) is None
    again = browser.get(f"{PATH}?data=patients")
    assert "Approved so far by dana (page), as" in again
    status, said = browser.press(again, f"{PATH}/approve")
    assert (status, "has approved study <code>hearts</code> already" in said) == (400, True)
    second = offered.browser("kim")
    assert second.press(second.get(f"{PATH}?data=patients"), f"{PATH}/approve") == (303, "/")
    consent = offered.world.state.consent(STUDY)
    assert consent is not None
    assert [by.name for by in consent.people] == ["dana", "kim"]


def test_who_may_be_one_person_is_not_two() -> None:
    service, login = Account("wardround", 998), Account("alice", 1000)
    dana, kim = Person("dana", 998, "page", service), Person("kim", 998, "page", service)
    by_hand = Person("kim", 998, "page", login)
    alice, dana_too = Person("alice", 1000, "loginuid", service), Person("dana", 1001, "sudo", service)
    assert not dana.may_be(kim)
    assert not dana.may_be(alice)
    assert dana.may_be(dana_too)
    assert by_hand.may_be(alice)
    assert by_hand.may_be(Person("dana", 998, "page", login))
    assert not by_hand.may_be(dana)


def test_what_changed_after_it_was_shown_is_not_approved(offered: SitePage) -> None:
    browser = offered.browser()
    shown = browser.get(f"{PATH}?data=patients")
    old = offered.world.digest
    offered.world.offer(rounds=4)
    wait_until(lambda: offered.world.state.offer(STUDY).digest != old, "the new revision is kept", 20)
    status, said = browser.press(shown, f"{PATH}/approve")
    assert status == 409
    assert "This did not work" in said
    assert offered.world.state.consent(STUDY) is None
    again = browser.get(f"{PATH}?data=patients")
    assert "What changed since it was shown" in again
    assert browser.press(again, f"{PATH}/approve") == (303, "/")


def test_who_may_only_look_decides_nothing(offered: SitePage) -> None:
    looking = offered.browser("lou")
    shown = looking.get(f"{PATH}?data=patients")
    assert "You may look, and decide nothing." in shown
    assert f'action="{PATH}/approve"' not in shown
    digest = offered.world.shown()
    csrf = looking.fields(shown, "/logout")["csrf"]
    status, said = looking.post(f"{PATH}/approve", csrf=csrf, data="patients", digest=digest)
    assert (status, "<code>lou</code> may look, and decide nothing." in said) == (403, True)
    assert offered.world.state.consent(STUDY) is None


def test_a_study_is_withdrawn(offered: SitePage) -> None:
    browser = offered.browser()
    browser.press(browser.get(f"{PATH}?data=patients"), f"{PATH}/approve")
    shown = browser.get(PATH)
    assert "Approved" in shown
    assert browser.press(shown, f"{PATH}/withdraw") == (303, "/")
    assert f"Study {STUDY} withdrawn by dana: nothing more of it leaves." in browser.get("/")
    consent = offered.world.state.consent(STUDY)
    assert consent is not None
    assert consent.withdrawn_by is not None
    assert (consent.state, consent.withdrawn_by.name) == ("withdrawn", "dana")


@pytest.mark.parametrize(("press", "decision"), [("release", "released"), ("reject", "rejected")])
def test_an_update_that_waits_is_shown_and_decided(world: SiteWorld, press: str, decision: str) -> None:
    update = held(world, EVERY)
    page = SitePage(world)
    page.serve()
    try:
        browser = page.browser()
        home = browser.get("/")
        assert "1 update waits to be released." in home
        path = f"{PATH}/rounds/1"
        assert f'<a href="{path}">{STUDY}</a>' in home
        shown = browser.get(path)
        assert "shared.weight" in shown
        assert update in shown
        assert "80" in shown
        status, _ = browser.press(shown, f"{path}/{press}", update="ab" * 32)
        assert status == 400
        assert world.lines(decision) == []
        assert browser.press(shown, f"{path}/{press}") == (303, "/")
        assert f"Round 1 of {STUDY} {decision} by dana." in browser.get("/")
        (line,) = world.lines(decision)
        assert (line["update"], line["by"]["name"], line["by"]["source"]) == (update, "dana", "page")
        if press == "release":
            wait_until(lambda: "accepted" in browser.get("/left"), "it left, and the receipt is shown", 20)
            assert "1 update left on" in browser.get("/left")
            assert "Nothing left today" not in browser.get("/")
        assert f"{decision}" in browser.get("/left")
        assert "by dana (page), as" in browser.get("/left")
        assert "Nothing left on 2001-01-01." in browser.get("/left?day=2001-01-01")
    finally:
        page.close()


def test_where_the_policy_wants_two_people_an_update_waits_for_the_second(world: SiteWorld) -> None:
    update = held_for_two(world)
    page = SitePage(world)
    page.serve()
    page.users.put("kim", PASSWORD, "decide")
    try:
        browser, path = page.browser(), f"{PATH}/rounds/1"
        shown = browser.get(path)
        assert "The policy wants 2 different people to release it." in shown
        assert re.search(r"Approved by [^;<]+; round 1 waits to be released\.", browser.get(PATH))
        assert "Release: it waits for another person" in shown
        assert browser.press(shown, f"{path}/release") == (303, "/")
        home = browser.get("/")
        assert "1 of the 2 people that the policy wants; it leaves when all have." in home
        assert re.search(r"released so far by</th>.*<td[^>]*>dana \(page\), as ", home, re.DOTALL)
        again = browser.get(path)
        assert "Released so far by dana (page), as" in again
        status, said = browser.press(again, f"{path}/release")
        assert (status, "has released round 1 of <code>hearts</code> already" in said) == (400, True)
        second = page.browser("kim")
        assert second.press(second.get(path), f"{path}/release") == (303, "/")
        world.coordinator.wait_receipts(1)
        (upload,) = world.lines("upload")
        assert upload["update"] == update
        left = second.get("/left")
        assert "endorsed" in left
        assert "kim (page), as" in left
    finally:
        page.close()


def test_a_change_of_the_policy_waits_on_the_page_for_a_second_person(offered: SitePage) -> None:
    world = offered.world
    world.draft(TWO_CHANGE)
    world.approve()
    before = world.state.policy.read_bytes()
    after = before.replace(b'updates = "none"', b'updates = "every"')
    browser = offered.browser()
    assert "No change of the policy waits for a person." in browser.get("/policy")
    with pytest.raises(NeedsPerson):
        put(world, after, before, {"name": "dana", "uid": 1001})
    assert "a change of the policy waits for a further person" in browser.get("/")
    shown = browser.get("/policy")
    assert "A change waits for another person: agreed to by dana; 2 must." in shown
    assert "release.updates: none before, every now" in shown
    status, said = browser.press(shown, "/policy/agree")  # of one name at a terminal and at the page
    assert (status, "has agreed to policy" in said) == (400, True)
    offered.users.put("kim", PASSWORD, "decide")
    kim = offered.browser("kim")
    assert kim.press(kim.get("/policy"), "/policy/take-back") == (303, "/")
    assert "The change was taken back by kim" in kim.get("/")
    status, _ = browser.press(shown, "/policy/agree")
    assert status == 409
    with pytest.raises(NeedsPerson):
        put(world, after, before, {"name": "dana", "uid": 1001})
    assert kim.press(kim.get("/policy"), "/policy/agree") == (303, "/")
    assert "is in force, agreed to by kim last." in kim.get("/")
    assert world.state.policy.read_bytes() == after
    assert "/policy/agree" not in offered.browser("lou").get("/policy")


def test_without_an_agent_the_page_says_so_and_decides_nothing(offered: SitePage) -> None:
    browser = offered.browser()
    assert offered.socket is not None
    offered.socket.close()
    offered.socket = None
    assert "does not run: nothing leaves, and nothing can be decided" in browser.get("/")
    assert "The agent does not run, and nothing can be decided." in browser.get(PATH, 503)
    assert browser.client.get("/readyz").status_code == 503


def test_a_page_is_told_of_what_changes_in_the_sites_files(offered: SitePage) -> None:
    offered.source.watch()
    version = offered.live.version
    offered.world.approve()
    wait_until(lambda: offered.live.version > version, "the page is told", 20)


def test_the_ledger_is_read_on_from_where_it_was_read_to(world: SiteWorld) -> None:
    world.ready()
    reader = LedgerReader(world.state.ledger)
    lines = reader.read().lines
    assert lines == len(world.lines())
    world.command("withdraw", study=STUDY, by={"name": "dpo", "uid": 1000})
    assert reader.read().lines == len(world.lines()) > lines


def test_whoever_logged_in_is_named_with_the_account_that_the_kernel_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    claimed = Person("dana", 4, "page", Account("root", 0))
    monkeypatch.setattr(local_person, "login_of", lambda process: None)
    assert person.behind(claimed, 1, 0) == Person("dana", 0, "page", Account(person.user_name(0), 0))
    monkeypatch.setattr(local_person, "login_of", lambda process: 3_999_999_999)
    by = person.behind(claimed, 1, 0)
    assert by == Person("dana", 0, "page", Account("3999999999", 3_999_999_999))
    assert by.text == "dana (page), as 3999999999"
    assert Person("dana", 0, "page", Account("dana", 0)).text == "dana (page), as dana"


def test_where_nobody_can_log_in_the_page_says_what_to_type(offered: SitePage) -> None:
    for name in ("dana", "lou"):
        offered.users.remove(name)
    shown = Browser(offered.app).get("/login")
    assert (
        "Nobody can log in yet. This lets somebody, and counts at once: <code>site-agent page user add NAME</code>"
        in shown
    )
    offered.users.put("dana", PASSWORD, "look")
    assert "Nobody" not in Browser(offered.app).get("/login")


def test_a_damaged_list_of_people_is_told_and_shows_no_reason(offered: SitePage) -> None:
    users_file(offered.world.state.root).write_text("{")
    assert "Nobody can log in now; the log of this page says why." in Browser(offered.app).get("/login", 503)
