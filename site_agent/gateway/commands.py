"""What a person's command does at the gateway: look for offers, approve, release, withdraw, leave.

The running service has one desk; when no service runs, ``alone`` makes one for a single command, under the lock.
"""

import hashlib
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from site_agent import handoff
from site_agent.gateway.allowance import SparingLog
from site_agent.gateway.connection.client import Connection, Line, diagnose
from site_agent.gateway.connection.interrupt import Interrupt
from site_agent.gateway.consent import approvals as consents
from site_agent.gateway.consent import offers
from site_agent.gateway.consent.account import Account, account
from site_agent.gateway.consent.facts import begins_with, facts
from site_agent.gateway.enrolment.identity import Identity
from site_agent.gateway.exit import egress, receipt_copy
from site_agent.gateway.exit import policy as policies
from site_agent.gateway.exit.enforcement import Gate, refuse_study
from site_agent.gateway.exit.ledger import Ledger
from site_agent.state.directory import APPROVED, WITHDRAWN, Consent, Journal, Offer, Site, SiteState, now_text
from wardround.errors import NeedsPerson, Refused, RefusedForGood, UsageProblem, WardroundError
from wardround.local import durable
from wardround.signing import certificates
from wardround.tensors.manifests import Manifest

log = logging.getLogger(__name__)
ENDED = ("finished", "stopped", "failed")  # the coordinator's words for a study that is over
Narrate = Callable[[str], object]


