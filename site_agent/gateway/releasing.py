"""Updates that wait for people: what would leave, who would have it leave so far, and what they decide.

Where the policy wants several people, those before the last one endorse; a single one rejects.
"""

import secrets
from dataclasses import replace
from threading import RLock
from typing import TypeVar

from site_agent.gateway.exit import egress
from site_agent.gateway.exit.enforcement import PolicyEnforcement
from site_agent.gateway.exit.ledger import Ledger
from site_agent.gateway.exit.ledger_state import is_among
from site_agent.gateway.exit.measure import NOTHING, measure
from site_agent.gateway.exit.proposals import known
from site_agent.gateway.requests import ReleaseDecision, Waiting
from site_agent.state.consent import APPROVED, Consent
from site_agent.state.directory import SiteState
from site_agent.state.journal import Journal
from site_agent.state.person import Person, together
from wardround.errors import NeedsPerson, UsageProblem
from wardround.records.ledger.base import Person as NamedPerson
from wardround.records.ledger.decided import EndorsedEntry, RejectedEntry, ReleasedEntry

Line = TypeVar("Line", EndorsedEntry, ReleasedEntry, RejectedEntry)


class Releases:
    """The updates of one site that wait. ``turn`` is held while a decision is taken."""

    def __init__(self, state: SiteState, ledger: Ledger, policy: PolicyEnforcement, turn: RLock) -> None:
        self._state = state
        self._ledger = ledger
        self._policy = policy
        self._turn = turn

    def waiting(self, study: str, round_: int) -> Waiting:
        """The update that waits for a person.

        Raises:
            UsageProblem: nothing of this round waits.
            WardroundError: there is no policy, or it is broken.
        """
        persons = self._policy.policy(study).release.persons
        consent, journal = self._held(study, round_, persons)
        own = self._state.own_copy(study)
        found = measure(own, consent) if journal.update else NOTHING
        update = self._digest(journal, found.manifest.digest())
        return Waiting(
            study=study, revision=journal.revision, round=journal.round, update=update, tensors=found.rows,
            payload_bytes=found.manifest.bytes, metrics=journal.metrics, num_examples=journal.num_examples,
            num_validation=journal.num_validation, persons=persons,
            endorsed=tuple(known(person).text for person in self._endorsed(journal, update)),
        )  # fmt: skip

    def decide(self, study: str, round_: int, decision: ReleaseDecision, update: str, person: Person) -> None:
        """Record what a person decided about the update that waits.

        Args:
            update: the digest of the update that was shown.

        Raises:
            UsageProblem: nothing of this round waits, or another update than the one that was shown; or this person
                would have it leave already.
            NeedsPerson: this person would have it leave, the ledger says so, and further people must.
            WardroundError: there is no policy, or it is broken.
        """
        with self._turn:
            persons = self._policy.policy(study).release.persons
            _, journal = self._held(study, round_, persons)
            again = f"`site-agent release {study} --round {round_}`"
            if update != self._digest(journal):
                raise UsageProblem(
                    f"another update of round {round_} of `{study}` waits than the one that was shown",
                    hint=f"look again: {again}",
                )
            place = (journal.revision, round_, journal.attempt, update)
            by = NamedPerson.from_document(person.document())
            if decision == RejectedEntry.type:
                self._ledger.append(_line(RejectedEntry, study, *place, by))
            elif persons == 1:
                self._ledger.append(_line(ReleasedEntry, study, *place, by))
            else:
                endorsed = self._endorsed(journal, update)
                before, did = list(map(known, endorsed)), f"released round {round_} of `{study}`"
                if len(before) < persons:  # else the policy wanted more when they did, and this act is the last one
                    before = list(together(before, person, persons, did, f"another person runs {again}"))
                if len(before) < persons:
                    self._ledger.append(_line(EndorsedEntry, study, *place, by))
                    self._ledger.sign()
                    raise NeedsPerson(
                        f"round {round_} of `{study}`: released by {person.text}, {len(before)} of the {persons} "
                        "people that the policy wants; it leaves when all have",
                        hint=f"another person runs {again}",
                    )
                others = tuple(one for one in endorsed if not is_among(by, [one]))
                self._ledger.append(replace(_line(ReleasedEntry, study, *place, by), also_by=others))
            self._ledger.sign()

    def is_decided(self, study: str) -> bool:
        """Whether people have released or rejected the update that waits."""
        journal = self._state.journal(study)
        return bool(self._decision(journal, self._policy.policy(study).release.persons))

    def _held(self, study: str, round_: int, persons: int) -> tuple[Consent, Journal]:
        self._state.offer(study)
        journal, consent = self._state.journal(study), self._state.consent(study)
        if consent is None or consent.state != APPROVED or journal.phase != "held":
            raise UsageProblem(
                f"no update of `{study}` waits for a person to release it", hint="`site-agent studies` shows what waits"
            )
        if journal.round != round_:
            raise UsageProblem(
                f"round {round_} of `{study}` does not wait for a person; round {journal.round} does",
                hint=f"`site-agent release {study} --round {journal.round}`",
            )
        if decision := self._decision(journal, persons):
            raise UsageProblem(f"round {round_} of `{study}` was already {decision}")
        return consent, journal

    def _decision(self, journal: Journal, persons: int) -> str:
        update = self._digest(journal)
        return self._ledger.release_decision(journal.study, journal.revision, journal.round, update, persons)

    def _endorsed(self, journal: Journal, update: str) -> tuple[NamedPerson, ...]:
        key = journal.study, journal.revision, journal.round, update
        return self._ledger.says(lambda state: state.released_by.get(key, ()))

    def _digest(self, journal: Journal, manifest_sha256: str = "") -> str:
        return egress.update_digest(journal, self._policy.coordinator, manifest_sha256)


def _line(kind: type[Line], study: str, revision: int, round_: int, attempt: int, update: str, by: NamedPerson) -> Line:
    salt = secrets.token_hex(32)
    return kind(study=study, revision=revision, round=round_, attempt=attempt, update=update, salt=salt, by=by)
