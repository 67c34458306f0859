"""Join a federation with an invitation: the numbered steps, each safe to repeat after a crash at any other.

    1. read the invitation: form, check digits, expiry by this machine's clock; no network yet
    2. make the keys, durably, readable by this user alone; begin the ledger
    3. connect with the bootstrap certificate, verifying the coordinator against the invitation's authority
    4. send the signing request and the proof that the ledger key is ours
    5. (the coordinator spends the invitation, once)
    6. the reply: certificate, authority, receipt key, its time
    7. check all of it, record it in the ledger, write it; `site.json` last: it is what makes this a site

Run again with the same invitation, it sends the same request and gets the same certificate.

A site that has joined redeems a new invitation in its own state directory: after an outage longer than its certificate,
or after a revocation that was taken back. It gets a new key and certificate, and keeps its ledger key, its ledger, its
consents and all private state. The invitation must be for the same site of the same federation; one that names another
authority is redeemed only with that authority's fingerprint, which a person has heard from the operator.
"""

import datetime
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from site_agent.gateway.connection.client import Connection
from site_agent.gateway.connection.diagnosis import diagnose
from site_agent.gateway.connection.meter import Meter
from site_agent.gateway.connection.proxy import Proxy
from site_agent.gateway.enrolment.identity import Identity, Joining, check_clock, check_issued, check_renewal
from site_agent.gateway.exit.egress import record_control
from site_agent.gateway.exit.ledger import Ledger
from site_agent.state.directory import Site, SiteState
from wardround.errors import BadData, NeedsPerson, Unavailable
from wardround.local import durable
from wardround.records.enrolment import Enrolled, IssuedCertificate
from wardround.records.invitation import Invitation
from wardround.records.ledger.entries import IdentityEntry
from wardround.signing import certificates, chains
from wardround.signing.chains import Chain


@dataclass(frozen=True)
class Joined:
    """What a join made. ``warning`` is about the clocks, "" if they agree; ``again``: the site had joined before."""

    site: Site
    certificate: Path
    key: Path
    expires: datetime.datetime
    warning: str
    again: bool = False


def join(
    state: SiteState,
    text: str,
    proxy: Proxy | None = None,
    authority: str = "",
    now: Callable[[], datetime.datetime] = partial(datetime.datetime.now, datetime.UTC),
) -> Joined:
    """Redeem the invitation in ``text`` for ``state``.

    Args:
        proxy: the HTTP proxy on the way, which is kept; None: the one that is kept already, or none.
        authority: the fingerprint that another authority must have than the one this site trusts.

    Raises:
        BadData: the invitation is damaged, expired or used, or the coordinator's reply is not what it must be.
        NeedsPerson: this directory is another site already, the invitation or the coordinator names another authority,
            or the clocks are a day apart.
        TryAgain: the agent runs.
        Unavailable: the coordinator cannot be reached; run the same command again.
    """
    already = state.joined()
    invitation = Invitation.decode(text)  # 1
    invitation.refuse_expired(now())
    if already:
        _refuse_other_site(state, invitation)
        _refuse_other_authority(Identity(state.identity), invitation, authority)
    durable.make_folder(state.root)
    with durable.StateLock(state.root, "site-agent join"):
        state.make_folders()
        own = Identity(state.identity)
        if proxy is not None:
            own.save_proxy(proxy)
        ledger_key = own.ledger_key() if already else own.make_keys()[1]  # 2
        ledger = Ledger(state.ledger, ledger_key)
        try:
            ledger.begin()
            joining = Joining(state.identity)
            key, request = _request(own, joining, invitation, new_key=already)
            meter = Meter()
            proof = ledger_key.sign(enrolment_proof(invitation, request))
            try:
                reply = _enrol(invitation, request, ledger_key.public_key(), proof, meter, own.proxy())
            finally:
                record_control(ledger, meter)
            issued, arrived = reply.issued, now()
            warning = check_clock(issued.server_time_s, arrived)  # 7
            roots = _roots(invitation, issued)
            trusted = chains.chain_pem(roots)
            certificate = check_issued(issued.certificate, key, trusted, _name(invitation, reply), arrived)
            check_renewal(issued, key, trusted, arrived)
            site = Site(
                site=invitation.site, federation=invitation.federation, address=invitation.address,
                receipt_key=reply.receipt_key.hex(), renew_after_s=issued.renew_after_s,
                authority_fingerprint=certificates.fingerprint(roots[0]),
            )  # fmt: skip
            if already:
                record_identity(ledger, "issued", site, issued)
                durable.write_file(own.authority_file, trusted)
                state.save_site(site)
                own.adopt(issued.certificate, issued.renewal)
            else:
                durable.write_file(own.authority_file, trusted)
                durable.write_file(own.certificate_file, issued.certificate)
                own.keep_renewal(issued.renewal)
                record_identity(ledger, "issued", site, issued)
                state.save_site(site)
            joining.done()
        finally:
            ledger.close()
    expires = certificates.not_after(certificate)
    return Joined(site, own.certificate_file, own.key_file, expires, warning, already)


