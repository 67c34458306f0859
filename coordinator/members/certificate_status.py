"""Which certificates are valid now, and whether two machines hold one site's keys.

``CertificateStatus`` knows every valid serial and is asked on every call.

A renewal chain is a certificate from an enrolment and those renewed from it, one after another. A site needs one chain.
A certificate fork, two chains in use at one time, means that two machines hold the site's keys: a thief's, or a copy.
Nothing is taken away for that, because nobody here can know which of the two is the site; the operator and the site
are told.
"""

import datetime
import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache

import sqlalchemy as sa
from cryptography import x509
from sqlalchemy.orm import Session

from coordinator.members.authority import issued_s
from coordinator.storage import tables
from coordinator.storage.database import Store
from wardround.errors import BadData, NotPermitted, TryAgain
from wardround.records.invitation import stamp
from wardround.signing import certificates
from wardround.signing.certificates import Name

HOUR_S, DAY_S = 3600, 86400
MAX_CERTIFICATES = 16  # of a site, valid at one time; a certificate that was not renewed yet may go beyond
LOST_REPLY_S = HOUR_S  # a renewed certificate that nobody used by then never arrived
CHANGING_S = 600  # how long a site may still begin calls with the older certificate after it used the newer
MOST_SHOWN = 2048  # certificates that are kept parsed: a site shows the same one with each of its calls
FIRST_USE, OLDER_IN_USE = "first use", "an older certificate is in use beside its successor"
log = logging.getLogger(__name__)
_name = lru_cache(MOST_SHOWN)(certificates.client_name)


@dataclass(frozen=True)
class Peer:
    """An authenticated peer of a call: its certificate and our record agree."""

    name: Name
    serial: str
    certificate: x509.Certificate
    address: str

    @property
    def site(self) -> str:
        return self.name.id


@dataclass
class CertificateStatus:
    """Which certificates are valid now, in memory so that asking is cheap. ``load`` makes it equal to the store."""

    store: Store
    federation: str
    wall_clock: Callable[[], float]
    _sites: dict[str, str] = field(default_factory=dict)  # serial -> site
    _revoked: set[str] = field(default_factory=set)
    _unused: set[str] = field(default_factory=set)  # serials
    _superseded: dict[str, int] = field(default_factory=dict)  # serial -> when its successor was first used
    _forks: dict[str, int] = field(default_factory=dict)  # site -> since when
    _forgotten: tuple[int, int] = (0, 0)  # what was issued between these moments, a restore forgot
    _members: set[str] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)  # held for moments only: every call asks
    _loading: threading.Lock = field(default_factory=threading.Lock)  # held while the record is read and put into use

    def load(self) -> None:
        """Read the store again after it changed. Of two threads that do so at once, the later reads both changes."""
        with self._loading:
            with self.store.read() as session:
                rows = session.scalars(sa.select(tables.Certificate)).all()
                sites = session.scalars(sa.select(tables.Site)).all()
                restored = session.scalars(sa.select(tables.Restore).order_by(tables.Restore.restored_s.desc())).first()
            serials = {row.serial: row.site for row in rows}
            revoked = {site.name for site in sites if site.revoked_s is not None}
            unused = {row.serial for row in rows if row.used_s is None}
            forks = {site.name: site.certificate_fork_s for site in sites if site.certificate_fork_s is not None}
            with self._lock:
                self._sites, self._revoked, self._unused = serials, revoked, unused
                self._superseded, self._forks = superseded(rows), forks
                self._forgotten = (restored.backup_s, restored.restored_s) if restored is not None else (0, 0)
                self._members = {site.name for site in sites}

    def certificate_fork_since(self, site: str) -> int | None:
        """Since when two renewal chains of a site are in use (Unix time); None while there is one."""
        with self._lock:
            return self._forks.get(site)

    def unrecorded_use(self, peer: Peer) -> str:
        """What a call with this certificate shows that is not on record: FIRST_USE, OLDER_IN_USE or "" (mostly)."""
        with self._lock:
            if peer.serial in self._unused:
                return FIRST_USE
            since = self._superseded.get(peer.serial)
            late = since is not None and self.wall_clock() > since + CHANGING_S
            return OLDER_IN_USE if late and peer.site not in self._forks else ""

    def admit(self, certificate: x509.Certificate, address: str) -> Peer:
        """The peer that holds ``certificate``. TLS has checked its signature, and that the peer has its key.

        1. exactly one URI name of our form, client usage   2. of this federation   3. its dates   4. known, not revoked

        Raises:
            NotPermitted: with the code that says which.
        """
        try:
            name = _name(certificate)  # 1
        except BadData as error:
            raise NotPermitted(error.message, code="CERTIFICATE_PROFILE") from None
        if name.federation != self.federation:  # 2
            raise NotPermitted(
                f"the certificate is of another federation than `{self.federation}`", code="CERTIFICATE_PROFILE"
            )
        peer = Peer(name, f"{certificate.serial_number:x}", certificate, address)
        if self._was_forgotten(peer):
            self._take_up(peer)
        self.check(peer)  # 3, 4
        return peer

    def _was_forgotten(self, peer: Peer) -> bool:
        """Whether a member's certificate is not on record because the record was restored from an older copy.

        TLS has checked that our authority signed it. What the copy knew and dropped since is not among these.
        """
        issued = issued_s(peer.certificate)
        with self._lock:
            first, last = self._forgotten
            unknown = peer.serial not in self._sites and peer.site in self._members - self._revoked
            return peer.name.kind == "site" and unknown and first <= issued <= last

    def _take_up(self, peer: Peer) -> None:
        """Put a forgotten certificate on record."""
        now = int(self.wall_clock())
        with self.store.write() as session:
            session.merge(
                tables.Certificate(
                    serial=peer.serial, site=peer.site, issued_s=now,
                    not_after_s=int(peer.certificate.not_valid_after_utc.timestamp()), made_with="", used_s=now,
                )
            )  # fmt: skip
        log.warning("site %s: its certificate was issued after the copy that this state was restored from", peer.site)
        self.load()

    def check(self, peer: Peer) -> None:
        """Refuse a peer whose certificate is no longer valid. Asked again on every chunk.

        Raises:
            NotPermitted: its certificate expired, is not (or no longer) on record, or its site was revoked.
        """
        now = datetime.datetime.fromtimestamp(self.wall_clock(), datetime.UTC)
        until = peer.certificate.not_valid_after_utc
        if not peer.certificate.not_valid_before_utc <= now < until:
            raise NotPermitted(
                f"the certificate was valid until {stamp(until)}, and it is {stamp(now)} here",
                hint="if the site was away for long, ask the coordinator's operator for a new invitation",
                code="CERTIFICATE_EXPIRED",
            )
        if peer.name.kind == "invitation":
            return  # its record is judged where it is used
        renews = peer.name.kind == "renewal"
        with self._lock:
            site = self._sites.get(peer.name.id if renews else peer.serial)
            if (site if renews else peer.site) in self._revoked:
                raise NotPermitted(
                    f"site `{site or peer.site}` was revoked", hint="speak with the coordinator's operator",
                    code="SITE_REVOKED",
                )  # fmt: skip
            if site is None or (site != peer.site and not renews):
                raise NotPermitted(
                    "the certificate is not in the coordinator's records (any more)",
                    hint="if this site was invited again, use the newer identity",
                    code="CERTIFICATE_UNKNOWN",
                )


