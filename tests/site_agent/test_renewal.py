"""When a site renews its certificate."""

import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest
from cryptography import x509

from coordinator.members.authority import Authority
from site_agent.gateway.connection.interrupt import Interrupt, Interrupted
from site_agent.gateway.connection.session import Session
from site_agent.gateway.enrolment import renewal
from site_agent.gateway.enrolment.identity import Identity
from site_agent.gateway.exit.ledger import Ledger
from site_agent.gateway.setup import open_session
from site_agent.state.directory import Site
from tests.site_agent.site_world import SiteWorld
from tests.site_agent.waits import Waits
from wardround.errors import CannotWrite, RefusedForGood, TryAgain, Unavailable
from wardround.local import durable
from wardround.refusals import refused
from wardround.signing import certificates

BEGIN = datetime.datetime(2030, 1, 1, tzinfo=datetime.UTC)


class Suspended(Interrupt):
    """Its second wait is as long as it is asked for; meanwhile the wall clock goes on by ``days``, as if the machine
    had been suspended or its clock been set."""

    def __init__(self, days: float) -> None:
        super().__init__()
        self.now = BEGIN
        self.waited: list[float] = []
        self._days = days

    def wait(self, seconds: float) -> None:
        self.waited.append(seconds)
        self.now += datetime.timedelta(seconds=seconds)
        if len(self.waited) == 2:
            self.now += datetime.timedelta(days=self._days)


class Holder:
    """An identity with one certificate of seven days."""

    def __init__(self, authority: Authority) -> None:
        name = certificates.Name("north", "site", "alpha")
        self._certificate = authority.leaf(name, certificates.new_key().public_key(), BEGIN.timestamp(), 7 * 86400)

    def certificate(self) -> x509.Certificate:
        return self._certificate


