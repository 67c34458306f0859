"""Log-ins with a provider of OpenID Connect, against one on loopback: who gets in, and each way in that is none."""

import base64
import hmac
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, parse_qsl, urlsplit

import pytest
from joserfc.jwk import ECKey

from tests.browser import CHEAP, ORIGIN, Browser
from tests.wardround.identity_provider import CLIENT, IdentityProvider
from wardround.errors import BadData, NotPermitted
from wardround.pages.blocks import Page, Paragraph
from wardround.web import oidc
from wardround.web.application import Application, View
from wardround.web.guard import Guard
from wardround.web.live import Live
from wardround.web.oidc import Provider
from wardround.web.passwords import Users
from wardround.web.provided import BACK, BEGIN, COOKIE

NOT_OURS = "The provider's token is not one for this log-in: begin again at the log-in page."
NOBODY = "Nobody began this log-in in this browser, or it is over: begin again at the log-in page."


class World:
    """A page whose people log in with a provider. ``now`` is its clock."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.provider = IdentityProvider(folder)
        self.now = 0.0
        self.ours: list[Provider] = []

    def page(self, look: str = 'groups = ["operators"]', ca: str = "provider.pem") -> Guard:
        path = self.provider.settings(self.folder, look, ca)
        provider = Provider(path, f"{ORIGIN}{BACK}", lambda: self.now)
        self.ours.append(provider)
        view = View("/", lambda visit: Page("Inside", visit.user.may, (Paragraph(f"for {visit.user.name}"),)))
        users = Users(self.folder / "users.json", CHEAP)
        return Guard(
            Application("Test", "test", (), (view,), users, Live(), provider=provider, add_user="add NAME").app,
            {ORIGIN},
        )


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.provider.close()


def begin(browser: Browser, query: str = "") -> str:
    """Where the provider's log-in is."""
    answer = browser.client.get(BEGIN + query)
    assert answer.status_code == 303, answer.text
    return answer.headers["location"]


def back(browser: Browser, answer: dict[str, str], status: int = 200) -> str:
    said = browser.client.get(BACK, params=answer)
    assert said.status_code == status, said.text
    assert said.headers.get("refresh", "0; url=/") == "0; url=/"
    return said.text.replace("&#39;", "'")


def is_in(browser: Browser) -> bool:
    return browser.client.get("/").status_code == 200


def test_whoever_is_named_logs_in_and_may_look(world: World) -> None:
    browser = Browser(world.page())
    assert f"Log in with 127.0.0.1:{world.provider.server.server_port}" in browser.get("/login")
    address = begin(browser)
    asked = {name: values[0] for name, values in parse_qs(urlsplit(address).query).items()}
    assert (asked["redirect_uri"], asked["client_id"]) == (f"{ORIGIN}{BACK}", CLIENT)
    assert {"openid", "profile"} == set(asked["scope"].split())
    answer = browser.client.get(BACK, params=world.provider.log_in(address))
    assert (answer.status_code, answer.headers["refresh"]) == (200, "0; url=/")  # one of our pages leads on: `Strict`
    cookies = {value.partition("=")[0]: value for value in answer.headers.get_list("set-cookie")}
    assert all(word in cookies["test"] for word in ("HttpOnly", "SameSite=strict"))
    assert "Max-Age=0" in cookies[COOKIE]
    assert "for dana" in browser.get("/")


def test_a_subject_may_be_named_alone(world: World) -> None:
    page = world.page('subjects = ["1234"]')
    browser, other = Browser(page), Browser(page)
    back(browser, world.provider.log_in(begin(browser), "1234"))
    assert is_in(browser)
    said = back(other, world.provider.log_in(begin(other), "12345"), 403)
    assert "You are known to the provider, and may not look here" in said
    assert not is_in(other)


def key_of_somebody_else(world: World) -> dict[str, Any]:
    return {"key": ECKey.generate_key("P-256", {"kid": "first"})}


def joined(header: dict[str, str], claims: dict[str, Any]) -> str:
    return ".".join(
        base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in (header, claims)
    )