class Desk:
    """Acts on offers and consents. Safe to use from several threads."""

    def __init__(self, state: SiteState, site: Site, ledger: Ledger, line: Line) -> None:
        self._state = state
        self._site = site
        self._ledger = ledger
        self._line = line
        self._gate = open_gate(state, site, ledger)
        self._log = SparingLog(log)
        self._lock = threading.RLock()

    def refresh(self, interrupt: Interrupt) -> list[Offer]:
        """Ask the coordinator for its studies and keep them.

        Raises:
            Unavailable: it cannot be reached; what was kept before is still there.
        """
        with self._line.use() as connection:
            found = connection.studies(interrupt, patient=False)
        for offer in found:
            self.keep(offer)
        return found

    def fetch_receipts(self, interrupt: Interrupt) -> int:
        """Ask the coordinator for its copy of this site's receipts and keep it. Returns how many there are.

        Raises:
            Unavailable: it cannot be reached; what was kept before is still there.
            BadData: what came is no such copy; likewise.
        """
        with self._line.use() as connection:
            return receipt_copy.keep(connection.receipts(interrupt), self._site, self._state.receipts)

    def keep(self, offer: Offer) -> None:
        """Keep an offer; if it is not what was approved, say so."""
        with self._lock:
            if self._state.known_offer(offer.study) == offer:
                return
            consent = self._state.consent(offer.study)
            going, why = offers.room_for(offer.study, len(offer.kept_as()), self._kept_offers())
            if why:
                self._log.error("the coordinator's offer of study `%s` is not kept: %s", offer.study, why)
                return
            for study in going:
                self._log.info("the offer of study `%s`, which is over and was not approved here, makes room", study)
                self._state.drop_offer(study)
            self._state.save_offer(offer)
        if consent is not None and consent.state == APPROVED and consents.differences(consent, offer):
            self._log.warning(
                "study `%s` changed since it was approved and is not worked on: %s",
                offer.study, "; ".join(consents.differences(consent, offer)),
            )  # fmt: skip

    def coordinator_says(self, study: str, digest: str, state: str) -> None:
        """Note the coordinator's word on a study: running, paused, finished ..."""
        with self._lock:
            offer = self._state.known_offer(study)
            if offer is not None and offer.digest == digest and offer.state != state:
                self._state.save_offer(replace(offer, state=state))

    def _kept_offers(self) -> dict[str, offers.Kept]:
        """What is kept, oldest first. Only where there is little room left does it matter which of them are over."""
        sizes = self._state.offer_sizes()
        approved = {consent.study for consent in self._state.consents()}
        full = len(sizes) >= offers.MAX_OFFERS or sum(sizes.values()) > offers.MAX_TOTAL_BYTES - offers.MAX_BYTES
        ended = {kept.study for kept in self._state.offers() if kept.state in ENDED} if full else set()
        return {study: offers.Kept(size, study in approved, study in ended) for study, size in sizes.items()}

    def preview(self, study: str, data: str) -> dict[str, Any]:
        """The account of a study as it is offered now, and the facts in it for scripts; it counts as shown.

        Args:
            data: with the network and the weights of this data; "": as approved before, or as assigned.

        Raises:
            UsageProblem: no such study.
            NeedsPerson: the trainer's list of tensors is not the coordinator's.
            WardroundError: what the trainer says.
        """
        offer = self._state.offer(study)
        consent = self._state.consent(study)
        data = data or (consent.data["name"] if consent is not None else "")
        described = self._describe(offer, data)
        consents.refuse_other_tensors(offer, described)
        shown = self._account(offer, described)
        with self._lock:
            self._state.save_preview(study, shown.shown())
        return {**facts(offer, described), **shown.document(), "data": data, "policy": self._state.policy.exists()}

    def _describe(self, offer: Offer, data: str) -> dict[str, Any]:
        described: dict[str, Any] = handoff.ask(
            self._state.root, "describe", study=offer.document, site=self._site.site, data=data
        )
        return described

    def _account(self, offer: Offer, described: dict[str, Any]) -> Account:
        """Beside the last consent; where there is none, beside what was shown last."""
        consent = self._state.consent(offer.study)
        before, since = (consent.shown(), "approved") if consent is not None else (None, "")
        if before is None:
            before, since = self._state.preview(offer.study), "shown"
        records = consent.validation_rows if consent is not None else None
        asked = consents.asked(offer, self._gate.coordinator, records, described["exposure"])
        try:
            lines = policies.lines(policies.load(self._state.policy), asked)
        except NeedsPerson:
            lines = {"verdict": "there is none: nothing may leave"}
        except WardroundError as error:
            lines = {"verdict": error.message}
        said = f"{since} {before.at}" if before is not None else ""
        return account(offer, described, lines, consents.ATTEMPTS, before, said)

    def approve(self, study: str, data: str, digest: str, person: dict[str, Any], narrate: Narrate) -> Consent:
        """Approve exactly what was shown, for the data called ``data``.

        Args:
            digest: of the account that was shown, or the first 16 of its hex digits.

        Raises:
            UsageProblem: no such study, or it is over.
            NeedsPerson: what is offered now is not what was shown; there is no policy; or the trainer's list of tensors
                is not the coordinator's.
            NotPermitted: the policy denies something that the study asks.
            WardroundError: what the trainer says about the data.
        """
        offer = self._state.offer(study)
        if offer.state in ENDED:
            raise UsageProblem(f"study `{study}` is {offer.state}: there is nothing left to approve")
        policy = self._gate.policy()
        before = self._state.consent(study)
        described = self._describe(offer, data)
        consents.refuse_other_tensors(offer, described)
        shown = self._account(offer, described)
        last = self._state.preview(study)
        consents.refuse_unshown(digest, shown, last, f"site-agent preview {study} --data {data}")
        for change in consents.differences(before, offer, described) if before is not None else []:
            narrate(f"changed since it was approved: {change}")
        narrate(f"checking data `{data}`")
        checked = handoff.ask(self._state.root, "check", study=offer.document, site=self._site.site, data=data)
        for warning in checked.get("warnings", []):
            narrate(f"warning: {warning}")
        trained_on = consents.trained_on(data, described, checked)
        for change in consents.data_differences(before.data, trained_on) if before is not None else []:
            narrate(f"changed since it was approved: {change}")
        if "network" in trained_on:
            narrate(f"of the study's networks, this site trains `{trained_on['network']}`")
        if checked.get("weights"):
            narrate(begins_with(checked["weights"]))
        consent = consents.grant(offer, described, trained_on, checked, person, shown.shown())
        asked = consents.asked(offer, self._gate.coordinator, consent.validation_rows, consent.exposure)
        refuse_study(policies.decide(policy, asked), study, self._state.policy)
        with self._lock:
            if (now := self._state.offer(study)).digest != offer.digest:
                raise NeedsPerson(
                    f"study `{study}` changed while it was approved: {'; '.join(consents.differences(consent, now))}",
                    hint=f"`site-agent preview {study} --data {data}`; nothing was approved",
                )
            self._record(consent, "approved", person)  # first: no consent is in force that the ledger does not hold
            self._state.save_consent(consent)
        return consent

    def withdraw(self, study: str, person: dict[str, Any]) -> Consent:
        """Take the approval back. From here on nothing of this study leaves.

        Raises:
            UsageProblem: it is not approved.
        """
        with self._lock:
            consent = self._state.consent(study)
            if consent is None or consent.state == WITHDRAWN:
                raise UsageProblem(f"study `{study}` is not approved here", hint="`site-agent studies` lists them")
            withdrawn = replace(consent, state=WITHDRAWN, withdrawn_by=person, withdrawn_at=now_text())
            self._state.save_consent(withdrawn)
        return withdrawn

    def waiting(self, study: str, round_: int) -> dict[str, Any]:
        """What waits for a person: every tensor with its norms, every number, and the update's digest.

        Raises:
            UsageProblem: nothing of this round waits.
        """
        consent, journal = self._held(study, round_)
        own = self._state.own_copy(study)
        manifest, rows = egress.measure(own, consent) if journal.update else (Manifest(()), [])
        return {
            "study": study, "revision": journal.revision, "round": journal.round,
            "update": egress.update_digest(journal, self._gate.coordinator, manifest.digest()),
            "tensors": rows, "payload_bytes": sum(row["bytes"] for row in rows), "metrics": journal.metrics,
            "num_examples": journal.num_examples, "num_validation": journal.num_validation,
        }  # fmt: skip

    def decide(self, study: str, round_: int, word: str, update: str, person: dict[str, Any]) -> None:
        """Record what a person says of the update that waits. ``word``: released or rejected.

        Raises:
            UsageProblem: nothing of this round waits, or another update than the one that was shown.
        """
        with self._lock:
            _, journal = self._held(study, round_)
            if update != egress.update_digest(journal, self._gate.coordinator):
                raise UsageProblem(
                    f"another update of round {round_} of `{study}` waits than the one that was shown",
                    hint=f"look again: `site-agent release {study} --round {round_}`",
                )
            self._ledger.append(
                word, study=study, revision=journal.revision, round=round_, attempt=journal.attempt, update=update,
                by=person,
            )  # fmt: skip
            self._ledger.sign()

    def has_word(self, study: str) -> bool:
        """Whether a person has said something of the update that waits."""
        journal = self._state.journal(study)
        update = egress.update_digest(journal, self._gate.coordinator)
        return bool(self._ledger.word(study, journal.revision, journal.round, update))

    def _held(self, study: str, round_: int) -> tuple[Consent, Journal]:
        self._state.offer(study)
        journal, consent = self._state.journal(study), self._state.consent(study)
        if consent is None or consent.state != APPROVED or (journal.phase, journal.round) != ("held", round_):
            waits = f"round {journal.round} does" if journal.phase == "held" else "nothing of it does"
            raise UsageProblem(f"round {round_} of `{study}` does not wait for a person: {waits}")
        update = egress.update_digest(journal, self._gate.coordinator)
        word = self._ledger.word(study, journal.revision, round_, update)
        if word:
            raise UsageProblem(f"round {round_} of `{study}` was {word} already")
        return consent, journal

    def leave(self, person: dict[str, Any]) -> None:
        """Record that the membership ended. From here on this directory is an archive; studies were withdrawn before.

        Raises:
            CannotWrite: the ledger does not take it; the site is still a member.
        """
        with self._lock:
            self._ledger.append("left", by=person)
            self._ledger.sign()
            self._state.save_left(person)

    def withdraw_all_and_leave(self, person: dict[str, Any]) -> list[str]:
        """``leave`` for one command while no service runs. The studies that the coordinator could not be told of."""
        untold = []
        for consent in self.approved():
            self.record_withdrawal(self.withdraw(consent.study, person), person)
            try:
                with self._line.use() as connection:
                    self.declare(connection, consent.study, consent.revision, consent.study_digest, "withdrawn")
            except durable.StorageFailed:
                raise
            except WardroundError as error:
                log.warning("%s", error.message)
                untold.append(consent.study)
        self.leave(person)
        return untold

    def approved(self) -> list[Consent]:
        """The consents that stand."""
        return [consent for consent in self._state.consents() if consent.state == APPROVED]

    def record_withdrawal(self, consent: Consent, person: dict[str, Any]) -> None:
        """The ledger's line about it; apart, so that what is under way is stopped first."""
        with self._lock:
            self._record(consent, "withdrawn", person)

    def declare(
        self, connection: Connection, study: str, revision: int, digest: str, standing: str, *,
        round_: int = 0, attempt: int = 0, code: str = "",
        often: bool = False,
    ) -> None:  # fmt: skip
        """Tell the coordinator where this site stands, after the ledger holds that it is told.

        Args:
            often: a coordinator can cause it without end, and the ledger has not each of them by itself. The bytes of
                all stand in its `control` lines.
        """
        append = self._ledger.append_often if often else self._ledger.append
        append("declare", study=study, revision=revision, standing=standing, round=round_, attempt=attempt, code=code)
        connection.declare(study, revision, digest, standing, round_=round_, attempt=attempt, code=code)

    def declare_all(self, connection: Connection, *, listed: bool) -> None:
        """Say again where this site stands in every study that is not over.

        Args:
            listed: the ledger has a line of this connection, and so it has of what is said at its beginning.
        """
        declare = partial(self.declare, connection) if listed else connection.declare
        for consent in self._state.consents():
            offer = self._state.known_offer(consent.study)
            if offer is None or offer.digest != consent.study_digest or offer.state in ENDED:
                continue
            standing = "ready" if consent.state == APPROVED else "withdrawn"
            try:
                declare(consent.study, consent.revision, consent.study_digest, standing)
            except Refused as error:
                self._log.error(
                    "the coordinator does not take that `%s` is %s: %s", consent.study, standing, error.message
                )

    def _record(self, consent: Consent, event: str, person: dict[str, Any]) -> None:
        self._ledger.append(
            "consent", event=event, study=consent.study, revision=consent.revision, study_digest=consent.study_digest,
            data_digest=consent.data["digest"], exposure=consent.exposure, by=person,
            consent_sha256=hashlib.sha256(consent.kept_as()).hexdigest(), **consents.pinned(consent),
        )  # fmt: skip
        self._ledger.sign()


