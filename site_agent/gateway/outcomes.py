"""What became of uploads: from the coordinator's answer to the ledger, the journal and the trainer."""

import logging
from collections.abc import Callable
from typing import Any

from site_agent.gateway.connection.backoff import backoff
from site_agent.gateway.connection.interrupt import Interrupt
from site_agent.gateway.connection.session import Session
from site_agent.gateway.exit import receipts
from site_agent.gateway.exit.evidence import HostileReceipt
from site_agent.gateway.exit.ledger import Ledger
from site_agent.state.directory import Journal, SiteState
from wardround.errors import NeedsPerson, TryAgain, Unavailable
from wardround.records import trainer as records
from wardround.records.receipts import ACCEPTED, NOT_RECEIVED, Receipt

log = logging.getLogger(__name__)


class Outcomes:
    """The outcomes of one site's uploads, for the thread that does its rounds."""

    def __init__(
        self, state: SiteState, session: Session, ledger: Ledger, ask: Callable[[Any, Interrupt], object]
    ) -> None:
        """``ask``: lets the trainer answer a request."""
        self._state = state
        self._session = session
        self._ledger = ledger
        self._ask = ask
        self._told = set[str]()  # studies whose last accepted round the trainer has heard of from this process

    def resolve(self, interrupt: Interrupt) -> None:
        """Ask the coordinator about each upload that has no receipt, and act on its answer.

        Raises:
            Unavailable: the connection broke; the next one asks again.
        """
        for consent in self._state.consents():
            self.settle(self.caught_up(self._state.journal(consent.study), interrupt), interrupt)
        entries = self._ledger.unresolved
        for upload_id in entries:
            interrupt.check()
            if upload_id not in self._ledger.unresolved:
                continue  # its receipt came with that of another upload
            try:
                taken = self._answer_about(upload_id)
            except HostileReceipt as error:
                log.error("%s. %s", error.message, error.hint)
                continue
            for decided, receipt in taken.items():
                log.info("upload %s of `%s`: %s", decided[:12], entries[decided].study, receipt.decision)
                journal = self._state.journal(entries[decided].study)
                if journal.upload_id == decided:
                    self.decide(journal, receipt, interrupt)

    def learn(self, last: Journal, interrupt: Interrupt) -> None:
        """What became of an earlier round's upload that was called off, before another round begins: it may have been
        accepted while its receipt was on the way, or the ledger had no room for that. The trainer goes on from what it
        made in that round, or from what was before it, by that alone.

        Raises:
            CannotWrite: the ledger has no room for the receipt.
            HostileReceipt: the answer cannot stand in the ledger.
        """
        waits = backoff()
        while not last.decision and last.upload_id in self._ledger.unresolved:
            if self._ledger.disputed(last.study, last.revision):
                return  # of this coordinator no better answer is to be had
            times_connected = self._session.times_connected
            try:
                if self._answer_about(last.upload_id):
                    break
            except (Unavailable, TryAgain) as error:
                log.warning("%s; round %d of `%s` is asked about again", error.message, last.round, last.study)
            self._session.pause(next(waits), times_connected, interrupt)
        self.caught_up(last, interrupt)

    def _answer_about(self, upload_id: str) -> dict[str, Receipt]:
        """The coordinator's receipts of an upload, and of those that its chain wants before it, in the ledger. None of
        one that may go on: its assignment, if it is still open, comes again.
        """
        with self._session.use() as connection:
            if (envelope := connection.inquire(upload_id)) is None:
                return {}
            return receipts.take_all({upload_id: envelope}, connection, self._ledger)

    def caught_up(self, journal: Journal, interrupt: Interrupt) -> Journal:
        """The journal with what the ledger knows and it does not: the process ended between the two."""
        decided = journal.upload_id and not journal.decision and journal.upload_id not in self._ledger.unresolved
        if decided and (receipt := self._ledger.receipt(journal.upload_id)) is not None:
            self.decide(journal, receipt, interrupt)
        return journal

    def decide(self, journal: Journal, receipt: Receipt, interrupt: Interrupt) -> None:
        """Act on the receipt, which the ledger has, of the journal's upload."""
        if receipt.decision == NOT_RECEIVED:
            journal.phase, journal.upload_id = "trained", ""
            self._state.save_journal(journal)
            return
        if receipt.decision == ACCEPTED:
            log.info("round %d of `%s` accepted", receipt.round, receipt.study)
        else:
            log.error("%s", receipts.explain_refusal(receipt))
        journal.phase, journal.decision = "decided", receipt.decision
        consent = self._state.consent(journal.study)  # a site that evaluates goes on from what it has judged
        journal.applied = not journal.update and not (consent is not None and consent.evaluates)
        if journal.applied:
            self._state.save_journal(journal, "nothing")
        self.settle(journal, interrupt)  # and writes it down when the trainer has heard; until then the ledger has it

    def settle(self, journal: Journal, interrupt: Interrupt) -> None:
        """Let the trainer hear a decision that it has not heard. The ledger has it, whatever the journal says."""
        if journal.applied or not journal.decision:
            return
        form = records.Commit if journal.decision == ACCEPTED else records.Discard
        self._ask(form(study=journal.study, revision=journal.revision, round=journal.round), interrupt)
        journal.applied = True
        if journal.decision == ACCEPTED:
            journal.untold = journal.round
            self._told.add(journal.study)
        self._state.save_journal(journal, "nothing")

    def remind(self, journal: Journal, interrupt: Interrupt) -> None:
        """Let the trainer hear once more, in this process's first round of a study, what it may have forgotten with the
        power. Where a person has removed what it kept, it begins with what there is."""
        if journal.untold and journal.study not in self._told:
            accepted = records.Commit(study=journal.study, revision=journal.revision, round=journal.untold)
            try:
                self._ask(accepted, interrupt)
            except NeedsPerson as error:
                log.warning("%s. %s", error.message, error.hint)
        self._told.add(journal.study)
