"""One assignment, from what the coordinator asks to its receipt: an update's way through the site.

    download    the round's model, against the announced digest and the approved tensors
    train       in the other process, which gives back a file of deltas and a few numbers
    hold        where the policy says so, until a person releases it           (``gate``)
    record      checked against consent and policy, measured, into the ledger  (``egress``)
    send        with as many tries as the line needs, until there is a receipt  (``egress``)
    settle      tell the trainer: accepted makes its private state current, refused drops it

The journal is written before each step, so a crash anywhere goes on where it was: a trained update is sent, not trained
again; a recorded one is asked about before it is sent again; a decision reaches the trainer.
"""

import logging
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from site_agent.gateway import consent as consents
from site_agent.gateway import egress
from site_agent.gateway.connection import Line, pauses
from site_agent.gateway.desk import open_gate
from site_agent.gateway.interrupt import Interrupt
from site_agent.gateway.ledger import Ledger
from site_agent.gateway.messages import STOP, TRAIN, Assignment, ModelRef
from site_agent.handoff import Trainer
from site_agent.state import SHARED_MODE, Consent, Journal, Offer, Site, SiteState, now_text
from wardround import durable
from wardround.errors import BadData, CannotWrite, NeedsPerson, TryAgain, Unavailable, WardroundError
from wardround.receipts import ACCEPTED, NOT_RECEIVED, Receipt
from wardround.tensors import Manifest, TensorFile, file_header

STAGING_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")
log = logging.getLogger(__name__)


