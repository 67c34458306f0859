"""Whose data fits a study, as each site says before anybody approves: one word and a number of rows."""

import sqlalchemy as sa
from sqlalchemy.orm import Session

from coordinator.storage import tables
from coordinator.studies.study import Study
from coordinator.study_answers import SiteFit, StudyFits
from wardround.errors import BadData
from wardround.records.assignment import Declaration, SiteStatus


def note(session: Session, study: Study, site: str, declared: Declaration, now_s: int) -> None:
    """Keep a site's newest word.

    Raises:
        BadData: COUNT_INVALID, the number is not in the study's form, or more than its limits let a site tell.
    """
    resolved, rows = study.resolved, declared.rows
    if rows and study.rules.threshold:
        raise BadData("with secure aggregation no site says its rows in clear", code="COUNT_INVALID")
    if rows > resolved.limits.max_examples or rows != resolved.reported.count(rows):
        raise BadData("the number of rows is not in the form of the study's counts", code="COUNT_INVALID")
    fits = declared.status == SiteStatus.FITS
    session.merge(tables.Fit(study=study.name, revision=study.revision, site=site, fits=fits, rows=rows, said_s=now_s))


def of(session: Session, study: Study) -> StudyFits:
    """What each site of the study last said of it as it is now; None of those that said nothing."""
    asked = sa.select(tables.Fit).where(tables.Fit.study == study.name, tables.Fit.revision == study.revision)
    said = {
        row.site: SiteFit(fits=row.fits, rows=row.rows, said=tables.utc_text(row.said_s))
        for row in session.scalars(asked)
    }
    sites = {site: said.get(site) for site in study.rules.sites}
    return StudyFits(id=study.name, revision=study.revision, counts=study.resolved.reported.counts, sites=sites)
