"""One assignment, from what the coordinator asks to its receipt: an update's way through the site.

    download    the round's model, against the announced digest and the approved tensors      (``downloads``)
    train       in the other process, which gives back a file of deltas and a few numbers     (``handoff``)
    take        the file is copied to where only the gateway writes, before it is measured    (``exit.egress``)
    record      measured, checked against consent and policy, held where the policy wants a person's release, into the
                ledger                                                                        (``exit.egress``)
    send        with as many tries as the connection needs, until there is a receipt          (``exit.egress``)
    settle      tell the trainer: accepted makes its private state current, refused drops it

The journal is written before each step, so a crash anywhere goes on where it was: a trained update is sent, not trained
again; a recorded one is asked about before it is sent again; a decision reaches the trainer. After a loss of power it
is as it was when the last update was to be sent, and the ledger says what became of that.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from site_agent.gateway import asking
from site_agent.gateway.connection.interrupt import Interrupt, Interrupted
from site_agent.gateway.connection.session import Session
from site_agent.gateway.consent import approvals as consents
from site_agent.gateway.downloads import Downloads
from site_agent.gateway.estimate import Estimate
from site_agent.gateway.exit import egress, receipts
from site_agent.gateway.exit.enforcement import PolicyEnforcement
from site_agent.gateway.exit.ledger import Ledger
from site_agent.gateway.exit.measure import Measured
from site_agent.gateway.exit.staging import Staging
from site_agent.gateway.outcomes import Outcomes
from site_agent.gateway.policy.veto import lowest_loss
from site_agent.gateway.room import with_room
from site_agent.gateway.secure.checks import SumChecks
from site_agent.gateway.secure.exchange import SecureRounds
from site_agent.handoff import Trainer
from site_agent.state.directory import Consent, Journal, Site, SiteState, now_text
from wardround.errors import BadData, NeedsPerson, NotPermitted, WardroundError
from wardround.local import traces
from wardround.local.rate_limit import RateLimitedLog
from wardround.records import trainer as records
from wardround.records.assignment import DECLINED_UNKNOWN, STOP, TRAIN, UNKNOWN, Assignment, SiteStatus
from wardround.records.receipts import ACCEPTED
from wardround.tensors.files import TensorFile

Answer = TypeVar("Answer", bound=records.Answer)
log = logging.getLogger(__name__)


class Rounds:
    """Does assignments for one site, one at a time, in one thread."""

    def __init__(
        self,
        state: SiteState,
        site: Site,
        session: Session,
        ledger: Ledger,
        trainer: Trainer,
        declare: Callable[..., object],
        secure: SecureRounds,
    ) -> None:
        """``declare``: tells the coordinator where this site stands with an assignment."""
        self._state = state
        self._declare = declare
        self._secure, self._sums, self._site = secure, SumChecks(session, ledger, secure.attempts, state.sums), site
        self._session = session
        self._ledger = ledger
        self._trainer = trainer
        self._outcomes = Outcomes(state, session, ledger, self._ask)
        self._policy = PolicyEnforcement.of(state, site, ledger)
        self._staging = Staging(state.staging)
        self._downloads = Downloads(state, session, self._staging)
        self._log = RateLimitedLog(log)  # of what a coordinator can ask without end

    def do(self, assignment: Assignment, interrupt: Interrupt) -> bool:
        """Do one assignment to its end, or until it waits for a person. Returns whether it waits.

        Raises:
            Interrupted: called off.
            WardroundError: it cannot be done; ``approvals.reportable_code`` gives the code that may be declared.
        """
        if assignment.kind == STOP:
            with_room(partial(self._stop, assignment, interrupt), f"the end of `{assignment.study}`", interrupt)
            return False
        if assignment.kind == UNKNOWN:
            raise NotPermitted(
                "the coordinator asks for something that this version does not know", hint="is it of a newer version?",
                code=DECLINED_UNKNOWN,
            )  # fmt: skip
        what = f"round {assignment.round} of `{assignment.study}`"
        with traces.round_here(assignment.study, assignment.round):
            return with_room(partial(self._contribute, assignment, interrupt), what, interrupt)

    def resolve(self, interrupt: Interrupt) -> None:
        """As ``Outcomes.resolve``."""
        self._outcomes.resolve(interrupt)

    def declined(self, assignment: Assignment, code: str) -> None:
        """Note that this site declined an assignment which it had begun, for whoever looks at `status`."""
        journal = self._state.journal(assignment.study)
        if (journal.study_digest, journal.round) == (assignment.digest, assignment.round):
            self._state.save_journal(replace(journal, declined=code, declined_at=now_text()))

    def _contribute(self, assignment: Assignment, interrupt: Interrupt) -> bool:
        """An update's way, from what is asked to its receipt. Returns whether it waits for a person."""
        consent = consents.require(self._state.consent(assignment.study), assignment.study, assignment.digest)
        consents.require_offered(consent, self._state.offer(assignment.study), assignment)
        self._refuse_disputed(assignment)
        last = self._outcomes.caught_up(self._state.journal(assignment.study), interrupt)
        consents.refuse_beyond(consent, assignment, *self._reached(last, consent))
        journal = self._begin(assignment, last, consent, interrupt)
        if journal.decision:
            self._log.info("round %d of `%s` is decided already: %s", journal.round, journal.study, journal.decision)
            return False
        fresh = journal.phase not in ("trained", "held", "uploading")
        if fresh:
            self._refuse_denied(assignment, consent, journal)  # before the work, not after
        masking = self._secure.begun(assignment, journal, consent, interrupt) if consent.is_secure else None
        destination = self._policy.coordinator
        upload = egress.recorded(self._ledger, journal, destination, self._own_copy(journal), masking)
        if upload is None:
            measured = self._train(assignment, consent, journal, interrupt) if fresh else None
            interrupt.check()
            self._refuse_other_consent(consent)
            self._policy.refuse_worse(journal)
            file, meter = self._own_copy(journal), self._session.meter
            upload = egress.record(self._ledger, self._policy, meter, journal, consent, file, measured, masking)
            if upload is None:
                self._hold(journal)
                return True
        journal.phase, journal.upload_id = "uploading", upload.header.upload_id
        self._state.save_journal(journal, "content")
        receipt = egress.send(upload, self._session, self._ledger, self._policy, consent, interrupt)
        self._outcomes.decide(journal, receipt, interrupt)
        receipts.refuse_if_ledger_refused(receipt)
        return False

    def _refuse_denied(self, assignment: Assignment, consent: Consent, journal: Journal) -> None:
        """Raises NotPermitted: the policy would deny what this assignment asks for."""
        leaving = consent.upload if assignment.kind == TRAIN else ()
        self._policy.refuse_denied(journal, consent, consent.reported, leaving, consent.metrics)

    def _refuse_other_consent(self, consent: Consent) -> None:
        """Nothing is recorded under a consent that is no longer the one in force."""
        if self._state.consent(consent.study) != consent:
            raise NeedsPerson(
                f"the consent to `{consent.study}` changed while its round was under way",
                hint="nothing of it was sent; the round is done again when it is asked again",
                code="DECLINED_NOT_APPROVED",
            )

    def _refuse_disputed(self, assignment: Assignment) -> None:
        """Nothing more of a study is sent while an upload of it has a receipt that cannot be believed."""
        if self._ledger.disputed(assignment.study, assignment.revision):
            raise NeedsPerson(
                f"an upload of `{assignment.study}` was answered with a receipt that cannot stand in the ledger, and "
                "has no other yet",
                hint="`site-agent status` says which; show it to the coordinator's operator",
                code="DECLINED_POLICY",
            )

    def _reached(self, last: Journal, consent: Consent) -> tuple[tuple[int, int], str]:
        """The last round and attempt that was begun or sent under a consent, and with which model if that is known.

        The journal knows what was begun; the ledger still knows what was sent where the journal was lost.
        """
        sent = self._ledger.last_sent(consent.study, consent.revision)
        if (last.study_digest, last.revision) != (consent.study_digest, consent.revision):
            return sent, ""
        return max(sent, (last.round, last.attempt)), last.base_digest if last.round >= sent[0] else ""

    def _hold(self, journal: Journal) -> None:
        """Keep the update until a person says that it may leave."""
        if journal.phase != "held":
            log.info(
                "round %d of `%s` waits for a person: `site-agent release %s --round %d`", journal.round, journal.study,
                journal.study, journal.round,
            )  # fmt: skip
        journal.phase = "held"
        self._state.save_journal(journal)

    def _begin(self, assignment: Assignment, last: Journal, consent: Consent, interrupt: Interrupt) -> Journal:
        """The journal for this assignment: the last one if it can go on, else a fresh one. What was made under another
        consent, perhaps from other data, never goes on."""
        self._outcomes.settle(last, interrupt)
        self._outcomes.remind(last, interrupt)
        same_study = last.study_digest == assignment.digest and last.revision == assignment.revision
        same_consent = last.consent == consent.digest
        same_round = same_study and same_consent and (last.round, last.kind) == (assignment.round, assignment.kind)
        base = assignment.base.digest if assignment.base is not None else ""
        begun = replace(last, declined="", declined_at="")
        if same_round and last.attempt == assignment.attempt:
            usable = last.decision or self._usable(last, base)
            return begun if usable else self._fresh(assignment, base, consent, last)
        if same_round and last.decision in ("", ACCEPTED) and self._usable(last, base):
            log.info("round %d of `%s` is asked again: the same update is sent", last.round, last.study)
            return replace(begun, attempt=assignment.attempt, phase="trained", upload_id="", decision="", applied=True)
        if same_study and last.update and last.round != assignment.round:
            self._outcomes.learn(last, interrupt)
            if not last.decision:
                self._ask(records.Discard(study=last.study, revision=last.revision, round=last.round), interrupt)
        self._forget_update(last)  # and its model goes when another is downloaded
        return self._fresh(assignment, base, consent, last)

    def _fresh(self, assignment: Assignment, base: str, consent: Consent, last: Journal) -> Journal:
        return Journal(
            assignment.study, assignment.revision, assignment.digest, assignment.round, assignment.attempt,
            assignment.kind, base_digest=base, consent=consent.digest, lowest_loss=lowest_loss(last, consent),
            untold=last.untold if last.revision == assignment.revision else 0,
        )  # fmt: skip

    def _usable(self, journal: Journal, base: str) -> bool:
        """Whether a trained update is there, made from the same base, whole."""
        if journal.phase not in ("trained", "held", "uploading", "decided") or journal.base_digest != base:
            return False
        if not journal.update:
            return True
        try:
            with TensorFile(self._state.own_copy(journal.study)) as file:
                return file.manifest().digest() == journal.update_digest
        except BadData:
            return False  # gone, or torn by a loss of power: the trainer hands the same update over again

    def _own_copy(self, journal: Journal) -> Path | None:
        """The gateway's own copy of the update; None for a closing validation."""
        return self._state.own_copy(journal.study) if journal.kind == TRAIN else None

    def _train(
        self, assignment: Assignment, consent: Consent, journal: Journal, interrupt: Interrupt
    ) -> Measured | None:
        """Download and train or validate; the journal then says ``trained``. What the update holds, if there is one."""
        if assignment.base is None:
            raise BadData("the coordinator's assignment names no model to begin from", code="DECLINED_MODEL_MISMATCH")
        journal.phase = "training"
        self._state.save_journal(journal, "nothing")
        with self._sums.keeping(consent, assignment) as keep:
            base = self._downloads.fetch(assignment, assignment.base, consent, "base", interrupt, keep)
            self._sums.before_training(consent, assignment, interrupt)
        log.info("round %d of `%s`: %s", assignment.round, assignment.study, assignment.kind)
        left = Estimate(partial(self._declare, assignment, SiteStatus.TRAINING, ""), self._ledger.estimates(journal))
        form = records.Train if assignment.kind == TRAIN else records.Validate
        request = form(
            study=consent.document, revision=consent.revision, study_digest=consent.study_digest, site=self._site.site,
            data=consent.approved_data, round=assignment.round, base=base, base_digest=assignment.base.digest,
        )  # fmt: skip
        try:
            result = self._ask(request, interrupt, None if consent.is_secure else left.note)  # time tells rows
        except Interrupted:
            self._abort(request)
            raise
        self._staging.remove(base)
        measured = self._take_result(journal, result, consent)
        journal.phase, journal.untold = "trained", 0  # the trainer has kept this round, and with it the one before
        self._state.save_journal(journal, "nothing")
        return measured

    def _take_result(self, journal: Journal, result: records.Validated, consent: Consent) -> Measured | None:
        """Note what the trainer gives back, and copy its file; whether that may leave is for ``egress`` to say."""
        journal.num_examples, journal.num_validation = result.num_examples, result.num_validation
        journal.metrics, journal.own_loss = dict(result.metrics), result.own_loss
        journal.update = result.update if isinstance(result, records.Trained) else ""
        measured = None
        if journal.update:
            measured = egress.take(self._staging, self._policy, journal, consent, self._state.own_copy(journal.study))
            journal.update_digest = measured.manifest.digest()
        return measured

    def _stop(self, assignment: Assignment, interrupt: Interrupt) -> None:
        consent = self._state.consent(assignment.study)
        if consent is None or consent.study_digest != assignment.digest:
            return
        journal = self._state.journal(assignment.study)
        if journal.study_digest != assignment.digest:
            journal = Journal(assignment.study, assignment.revision, assignment.digest)
        self._outcomes.settle(self._outcomes.caught_up(journal, interrupt), interrupt)
        self._outcomes.learn(journal, interrupt)
        if assignment.reason not in ("finished", "stopped", "failed") or journal.ended:
            return
        if assignment.reason == "finished" and consent.state == "approved":
            self._outcomes.remind(journal, interrupt)
            self._finish(assignment, consent, interrupt)
        self._forget_files(journal)
        self._secure.ended(assignment.study)
        journal.ended = assignment.reason
        self._state.save_journal(journal)
        log.info("study `%s` is %s", assignment.study, assignment.reason)

    def _finish(self, assignment: Assignment, consent: Consent, interrupt: Interrupt) -> None:
        """Hand the best global model to the trainer, if the study has one, and let it finish its checkpoints."""
        best, named = None, self._sums.believed(consent, assignment.best)
        if named is not None:
            file = self._downloads.fetch(assignment, named, consent, "best", interrupt)
            best = records.BestModel(round=named.round, file=file)
        rows = assignment.contributions
        self._ask(records.Finish(
            study=consent.document, revision=consent.revision, study_digest=consent.study_digest,
            site=self._site.site, data=consent.approved_data, best=best,
            contributors={row.site: list(row.rounds) for row in rows},
            capped={row.site: list(row.capped) for row in rows if row.capped},
            left_out={row.site: list(row.left_out) for row in rows if row.left_out},
        ), interrupt)  # fmt: skip
        if best is not None:
            self._staging.remove(best.file)

    def _ask(
        self,
        request: records.Request[Answer],
        interrupt: Interrupt,
        progress: Callable[[records.Progress], None] | None = None,
    ) -> Answer:
        """As ``asking.ask``."""
        return asking.ask(self._trainer, request, interrupt, progress)

    def _abort(self, request: records.Train | records.Validate) -> None:
        try:
            self._trainer.abort(request.study_digest, request.revision, request.round)
        except WardroundError as error:
            log.warning("the trainer could not be told to stop: %s", error.message)

    def _forget_files(self, journal: Journal) -> None:
        self._forget_update(journal)
        self._downloads.forget(journal.study)

    def _forget_update(self, journal: Journal) -> None:
        self._staging.remove(journal.update)
        self._state.remove_copies(journal.study)
