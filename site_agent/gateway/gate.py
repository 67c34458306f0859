"""The policy in force: read anew each time it is asked, so that an edit counts from the next thing that would leave.

A policy that is missing or broken blocks everything. Its digest is in the ledger from when it is first read, and again
whenever it changes.
"""

import datetime
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from site_agent.gateway import policy as policies
from site_agent.gateway.ledger import Ledger
from site_agent.gateway.policy import Asked, Decision, Policy
from site_agent.state import COUNTS, Consent, Journal
from wardround import durable
from wardround.errors import NeedsPerson, NotPermitted, WardroundError
from wardround.study import ToldSection
from wardround.tensors import TensorSpec


@dataclass(frozen=True)
class Gate:
    """Asks the policy at ``path`` about what would leave for ``coordinator``, its URI name."""

    path: Path
    coordinator: str
    ledger: Ledger

    def policy(self) -> Policy:
        """The policy as it is now; when this returns or raises BadData its text is kept and its digest in the ledger.

        Raises:
            NeedsPerson: there is none. BadData: it is none.
        """
        try:
            data = policies.read(self.path)
        except NeedsPerson:
            self.ledger.note_policy("")
            raise
        digest = hashlib.sha256(data).hexdigest()
        kept = self.path.parent / "policies" / f"{digest}.toml"
        if not kept.exists():
            durable.make_folder(kept.parent)
            durable.write_file(kept, data)
        self.ledger.note_policy(digest)
        return policies.parse(data, self.path)

    def refuse_denied(
        self, journal: Journal, consent: Consent, told: ToldSection, specs: Sequence[TensorSpec], metrics: Sequence[str]
    ) -> None:
        """Let these tensors and metrics of a round pass, or write that they are blocked into the ledger.

        Raises:
            NotPermitted: a rule denies something, or a quota is spent; the message names both.
            WardroundError: there is no policy, or it is broken.
        """
        try:
            policy = self.policy()
        except WardroundError as error:
            self.block(journal, "everything", error.message)
            raise
        asked = Asked(
            journal.study, self.coordinator, specs, metrics, told.digits, told.counts, consent.validation_rows,
            exposure=consent.exposure,
        )  # fmt: skip
        size = sum(spec.bytes for spec in specs)
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        of_round = self.ledger.payload_bytes((journal.study, journal.revision, journal.round))
        decisions = policies.decide(policy, asked)
        decisions += policies.quotas(policy, size, of_round, self.ledger.payload_bytes(today))
        told_of_round = self.ledger.numbers((journal.study, journal.revision, journal.round))
        decisions += policies.number_quotas(policy, len(metrics) + COUNTS, told_of_round, self.ledger.numbers(today))
        denial = policies.first_denial(decisions)
        if denial is not None:
            self.block(journal, denial.what, denial.rule)
            raise NotPermitted(
                f"the policy blocks round {journal.round} of `{journal.study}`: {denial.what}: {denial.rule}; "
                "nothing was sent",
                hint=f"`site-agent policy explain {journal.study}`; edit {self.path} if it should leave",
                code="DECLINED_POLICY",
            )

    def block(self, journal: Journal, what: str, rule: str) -> None:
        """Write into the ledger that nothing of this round leaves, and why."""
        self.ledger.append(
            "blocked", study=journal.study, revision=journal.revision, round=journal.round, attempt=journal.attempt,
            what=what, rule=rule,
        )  # fmt: skip
        self.ledger.sign()

    def waits_for_a_person(self, journal: Journal) -> bool:
        """Whether a person must release this update before it may leave.

        Raises:
            NotPermitted: a person rejected it.
        """
        key = (journal.study, journal.revision, journal.round, journal.update_digest)
        word = self.ledger.word(*key)
        if word == "rejected":
            raise NotPermitted(
                f"round {journal.round} of `{journal.study}` was rejected here", code="DECLINED_POLICY",
                hint="the next round is asked again; `site-agent withdraw` ends the study here",
            )  # fmt: skip
        if word == "released":
            return False
        when = self.policy().release.updates
        return when == "every" or (when == "first" and not self.ledger.ever_released(*key[:2]))


def refuse_study(decisions: Iterable[Decision], study: str, path: Path) -> None:
    """Raises NotPermitted: the policy denies something that the study would have leave."""
    denial = policies.first_denial(decisions)
    if denial is not None:
        raise NotPermitted(
            f"the policy does not let study `{study}` take out what it asks: {denial.what}: {denial.rule}; "
            "nothing was approved",
            hint=f"`site-agent policy explain {study}`; edit {path} if it should leave",
            code="DECLINED_POLICY",
        )
