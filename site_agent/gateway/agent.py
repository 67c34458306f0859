"""The agent: assignment in, work done, result out, until it is stopped.

Four threads, each asleep until something happens:

    watch   keeps one stream open to the coordinator; offers are kept, assignments put into the inbox  (``inbox``)
    work    takes one assignment at a time from the inbox                                              (``round``)
    secure  answers what is shown of secure aggregation, while the trainer trains            (``secure.exchange``)
    renew   renews the certificate when half of its life is over                            (``enrolment.renewal``)
"""

import logging
import threading
import time
from collections.abc import Callable

from site_agent.gateway.commands import CommandHandler
from site_agent.gateway.connection.backoff import backoff
from site_agent.gateway.connection.client import Connection
from site_agent.gateway.connection.interrupt import Interrupt, Interrupted
from site_agent.gateway.consent.approvals import reportable_code
from site_agent.gateway.enrolment.identity import Identity
from site_agent.gateway.enrolment.renewal import LEAST_S, keep_renewed
from site_agent.gateway.exit import egress
from site_agent.gateway.exit.ledger import Ledger
from site_agent.gateway.exit.returning import give_back_lost
from site_agent.gateway.fitting import declaration_of
from site_agent.gateway.inbox import Inbox, ResolveUploads, Work
from site_agent.gateway.peer_requests import CheckSum, ShownSum
from site_agent.gateway.requests import ReleaseDecision
from site_agent.gateway.round import Rounds
from site_agent.gateway.secure.exchange import SecureRounds
from site_agent.gateway.setup import is_fatal, open_session, why_unreachable
from site_agent.gateway.threads import guarded
from site_agent.handoff import Trainer
from site_agent.state.directory import Consent, Offer, SiteState
from site_agent.state.person import Person
from wardround.errors import (
    CannotWrite,
    NeedsPerson,
    Refused,
    TryAgain,
    Unavailable,
    WardroundError,
)
from wardround.local.durable import StorageFailed
from wardround.local.event import Latch
from wardround.local.rate_limit import RateLimitedLog
from wardround.records.assignment import STOP, TRAIN, Assignment, Declaration, SiteStatus, StopReason
from wardround.records.event import CertificateFork, Goodbye
from wardround.records.invitation import stamp
from wardround.records.ledger.entries import SessionEntry
from wardround.records.secure_messages import AttemptRef, SecureShown

STEADY_S = 10  # a connection that lasted longer is tried again at once when it ends
STOP_S = 15  # of which one call to a coordinator that does not answer takes ten
FIRST_TRY_S = 5  # how long `ready` waits for the first connection, which may well not come
STUDY_STATES = (StopReason.FINISHED, StopReason.STOPPED, StopReason.FAILED, StopReason.PAUSED)
log = logging.getLogger(__name__)


