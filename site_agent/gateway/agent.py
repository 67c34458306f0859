"""The agent: assignment in, work done, result out, until it is stopped.

Three threads, each asleep until something happens:

    watch   keeps one stream open to the coordinator; offers are kept, assignments put into the inbox
    work    takes one assignment at a time from the inbox (``rounds``)
    renew   renews the certificate when half of its life is over

The inbox holds the last assignment of each study. One that makes the work under way pointless (a newer round, a stop, a
withdrawal) interrupts it at once.
"""

import logging
import threading
from typing import Any

from site_agent.gateway.allowance import SparingLog
from site_agent.gateway.commands import Desk, as_needs_person, fatal, open_line, why_unreachable
from site_agent.gateway.connection.client import Connection, pauses
from site_agent.gateway.connection.interrupt import Interrupt, Interrupted
from site_agent.gateway.connection.messages import STOP, Assignment, Goodbye, TwoLines
from site_agent.gateway.consent.approvals import sayable
from site_agent.gateway.enrolment.identity import Identity
from site_agent.gateway.enrolment.renewal import keep_renewed
from site_agent.gateway.exit import egress
from site_agent.gateway.exit.ledger import Ledger
from site_agent.gateway.round import Rounds
from site_agent.handoff import Trainer
from site_agent.state.directory import Consent, Offer, Site, SiteState
from wardround.errors import (
    CannotWrite,
    NeedsPerson,
    Refused,
    RefusedForGood,
    TryAgain,
    Unavailable,
    WardroundError,
)
from wardround.local import descriptors
from wardround.local.durable import StorageFailed
from wardround.local.event import Latch
from wardround.records.invitation import stamp

FIRST_TRY_S = 5  # how long `ready` waits for the first connection, which may well not come
COORDINATOR_STATES = {"finished": "finished", "stopped": "stopped", "failed": "failed", "paused": "paused"}
log = logging.getLogger(__name__)


