"""Who gets a certificate: invitations, their use, renewal, and revocation.

Each change is one transaction in the store; ``CertificateStatus`` reads the record again after it. Requests name
nobody: the name in a certificate comes from the invitation's record, or from the certificate that is renewed.
"""

import datetime
import hashlib
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass

import sqlalchemy as sa
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from sqlalchemy.orm import Session

from coordinator.members import certificate_status
from coordinator.members.authority import DAY_S, Authority, Lifetimes
from coordinator.members.certificate_status import OLDER_IN_USE, CertificateStatus, Peer
from coordinator.storage import tables
from coordinator.storage.database import Store, changed
from wardround.errors import BadData, NotPermitted, UsageProblem
from wardround.records.invitation import Invitation, ago, stamp
from wardround.records.receipts import EMPTY_HEAD
from wardround.records.study import SITE_NAME
from wardround.signing import certificates
from wardround.signing.certificates import Name

SAME_REQUEST_S = DAY_S  # how long a lost reply can be asked for again
MAX_INVITATION_S = 30 * DAY_S
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Issued:
    """A site's new certificate, and when (Unix time) the site should renew it."""

    site: str
    certificate: bytes  # PEM, with what stands between it and a root
    renew_after_s: int
    renewal: bytes = b""  # over the same key: may renew it, also after its end


