"""The site's keys and certificate: made here, kept here, renewed as a pair.

    key.pem, certificate.pem            in use
    next-key.pem, next-certificate.pem  a renewal under way

A renewal writes ``next-key.pem`` before it asks, and ``next-certificate.pem`` when it has the answer; that second file
is the point of no return. Whoever opens the identity afterwards finishes the two renames. So a crash at any instant
leaves one whole pair.
"""

import datetime
import json
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from site_agent.gateway.connection.proxy import Proxy, read_proxy
from wardround.errors import BadData, NeedsPerson
from wardround.local import durable
from wardround.records.invitation import ago, stamp
from wardround.signing import certificates

CLOCK_WARNING = datetime.timedelta(minutes=5)
CLOCK_ERROR = datetime.timedelta(hours=24)


class Identity:
    """The files under ``<state>/identity``.

    Raises:
        NotPermitted: a key that others may read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.key_file = folder / "key.pem"
        self.certificate_file = folder / "certificate.pem"
        self.authority_file = folder / "authority.pem"
        self.ledger_key_file = folder / "ledger_key.pem"
        self.proxy_file = folder / "proxy"
        self._next_key = folder / "next-key.pem"
        self._next_certificate = folder / "next-certificate.pem"
        self._finish_renewal()
        for path in (self.key_file, self.ledger_key_file):
            certificates.refuse_readable(path)

    def make_keys(self) -> tuple[certificates.PrivateKey, Ed25519PrivateKey]:
        """The TLS key and the ledger key, made and durable, or the ones made before."""
        if not self.key_file.exists():
            durable.write_file(self.key_file, certificates.key_pem(certificates.new_key()))
        if not self.ledger_key_file.exists():
            durable.write_file(self.ledger_key_file, _ledger_key_pem(Ed25519PrivateKey.generate()))
        return self.key(), self.ledger_key()

    def key(self) -> certificates.PrivateKey:
        """Raises NeedsPerson: the key is gone; BadData: it is damaged."""
        return certificates.load_key(_read(self.key_file), str(self.key_file))

    def ledger_key(self) -> Ed25519PrivateKey:
        """Raises NeedsPerson: the ledger key is gone or damaged; without it nothing may leave."""
        try:
            key = certificates.private_key(self.ledger_key_file.read_bytes(), str(self.ledger_key_file))
        except (OSError, BadData):
            key = None
        if not isinstance(key, Ed25519PrivateKey):
            raise NeedsPerson(
                f"{self.ledger_key_file} is missing or no Ed25519 key: the ledger cannot be signed",
                hint="restore it from the backup of the identity folder",
            )
        return key

    def certificate(self) -> x509.Certificate:
        """Raises NeedsPerson: the certificate is gone; BadData: it is damaged."""
        return certificates.load_certificate(_read(self.certificate_file), str(self.certificate_file))

    def credentials(self) -> tuple[bytes, bytes, bytes]:
        """Authority, key and certificate, PEM, for a connection. Raises NeedsPerson: one of them is gone."""
        return _read(self.authority_file), _read(self.key_file), _read(self.certificate_file)

    def proxy(self) -> Proxy | None:
        """The HTTP proxy on the way to the coordinator; None: there is none. Raises as ``read_proxy``."""
        return read_proxy(self.proxy_file)

    def save_proxy(self, proxy: Proxy) -> None:
        durable.write_file(self.proxy_file, proxy.url.encode() + b"\n")

    def begin_renewal(self) -> bytes:
        """A signing request (DER) for a new key, which is durable before this returns."""
        key = certificates.new_key()
        durable.write_file(self._next_key, certificates.key_pem(key))
        return certificates.signing_request(key)

    def next_key(self) -> certificates.PrivateKey:
        return certificates.load_key(_read(self._next_key), str(self._next_key))

    def adopt(self, certificate: bytes) -> None:
        """Take the renewed certificate, with its key, into use."""
        durable.write_file(self._next_certificate, certificate)
        self._finish_renewal()

    def _finish_renewal(self) -> None:
        if self._next_certificate.exists():
            if self._next_key.exists():
                durable.move(self._next_key, self.key_file)
            durable.move(self._next_certificate, self.certificate_file)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise NeedsPerson(
            f"{path} cannot be read ({error.strerror}): this site has no identity without it",
            hint="restore it from the backup of the identity folder, or join again with a new invitation",
        ) from None


def check_issued(
    pem: bytes,
    key: certificates.PrivateKey,
    authority: bytes,
    wanted: certificates.Name,
    now: datetime.datetime,
) -> x509.Certificate:
    """A certificate that the coordinator issued, after everything about it was checked.

    1. it is over our own key
    2. its one URI name, and its usage, are as expected
    3. the authority signed it
    4. it is valid now

    Raises:
        BadData: one of these does not hold; it is not written anywhere.
    """
    certificate = certificates.load_certificate(pem, "the issued certificate")
    public = certificate.public_key()
    if (
        not isinstance(public, ec.EllipticCurvePublicKey)
        or public.public_numbers() != key.public_key().public_numbers()
    ):
        raise BadData("the issued certificate is over another key than this site's")  # 1
    name = certificates.client_name(certificate)
    if name != wanted:
        raise BadData(f"the issued certificate names {name.uri}, wanted {wanted.uri}")  # 2
    try:
        certificate.verify_directly_issued_by(certificates.load_certificate(authority, "the authority"))
    except (ValueError, TypeError, InvalidSignature):
        raise BadData("the issued certificate is not signed by the federation's authority") from None  # 3
    if not certificate.not_valid_before_utc <= now < certificate.not_valid_after_utc:
        raise BadData(
            f"the issued certificate is valid from {stamp(certificate.not_valid_before_utc)} to "
            f"{stamp(certificate.not_valid_after_utc)}, this machine's clock says {stamp(now)}",
            hint="set this machine's clock (`timedatectl`)",
        )  # 4
    return certificate


def check_clock(server_time_s: int, now: datetime.datetime) -> str:
    """A warning if the two clocks differ by more than 5 min, "" if not.

    Raises:
        NeedsPerson: they differ by more than 24 h.
    """
    try:
        server_time = datetime.datetime.fromtimestamp(server_time_s, datetime.UTC)
    except (ValueError, OverflowError, OSError):
        raise BadData("the coordinator's time is no time", code="MESSAGE_MALFORMED") from None
    apart = abs(server_time - now)
    comparison = f"this machine's clock says {stamp(now)}, the coordinator's {stamp(server_time)}: {ago(apart)} apart"
    if apart > CLOCK_ERROR:
        raise NeedsPerson(comparison, hint="set the wrong one right (`timedatectl`), then run the same command again")
    return comparison if apart > CLOCK_WARNING else ""


def _ledger_key_pem(key: Ed25519PrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


class Joining:
    """The request of a join under way, kept so that the same one is sent again after a crash or a lost reply."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "joining.json"

    def request(self, invitation_id: str, key: certificates.PrivateKey) -> bytes:
        """The signing request (DER) for this invitation: the one sent before, if there was one."""
        if self._path.exists():
            kept = json.loads(self._path.read_bytes())
            if kept["invitation_id"] == invitation_id:
                return bytes.fromhex(kept["signing_request"])
        request = certificates.signing_request(key)
        text = json.dumps({"invitation_id": invitation_id, "signing_request": request.hex()})
        durable.write_file(self._path, text.encode())
        return request

    def done(self) -> None:
        durable.remove(self._path)
