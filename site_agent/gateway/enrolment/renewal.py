"""Renew the certificate at half of its life, give or take a tenth: a new key, a new certificate, a new channel.

A thread that waits until then, and looks at the wall clock again and again: a machine that was suspended, or whose
clock was set, is later than its waiting tells. A coordinator that is away is asked again after 1 min, doubling to 1 h,
or as soon as it is back; with 7 days of life there are three and a half for that. So is one whose reply does not go
onto a full disk.
Between two renewals there is a minute at least, whatever the coordinator's certificate and this machine's clock say of
when the next one is due.

A certificate that ended meanwhile opens no connection any more. Its renewal certificate does, for this one call, for as
long as the coordinator's operator lets it; it is asked each minute. Where there is none, only a person can go on.
"""

import datetime
import logging
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from cryptography import x509

from site_agent.gateway.connection.backoff import backoff
from site_agent.gateway.connection.client import Connection
from site_agent.gateway.connection.diagnosis import diagnose
from site_agent.gateway.connection.interrupt import Interrupt
from site_agent.gateway.connection.session import ENDED, Session
from site_agent.gateway.enrolment.identity import Identity, check_clock, check_issued, check_renewal
from site_agent.gateway.enrolment.join import record_identity
from site_agent.gateway.exit.ledger import Ledger
from site_agent.state.directory import Site
from wardround.errors import BadData, CannotWrite, NeedsPerson, Refused, RefusedForGood, TryAgain, Unavailable
from wardround.local import durable
from wardround.records.enrolment import IssuedCertificate
from wardround.records.invitation import stamp
from wardround.signing import certificates, chains

LEAST_S = 60  # between two tries, failed or not
LOOK_S = 15  # between two looks at the wall clock
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
        CannotWrite: the disk is full; a later call begins with a whole pair.
        TryAgain: it is in trouble, or its reply is not what it must be; the old pair is still in use.
        NeedsPerson: the certificate has ended, and the coordinator takes nothing that this site has.
    """
    request = own.begin_renewal()
    reply = _reply(own, site, session, request)
    key = own.next_key()
    try:
        roots = chains.vouched_roots(chains.load_chain(reply.authority, "the reply's authority"), own.roots())
        trusted = chains.chain_pem(roots)
        certificate = _checked(reply, trusted, key, site)
    except (BadData, NeedsPerson) as error:
        raise TryAgain(f"the coordinator's renewal cannot be used: {error.message}", hint=error.hint) from None
    record_identity(ledger, "renewed", replace(site, authority_fingerprint=certificates.fingerprint(roots[0])), reply)
    if roots != own.roots():
        log.warning("the federation's authority is %s now", certificates.fingerprint(roots[0]))
        durable.write_file(own.authority_file, trusted)
    own.adopt(reply.certificate, reply.renewal)
    session.replace()
    return certificate


def _reply(own: Identity, site: Site, session: Session, request: bytes) -> IssuedCertificate:
    """Ask with the certificate; where it has ended, with its renewal certificate. Raises as ``renew``."""
    now = datetime.datetime.now(datetime.UTC)
    ended = now >= own.certificate().not_valid_after_utc
    renewal = own.renewal_credentials(now)
    if renewal is None or not ended:
        try:
            with session.use() as connection:
                return connection.renew(request)
        except Unavailable:
            if ended:
                refuse_ended(own, site)
            raise
        except (RefusedForGood, TryAgain) as error:
            if error.code != ENDED or renewal is None:
                raise
    connection = Connection(site.address, *renewal, session.meter, site.site, own.proxy())
    try:
        return connection.renew(request)
    finally:
        connection.close()


def refuse_ended(own: Identity, site: Site) -> None:
    """Look into why there is no connection, of a site whose certificate has ended.

    Raises:
        NeedsPerson: the coordinator is there, and does not take the certificate.
    """
    why = diagnose(site.address, own.authority_file.read_bytes(), own.certificate_file, own.key_file, own.proxy())
    if why.code == ENDED:
        raise why


def _checked(reply: IssuedCertificate, trusted: bytes, key: certificates.PrivateKey, site: Site) -> x509.Certificate:
    """The certificate of a reply. ``trusted``: the authorities, PEM.

    Raises:
        BadData: it is not of this site, this key or an authority that is trusted.
        NeedsPerson: the clocks are a day apart.
    """
    now = datetime.datetime.now(datetime.UTC)
    warning = check_clock(reply.server_time_s, now)
    if warning:
        log.warning("%s", warning)
    name = certificates.Name(site.federation, "site", site.site)
    certificate = check_issued(reply.certificate, key, trusted, name, now)
    check_renewal(reply, key, trusted, now)
    return certificate


def keep_renewed(
    own: Identity,
    site: Site,
    session: Session,
    ledger: Ledger,
    stopping: Interrupt,
    renewed: Callable[[], object],
    least_s: float = LEAST_S,
    now: Callable[[], datetime.datetime] = partial(datetime.datetime.now, datetime.UTC),
) -> None:
    """Renew whenever it is due, at least ``least_s`` after the last time, until ``stopping``. Calls ``renewed`` after
    each. Waits by ``stopping`` alone.

    Raises:
        Interrupted: the agent stops.
        StorageFailed: the disk failed.
        RefusedForGood: the coordinator has ended the membership.
        NeedsPerson: the certificate has ended, and the coordinator takes nothing that this site has.
    """
    least = 0.0
    while True:
        stopping.wait(least)
        when = due(own.certificate(), _RANDOM.uniform(-0.1, 0.1))
        while (left_s := (when - now()).total_seconds()) > 0:
            stopping.wait(min(left_s, LOOK_S))
        least = least_s
        for wait_s in backoff(least_s, 3600):
            times_connected = session.times_connected
            try:
                certificate = renew(own, site, session, ledger)
                break
            except durable.StorageFailed:
                raise
            except (Unavailable, TryAgain, Refused, CannotWrite) as error:
                ends = own.certificate().not_valid_after_utc
                log.warning("%s; the certificate is good to %s", error.message, stamp(ends))
                stopping.wait(least_s)
                waited = least_s
                while waited < wait_s and now() < ends and session.times_connected == times_connected:
                    stopping.wait(least_s)
                    waited += least_s
        log.info("certificate renewed, good to %s", stamp(certificate.not_valid_after_utc))
        renewed()