class Enrolment:
    """Issues invitations and certificates, and takes them back.

    Attributes:
        on_certificate_fork: called with a site when it turns out that two hold its keys.
    """

    def __init__(
        self,
        store: Store,
        authority: Authority,
        certificate_status: CertificateStatus,
        address: str,
        lifetimes: Lifetimes = Lifetimes(),
    ) -> None:
        self._store = store
        self._authority = authority
        self.lifetimes = lifetimes
        self._status = certificate_status
        self._address = address
        self.wall_clock = self._wall_clock = certificate_status.wall_clock
        self.on_certificate_fork: Callable[[str], None] = lambda site: None

    def note_use(self, peer: Peer) -> None:
        """Record the first use of the peer's certificate, and whether another renewal chain of its site is in use."""
        unrecorded = self._status.unrecorded_use(peer)
        if not unrecorded:
            return
        now = int(self._wall_clock())
        before = self._status.certificate_fork_since(peer.site)
        with self._store.write() as session:
            table = tables.Certificate
            unused = (table.serial == peer.serial, table.used_s.is_(None))
            session.execute(sa.update(table).where(*unused).values(used_s=now))
            rows = session.scalars(sa.select(table).where(table.site == peer.site).order_by(table.serial))
            others = certificate_status.other_chains(rows, peer.serial)
            if others or unrecorded == OLDER_IN_USE:
                why = f"certificate {peer.serial[:12]}… is in use at {peer.address}"
                why += (
                    f" beside {', '.join(f'{serial[:12]}…' for serial in others)}" if others else ", its successor too"
                )
                certificate_status.note_certificate_fork(session, peer.site, now, why)
        self._status.load()
        if before is None and self._status.certificate_fork_since(peer.site) is not None:
            self.on_certificate_fork(peer.site)

    def invite(self, site: str, expires_in_s: int) -> Invitation:
        """An invitation for ``site``. One that was not used yet stops working.

        Raises:
            UsageProblem: not a site's name, or a time that is too short or too long.
        """
        if not SITE_NAME.fullmatch(site):
            raise UsageProblem(f"`{site[:80]}` is not a site's name: 1 to 64 of a-z, 0-9 and - (not at either end)")
        if not 60 <= expires_in_s <= MAX_INVITATION_S:
            raise UsageProblem(f"an invitation is valid for 1 min to {MAX_INVITATION_S // DAY_S} days")
        now = int(self._wall_clock())
        name = Name(self._authority.federation, "invitation", secrets.token_hex(16))
        key = certificates.new_key()
        bootstrap = self._authority.leaf(name, key.public_key(), now, expires_in_s + DAY_S)
        invitation = Invitation(
            id=name.id, federation=name.federation, site=site, address=self._address, expires_s=now + expires_in_s,
            authority=certificates.certificate_pem(self._authority.certificate).decode(),
            certificate=self._authority.chained(bootstrap).decode(), key=certificates.key_pem(key).decode(),
        )  # fmt: skip
        with self._store.write() as session:
            _withdraw_unused(session, site)
            row = tables.Invitation(
                id=name.id, site=site, created_s=now, expires_s=invitation.expires_s,
                fingerprint=certificates.fingerprint(bootstrap), withdrawn=False,
            )  # fmt: skip
            session.add(row)
        return invitation

    def enrol(self, peer: Peer, invitation_id: str, request: bytes, ledger_key: bytes, proof: bytes) -> Issued:
        """Turn an invitation into a site's certificate, once; the same request again gets the same certificate.

        1. the bootstrap certificate is this invitation's   2. the key is a P-256 key that signed its request
        3. the ledger key signed invitation and request     4. in one transaction: the invitation is unused, not
        withdrawn and not expired; it becomes used, and the site and its certificate are on record

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
        _refuse_unproven_key(invitation_id, request, ledger_key, proof)  # 3
        now = int(self._wall_clock())
        request_sha256 = hashlib.sha256(request + ledger_key).hexdigest()
        name = Name(self._authority.federation, "site", row.site)
        certificate = self._authority.leaf(name, key, now, self.lifetimes.life_s)
        pem = self._authority.chained(certificate)
        with self._store.write() as session:  # 4
            table = tables.Invitation
            usable = (
                table.id == invitation_id, table.withdrawn.is_(False), table.used_s.is_(None), table.expires_s > now,
            )  # fmt: skip
            use = {
                "used_s": now, "used_from": peer.address[:200], "request_sha256": request_sha256,
                "certificate": pem.decode(),
            }  # fmt: skip
            if changed(session, sa.update(table).where(*usable).values(use)):
                _record_site(session, name.id, ledger_key, self._record_of(certificate, name.id, now), now)
            else:
                row = session.get(tables.Invitation, invitation_id)
                assert row is not None
                pem = _issued_before(row, request_sha256, now)
        self._status.load()
        return self._issued(name.id, pem)

    def renew(self, peer: Peer, request: bytes) -> Issued:
        """Another certificate, for a new key of the same site. The older ones stay valid until they expire.

        Args:
            peer: with a site's certificate, or with the renewal certificate that came with it.

        Raises:
            BadData: SIGNING_REQUEST_WEAK: not a P-256 key, or the old one again.
            NotPermitted: the site was revoked; or its certificate ended longer ago than the renewal window, or has a
                successor in use.
            TryAgain: too many of its certificates are valid (TOO_BUSY).
        """
        key = certificates.requested_key(request)
        if key == peer.certificate.public_key():
            raise BadData("the signing request has the old key, a new one is needed", code="SIGNING_REQUEST_WEAK")
        now = int(self._wall_clock())
        serial = peer.name.id if peer.name.kind == "renewal" else peer.serial
        with self._store.write() as session:
            old = session.get(tables.Certificate, serial)
            row = session.get(tables.Site, old.site) if old is not None else None
            if old is None or row is None or row.revoked_s is not None:
                raise NotPermitted(f"the site of certificate {serial[:12]}… was revoked", code="SITE_REVOKED")
            self._refuse_beyond_window(session, old, now)
            name = Name(self._authority.federation, "site", old.site)
            certificate = self._authority.leaf(name, key, now, self.lifetimes.life_s)
            window_s = self.lifetimes.renewal_window_s
            certificate_status.refuse_too_many(session, old.site, serial, now, window_s)
            session.add(self._record_of(certificate, old.site, now, made_with=serial))
        if now >= old.not_after_s:
            log.info("site %s renewed its certificate %d s after its end", old.site, now - old.not_after_s)
        self._status.load()
        return self._issued(old.site, self._authority.chained(certificate))

    def _refuse_beyond_window(self, session: Session, old: tables.Certificate, now: int) -> None:
        """Refuse to renew a certificate that ended before the renewal window, or that has a successor in use: then
        whoever shows it is not the site as it is now, but an older copy of it.
        """
        if now < old.not_after_s:
            return
        window_s, table = self.lifetimes.renewal_window_s, tables.Certificate
        succeeded = session.scalars(sa.select(table).where(table.made_with == old.serial, table.used_s.is_not(None)))
        if now >= old.not_after_s + window_s or succeeded.first() is not None:
            ended = datetime.datetime.fromtimestamp(old.not_after_s, datetime.UTC)
            raise NotPermitted(
                f"the certificate of site `{old.site}` ended on {stamp(ended)} and can no longer be renewed",
                hint=f"`coordinator invite {old.site}`; the site redeems it in its own state directory",
                code="CERTIFICATE_EXPIRED",
            )

    def _issued(self, site: str, pem: bytes) -> Issued:
        """A certificate with its renewal certificate, unless the operator wants none."""
        certificate = certificates.load_certificate(pem, "our own")
        renewal, window_s = b"", self.lifetimes.renewal_window_s
        if window_s:
            name = Name(self._authority.federation, "renewal", f"{certificate.serial_number:x}")
            ends = certificate.not_valid_after_utc.timestamp() + window_s
            now, key = self._wall_clock(), certificate.public_key()
            assert isinstance(key, ec.EllipticCurvePublicKey)
            renewal = self._authority.chained(self._authority.leaf(name, key, now, ends - now))
        return Issued(site, pem, _renew_after(certificate), renewal)

    def _record_of(self, certificate: x509.Certificate, site: str, now: int, made_with: str = "") -> tables.Certificate:
        return tables.Certificate(
            serial=f"{certificate.serial_number:x}", site=site, issued_s=now, made_with=made_with,
            not_after_s=int(certificate.not_valid_after_utc.timestamp()),
            root=certificates.fingerprint(self._authority.certificate),
        )  # fmt: skip

    def revoke(self, site: str) -> bool:
        """Refuse ``site`` from its next call on, and its unused invitation. Returns whether it was enrolled until now.

        Raises:
            BadData: there is no such site and no invitation for it.
        """
        with self._store.write() as session:
            withdrawn = _withdraw_unused(session, site)
            row = session.get(tables.Site, site)
            if row is None and not withdrawn:
                raise BadData(f"no site `{site[:80]}` is known here", hint="`coordinator sites` lists them")
            enrolled = row is not None and row.revoked_s is None
            if row is not None and enrolled:
                row.revoked_s = int(self._wall_clock())
        self._status.load()
        return enrolled


def _record_site(session: Session, site: str, ledger_key: bytes, certificate: tables.Certificate, now: int) -> None:
    """Record a site's new identity; its earlier certificates no longer count.

    With the ledger key that it had, it is the same installation: it goes on with its ledger and its receipts. With
    another one it begins anew.
    """
    session.execute(sa.delete(tables.Certificate).where(tables.Certificate.site == site))
    row = session.get(tables.Site, site)
    if row is not None and row.ledger_key == ledger_key.hex():
        row.enrolled_s, row.revoked_s, row.certificate_fork_s = now, None, None
    else:
        enrolled = tables.Site(
            name=site, enrolled_s=now, revoked_s=None, ledger_key=ledger_key.hex(), ledger_id="",
            last_receipt=EMPTY_HEAD, certificate_fork_s=None,
        )  # fmt: skip
        session.merge(enrolled)
    session.flush()  # its certificate refers to it
    session.add(certificate)


def _withdraw_unused(session: Session, site: str) -> int:
    """Withdraw a site's unused invitations. Returns how many there were."""
    table = tables.Invitation
    unused = (table.site == site, table.withdrawn.is_(False), table.used_s.is_(None))
    return changed(session, sa.update(table).where(*unused).values(withdrawn=True))


def _issued_before(row: tables.Invitation, request_sha256: str, now: int) -> bytes:
    """The certificate (PEM) that this same request got before.

    Raises:
        NotPermitted: it is another request; the code and the message say why the invitation cannot be used.
    """
    if row.withdrawn:
        raise NotPermitted(
            f"the invitation for site `{row.site}` was replaced or withdrawn",
            hint=f"ask the coordinator's operator for the newer one: `coordinator invite {row.site}`",
            code="INVITATION_UNKNOWN",
        )
    if row.used_s is not None:
        if row.request_sha256 == request_sha256 and now < row.used_s + SAME_REQUEST_S:
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


def _refuse_unproven_key(invitation_id: str, request: bytes, ledger_key: bytes, proof: bytes) -> None:
    signed = b"wardround-enrol-v1\0" + invitation_id.encode() + b"\0" + hashlib.sha256(request).digest()
    try:
        Ed25519PublicKey.from_public_bytes(ledger_key).verify(proof, signed)
    except (InvalidSignature, ValueError):
        raise BadData("the ledger key did not sign this invitation and request", code="LEDGER_KEY_PROOF") from None


def _renew_after(certificate: x509.Certificate) -> int:
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    return int((begins + (ends - begins) / 2).timestamp())
