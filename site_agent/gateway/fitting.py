"""What is told of where this site stands in a study: what was approved, or whether its data fits. Judges only."""

from site_agent.gateway.requests import Fit
from site_agent.state.consent import Consent
from site_agent.state.offer import Offer
from wardround.records.assignment import Declaration, SiteStatus
from wardround.records.study import ReportedSection, StudyFile
from wardround.records.trainer import Examined


def form_of(offer: Offer) -> ReportedSection:
    """How the study reports numbers. Raises BadData: the offer is no study."""
    return StudyFile.from_document(offer.document).reported


def fit_of(offer: Offer, examined: Examined) -> Fit:
    """One word and, of data that fits, its usable rows in the form of the study's counts; masks hide these: 0."""
    if examined.checked is None:
        return Fit(False, 0)
    return Fit(True, 0 if offer.is_secure else form_of(offer).count(examined.checked.rows))


def declaration_of_fit(offer: Offer, fit: Fit) -> Declaration:
    """The same as the coordinator is told it."""
    status = SiteStatus.FITS if fit.fits else SiteStatus.DOES_NOT_FIT
    return Declaration(offer.study, offer.revision, offer.digest, status, rows=fit.rows)


def declaration_of(consent: Consent, status: SiteStatus) -> Declaration:
    """Where this site stands in the study of a consent."""
    return Declaration(consent.study, consent.revision, consent.study_digest, status)
