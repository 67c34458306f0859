"""Approvals by several people: a consent is in force when as many have approved exactly it as the policy wants.

Until then, any of the hospital's people may take back what some have approved; then it counts no more.
"""

from dataclasses import replace

from site_agent.gateway.consent.recorded import ENDORSED, consent_entry, taken_back_entry
from site_agent.gateway.exit.ledger import Ledger
from site_agent.state.consent import Consent, Endorsement
from site_agent.state.directory import SiteState
from site_agent.state.person import Person, together
from wardround.errors import NeedsPerson, UsageProblem


def approved_together(state: SiteState, ledger: Ledger, consent: Consent, wanted: int) -> Consent:
    """``consent`` with everyone who approved exactly it, if they are enough.

    Args:
        wanted: how many different people the policy wants.

    Raises:
        UsageProblem: this person has approved it already.
        NeedsPerson: this approval is kept and in the ledger, and further people must approve; nothing is in force.
    """
    if wanted == 1:
        return consent
    kept, person = state.endorsement(consent.study), consent.approved_by
    before = kept.by if kept is not None and kept.is_of(consent) else ()
    again = f"another person runs `site-agent approve {consent.study} --data {consent.data.name}`"
    people = together(before, person, wanted, f"approved study `{consent.study}`", again)
    if len(people) >= wanted:
        return replace(consent, also_by=before)
    ledger.append(consent_entry(consent, ENDORSED, person))
    ledger.sign()
    state.save_endorsement(consent.study, Endorsement(consent.account.digest, consent.data, people))
    raise NeedsPerson(
        f"study `{consent.study}`: approved by {person.text}, {len(people)} of the {wanted} people that the policy "
        "wants; nothing leaves before all have",
        hint=again,
    )


def take_back(state: SiteState, ledger: Ledger, study: str, person: Person) -> None:
    """Let what some people approved of a study count no more; the ledger says who took it back.

    Raises:
        UsageProblem: nobody approved it.
    """
    if (kept := state.endorsement(study)) is None:
        raise UsageProblem(f"study `{study}` is not approved here", hint="`site-agent studies` lists them")
    ledger.append(taken_back_entry(study, kept, person))
    ledger.sign()
    state.remove_endorsement(study)
