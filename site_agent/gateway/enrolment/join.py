"""Join a federation with an invitation: the numbered steps, each safe to repeat after a crash at any other.

    1. read the invitation: form, check digits, expiry by this machine's clock; no network yet
    2. make the keys, durably, readable by this user alone; begin the ledger
    3. connect with the bootstrap certificate, verifying the coordinator against the invitation's authority
    4. send the signing request and the proof that the ledger key is ours
    5. (the coordinator spends the invitation, once)
    6. the reply: certificate, authority, receipt key, its time
    7. check all of it, record it in the ledger, write it; `site.json` last: it is what makes this a site

Run again with the same invitation, it sends the same request and gets the same certificate.
"""

import datetime
import hashlib
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from site_agent.gateway.connection.client import Connection
from site_agent.gateway.connection.diagnosis import diagnose
from site_agent.gateway.connection.meter import Meter
from site_agent.gateway.connection.proxy import Proxy
from site_agent.gateway.enrolment.identity import Identity, Joining, check_clock, check_issued
from site_agent.gateway.exit.egress import record_control
from site_agent.gateway.exit.ledger import Ledger
from site_agent.state.directory import Site, SiteState
from wardround.errors import BadData, NeedsPerson, Unavailable
from wardround.local import durable
from wardround.records.enrolment import Enrolled, IssuedCertificate
from wardround.records.invitation import Invitation
from wardround.records.ledger.entries import IdentityEntry
from wardround.signing import certificates


@dataclass(frozen=True)
class Joined:
    """What a join made. ``warning`` is about the clocks, "" if they agree."""

    site: Site
    certificate: Path
    key: Path
    expires: datetime.datetime
    warning: str


def join(state: SiteState, text: str, now: datetime.datetime, proxy: Proxy | None = None) -> Joined:
    """Redeem the invitation in ``text`` for ``state``.

    Args:
        proxy: the HTTP proxy on the way, which is kept; None: the one that is kept already, or none.

    Raises:
        BadData: the invitation is damaged, expired or used, or the coordinator's reply is not what it must be.
        NeedsPerson: this directory is a site already, another authority answers, or the clocks are a day apart.
        Unavailable: the coordinator cannot be reached; run the same command again.
    """
    already = state.joined()
    invitation = Invitation.decode(text)  # 1
    invitation.refuse_expired(now)
    if already:
        site = state.site()
        raise NeedsPerson(
            f"{state.root} is site `{site.site}` of federation `{site.federation}` already; its keys are untouched",
            hint="use another --state to join again, or as another site",
        )
    durable.make_folder(state.root)
    with durable.StateLock(state.root, "site-agent join"):
        state.make_folders()
        own = Identity(state.identity)
        if proxy is not None:
            own.save_proxy(proxy)
        key, ledger_key = own.make_keys()  # 2
        ledger = Ledger(state.ledger, ledger_key)
        try:
            ledger.begin()
            joining = Joining(state.identity)
            request = joining.request(invitation.id, key)
            meter = Meter()
            proof = ledger_key.sign(_proof(invitation, request))
            try:
                reply = _enrol(invitation, request, ledger_key.public_key(), proof, meter, own.proxy())
            finally:
                record_control(ledger, meter)
            issued = reply.issued
            warning = check_clock(issued.server_time_s, now)  # 7
            authority = _authority(invitation, issued)
            certificate = check_issued(issued.certificate, key, issued.authority, _name(invitation, reply), now)
            site = Site(
                site=invitation.site, federation=invitation.federation, address=invitation.address,
                receipt_key=reply.receipt_key.hex(), renew_after_s=issued.renew_after_s,
                authority_fingerprint=certificates.fingerprint(authority),
            )  # fmt: skip
            durable.write_file(own.authority_file, issued.authority)
            durable.write_file(own.certificate_file, issued.certificate)
            record_identity(ledger, "issued", site, issued)
            state.save_site(site)
            joining.done()
        finally:
            ledger.close()
    return Joined(site, own.certificate_file, own.key_file, certificates.not_after(certificate), warning)


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


def _proof(invitation: Invitation, request: bytes) -> bytes:
    return b"wardround-enrol-v1\0" + invitation.id.encode() + b"\0" + hashlib.sha256(request).digest()


def _authority(invitation: Invitation, issued: IssuedCertificate) -> x509.Certificate:
    """The authority that both the reply and the invitation name. Raises BadData: they name two."""
    authority = certificates.load_certificate(issued.authority, "the coordinator's authority")
    if authority != certificates.load_certificate(invitation.authority.encode(), "the invitation's authority"):
        raise BadData("the coordinator's reply names another authority than the invitation; nothing was kept")
    return authority


def _name(invitation: Invitation, reply: Enrolled) -> certificates.Name:
    """The name that the certificate must have. Raises BadData: somebody else was enrolled."""
    if (reply.site, reply.federation) != (invitation.site, invitation.federation):
        raise BadData(
            f"the coordinator enrolled `{reply.site[:64]}` of `{reply.federation[:64]}`, the invitation is for "
            f"`{invitation.site}` of `{invitation.federation}`; nothing was kept"
        )
    return certificates.Name(invitation.federation, "site", invitation.site)
