"""The policy in force: read anew each time it is asked, so that an edit counts from the next thing that would leave.

A policy that is missing or broken blocks everything. Its digest is in the ledger from when it is first read, and again
whenever it changes.
"""

import datetime
import hashlib
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

from site_agent.gateway.exit.ledger import Ledger
from site_agent.gateway.exit.proposals import agreed_before, known, take_back, who_agreed
from site_agent.gateway.policy.decisions import (
    Decision,
    StudyRequest,
    decide,
    decide_approval,
    decide_fit,
    decide_summary,
    first_denial,
    number_quotas,
    quotas,
)
from site_agent.gateway.policy.policy import Policy, parse, read
from site_agent.gateway.policy.text import differences
from site_agent.gateway.policy.veto import is_worse
from site_agent.gateway.policy_requests import NOTHING, Proposed
from site_agent.state.consent import Consent
from site_agent.state.directory import COUNTS, SiteState
from site_agent.state.journal import Journal
from site_agent.state.site import Site
from wardround.errors import BadData, CannotWrite, NeedsPerson, NotPermitted, UsageProblem, WardroundError
from wardround.local import durable
from wardround.records.codes import VETO
from wardround.records.ledger.base import Person
from wardround.records.ledger.decided import HeldEntry, PolicyEntry, ReleasedEntry
from wardround.records.ledger.entries import BlockedEntry
from wardround.records.study import ReportedSection
from wardround.records.summaries.figures import SiteFigures
from wardround.signing import certificates
from wardround.tensors.manifests import TensorSpec
from wardround.terminal import escaped

LONGEST = 500  # characters of what is blocked, and of the rule
NEW_MODE = 0o640  # of a policy where there was none


class RoundAttempt(Protocol):
    """Whatever names one attempt at one round of a study: a journal, an update."""

    @property
    def study(self) -> str: ...
    @property
    def revision(self) -> int: ...
    @property
    def round(self) -> int: ...
    @property
    def attempt(self) -> int: ...


