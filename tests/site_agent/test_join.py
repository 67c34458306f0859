"""Joining: bad invitations, wrong coordinators, crashes in between, and what is on the disk afterwards."""

import datetime
import socket
import ssl
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from site_agent import audit
from site_agent.gateway.connection.diagnosis import diagnose
from site_agent.gateway.enrolment.identity import Identity, check_clock, check_issued
from site_agent.gateway.enrolment.join import join
from site_agent.state.directory import SiteState
from tests.site_agent.fake_coordinator import Authority, FakeCoordinator, now, uri
from wardround.errors import BadData, NeedsPerson, NotPermitted, Refused, Unavailable, WardroundError
from wardround.records.invitation import Invitation
from wardround.signing import certificates

HOUR = datetime.timedelta(hours=1)


@pytest.fixture
def coordinator() -> Iterator[FakeCoordinator]:
    coordinator = FakeCoordinator()
    try:
        yield coordinator
    finally:
        coordinator.stop()


@pytest.fixture
def state(tmp_path: Path) -> SiteState:
    return SiteState(tmp_path / "site")


def test_a_join_writes_an_identity_that_only_its_owner_reads(coordinator: FakeCoordinator, state: SiteState) -> None:
    joined = join(state, coordinator.invite("st-olav"))
    assert joined.site.site == "st-olav"
    assert joined.site.authority_fingerprint == certificates.fingerprint(coordinator.authority.certificate)
    assert stat.S_IMODE(joined.key.stat().st_mode) == 0o600
    assert stat.S_IMODE(state.identity.stat().st_mode) == 0o700
    assert [line.type for line in audit.lines(state.ledger)] == ["genesis", "control", "identity"]
    assert audit.verify(state.ledger)[1] == audit.CONSISTENT
    assert joined.warning == ""


def test_the_key_never_leaves(coordinator: FakeCoordinator, state: SiteState) -> None:
    joined = join(state, coordinator.invite("st-olav"))
    (request,) = coordinator.enrolments
    key = certificates.load_key(joined.key.read_bytes(), "key")
    secret = key.private_numbers().private_value.to_bytes(32, "big")
    assert secret not in request.SerializeToString()


def test_nothing_of_the_invitation_is_kept(coordinator: FakeCoordinator, state: SiteState) -> None:
    text = coordinator.invite("st-olav")
    secret = Invitation.decode(text).key.splitlines()[1].encode()
    join(state, text)
    kept = [path.read_bytes() for path in state.root.rglob("*") if path.is_file()]
    assert not [data for data in kept if secret in data]


BAD_INVITATIONS: list[tuple[str, Callable[[str], str], str]] = [
    ("cut", lambda text: text[:-1], "cut short or changed"),
    ("changed", lambda text: text.replace("e", "f", 1), "cut short or changed"),
    ("other", lambda text: "hello " + text, "does not begin with `wr1.`"),
    ("empty", lambda text: "", "does not begin with `wr1.`"),
]


@pytest.mark.parametrize(("change", "said"), [pytest.param(c, s, id=name) for name, c, s in BAD_INVITATIONS])
def test_a_damaged_invitation_is_refused_before_any_call(
    coordinator: FakeCoordinator, state: SiteState, change: Callable[[str], str], said: str
) -> None:
    with pytest.raises(BadData, match=said):
        join(state, change(coordinator.invite("st-olav")))
    assert not coordinator.enrolments
    assert not state.root.exists()


def test_line_breaks_in_a_pasted_invitation_do_not_matter(coordinator: FakeCoordinator, state: SiteState) -> None:
    text = coordinator.invite("st-olav")
    assert join(state, text[:80] + "\n" + text[80:] + " \r\n").site.site == "st-olav"


def test_an_expired_invitation_is_refused_with_both_times(coordinator: FakeCoordinator, state: SiteState) -> None:
    with pytest.raises(BadData) as refused:
        join(state, coordinator.invite("st-olav", expires=-2 * HOUR))
    assert "invitation for site `st-olav` expired 2 h ago" in refused.value.message
    assert "this machine's clock says" in refused.value.message
    assert not state.root.exists()


def test_a_certificate_is_judged_by_the_time_when_it_arrives(coordinator: FakeCoordinator, state: SiteState) -> None:
    """Not when the command began: what is issued meanwhile is not valid yet by that time."""
    moments = iter([now() - HOUR, now()])
    assert join(state, coordinator.invite("st-olav"), now=lambda: next(moments)).warning == ""


