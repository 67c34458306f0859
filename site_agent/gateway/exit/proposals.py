"""Changes of the policy to which several people must agree: what was proposed, by whom, and who agreed so far.

All of it stands in the ledger, and counts until another policy is in force.
"""

from site_agent.gateway.exit.ledger import Ledger
from site_agent.gateway.exit.ledger_state import PROPOSED, TAKEN_BACK
from site_agent.state.person import Person, together
from wardround.errors import NeedsPerson, UsageProblem
from wardround.records.ledger import base
from wardround.records.ledger.decided import ProposalEntry

AGREE = "another person runs `site-agent policy agree`"


def agreed_before(ledger: Ledger, sha256: str, by: base.Person, wanted: int) -> tuple[base.Person, ...]:
    """Who agreed to exactly this policy before ``by`` did, if all of them are enough to put it in force.

    Args:
        wanted: how many different people the policy in force wants.

    Raises:
        UsageProblem: this person has agreed to it already.
        NeedsPerson: that ``by`` agrees is in the ledger, and further people must; what is in force stays.
    """
    if wanted == 1:
        return ()
    proposal = ledger.says(lambda state: state.proposal)
    before = who_agreed(proposal) if proposal is not None and proposal.policy_sha256 == sha256 else ()
    person = known(by)
    agreed = together(list(map(known, before)), person, wanted, f"agreed to policy {sha256[:12]}…", AGREE)
    if len(agreed) >= wanted:
        return before
    ledger.append(ProposalEntry(event=PROPOSED, policy_sha256=sha256, by=by, also_by=before or None))
    ledger.sign()
    raise NeedsPerson(
        f"policy {sha256[:12]}…: agreed to by {person.text}, {len(agreed)} of the {wanted} people that the policy in "
        "force wants; what is in force stays",
        hint=AGREE,
    )


def take_back(ledger: Ledger, by: base.Person) -> None:
    """Let what was proposed count no more. Raises UsageProblem: nothing was."""
    proposal = ledger.says(lambda state: state.proposal)
    if proposal is None:
        raise UsageProblem("no change of the policy waits for a person")
    ledger.append(ProposalEntry(
        event=TAKEN_BACK, policy_sha256=proposal.policy_sha256, by=by, also_by=who_agreed(proposal) or None,
    ))  # fmt: skip
    ledger.sign()


def who_agreed(proposal: ProposalEntry) -> tuple[base.Person, ...]:
    """Everyone who agreed so far, in their order."""
    return (*(proposal.also_by or ()), *((proposal.by,) if proposal.by is not None else ()))


def known(person: base.Person) -> Person:
    """A person whom the ledger names, as people are counted."""
    return Person.from_document(person.document())
