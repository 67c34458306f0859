"""The certificate authority: invitations, signing requests, renewal, revocation.

A certificate lives 7 days and names its holder in one URI that comes from our record, never from a request. The
authority's key signs only here. What a certificate says is trusted only together with the record: see
``certificate_status.Standing``.
"""

import datetime
import hashlib
import ipaddress
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import sqlalchemy as sa
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.x509.oid import ExtendedKeyUsageOID
from sqlalchemy.orm import Session

from coordinator.members import certificate_status
from coordinator.members.certificate_status import OLDER_IN_USE, Peer, Standing
from coordinator.storage import tables
from coordinator.storage.database import Store, changed
from wardround.errors import BadData, NotPermitted, UsageProblem
from wardround.local.durable import make_folder, write_file
from wardround.records.invitation import Invitation, ago, stamp
from wardround.records.receipts import EMPTY_HEAD
from wardround.records.study import SITE_NAME
from wardround.signing import certificates
from wardround.signing.certificates import Name

DAY_S = 86400
LEAF_S = 7 * DAY_S
AUTHORITY_S = 3653 * DAY_S
BACKDATED_S = 300  # clocks of machines differ
SAME_REQUEST_S = DAY_S  # how long a lost reply can be asked for again
MAX_INVITATION_S = 30 * DAY_S
log = logging.getLogger(__name__)


class Authority:
    """The key that says who is who in one federation."""

    def __init__(self, key: certificates.PrivateKey, certificate: x509.Certificate, federation: str) -> None:
        self._key = key
        self.certificate = certificate
        self.federation = federation

    @classmethod
    def create(cls, folder: Path, federation: str, now_s: float) -> "Authority":
        """Make a key and its certificate, good for ten years, and write both."""
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
        """Read both.

        Raises:
            BadData: the files are not a key and its certificate.
            NotPermitted: others may read the key: whoever did can say who is who here.
        """
        key_path, path = folder / "key.pem", folder / "certificate.pem"
        certificates.refuse_readable(key_path)
        key = certificates.load_key(_read(key_path), str(key_path))
        certificate = certificates.load_certificate(_read(path), str(path))
        if certificate.public_key() != key.public_key():
            raise BadData(f"{path} is not of the key in {key_path}", hint="restore both from one backup")
        return cls(key, certificate, federation)

    @property
    def pem(self) -> bytes:
        return certificates.certificate_pem(self.certificate)

    def leaf(self, name: Name, key: ec.EllipticCurvePublicKey, now_s: float, life_s: float) -> x509.Certificate:
        """A client's certificate: one URI name, usable for nothing but being a client."""
        alternative = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(name.uri)])
        return self._sign(f"{name.kind} {name.id}", alternative, ExtendedKeyUsageOID.CLIENT_AUTH, key, now_s, life_s)

    def server(self, host: str, key: ec.EllipticCurvePublicKey, now_s: float) -> x509.Certificate:
        """The coordinator's own: the name or IP address that sites dial, beside its URI."""
        try:
            dialled: x509.GeneralName = x509.IPAddress(ipaddress.ip_address(host))
        except ValueError:
            dialled = x509.DNSName(host)
        uri = x509.UniformResourceIdentifier(Name(self.federation, "coordinator").uri)
        names = x509.SubjectAlternativeName([dialled, uri])
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


@dataclass(frozen=True)
class Enrolled:
    site: str
    certificate: bytes  # PEM
    renew_after_s: int


