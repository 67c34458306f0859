"""Where this site stands in a study, in one word: what `site-agent studies` shows as its state."""

from site_agent.state.consent import APPROVED, WITHDRAWN, Consent, data_changed
from site_agent.state.journal import Journal
from site_agent.state.offer import Offer


def study_state(offer: Offer, consent: Consent | None, journal: Journal) -> str:
    """Where this site stands in a study, in one word.

    offered, changed (since it was approved; it, or what is trained on), withdrawn, approved (waits), training, held
    (waits for a person), uploading, then the coordinator's: running, paused, finished, stopped, failed.
    """
    if consent is None:
        return "offered"
    if consent.state == WITHDRAWN:
        return WITHDRAWN
    if consent.study_digest != offer.digest:
        return "changed"
    current = journal if journal.study_digest == offer.digest else Journal(offer.study)
    if current.ended:
        return current.ended
    if data_changed(consent, current):
        return "changed"
    if current.phase in ("training", "trained") and not current.declined:
        return "training"
    if current.phase == "held" or (current.phase == "uploading" and not current.declined):
        return current.phase
    return offer.state if offer.state in ("running", "paused") else APPROVED
