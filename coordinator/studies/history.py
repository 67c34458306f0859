"""What the store keeps of a study's rounds: written as they open and close, read for reports and assignments."""

import json
from collections.abc import Collection, Sequence

import sqlalchemy as sa
from sqlalchemy.orm import Session

from coordinator.storage import tables
from coordinator.studies.lifecycle import Action, Closed, Opened
from coordinator.studies.state import Kind, Outcome
from coordinator.studies.study import Study
from fl_algorithms.server.limits import Account


def write_down(session: Session, study: Study, action: Action, now_s: float) -> Study:
    """Record what an action means for the study's rounds; the study with the best model that is known after it."""
    if isinstance(action, Opened):
        one = action.round
        opened = tables.Round(
            study=study.name, revision=study.revision, number=one.number, attempt=one.attempt, closing=one.closing,
            base=study.newest, asked=json.dumps(one.asked), opened_s=now_s,
        )  # fmt: skip
        session.merge(opened)
    elif isinstance(action, Closed):
        one = action.round
        row = session.get(tables.Round, (study.name, study.revision, one.number, one.attempt))
        assert row is not None
        made = action.outcome == Outcome.CLOSED and not one.closing
        answers = {site: [answer.kind, answer.code, answer.upload] for site, answer in sorted(one.answers.items())}
        row.closed_s, row.outcome, row.answers = now_s, action.outcome, json.dumps(answers)
        row.model = study.newest if made else None
        if action.outcome == Outcome.CLOSED:
            return study.judged(one, row.base, session)
    return study


def rounds_of(session: Session, study: Study) -> Sequence[tables.Round]:
    """Every attempt at a round, in order."""
    table = tables.Round
    chosen = sa.select(table).where(table.study == study.name, table.revision == study.revision)
    return session.scalars(chosen.order_by(table.number, table.attempt)).all()


def uploads_of(session: Session, study: str, revision: int) -> Sequence[tables.Upload]:
    """A revision's uploads by round and attempt, in site order."""
    table = tables.Upload
    chosen = sa.select(table).where(table.study == study, table.revision == revision)
    return session.scalars(chosen.order_by(table.round, table.attempt, table.site, table.id)).all()


def contributed_rounds(session: Session, study: Study) -> dict[str, list[int]]:
    """Each site's rounds whose model has its update in it."""
    contributed: dict[str, list[int]] = {site: [] for site in study.rules.sites}
    for row in rounds_of(session, study):
        if row.outcome == Outcome.CLOSED and not row.closing:
            for site, (kind, _, _) in json.loads(row.answers or "{}").items():
                if kind == Kind.ACCEPTED:
                    contributed[site].append(row.number)
    return contributed


def accounts(session: Session, study: Study) -> list[tuple[int, Account]]:
    """The rounds whose model is made, in their order, with what became of each accepted update."""
    return [
        (row.number, Account.from_document(json.loads(row.account)))
        for row in rounds_of(session, study)
        if row.outcome == Outcome.CLOSED and row.account
    ]


def rounds_naming(sites: Sequence[str], named: Sequence[tuple[int, Collection[str]]]) -> dict[str, list[int]]:
    """Each site's rounds in which it is named."""
    return {site: [number for number, those in named if site in those] for site in sites}