class Enrolment:
    """Who gets a certificate."""

    def __init__(self, records: Store, authority: Authority, standing: Standing, address: str) -> None:
        self._store = records
        self._authority = authority
        self._standing = standing
        self._address = address
        self._clock = standing.clock
        self.on_two_lines: Callable[[str], None] = lambda site: None

    def noticed(self, peer: Peer) -> None:
        """A call was made with this certificate: note its first use, and whether another line is in use too."""
        news = self._standing.news_of(peer)
        if not news:
            return
        now = int(self._clock())
        before = self._standing.two_lines_since(peer.site)
        with self._store.write() as session:
            table = tables.Certificate
            unused = (table.serial == peer.serial, table.used_s.is_(None))
            session.execute(sa.update(table).where(*unused).values(used_s=now))
            rows = session.scalars(sa.select(table).where(table.site == peer.site).order_by(table.serial))
            others = certificate_status.other_lines(rows, peer.serial)
            if others or news == OLDER_IN_USE:
                why = f"certificate {peer.serial[:12]}… is in use at {peer.address}"
                why += (
                    f" beside {', '.join(f'{serial[:12]}…' for serial in others)}" if others else ", its successor too"
                )
                certificate_status.note_two_lines(session, peer.site, now, why)
        self._standing.load()
        if before is None and self._standing.two_lines_since(peer.site) is not None:
            self.on_two_lines(peer.site)

    def invite(self, site: str, expires_in_s: int) -> Invitation:
        """An invitation for ``site``. One that was not used yet stops working.

        Raises:
            UsageProblem: not a site's name, or a time that is too short or too long.
        """
        if not SITE_NAME.fullmatch(site):
            raise UsageProblem(f"`{site[:80]}` is not a site's name: 1 to 64 of a-z, 0-9 and - (not at either end)")
        if not 60 <= expires_in_s <= MAX_INVITATION_S:
            raise UsageProblem(f"an invitation is good for 1 min to {MAX_INVITATION_S // DAY_S} days")
        now = int(self._clock())
        name = Name(self._authority.federation, "invitation", secrets.token_hex(16))
        key = certificates.new_key()
        bootstrap = self._authority.leaf(name, key.public_key(), now, expires_in_s + DAY_S)
        invitation = Invitation(
            id=name.id, federation=name.federation, site=site, address=self._address, expires_s=now + expires_in_s,
            authority=self._authority.pem.decode(), certificate=certificates.certificate_pem(bootstrap).decode(),
            key=certificates.key_pem(key).decode(),
        )  # fmt: skip
        with self._store.write() as session:
            _withdraw_unused(session, site)
            row = tables.Invitation(
                id=name.id, site=site, created_s=now, expires_s=invitation.expires_s,
                fingerprint=certificates.fingerprint(bootstrap), withdrawn=False,
            )  # fmt: skip
            session.add(row)
        return invitation

    def enrol(self, peer: Peer, invitation_id: str, request: bytes, ledger_key: bytes, proof: bytes) -> Enrolled:
        """Turn an invitation into a site's certificate, once; the same request again gets the same certificate.

        1. the bootstrap certificate is this invitation's   2. the key is a P-256 key that signed its request
        3. the ledger key signed invitation and request     4. in one transaction: the invitation is unused, good and in
        time, and now it is used, and the site and its certificate are on record.

        Raises:
            NotPermitted: INVITATION_UNKNOWN, _EXPIRED or _USED.
            BadData: SIGNING_REQUEST_WEAK or LEDGER_KEY_PROOF.
        """
        with self._store.read() as session:
            row = session.get(tables.Invitation, invitation_id)
        if (
            row is None
            or peer.name.id != invitation_id
            or row.fingerprint != certificates.fingerprint(peer.certificate)
        ):
            raise NotPermitted("the invitation is not known to this coordinator", code="INVITATION_UNKNOWN")  # 1
        key = certificates.requested_key(request)  # 2
        _check_proof(invitation_id, request, ledger_key, proof)  # 3
        now = int(self._clock())
        asked = hashlib.sha256(request + ledger_key).hexdigest()
        name = Name(self._authority.federation, "site", row.site)
        certificate = self._authority.leaf(name, key, now, LEAF_S)
        pem = certificates.certificate_pem(certificate)
        with self._store.write() as session:  # 4
            table = tables.Invitation
            good = (
                table.id == invitation_id,
                table.withdrawn.is_(False),
                table.used_s.is_(None),
                table.expires_s > now,
            )
            used = {
                "used_s": now,
                "used_from": peer.address[:200],
                "request_sha256": asked,
                "certificate": pem.decode(),
            }
            if changed(session, sa.update(table).where(*good).values(used)):
                self._record_site(session, name.id, ledger_key, certificate, now)
            else:
                row = session.get(tables.Invitation, invitation_id)
                assert row is not None
                pem = _same_again(row, asked, now)
        self._standing.load()
        return Enrolled(name.id, pem, _renew_after(pem))

    def renew(self, peer: Peer, request: bytes) -> Enrolled:
        """Another certificate for a new key of the same site. The older ones live to their end.

        Raises:
            BadData: SIGNING_REQUEST_WEAK: not a P-256 key, or the old one again.
            TryAgain: too many live (TOO_BUSY).
        """
        key = certificates.requested_key(request)
        if key == peer.certificate.public_key():
            raise BadData("the signing request has the old key, a new one is needed", code="SIGNING_REQUEST_WEAK")
        now = int(self._clock())
        certificate = self._authority.leaf(peer.name, key, now, LEAF_S)
        with self._store.write() as session:
            row = session.get(tables.Site, peer.site)
            if row is None or row.revoked_s is not None:
                raise NotPermitted(f"site `{peer.site}` was revoked", code="SITE_REVOKED")
            certificate_status.refuse_too_many(session, peer.site, peer.serial, now)
            _record_certificate(session, peer.site, certificate, now, made_with=peer.serial)
        self._standing.load()
        pem = certificates.certificate_pem(certificate)
        return Enrolled(peer.site, pem, _renew_after(pem))

    def revoke(self, site: str) -> bool:
        """Refuse ``site`` from its next call on, and its unused invitation. Whether it was in good standing.

        Raises:
            BadData: there is no such site and no invitation for it.
        """
        with self._store.write() as session:
            withdrawn = _withdraw_unused(session, site)
            row = session.get(tables.Site, site)
            if row is None and not withdrawn:
                raise BadData(f"no site `{site[:80]}` is known here", hint="`coordinator sites` lists them")
            fresh = row is not None and row.revoked_s is None
            if row is not None and fresh:
                row.revoked_s = int(self._clock())
        self._standing.load()
        return fresh

    def _record_site(
        self, session: Session, site: str, ledger_key: bytes, certificate: x509.Certificate, now: int
    ) -> None:
        """A new identity replaces the one that the site had: its certificates and its ledger are the past."""
        session.execute(sa.delete(tables.Certificate).where(tables.Certificate.site == site))
        enrolled = tables.Site(
            name=site, enrolled_s=now, revoked_s=None, ledger_key=ledger_key.hex(), ledger_id="",
            last_receipt=EMPTY_HEAD, two_lines_s=None,
        )  # fmt: skip
        session.merge(enrolled)
        session.flush()  # its certificate refers to it
        _record_certificate(session, site, certificate, now)


