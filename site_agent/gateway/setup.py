"""Opens a site's connection, ledger and command handler: for the agent, or for one command while no service runs."""

import datetime
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from site_agent.gateway.commands import CommandHandler
from site_agent.gateway.connection.client import Connection
from site_agent.gateway.connection.diagnosis import diagnose
from site_agent.gateway.connection.interrupt import Interrupt
from site_agent.gateway.connection.session import Session
from site_agent.gateway.enrolment.identity import Identity
from site_agent.gateway.exit import egress
from site_agent.gateway.exit.ledger import Ledger
from site_agent.gateway.fitting import declaration_of
from site_agent.state import formats
from site_agent.state.directory import SiteState
from site_agent.state.person import Person
from site_agent.state.site import Site
from wardround.errors import NeedsPerson, RefusedForGood, Unavailable, WardroundError
from wardround.local import durable
from wardround.records.assignment import SiteStatus
from wardround.records.invitation import stamp

log = logging.getLogger(__name__)


def is_fatal(error: WardroundError) -> bool:
    """Whether the coordinator has said that this site, or this program, cannot go on without a person. Nobody else can:
    what the trainer or a command says never becomes this kind.
    """
    return isinstance(error, RefusedForGood)


def open_session(site: Site, own: Identity) -> Session:
    """A session with the coordinator, under the site's certificate as it is on the disk."""

    def renews() -> bool:
        return own.renewal_credentials(datetime.datetime.now(datetime.UTC)) is not None

    return Session(lambda meter: Connection(site.address, *own.credentials(), meter, site.site, own.proxy()), renews)


def why_unreachable(site: Site, own: Identity) -> WardroundError:
    """What keeps the coordinator from being reached, looked at from here."""
    why = diagnose(site.address, own.authority_file.read_bytes(), own.certificate_file, own.key_file, own.proxy())
    if why.code == "CERTIFICATE_EXPIRED" and own.renewal_credentials(datetime.datetime.now(datetime.UTC)):
        ended = stamp(own.certificate().not_valid_after_utc)
        return Unavailable(f"this site's certificate ended on {ended}; the agent tries to renew it with the same key")
    return why


@contextmanager
def handler_alone(state: SiteState) -> Iterator[tuple[CommandHandler, Interrupt]]:
    """A command handler for one command while no service runs.

    Raises:
        TryAgain: another process owns the state directory.
    """
    state.require_joined()
    with durable.StateLock(state.root, "site-agent"):
        formats.bring_forward(state.root)
        site = state.site()
        own = Identity(state.identity)
        ledger = Ledger(state.ledger, own.ledger_key())
        ledger.refuse_unbegun()
        session = open_session(site, own)
        try:
            yield CommandHandler(state, site, ledger, session), Interrupt()
        finally:
            session.close()
            try:
                egress.record_control(ledger, session.meter)
            finally:
                ledger.close()


def as_needs_person(error: WardroundError, site: Site) -> NeedsPerson:
    """A fatal refusal, with what it means for this hospital."""
    why = error.message.removesuffix(f" ({error.code})")
    message = f"the coordinator at {site.address} refuses site `{site.site}` ({error.code}): {why}"
    return NeedsPerson(message, hint=error.hint, code=error.code)


def withdraw_all_and_leave(handler: CommandHandler, person: Person) -> list[str]:
    """End the membership for one command while no service runs. The studies whose withdrawal it was not told."""
    unreported = []
    for consent in handler.approved():
        handler.record_withdrawal(handler.withdraw(consent.study, person), person)
        try:
            with handler.session.use() as connection:
                handler.declare(connection, declaration_of(consent, SiteStatus.WITHDRAWN))
        except durable.StorageFailed:
            raise
        except WardroundError as error:
            log.warning("%s", error.message)
            unreported.append(consent.study)
    handler.leave(person)
    return unreported