class Agent:
    """One site's gateway while it runs. ``wait`` returns when it has stopped, with the reason if that is an error."""

    def __init__(self, state: SiteState) -> None:
        self._state = state
        self._site: Site = state.site()
        self._identity = Identity(state.identity)
        self._ledger = Ledger(state.ledger, self._identity.ledger_key())
        self._ledger.refuse_unbegun()
        self._line = open_line(self._site, self._identity)
        self.desk = Desk(state, self._site, self._ledger, self._line)
        self._rounds = Rounds(state, self._site, self._line, self._ledger, Trainer(state.root))
        self._log = SparingLog(log)
        self._stopping = Interrupt()
        self.stopped = Latch()
        self._first_try = threading.Event()
        self._error: WardroundError | None = None
        self._connected = False
        self.two_lines_since = ""  # since when the coordinator sees two lines of this site's certificates
        self._watching = Interrupt()
        self._changed = threading.Condition()
        self._inbox: dict[str, Assignment] = {}
        self._held: dict[str, Assignment] = {}
        self._ask_about_uploads = False
        self._current: tuple[Assignment, Interrupt] | None = None
        self._threads = [
            threading.Thread(target=self._guarded, args=(act,), name=act.__name__, daemon=True)
            for act in (self._watch, self._work, self._renew)
        ]

    def start(self) -> None:
        """Begin, and wait a moment for the first connection, whether or not it comes."""
        for thread in self._threads:
            thread.start()
        self._first_try.wait(FIRST_TRY_S)

    def stop(self) -> None:
        """Stop all that is under way; the ledger's head is signed when this returns."""
        self._stopping.throw()
        with self._changed:
            current = self._current
            self._changed.notify_all()
        self._watching.throw()
        if current is not None:
            current[1].throw()
        for thread in self._threads:
            thread.join(timeout=30)
        self._line.close()
        try:
            if not self._ledger.failed:  # what was said since the last connection ended
                egress.record_control(self._ledger, self._line.meter)
        finally:
            self._ledger.close()

    def wait(self) -> WardroundError | None:
        """Wait until something ends the agent: a call of ``end``, or an error that no retry helps."""
        self.stopped.wait()
        return self._error

    def fail(self, error: WardroundError) -> None:
        """Let ``wait`` return with an error."""
        self._fail(error)

    def end(self) -> None:
        """Let ``wait`` return."""
        self.stopped.set()

    @property
    def connected(self) -> bool:
        return self._connected

    def refresh(self) -> list[Offer]:
        """Ask for the studies now. Raises Unavailable at once where the line is down."""
        if not self._connected:
            raise Unavailable(f"no line to the coordinator at {self._site.address}")
        return self.desk.refresh(self._stopping)

    def fetch_receipts(self) -> int:
        """Ask for the coordinator's copy of the receipts now. Raises Unavailable at once where the line is down."""
        if not self._connected:
            raise Unavailable(f"no line to the coordinator at {self._site.address}")
        return self.desk.fetch_receipts(self._stopping)

    def approved(self, consent: Consent) -> bool:
        """Tell the coordinator of an approval. False: it cannot be reached, and the next connection does it.

        A round that is under way, or waits for a person, was begun under another consent: it is begun anew.
        """
        study = consent.study
        with self._changed:
            current = self._current if self._current is not None and self._current[0].study == study else None
            again = self._held.pop(study, None) or (current[0] if current is not None else None)
            if again is not None:
                self._inbox.setdefault(study, again)
                self._changed.notify_all()
        if current is not None:
            current[1].throw()
        return self._tell(consent, "ready")

    def withdraw(self, study: str, person: dict[str, Any]) -> bool:
        """Stop this study at once, mid-round too. Whether the coordinator has been told already."""
        consent = self.desk.withdraw(study, person)
        with self._changed:
            self._inbox.pop(study, None)
            self._held.pop(study, None)
            current = self._current
            self._ask_about_uploads = True
            self._changed.notify_all()
        if current is not None and current[0].study == study:
            current[1].throw()
        self.desk.record_withdrawal(consent, person)
        return self._tell(consent, "withdrawn")

    def decide(self, study: str, round_: int, word: str, update: str, person: dict[str, Any]) -> bool:
        """Take a person's word on an update that waits. Whether its assignment is at hand and goes on at once."""
        self.desk.decide(study, round_, word, update, person)
        return self._go_on(study, round_)

    def _go_on(self, study: str, round_: int) -> bool:
        """Put an assignment that waited for a person's word back into the inbox. Whether it goes on, now or already."""
        with self._changed:
            assignment = self._held.pop(study, None)
            if assignment is not None and assignment.round == round_:
                self._inbox[study] = assignment
                self._changed.notify_all()
            under_way = [self._inbox.get(study), self._current[0] if self._current is not None else None]
            return any(one is not None and (one.study, one.round) == (study, round_) for one in under_way)

    def leave(self, person: dict[str, Any]) -> list[str]:
        """End the membership and this agent. The studies whose withdrawal the coordinator has not heard of."""
        untold = [one.study for one in self.desk.approved() if not self.withdraw(one.study, person)]
        self.desk.leave(person)
        self._fail(NeedsPerson(f"site `{self._site.site}` left federation `{self._site.federation}`"))
        return untold

    def _tell(self, consent: Consent, standing: str) -> bool:
        if not self._connected:
            return False
        try:
            with self._line.use() as connection:
                self.desk.declare(connection, consent.study, consent.revision, consent.study_digest, standing)
        except (Unavailable, TryAgain):
            return False
        finally:
            self._ledger.sign()
        return True

    # watch

    def _watch(self) -> None:
        tries = pauses()
        said = ""
        while not self._stopping.thrown:
            try:
                with self._line.use() as connection:
                    self._watch_once(connection)
                tries, said = pauses(), ""
            except Interrupted:
                if self._stopping.thrown:
                    return
                continue  # the certificate was renewed while this connection began
            except (Unavailable, TryAgain, Refused) as error:
                if self._connected_since_last():
                    tries, said = pauses(), ""
                if self._stopping.thrown:
                    return
                said = self._say_once(error, said)
            self._first_try.set()
            self._stopping.wait(next(tries))

    def _watch_once(self, connection: Connection) -> None:
        """One connection, from its first call to its end; in the ledger, where there were not many of late. One in
        which payload left has its end there always, and the bytes of all of them stand in the next `control` line."""
        watching = self._watching = Interrupt()
        self._stopping.check()
        if not self._line.is_current(connection):
            return  # replaced before there was a watch to interrupt
        for offer in connection.studies(watching, patient=self._first_try.is_set()):
            self.desk.keep(offer)
        before = self._line.bytes_up()
        listed = self._ledger.append_often("session", event="opened", peer=connection.address)
        try:
            self.desk.declare_all(connection, listed=listed)
            self._ledger.sign()
            self._was_connected = self._connected = True
            self._first_try.set()
            self._log.info("connected to the coordinator at %s", connection.address)
            with self._changed:
                self._ask_about_uploads = True
                self._changed.notify_all()
            for event in connection.watch(watching):
                if isinstance(event, Goodbye):
                    self._log.info("the coordinator is going down; connecting again when it is back")
                    return
                if isinstance(event, Offer):
                    self.desk.keep(event)
                elif isinstance(event, TwoLines):
                    self._warn_of(event)
                else:
                    self._take(event)
        except Unavailable:
            if not watching.thrown:
                raise
            return  # it was we who ended it: the agent stops, or the certificate is new
        finally:
            self._connected = False
            sent = self._line.bytes_up() - before
            if listed or sent:
                egress.record_control(self._ledger, self._line.meter)
                self._ledger.append("session", event="closed", peer=connection.address, bytes_up=sent)
            self._ledger.sign()

    def _warn_of(self, event: TwoLines) -> None:
        self.two_lines_since = stamp(event.since)
        self._log.warning(
            "since %s the coordinator sees calls with two lines of this site's certificates: somebody else holds its "
            "keys, or this machine was copied; if nobody here knows of a copy, tell the coordinator's operator",
            self.two_lines_since,
        )

    _was_connected = False

    def _connected_since_last(self) -> bool:
        was, self._was_connected = self._was_connected, False
        return was

    def _say_once(self, error: WardroundError, said: str) -> str:
        """Log what keeps the line down, when that is news."""
        why = why_unreachable(self._site, self._identity) if isinstance(error, Unavailable) else error
        if why.message != said:
            self._log.warning("no line to the coordinator: %s; trying on. %s", why.message, why.hint)
        return why.message

    def _take(self, assignment: Assignment) -> None:
        """Put an assignment into the inbox; interrupt what it makes pointless."""
        word = COORDINATOR_STATES.get(assignment.reason) if assignment.kind == STOP else "running"
        if word is not None:
            self.desk.coordinator_says(assignment.study, assignment.digest, word)
        with self._changed:
            current = self._current
            same_study = current is not None and current[0].study == assignment.study
            if same_study and current is not None and current[0].key == assignment.key and not current[1].thrown:
                return  # it is being done
            self._inbox[assignment.study] = assignment
            self._changed.notify_all()
        if same_study and current is not None:
            current[1].throw()

    # work

    def _work(self) -> None:
        while True:
            with self._changed:
                while not (self._inbox or self._ask_about_uploads or self._stopping.thrown):
                    self._changed.wait()
                if self._stopping.thrown:
                    return
                asked, self._ask_about_uploads = self._ask_about_uploads, False
                if not asked:
                    assignment = self._inbox.pop(next(iter(self._inbox)))
                    interrupt = Interrupt()
                    self._current = (assignment, interrupt)
            if asked:
                self._ask_about()
                continue
            try:
                self._do(assignment, interrupt)
            finally:
                with self._changed:
                    self._current = None

    def _ask_about(self) -> None:
        try:
            self._rounds.resolve(self._stopping)
        except (Unavailable, TryAgain) as error:
            self._log.warning("%s; asking again with the next connection", error.message)
        except WardroundError as error:
            if fatal(error) or isinstance(error, StorageFailed):
                raise
            log.error("%s", error.message)

    def _do(self, assignment: Assignment, interrupt: Interrupt) -> None:
        try:
            if self._rounds.do(assignment, interrupt):
                with self._changed:
                    self._held[assignment.study] = assignment
                self._declare(assignment, "held")
                if self.desk.has_word(assignment.study):  # given while this thread was still saying that it waits
                    self._go_on(assignment.study, assignment.round)
        except Interrupted:
            self._log.info("round %d of `%s` was called off", assignment.round, assignment.study)
            with self._changed:
                self._ask_about_uploads = True  # the round may have closed while its receipt was on the way
        except WardroundError as error:
            if fatal(error) or isinstance(error, StorageFailed):
                raise
            self._log.error("round %d of `%s`: %s. %s", assignment.round, assignment.study, error.message, error.hint)
            self._decline(assignment, sayable(error))
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
        self._declare(assignment, "declined", code)

    def _declare(self, assignment: Assignment, standing: str, code: str = "") -> None:
        """Say where this site stands with one assignment. If the coordinator cannot hear, it asks again when it can."""
        try:
            with self._line.use() as connection:
                self.desk.declare(
                    connection, assignment.study, assignment.revision, assignment.digest, standing,
                    round_=assignment.round, attempt=assignment.attempt, code=code, often=True,
                )  # fmt: skip
        except (Unavailable, TryAgain) as error:
            self._log.warning("%s", error.message)
        except WardroundError as error:
            if fatal(error) or isinstance(error, StorageFailed):
                raise
            self._log.error(
                "the coordinator does not take that round %d is %s: %s", assignment.round, standing, error.message
            )
        finally:
            self._ledger.sign()

    # renew

    def _renew(self) -> None:
        try:
            keep_renewed(
                self._identity, self._site, self._line, self._ledger, self._stopping, lambda: self._watching.throw()
            )
        except WardroundError as error:
            if fatal(error) or isinstance(error, StorageFailed):
                raise
            raise NeedsPerson(f"the certificate cannot be renewed: {error.message}", hint=error.hint) from None

    def _guarded(self, act: Any) -> None:
        """Run a thread's work, again after a moment without a file descriptor; an error that no retry helps ends the
        agent."""
        tries = pauses()
        try:
            while self._ran_out(act):
                log.error("this process has no file descriptor left; %s goes on when it has", act.__name__.strip("_"))
                self._stopping.wait(next(tries))
                with self._changed:
                    self._ask_about_uploads = True  # whoever was to ask may have been stopped by it
        except Interrupted:
            return
        except WardroundError as error:
            self._fail(as_needs_person(error, self._site) if fatal(error) else error)
        except Exception as error:
            log.exception("the agent's %s thread failed", act.__name__)
            self._fail(WardroundError(f"a fault in the program ended the agent: {type(error).__name__}"))

    def _ran_out(self, act: Any) -> bool:
        """Whether a thread's work ended because there was no file descriptor; False when it is done."""
        try:
            act()
        except Exception as error:
            if isinstance(error, StorageFailed | RefusedForGood) or not descriptors.ran_out(error):
                raise
            return True
        return False

    def _fail(self, error: WardroundError) -> None:
        self._error = self._error or error
        self._first_try.set()
        self.stopped.set()
