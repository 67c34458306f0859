"""The site's keys and certificate: made here, kept here, renewed as a pair.

    key.pem, certificate.pem            in use
    renewal.pem                         over the same key: renews the certificate, also after its end
    next-key.pem, next-certificate.pem  a renewal under way, with next-renewal.pem

A renewal writes ``next-key.pem`` before it asks, and ``next-certificate.pem`` when it has the answer; that file comes
last and is the point of no return. Whoever opens the identity afterwards finishes the renames. So a crash at any
instant leaves one whole pair.
"""

import datetime
import json
from pathlib import Path
from typing import TYPE_CHECKING

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from site_agent.gateway.connection.proxy import Proxy, read_proxy
from wardround.errors import BadData, NeedsPerson
from wardround.local import durable
from wardround.records.invitation import ago, stamp
from wardround.signing import certificates, chains
from wardround.signing.chains import Chain

if TYPE_CHECKING:
    from wardround.records.enrolment import IssuedCertificate

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
        self._renewal = folder / "renewal.pem"
        self._next_renewal = folder / "next-renewal.pem"
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

    def roots(self) -> Chain:
        """The authorities that this site trusts. Raises NeedsPerson: gone; BadData: damaged."""
        return chains.load_chain(_read(self.authority_file), str(self.authority_file))

    def renewal_credentials(self, now: datetime.datetime) -> tuple[bytes, bytes, bytes] | None:
        """Authority, key and renewal certificate, PEM; None where there is none that is valid by this clock."""
        if not self._renewal.exists():
            return None
        pem = _read(self._renewal)
        if now >= certificates.load_certificate(pem, str(self._renewal)).not_valid_after_utc:
            return None
        return _read(self.authority_file), _read(self.key_file), pem

    def proxy(self) -> Proxy | None:
        """The HTTP proxy on the way to the coordinator; None: there is none. Raises as ``read_proxy``."""
        return read_proxy(self.proxy_file)

    def save_proxy(self, proxy: Proxy) -> None:
        durable.write_file(self.proxy_file, proxy.url.encode() + b"\n")

    def begin_renewal(self) -> bytes:
        """A signing request (DER) for a new key, which is durable before this returns. A renewal that a full disk cut
        off is finished first: its certificate is not of this key."""
        self._finish_renewal()
        key = certificates.new_key()
        durable.write_file(self._next_key, certificates.key_pem(key))
        return certificates.signing_request(key)

    def key_of(self, request: bytes) -> certificates.PrivateKey | None:
        """The key, next or in use, for which a signing request (DER) was made; None where it is gone."""
        wanted = certificates.requested_key(request)
        present = [path for path in (self._next_key, self.key_file) if path.exists()]
        keys = [certificates.load_key(_read(path), str(path)) for path in present]
        return next((key for key in keys if key.public_key() == wanted), None)

    def next_key(self) -> certificates.PrivateKey:
        return certificates.load_key(_read(self._next_key), str(self._next_key))

    def adopt(self, certificate: bytes, renewal: bytes = b"") -> None:
        """Take the renewed certificate, with its key, into use. ``renewal``: its renewal certificate, b"" for none."""
        durable.write_file(self._next_renewal, renewal)
        durable.write_file(self._next_certificate, certificate)
        self._finish_renewal()

    def keep_renewal(self, renewal: bytes) -> None:
        """Write the renewal certificate of the first certificate; b"" for none."""
        if renewal:
            durable.write_file(self._renewal, renewal)

    def _finish_renewal(self) -> None:
        if not self._next_certificate.exists():
            return
        if self._next_key.exists():
            durable.move(self._next_key, self.key_file)
        if self._next_renewal.exists() and self._next_renewal.stat().st_size > 0:
            durable.move(self._next_renewal, self._renewal)
        elif self._next_renewal.exists():
            durable.remove(self._renewal)  # it was of the key before
            durable.remove(self._next_renewal)
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
    3. an authority that is trusted here stands behind it
    4. it is valid now

    Args:
        pem: the certificate, and what stands between it and a root.
        authority: the roots that are trusted, PEM.

    Raises:
        BadData: one of these does not hold; it is not written anywhere.
    """
    chain = chains.load_chain(pem, "the issued certificate")
    certificate = chain[0]
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
        chains.refuse_unchained(chain, chains.load_chain(authority, "the authority"), now)
    except BadData:
        raise BadData("the issued certificate is not signed by the federation's authority") from None  # 3
    if not certificate.not_valid_before_utc <= now < certificate.not_valid_after_utc:
        raise BadData(
            f"the issued certificate is valid from {stamp(certificate.not_valid_before_utc)} to "
            f"{stamp(certificate.not_valid_after_utc)}, this machine's clock says {stamp(now)}",
            hint="set this machine's clock (`timedatectl`)",
        )  # 4
    return certificate


def check_renewal(
    issued: "IssuedCertificate", key: certificates.PrivateKey, authority: bytes, now: datetime.datetime
) -> None:
    """Refuse a renewal certificate that is over another key, or of another certificate, than the issued one.

    Raises:
        BadData: it is; nothing is written.
    """
    if not issued.renewal:
        return
    certificate = certificates.load_certificate(issued.certificate, "the issued certificate")
    federation = certificates.client_name(certificate).federation
    wanted = certificates.Name(federation, "renewal", f"{certificate.serial_number:x}")
    check_issued(issued.renewal, key, authority, wanted, now)


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

    def kept(self, invitation_id: str) -> bytes | None:
        """The signing request (DER) that was made for this invitation; None if there was none."""
        if not self._path.exists():
            return None
        kept = json.loads(self._path.read_bytes())
        return bytes.fromhex(kept["signing_request"]) if kept["invitation_id"] == invitation_id else None

    def keep(self, invitation_id: str, request: bytes) -> None:
        """Make a request durable before it is sent."""
        text = json.dumps({"invitation_id": invitation_id, "signing_request": request.hex()})
        durable.write_file(self._path, text.encode())

    def done(self) -> None:
        durable.remove(self._path)
