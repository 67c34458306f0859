"""Renew the certificate at half of its life, give or take a tenth: a new key, a new certificate, a new channel.

A thread that sleeps until then. A coordinator that is away is asked again after 1 min, doubling to 1 h; with 7 days of
life there are three and a half for it to come back. Between two renewals there is a minute at least, whatever the
coordinator's certificate and this machine's clock say of when the next one is due.
"""

import datetime
import logging
import random
from collections.abc import Callable

from cryptography import x509

from site_agent.gateway.connection.backoff import backoff
from site_agent.gateway.connection.interrupt import Interrupt
from site_agent.gateway.connection.session import Session
from site_agent.gateway.enrolment.identity import Identity, check_clock, check_issued
from site_agent.gateway.enrolment.join import record_identity
from site_agent.gateway.exit.ledger import Ledger
from site_agent.state.directory import Site
from wardround.errors import BadData, NeedsPerson, Refused, TryAgain, Unavailable
from wardround.records.enrolment import IssuedCertificate
from wardround.records.invitation import stamp
from wardround.signing import certificates

LEAST_S = 60  # between two tries, failed or not
_RANDOM = random.SystemRandom()
log = logging.getLogger(__name__)


def due(certificate: x509.Certificate, jitter: float) -> datetime.datetime:
    """When to renew: at half of the certificate's life, moved by ``jitter`` (-0.1 to 0.1) of that half."""
    half = (certificate.not_valid_after_utc - certificate.not_valid_before_utc) / 2
    return certificate.not_valid_before_utc + half * (1 + jitter)


def renew(own: Identity, site: Site, session: Session, ledger: Ledger) -> x509.Certificate:
    """Renew now: new key, checked certificate, ledger line, both taken into use.

    Raises:
        Unavailable: the coordinator cannot be reached; the old pair is still whole.
        TryAgain: it is in trouble, or its reply is not what it must be; the old pair is still in use.
    """
    request = own.begin_renewal()
    with session.use() as connection:
        reply = connection.renew(request)
    authority, key = own.authority_file.read_bytes(), own.next_key()
    try:
        certificate = _checked(reply, authority, key, site)
    except (BadData, NeedsPerson) as error:
        raise TryAgain(f"the coordinator's renewal cannot be used: {error.message}", hint=error.hint) from None
    record_identity(ledger, "renewed", site, reply)
    own.adopt(reply.certificate)
    session.replace()
    return certificate


def _checked(reply: IssuedCertificate, authority: bytes, key: certificates.PrivateKey, site: Site) -> x509.Certificate:
    """The certificate of a reply.

    Raises:
        BadData: it is not of this site, this key or this authority.
        NeedsPerson: the clocks are a day apart.
    """
    now = datetime.datetime.now(datetime.UTC)
    trusted = certificates.load_certificate(authority, "the authority that this site trusts")
    if certificates.load_certificate(reply.authority, "the reply's authority") != trusted:
        raise BadData("it names another authority than the one this site trusts")
    warning = check_clock(reply.server_time_s, now)
    if warning:
        log.warning("%s", warning)
    name = certificates.Name(site.federation, "site", site.site)
    return check_issued(reply.certificate, key, authority, name, now)


def keep_renewed(
    own: Identity, site: Site, session: Session, ledger: Ledger, stopping: Interrupt, renewed: Callable[[], object]
) -> None:
    """Renew whenever it is due, at least ``LEAST_S`` after the last time, until ``stopping``. Calls ``renewed`` after
    each. Waits by ``stopping`` alone.

    Raises:
        Interrupted: the agent stops.
        RefusedForGood: the coordinator has ended the membership.
    """
    least = 0.0
    while True:
        until_due = due(own.certificate(), _RANDOM.uniform(-0.1, 0.1)) - datetime.datetime.now(datetime.UTC)
        stopping.wait(max(least, until_due.total_seconds()))
        least = LEAST_S
        for wait_s in backoff(LEAST_S, 3600):
            try:
                certificate = renew(own, site, session, ledger)
                break
            except (Unavailable, TryAgain, Refused) as error:
                log.warning(
                    "%s; the certificate is good to %s", error.message, stamp(own.certificate().not_valid_after_utc)
                )
                stopping.wait(max(LEAST_S, wait_s))
        log.info("certificate renewed, good to %s", stamp(certificate.not_valid_after_utc))
        renewed()
