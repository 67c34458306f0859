"""The certificate authority: the key that signs every certificate of one federation.

A certificate names its holder in one URI that comes from our record, never from a request. The authority's key is used
only here. What a certificate says is trusted only together with the record: see ``certificate_status``.
"""

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

from wardround.errors import BadData
from wardround.local.durable import make_folder, write_file
from wardround.signing import certificates
from wardround.signing.certificates import Name

DAY_S = 86400
LEAF_S = 7 * DAY_S  # how long a certificate of a site, or of the coordinator itself, is valid
AUTHORITY_S = 3653 * DAY_S
BACKDATED_S = 300  # clocks of machines differ


class Authority:
    """The key and certificate that sign for one federation. A trust anchor at every site and here."""

    def __init__(self, key: certificates.PrivateKey, certificate: x509.Certificate, federation: str) -> None:
        self._key = key
        self.certificate = certificate
        self.federation = federation

    @classmethod
    def create(cls, folder: Path, federation: str, now_s: float) -> "Authority":
        """Make a key and its certificate, valid for ten years, and write both to ``folder``."""
        key = certificates.new_key()
        name = certificates.subject(f"Wardround authority of {federation}")  # differs from every leaf's, in any case
        builder = (
            _dated(name, name, key.public_key(), now_s, AUTHORITY_S)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        )
        certificate = builder.sign(key, hashes.SHA256())
        make_folder(folder)
        write_file(folder / "key.pem", certificates.key_pem(key))
        write_file(folder / "certificate.pem", certificates.certificate_pem(certificate), mode=0o644)
        return cls(key, certificate, federation)

    @classmethod
    def load(cls, folder: Path, federation: str) -> "Authority":
        """Read both from ``folder``.

        Raises:
            BadData: the files are not a key and its certificate.
            NotPermitted: other users may read the key; whoever has it can issue certificates.
        """
        key_path, path = folder / "key.pem", folder / "certificate.pem"
        certificates.refuse_readable(key_path)
        key = certificates.load_key(_read(key_path), str(key_path))
        certificate = certificates.load_certificate(_read(path), str(path))
        if certificate.public_key() != key.public_key():
            raise BadData(
                f"{path} is not the certificate of the key in {key_path}", hint="restore both from one backup"
            )
        return cls(key, certificate, federation)

    @property
    def pem(self) -> bytes:
        return certificates.certificate_pem(self.certificate)

    def leaf(self, name: Name, key: ec.EllipticCurvePublicKey, now_s: float, life_s: float) -> x509.Certificate:
        """A client's certificate: one URI name, and usable as a TLS client only."""
        alternative = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(name.uri)])
        return self._sign(f"{name.kind} {name.id}", alternative, ExtendedKeyUsageOID.CLIENT_AUTH, key, now_s, life_s)

    def server(self, host: str, key: ec.EllipticCurvePublicKey, now_s: float) -> x509.Certificate:
        """The coordinator's own certificate: the host name or IP address that sites connect to, beside its URI."""
        try:
            reached_as: x509.GeneralName = x509.IPAddress(ipaddress.ip_address(host))
        except ValueError:
            reached_as = x509.DNSName(host)
        uri = x509.UniformResourceIdentifier(Name(self.federation, "coordinator").uri)
        names = x509.SubjectAlternativeName([reached_as, uri])
        return self._sign("coordinator", names, ExtendedKeyUsageOID.SERVER_AUTH, key, now_s, LEAF_S)

    def _sign(
        self,
        subject: str,
        names: x509.SubjectAlternativeName,
        usage: x509.ObjectIdentifier,
        key: ec.EllipticCurvePublicKey,
        now_s: float,
        life_s: float,
    ) -> x509.Certificate:
        issuer = self._key.public_key()
        return (
            _dated(certificates.subject(subject), self.certificate.subject, key, now_s, life_s)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
            .add_extension(names, critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer), critical=False)
            .sign(self._key, hashes.SHA256())
        )


def _dated(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now_s: float, life_s: float
) -> x509.CertificateBuilder:
    now = datetime.datetime.fromtimestamp(int(now_s), datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(seconds=BACKDATED_S))
        .not_valid_after(now + datetime.timedelta(seconds=life_s))
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates, content_commitment=False, key_encipherment=False,
        data_encipherment=False, key_agreement=False, key_cert_sign=signs_certificates, crl_sign=signs_certificates,
        encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadData(f"{path}: {error.strerror}", hint="restore the state directory from a backup") from None
