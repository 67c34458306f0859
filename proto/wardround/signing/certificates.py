"""Certificates: who a peer is, in one URI name, and the few X.509 acts that both sides need.

    spiffe://FEDERATION/site/SITE            a hospital's agent
    spiffe://FEDERATION/invitation/ID        a bootstrap certificate: may call Enrol and nothing else
    spiffe://FEDERATION/renewal/SERIAL       a site's, over the key of the certificate SERIAL: may call Renew alone
    spiffe://FEDERATION/coordinator          the coordinator's server certificate (beside its DNS or IP name)

Only the URI name counts. A certificate with two of them, or with another usage, is nobody's.
"""

import datetime
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cryptography import x509
from cryptography.exceptions import InternalError, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from wardround.errors import BadData, NotPermitted
from wardround.local.directory import quoted

FEDERATION_NAME = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,61}[a-z0-9])?")
_KINDS: dict[str, Literal["site", "invitation", "renewal"]] = {
    "site": "site", "invitation": "invitation", "renewal": "renewal",
}  # fmt: skip
_URI = re.compile(r"spiffe://([a-z0-9.-]{1,63})/(?:(site|invitation|renewal)/([a-z0-9-]{1,64})|(coordinator))")

PrivateKey = ec.EllipticCurvePrivateKey
MAX_PEM = 16 * 1024  # bytes of a key or a chain of certificates; ours are below 4 KiB


@dataclass(frozen=True)
class Name:
    """What a certificate's one URI name says. ``id``: site, invitation or serial; "" for the coordinator."""

    federation: str
    kind: Literal["site", "invitation", "renewal", "coordinator"]
    id: str = ""

    @property
    def uri(self) -> str:
        return f"spiffe://{self.federation}/{self.kind}" + (f"/{self.id}" if self.id else "")


def new_key() -> PrivateKey:
    """A P-256 key, made here; it never leaves this machine."""
    return ec.generate_private_key(ec.SECP256R1())


def key_pem(key: PrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def private_key(pem: bytes, source: str) -> PrivateKeyTypes:
    """A private key of any kind.

    Raises:
        BadData: not one, or of a kind that cannot be used here.
    """
    if len(pem) > MAX_PEM:
        raise BadData(f"{source}: {len(pem)} bytes are no private key in PEM")
    try:
        return serialization.load_pem_private_key(pem, None)
    except (ValueError, TypeError, UnsupportedAlgorithm, InternalError):
        raise BadData(f"{source}: not a private key in PEM") from None


def refuse_readable(path: Path) -> None:
    """Refuse a private key's file that the group or others may use; a missing one is for whoever reads it.

    Raises:
        NotPermitted: they may.
    """
    if path.exists() and path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise NotPermitted(
            f"{path} can be read by others than its owner", hint=f"`chmod 600 {quoted(path)}`, and ask who did"
        )


def load_key(pem: bytes, source: str) -> PrivateKey:
    """Raises BadData: not a P-256 private key in PEM."""
    key = private_key(pem, source)
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
        raise BadData(f"{source}: not a P-256 key")
    return key


def certificate_pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def load_certificate(pem: bytes, source: str) -> x509.Certificate:
    """Raises BadData: not a certificate in PEM."""
    if len(pem) > MAX_PEM:
        raise BadData(f"{source}: {len(pem)} bytes are no certificate in PEM")
    try:
        certificate = x509.load_pem_x509_certificate(pem)
        certificate.public_key()  # which is read, as the rest, only when it is asked for
        _ = certificate.not_valid_after_utc, certificate.not_valid_before_utc, certificate.serial_number
    except (ValueError, TypeError, UnsupportedAlgorithm, InternalError, x509.InvalidVersion):
        raise BadData(f"{source}: not a certificate in PEM") from None
    return certificate


def fingerprint(certificate: x509.Certificate) -> str:
    """SHA-256 of the certificate, hex: what two people read to each other."""
    return certificate.fingerprint(hashes.SHA256()).hex()


def signing_request(key: PrivateKey) -> bytes:
    """A PKCS#10 request (DER) that carries the key and no name: the coordinator's record gives the name."""
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.DER)


def requested_key(request: bytes) -> ec.EllipticCurvePublicKey:
    """The public key of a signing request.

    Raises:
        BadData: not a request, not P-256, or not signed by its own key.
    """
    try:
        parsed = x509.load_der_x509_csr(request)
        key = parsed.public_key()
        valid = parsed.is_signature_valid
    except (ValueError, TypeError, UnsupportedAlgorithm, InternalError, x509.InvalidVersion):
        raise BadData("not a certificate signing request", code="SIGNING_REQUEST_WEAK") from None
    if not valid or not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise BadData("the signing request is not a P-256 key signed by itself", code="SIGNING_REQUEST_WEAK")
    return key


def client_name(certificate: x509.Certificate) -> Name:
    """Who a client certificate says its holder is. Does not check the signature (TLS has) nor the dates.

    Raises:
        BadData: not exactly one URI name of our form, another name beside it, or a usage other than client.
    """
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        usages = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except (x509.ExtensionNotFound, x509.DuplicateExtension, x509.UnsupportedGeneralNameType, ValueError):
        raise BadData("the certificate has no URI name or no usage", code="CERTIFICATE_PROFILE") from None
    if len(names) != 1 or list(usages) != [ExtendedKeyUsageOID.CLIENT_AUTH]:
        raise BadData("the certificate has other names or usages than one URI, client", code="CERTIFICATE_PROFILE")
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    match = _URI.fullmatch(uris[0]) if uris else None
    if not match or match[2] is None:
        raise BadData(
            "the certificate's URI name is not a site's, an invitation's or a renewal's", code="CERTIFICATE_PROFILE"
        )
    return Name(match[1], _KINDS[match[2]], match[3])


def not_after(certificate: x509.Certificate) -> datetime.datetime:
    return certificate.not_valid_after_utc


def subject(text: str) -> x509.Name:
    """A subject for people to read; no program looks at it."""
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])
