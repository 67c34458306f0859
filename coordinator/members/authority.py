"""The certificate authority in service: the key that signs every certificate of one federation.

    <state>/authority/certificate.pem   the roots that are trusted, the newest first
    <state>/authority/key.pem           the newest root's key, until ``authority export-root`` took it away
    <state>/authority/service.pem       the intermediate's key, its certificate, and cross-certificates of the root

Without ``service.pem`` the root signs by itself. How these files come and change: ``coordinator.members.roots``.

A certificate names its holder in one URI that comes from our record, never from a request. What a certificate says is
trusted only together with the record: see ``certificate_status``.
"""

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID
from pydantic import Field

from wardround.errors import BadData, NeedsPerson
from wardround.local.durable import make_folder, write_file
from wardround.records.invitation import stamp
from wardround.records.schema import Strict
from wardround.signing import certificates, chains
from wardround.signing.certificates import Name
from wardround.signing.chains import Chain

DAY_S = 86400
ROOT_S = 3653 * DAY_S
BACKDATED_S = 300  # clocks of machines differ


class Lifetimes(Strict):
    """[certificates] of the configuration.

    Attributes:
        life_s: how long a certificate of a site, or of the coordinator itself, is valid. Renewed at half of it.
        renewal_window_s: how long after its end a site may still renew it with the same key; 0 for never.
    """

    life_s: int = Field(default=7 * DAY_S, ge=2, le=90 * DAY_S)
    renewal_window_s: int = Field(default=30 * DAY_S, ge=0, le=365 * DAY_S)


@dataclass(frozen=True)
class Signing:
    """What signs now.

    Attributes:
        roots: those that are trusted, the newest first.
        above: what stands between a leaf and a root, and the cross-certificates of the newest root.
    """

    key: certificates.PrivateKey
    certificate: x509.Certificate
    roots: Chain
    above: Chain


class Authority:
    """Signs for one federation. ``reload`` takes other files into use; the certificates signed before stay valid."""

    def __init__(self, folder: Path, federation: str) -> None:
        """Read the files in ``folder``.

        Raises:
            BadData: they are not a key and its certificate, or not of one chain.
            NotPermitted: other users may read a key; whoever has it can issue certificates.
        """
        self.folder = folder
        self.federation = federation
        self._signing = read_signing(folder)

    @classmethod
    def create(cls, folder: Path, federation: str, now_s: float) -> "Authority":
        """Make a root, valid for ten years, and write its key and certificate to ``folder``."""
        key, certificate = new_root(federation, now_s)
        make_folder(folder)
        write_file(folder / "key.pem", certificates.key_pem(key))
        write_file(folder / "certificate.pem", certificates.certificate_pem(certificate), mode=0o644)
        return cls(folder, federation)

    def reload(self) -> None:
        """Take the files into use as they are now. Raises as the constructor; then nothing has changed."""
        self._signing = read_signing(self.folder)

    @property
    def signing(self) -> Signing:
        return self._signing

    @property
    def certificate(self) -> x509.Certificate:
        """The newest root: the trust anchor of an invitation."""
        return self._signing.roots[0]

    @property
    def pem(self) -> bytes:
        """The roots that stand behind the certificates that clients may show."""
        return chains.chain_pem(self._signing.roots)

    @property
    def announced_pem(self) -> bytes:
        """What sites are told: the trusted roots, and the cross-certificates by which they believe a new one."""
        signing = self._signing
        return chains.chain_pem((*signing.roots, *signing.above[1:]))

    def chained(self, leaf: x509.Certificate) -> bytes:
        """A leaf, PEM, with what its peers need to find a root that they trust."""
        return chains.chain_pem((leaf, *self._signing.above))

    def leaf(self, name: Name, key: ec.EllipticCurvePublicKey, now_s: float, life_s: float) -> x509.Certificate:
        """A client's certificate: one URI name, and usable as a TLS client only."""
        alternative = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(name.uri)])
        return self._sign(f"{name.kind} {name.id}", alternative, ExtendedKeyUsageOID.CLIENT_AUTH, key, now_s, life_s)

    def server(self, host: str, key: ec.EllipticCurvePublicKey, now_s: float, life_s: float) -> x509.Certificate:
        """The coordinator's own certificate: the host name or IP address that sites connect to, beside its URI."""
        try:
            reached_as: x509.GeneralName = x509.IPAddress(ipaddress.ip_address(host))
        except ValueError:
            reached_as = x509.DNSName(host)
        uri = x509.UniformResourceIdentifier(Name(self.federation, "coordinator").uri)
        names = x509.SubjectAlternativeName([reached_as, uri])
        return self._sign("coordinator", names, ExtendedKeyUsageOID.SERVER_AUTH, key, now_s, life_s)

    def _sign(
        self,
        subject: str,
        names: x509.SubjectAlternativeName,
        usage: x509.ObjectIdentifier,
        key: ec.EllipticCurvePublicKey,
        now_s: float,
        life_s: float,
    ) -> x509.Certificate:
        signing = self._signing
        left_s = signing.certificate.not_valid_after_utc.timestamp() - now_s  # a leaf ends before what signed it
        if left_s <= 0:
            raise NeedsPerson(
                f"the certificate that signs ended on {stamp(signing.certificate.not_valid_after_utc)}",
                hint="`coordinator authority request`, then sign it with the root's file and `install` it",
            )
        return (
            dated(certificates.subject(subject), signing.certificate.subject, key, now_s, min(life_s, left_s))
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(key_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
            .add_extension(names, critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signing.key.public_key()), critical=False)
            .sign(signing.key, hashes.SHA256())
        )


