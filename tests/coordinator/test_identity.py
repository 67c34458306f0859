"""Who may speak: invitations, certificates, revocation. The attacks are the ones of the design's tables J and T."""

import contextlib
import dataclasses
import datetime
import hashlib
import inspect
import socket
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import sqlalchemy as sa
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from safetensors.numpy import save_file

from coordinator import servicers as service
from coordinator.calls import MAX_CALLS
from coordinator.members.authority import Authority, Lifetimes
from coordinator.members.certificate_status import Peer
from coordinator.server import ServerIdentity
from coordinator.storage import tables
from tests.coordinator.conftest import Place, on_both, refused
from tests.coordinator.fake_site import FakeSite, channel_to, delta, enrol_request
from tests.coordinator.test_rounds import SPECS
from wardround import __version__
from wardround.errors import BadData, NotPermitted, UsageProblem
from wardround.records.invitation import Invitation
from wardround.records.receipts import EMPTY_HEAD
from wardround.signing import certificates
from wardround.signing.certificates import Name
from wardround.v1 import enrolment_pb2, enrolment_pb2_grpc, federation_pb2, federation_pb2_grpc, summaries_pb2
from wardround.v1 import federation_pb2 as pb

DAY_S = 86400
DER = serialization.Encoding.DER


def bootstrap(place: Place, site: str = "alpha") -> tuple[Invitation, grpc.Channel]:
    invitation = Invitation.decode(place.invite(site))
    pems = (invitation.authority, invitation.certificate, invitation.key)
    return invitation, channel_to(place.address, *(text.encode() for text in pems))


def enrol(channel: grpc.Channel, invitation: Invitation, request: bytes = b"") -> Any:
    """One enrolment with fresh keys."""
    message = enrol_request(invitation, certificates.new_key(), Ed25519PrivateKey.generate())
    if request:
        message = signed_request(invitation, request, Ed25519PrivateKey.generate())
    return enrolment_pb2_grpc.EnrolmentStub(channel).Enrol(message, timeout=20)


def studies(channel: grpc.Channel) -> Any:
    call = federation_pb2_grpc.FederationStub(channel).Studies
    return call(pb.StudiesRequest(agent_version=__version__), timeout=20)


# Joining.