def _record_certificate(
    session: Session, site: str, certificate: x509.Certificate, now: int, made_with: str = ""
) -> None:
    row = tables.Certificate(
        serial=f"{certificate.serial_number:x}", site=site, issued_s=now,
        not_after_s=int(certificate.not_valid_after_utc.timestamp()), made_with=made_with,
    )  # fmt: skip
    session.add(row)


def _withdraw_unused(session: Session, site: str) -> int:
    table = tables.Invitation
    unused = (table.site == site, table.withdrawn.is_(False), table.used_s.is_(None))
    return changed(session, sa.update(table).where(*unused).values(withdrawn=True))


def _same_again(row: tables.Invitation, asked: str, now: int) -> bytes:
    """The certificate that this request got before; for any other request, why the invitation is not good."""
    if row.withdrawn:
        raise NotPermitted(
            f"the invitation for site `{row.site}` was withdrawn",
            hint=f"ask the coordinator's operator for the newer one: `coordinator invite {row.site}`",
            code="INVITATION_UNKNOWN",
        )
    if row.used_s is not None:
        if row.request_sha256 == asked and now < row.used_s + SAME_REQUEST_S:
            return str(row.certificate).encode()
        log.warning("the invitation for site %s, used from %s, was tried again", row.site, row.used_from)
        used = datetime.datetime.fromtimestamp(row.used_s, datetime.UTC)
        raise NotPermitted(
            f"the invitation for site `{row.site}` was used on {stamp(used)} from {row.used_from}",
            hint=f"if that was not you, tell the coordinator's operator at once: `coordinator revoke {row.site}`",
            code="INVITATION_USED",
        )
    expires = datetime.datetime.fromtimestamp(row.expires_s, datetime.UTC)
    late = datetime.timedelta(seconds=now - row.expires_s)
    raise NotPermitted(
        f"invitation for site `{row.site}` expired {ago(late)} ago ({stamp(expires)})",
        hint=f"ask the coordinator's operator for a new one: `coordinator invite {row.site}`",
        code="INVITATION_EXPIRED",
    )


def _check_proof(invitation_id: str, request: bytes, ledger_key: bytes, proof: bytes) -> None:
    signed = b"wardround-enrol-v1\0" + invitation_id.encode() + b"\0" + hashlib.sha256(request).digest()
    try:
        Ed25519PublicKey.from_public_bytes(ledger_key).verify(proof, signed)
    except (InvalidSignature, ValueError):
        raise BadData("the ledger key did not sign this invitation and request", code="LEDGER_KEY_PROOF") from None


def _renew_after(pem: bytes) -> int:
    certificate = certificates.load_certificate(pem, "our own")
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    return int((begins + (ends - begins) / 2).timestamp())


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