def unsigned(world: World) -> dict[str, Any]:
    """A token of the right claims that says that nobody signed it."""
    return {"make": lambda claims: joined({"alg": "none"}, claims) + "."}


def signed_with_the_public_key(world: World) -> dict[str, Any]:
    """What a verifier takes that lets the token choose: an HMAC whose secret everybody knows."""

    def make(claims: dict[str, Any]) -> str:
        signed = joined({"alg": "HS256", "kid": "first"}, claims)
        mac = hmac.digest(world.provider.key.as_pem(private=False), signed.encode(), "sha256")
        return f"{signed}.{base64.urlsafe_b64encode(mac).decode().rstrip('=')}"

    return {"make": make}


CHEATS: dict[str, Any] = {
    "the nonce of another log-in": {"claims": {"nonce": "of another"}},
    "no nonce": {"claims": {"nonce": None}},
    "for another client": {"claims": {"aud": "somebody else"}},
    "for nobody": {"claims": {"aud": None}},
    "of another issuer": {"claims": {"iss": "https://elsewhere.example"}},
    "over": {"claims": {"exp": 1_000_000_000}},
    "for ever": {"claims": {"exp": None}},
    "of the future": {"claims": {"iat": 2**33}},
    "of nobody": {"claims": {"sub": None}},
    "another key": key_of_somebody_else,
    "alg none": unsigned,
    "an HMAC with the public key": signed_with_the_public_key,
    "no token": {"make": lambda _: ""},
    "no text of a token": {"make": lambda _: "a.b.c"},
}


@pytest.mark.parametrize("cheat", CHEATS)
def test_a_token_that_is_not_the_providers_for_this_log_in_lets_nobody_in(world: World, cheat: str) -> None:
    browser = Browser(world.page())
    made = CHEATS[cheat]
    if callable(made):
        made = made(world)
    for name, value in made.items():
        setattr(world.provider.cheating, name, value)
    assert NOT_OURS in back(browser, world.provider.log_in(begin(browser)), 403)
    assert not is_in(browser)


@pytest.mark.parametrize(
    "claims", [{"aud": [CLIENT, "other"]}, {"azp": "other"}, {"aud": [CLIENT, "other"], "azp": "other"}], ids=str
)
def test_a_token_for_another_client_as_well_lets_nobody_in(world: World, claims: dict[str, Any]) -> None:
    browser = Browser(world.page())
    world.provider.cheating.claims = claims
    assert "The provider's token is for another client" in back(browser, world.provider.log_in(begin(browser)), 403)
    assert not is_in(browser)


def test_an_answer_counts_once_in_the_browser_that_asked_and_in_time(world: World) -> None:
    page = world.page()
    victim, other = Browser(page), Browser(page)
    answer = world.provider.log_in(begin(victim))
    assert NOBODY in back(other, answer, 403)  # whoever brings another's answer does not log that browser in as them
    cookie = dict(victim.client.cookies)
    back(victim, answer)
    victim.client.cookies.update(cookie)
    assert NOBODY in back(victim, answer, 403)  # it is spent, whatever the browser keeps
    late = world.provider.log_in(begin(other))
    world.now = oidc.UNDER_WAY_S
    assert NOBODY in back(other, late, 403)
    assert NOBODY in back(other, {"state": "of nobody", "code": "x"}, 403)
    assert NOBODY in back(other, {}, 403)
    assert not is_in(other)


def test_the_provider_leads_nowhere_but_to_us(world: World) -> None:
    """There is no address to lead to that a stranger could give."""
    browser = Browser(world.page())
    address = begin(browser, "?next=https://evil.example&redirect_uri=https://evil.example")
    assert "evil" not in address
    answer = world.provider.log_in(address)
    said = back(browser, answer | {"next": "https://evil.example", "redirect_uri": "https://evil.example"})
    assert "evil" not in said
    assert is_in(browser)