def new_root(federation: str, now_s: float) -> tuple[certificates.PrivateKey, x509.Certificate]:
    """A root's key, and its certificate of ten years. Below it may stand a newer root, an intermediate and leaves."""
    key = certificates.new_key()
    name = authority_name("authority", federation, key.public_key())
    return key, authority_certificate(name, key.public_key(), (key, name), now_s, ROOT_S, path_length=2)


def authority_name(kind: str, federation: str, key: ec.EllipticCurvePublicKey) -> x509.Name:
    """A subject of which no two are equal, and none equals a leaf's in any case: names decide how chains are built."""
    number = x509.SubjectKeyIdentifier.from_public_key(key).digest.hex()[:8]
    return certificates.subject(f"Wardround {kind} {number} of {federation}")


def authority_certificate(
    subject: x509.Name,
    key: ec.EllipticCurvePublicKey,
    issuer: tuple[certificates.PrivateKey, x509.Name],
    now_s: float,
    life_s: float,
    *,
    path_length: int,
) -> x509.Certificate:
    """A certificate that may sign others, ``path_length`` further authorities deep, signed by ``issuer``."""
    signing_key, issuer_name = issuer
    return (
        dated(subject, issuer_name, key, now_s, life_s)
        .add_extension(x509.BasicConstraints(ca=True, path_length=path_length), critical=True)
        .add_extension(key_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signing_key.public_key()), critical=False)
        .sign(signing_key, hashes.SHA256())
    )


def read_signing(folder: Path) -> Signing:
    """What the files in ``folder`` say signs now. Raises as ``Authority``."""
    path, service = folder / "certificate.pem", folder / "service.pem"
    roots = chains.load_chain(read(path), str(path))
    key_path = service if service.exists() else folder / "key.pem"
    certificates.refuse_readable(key_path)
    pem = read(key_path)
    above = chains.load_chain(pem, str(service)) if key_path is service else ()
    signing = Signing(certificates.load_key(pem, str(key_path)), (above or roots)[0], roots, above)
    if signing.certificate.public_key() != signing.key.public_key():
        which = path if not above else service
        raise BadData(f"{which} is not the certificate of the key in {key_path}", hint="restore both from one backup")
    if signing.above and not chains.is_issued_by(signing.certificate, roots[0]):
        raise BadData(f"{service} is not of the newest root in {path}", hint="restore both from one backup")
    return signing


def dated(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now_s: float, life_s: float
) -> x509.CertificateBuilder:
    """A certificate's beginning. It is backdated, by a tenth of its life at most."""
    now = datetime.datetime.fromtimestamp(int(now_s), datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(seconds=min(BACKDATED_S, int(life_s) // 10)))
        .not_valid_after(now + datetime.timedelta(seconds=life_s))
    )


def issued_s(certificate: x509.Certificate) -> float:
    """When a certificate of ours was issued (Unix time), but for a second or so: it is dated back as ``dated`` does."""
    begins = certificate.not_valid_before_utc.timestamp()
    return begins + min(BACKDATED_S, (certificate.not_valid_after_utc.timestamp() - begins) / 11)


def key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    """What the key of a leaf, or of an authority, is for."""
    return x509.KeyUsage(
        digital_signature=not signs_certificates, content_commitment=False, key_encipherment=False,
        data_encipherment=False, key_agreement=False, key_cert_sign=signs_certificates, crl_sign=signs_certificates,
        encipher_only=False, decipher_only=False,
    )  # fmt: skip


def read(path: Path) -> bytes:
    """A file of the authority. Raises BadData: it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadData(f"{path}: {error.strerror}", hint="restore the state directory from a backup") from None