def test_a_machine_that_was_suspended_past_the_half_of_the_life_renews_at_once(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority.create(tmp_path_factory.mktemp("authority"), "north", BEGIN.timestamp())
    stopping = Suspended(days=5)

    def renewed(*_: object) -> x509.Certificate:
        raise Interrupted

    monkeypatch.setattr(renewal, "renew", renewed)
    nobody = cast(Session, Mock()), cast(Ledger, None), stopping, lambda: None
    with pytest.raises(Interrupted):
        renewal.keep_renewed(
            cast(Identity, Holder(authority)), cast(Site, None), *nobody, now=lambda: stopping.now
        )  # fmt: skip
    assert sum(stopping.waited) <= 2 * renewal.LOOK_S


@pytest.mark.parametrize(("renews", "raised"), [(True, TryAgain), (False, RefusedForGood)])
def test_a_call_after_the_certificates_end_waits_for_the_renewal_where_there_can_be_one(
    renews: bool, raised: type[Exception]
) -> None:
    """On a connection that was open before: the machine was suspended. Without a renewal only a person can go on."""
    session = Session(lambda meter: Mock(bytes_up=0), lambda: renews)
    expected = pytest.raises(raised, match="this site's certificate has expired by the coordinator's clock")
    with expected as ended, session.use():
        raise refused("CERTIFICATE_EXPIRED", "uploading round 2 of `trial`")
    assert type(ended.value) is raised


@pytest.mark.parametrize("code", ["SITE_REVOKED", "VERSION_UNSUPPORTED"])
def test_what_no_renewal_helps_ends_the_agent(code: str) -> None:
    session = Session(lambda meter: Mock(bytes_up=0), lambda: True)
    with pytest.raises(RefusedForGood), session.use():
        raise refused(code, "watching")


class Renewed(Exception):
    """The agent would connect with the new certificate."""


def end_of_renewal() -> None:
    raise Renewed


FILES = ("next-key.pem", "next-renewal.pem", "next-certificate.pem", "key.pem", "certificate.pem")


@pytest.mark.parametrize("full", FILES)
def test_a_disk_that_is_full_while_a_certificate_is_renewed_costs_a_minute_and_not_the_agent(
    world: SiteWorld, full: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whichever file does not go there: the pair that is in use stays whole, and the next try renews it."""
    world.join()
    own = Identity(world.state.identity)
    before, failing = own.certificate_file.read_bytes(), [full]

    def refuse_once(name: str) -> Any:
        real = getattr(durable, name)

        def act(*given: Any, **more: Any) -> None:
            target: Path = given[0] if name == "write_file" else given[1]
            if failing == [target.name]:
                failing.clear()
                raise CannotWrite(f"{target}: No space left on device")
            real(*given, **more)

        return act

    for name in ("write_file", "move"):
        monkeypatch.setattr(durable, name, refuse_once(name))
    monkeypatch.setattr(renewal, "due", lambda *_: BEGIN - datetime.timedelta(days=36500))
    session, ledger, waits = (
        open_session(world.state.site(), own),
        Ledger(world.state.ledger, own.ledger_key()),
        Waits(),
    )
    try:
        with pytest.raises(Renewed):
            renewal.keep_renewed(own, world.state.site(), session, ledger, waits, end_of_renewal)
    finally:
        session.close()
        ledger.close()
    assert not failing
    assert waits.asked[0] == 0
    assert set(waits.asked[1:]) == {renewal.LEAST_S}
    assert f"{full}: No space left on device; the certificate is good to 20" in caplog.text
    again = Identity(world.state.identity)
    assert again.certificate_file.read_bytes() != before
    assert again.certificate().public_key() == again.key().public_key()
    assert sorted(path.name for path in again.folder.glob("next-*")) == []
    known = world.lines("identity")[-1]["certificate_sha256"]
    assert known == certificates.fingerprint(again.certificate())


def test_a_disk_that_fails_while_a_certificate_is_renewed_ends_the_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is durable is known at the next start alone."""
    monkeypatch.setattr(renewal, "due", lambda *_: BEGIN - datetime.timedelta(days=36500))
    monkeypatch.setattr(renewal, "renew", Mock(side_effect=durable.StorageFailed("the disk failed")))
    nobody = cast(Session, Mock()), cast(Ledger, None), Waits(), end_of_renewal
    with pytest.raises(durable.StorageFailed):
        renewal.keep_renewed(Mock(), cast(Site, None), *nobody)


class Away(Interrupt):
    """A coordinator that is away. When ``happens`` is due, the wait in which it does is as long as it was asked for."""

    def __init__(self, happens: Callable[["Away"], None]) -> None:
        super().__init__()
        self.now, self.tries, self.waited = BEGIN, 0, 0.0
        self._happens: Callable[[Away], None] | None = happens

    def wait(self, seconds: float) -> None:
        self.now += datetime.timedelta(seconds=seconds)
        self.waited += seconds
        if self.tries == 7 and self._happens is not None:
            self._happens(self)
            self._happens = None


def suspended(away: Away) -> None:
    away.now += datetime.timedelta(days=8)


@pytest.mark.parametrize("what", ["the coordinator is back", "the certificate has ended"])
def test_a_renewal_that_failed_again_and_again_is_tried_as_soon_as_that_may_help(
    what: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waited for up to an hour of its own clock: beside a connection that was there again, or, of a machine that was
    suspended meanwhile, without any."""
    authority = Authority.create(tmp_path_factory.mktemp("authority"), "north", BEGIN.timestamp())
    session = Session(lambda meter: Mock(bytes_up=0), lambda: True)
    away = Away(lambda _: session.note_connected() if what.startswith("the coordinator") else suspended(away))

    def renew(*_: object) -> x509.Certificate:
        away.tries += 1
        if away.tries > 7:
            raise Interrupted
        away.waited = 0.0
        raise Unavailable("the coordinator cannot be reached")

    monkeypatch.setattr(renewal, "renew", renew)
    with pytest.raises(Interrupted):
        renewal.keep_renewed(
            cast(Identity, Holder(authority)), cast(Site, None), session, cast(Ledger, None), away, lambda: None,
            now=lambda: away.now,
        )  # fmt: skip
    assert away.tries == 8
    assert renewal.LEAST_S <= away.waited <= 2 * renewal.LEAST_S
