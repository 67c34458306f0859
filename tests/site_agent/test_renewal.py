"""When a site renews its certificate."""

import datetime
from typing import cast
from unittest.mock import Mock

import pytest
from cryptography import x509

from coordinator.members.authority import Authority
from site_agent.gateway.connection.interrupt import Interrupt, Interrupted
from site_agent.gateway.connection.session import Session
from site_agent.gateway.enrolment import renewal
from site_agent.gateway.enrolment.identity import Identity
from site_agent.gateway.exit.ledger import Ledger
from site_agent.state.directory import Site
from wardround.errors import RefusedForGood, TryAgain
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
    nobody = cast(Session, None), cast(Ledger, None), stopping, lambda: None
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