def test_a_used_invitation_is_refused_in_our_words(
    coordinator: FakeCoordinator, state: SiteState, tmp_path: Path
) -> None:
    text = coordinator.invite("st-olav")
    join(state, text)
    with pytest.raises(Refused, match="joining: the invitation was used already") as refused:
        join(SiteState(tmp_path / "second"), text)
    assert refused.value.code == "INVITATION_USED"
    assert "tell the coordinator's operator at once" in refused.value.hint


def test_an_invitation_of_another_coordinator_is_refused(coordinator: FakeCoordinator, state: SiteState) -> None:
    other = FakeCoordinator()
    try:
        text = other.invite("st-olav", address=coordinator.address)
        with pytest.raises(NeedsPerson) as refused:
            join(state, text)
    finally:
        other.stop()
    assert "presents another authority than the one this site trusts" in refused.value.message
    assert "nothing was sent" in refused.value.message
    assert "read you the authority's fingerprint" in refused.value.hint
    assert not coordinator.enrolments
    assert not state.joined()


def test_a_second_join_leaves_the_first_untouched(coordinator: FakeCoordinator, state: SiteState) -> None:
    joined = join(state, coordinator.invite("st-olav"))
    before = joined.key.read_bytes()
    with pytest.raises(NeedsPerson, match="is site `st-olav` of federation `test` already; its keys are untouched"):
        join(state, coordinator.invite("charite"))
    assert joined.key.read_bytes() == before


def test_a_lost_reply_is_got_again_with_the_same_invitation(coordinator: FakeCoordinator, state: SiteState) -> None:
    coordinator.lose_enrol_replies = 1
    text = coordinator.invite("st-olav")
    with pytest.raises(Unavailable):
        join(state, text)
    assert not state.joined()
    join(state, text)
    first, second = coordinator.enrolments
    assert first.signing_request == second.signing_request
    assert [line.type for line in audit.lines(state.ledger)] == ["genesis", "control", "control", "identity"]


