"""Which certificates are good now, and which line of a site's certificates each belongs to.

``Standing`` knows every serial that is valid, and is asked on every call. A line: each certificate was made when the
site enrolled, or renewed with an older one. A site needs one line. Two that live at one time mean that
two hold its keys: a thief, or a copy of the machine. Nothing is taken away for that, since nobody here can say which of
them is the site: the operator and the site are told.
"""

import datetime
import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import sqlalchemy as sa
from cryptography import x509
from sqlalchemy.orm import Session

from coordinator.storage import tables
from coordinator.storage.database import Store
from wardround.errors import BadData, NotPermitted, TryAgain
from wardround.records.invitation import stamp
from wardround.signing import certificates
from wardround.signing.certificates import Name

HOUR_S, DAY_S = 3600, 86400
MAX_CERTIFICATES = 16  # living at one time; a line that was not renewed yet may go beyond
LOST_REPLY_S = HOUR_S  # a renewed certificate that nobody used by then never arrived
CHANGING_S = 600  # calls that a site still begins with the older certificate when it has used the newer
FIRST_USE, OLDER_IN_USE = "first use", "an older certificate is in use beside its successor"
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Peer:
    """Who calls, as its certificate and our record agree."""

    name: Name
    serial: str
    certificate: x509.Certificate
    address: str

    @property
    def site(self) -> str:
        return self.name.id


@dataclass
class Standing:
    """Which certificates are good now, in memory, so that asking costs nothing. Kept equal to the store's record."""

    store: Store
    federation: str
    clock: Callable[[], float]
    _sites: dict[str, str] = field(default_factory=dict)  # serial -> site
    _revoked: set[str] = field(default_factory=set)
    _unused: set[str] = field(default_factory=set)  # serials
    _superseded: dict[str, int] = field(default_factory=dict)  # serial -> when a newer one of its line was first used
    _two_lines: dict[str, int] = field(default_factory=dict)  # site -> since when
    _lock: threading.Lock = field(default_factory=threading.Lock)  # short: every call asks
    _loading: threading.Lock = field(default_factory=threading.Lock)  # over reading and taking into use

    def load(self) -> None:
        """Read the record again, after it changed. Of two who do so at once, the later one reads what both changed."""
        with self._loading:
            with self.store.read() as session:
                rows = session.scalars(sa.select(tables.Certificate)).all()
                sites = session.scalars(sa.select(tables.Site)).all()
            serials = {row.serial: row.site for row in rows}
            revoked = {site.name for site in sites if site.revoked_s is not None}
            unused = {row.serial for row in rows if row.used_s is None}
            two_lines = {site.name: site.two_lines_s for site in sites if site.two_lines_s is not None}
            with self._lock:
                self._sites, self._revoked, self._unused = serials, revoked, unused
                self._superseded, self._two_lines = superseded(rows), two_lines

    def two_lines_since(self, site: str) -> int | None:
        """Since when two lines of certificates of a site live (Unix time); None while there is one."""
        with self._lock:
            return self._two_lines.get(site)

    def news_of(self, peer: Peer) -> str:
        """What a call with this certificate says that is not on record; "" almost always."""
        with self._lock:
            if peer.serial in self._unused:
                return FIRST_USE
            since = self._superseded.get(peer.serial)
            late = since is not None and self.clock() > since + CHANGING_S
            return OLDER_IN_USE if late and peer.site not in self._two_lines else ""

    def admit(self, certificate: x509.Certificate, address: str) -> Peer:
        """Who the holder of ``certificate`` is. TLS has checked its signature and that the peer has its key.

        1. exactly one URI name of our form, client usage   2. of this federation   3. its dates   4. known, not revoked

        Raises:
            NotPermitted: with the code that says which.
        """
        try:
            name = certificates.client_name(certificate)  # 1
        except BadData as error:
            raise NotPermitted(error.message, code="CERTIFICATE_PROFILE") from None
        if name.federation != self.federation:  # 2
            raise NotPermitted(
                f"the certificate is of another federation than `{self.federation}`", code="CERTIFICATE_PROFILE"
            )
        peer = Peer(name, f"{certificate.serial_number:x}", certificate, address)
        self.check(peer)  # 3, 4
        return peer

    def check(self, peer: Peer) -> None:
        """Whether a peer that was admitted is still good. Asked again on every chunk.

        Raises:
            NotPermitted: its certificate expired or is not known (any more), or its site was revoked.
        """
        now = datetime.datetime.fromtimestamp(self.clock(), datetime.UTC)
        until = peer.certificate.not_valid_after_utc
        if not peer.certificate.not_valid_before_utc <= now < until:
            raise NotPermitted(
                f"the certificate was good until {stamp(until)}, it is {stamp(now)} here",
                hint="if the site was away for long, ask the coordinator's operator for a new invitation",
                code="CERTIFICATE_EXPIRED",
            )
        if peer.name.kind != "site":
            return  # an invitation's record is judged where it is used
        with self._lock:
            if peer.site in self._revoked:
                raise NotPermitted(
                    f"site `{peer.site}` was revoked", hint="speak with the coordinator's operator", code="SITE_REVOKED"
                )
            if self._sites.get(peer.serial) != peer.site:
                raise NotPermitted(
                    "the certificate is not in the coordinator's records (any more)",
                    hint="if this site was invited again, use the newer identity",
                    code="CERTIFICATE_UNKNOWN",
                )


