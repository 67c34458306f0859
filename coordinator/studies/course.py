"""What became of each site in a study's rounds, read a hundred attempts at a time: a study of years has thousands."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import sqlalchemy as sa
from sqlalchemy.orm import Session

from coordinator.storage import tables
from coordinator.studies.history import late_rounds
from coordinator.studies.participation import absences
from coordinator.studies.state import Kind, Outcome
from coordinator.studies.study import Study
from coordinator.study_answers import Absence
from fl_algorithms.server.limits import Account

AT_ONCE = 100  # attempts that are in memory


@dataclass(frozen=True)
class Course:
    """Site -> what became of it.

    Attributes:
        contributed: the rounds whose model has its update in it.
        evaluated: the rounds that it judged, the closing one too.
        left_out: the rounds whose model is without its accepted update; capped: those in which it counted for less.
        late: the rounds in which it was asked, and whether it did not answer in time.
        absent: the attempts in which it was asked and its update is in no model.
    """

    contributed: dict[str, list[int]]
    evaluated: dict[str, list[int]]
    left_out: dict[str, list[int]]
    capped: dict[str, list[int]]
    late: dict[str, dict[int, bool]] = field(default_factory=dict)
    absent: dict[str, list[Absence]] = field(default_factory=dict)

    def take(self, rounds: Sequence[tables.Round]) -> None:
        """The next attempts, in their order."""
        for row in rounds:
            if row.outcome != Outcome.CLOSED:
                continue
            for site, (kind, _, _) in json.loads(row.answers or "{}").items():
                if kind == Kind.EVALUATED:
                    self.evaluated[site].append(row.number)
                elif kind == Kind.ACCEPTED and not row.closing:
                    self.contributed[site].append(row.number)
            if row.account and not row.closing:
                account = Account.from_document(json.loads(row.account))
                for named, sites in ((self.left_out, account.left_out), (self.capped, account.capped)):
                    for site in sites:
                        named[site].append(row.number)
        for site, missed in late_rounds(rounds).items():
            self.late.setdefault(site, {}).update(missed)
        for site, found in absences(rounds).items():
            self.absent.setdefault(site, []).extend(found)


def course_of(session: Session, study: Study) -> Course:
    """The course of a study's revision so far."""
    sites = study.rules.sites
    course = Course(_of_each(sites), _of_each(sites), _of_each(sites), _of_each(sites))
    for rounds in _parts(session, study):
        course.take(rounds)
    return course


def _of_each(sites: Sequence[str]) -> dict[str, list[int]]:
    return {site: [] for site in sites}


def _parts(session: Session, study: Study) -> Iterator[Sequence[tables.Round]]:
    table = tables.Round
    chosen = sa.select(table).where(table.study == study.name, table.revision == study.revision)
    in_order = chosen.order_by(table.number, table.attempt).execution_options(yield_per=AT_ONCE)
    return session.scalars(in_order).partitions()
