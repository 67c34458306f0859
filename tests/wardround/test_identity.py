"""Who a certificate says its holder is, and everything that is nobody's."""

import datetime
from collections.abc import Callable

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID

from wardround.errors import BadData
from wardround.signing import certificates
from wardround.signing.certificates import Name

KEY = certificates.new_key()
SITE = "spiffe://heart.example/site/st-olav"
CLIENT, SERVER = ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH


def certificate(
    names: list[x509.GeneralName] | None,
    usages: list[x509.ObjectIdentifier] | None = [CLIENT],  # noqa: B006
    common_name: str = "people read this",
) -> x509.Certificate:
    now = datetime.datetime(2025, 1, 1, tzinfo=datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(certificates.subject(common_name))
        .issuer_name(certificates.subject("authority"))
        .public_key(KEY.public_key())
        .serial_number(1)
        .not_valid_before(now)
        .not_valid_after(now + datetime.timedelta(days=7))
    )
    if names is not None:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    if usages is not None:
        builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
    return builder.sign(KEY, hashes.SHA256())


def uri(text: str) -> x509.GeneralName:
    return x509.UniformResourceIdentifier(text)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        pytest.param(SITE, Name("heart.example", "site", "st-olav"), id="site"),
        pytest.param("spiffe://f/invitation/3f2a", Name("f", "invitation", "3f2a"), id="invitation"),
    ],
)
def test_one_uri_name_and_the_clients_usage_say_who_it_is(text: str, name: Name) -> None:
    assert certificates.client_name(certificate([uri(text)])) == name
    assert name.uri == text


def test_the_coordinators_name_has_no_id() -> None:
    assert Name("f", "coordinator").uri == "spiffe://f/coordinator"


@pytest.mark.parametrize(
    "made",
    [
        pytest.param(lambda: certificate(None), id="no name"),
        pytest.param(lambda: certificate(None, common_name="st-olav"), id="no name but a common name"),
        pytest.param(lambda: certificate([uri(SITE)], None), id="no usage"),
        pytest.param(lambda: certificate([uri(SITE)], [SERVER]), id="server usage"),
        pytest.param(lambda: certificate([uri(SITE)], [CLIENT, SERVER]), id="both usages"),
        pytest.param(lambda: certificate([uri(SITE)], [ExtendedKeyUsageOID.ANY_EXTENDED_KEY_USAGE]), id="any usage"),
        pytest.param(lambda: certificate([uri(SITE), uri("spiffe://heart.example/site/charite")]), id="two URI names"),
        pytest.param(lambda: certificate([uri(SITE), x509.DNSName("st-olav")]), id="a DNS name beside"),
        pytest.param(lambda: certificate([x509.DNSName("st-olav")]), id="a DNS name alone"),
        pytest.param(lambda: certificate([x509.RFC822Name("a@example.org")]), id="an address"),
        pytest.param(lambda: certificate([uri("spiffe://f/coordinator")]), id="the coordinator's own"),
        pytest.param(lambda: certificate([uri("spiffe://f/site/st%2Dolav")]), id="percent-encoded"),
        pytest.param(lambda: certificate([uri("spiffe://f/site/ST-OLAV")]), id="capitals"),
        pytest.param(lambda: certificate([uri("spiffe://f/site/xn--st-lav-3na/x")]), id="a longer path"),
        pytest.param(lambda: certificate([uri("spiffe://f/site/")]), id="no site"),
        pytest.param(lambda: certificate([uri("spiffe://f/site/" + "a" * 65)]), id="65 letters"),
        pytest.param(lambda: certificate([uri("spiffe://f:1/site/a")]), id="a port"),
        pytest.param(lambda: certificate([uri("https://f/site/a")]), id="another scheme"),
        pytest.param(lambda: certificate([uri(SITE + "\n")]), id="newline"),
        pytest.param(lambda: certificate([uri(SITE + "\0")]), id="NUL"),
    ],
)
def test_a_certificate_of_another_profile_is_nobodys(made: Callable[[], x509.Certificate]) -> None:
    with pytest.raises(BadData) as caught:
        certificates.client_name(made())
    assert caught.value.code == "CERTIFICATE_PROFILE"
    assert caught.value.message in (
        "the certificate has no URI name or no usage",
        "the certificate has other names or usages than one URI, client",
        "the certificate's URI name is not a site's, an invitation's or a renewal's",
    )


