"""A site's part in secure aggregation, from the keys of an attempt to the opening of its sum.

    begin      keys          the work thread, before it trains
    shown      what the coordinator shows: keys, shares, a set, signatures; answered by a thread of its own, while the
               trainer trains, or later
    vector     the masked update, when trainer and shares are there; ``exit.egress`` records and sends it

For each: the state is durable, the ledger has its line, and then it is told. What is told may be told again, after a
restart at any place: it is the same.
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from site_agent.gateway.connection.backoff import backoff
from site_agent.gateway.connection.interrupt import Interrupt
from site_agent.gateway.connection.session import Session
from site_agent.gateway.exit.enforcement import PolicyEnforcement
from site_agent.gateway.exit.ledger import Ledger
from site_agent.gateway.exit.masked import MaskedUpdate, Masking
from site_agent.gateway.secure import terms, vectors
from site_agent.gateway.secure.attempts import Attempt, Attempts, fresh_root
from site_agent.gateway.secure.due import Due
from site_agent.state import peers
from site_agent.state.consent import APPROVED, Consent
from site_agent.state.directory import SiteState
from site_agent.state.journal import Journal
from site_agent.state.site import Site
from wardround.errors import BadData, NotPermitted, Refused, RefusedForGood, TryAgain, Unavailable, WardroundError
from wardround.local.durable import StorageFailed
from wardround.local.rate_limit import RateLimitedLog
from wardround.records.assignment import VALIDATE, Assignment
from wardround.records.ledger.secure import AgreedEntry, KeysEntry, OpenedEntry
from wardround.records.secure_messages import AttemptRef, SecureShown, SecureTold, Shown, Told
from wardround.secure import site as protocol
from wardround.secure.policy import Pledges
from wardround.secure.site import Party
from wardround.secure.statements import Opened, known

TOO_LATE = "ROUND_CLOSED"
Decline = Callable[[AttemptRef, WardroundError], object]
Line = TypeVar("Line", KeysEntry, AgreedEntry, OpenedEntry)
log = RateLimitedLog(logging.getLogger(__name__))


class SecureRounds:
    """One site's attempts, of all its studies. Safe to use from several threads."""

    def __init__(
        self, state: SiteState, site: Site, key: Ed25519PrivateKey, session: Session, ledger: Ledger
    ) -> None:  # fmt: skip
        self._state, self._site, self._key = state, site, key
        self._session, self._ledger = session, ledger
        self._policy = PolicyEnforcement.of(state, site, ledger)
        self.attempts = Attempts(state.secure)
        self._changed = threading.Condition(threading.RLock())  # guards the files; notified when one is written
        self._failed: dict[AttemptRef, WardroundError] = {}
        self._due = Due()

    # the work thread

    def begin(self, assignment: Assignment, consent: Consent) -> None:
        """Take part in an attempt: this site's keys are durable, in the ledger, and told as soon as the connection
        allows. Done again, they are the same. An earlier attempt's secrets are erased, in a damaged file too: what
        this site signed stands in the ledger.

        Raises:
            NotPermitted: the roster does not suit the policy; or this site has signed a set of this round, which is
                opened and never another; or what it signed is not known, for an older ledger is not there.
        """
        if assignment.base is None:
            raise BadData("the coordinator's assignment names no model to begin from", code="DECLINED_MODEL_MISMATCH")
        ref = AttemptRef(assignment.study, assignment.revision, assignment.digest, assignment.round, assignment.attempt)
        file, closing = terms.file_of(consent.document), assignment.kind == VALIDATE
        party = self.party(consent)
        self._ledger.pledged.sets()
        context = terms.context_of(
            consent, file, self._site.federation, ref.round, ref.attempt, assignment.base.digest, closing=closing
        )
        with self._changed:
            self._failed.pop(ref, None)
            before = self._newest(ref.study)
            if before is not None and before.state.context == context:
                _, envelope = protocol.begin(party, context, before.state.root)
            else:
                self._refuse_after_signature(before, ref)
                state, envelope = protocol.begin(party, context, fresh_root())
                self._ledger.append(_about(KeysEntry, ref, context.digest, base=context.base, roster=context.roster))
                self._ledger.sign()
                self.attempts.save(Attempt(ref, state, closing))
        self._due.put(SecureTold(ref, Told.KEYS, envelope))

    def _newest(self, study: str) -> Attempt | None:
        """The newest attempt of a study; None where there is none, or its file is damaged."""
        try:
            return self.attempts.load(study)
        except BadData as damaged:
            log.error("%s. %s", damaged.message, damaged.hint)
            return None

    def masking(self, journal: Journal, consent: Consent, interrupt: Interrupt) -> Masking:
        """How the update of an assignment that ``begin`` has begun gets its masks."""
        return Masking(partial(self._masked, journal, consent, interrupt), self._state.save_commitment)

    def begun(self, assignment: Assignment, journal: Journal, consent: Consent, interrupt: Interrupt) -> Masking:
        """``begin``, then ``masking``."""
        self.begin(assignment, consent)
        return self.masking(journal, consent, interrupt)

    def _masked(self, journal: Journal, consent: Consent, interrupt: Interrupt) -> MaskedUpdate:
        """The update with its masks, in the gateway's own file, signed. Waits for the shares of the others.

        Raises:
            Interrupted: called off.
            WardroundError: what was shown of the attempt cannot be gone on with; a value is beyond the study's range;
                or another update than before would have the same masks.
        """
        attempt = self._joined(journal, interrupt)
        party, file = self.party(consent), terms.file_of(consent.document)
        layout = terms.layout_of(consent, file, closing=attempt.closing)
        plain = None if attempt.closing else self._state.own_copy(journal.study)
        target = self._state.masked_copy(journal.study)
        made = vectors.write(target, plain, file, layout, journal, protocol.masks(party, attempt.state))
        with self._changed:
            attempt = self._joined(journal, interrupt)
            state, envelope = protocol.submit(party, attempt.state, made.blocks)
            self._save(replace(attempt, state=state))
        return MaskedUpdate(
            target, made.manifest, made.blocks.root, envelope, state.context.digest, state.members.digest,
            layout.quantizer.largest_weight, layout.quantizer.bits,
        )  # fmt: skip

    def party(self, consent: Consent) -> Party:
        """This site in a study, by the policy as it is now.

        Raises:
            WardroundError: there is no policy, or the roster does not suit it.
        """
        policy = terms.policy_of(self._policy.policy(consent.study).secure_aggregation, peers.load(self._state.peers))
        return terms.party_of(self._site.site, self._key, terms.file_of(consent.document), policy)

    def ended(self, study: str) -> None:
        """The study is over: erase what is secret of it."""
        with self._changed:
            self.attempts.forget(study)

    # the watch thread

    def shown(self, shown: SecureShown) -> None:
        """Take what the coordinator shows; it is answered in its turn."""
        self._due.put(shown)

    def close(self) -> None:
        """End ``answer``."""
        self._due.close()

    # a thread of its own

    def answer(self, stopping: Interrupt, decline: Decline) -> None:
        """Answer what is shown, one after the other, until ``close``.

        Args:
            decline: tells the coordinator that this site does not go on with an attempt.
        """
        while (due := self._due.get()) is not None:
            told = due if isinstance(due, SecureTold) else self._answered(due, decline)
            if told is not None:
                self._tell(told, stopping, decline)

    def _answered(self, shown: SecureShown, decline: Decline) -> SecureTold | None:
        """What is to be told. A step that cannot be gone on with is declined, and stands in the ledger."""
        ref = shown.attempt
        steps = {
            Shown.KEYS: self._deal, Shown.SHARES: self._join, Shown.SET: self._agree, Shown.AGREEMENTS: self._open,
        }  # fmt: skip
        try:
            with self._changed:
                attempt = self.attempts.load(ref.study)
                if attempt is None or attempt.ref != ref:
                    return None  # of an attempt that this site is not in: its assignment comes again, or is over
                return steps[shown.kind](self._party_of(attempt), attempt, shown)
        except (StorageFailed, RefusedForGood):
            raise
        except WardroundError as error:
            self._give_up(ref, shown.kind, error, decline)
        return None

    def _give_up(self, ref: AttemptRef, step: str, error: WardroundError, decline: Decline) -> None:
        log.error("round %d of `%s`, secure aggregation: %s. %s", ref.round, ref.study, error.message, error.hint)
        with self._changed:
            self._failed[ref] = error
            self._changed.notify_all()
        self._policy.block(ref, f"secure aggregation: {step}", error.message)
        decline(ref, error)

    def _deal(self, party: Party, attempt: Attempt, shown: SecureShown) -> SecureTold:
        state, dealt = protocol.shares(party, attempt.state, shown.statements)
        self._save(replace(attempt, state=state))
        return SecureTold(attempt.ref, Told.SHARES, shares=dealt)

    def _join(self, party: Party, attempt: Attempt, shown: SecureShown) -> None:
        state = protocol.join(party, attempt.state, shown.shares or {})
        self._save(replace(attempt, state=state))

    def _agree(self, party: Party, attempt: Attempt, shown: SecureShown) -> SecureTold:
        """The ledger's line is the pledge: it is read before another set is signed, and never forgotten."""
        self._refuse_unchecked(attempt)
        pledges = self._pledges(attempt.ref)
        state, pledged, envelope = protocol.agree(party, attempt.state, shown.statements, pledges)
        if pledged != pledges or not self._is_here(attempt):
            self._ledger.append(self._agreed(party, replace(attempt, state=state)))
            self._ledger.sign()
        self._save(replace(attempt, state=state))
        return SecureTold(attempt.ref, Told.AGREEMENT, envelope)

    def _open(self, party: Party, attempt: Attempt, shown: SecureShown) -> SecureTold:
        state, envelope = protocol.open_(party, attempt.state, shown.statements)
        if not attempt.state.opened:
            opened = known(Opened, envelope)
            line = _about(
                OpenedEntry, attempt.ref, state.context.digest, chosen=opened.chosen,
                self_masks=tuple(sorted(opened.self_masks)), mask_keys=tuple(sorted(opened.mask_keys)),
            )  # fmt: skip
            again = [] if self._is_here(attempt) else [self._agreed(party, attempt)]  # it stands in an older ledger
            self._ledger.append_all([*again, line])
            self._ledger.sign()
        self._save(replace(attempt, state=state))
        return SecureTold(attempt.ref, Told.OPENING, envelope)

    def _is_here(self, attempt: Attempt) -> bool:
        """Whether the set of an attempt's round has its line in this ledger, not only in one before it."""
        return self._ledger.pledged.is_here(attempt.ref.digest, attempt.ref.round)

    def _agreed(self, party: Party, attempt: Attempt) -> AgreedEntry:
        """The line about the set that an attempt's state has, by the policy as it is now."""
        state, policy = attempt.state, party.policy
        others = set(state.chosen) - {party.site, *policy.strangers(party.roster, party.site)}
        return _about(
            AgreedEntry, attempt.ref, state.context.digest, group=state.members.digest, base=state.context.base,
            chosen=state.chosen_digest, sites=state.chosen, known=tuple(sorted(others)),
            threshold=party.rules.threshold, min_sites=policy.min_sites, min_known=policy.min_known,
            policy_sha256=self._ledger.policy_sha256,
        )  # fmt: skip

    def _tell(self, told: SecureTold, stopping: Interrupt, decline: Decline) -> None:
        """Tell it, as often as the connection breaks, while the attempt is under way and may go on."""
        for wait_s in backoff():
            stopping.check()
            if not self._goes_on(told, decline):
                return
            times_connected = self._session.times_connected
            try:
                with self._session.use() as connection:
                    connection.tell(told)
                self._ledger.sign()
                return
            except (Unavailable, TryAgain, Refused) as error:
                if error.code == TOO_LATE or isinstance(error, Refused) or not self._is_current(told.attempt):
                    log.warning("the %s of round %d: %s", told.kind, told.attempt.round, error.message)
                    return
                log.warning("%s; trying again in %.1f s, or as soon as the coordinator is back", error.message, wait_s)
                self._session.pause(wait_s, times_connected, stopping)

    # what several of them need

    def _goes_on(self, told: SecureTold, decline: Decline) -> bool:
        """Whether what is told is of the attempt under way, and may leave by the consent and the policy as they are by
        now: a coordinator that does not take it has it told again for as long as it likes."""
        with self._changed:
            attempt = self._newest(told.attempt.study)
        if attempt is None or attempt.ref != told.attempt:
            return False
        try:
            self._party_of(attempt)
        except StorageFailed:
            raise
        except WardroundError as error:
            self._give_up(told.attempt, told.kind, error, decline)
            return False
        return True

    def _is_current(self, ref: AttemptRef) -> bool:
        with self._changed:
            attempt = self._newest(ref.study)
        return attempt is not None and attempt.ref == ref

    def _party_of(self, attempt: Attempt) -> Party:
        """Raises NotPermitted: the study is not approved here any more, or the policy in force denies it by now."""
        ref = attempt.ref
        consent = self._state.consent(ref.study)
        if consent is None or consent.state != APPROVED or consent.study_digest != ref.digest:
            raise NotPermitted(f"study `{ref.study}` is not approved here any more", code="DECLINED_NOT_APPROVED")
        if denial := self._policy.sum_denial(consent, closing=attempt.closing):
            raise NotPermitted(
                f"the policy blocks round {ref.round} of `{ref.study}`: {denial.what}: {denial.rule}; this site does "
                "not help to open its sum",
                hint=f"`site-agent policy explain {ref.study}`",
                code="DECLINED_POLICY",
            )
        return self.party(consent)

    def _save(self, attempt: Attempt) -> None:
        self.attempts.save(attempt)
        self._changed.notify_all()

    def _joined(self, journal: Journal, interrupt: Interrupt) -> Attempt:
        """The attempt of a journal, once its group is known.

        Raises:
            Interrupted: called off meanwhile.
            WardroundError: why this site does not go on with it.
        """
        ref = AttemptRef(journal.study, journal.revision, journal.study_digest, journal.round, journal.attempt)
        with interrupt.ending(self._wake), self._changed:
            while not interrupt.thrown:
                attempt = self.attempts.load(ref.study)
                if attempt is None or attempt.ref != ref:
                    raise NotPermitted(
                        f"this site has no secrets for attempt {ref.attempt} at round {ref.round} of `{ref.study}`",
                        code="DECLINED_POLICY",
                    )
                if (error := self._failed.get(ref)) is not None:
                    raise error
                if attempt.state.group:
                    return attempt
                self._changed.wait()
        interrupt.check()
        raise AssertionError("thrown")

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _refuse_after_signature(self, before: Attempt | None, ref: AttemptRef) -> None:
        if before is None or before.ref.digest != ref.digest or before.ref.round != ref.round:
            return
        if before.state.chosen and not before.state.opened:
            raise NotPermitted(
                f"this site has signed a set of attempt {before.ref.attempt} at round {ref.round} of `{ref.study}`: "
                "that one is opened when enough sites are back, and no other",
                hint="the coordinator's operator begins a new revision, if it cannot be",
                code="DECLINED_POLICY",
            )

    def _pledges(self, ref: AttemptRef) -> Pledges:
        """What this site has signed and keeps to, of whatever study. Not what it signed of an earlier revision of this
        one and did not open: its secrets are erased with the present attempt's first step, so it never will."""
        return Pledges(tuple(
            entry.pledge for entry, opened in self._ledger.pledged.sets()
            if opened or entry.study != ref.study or entry.study_sha256 == ref.digest
        ))  # fmt: skip

    def _refuse_unchecked(self, attempt: Attempt) -> None:
        """Raises NotPermitted: the sum of the last round that this site helped to open was not checked."""
        last, _ = self._ledger.pledged.last_sum(attempt.ref.digest)
        if last is not None and (last.round, last.context) != (attempt.ref.round, attempt.state.context.digest):
            raise NotPermitted(
                f"the sum of round {last.round} of `{attempt.ref.study}` was not checked, so none of round "
                f"{attempt.ref.round} is signed",
                hint=f"`site-agent audit sum {attempt.ref.study} --round {last.round}`",
                code="DECLINED_POLICY",
            )


def _about(kind: Callable[..., Line], ref: AttemptRef, context: str, **fields: object) -> Line:
    """A line about an attempt, with what each of them says."""
    return kind(
        study=ref.study, revision=ref.revision, study_sha256=ref.digest, round=ref.round, attempt=ref.attempt,
        context=context, **fields,
    )  # fmt: skip