def _refuse_other_site(state: SiteState, invitation: Invitation) -> None:
    """Raises NeedsPerson: ``state`` is another site than the one that is invited, or one that left."""
    site = state.site()
    if (site.site, site.federation) != (invitation.site, invitation.federation):
        raise NeedsPerson(
            f"{state.root} is site `{site.site}` of federation `{site.federation}` already; its keys are untouched",
            hint="use another --state to join as another site",
        )


def _refuse_other_authority(own: Identity, invitation: Invitation, confirmed: str) -> None:
    """Refuse an invitation that would lead this site's consents and ledger to a coordinator of another authority.

    Raises:
        NeedsPerson: it names one, and no person has confirmed its fingerprint.
    """
    root = certificates.load_certificate(invitation.authority.encode(), "the invitation's authority")
    fingerprint = certificates.fingerprint(root)
    if root in own.roots() or confirmed.lower().replace(":", "") == fingerprint:
        return
    raise NeedsPerson(
        f"the invitation names another authority than the one this site trusts, with the fingerprint {fingerprint}; "
        "nothing was sent",
        hint="telephone the coordinator's operator; if they read you the same: `site-agent join --authority "
        "FINGERPRINT`",
    )


def _request(
    own: Identity, joining: Joining, invitation: Invitation, *, new_key: bool
) -> tuple[certificates.PrivateKey, bytes]:
    """The key and signing request (DER) for an invitation: those of an earlier try, if there was one."""
    request = joining.kept(invitation.id)
    key = own.key_of(request) if request is not None else None
    if request is not None and key is not None:
        return key, request
    if new_key:
        request = own.begin_renewal()
        key = own.next_key()
    else:
        key = own.key()
        request = certificates.signing_request(key)
    joining.keep(invitation.id, request)
    return key, request


def record_identity(ledger: Ledger, event: str, site: Site, issued: IssuedCertificate) -> None:
    """Write the ledger's line about a certificate, unless it is there already: a crash may have come between it and
    `site.json`.
    """
    certificate = certificates.load_certificate(issued.certificate, "the issued certificate")
    fingerprint = certificates.fingerprint(certificate)
    if any(entry.certificate_sha256 == fingerprint for entry in ledger.entries(IdentityEntry)):
        return
    ledger.append(IdentityEntry(
        event=event, site=site.site, federation=site.federation, serial=f"{certificate.serial_number:x}",
        not_after=certificates.not_after(certificate).isoformat(), certificate_sha256=fingerprint,
        authority_sha256=site.authority_fingerprint, receipt_key=site.receipt_key,
    ))  # fmt: skip


def _enrol(
    invitation: Invitation,
    request: bytes,
    ledger_key: Ed25519PublicKey,
    proof: bytes,
    meter: Meter,
    proxy: Proxy | None,
) -> Enrolled:
    """Steps 3 and 4. A connection that fails is looked into, and the error says why."""
    authority = invitation.authority.encode()
    bootstrap = invitation.key.encode(), invitation.certificate.encode()
    connection = Connection(invitation.address, authority, *bootstrap, meter, proxy=proxy)
    try:
        return connection.enrol(invitation.id, request, ledger_key.public_bytes_raw(), proof)
    except Unavailable:
        raise diagnose(invitation.address, authority, proxy=proxy) from None
    finally:
        connection.close()


def enrolment_proof(invitation: Invitation, request: bytes) -> bytes:
    """What the ledger key signs to show that it, the invitation and the request belong together."""
    return b"wardround-enrol-v1\0" + invitation.id.encode() + b"\0" + hashlib.sha256(request).digest()


def _roots(invitation: Invitation, issued: IssuedCertificate) -> Chain:
    """The authorities to trust: the invitation's, and those that it vouches for. Raises BadData: the reply names
    none of them.
    """
    known = chains.load_chain(invitation.authority.encode(), "the invitation's authority")
    try:
        return chains.vouched_roots(chains.load_chain(issued.authority, "the coordinator's authority"), known)
    except BadData:
        raise BadData("the coordinator's reply names another authority than the invitation; nothing was kept") from None


def _name(invitation: Invitation, reply: Enrolled) -> certificates.Name:
    """The name that the certificate must have. Raises BadData: somebody else was enrolled."""
    if (reply.site, reply.federation) != (invitation.site, invitation.federation):
        raise BadData(
            f"the coordinator enrolled `{reply.site[:64]}` of `{reply.federation[:64]}`, the invitation is for "
            f"`{invitation.site}` of `{invitation.federation}`; nothing was kept"
        )
    return certificates.Name(invitation.federation, "site", invitation.site)
