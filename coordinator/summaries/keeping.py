"""Summary requests and the sites' figures in the database. A request that a site has answered never changes."""

import json

import sqlalchemy as sa
from sqlalchemy.orm import Session

from coordinator.storage import tables
from coordinator.summary_answers import SummaryRow
from wardround.errors import BadData, NeedsPerson
from wardround.records.summaries.figures import SiteFigures
from wardround.records.summaries.request import MOST_OPEN, SummaryRequest


def create(session: Session, request: SummaryRequest, now_s: int) -> bool:
    """Offer a request to its sites. False: it is known with exactly this content, and is open (again).

    Raises:
        NeedsPerson: sites have answered another request of that name, or too many are open.
    """
    present = session.get(tables.SummaryRequest, request.name)
    if present is not None and present.digest == request.digest and present.open:
        return False
    answered = sa.select(tables.SiteSummary.site).where(tables.SiteSummary.request == request.name).limit(1)
    known = present is not None and present.digest == request.digest
    if not known and session.scalar(answered) is not None:
        raise NeedsPerson(
            f"sites have told their figures for another summary request `{request.name}`",
            hint="give the new one another name; a site lets figures of the same columns leave only when asked again",
        )
    still_open = sa.select(tables.SummaryRequest.name).where(tables.SummaryRequest.open)
    if len({*session.scalars(still_open), request.name}) > MOST_OPEN:
        raise NeedsPerson(
            f"{MOST_OPEN} summary requests are open already", hint="`coordinator summary close NAME` ends one"
        )
    session.merge(tables.SummaryRequest(
        name=request.name, digest=request.digest, document=json.dumps(request.document()), created_s=now_s, open=True,
    ))  # fmt: skip
    return not known


def close(session: Session, name: str) -> None:
    """Offer a request no longer; what the sites told stays. Raises BadData: there is no such request."""
    _row(session, name).open = False


def listed(session: Session) -> list[SummaryRow]:
    """Every request, by name."""
    told = dict(
        session.execute(
            sa.select(tables.SiteSummary.request, sa.func.count()).group_by(tables.SiteSummary.request)
        ).all()
    )
    rows = []
    for row in session.scalars(sa.select(tables.SummaryRequest).order_by(tables.SummaryRequest.name)):
        request = _request(row)
        rows.append(SummaryRow(
            name=row.name, title=request.title, open=row.open, columns=len(request.columns), sites=len(request.sites),
            told=told.get(row.name, 0),
        ))  # fmt: skip
    return rows


def open_for(session: Session, site: str) -> list[SummaryRequest]:
    """The open requests that list a site, by name."""
    asked = sa.select(tables.SummaryRequest).where(tables.SummaryRequest.open).order_by(tables.SummaryRequest.name)
    return [request for row in session.scalars(asked) if site in (request := _request(row)).sites]


def note(session: Session, site: str, figures: SiteFigures, now_s: int) -> None:
    """Keep a site's newest figures.

    Raises:
        BadData: SUMMARY_UNKNOWN, no open request of that name lists the site; SUMMARY_CHANGED, the site saw another
            request; SUMMARY_INVALID, the figures have not their form.
    """
    offered = {request.name: request for request in open_for(session, site)}
    request = offered.get(figures.request)
    if request is None:
        raise BadData(f"no open summary request `{figures.request}` lists site `{site}`", code="SUMMARY_UNKNOWN")
    if request.digest != figures.digest:
        raise BadData(f"summary request `{request.name}` is another one now", code="SUMMARY_CHANGED")
    figures.refuse_misfit(request)
    session.merge(tables.SiteSummary(
        request=request.name, site=site, figures=figures.model_dump_json(), said_s=now_s
    ))  # fmt: skip


def told(session: Session, name: str) -> tuple[SummaryRequest, bool, dict[str, tuple[SiteFigures, str]]]:
    """A request, whether it is open, and what each site told for it, with the time (UTC).

    Raises:
        BadData: there is no such request.
    """
    row = _row(session, name)
    asked = sa.select(tables.SiteSummary).where(tables.SiteSummary.request == name).order_by(tables.SiteSummary.site)
    figures = {
        said.site: (SiteFigures.model_validate_json(said.figures), tables.utc_text(said.said_s))
        for said in session.scalars(asked)
    }
    return _request(row), row.open, figures


def _row(session: Session, name: str) -> tables.SummaryRequest:
    row = session.get(tables.SummaryRequest, name)
    if row is None:
        known = ", ".join(sorted(session.scalars(sa.select(tables.SummaryRequest.name)))) or "none yet"
        raise BadData(f"there is no summary request `{name[:64]}` here", hint=f"summary requests here: {known}")
    return row


def _request(row: tables.SummaryRequest) -> SummaryRequest:
    return SummaryRequest.from_document(json.loads(row.document), f"summary request `{row.name}`")