def refuse_too_many(session: Session, site: str, made_with: str, now: int) -> None:
    """Let those go that have ended or never arrived, and see whether ``made_with`` may be renewed.

    None that lives is taken away for another: so nobody who has a site's key can end the site's own line. A line that
    is a day old and was not renewed yet can always be.

    Raises:
        TryAgain: the site has too many (TOO_BUSY).
    """
    table = tables.Certificate
    session.execute(sa.delete(table).where(table.site == site, table.not_after_s < now))
    never_arrived = (table.used_s.is_(None), table.made_with != "", table.issued_s < now - LOST_REPLY_S)
    session.execute(sa.delete(table).where(table.site == site, *never_arrived))
    living = session.scalars(sa.select(table).where(table.site == site)).all()
    if len(living) < MAX_CERTIFICATES:
        return
    renewed = any(row.made_with == made_with for row in living)
    young = any(row.serial == made_with and row.issued_s > now - DAY_S for row in living)
    if renewed or young:
        raise TryAgain(
            f"site `{site}` has {len(living)} certificates that live, and this one was renewed already or is new",
            hint="does somebody else hold this site's keys? ask the coordinator's operator",
            code="TOO_BUSY",
        )


def other_lines(rows: Iterable[tables.Certificate], serial: str) -> list[str]:
    """Of a site's living certificates, the serials of those in use that are of another line than ``serial``."""
    by_serial = {row.serial: row for row in rows}
    own = set(_line(by_serial, serial))
    return [
        row.serial for row in by_serial.values()
        if row.used_s is not None and row.serial not in own and serial not in _line(by_serial, row.serial)
    ]  # fmt: skip


def superseded(rows: Iterable[tables.Certificate]) -> dict[str, int]:
    """Since when a newer certificate of its line is in use, by the older one's serial."""
    found: dict[str, int] = {}
    for row in rows:
        if row.made_with and row.used_s is not None:
            found[row.made_with] = min(row.used_s, found.get(row.made_with, row.used_s))
    return found


def note_two_lines(session: Session, site: str, now: int, why: str) -> None:
    """Remember since when, and tell the operator's log."""
    table = tables.Site
    session.execute(sa.update(table).where(table.name == site, table.two_lines_s.is_(None)).values(two_lines_s=now))
    log.warning(
        "site %s: two hold its keys, or it was copied: %s; `coordinator revoke %s` if in doubt", site, why, site
    )


def _line(by_serial: dict[str, tables.Certificate], serial: str) -> list[str]:
    """``serial`` and the older ones that it was renewed from."""
    line: list[str] = []
    while serial in by_serial and serial not in line:
        line.append(serial)
        serial = by_serial[serial].made_with
    return line
