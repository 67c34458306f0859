"""A consent as the ledger has it: who decided, about which exact study, on which data, running whose code."""

from site_agent.state.consent import Consent, Endorsement
from site_agent.state.person import Person
from wardround.records.ledger import base, entries

ENDORSED = "endorsed"  # approved by somebody who is not enough by the policy: nothing is in force
TAKEN_BACK = "taken back"  # what was endorsed counts no more


def consent_entry(consent: Consent, event: str, person: Person) -> entries.ConsentEntry:
    """The line about a consent that was "approved" or "withdrawn", or "endorsed" by somebody who is not enough."""
    data = consent.data
    plugins = tuple(
        entries.PluginRow(name=plugin.name, version=plugin.version, sha256=plugin.sha256) for plugin in consent.plugins
    )
    return entries.ConsentEntry(
        event=event, study=consent.study, revision=consent.revision, study_digest=consent.study_digest,
        data_digest=data.digest, exposure=consent.exposure, by=person_entry(person),
        consent_sha256=consent.digest if event != ENDORSED else None,  # no file is kept of an endorsement
        network=data.network or None, common_digest=data.common or None, weights_digest=data.weights or None,
        plugins=plugins or None, also_by=tuple(map(person_entry, consent.also_by)) or None,
    )  # fmt: skip


def taken_back_entry(study: str, endorsement: Endorsement, person: Person) -> entries.ConsentEntry:
    """The line about approvals that were not enough, and that ``person`` took back."""
    return entries.ConsentEntry(
        event=TAKEN_BACK, study=study, data_digest=endorsement.data.digest, by=person_entry(person),
        also_by=tuple(map(person_entry, endorsement.by)),
    )  # fmt: skip


def person_entry(person: Person) -> base.Person:
    """Who decided."""
    return base.Person.from_document(person.document())