def test_an_error_or_another_issuer_in_the_answer_lets_nobody_in(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    browser = Browser(world.page())
    answer = world.provider.log_in(begin(browser))
    said = back(browser, answer | {"iss": "https://elsewhere.example"}, 403)
    assert "The answer is of another provider" in said
    answer = world.provider.log_in(begin(browser))
    with caplog.at_level(logging.WARNING):
        said = back(browser, {"state": answer["state"], "error": "<script>\n\x1b[2J"}, 403)
    assert "The provider let nobody in" in said
    assert "<script>" not in said
    assert "\x1b" not in caplog.text
    answer = world.provider.log_in(begin(browser))
    world.provider.codes.clear()
    assert "The provider gives no token for this log-in" in back(browser, answer, 403)
    assert not is_in(browser)


def test_a_provider_whose_certificate_is_not_trusted_is_not_asked(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    browser = Browser(world.page(ca=""))
    answer = browser.client.get(BEGIN)
    assert (answer.status_code, world.provider.asked) == (503, [])
    assert "Nobody can log in with the provider now; the log of this page says why." in answer.text
    assert "the provider cannot be asked" in caplog.text


@pytest.mark.parametrize(
    ("metadata", "why"),
    [
        ({"issuer": "https://elsewhere.example"}, "the provider calls itself 'https://elsewhere.example', not"),
        ({"token_endpoint": "http://127.0.0.1/token"}, "the provider's `token_endpoint` is no https:// address"),
        ({"jwks_uri": None}, "the provider's `jwks_uri` is no https:// address"),
    ],
    ids=["issuer", "plain", "no keys"],
)
def test_a_provider_that_says_of_itself_what_cannot_be_is_not_used(
    world: World, metadata: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    world.provider.cheating.metadata = metadata
    assert Browser(world.page()).client.get(BEGIN).status_code == 503
    assert why in caplog.text


def test_a_code_is_given_to_no_other_address(world: World) -> None:
    """The provider's token endpoint leads on: code, verifier and secret stay here."""
    browser = Browser(world.page())
    answer = world.provider.log_in(begin(browser))
    world.provider.cheating.redirect = f"{world.provider.issuer}/elsewhere"
    back(browser, answer, 503)
    assert "/realm/elsewhere" not in world.provider.asked
    assert not is_in(browser)


def test_new_keys_of_the_provider_are_looked_up(world: World) -> None:
    browser = Browser(world.page())
    back(browser, world.provider.log_in(begin(browser)))
    world.provider.key = ECKey.generate_key("P-256", {"kid": "second"})
    assert NOT_OURS in back(browser, world.provider.log_in(begin(browser)), 403)  # not at each stranger's token
    world.now += oidc.KEYS_S
    other = Browser(browser.client.app)  # type: ignore[arg-type]
    back(other, world.provider.log_in(begin(other)))
    assert is_in(other)


def test_strangers_who_begin_log_ins_push_nobodys_out_and_take_no_memory(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oidc, "MOST_SPENT", 3)
    page = world.page()
    first = Browser(page)
    answer = world.provider.log_in(begin(first))
    stranger = Browser(page)
    for _ in range(20):
        state = dict(parse_qsl(urlsplit(begin(stranger)).query))["state"]
        back(stranger, {"state": state, "error": "denied"}, 403)
    back(first, answer)
    assert is_in(first)
    assert len(world.ours[0]._spent) == 3


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("https://", "http://", "issuer"),
        ('groups = ["operators"]', "", "names nobody: give `subjects` or `groups`"),
        ('"secret"', '"elsewhere"', "and there is no such file"),
        ("client_id", "klient_id", "klient_id"),
    ],
    ids=["plain http", "nobody", "no secret", "unknown key"],
)
def test_a_file_that_is_none_of_a_provider_is_refused(world: World, old: str, new: str, why: str) -> None:
    path = world.provider.settings(world.folder)
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(BadData) as refused:
        Provider(path, f"{ORIGIN}{BACK}")
    assert why in refused.value.message


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644])
def test_a_client_secret_that_others_can_read_is_refused(world: World, mode: int) -> None:
    path = world.provider.settings(world.folder)
    (world.folder / "secret").chmod(mode)
    with pytest.raises(NotPermitted) as refused:
        Provider(path, f"{ORIGIN}{BACK}")
    assert refused.value.message == f"{world.folder / 'secret'} can be read by others than its owner"
