"""The policy in force: read anew each time it is asked, so that an edit counts from the next thing that would leave.

A policy that is missing or broken blocks everything. Its digest is in the ledger from when it is first read, and again
whenever it changes.
"""

import datetime
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from site_agent.gateway.exit import policy as policies
from site_agent.gateway.exit.ledger import Ledger
from site_agent.gateway.exit.policy import Asked, Decision, Policy
from site_agent.state.directory import COUNTS, Consent, Journal
from wardround.errors import NeedsPerson, NotPermitted, WardroundError
from wardround.local import durable
from wardround.records.study import ReportedSection
from wardround.tensors.manifests import TensorSpec


class Place(Protocol):
    """Whatever belongs to one attempt at one round of a study: a journal, a departure."""

    @property
    def study(self) -> str: ...
    @property
    def revision(self) -> int: ...
    @property
    def round(self) -> int: ...
    @property
    def attempt(self) -> int: ...


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
        self,
        journal: Journal,
        consent: Consent,
        told: ReportedSection,
        specs: Sequence[TensorSpec],
        metrics: Sequence[str],
    ) -> None:
        """Let these tensors and metrics of a round pass, or write that they are blocked into the ledger.

        Raises:
            NotPermitted: a rule denies something, or a quota is spent; the message names both.
            WardroundError: there is no policy, or it is broken.
        """
        decisions = self._decisions(journal, consent, told, specs, metrics, len(metrics) + COUNTS)
        self._refuse(journal, decisions, "nothing was sent")

    def refuse_again(
        self, place: Place, consent: Consent, told: ReportedSection, specs: Sequence[TensorSpec], metrics: Sequence[str]
    ) -> None:
        """The same for what is sent again, whose numbers were counted when it was recorded.

        Raises:
            NotPermitted: a rule denies something by now, or a quota is spent.
            WardroundError: there is no policy, or it is broken.
        """
        self._refuse(place, self._decisions(place, consent, told, specs, metrics, 0), "it is not sent again")

    def block(self, place: Place, what: str, rule: str) -> None:
        """Write into the ledger that nothing of this round leaves from here on, and why; not each time, where a
        coordinator asks again and again."""
        self.ledger.append_often(
            "blocked", study=place.study, revision=place.revision, round=place.round, attempt=place.attempt,
            what=what, rule=rule,
        )  # fmt: skip
        self.ledger.sign()

    def holds(self, place: Place, update: str) -> bool:
        """Whether a person must release what ``update`` is the digest of before it may leave. If so, the ledger says
        that it waits.

        Raises:
            NotPermitted: a person rejected it.
        """
        if not self._waits_for_a_person(place, update):
            return False
        if not self.ledger.is_held(place.study, place.revision, place.round, update):
            self.ledger.append(
                "held", study=place.study, revision=place.revision, round=place.round, attempt=place.attempt,
                update=update,
            )  # fmt: skip
            self.ledger.sign()
        return True

    def _waits_for_a_person(self, place: Place, update: str) -> bool:
        key = (place.study, place.revision, place.round, update)
        word = self.ledger.word(*key)
        if word == "rejected":
            raise NotPermitted(
                f"round {place.round} of `{place.study}` was rejected here", code="DECLINED_POLICY",
                hint="the next round is asked again; `site-agent withdraw` ends the study here",
            )  # fmt: skip
        if word == "released":
            return False
        when = self.policy().release.updates
        return when == "every" or (when == "first" and not self.ledger.ever_released(*key[:2]))

    def _decisions(
        self, place: Place, consent: Consent, told: ReportedSection, specs: Sequence[TensorSpec],
        metrics: Sequence[str], numbers: int,
    ) -> list[Decision]:  # fmt: skip
        """What the policy and its quotas say of it; ``numbers`` of it were not counted yet."""
        policy = self._policy_for(place)
        asked = Asked(
            place.study, self.coordinator, specs, metrics, told.digits, told.counts, consent.validation_rows,
            exposure=consent.exposure,
        )  # fmt: skip
        size = sum(spec.bytes for spec in specs)
        return policies.decide(policy, asked) + self._quotas(policy, place, size, numbers)

    def _policy_for(self, place: Place) -> Policy:
        try:
            return self.policy()
        except WardroundError as error:
            self.block(place, "everything", error.message)
            raise

    def _quotas(self, policy: Policy, place: Place, size: int, numbers: int) -> list[Decision]:
        """What the quotas say of so many more bytes and numbers, after what the ledger has of this round and day."""
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        of_round, ledger = (place.study, place.revision, place.round), self.ledger
        return [
            *policies.quotas(policy, size, ledger.payload_bytes(of_round), ledger.payload_bytes(today)),
            *policies.number_quotas(policy, numbers, ledger.numbers(of_round), ledger.numbers(today)),
        ]

    def _refuse(self, place: Place, decisions: Iterable[Decision], so: str) -> None:
        denial = policies.first_denial(decisions)
        if denial is not None:
            self.block(place, denial.what, denial.rule)
            raise NotPermitted(
                f"the policy blocks round {place.round} of `{place.study}`: {denial.what}: {denial.rule}; {so}",
                hint=f"`site-agent policy explain {place.study}`; edit {self.path} if it should leave",
                code="DECLINED_POLICY",
            )


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