@dataclass(frozen=True)
class PolicyEnforcement:
    """Asks the policy at ``path`` about what would leave for ``coordinator``, its URI name."""

    path: Path
    coordinator: str
    ledger: Ledger

    @classmethod
    def of(cls, state: SiteState, site: Site, ledger: Ledger) -> Self:
        """The policy of this site, for what would leave for its coordinator."""
        return cls(state.policy, certificates.Name(site.federation, "coordinator").uri, ledger)

    def policy(self, study: str = "STUDY") -> Policy:
        """The policy as it is now; when this returns or raises BadData its text is kept and its digest in the ledger.

        Args:
            study: for which it is asked, so that a hint names the next command in full.

        Raises:
            NeedsPerson: there is none; or it is not the one to which as many people agreed as had to.
            BadData: it is none.
        """
        with self.ledger.policy_turn:
            try:
                data = read(self.path, study)
            except NeedsPerson:
                self.ledger.note_policy(PolicyEntry(event="", sha256=""))
                raise
            self._note(data)
        return parse(data, self.path)

    def _note(self, text: bytes) -> None:
        """Note a policy that lies there, as somebody wrote it, unless more people than one must agree to it.

        Raises:
            NeedsPerson: they must, and did not.
        """
        wanted, agreed = self.ledger.says(lambda state: (state.policy_persons, state.last_policy))
        digest = self._keep(text)
        if wanted > 1 and digest != agreed:
            raise NeedsPerson(
                f"{self.path} was changed by hand, and the policy in force wants {wanted} different people to change "
                "it: nothing leaves",
                hint=f"each of them: `site-agent policy apply {self.path}`; or put back what they agreed to: "
                f"`site-agent policy show {agreed[:12]}`",
                code="DECLINED_POLICY",
            )
        if digest != self.ledger.policy_sha256:
            self.ledger.note_policy(self._entry(text))

    def _entry(self, text: bytes, by: Person | None = None, before: tuple[Person, ...] = ()) -> PolicyEntry:
        try:
            persons = parse(text, self.path).policy.persons
        except BadData:
            persons = 1
        return PolicyEntry(
            event="", sha256=self._keep(text), by=by, also_by=before or None, persons=persons if persons > 1 else None
        )

    def put(self, text: bytes, before: str, by: Person) -> str:
        """Put another policy in force, after who did it is in the ledger; the policy's digest.

        Args:
            before: the digest of the policy in force that the person saw; "" for none.

        Raises:
            BadData: it is no policy.
            NeedsPerson: the policy in force is another by now, and nothing was changed; or further people must agree.
            UsageProblem: they must, and this person has agreed already.
            CannotWrite: there is no room; the policy in force stays.
        """
        parse(text, self.path)
        with self.ledger.policy_turn:
            present, there = self._in_force(), self.path.exists()
            if (hashlib.sha256(present).hexdigest() if present else "") != before:
                raise NeedsPerson(
                    f"{self.path} is not the policy any more that was to be changed; nothing was changed",
                    hint="somebody else changed it: look at it, and begin again",
                )
            if present:
                self._note(present)  # written by hand, it may not be in the ledger yet
            digest = self._keep(text)
            agreed = agreed_before(self.ledger, digest, by, self.ledger.says(lambda state: state.policy_persons))
            self.ledger.note_policy(self._entry(text, by, agreed))  # first: none is in force without its line
            try:
                durable.write_file(self.path, text, mode=self.path.stat().st_mode & 0o777 if there else NEW_MODE)
            except CannotWrite:
                stayed = self._entry(present) if present else PolicyEntry(event="", sha256="")
                self.ledger.note_policy(stayed)
                raise
        return digest

    def _in_force(self) -> bytes:
        """The policy that is in force; b"" for none."""
        wanted, agreed = self.ledger.says(lambda state: (state.policy_persons, state.last_policy))
        if wanted > 1:  # whatever lies there: it may have been changed by hand
            return self._kept(agreed)
        return read(self.path) if self.path.exists() else b""

    def proposed(self) -> Proposed:
        """The change of the policy that waits for further people."""
        proposal, wanted, agreed = self.ledger.says(
            lambda state: (state.proposal, state.policy_persons, state.last_policy)
        )
        if proposal is None:
            return NOTHING
        text = self._kept(proposal.policy_sha256)
        old, new = parse(self._kept(agreed), self.path), parse(text, self.path)
        changes = differences(old, new) or ["the two say the same in other words"]
        people = tuple(known(person).text for person in who_agreed(proposal))
        return Proposed(proposal.policy_sha256, text.decode(), agreed, tuple(changes), people, wanted)

    def take_back(self, sha256: str, by: Person) -> None:
        """Let the change of the policy with this digest, which waits, count no more. Raises UsageProblem: none does."""
        with self.ledger.policy_turn:
            if sha256 != self.proposed().sha256:
                raise UsageProblem("this change of the policy does not wait for a person any more")
            take_back(self.ledger, by)

    def _kept(self, sha256: str) -> bytes:
        path = self.path.parent / "policies" / f"{sha256}.toml"
        hint, code = "restore it from a backup", "DECLINED_POLICY"
        try:
            text = path.read_bytes()
        except OSError as error:
            raise BadData(f"{path}: {error.strerror}", hint=hint, code=code) from None
        if hashlib.sha256(text).hexdigest() != sha256:
            raise BadData(f"{path} is not the policy of that digest", hint=hint, code=code)
        return text

    def _keep(self, text: bytes) -> str:
        """Keep a policy's text by its digest."""
        digest = hashlib.sha256(text).hexdigest()
        kept = self.path.parent / "policies" / f"{digest}.toml"
        if not kept.exists():
            durable.make_folder(kept.parent)
            durable.write_file(kept, text)
        return digest

    def refuse_denied(
        self,
        attempt: RoundAttempt,
        consent: Consent,
        reported: ReportedSection,
        specs: Sequence[TensorSpec],
        metrics: Sequence[str],
    ) -> None:
        """Let these tensors and metrics of a round pass, or write that they are blocked into the ledger.

        Raises:
            NotPermitted: a rule denies something, or a quota is spent; the message names both.
            WardroundError: there is no policy, or it is broken.
        """
        decisions = self._decisions(attempt, consent, reported, specs, metrics, len(metrics) + COUNTS)
        self._refuse(attempt, decisions, "nothing was sent")

    def refuse_again(
        self,
        attempt: RoundAttempt,
        consent: Consent,
        reported: ReportedSection,
        specs: Sequence[TensorSpec],
        metrics: Sequence[str],
        *,
        counted: bool,
    ) -> None:
        """The same for what is sent again, whose numbers were counted when it was recorded.

        Args:
            counted: so are its bytes, for nothing of it has left yet: only the rules are asked.

        Raises:
            NotPermitted: a rule denies something by now, or a quota is spent.
            WardroundError: there is no policy, or it is broken.
        """
        decisions = self._decisions(attempt, consent, reported, specs, metrics, None if counted else 0)
        self._refuse(attempt, decisions, "it is not sent again")

    def refuse_fit(self, study: str, counts: str) -> None:
        """Let the word that this site's data fits a study pass, with one number in the form ``counts``.

        Raises:
            NotPermitted: a rule denies it, or the day's numbers are spent.
            WardroundError: there is no policy, or it is broken.
        """
        policy = self.policy(study)
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        numbers = number_quotas(policy, 1, 0, self.ledger.numbers(today))
        denial = first_denial([*decide_fit(policy, study, self.coordinator, counts), *numbers])
        if denial is not None:
            raise NotPermitted(
                f"the policy does not let it be said whether data fits `{study}`: {denial.what}: {denial.rule}; "
                "nothing was sent",
                hint=f"edit {self.path} if it should leave",
                code="DECLINED_POLICY",
            )

    def summary_denial(self, figures: SiteFigures, columns: Iterable[tuple[str, str]]) -> Decision | None:
        """What of a summary may not leave by the policy as it is now; None where all of it may.

        Args:
            columns: what the request calls each column that is read, and what this site does.

        Raises:
            WardroundError: there is no policy, or it is broken.
        """
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        policy, told = self.policy(), self.ledger.numbers(today)
        wanted = policy.statistics
        if (figures.min_count, figures.digits) != (wanted.min_count, wanted.digits):
            rule = f"statistics.min_count = {wanted.min_count}, statistics.digits = {wanted.digits}"
            return Decision("figures made under another policy", False, rule)
        return first_denial(decide_summary(policy, figures.request, self.coordinator, columns, figures.numbers, told))

    def sum_denial(self, consent: Consent, *, closing: bool) -> Decision | None:
        """What of an update that is in a sum may not leave by the policy as it is now; None where all of it may, and
        this site helps to open the sum. Of the quotas it was counted when it was sent.

        Raises:
            WardroundError: there is no policy, or it is broken.
        """
        policy, specs = self.policy(consent.study), () if closing else consent.upload
        return first_denial(self._rules(policy, consent.study, consent, consent.reported, specs, consent.metrics))

    def refuse_worse(self, journal: Journal) -> None:
        """Raises NotPermitted: by the policy in force this site vetoes the journal's model; the ledger says so, without
        a number."""
        table = self.policy(journal.study).veto
        if not is_worse(table, journal):
            return
        self.block(journal, "the model", "veto.loss_rise")
        raise NotPermitted(
            f"the model that round {journal.round} of `{journal.study}` begins with has a loss of "
            f"{float(journal.own_loss):.4g} on this site's validation rows, and the lowest before was "
            f"{float(journal.lowest_loss):.4g}: more than `loss_rise` in [veto] of the policy, {table.loss_rise}",
            hint="the study pauses, and the coordinator was told no number; if this site is to go on, raise "
            "`loss_rise`, and the operator starts the study again",
            code=VETO,
        )

    def block(self, attempt: RoundAttempt, what: str, rule: str) -> None:
        """Write into the ledger that nothing of this round leaves from here on, and why; not each time, where a
        coordinator asks again and again. Words of others in it are escaped, and cut."""
        self.ledger.append_often(BlockedEntry(
            study=attempt.study, revision=attempt.revision, round=attempt.round, attempt=attempt.attempt,
            what=escaped(what, LONGEST), rule=escaped(rule, LONGEST),
        ))  # fmt: skip
        self.ledger.sign()

    def holds(self, attempt: RoundAttempt, update: str) -> bool:
        """Whether a person must release what ``update`` is the digest of before it may leave. If so, the ledger says
        that it waits.

        Raises:
            NotPermitted: a person rejected it.
        """
        if not self.waits_for_people(attempt, update):
            return False
        key = (attempt.study, attempt.revision, attempt.round, update)
        if not self.ledger.says(lambda state: key in state.held):
            self.ledger.append(HeldEntry(
                study=attempt.study, revision=attempt.revision, round=attempt.round, attempt=attempt.attempt,
                update=update, salt=secrets.token_hex(32),
            ))  # fmt: skip
            self.ledger.sign()
        return True

    def waits_for_people(self, attempt: RoundAttempt, update: str) -> bool:
        """As ``holds``, and no line says so."""
        release = self.policy().release
        key = (attempt.study, attempt.revision, attempt.round, update)
        decision = self.ledger.release_decision(*key, release.persons)
        if decision == "rejected":
            raise NotPermitted(
                f"round {attempt.round} of `{attempt.study}` was rejected here", code="DECLINED_POLICY",
                hint="the next round is asked again; `site-agent withdraw` ends the study here",
            )  # fmt: skip
        if decision == ReleasedEntry.type:
            return False
        first = self.ledger.says(lambda state: state.is_first(key, release.persons))
        return release.updates == "every" or (release.updates == "first" and first)

    def _decisions(
        self, attempt: RoundAttempt, consent: Consent, reported: ReportedSection, specs: Sequence[TensorSpec],
        metrics: Sequence[str], numbers: int | None,
    ) -> list[Decision]:  # fmt: skip
        """What the policy and its quotas say of it; ``numbers`` of it were not counted yet. None: nor asks a quota."""
        policy = self._policy_for(attempt)
        rules = self._rules(policy, attempt.study, consent, reported, specs, metrics)
        if numbers is None:
            return rules
        return [*rules, *self._quotas(policy, attempt, sum(spec.bytes for spec in specs), numbers)]

    def _rules(
        self, policy: Policy, study: str, consent: Consent, reported: ReportedSection, specs: Sequence[TensorSpec],
        metrics: Sequence[str],
    ) -> list[Decision]:  # fmt: skip
        """What the policy says of it without its quotas."""
        request = StudyRequest(
            study, self.coordinator, specs, metrics, reported.digits, reported.counts, consent.validation_rows,
            exposure=consent.exposure, plugins=consent.plugins, secure=consent.is_secure,
        )  # fmt: skip
        return [decide_approval(policy, len(consent.people)), *decide(policy, request)]

    def _policy_for(self, attempt: RoundAttempt) -> Policy:
        try:
            return self.policy(attempt.study)
        except WardroundError as error:
            self.block(attempt, "everything", error.message)
            raise

    def _quotas(self, policy: Policy, attempt: RoundAttempt, size: int, numbers: int) -> list[Decision]:
        """What the quotas say of so many more bytes and numbers, after what the ledger has of this round and day."""
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        of_round, ledger = (attempt.study, attempt.revision, attempt.round), self.ledger
        return [
            *quotas(policy, size, ledger.payload_bytes(of_round), ledger.payload_bytes(today)),
            *number_quotas(policy, numbers, ledger.numbers(of_round), ledger.numbers(today)),
        ]

    def _refuse(self, attempt: RoundAttempt, decisions: Iterable[Decision], consequence: str) -> None:
        denial = first_denial(decisions)
        if denial is not None:
            self.block(attempt, denial.what, denial.rule)
            raise NotPermitted(
                f"the policy blocks round {attempt.round} of `{attempt.study}`: {denial.what}: {denial.rule}; "
                f"{consequence}",
                hint=f"`site-agent policy explain {attempt.study}`; edit {self.path} if it should leave",
                code="DECLINED_POLICY",
            )
