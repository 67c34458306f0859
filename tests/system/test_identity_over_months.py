"""A site's identity over months, in seconds: the real coordinator and the real gateway, with certificates that live
seconds, on loopback in this process.
"""

import datetime
from pathlib import Path

import pytest

from site_agent import audit
from site_agent.gateway.agent import Agent
from site_agent.gateway.enrolment.identity import Identity
from site_agent.gateway.enrolment.join import Joined, join
from site_agent.state.directory import SiteState
from tests.coordinator.conftest import Place
from tools import evidence_identity
from tools.world import wait_until
from wardround.errors import NeedsPerson, TryAgain
from wardround.local.durable import StateLock
from wardround.signing import certificates


@pytest.fixture
def state(tmp_path: Path) -> SiteState:
    return SiteState(tmp_path / "site")


def live(place: Place, life_s: int, window_s: int) -> None:
    """Let certificates live so long from now on, and be renewed so long after their end."""
    config = place.state.config_file
    text = config.read_text().partition("[certificates]")[0]
    config.write_text(f"{text}\n[certificates]\nlife_s = {life_s}\nrenewal_window_s = {window_s}\n")
    place.restart()


def redeem(state: SiteState, place: Place, authority: str = "") -> Joined:
    return join(state, place.invite("alpha"), None, authority)


def until_ended(state: SiteState) -> None:
    """The certificate of a site that is off ends."""
    end = Identity(state.identity).certificate().not_valid_after_utc
    wait_until(lambda: datetime.datetime.now(datetime.UTC) >= end, "the certificate has ended", 20)


def run_until_connected(state: SiteState) -> None:
    agent = Agent(state)
    try:
        agent.start()
        wait_until(lambda: agent.connected or agent.stopped.is_set(), "connected", 30)
        if agent.stopped.is_set():
            error = agent.wait()
            assert error is not None
            raise error
    finally:
        agent.stop()


def sites_row(place: Place) -> dict[str, object]:
    (row,) = place.ask("sites")["sites"]
    return dict(row)


def events(state: SiteState) -> list[object]:
    return [line.document()["event"] for line in audit.lines(state.ledger) if line.type == "identity"]


def test_a_site_whose_certificate_ended_while_it_was_off_renews_it_with_the_old_key(
    place: Place, state: SiteState
) -> None:
    live(place, 4, 600)
    redeem(state, place)
    until_ended(state)
    live(place, 600, 600)
    run_until_connected(state)
    assert events(state) == ["issued", "renewed"]
    assert audit.verify(state.ledger)[1] == audit.CONSISTENT
    assert sites_row(place)["certificate_fork_since"] is None


def test_without_a_renewal_window_the_agent_ends_and_names_the_way_back_which_keeps_everything(
    place: Place, state: SiteState
) -> None:
    live(place, 4, 0)
    redeem(state, place)
    run_until_connected(state)
    ledger_key = Identity(state.identity).ledger_key_file.read_bytes()
    genesis = next(iter(audit.lines(state.ledger))).document()
    private = state.root / "studies" / "trial" / "private.safetensors"
    private.parent.mkdir(parents=True)
    private.write_bytes(b"private")
    until_ended(state)
    live(place, 600, 0)
    with pytest.raises(NeedsPerson, match=r"this site's certificate ended on .* does not take it any more") as ended:
        run_until_connected(state)
    assert "`site-agent join --invitation FILE`" in ended.value.hint
    assert ended.value.exit_code == 78

    joined = redeem(state, place)
    assert joined.again
    run_until_connected(state)
    assert Identity(state.identity).ledger_key_file.read_bytes() == ledger_key
    assert next(iter(audit.lines(state.ledger))).document() == genesis
    assert private.read_bytes() == b"private"
    assert events(state)[-1] == "issued"
    assert events(state).count("issued") == 2
    assert audit.verify(state.ledger)[1] == audit.CONSISTENT


def test_a_window_that_the_operator_closed_is_closed(place: Place, state: SiteState) -> None:
    live(place, 4, 600)
    redeem(state, place)
    until_ended(state)
    live(place, 600, 0)
    with pytest.raises(NeedsPerson, match="this site's certificate has expired by the coordinator's clock") as refused:
        run_until_connected(state)
    assert "`site-agent join --invitation FILE`" in refused.value.hint


def test_a_join_while_the_agent_runs_waits_for_nobody_and_changes_nothing(place: Place, state: SiteState) -> None:
    redeem(state, place)
    before = {path: path.read_bytes() for path in state.identity.iterdir()}
    with StateLock(state.root, "site-agent run"), pytest.raises(TryAgain):
        redeem(state, place)
    assert {path: path.read_bytes() for path in state.identity.iterdir()} == before


@pytest.mark.parametrize("step", ["save_site", "adopt", "done"])
def test_a_crash_of_a_second_join_is_finished_by_the_same_command(
    place: Place, state: SiteState, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    class Crash(BaseException):
        pass

    def crash(*_: object) -> None:
        raise Crash

    redeem(state, place)
    text = place.invite("alpha")
    owner = {
        "save_site": "site_agent.state.directory.SiteState.save_site",
        "adopt": "site_agent.gateway.enrolment.identity.Identity.adopt",
        "done": "site_agent.gateway.enrolment.identity.Joining.done",
    }[step]
    with monkeypatch.context() as patch:
        patch.setattr(owner, crash)
        with pytest.raises(Crash):
            join(state, text)
    join(state, text)
    own = Identity(state.identity)
    assert own.certificate().public_key() == own.key().public_key()
    run_until_connected(state)
    assert events(state) == ["issued", "issued"]


def test_an_invitation_of_another_authority_is_redeemed_only_with_its_fingerprint(
    place: Place, state: SiteState, tmp_path: Path
) -> None:
    redeem(state, place)
    (tmp_path / "other").mkdir()
    other = Place(tmp_path / "other")
    try:
        fingerprint = certificates.fingerprint(other.coordinator.context.authority.certificate)
        with pytest.raises(NeedsPerson, match="the invitation names another authority than the one") as refused:
            redeem(state, other)
        assert fingerprint in refused.value.message
        assert "site-agent join --authority FINGERPRINT" in refused.value.hint
        with pytest.raises(NeedsPerson):
            redeem(state, other, "0" * 64)
        redeem(state, other, fingerprint)
        run_until_connected(state)
    finally:
        other.close()


@pytest.mark.chaos
def test_renewals_drop_no_call(tmp_path: Path) -> None:
    """The short form of ``python -m tools.evidence_identity renewals``."""
    kept = evidence_identity.renewals(tmp_path, sites=2, wanted=2, life_s=10, limit_s=90)
    assert kept.failed == ()
    assert kept.certificate_forks == 0
    assert min(kept.renewals) >= 2
    assert kept.calls > 20


def test_one_invitation_redeemed_by_64_at_once_gives_one_certificate(tmp_path: Path) -> None:
    """The short form of ``python -m tools.evidence_identity redemptions``."""
    redeemed = evidence_identity.redemptions(tmp_path, times=1, threads=64)
    assert (redeemed.certificates, redeemed.refused_as_used, redeemed.other) == (1, 63, ())