def test_a_certificate_with_broken_extensions_is_nobodys() -> None:
    """The DER of one extension id is changed into that of the other, so that one stands twice; and into nonsense."""
    der = certificate([uri(SITE)]).public_bytes(serialization.Encoding.DER)
    alternative, usage = bytes.fromhex("0603551d11"), bytes.fromhex("0603551d25")
    assert der.count(alternative) == der.count(usage) == 1
    for damaged in (der.replace(usage, alternative), der.replace(b"spiffe", b"\xff\xff\xff\xff\xff\xff")):
        with pytest.raises(BadData) as caught:
            certificates.client_name(x509.load_der_x509_certificate(damaged))
        assert caught.value.code == "CERTIFICATE_PROFILE"


def test_a_signing_request_carries_the_key_and_no_name() -> None:
    request = certificates.signing_request(KEY)
    assert certificates.requested_key(request) == KEY.public_key()
    assert len(x509.load_der_x509_csr(request).subject) == 0


def request_by(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | ed25519.Ed25519PrivateKey) -> bytes:
    digest = None if isinstance(key, ed25519.Ed25519PrivateKey) else hashes.SHA256()
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    return builder.sign(key, digest).public_bytes(serialization.Encoding.DER)


def test_a_signing_request_that_is_weak_or_not_one_is_refused() -> None:
    good = certificates.signing_request(KEY)
    requests = {
        "not a certificate signing request": [b"", b"x", good[:-1], good + b"x"],
        "the signing request is not a P-256 key signed by itself": [
            request_by(rsa.generate_private_key(65537, 2048)),
            request_by(ec.generate_private_key(ec.SECP384R1())),
            request_by(ed25519.Ed25519PrivateKey.generate()),
            good[:-4] + bytes(4),
        ],
    }
    for said, bad in requests.items():
        for request in bad:
            with pytest.raises(BadData) as caught:
                certificates.requested_key(request)
            assert caught.value.message == said
            assert caught.value.code == "SIGNING_REQUEST_WEAK"


def test_a_key_is_read_back_and_another_kind_is_refused() -> None:
    pem = certificates.key_pem(KEY)
    assert certificates.load_key(pem, "key.pem").public_key() == KEY.public_key()
    for bad in (b"", pem[:100], certificates.certificate_pem(certificate(None))):
        with pytest.raises(BadData, match=r"^key.pem: not a private key in PEM$"):
            certificates.load_key(bad, "key.pem")
    locked = KEY.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"x")
    )
    with pytest.raises(BadData, match=r"^key.pem: not a private key in PEM$"):
        certificates.load_key(locked, "key.pem")
    other = ec.generate_private_key(ec.SECP384R1())
    with pytest.raises(BadData, match=r"^key.pem: not a P-256 key$"):
        certificates.load_key(certificates.key_pem(other), "key.pem")


def test_a_certificate_is_read_back_with_its_fingerprint_and_end() -> None:
    made = certificate([uri(SITE)])
    read = certificates.load_certificate(certificates.certificate_pem(made), "certificate.pem")
    assert certificates.fingerprint(read) == made.fingerprint(hashes.SHA256()).hex()
    assert certificates.not_after(read) == datetime.datetime(2025, 1, 8, tzinfo=datetime.UTC)
    with pytest.raises(BadData, match=r"^certificate.pem: not a certificate in PEM$"):
        certificates.load_certificate(b"x", "certificate.pem")


@pytest.mark.parametrize("name", ["a", "heart.example", "a-b.c"])
def test_a_federations_name(name: str) -> None:
    assert certificates.FEDERATION_NAME.fullmatch(name)


@pytest.mark.parametrize("name", ["", ".a", "a-", "A", "a/b", "a" * 64, "a\n"])
def test_what_is_no_federations_name(name: str) -> None:
    assert not certificates.FEDERATION_NAME.fullmatch(name)
