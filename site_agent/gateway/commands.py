"""What a person's command does at the gateway: look for offers, approve, withdraw, leave.

The running service has one ``CommandHandler``; when no service runs, ``setup.handler_alone`` makes one for a single
command, under the lock.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from site_agent import handoff
from site_agent.gateway.connection.client import Connection
from site_agent.gateway.connection.interrupt import Interrupt
from site_agent.gateway.connection.session import Session
from site_agent.gateway.consent import approvals, offers
from site_agent.gateway.consent.account import Account, account
from site_agent.gateway.consent.changes import data_differences, differences
from site_agent.gateway.consent.facts import begins_with, facts
from site_agent.gateway.consent.preview import Preview
from site_agent.gateway.consent.recorded import consent_entry, person_entry
from site_agent.gateway.endorsing import approved_together, take_back
from site_agent.gateway.exit import receipt_copy
from site_agent.gateway.exit.enforcement import PolicyEnforcement
from site_agent.gateway.exit.ledger import Ledger
from site_agent.gateway.fitting import declaration_of, declaration_of_fit, fit_of, form_of
from site_agent.gateway.peer_requests import CheckSum, ShownSum
from site_agent.gateway.peers import KnownPeers
from site_agent.gateway.policy import text
from site_agent.gateway.policy.decisions import decide
from site_agent.gateway.policy.policy import load
from site_agent.gateway.policy.refusing import refuse_plugins, refuse_study
from site_agent.gateway.releasing import Releases
from site_agent.gateway.requests import Fit
from site_agent.gateway.secure.attempts import Attempts
from site_agent.gateway.secure.checks import SumChecks
from site_agent.gateway.secure.kept import name_of
from site_agent.gateway.summaries import Summaries
from site_agent.state.consent import APPROVED, WITHDRAWN, Consent
from site_agent.state.directory import SiteState, now_text
from site_agent.state.offer import Offer
from site_agent.state.person import Person
from site_agent.state.site import Site
from wardround.errors import NeedsPerson, Refused, UsageProblem, WardroundError
from wardround.local.rate_limit import RateLimitedLog
from wardround.records.assignment import Declaration, SiteStatus
from wardround.records.ledger import entries
from wardround.records.trainer import Check, Checked, Describe, Described, Examine

log = logging.getLogger(__name__)
ENDED = ("finished", "stopped", "failed")  # the coordinator's words for a study that is over
Narrate = Callable[[str], object]


class CommandHandler:
    """Acts on offers and consents. Safe to use from several threads."""

    def __init__(self, state: SiteState, site: Site, ledger: Ledger, session: Session) -> None:
        self._state = state
        self._site = site
        self._ledger = ledger
        self.session = session
        self.policy = PolicyEnforcement.of(state, site, ledger)
        self.peers = KnownPeers(state, site, ledger)
        self.sums = SumChecks(session, ledger, Attempts(state.secure), state.sums)
        self.summaries = Summaries(state, ledger, session, self.policy)
        self._log = RateLimitedLog(log)
        self._lock = threading.RLock()
        self.releases = Releases(state, ledger, self.policy, self._lock)

    def refresh(self, interrupt: Interrupt) -> list[Offer]:
        """Ask the coordinator for its studies and keep them.

        Raises:
            Unavailable: it cannot be reached; what was kept before is still there.
        """
        with self.session.use() as connection:
            offered = connection.studies(interrupt, patient=False)
        self.keep_listed(offered)
        return offered

    def fetch_receipts(self, interrupt: Interrupt) -> int:
        """Ask the coordinator for its copy of this site's receipts and keep it. Returns how many there are.

        Raises:
            Unavailable: it cannot be reached; what was kept before is still there.
            BadData: what came is no such copy; likewise.
        """
        with self.session.use() as connection:
            return receipt_copy.keep(connection.receipts(interrupt), self._site, self._state.receipts)

    def keep_listed(self, offered: Sequence[Offer]) -> None:
        """Keep what the coordinator lists, all that goes on; any other study is over until it says another word."""
        listed = {offer.study for offer in offered}
        for offer in offered:
            self.keep(offer)
        for kept in self._state.offers():
            if kept.study not in listed and kept.state not in ENDED:
                self.coordinator_says(kept.study, kept.digest, "stopped")

    def keep(self, offer: Offer) -> None:
        """Keep an offer; if it is not what was approved, say so."""
        with self._lock:
            if self._state.known_offer(offer.study) == offer:
                return
            consent = self._state.consent(offer.study)
            dropped, why = offers.room_for(offer.study, len(offer.to_bytes()), self._kept_offers())
            if why:
                self._log.error("the coordinator's offer of study `%s` is not kept: %s", offer.study, why)
                return
            for study in dropped:
                self._log.info("the offer of study `%s`, which is over and was not approved here, makes room", study)
                self._state.drop_offer(study)
            self._state.save_offer(offer)
        if consent is not None and consent.state == APPROVED and differences(consent, offer):
            self._log.warning(
                "study `%s` changed since it was approved and is not worked on: %s",
                offer.study, "; ".join(differences(consent, offer)),
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

    def preview(self, study: str, data: str) -> Preview:
        """The account of a study as it is offered now, and the facts in it for scripts; it counts as shown.

        Args:
            data: with the network and the weights of this data; "": as approved before, or as assigned.

        Raises:
            UsageProblem: no such study.
            NeedsPerson: the trainer's list of tensors is not the coordinator's.
            NotPermitted: the policy does not let the study's plug-ins run here.
            WardroundError: what the trainer says.
        """
        offer, consent = self._state.offer(study), self._state.consent(study)
        data = data or (consent.data.name if consent is not None else "")
        described = self._describe(offer, data)
        approvals.refuse_other_tensors(offer, described)
        shown = self._account(offer, described)
        with self._lock:
            self._state.save_preview(study, shown.shown())
        return Preview(shown, facts(offer, described), data, self._state.policy.exists())

    def _describe(self, offer: Offer, data: str) -> Described:
        refuse_plugins(offer.plugins, offer.study, self._state.policy, self.policy.policy)
        return handoff.ask(self._state.root, Describe(study=offer.document, site=self._site.site, data=data))

    def _check(self, offer: Offer, data: str) -> Checked:
        return handoff.ask(self._state.root, Check(study=offer.document, site=self._site.site, data=data))

    def _account(self, offer: Offer, described: Described) -> Account:
        """Beside the last consent; where there is none, beside what was shown last."""
        consent = self._state.consent(offer.study)
        before = consent.account if consent is not None else self._state.preview(offer.study)
        what, records = ("approved", consent.validation_rows) if consent is not None else ("shown", None)
        request = approvals.study_request(offer, self.policy.coordinator, records, described.exposure)
        try:
            lines = text.lines(load(self._state.policy), request)
        except NeedsPerson:
            lines = {"verdict": "there is none: nothing may leave"}
        except WardroundError as error:
            lines = {"verdict": error.message}
        since = f"{what} {before.at}" if before is not None else ""
        known = (self._site.site, self.peers.fingerprints)
        return account(offer, described, lines, approvals.ATTEMPTS, before, since, *known)

    def approve(self, study: str, data: str, digest: str, person: Person, narrate: Narrate) -> Consent:
        """Approve exactly what was shown, for the data called ``data``.

        Args:
            digest: of the account that was shown, or the first 16 of its hex digits.

        Raises:
            UsageProblem: no such study, or it is over.
            NeedsPerson: what is offered now is not what was shown; there is no policy; the trainer's list of tensors is
                not the coordinator's; or the policy wants further people, see ``approved_together``.
            NotPermitted: the policy denies something that the study asks, or too few of its members are known here.
            WardroundError: what the trainer says about the data.
        """
        offer = self._state.offer(study)
        if offer.state in ENDED:
            raise UsageProblem(f"study `{study}` is {offer.state}: there is nothing left to approve")
        policy = self.policy.policy(study)
        before = self._state.consent(study)
        described = self._describe(offer, data)
        approvals.refuse_other_tensors(offer, described)
        shown = self._account(offer, described)
        last = self._state.preview(study)
        approvals.refuse_unshown(digest, shown, last, f"site-agent preview {study} --data {data}")
        for change in differences(before, offer, described) if before is not None else []:
            narrate(f"changed since it was approved: {change}")
        narrate(f"checking data `{data}`")
        checked = self._check(offer, data)
        for warning in checked.warnings:
            narrate(f"warning: {warning}")
        trained_on = approvals.trained_data(data, described, checked)
        for change in data_differences(before.data, trained_on) if before is not None else []:
            narrate(f"changed since it was approved: {change}")
        if trained_on.network:
            narrate(f"of the study's networks, this site trains `{trained_on.network}`")
        if checked.weights is not None:
            narrate(begins_with(checked.weights))
        consent = approvals.grant(offer, described, trained_on, checked, person, shown.shown())
        request = approvals.study_request(offer, self.policy.coordinator, consent.validation_rows, consent.exposure)
        refuse_study(decide(policy, request), study, self._state.policy)
        self.peers.refuse_roster(offer, policy)
        with self._lock:
            now, since = self._state.offer(study), self._state.consent(study)
            approvals.refuse_overtaken(consent, now, overtaken=since != before)
            consent = approved_together(self._state, self._ledger, consent, policy.approval.persons)
            self._record(consent, "approved", person)  # first: no consent is in force that the ledger does not hold
            self._state.save_consent(consent)
        return consent

    def withdraw(self, study: str, person: Person) -> Consent | None:
        """Take the approval back. From here on nothing of this study leaves. None: nothing was in force yet.

        Raises:
            UsageProblem: it is not approved.
        """
        with self._lock:
            consent = self._state.consent(study)
            if consent is None or consent.state == WITHDRAWN:
                take_back(self._state, self._ledger, study, person)
                return None
            consent = replace(consent, state=WITHDRAWN, withdrawn_by=person, withdrawn_at=now_text())
            self._state.save_consent(consent)
        return consent

    def fit(self, study: str, data: str, digest: str, shown: Fit, person: Person) -> Fit:
        """Tell the coordinator whether the data called ``data`` fits a study that nobody approved yet.

        What is said is one word and, where it fits, the number of usable rows in the form of the study's counts.

        Args:
            digest: of the study that was looked at, and ``shown``, what was found: it is found again, and exactly this
                is told. Which rows are usable is the study's to say, so another study would be told another number.

        Raises:
            UsageProblem: no such study, or it is over.
            NeedsPerson: it is not what was shown.
            NotPermitted: the policy does not let it be said.
            WardroundError: what the trainer says; or the coordinator cannot be reached, after the ledger's line.
        """
        offer = self._state.offer(study)
        if offer.state in ENDED:
            raise UsageProblem(f"study `{study}` is {offer.state}: there is nothing left to look at")
        other = NeedsPerson(
            f"what would be told of study `{study}` is not what was shown: the study, the data or its mapping changed; "
            "nothing was sent",
            hint=f"look again: `site-agent data fit {data} --study {study}`",
        )
        if offer.digest != digest:
            raise other
        self.policy.refuse_fit(study, form_of(offer).counts)
        refuse_plugins(offer.plugins, study, self._state.policy, self.policy.policy)
        fit = fit_of(
            offer, handoff.ask(self._state.root, Examine(study=offer.document, site=self._site.site, data=data))
        )
        if fit != shown:
            raise other
        declaration = declaration_of_fit(offer, fit)
        with self.session.use() as connection:
            self._ledger.append(entries.DeclareEntry(
                study=study, revision=offer.revision, standing=declaration.status.value,
                num_examples=fit.rows if fit.fits else None, by=person_entry(person),
            ))  # fmt: skip
            connection.declare(declaration)
        return fit

    def check_sum(self, asked: CheckSum, interrupt: Interrupt) -> ShownSum:
        """Look at blocks of a round's sum, or at all of them. Raises as ``SumChecks.by_hand``."""
        study = asked.study
        consent = approvals.require(self._state.consent(study), study, self._state.offer(study).digest)
        found = self.sums.by_hand(consent, asked.round, asked.blocks, interrupt, keep=asked.keep)
        kept = str(self._state.sums / name_of(study, consent.revision, asked.round)) if asked.keep else ""
        return ShownSum(found.result, len(found.looked_at), found.of, found.sites, found.why, kept)

    def leave(self, person: Person) -> None:
        """Record that the membership ended. From here on this directory is an archive; studies were withdrawn before.

        Raises:
            CannotWrite: the ledger does not take it; the site is still a member.
        """
        with self._lock:
            self._ledger.append(entries.LeftEntry(by=person_entry(person)))
            self._ledger.sign()
            self._state.save_left(person)

    def approved(self) -> list[Consent]:
        """The consents that stand."""
        return [consent for consent in self._state.consents() if consent.state == APPROVED]

    def record_withdrawal(self, consent: Consent | None, person: Person) -> None:
        """Write the ledger's line about it; what was under way has been stopped. None: as ``withdraw`` has it."""
        with self._lock:
            if consent is not None:
                self._record(consent, "withdrawn", person)

    def declare(self, connection: Connection, declaration: Declaration, *, often: bool = False) -> None:
        """Tell the coordinator where this site stands, after the ledger holds that it is told.

        ``often``: a coordinator can cause it without end, and the ledger has not each of them by itself. The bytes of
        all stand in its `control` lines. What holds a number is none of these.
        """
        append = self._ledger.append_often if often else self._ledger.append
        append(entries.DeclareEntry(
            study=declaration.study, revision=declaration.revision, standing=declaration.status.value,
            estimate_s=declaration.estimate_s or None, round=declaration.round, attempt=declaration.attempt,
            code=declaration.code,
        ))  # fmt: skip
        connection.declare(declaration)

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
            status = SiteStatus.READY if consent.state == APPROVED else SiteStatus.WITHDRAWN
            try:
                declare(declaration_of(consent, status))
            except Refused as error:
                self._log.error(
                    "the coordinator does not take that `%s` is %s: %s", consent.study, status, error.message
                )

    def _record(self, consent: Consent, event: str, person: Person) -> None:
        self._ledger.append(consent_entry(consent, event, person))
        self._ledger.sign()
