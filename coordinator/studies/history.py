"""What the store keeps of a study's rounds: written as they open and close, read for reports and assignments."""

import json
import logging
from collections.abc import Mapping, Sequence

import sqlalchemy as sa
from sqlalchemy.orm import Session

from coordinator.storage import tables
from coordinator.studies.events import Action, Closed, Opened
from coordinator.studies.state import Outcome
from coordinator.studies.study import Study
from fl_algorithms.server.limits import Account

ALWAYS_LATE = 3  # rounds in a row, after which a site is named
RECENT = 24  # attempts that are looked at for that
_LAST_ACCOUNTS = (
    sa.select(tables.Round.account)
    .where(tables.Round.study == sa.bindparam("of_study"), tables.Round.revision == sa.bindparam("of_revision"))
    .where(tables.Round.outcome == Outcome.CLOSED.value, tables.Round.closing.is_(False))
    .where(tables.Round.account.is_not(None), tables.Round.account != "")
    .order_by(tables.Round.number.desc(), tables.Round.attempt.desc())
    .limit(sa.bindparam("most"))
)
log = logging.getLogger(__name__)


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
        _warn_of_late(session, study, row)
        if action.outcome == Outcome.CLOSED:
            return study.judged(one, row.base, session)
    return study


def _warn_of_late(session: Session, study: Study, ended: tables.Round) -> None:
    """Name the sites for whom this was one more round in a row without an answer in time."""
    late = [site for site in json.loads(ended.asked) if site not in json.loads(ended.answers or "{}")]
    if not late:
        return
    table = tables.Round
    chosen = sa.select(table).where(table.study == study.name, table.revision == study.revision)
    recent = session.scalars(chosen.order_by(table.number.desc(), table.attempt.desc()).limit(RECENT)).all()
    rounds = late_rounds(recent[::-1])
    for site in late:
        if is_always_late(rounds.get(site, {})):
            log.warning(
                "%s: site %s did not answer in time in any of its last %d rounds", study.name, site, ALWAYS_LATE
            )


def late_rounds(rounds: Sequence[tables.Round]) -> dict[str, dict[int, bool]]:
    """Site -> round in which it was asked -> whether the round's last attempt ended without its answer.

    Args:
        rounds: attempts in their order; those that are open, were stopped, or only validate do not count.
    """
    late: dict[str, dict[int, bool]] = {}
    for row in rounds:
        if row.closed_s is not None and row.outcome != Outcome.STOPPED and not row.closing:
            answered = json.loads(row.answers or "{}")
            for site in json.loads(row.asked):
                late.setdefault(site, {})[row.number] = site not in answered
    return late


def is_always_late(rounds: Mapping[int, bool]) -> bool:
    """Whether a site was late in each of the last rounds in which it was asked. ``rounds``: as of ``late_rounds``."""
    last = [late for _, late in sorted(rounds.items())][-ALWAYS_LATE:]
    return len(last) == ALWAYS_LATE and all(last)


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


def last_accounts(session: Session, study: Study, most: int) -> list[Account]:
    """What became of the updates in the last ``most`` rounds whose model is made, in their order."""
    values = {"of_study": study.name, "of_revision": study.revision, "most": most}
    newest = session.connection().execute(_LAST_ACCOUNTS, values).scalars().all()
    return [Account.from_document(json.loads(text or "")) for text in newest[::-1]]