@pytest.mark.parametrize("step", ["certificate_file", "save_site"])
def test_a_crash_between_the_writes_is_finished_by_the_same_command(
    coordinator: FakeCoordinator, state: SiteState, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    class Crash(BaseException):
        pass

    def crash(*_: object) -> None:
        raise Crash

    text = coordinator.invite("st-olav")
    with monkeypatch.context() as patch:
        if step == "save_site":
            patch.setattr(SiteState, "save_site", crash)
        else:
            patch.setattr("site_agent.gateway.enrolment.join.record_identity", crash)
        with pytest.raises(Crash):
            join(state, text)
    assert not state.joined()
    key = (state.identity / "key.pem").read_bytes()
    join(state, text)
    assert (state.identity / "key.pem").read_bytes() == key
    types = [line.type for line in audit.lines(state.ledger)]
    assert types[0] == "genesis"
    assert sorted(types) == ["control", "control", "genesis", "identity"]


def test_clocks_ten_minutes_apart_are_a_warning(coordinator: FakeCoordinator, state: SiteState) -> None:
    coordinator.server_time = lambda: now() + datetime.timedelta(minutes=10, seconds=30)
    assert "10 min apart" in join(state, coordinator.invite("st-olav")).warning


def test_clocks_two_days_apart_are_an_error(coordinator: FakeCoordinator, state: SiteState) -> None:
    coordinator.server_time = lambda: now() + datetime.timedelta(days=2, minutes=1)
    with pytest.raises(NeedsPerson, match="2 days apart"):
        join(state, coordinator.invite("st-olav"))
    assert not state.joined()


def test_a_coordinators_time_that_is_no_time_is_refused() -> None:
    with pytest.raises(BadData, match="the coordinator's time is no time"):
        check_clock(2**62, now())


def test_a_coordinator_two_minor_versions_apart_is_refused_by_both_names(
    coordinator: FakeCoordinator, state: SiteState
) -> None:
    coordinator.version = "0.3.0"
    with pytest.raises(NeedsPerson, match=r"this is wardround 0\.1\.0, the coordinator is 0\.3\.0"):
        join(state, coordinator.invite("st-olav"))


def test_a_key_that_others_can_read_is_not_used(coordinator: FakeCoordinator, state: SiteState) -> None:
    joined = join(state, coordinator.invite("st-olav"))
    joined.key.chmod(0o644)
    with pytest.raises(NotPermitted, match="can be read by others than its owner") as refused:
        Identity(state.identity)
    assert "chmod 600" in refused.value.hint


def test_a_renewal_interrupted_between_its_two_renames_leaves_a_whole_pair(
    coordinator: FakeCoordinator, state: SiteState
) -> None:
    join(state, coordinator.invite("st-olav"))
    own = Identity(state.identity)
    own.begin_renewal()
    key = own.next_key()
    leaf = coordinator.authority.issue(key.public_key(), [uri("spiffe://test/site/st-olav")])
    (state.identity / "next-certificate.pem").write_bytes(leaf)
    (state.identity / "next-key.pem").replace(state.identity / "key.pem")
    again = Identity(state.identity)
    assert again.certificate().public_key() == again.key().public_key()
    assert again.certificate_file.read_bytes() == leaf


def issued_cases() -> list[tuple[str, Callable[[Authority, certificates.PrivateKey], bytes], str]]:
    name = uri("spiffe://test/site/st-olav")
    late = now() + datetime.timedelta(days=1)
    return [
        ("key", lambda a, k: a.issue(certificates.new_key().public_key(), [name]), "over another key than this site's"),
        (
            "site",
            lambda a, k: a.issue(k.public_key(), [uri("spiffe://test/site/other")]),
            "names spiffe://test/site/ot",
        ),
        ("two", lambda a, k: a.issue(k.public_key(), [name, name]), "other names or usages than one URI"),
        (
            "authority",
            lambda a, k: Authority().issue(k.public_key(), [name]),
            "not signed by the federation's",
        ),
        ("time", lambda a, k: a.issue(k.public_key(), [name], begins=late), "this machine's clock says"),
        ("text", lambda a, k: b"hello", "not a certificate in PEM"),
    ]


@pytest.mark.parametrize(("issue", "said"), [pytest.param(i, s, id=name) for name, i, s in issued_cases()])
def test_an_issued_certificate_is_checked_before_it_is_kept(
    issue: Callable[[Authority, certificates.PrivateKey], bytes], said: str
) -> None:
    authority, key = Authority("one authority"), certificates.new_key()
    with pytest.raises(BadData, match=said):
        check_issued(issue(authority, key), key, authority.pem, certificates.Name("test", "site", "st-olav"), now())


# why the coordinator cannot be reached


def said(error: WardroundError) -> str:
    return error.message


def test_a_closed_port_is_said(coordinator: FakeCoordinator) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert said(diagnose(f"127.0.0.1:{port}", coordinator.authority.pem)) == f"nobody listens at 127.0.0.1:{port}"


def test_a_certificate_for_another_name_is_said(coordinator: FakeCoordinator) -> None:
    address = f"localhost:{coordinator.port}"
    assert f"the coordinator's certificate is not for {address}" in said(diagnose(address, coordinator.authority.pem))


def test_a_listener_that_speaks_no_tls_is_said(coordinator: FakeCoordinator) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        port = server.getsockname()[1]
        error = diagnose(f"127.0.0.1:{port}", coordinator.authority.pem)
        thread.join()
    assert "does not speak TLS 1.3 as a coordinator does" in error.message


def test_a_coordinator_whose_certificate_expired_is_said(tmp_path: Path) -> None:
    authority, key = Authority(), certificates.new_key()
    import ipaddress

    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    names: list[x509.GeneralName] = [x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    old = authority.issue(
        key.public_key(), names, usage=ExtendedKeyUsageOID.SERVER_AUTH, begins=now() - datetime.timedelta(days=9)
    )
    error = _diagnose_against(tmp_path, authority, certificates.key_pem(key), old)
    assert "is not valid by this machine's clock" in error.message
    assert "timedatectl" in error.hint


def _diagnose_against(folder: Path, authority: Authority, key: bytes, leaf: bytes) -> WardroundError:
    (folder / "key").write_bytes(key)
    (folder / "leaf").write_bytes(leaf)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "leaf", folder / "key")
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                try:
                    context.wrap_socket(connection, server_side=True)
                except (ssl.SSLError, OSError):
                    return

        thread = threading.Thread(target=answer)
        thread.start()
        error = diagnose(f"127.0.0.1:{server.getsockname()[1]}", authority.pem)
        thread.join()
    return error


def test_a_coordinator_that_refuses_our_certificate_is_said(coordinator: FakeCoordinator, state: SiteState) -> None:
    joined = join(state, coordinator.invite("st-olav"))
    stranger = Authority("strangers")
    key = certificates.new_key()
    joined.certificate.write_bytes(stranger.issue(key.public_key(), [uri("spiffe://test/site/st-olav")]))
    joined.key.write_bytes(certificates.key_pem(key))
    own = Identity(state.identity)
    error = diagnose(coordinator.address, coordinator.authority.pem, own.certificate_file, own.key_file)
    assert "does not take this site's certificate" in error.message