class Agent:
    """One site's gateway while it runs. ``wait`` returns when it is to stop, with the reason if that is an error.
    ``least_renewal_s``: between two renewals of the certificate, whatever the coordinator says."""

    def __init__(self, state: SiteState, least_renewal_s: float = LEAST_S) -> None:
        self._state, self._least_renewal_s = state, least_renewal_s
        self._site, self._identity = state.site(), Identity(state.identity)
        self._ledger = Ledger(state.ledger, self._identity.ledger_key())
        self._ledger.refuse_unbegun()
        self._session = open_session(self._site, self._identity)
        self.commands = CommandHandler(state, self._site, self._ledger, self._session)
        trainer = Trainer(state.root)
        self._exchange = SecureRounds(state, self._site, self._identity.ledger_key(), self._session, self._ledger)
        self._rounds = Rounds(state, self._site, self._session, self._ledger, trainer, self._declare, self._exchange)
        self._log = RateLimitedLog(log)
        self._stopping, self.stopped = Interrupt(), Latch()
        self._first_try = threading.Event()
        self._error: WardroundError | None = None
        self._connected = self._was_connected = False  # now; since ``_watch`` last looked
        self.certificate_fork_since = ""  # since when the coordinator sees two certificates renewed from one
        self._watching = Interrupt()
        self._inbox = Inbox()
        self._threads = [
            threading.Thread(target=self._guarded, args=(act,), name=act.__name__, daemon=True)
            for act in (self._watch, self._work, self._secure, self._renew)
        ]

    def start(self) -> None:
        """Begin, and wait a moment for the first connection, whether or not it comes."""
        for thread in self._threads:
            thread.start()
        self._first_try.wait(FIRST_TRY_S)

    def stop(self) -> None:
        """Stop all that is under way; the ledger's head is signed when this returns.

        A thread that does not end (a disk that does not answer) could still write into the ledger: then it is left
        open, as a crash leaves it, and its next start takes up what is there. Safe to repeat.
        """
        self._stopping.throw()
        self._inbox.close()
        self._exchange.close()
        self._watching.throw()
        until = time.monotonic() + STOP_S
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(timeout=max(0.0, until - time.monotonic()))
        self._session.close()
        if still := [thread.name.strip("_") for thread in self._threads if thread.is_alive()]:
            log.critical("the agent's thread %s does not end; the ledger is left as it is", " and ".join(still))
            return
        try:
            if not (self._ledger.failed or self._ledger.closed):  # what was sent since the last connection ended
                egress.record_control(self._ledger, self._session.meter)
        finally:
            self._ledger.close()

    def wait(self) -> WardroundError | None:
        """Wait until something ends the agent: ``stopped`` is set, or an error that no retry helps."""
        self.stopped.wait()
        return self._error

    def fail(self, error: WardroundError) -> None:
        """Let ``wait`` return with an error, the first one."""
        self._error = self._error or error
        self._first_try.set()
        self.stopped.set()

    @property
    def connected(self) -> bool:
        return self._connected

    def refresh(self) -> list[Offer]:
        """Ask for the studies now.

        Raises:
            Unavailable: at once, if the coordinator is not connected.
        """
        self._refuse_unconnected()
        return self.commands.refresh(self._stopping)

    def fetch_receipts(self) -> int:
        """Ask for the coordinator's copy of the receipts now. Returns how many there are.

        Raises:
            Unavailable: at once, if the coordinator is not connected.
        """
        self._refuse_unconnected()
        return self.commands.fetch_receipts(self._stopping)

    def check_sum(self, asked: CheckSum) -> ShownSum:
        """Look at a round's sum for a person. Raises Unavailable: at once, if the coordinator is not connected."""
        self._refuse_unconnected()
        return self.commands.check_sum(asked, self._stopping)

    def approved(self, consent: Consent) -> bool:
        """Tell the coordinator of an approval. False: it cannot be reached, and the next connection does it.

        A round that is under way, or waits for a person, was begun under another consent: it is begun anew.
        """
        self._inbox.begin_anew(consent.study)
        return self._tell(consent, SiteStatus.READY)

    def withdraw(self, study: str, person: Person) -> bool:
        """Stop this study at once, mid-round too. False: the coordinator will be told with the next connection."""
        if (consent := self.commands.withdraw(study, person)) is None:
            return True  # the coordinator never heard of it
        self._inbox.drop(study)
        self.commands.record_withdrawal(consent, person)
        return self._tell(consent, SiteStatus.WITHDRAWN)

    def decide(self, study: str, round_: int, decision: ReleaseDecision, update: str, person: Person) -> bool:
        """Record a person's release decision on an update that waits.

        Returns:
            True if its round goes on at once; False: when the coordinator asks for it again.
        """
        self.commands.releases.decide(study, round_, decision, update, person)
        return self._inbox.release(study, round_)

    def leave(self, person: Person) -> list[str]:
        """End the membership and this agent. The studies whose withdrawal the coordinator was not told."""
        approved = [consent.study for consent in self.commands.approved()]
        unreported = [study for study in approved if not self.withdraw(study, person)]
        self.commands.leave(person)
        self.fail(NeedsPerson(f"site `{self._site.site}` left federation `{self._site.federation}`"))
        return unreported

    def _refuse_unconnected(self) -> None:
        if not self._connected:
            raise Unavailable(f"no connection to the coordinator at {self._site.address}")

    def _tell(self, consent: Consent, status: SiteStatus) -> bool:
        """Declare where this site stands. False: the coordinator cannot be reached, and the next connection does it."""
        if not self._connected:
            return False
        try:
            with self._session.use() as connection:
                self.commands.declare(connection, declaration_of(consent, status))
        except (Unavailable, TryAgain):
            return False
        finally:
            self._ledger.sign()
        return True

    # watch

    def _watch(self) -> None:
        waits = backoff()
        logged = ""
        while not self._stopping.thrown:
            began = time.monotonic()
            try:
                with self._session.use() as connection:
                    self._watch_once(connection)
                logged = ""
            except Interrupted:
                if self._stopping.thrown:
                    return
                continue  # the certificate was renewed while this connection began
            except (Unavailable, TryAgain, Refused) as error:
                if self._was_connected:
                    self._was_connected, logged = False, ""
                if self._stopping.thrown:
                    return
                logged = self._log_if_new(error, logged)
                self._session.note_unreachable()
            self._first_try.set()
            waits = backoff() if time.monotonic() - began > STEADY_S else waits
            self._stopping.wait(next(waits))

    def _watch_once(self, connection: Connection) -> None:
        """Use one connection from its first call to its end.

        The ledger has its beginning and end, unless there were many connections of late; the end of one in which
        payload left it has always. The bytes of all of them stand in the next `control` line.
        """
        watching = self._watching = Interrupt()
        self._stopping.check()
        if not self._session.is_current(connection):
            return  # replaced before there was a watch to interrupt
        self.commands.keep_listed(connection.studies(watching, patient=self._first_try.is_set()))
        before = self._session.bytes_up()
        listed = self._ledger.append_often(SessionEntry(event="opened", peer=connection.address))
        try:
            give_back_lost(connection, self._ledger)
            self.commands.declare_all(connection, listed=listed)
            self._ledger.sign()
            self._was_connected = self._connected = True
            self._session.note_connected()
            self._first_try.set()
            self._log.info("connected to the coordinator at %s", connection.address)
            self._inbox.resolve_uploads()
            for event in connection.watch(watching):
                if isinstance(event, Goodbye):
                    self._log.info("the coordinator is going down; connecting again when it is back")
                    return
                if isinstance(event, Offer):
                    self.commands.keep(event)
                elif isinstance(event, CertificateFork):
                    self._warn_of(event)
                elif isinstance(event, SecureShown):
                    self._exchange.shown(event)
                else:
                    self._take(event)
        except Unavailable:
            if not watching.thrown:
                raise
            return  # it was ended from here: the agent stops, or the certificate is new
        finally:
            self._connected = False
            sent = self._session.bytes_up() - before
            if listed or sent:
                egress.record_control(self._ledger, self._session.meter)
                self._ledger.append(SessionEntry(event="closed", peer=connection.address, bytes_up=sent))
            self._ledger.sign()

    def _warn_of(self, event: CertificateFork) -> None:
        self.certificate_fork_since = stamp(event.since)
        self._log.warning(
            "since %s the coordinator sees calls with two certificates of this site that were renewed from the same "
            "one: somebody else holds its keys, or this machine was copied; if nobody here knows of a copy, tell the "
            "coordinator's operator",
            self.certificate_fork_since,
        )

    def _log_if_new(self, error: WardroundError, logged: str) -> str:
        """Log why there is no connection, unless that was ``logged`` last. Returns what is logged now."""
        why = why_unreachable(self._site, self._identity) if isinstance(error, Unavailable) else error
        if why.message != logged:
            self._log.warning("no connection to the coordinator: %s; trying again. %s", why.message, why.hint)
        return why.message

    def _take(self, assignment: Assignment) -> None:
        """Put an assignment into the inbox, and note what it says of its study."""
        state = assignment.reason if assignment.kind == STOP else "running"
        if state == "running" or state in STUDY_STATES:
            self.commands.coordinator_says(assignment.study, assignment.digest, str(state))
        self._inbox.put(assignment, approved=self._state.consent(assignment.study) is not None)

    # work

    def _work(self) -> None:
        while (work := self._inbox.next()) is not None:
            if isinstance(work, ResolveUploads):
                self._resolve_uploads()
                continue
            try:
                self._do(work)
            finally:
                self._inbox.done()

    def _resolve_uploads(self) -> None:
        try:
            self._rounds.resolve(self._stopping)
        except (Unavailable, TryAgain) as error:
            self._log.warning("%s; asking again with the next connection", error.message)
        except WardroundError as error:
            if is_fatal(error) or isinstance(error, StorageFailed):
                raise
            log.error("%s", error.message)

    def _do(self, work: Work) -> None:
        assignment = work.assignment
        try:
            if self._rounds.do(assignment, work.interrupt):
                self._inbox.hold(assignment)
                self._declare(assignment, SiteStatus.HELD)
                if self.commands.releases.is_decided(
                    assignment.study
                ):  # given while this thread was still declaring that it waits
                    self._inbox.release(assignment.study, assignment.round)
        except Interrupted:
            self._log.info("round %d of `%s` was called off", assignment.round, assignment.study)
            self._inbox.resolve_uploads()  # the round may have closed while its receipt was on the way
        except WardroundError as error:
            if is_fatal(error) or isinstance(error, StorageFailed):
                raise
            self._log.error("round %d of `%s`: %s. %s", assignment.round, assignment.study, error.message, error.hint)
            self._decline(assignment, reportable_code(error))
        except Exception:
            self._log.exception("round %d of `%s` failed here", assignment.round, assignment.study)
            self._decline(assignment, "DECLINED_TRAINING_FAILED")

    def _decline(self, assignment: Assignment, code: str) -> None:
        """Tell the coordinator a code, and nothing else."""
        if assignment.kind == STOP:
            return
        try:
            self._rounds.declined(assignment, code)
        except CannotWrite as error:
            if isinstance(error, StorageFailed):
                raise
            self._log.error("%s; `status` will not say that round %d was declined", error.message, assignment.round)
        self._declare(assignment, SiteStatus.DECLINED, code)

    def _declare(self, assignment: Assignment, status: SiteStatus, code: str = "", estimate_s: int = 0) -> None:
        """Declare where this site stands with one assignment. A coordinator that cannot be reached asks again."""
        study = (assignment.study, assignment.revision, assignment.digest)
        declaration = Declaration(*study, status, assignment.round, assignment.attempt, code, estimate_s=estimate_s)
        try:
            with self._session.use() as connection:
                self.commands.declare(connection, declaration, often=not estimate_s)
        except (Unavailable, TryAgain) as error:
            self._log.warning("%s", error.message)
        except WardroundError as error:
            if is_fatal(error) or isinstance(error, StorageFailed):
                raise
            self._log.error(
                "the coordinator does not take that round %d is %s: %s", assignment.round, status, error.message
            )
        finally:
            self._ledger.sign()

    # secure

    def _secure(self) -> None:
        self._exchange.answer(self._stopping, self._decline_attempt)

    def _decline_attempt(self, ref: AttemptRef, error: WardroundError) -> None:
        """Tell the coordinator a code, and nothing else."""
        assignment = Assignment(ref.study, ref.revision, ref.digest, ref.round, ref.attempt, TRAIN)
        self._decline(assignment, reportable_code(error))

    # renew

    def _renew(self) -> None:
        try:
            keep_renewed(
                self._identity, self._site, self._session, self._ledger, self._stopping,
                lambda: self._watching.throw(), self._least_renewal_s,
            )  # fmt: skip
        except WardroundError as error:
            if is_fatal(error) or isinstance(error, StorageFailed):
                raise
            why = f"the certificate cannot be renewed: {error.message}"
            raise NeedsPerson(why, hint=error.hint, code=error.code) from None

    def _guarded(self, act: Callable[[], None]) -> None:
        guarded(act, self._stopping, self._inbox.resolve_uploads, self.fail, self._site)