class Rounds:
    """Does assignments for one site, one at a time, in one thread."""

    def __init__(self, state: SiteState, site: Site, line: Line, ledger: Ledger, trainer: Trainer) -> None:
        self._state = state
        self._site = site
        self._line = line
        self._ledger = ledger
        self._trainer = trainer
        self._gate = open_gate(state, site, ledger)

    def do(self, assignment: Assignment, interrupt: Interrupt) -> bool:
        """Do one assignment to its end, or until it waits for a person. Returns whether it waits.

        Raises:
            Interrupted: called off.
            WardroundError: it cannot be done; ``consent.sayable`` gives what may be told of it.
        """
        if assignment.kind == STOP:
            self._stop(assignment, interrupt)
            return False
        return self._contribute(assignment, interrupt)

    def declined(self, assignment: Assignment, code: str) -> None:
        """Note that this site declined an assignment which it had begun, for whoever looks at `status`."""
        journal = self._state.journal(assignment.study)
        if (journal.study_digest, journal.round) == (assignment.digest, assignment.round):
            self._state.save_journal(replace(journal, declined=code, declined_at=now_text()))

    def resolve(self, interrupt: Interrupt) -> None:
        """Ask the coordinator about each upload that has no receipt, and act on what it says.

        Raises:
            Unavailable: the line broke; the next connection asks again.
        """
        for consent in self._state.consents():
            self._settle(self._state.journal(consent.study))
        for upload_id, entry in self._ledger.unresolved.items():
            interrupt.check()
            with self._line.use() as connection:
                envelope = connection.inquire(upload_id)
            if envelope is None:
                continue  # it may go on; the assignment, if it is still open, comes again
            receipt = egress.take_receipt(upload_id, envelope, self._ledger, self._site)
            log.info("upload %s of `%s`: %s", upload_id[:12], entry["study"], receipt.decision)
            journal = self._state.journal(entry["study"])
            if journal.upload_id == upload_id:
                self._decide(journal, receipt)

    def _contribute(self, assignment: Assignment, interrupt: Interrupt) -> bool:
        consent = consents.require(self._state.consent(assignment.study), assignment.study, assignment.digest)
        offer = self._state.offer(assignment.study)
        consents.require(consent, assignment.study, offer.digest)
        journal = self._begin(assignment, self._state.journal(assignment.study))
        if journal.decision:
            log.info("round %d of `%s` is decided already: %s", journal.round, journal.study, journal.decision)
            return False
        departure = None
        if journal.upload_id:
            departure = egress.recorded(self._ledger, journal.upload_id, self._whole_update(journal))
        if departure is None:
            told = consents.told_of(offer)
            if journal.phase not in ("trained", "held", "uploading"):
                leaving = consents.specs(consent.leaves) if assignment.kind == TRAIN else ()
                self._gate.refuse_denied(journal, consent, told, leaving, consent.metrics)  # before the work, not after
                self._train(assignment, offer, consent, journal, interrupt)
            interrupt.check()
            if self._gate.waits_for_a_person(journal):
                self._hold(journal)
                return True
            file = self._file(journal.update) if journal.update else None
            departure = egress.record(self._ledger, self._gate, self._line.meter, journal, consent, told, file)
        journal.phase, journal.upload_id = "uploading", departure.upload_id
        self._state.save_journal(journal)
        receipt = egress.send(departure, self._line, self._ledger, self._site, interrupt)
        self._decide(journal, receipt)
        if receipt.code.startswith("LEDGER_"):
            raise NeedsPerson(
                f"the coordinator refuses this site's ledger ({receipt.code}): it has seen another or a longer one",
                hint="was this machine restored from a backup, or copied? If it is the one that goes on: `site-agent "
                "audit reopen` begins a new ledger that cites this one, and the coordinator's operator confirms it",
                code=receipt.code,
            )
        return False

    def _hold(self, journal: Journal) -> None:
        """Keep the update until a person says that it may leave."""
        journal.phase = "held"
        self._state.save_journal(journal)
        if self._ledger.is_held(journal.study, journal.revision, journal.round, journal.update_digest):
            return
        self._ledger.append(
            "held", study=journal.study, revision=journal.revision, round=journal.round, attempt=journal.attempt,
            update=journal.update_digest,
        )  # fmt: skip
        self._ledger.sign()
        log.info(
            "round %d of `%s` waits for a person: `site-agent release %s --round %d`", journal.round, journal.study,
            journal.study, journal.round,
        )  # fmt: skip

    def _begin(self, assignment: Assignment, last: Journal) -> Journal:
        """The journal for this assignment: the last one if it can go on, else a fresh one."""
        self._settle(last)
        same_study = last.study_digest == assignment.digest and last.revision == assignment.revision
        same_round = same_study and (last.round, last.kind) == (assignment.round, assignment.kind)
        base = assignment.base.digest if assignment.base is not None else ""
        if same_round and last.attempt == assignment.attempt:
            goes_on = replace(last, declined="", declined_at="")
            return goes_on if last.decision or self._usable(last, base) else self._fresh(assignment, base)
        if same_round and last.decision in ("", ACCEPTED) and self._usable(last, base):
            log.info("round %d of `%s` is asked again: the same update is sent", last.round, last.study)
            return replace(
                last, attempt=assignment.attempt, phase="trained", upload_id="", decision="", applied=True, declined="",
                declined_at="",
            )  # fmt: skip
        if same_study and last.update and not last.decision and last.round != assignment.round:
            self._ask("discard", study=last.study, revision=last.revision, round=last.round)
        self._forget_files(last)
        return self._fresh(assignment, base)

    def _fresh(self, assignment: Assignment, base: str) -> Journal:
        return Journal(
            assignment.study, assignment.revision, assignment.digest, assignment.round, assignment.attempt,
            assignment.kind, base_digest=base,
        )  # fmt: skip

    def _usable(self, journal: Journal, base: str) -> bool:
        """Whether a trained update is there, made from the same base, whole."""
        if journal.phase not in ("trained", "held", "uploading", "decided") or journal.base_digest != base:
            return False
        return not journal.update or self._whole_update(journal) is not None

    def _whole_update(self, journal: Journal) -> Path | None:
        if not journal.update or not self._file(journal.update).is_file():
            return None
        try:
            with TensorFile(self._file(journal.update)) as file:
                whole = file.manifest().digest() == journal.update_digest
        except BadData:
            return None
        return self._file(journal.update) if whole else None

    def _train(
        self, assignment: Assignment, offer: Offer, consent: Consent, journal: Journal, interrupt: Interrupt
    ) -> None:
        """Download and train or validate; the journal then says ``trained``."""
        if assignment.base is None:
            raise BadData("the coordinator's assignment names no model to begin from", code="DECLINED_MODEL_MISMATCH")
        journal.phase = "downloading"
        self._state.save_journal(journal)
        base = self._download(assignment, assignment.base, consent, "base", interrupt)
        journal.phase = "training"
        self._state.save_journal(journal)
        log.info("round %d of `%s`: %s", assignment.round, assignment.study, assignment.kind)
        with interrupt.ending(self._abort):
            try:
                result = self._ask(
                    assignment.kind, study=offer.document, revision=offer.revision, study_digest=offer.digest,
                    site=self._site.site, round=assignment.round, attempt=assignment.attempt, base=base.name,
                    base_digest=assignment.base.digest, data=consent.data,
                )  # fmt: skip
            except WardroundError:
                interrupt.check()  # it was we who ended it
                raise
        self._take_result(journal, result)
        journal.phase = "trained"
        self._state.save_journal(journal)
        durable.remove(base)

    def _take_result(self, journal: Journal, result: dict[str, Any]) -> None:
        """Note what the trainer gives back. Whether it may leave is for ``egress`` to say."""
        try:
            journal.num_examples, journal.num_validation = result["num_examples"], result["num_validation"]
            journal.metrics = {str(name): str(value) for name, value in result["metrics"].items()}
            journal.update = str(result["update"]) if journal.kind == TRAIN else ""
        except (KeyError, TypeError, AttributeError):
            raise BadData("the trainer's answer has not the agreed form", code="DECLINED_TRAINING_FAILED") from None
        if journal.update:
            with TensorFile(self._file(journal.update)) as file:
                journal.update_digest = file.manifest().digest()

    def _decide(self, journal: Journal, receipt: Receipt) -> None:
        if receipt.decision == NOT_RECEIVED:
            journal.phase, journal.upload_id = "trained", ""
            self._state.save_journal(journal)
            return
        if receipt.decision == ACCEPTED:
            log.info("round %d of `%s` accepted", receipt.round, receipt.study)
        else:
            log.error("%s", egress.explain_refusal(receipt))
        journal.phase, journal.decision = "decided", receipt.decision
        journal.applied = not journal.update
        self._state.save_journal(journal)
        self._settle(journal)

    def _settle(self, journal: Journal) -> None:
        """Let the trainer hear a decision that it has not heard."""
        if journal.applied or not journal.decision:
            return
        command = "commit" if journal.decision == ACCEPTED else "discard"
        self._ask(command, study=journal.study, revision=journal.revision, round=journal.round)
        journal.applied = True
        self._state.save_journal(journal)

    def _stop(self, assignment: Assignment, interrupt: Interrupt) -> None:
        consent = self._state.consent(assignment.study)
        if consent is None or consent.study_digest != assignment.digest:
            return
        journal = self._state.journal(assignment.study)
        if journal.study_digest != assignment.digest:
            journal = Journal(assignment.study, assignment.revision, assignment.digest)
        self._settle(journal)
        if assignment.reason not in ("finished", "stopped", "failed") or journal.ended:
            return
        if assignment.reason == "finished" and consent.state == "approved":
            self._finish(assignment, consent, interrupt)
        self._forget_files(journal)
        journal.ended = assignment.reason
        self._state.save_journal(journal)
        log.info("study `%s` is %s", assignment.study, assignment.reason)

    def _finish(self, assignment: Assignment, consent: Consent, interrupt: Interrupt) -> None:
        """Hand the best global model to the trainer, if the study has one, and let it finish its checkpoints."""
        offer = self._state.offer(assignment.study)
        best = None
        if assignment.best is not None:
            best = self._download(assignment, assignment.best, consent, "best", interrupt)
        self._ask(
            "finish", study=offer.document, revision=offer.revision, study_digest=offer.digest, site=self._site.site,
            data=consent.data, best_round=assignment.best.round if assignment.best is not None else None,
            best=best.name if best is not None else None, contributors=dict(assignment.contributed),
            capped=dict(assignment.capped), left_out=dict(assignment.left_out),
        )  # fmt: skip
        if best is not None:
            durable.remove(best)

    def _download(
        self, assignment: Assignment, model: ModelRef, consent: Consent, prefix: str, interrupt: Interrupt
    ) -> Path:
        """A model, whole and as announced, in a file in staging. Goes on where a broken line left it.

        Raises:
            BadData: other tensors than approved, or another digest than announced.
        """
        specs = consents.specs(consent.comes)
        header = file_header(specs)
        path = self._state.staging / f"{prefix}-{assignment.study}-{model.round}.safetensors"
        self._refuse_full_disk(2 * sum(spec.bytes for spec in specs))
        for pause in pauses():
            interrupt.check()
            try:
                with durable.SpoolFile(path, mode=SHARED_MODE) as file:
                    path.chmod(SHARED_MODE)
                    if file.size() < len(header):
                        file.truncate(0)
                        file.write_at(0, header)
                    begun = file.size() - len(header)
                    self._fill(file, len(header), assignment, model, consent, interrupt)
                    file.sync()
                found = _digest_or_none(path)
                if found == model.digest:
                    return path
                durable.remove(path)
                if begun == 0:
                    raise BadData(
                        f"model {model.round} of `{assignment.study}` is not the announced one: digest "
                        f"{(found or 'none')[:12]}…, announced {model.digest[:12]}…",
                        code="DECLINED_MODEL_MISMATCH",
                    )
            except (Unavailable, TryAgain) as error:
                interrupt.check()
                log.warning("%s; trying again in %.1f s", error.message, pause)
                interrupt.wait(pause)
        raise AssertionError("pauses never end")

    def _fill(
        self,
        file: durable.SpoolFile,
        start: int,
        assignment: Assignment,
        model: ModelRef,
        consent: Consent,
        interrupt: Interrupt,
    ) -> None:
        size = start + sum(spec.bytes for spec in consents.specs(consent.comes))
        if file.size() >= size:
            file.truncate(start)  # begun before, and wrong: from the beginning
        offset = file.size() - start
        with self._line.use() as connection:
            for part in connection.download(assignment.study, assignment.revision, model, offset, interrupt):
                if isinstance(part, Manifest):
                    what = f"model {model.round} of `{assignment.study}`"
                    consents.check_tensors(part.specs, consent.comes, consent.study, what)
                    continue
                position, data = part
                if position != file.size() - start or start + position + len(data) > size:
                    raise BadData("the coordinator sends bytes that were not asked for", code="DECLINED_MODEL_MISMATCH")
                file.write_at(start + position, data)
        if file.size() != size:
            raise Unavailable(f"downloading model {model.round} of `{assignment.study}`: it ended early")

    def _refuse_full_disk(self, needed: int) -> None:
        room = os.statvfs(self._state.staging)
        free = room.f_bavail * room.f_frsize
        if free < needed:
            raise CannotWrite(
                f"{self._state.staging} has {free >> 20} MiB free, a round needs {needed >> 20} MiB",
                hint="free some space; the round is declined",
                code="DECLINED_RESOURCES",
            )

    def _ask(self, command: str, **fields: Any) -> dict[str, Any]:
        """Ask the trainer; when it cannot be reached, that is its failure, not the line's."""
        try:
            answer: dict[str, Any] = self._trainer.ask(command, **fields)
        except Unavailable as error:
            raise NeedsPerson(
                f"the trainer does not answer: {error.message}",
                hint="`site-agent status`; is `site-agent run --only trainer` running?",
                code="DECLINED_TRAINING_FAILED",
            ) from None
        return answer

    def _abort(self) -> None:
        try:
            self._trainer.abort()
        except WardroundError as error:
            log.warning("the trainer could not be told to stop: %s", error.message)

    def _file(self, name: str) -> Path:
        if not STAGING_NAME.fullmatch(name):
            raise BadData("the trainer names a file outside the staging folder", code="DECLINED_TRAINING_FAILED")
        path = self._state.staging / name
        if path.is_symlink():
            raise BadData(f"{path} is a link; the trainer hands over plain files", code="DECLINED_TRAINING_FAILED")
        return path

    def _forget_files(self, journal: Journal) -> None:
        if journal.update:
            durable.remove(self._file(journal.update))
        for kind in ("base", "best"):
            for path in self._state.staging.glob(f"{kind}-{journal.study}-[0-9]*.safetensors"):
                durable.remove(path)


def _digest_or_none(path: Path) -> str | None:
    try:
        with TensorFile(path) as file:
            return file.manifest().digest()
    except BadData:
        return None