def fatal(error: WardroundError) -> bool:
    """Whether the coordinator has said that this site, or this program, cannot go on without a person. Nobody else can:
    what the trainer or a command says never becomes this kind.
    """
    return isinstance(error, RefusedForGood)


def open_gate(state: SiteState, site: Site, ledger: Ledger) -> Gate:
    """The policy of this site, for what would leave for its coordinator."""
    return Gate(state.policy, certificates.Name(site.federation, "coordinator").uri, ledger)


def open_line(site: Site, own: Identity) -> Line:
    """A line to the coordinator with the site's certificate as it is on the disk."""
    return Line(lambda meter: Connection(site.address, *own.credentials(), meter, site.site))


def why_unreachable(site: Site, own: Identity) -> WardroundError:
    """What keeps the coordinator from being reached, looked at from here."""
    return diagnose(site.address, own.authority_file.read_bytes(), own.certificate_file, own.key_file)


@contextmanager
def alone(state: SiteState) -> Iterator[tuple[Desk, Interrupt]]:
    """A desk for one command while no service runs.

    Raises:
        TryAgain: another process owns the state directory.
    """
    site = state.site()
    with durable.StateLock(state.root, "site-agent"):
        own = Identity(state.identity)
        ledger = Ledger(state.ledger, own.ledger_key())
        ledger.refuse_unbegun()
        line = open_line(site, own)
        try:
            yield Desk(state, site, ledger, line), Interrupt()
        finally:
            line.close()
            try:
                egress.record_control(ledger, line.meter)
            finally:
                ledger.close()


def as_needs_person(error: WardroundError, site: Site) -> NeedsPerson:
    """A fatal refusal, with what it means for this hospital."""
    why = error.message.removesuffix(f" ({error.code})")
    message = f"the coordinator at {site.address} refuses site `{site.site}` ({error.code}): {why}"
    return NeedsPerson(message, hint=error.hint, code=error.code)