def refuse_too_many(session: Session, site: str, made_with: str, now: int, window_s: int) -> None:
    """Remove a site's certificates that can no longer be renewed or never arrived, and refuse a renewal beyond
    ``MAX_CERTIFICATES``.

    No valid certificate is removed to make room for another: so nobody who has a site's key can end the site's own
    renewal chain. A certificate that is a day old and was not renewed yet can always be renewed.

    Raises:
        TryAgain: the site has too many, and ``made_with`` was renewed already or is new (TOO_BUSY).
    """
    table = tables.Certificate
    session.execute(sa.delete(table).where(table.site == site, table.not_after_s < now - window_s))
    never_arrived = (table.used_s.is_(None), table.made_with != "", table.issued_s < now - LOST_REPLY_S)
    session.execute(sa.delete(table).where(table.site == site, *never_arrived))
    valid = session.scalars(sa.select(table).where(table.site == site, table.not_after_s >= now)).all()
    if len(valid) < MAX_CERTIFICATES:
        return
    renewed = any(row.made_with == made_with for row in valid)
    young = any(row.serial == made_with and row.issued_s > now - DAY_S for row in valid)
    if renewed or young:
        raise TryAgain(
            f"site `{site}` has {len(valid)} valid certificates, and this one was renewed already or is new",
            hint="does somebody else hold this site's keys? ask the coordinator's operator",
            code="TOO_BUSY",
        )


def other_chains(rows: Iterable[tables.Certificate], serial: str) -> list[str]:
    """Of a site's valid certificates, the serials in use that are not in one renewal chain with ``serial``."""
    by_serial = {row.serial: row for row in rows}
    own = set(_chain(by_serial, serial))
    return [
        row.serial for row in by_serial.values()
        if row.used_s is not None and row.serial not in own and serial not in _chain(by_serial, row.serial)
    ]  # fmt: skip


def superseded(rows: Iterable[tables.Certificate]) -> dict[str, int]:
    """Since when a certificate's successor is in use, by the older one's serial."""
    since: dict[str, int] = {}
    for row in rows:
        if row.made_with and row.used_s is not None:
            since[row.made_with] = min(row.used_s, since.get(row.made_with, row.used_s))
    return since


def note_certificate_fork(session: Session, site: str, now: int, why: str) -> None:
    """Record that two renewal chains of a site are in use, unless that is on record, and warn in the operator's log."""
    table = tables.Site
    unnoted = (table.name == site, table.certificate_fork_s.is_(None))
    session.execute(sa.update(table).where(*unnoted).values(certificate_fork_s=now))
    log.warning(
        "site %s: two machines hold its keys (a copy, or a theft): %s; if in doubt, `coordinator revoke %s`",
        site, why, site,
    )  # fmt: skip


def _chain(by_serial: dict[str, tables.Certificate], serial: str) -> list[str]:
    """``serial`` and the older ones that it was renewed from."""
    chain: list[str] = []
    while serial in by_serial and serial not in chain:
        chain.append(serial)
        serial = by_serial[serial].made_with
    return chain
