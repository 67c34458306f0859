"""What the commands about the certificate authority do, in the running service or without one."""

import logging

import sqlalchemy as sa

from coordinator import requests
from coordinator.context import Context
from coordinator.member_answers import AuthorityStatus, IntermediateRequested, RootRow
from coordinator.members import keys, roots
from coordinator.requests import Request
from coordinator.storage import tables
from wardround.signing import certificates

log = logging.getLogger(__name__)


def answer(context: Context, request: Request) -> AuthorityStatus | IntermediateRequested:
    """Do one command. New connections use what it changed at once; those that are open stay so.

    Raises:
        NeedsPerson, BadData: as ``coordinator.members.roots`` says.
    """
    authority = context.authority
    match request:
        case requests.LeaveRoot():
            roots.leave_root(authority, context.wall_clock())
            log.warning("the root's key has left %s; an intermediate signs from now on", authority.folder)
        case requests.RequestIntermediate():
            return IntermediateRequested(request=roots.request_intermediate(authority).decode())
        case requests.InstallIntermediate():
            roots.install(authority, request.bundle.encode())
            log.warning("another intermediate signs from now on, under root %s", _fingerprint(authority.certificate))
        case requests.RetireRoot():
            late = roots.retire(authority, _roots_of_sites(context), anyway=request.anyway)
            log.warning(
                "only root %s is trusted from now on; locked out: %s", _fingerprint(authority.certificate), late
            )
    if context.store.shared:
        keys.refuse_others(
            context.store, context.receipt_key.public_key(), authority
        )  # a standby needs the newest root
    return _status(context)


def _status(context: Context) -> AuthorityStatus:
    signing, sites = context.authority.signing, _roots_of_sites(context)
    newest = _fingerprint(signing.roots[0])
    return AuthorityStatus(
        signs=roots.describe(signing),
        expires=tables.utc_text(signing.certificate.not_valid_after_utc.timestamp()),
        roots=tuple(
            RootRow(fingerprint=_fingerprint(root), expires=tables.utc_text(root.not_valid_after_utc.timestamp()))
            for root in signing.roots
        ),
        sites=sites,
        behind=tuple(sorted(site for site, root in sites.items() if root != newest)),
    )


def _roots_of_sites(context: Context) -> dict[str, str]:
    """Of each site that is not revoked, the root behind the newest certificate that it used."""
    with context.store.read() as session:
        revoked = set(session.scalars(sa.select(tables.Site.name).where(tables.Site.revoked_s.is_not(None))))
        used = sa.select(tables.Certificate).where(tables.Certificate.used_s.is_not(None))
        rows = session.scalars(used.order_by(tables.Certificate.used_s, tables.Certificate.issued_s))
        return {row.site: row.root for row in rows if row.site not in revoked}


_fingerprint = certificates.fingerprint