def test_a_site_gets_the_name_of_its_invitation_and_nothing_that_its_request_says(place: Place) -> None:
    invitation, channel = bootstrap(place)
    key = certificates.new_key()
    request = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "bravo")]))
        .add_extension(
            x509.SubjectAlternativeName([x509.UniformResourceIdentifier("spiffe://north/site/bravo")]), critical=False
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    message = signed_request(invitation, request.public_bytes(DER), Ed25519PrivateKey.generate())
    with channel:
        reply = enrolment_pb2_grpc.EnrolmentStub(channel).Enrol(message, timeout=20)
    leaf = x509.load_pem_x509_certificate(reply.certificate)
    assert certificates.client_name(leaf) == Name("north", "site", "alpha")
    assert not leaf.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert leaf.not_valid_after_utc - leaf.not_valid_before_utc == datetime.timedelta(days=7, minutes=5)
    assert leaf.public_key() == key.public_key()


def signed_request(invitation: Invitation, request: bytes, ledger_key: Ed25519PrivateKey) -> Any:
    proof = ledger_key.sign(b"wardround-enrol-v1\0" + invitation.id.encode() + b"\0" + hashlib.sha256(request).digest())
    return enrolment_pb2.EnrolRequest(
        invitation_id=invitation.id, agent_version=__version__, signing_request=request,
        ledger_key=ledger_key.public_key().public_bytes_raw(), proof=proof,
    )  # fmt: skip


def test_the_same_request_after_a_lost_reply_gets_the_same_certificate(place: Place) -> None:
    invitation, channel = bootstrap(place)
    message = enrol_request(invitation, certificates.new_key(), Ed25519PrivateKey.generate())
    with channel:
        stub = enrolment_pb2_grpc.EnrolmentStub(channel)
        first = stub.Enrol(message, timeout=20)
        place.restart()
        assert stub.Enrol(message, timeout=20, wait_for_ready=True).certificate == first.certificate
        place.ahead_s = DAY_S + 3500  # the bootstrap certificate itself still lives
        with pytest.raises(grpc.RpcError, match="INVITATION_USED"):
            stub.Enrol(message, timeout=20)


def test_another_request_with_a_used_invitation_is_refused_and_the_operator_learns_where_it_was_used(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    invitation, channel = bootstrap(place)
    with channel:
        stub = enrolment_pb2_grpc.EnrolmentStub(channel)
        stub.Enrol(enrol_request(invitation, certificates.new_key(), Ed25519PrivateKey.generate()), timeout=20)
        with pytest.raises(grpc.RpcError) as refused:
            stub.Enrol(enrol_request(invitation, certificates.new_key(), Ed25519PrivateKey.generate()), timeout=20)
    assert refused.value.details() == "INVITATION_USED"
    assert "the invitation for site alpha, used from 127.0.0.1, was tried again" in caplog.text


@on_both
def test_of_many_that_use_one_invitation_at_once_exactly_one_succeeds(place: Place) -> None:
    invitation, channel = bootstrap(place)

    def attempt(_: int) -> str:
        try:
            enrol(channel, invitation)
        except grpc.RpcError as error:
            return str(error.details()).partition("\n")[0]
        return "enrolled"

    with channel, ThreadPoolExecutor(MAX_CALLS) as pool:  # so many of one invitation are taken at one time
        said = list(pool.map(attempt, range(32)))
    assert sorted(set(said)) == ["INVITATION_USED", "enrolled"]
    assert said.count("enrolled") == 1


def spoiled(name: str, value: bytes) -> Callable[[Any], None]:
    return lambda message: setattr(message, name, value)


@pytest.mark.parametrize(
    ("spoil", "code"),
    [
        pytest.param(spoiled("proof", bytes(64)), "LEDGER_KEY_PROOF", id="the ledger key signed nothing"),
        pytest.param(spoiled("ledger_key", bytes(32)), "LEDGER_KEY_PROOF", id="another ledger key"),
        pytest.param(spoiled("ledger_key", b""), "MESSAGE_MALFORMED", id="no ledger key"),
        pytest.param(spoiled("signing_request", b"nonsense"), "SIGNING_REQUEST_WEAK", id="no request"),
        pytest.param(spoiled("signing_request", bytes(5000)), "MESSAGE_MALFORMED", id="a very long request"),
        pytest.param(
            lambda message: setattr(message, "invitation_id", uuid.uuid4().hex), "INVITATION_UNKNOWN", id="another's id"
        ),
        pytest.param(lambda message: setattr(message, "agent_version", "3.0.0"), "VERSION_UNSUPPORTED", id="version"),
    ],
)
def test_a_wrong_enrolment_is_refused_and_the_invitation_stays_good(
    place: Place, spoil: Callable[[Any], None], code: str
) -> None:
    invitation, channel = bootstrap(place)
    message = enrol_request(invitation, certificates.new_key(), Ed25519PrivateKey.generate())
    good = enrolment_pb2.EnrolRequest.FromString(message.SerializeToString())
    spoil(message)
    with channel:
        stub = enrolment_pb2_grpc.EnrolmentStub(channel)
        with pytest.raises(grpc.RpcError, match=code):
            stub.Enrol(message, timeout=20)
        assert stub.Enrol(good, timeout=20).site == "alpha"


@pytest.mark.parametrize("curve", [ec.SECP384R1(), ec.SECP256K1()], ids=["P-384", "secp256k1"])
def test_only_p256_keys_are_taken(place: Place, curve: ec.EllipticCurve) -> None:
    invitation, channel = bootstrap(place)
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    request = builder.sign(ec.generate_private_key(curve), hashes.SHA256()).public_bytes(DER)
    with channel, pytest.raises(grpc.RpcError, match="SIGNING_REQUEST_WEAK"):
        enrol(channel, invitation, request)


def test_an_expired_invitation_is_refused_by_its_code(place: Place) -> None:
    invitation, channel = bootstrap(place)
    place.ahead_s = 3600 + 2 * 3600
    with channel, pytest.raises(grpc.RpcError) as refused:
        enrol(channel, invitation)
    assert refused.value.details() == "INVITATION_EXPIRED"


def test_a_newer_invitation_takes_the_place_of_an_unused_one(place: Place) -> None:
    invitation, channel = bootstrap(place)
    place.invite("alpha")
    with (
        channel,
        pytest.raises(grpc.RpcError, match="INVITATION_UNKNOWN"),
    ):
        enrol(channel, invitation)


def test_an_invitation_for_another_coordinator_ends_in_the_handshake(place: Place, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = Place(tmp_path / "other")
    try:
        invitation, channel = bootstrap(other)
        channel.close()
        pems = (place.coordinator.context.authority.pem.decode(), invitation.certificate, invitation.key)
        with (
            channel_to(place.address, *(text.encode() for text in pems)) as crossed,
            pytest.raises(grpc.RpcError) as refused,
        ):
            studies(crossed)
        assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
    finally:
        other.close()


def test_a_site_that_joins_again_has_a_new_identity_and_the_old_one_is_refused(place: Place) -> None:
    first = place.join("alpha")
    first.unwatch()
    second = FakeSite(place.invite("alpha"))
    with pytest.raises(grpc.RpcError, match="CERTIFICATE_UNKNOWN"):
        studies(first.channel)
    assert studies(second.channel) is not None
    second.close()


@pytest.mark.parametrize("name", ["", "Alpha", "a b", "-a", "a" * 65, "a/b", "ä"])
def test_a_sites_name_has_its_form(place: Place, name: str) -> None:
    with pytest.raises(UsageProblem, match="is not a site's name: 1 to 64 of a-z, 0-9 and -"):
        place.invite(name)


def test_an_invitation_is_good_for_a_bounded_time(place: Place) -> None:
    for seconds in (59, 31 * DAY_S):
        with pytest.raises(UsageProblem, match="an invitation is valid for 1 min to 30 days"):
            place.ask("invite", site="alpha", expires_s=seconds)


def far_away(address: str, delay_s: float) -> tuple[str, socket.socket]:
    """A relay to ``address`` whose every piece takes ``delay_s`` each way; its address, and the listener to close."""
    host, port = address.split(":")
    listener = socket.create_server((host, 0))
    never = threading.Event()

    def pump(source: socket.socket, target: socket.socket) -> None:
        with source, target, contextlib.suppress(OSError):  # either end may leave
            while data := source.recv(65536):
                never.wait(delay_s)
                target.sendall(data)

    def accept() -> None:
        with contextlib.suppress(OSError):  # closed by the test
            while True:
                near, _ = listener.accept()
                far = socket.create_connection((host, int(port)))
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=pump, args=pair, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return f"{host}:{listener.getsockname()[1]}", listener


def test_a_site_far_away_can_join(place: Place) -> None:
    """With 300 ms there and back, a handshake takes longer than the pause between two tries to connect."""
    address, listener = far_away(place.address, 0.15)
    invitation = dataclasses.replace(Invitation.decode(place.invite("alpha")), address=address)
    with listener:
        site = FakeSite(invitation.encode())
        assert studies(site.channel) is not None
        site.close()
        listener.shutdown(socket.SHUT_RDWR)


# Who may call what.


def test_every_method_of_every_service_wears_the_check() -> None:
    """A new method without it would let anyone in who passes the handshake."""
    servicers = {
        enrolment_pb2.DESCRIPTOR.services_by_name["Enrolment"]: service.EnrolmentServicer,
        federation_pb2.DESCRIPTOR.services_by_name["Federation"]: service.FederationServicer,
        summaries_pb2.DESCRIPTOR.services_by_name["Summaries"]: service.SummariesServicer,
    }
    methods = {}
    for described, servicer in servicers.items():
        for method in described.methods:
            function = inspect.getattr_static(servicer, method.name)
            assert method.name in vars(servicer), f"{method.name} is not implemented"
            methods[method.name] = getattr(function, "permitted_kind", None)
    assert methods.pop("Enrol") == "invitation"
    assert methods.pop("Renew") == ("site", "renewal")
    assert methods
    assert set(methods.values()) == {"site"}


def test_a_bootstrap_identity_may_call_nothing_but_enrol_and_a_site_may_not_enrol(place: Place) -> None:
    invitation, channel = bootstrap(place, "bravo")
    stub = federation_pb2_grpc.FederationStub(channel)
    renewal = enrolment_pb2.RenewRequest(agent_version=__version__)
    with channel:
        for call in (
            lambda: stub.Studies(pb.StudiesRequest(), timeout=20),
            lambda: stub.Declare(pb.DeclareRequest(), timeout=20),
            lambda: list(stub.Watch(pb.WatchRequest(), timeout=20)),
            lambda: list(stub.Download(pb.DownloadRequest(), timeout=20)),
            lambda: list(stub.Upload(iter([pb.UploadRequest()]), timeout=20)),
            lambda: enrolment_pb2_grpc.EnrolmentStub(channel).Renew(renewal, timeout=20),
        ):
            with pytest.raises(grpc.RpcError, match="CALL_NOT_ALLOWED") as refused:
                call()
            assert refused.value.code() == grpc.StatusCode.PERMISSION_DENIED
    alpha = place.join("alpha")
    with pytest.raises(grpc.RpcError, match="CALL_NOT_ALLOWED"):
        alpha.enrolment.Enrol(enrol_request(invitation, alpha.key, alpha.ledger.key), timeout=20)


@pytest.mark.parametrize("version", ["2.0.0", "0.3.0", "", "latest"])
def test_versions_further_apart_than_one_minor_refuse_each_other(place: Place, version: str) -> None:
    alpha = place.join("alpha")
    with pytest.raises(grpc.RpcError, match="VERSION_UNSUPPORTED"):
        alpha.federation.Studies(pb.StudiesRequest(agent_version=version), timeout=20)
    with pytest.raises(grpc.RpcError, match="VERSION_UNSUPPORTED"):
        list(alpha.federation.Watch(pb.WatchRequest(agent_version=version), timeout=20))


def test_a_newer_agents_status_and_code_are_carried_as_unknown(place: Place) -> None:
    """One minor version further on: it declares what this version has no names for, and its round goes on at once."""
    alpha, bravo = place.begin(sites=["alpha", "bravo"], quorum=1)
    alpha.federation.Studies(pb.StudiesRequest(agent_version="0.2.0"), timeout=20)
    assignment = alpha.next_assignment()
    alpha.declare("trial", 77)
    offer = alpha.offer("trial")
    declined = pb.DeclareRequest(
        study="trial", revision=offer.revision, digest=offer.digest, status=pb.DECLINED, round=assignment.round,
        attempt=assignment.attempt, code=9999,
    )  # fmt: skip
    alpha.federation.Declare(declined, timeout=20)
    status = place.until(lambda status: status["sites"]["alpha"]["state"] == "declined")
    assert status["sites"]["alpha"]["code"] == "DECLINED_UNKNOWN"
    bravo.answer(bravo.next_assignment())
    place.until(lambda status: status["round"] == 2)


# Certificates.


def forged(
    authority: Authority,
    names: list[x509.GeneralName],
    *,
    usage: x509.ObjectIdentifier | None = ExtendedKeyUsageOID.CLIENT_AUTH,
    days: tuple[float, float] = (-1, 1),
    subject: str = "anyone",
) -> tuple[bytes, bytes]:
    """A certificate that the authority's key signed, and its key: what a thief of that key could make."""
    key = certificates.new_key()
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(certificates.subject(subject))
        .issuer_name(authority.certificate.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + datetime.timedelta(days=days[0]))
        .not_valid_after(now + datetime.timedelta(days=days[1]))
    )
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    if usage is not None:
        builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
    return certificates.certificate_pem(builder.sign(authority.signing.key, hashes.SHA256())), certificates.key_pem(key)


def uri(text: str) -> x509.GeneralName:
    return x509.UniformResourceIdentifier._init_without_validation(text)


ALPHA = uri("spiffe://north/site/alpha")


@pytest.mark.parametrize(
    ("names", "usage", "code"),
    [
        pytest.param([ALPHA], ExtendedKeyUsageOID.CLIENT_AUTH, "CERTIFICATE_UNKNOWN", id="not on record"),
        pytest.param([ALPHA], None, "CERTIFICATE_PROFILE", id="no usage"),
        pytest.param([], ExtendedKeyUsageOID.CLIENT_AUTH, "CERTIFICATE_PROFILE", id="a site's name as CN alone"),
        pytest.param([ALPHA, uri("spiffe://north/site/bravo")], None, "CERTIFICATE_PROFILE", id="two names"),
        pytest.param([ALPHA, x509.DNSName("alpha")], None, "CERTIFICATE_PROFILE", id="a DNS name beside it"),
        pytest.param(
            [uri("spiffe://south/site/alpha")], ExtendedKeyUsageOID.CLIENT_AUTH, "CERTIFICATE_PROFILE", id="federation"
        ),
        pytest.param(
            [uri("spiffe://north/site/%61lpha")], ExtendedKeyUsageOID.CLIENT_AUTH, "CERTIFICATE_PROFILE", id="escaped"
        ),
        pytest.param(
            [uri("spiffe://north/coordinator")], ExtendedKeyUsageOID.CLIENT_AUTH, "CERTIFICATE_PROFILE", id="server"
        ),
    ],
)
def test_a_certificate_that_passes_the_handshake_is_still_judged(
    place: Place, names: list[x509.GeneralName], usage: x509.ObjectIdentifier | None, code: str
) -> None:
    place.join("alpha")
    authority = place.coordinator.context.authority
    certificate, key = forged(authority, names, usage=usage, subject="site alpha")
    with channel_to(place.address, authority.pem, certificate, key) as channel:
        with pytest.raises(grpc.RpcError, match=code) as refused:
            studies(channel)
        assert refused.value.code() == grpc.StatusCode.PERMISSION_DENIED


@pytest.mark.parametrize(
    ("days", "usage"),
    [
        pytest.param((-2, -1), ExtendedKeyUsageOID.CLIENT_AUTH, id="expired"),
        pytest.param((1, 2), ExtendedKeyUsageOID.CLIENT_AUTH, id="not yet good"),
        pytest.param((-1, 1), ExtendedKeyUsageOID.SERVER_AUTH, id="a server's"),
    ],
)
def test_a_certificate_that_is_not_good_ends_in_the_handshake(
    place: Place, days: tuple[float, float], usage: x509.ObjectIdentifier
) -> None:
    authority = place.coordinator.context.authority
    certificate, key = forged(authority, [ALPHA], usage=usage, days=days)
    with channel_to(place.address, authority.pem, certificate, key) as channel, pytest.raises(grpc.RpcError) as refused:
        studies(channel)
    assert refused.value.code() == grpc.StatusCode.UNAVAILABLE


def test_without_a_client_certificate_or_without_tls_there_is_no_connection(place: Place) -> None:
    authority = place.coordinator.context.authority.pem
    nobody = grpc.secure_channel(place.address, grpc.ssl_channel_credentials(authority))
    plain = grpc.insecure_channel(place.address)
    for channel in (nobody, plain):
        with channel, pytest.raises(grpc.RpcError) as refused:
            studies(channel)
        assert refused.value.code() == grpc.StatusCode.UNAVAILABLE


def test_a_certificate_that_expires_while_the_channel_is_open_is_refused_on_the_next_call(place: Place) -> None:
    alpha = place.join("alpha")
    studies(alpha.channel)  # it is open; a handshake after that time fails at once, by the server's own new certificate
    place.ahead_s = 7 * DAY_S + 1
    with pytest.raises(grpc.RpcError, match="CERTIFICATE_EXPIRED"):
        studies(alpha.channel)


def test_renewal_gives_a_new_key_a_new_certificate_and_the_old_one_lives_to_its_end(place: Place) -> None:
    alpha = place.join("alpha")
    key = certificates.new_key()
    request = enrolment_pb2.RenewRequest(agent_version=__version__, signing_request=certificates.signing_request(key))
    reply = alpha.enrolment.Renew(request, timeout=20)
    leaf = x509.load_pem_x509_certificate(reply.certificate)
    assert leaf.public_key() == key.public_key()
    assert certificates.client_name(leaf).id == "alpha"
    half = leaf.not_valid_before_utc + (leaf.not_valid_after_utc - leaf.not_valid_before_utc) / 2
    assert reply.renew_after_s == int(half.timestamp())
    with alpha.open_channel(reply.certificate, key) as renewed:
        studies(renewed)
        studies(alpha.channel)
        place.restart()
        federation_pb2_grpc.FederationStub(renewed).Studies(
            pb.StudiesRequest(agent_version=__version__), timeout=20, wait_for_ready=True
        )


def test_renewal_with_the_old_key_or_none_is_refused(place: Place) -> None:
    alpha = place.join("alpha")
    for request in (certificates.signing_request(alpha.key), b""):
        with pytest.raises(grpc.RpcError, match="SIGNING_REQUEST_WEAK"):
            alpha.enrolment.Renew(
                enrolment_pb2.RenewRequest(agent_version=__version__, signing_request=request), timeout=20
            )


def test_renewing_without_end_keeps_a_bounded_number_of_certificates(place: Place) -> None:
    alpha = place.join("alpha")
    for _ in range(15):
        renewed(alpha.channel)
    with refused("TOO_BUSY\nsite `alpha` has 16 valid certificates, and this one was"):
        renewed(alpha.channel)
    studies(alpha.channel)
    place.ahead_s = 2 * 3600  # those that nobody used never arrived
    renewed(alpha.channel)
    with place.coordinator.context.store.read() as session:
        assert len(session.scalars(sa.select(tables.Certificate).filter_by(site="alpha")).all()) == 2
    assert sites_row(place)["certificate_fork_since"] is None


def renewed(channel: grpc.Channel) -> tuple[bytes, certificates.PrivateKey]:
    """A certificate for a new key, asked for with the one of ``channel``."""
    key = certificates.new_key()
    request = enrolment_pb2.RenewRequest(agent_version=__version__, signing_request=certificates.signing_request(key))
    return enrolment_pb2_grpc.EnrolmentStub(channel).Renew(request, timeout=20).certificate, key


def sites_row(place: Place) -> dict[str, Any]:
    return next(row for row in place.ask("sites")["sites"] if row["site"] == "alpha")


class Holder:
    """Whoever holds a certificate of alpha and its key, at a coordinator whose days pass; without the line between."""

    def __init__(self, place: Place, certificate: bytes) -> None:
        self._context = place.coordinator.context
        self._certificate = x509.load_pem_x509_certificate(certificate)

    def call(self) -> Peer:
        peer = self._context.certificate_status.admit(self._certificate, "10.0.0.7")
        self._context.enrolment.note_use(peer)
        return peer

    def renew(self, place: Place) -> "Holder":
        request = certificates.signing_request(certificates.new_key())
        return Holder(place, self._context.enrolment.renew(self.call(), request).certificate)


def test_a_site_that_renews_and_changes_over_is_one_line(place: Place) -> None:
    """Also where a reply was lost, and where calls still begin with the older certificate for a while."""
    alpha = FakeSite(place.invite("alpha"))  # which makes no call of its own while the days pass
    alpha.close()
    site = Holder(place, alpha.reply.certificate)
    for _ in range(5):
        place.ahead_s += 3.5 * DAY_S
        site.renew(place)  # and the reply never came
        place.ahead_s += 60
        newer = site.renew(place)
        newer.call()
        place.ahead_s += 300
        site.call()
        site = newer
    assert sites_row(place)["certificate_fork_since"] is None


def test_an_older_certificate_that_goes_on_being_used_is_said(place: Place) -> None:
    """A copy of the machine, or a thief who never renewed."""
    copied = Holder(place, place.join("alpha").reply.certificate)
    place.ahead_s = 3.5 * DAY_S
    site = copied.renew(place)
    site.call()
    place.ahead_s += 599
    copied.call()
    assert sites_row(place)["certificate_fork_since"] is None
    place.ahead_s += 2
    copied.call()
    assert sites_row(place)["certificate_fork_since"] is not None
    place.ahead_s = 0  # TLS goes by the true time
    place.restart()
    assert sites_row(place)["certificate_fork_since"] is not None
    again = FakeSite(place.invite("alpha"))  # a new identity begins a new line
    assert sites_row(place)["certificate_fork_since"] is None
    again.close()


# Revocation.


def test_a_revoked_site_is_refused_on_its_next_call_and_its_stream_ends(place: Place) -> None:
    alpha = place.join("alpha")
    place.create()
    alpha.next_event("offer")
    place.ask("revoke", site="alpha")
    assert alpha.stream_error() is not None
    with pytest.raises(grpc.RpcError, match="SITE_REVOKED") as refused:
        studies(alpha.channel)
    assert refused.value.code() == grpc.StatusCode.PERMISSION_DENIED
    with alpha.open_channel() as again, pytest.raises(grpc.RpcError, match="SITE_REVOKED"):
        studies(again)


def test_a_site_revoked_in_the_middle_of_an_upload_leaves_nothing_and_the_round_goes_on(place: Place) -> None:
    alpha, bravo = place.begin(sites=["alpha", "bravo"], quorum=1)
    update = delta("alpha", 1, SPECS)
    opening = alpha.opening(alpha.next_assignment(), update)
    sent, go_on = threading.Event(), threading.Event()

    def requests() -> Any:
        yield pb.UploadRequest(open=opening)
        sent.set()
        go_on.wait(20)
        yield pb.UploadRequest(commit=pb.UploadCommit())

    call = alpha.federation.Upload(requests(), timeout=20)
    assert next(iter(call)).offset == 0
    place.ask("revoke", site="alpha")
    with pytest.raises(grpc.RpcError):
        next(iter(call))
    go_on.set()
    assert list((place.state.blobs / "uploads").iterdir()) == []
    bravo.answer(bravo.next_assignment())
    status = place.until(lambda status: status["round"] == 2)
    assert status["sites"]["alpha"]["state"] == "absent"


def test_revoking_withdraws_an_unused_invitation_and_an_unknown_site_is_an_error(place: Place) -> None:
    invitation, channel = bootstrap(place)
    assert place.ask("revoke", site="alpha") == {"site": "alpha", "was_enrolled": False}
    with channel, pytest.raises(grpc.RpcError, match="INVITATION_UNKNOWN"):
        enrol(channel, invitation)
    with pytest.raises(BadData, match="no site `nobody` is known here"):
        place.ask("revoke", site="nobody")


def test_a_revoked_site_can_be_invited_again(place: Place) -> None:
    place.join("alpha")
    place.ask("revoke", site="alpha")
    again = FakeSite(place.invite("alpha"))
    assert studies(again.channel) is not None
    again.close()


# The coordinator's own certificate.


def test_the_servers_certificate_is_made_anew_at_half_of_its_life(place: Place) -> None:
    now = [datetime.datetime.now(datetime.UTC).timestamp()]
    served = ServerIdentity(place.coordinator.context.authority, "fed.example.org", lambda: now[0])
    assert served.renewed() is not None
    assert served.renewed() is None
    now[0] += 3.4 * DAY_S
    assert served.renewed() is None
    now[0] += 0.2 * DAY_S
    assert served.renewed() is not None


def test_the_servers_certificate_names_what_sites_dial(place: Place) -> None:
    authority, key = place.coordinator.context.authority, certificates.new_key().public_key()
    for host, kind in (("10.0.0.7", x509.IPAddress), ("fed.example.org", x509.DNSName), ("::1", x509.IPAddress)):
        names = authority.server(host, key, 0, 60).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert [str(value) for value in names.get_values_for_type(kind)] == [host]


# The way back of a site that was away for longer than its certificate.


def expired(place: Place, window_s: int) -> Holder:
    """Alpha's renewal certificate, when its certificate ended ten days ago."""
    enrolment = place.coordinator.context.enrolment
    enrolment.lifetimes = Lifetimes(renewal_window_s=window_s)
    alpha = place.join("alpha")
    Holder(place, alpha.reply.certificate).call()
    place.ahead_s = 17 * DAY_S
    return Holder(place, alpha.reply.renewal_certificate)


def test_a_renewal_certificate_renews_a_certificate_that_has_ended_and_does_nothing_else(place: Place) -> None:
    late = expired(place, 30 * DAY_S)
    newer = late.renew(place)
    assert newer.call().site == "alpha"
    assert late.call().name.kind == "renewal"  # which no method but Renew lets in
    place.ahead_s = 0  # TLS goes by the true time
    alpha = place.sites["alpha"]
    with alpha.open_channel(alpha.reply.renewal_certificate) as channel:
        for call in (lambda: studies(channel), lambda: federation_pb2_grpc.FederationStub(channel).Declare(
            pb.DeclareRequest(), timeout=20
        )):  # fmt: skip
            with pytest.raises(grpc.RpcError, match="CALL_NOT_ALLOWED"):
                call()
        assert renewed(channel)


def test_an_older_copy_of_a_site_cannot_renew_after_its_certificate_ended(place: Place) -> None:
    late = expired(place, 30 * DAY_S)
    late.renew(place).call()
    with pytest.raises(NotPermitted, match=r"ended on .* and can no longer be renewed") as refused:
        late.renew(place)
    assert refused.value.code == "CERTIFICATE_EXPIRED"
    assert "`coordinator invite alpha`" in refused.value.hint


@pytest.mark.parametrize(("window_s", "said"), [(0, "was valid until"), (9 * DAY_S, "was valid until")])
def test_after_the_window_the_old_key_renews_nothing(place: Place, window_s: int, said: str) -> None:
    alpha = place.join("alpha")
    if window_s == 0:
        place.coordinator.context.enrolment.lifetimes = Lifetimes(renewal_window_s=0)
        assert FakeSite(place.invite("bravo")).reply.renewal_certificate == b""
        late = Holder(place, alpha.reply.renewal_certificate)
        place.ahead_s = 7.1 * DAY_S  # it was made for 30 days, and the operator chose otherwise since
        with pytest.raises(NotPermitted, match="can no longer be renewed"):
            late.renew(place)
        place.ahead_s = 38 * DAY_S
    else:
        late = expired(place, window_s)
    with pytest.raises(NotPermitted, match=said):
        late.renew(place)


def test_a_revoked_site_cannot_renew_in_the_window(place: Place) -> None:
    late = expired(place, 30 * DAY_S)
    place.ask("revoke", site="alpha")
    with pytest.raises(NotPermitted, match="site `alpha` was revoked"):
        late.renew(place)


def test_a_site_that_joins_again_with_its_ledger_key_goes_on_with_its_ledger_and_its_receipts(place: Place) -> None:
    (alpha,) = place.begin(sites=["alpha"], quorum=1)
    alpha.answer(alpha.next_assignment())
    place.ask("revoke", site="alpha")
    place.until(lambda status: status["state"] == "paused")  # for want of a site
    again = FakeSite(place.invite("alpha"), alpha.ledger)
    again.receipts = alpha.receipts
    again.watch()
    again.declare("trial")
    place.ask("start", study="trial")
    while (assignment := again.next_assignment()).HasField("stop"):
        assert assignment.stop.reason == pb.Stop.PAUSED  # where it was shown the study before the start
    second = again.answer(assignment)
    assert second.decision == "accepted"  # its ledger goes on from the head that was countersigned before
    assert second.previous != EMPTY_HEAD
    (row,) = place.ask("sites")["sites"]
    assert row["state"] == "ready"
    again.close()


# Revocation, by the clock.


def test_a_revocation_ends_every_live_stream_within_a_second(place: Place) -> None:
    """A watch, a download that its site does not read on, and an upload between two chunks."""
    alpha = place.join("alpha")
    save_file({"layer.weight": np.ones((8, 1024, 256), "<f4")}, place.initial)
    name = place.create(sites=["alpha"], quorum=1)
    alpha.declare(name)
    place.ask("start", study=name)
    assignment = alpha.next_assignment()
    download = alpha.federation.Download(
        pb.DownloadRequest(study=name, revision=assignment.revision, model=assignment.base), timeout=60
    )
    assert next(download).HasField("manifest")
    update = delta("alpha", 1, alpha.specs(name))
    opening = alpha.opening(assignment, update)
    sent, go_on = threading.Event(), threading.Event()

    def requests() -> Any:
        yield pb.UploadRequest(open=opening)
        sent.set()
        go_on.wait(20)

    upload = alpha.federation.Upload(requests(), timeout=60)
    assert next(upload).offset == 0
    ended: dict[str, float] = {}

    def read(what: str, stream: Any) -> None:
        with contextlib.suppress(grpc.RpcError):
            for _ in stream:
                pass
        ended[what] = time.monotonic()

    began = time.monotonic()
    place.ask("revoke", site="alpha")
    assert alpha.stream_error() is not None
    ended["watch"] = time.monotonic()
    readers = [threading.Thread(target=read, args=item) for item in (("download", download), ("upload", upload))]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(20)
    go_on.set()
    assert {what for what, at in ended.items() if at - began < 1} == {"watch", "download", "upload"}
    for stream in (download, upload):
        assert stream.code() in (grpc.StatusCode.CANCELLED, grpc.StatusCode.PERMISSION_DENIED)
