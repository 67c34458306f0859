"""Figures of a table for the coordinator's summary requests: what would leave, and a person's word that it may.

Nobody but a person starts this. What leaves is made again when it is let go, and must be exactly what was shown.
"""

from dataclasses import dataclass, replace

from site_agent import handoff
from site_agent.gateway.connection.session import Session
from site_agent.gateway.consent.recorded import person_entry
from site_agent.gateway.exit.enforcement import PolicyEnforcement
from site_agent.gateway.exit.ledger import Ledger
from site_agent.gateway.policy.policy import StatisticsTable
from site_agent.gateway.requests import (
    OfferedSummaries,
    OfferedSummary,
    ShownSummary,
    TellingColumn,
    Told,
    no_summary_request,
)
from site_agent.state.directory import SiteState
from site_agent.state.person import Person
from wardround.errors import BadData, NeedsPerson, NotPermitted, WardroundError
from wardround.records.ledger.summary import CategoryRow, SummaryColumn, SummaryEntry
from wardround.records.summaries.figures import ColumnFigures, SiteFigures
from wardround.records.summaries.request import SummaryColumn as AskedColumn
from wardround.records.summaries.request import SummaryRequest
from wardround.records.trainer import Summarize, Summarized
from wardround.signing import canonical

NO_DIGEST = "0" * 64  # where a digest will stand


@dataclass(frozen=True)
class _Made:
    """The figures for a request, the ledger's entry of them, and what the trainer says a person should know."""

    request: SummaryRequest
    figures: SiteFigures
    entry: SummaryEntry
    notes: tuple[str, ...]

    @property
    def read(self) -> list[tuple[str, str]]:
        """What the request calls each column that was read, and what this site does; "" where it has none.

        First the request's, in its order; then those until which a date is counted, by the request or by the mapping.
        """
        sources = self.entry.sources or ()
        names = [*self.request.read, *sources[len(self.request.read) :]]
        return list(zip(names, sources, strict=True))


class Summaries:
    """What a person's commands about summaries do. Safe to use from several threads."""

    def __init__(self, state: SiteState, ledger: Ledger, session: Session, policy: PolicyEnforcement) -> None:
        self._state = state
        self._ledger = ledger
        self._session = session
        self._policy = policy

    def offered(self) -> OfferedSummaries:
        """The coordinator's open requests.

        Raises:
            Unavailable: the coordinator cannot be reached.
        """
        left = self._ledger.summarized().values()
        told = {name: max(time for request, time in left if request == name) for name, _ in left}
        return OfferedSummaries(tuple(
            OfferedSummary(
                request.name, request.title, len(request.columns), told.get(request.name, ""), request.document()
            )
            for request in self._requests().values()
        ))  # fmt: skip

    def show(self, name: str, data: str) -> ShownSummary:
        """All that would leave of the data called ``data``. Nothing leaves by it, and no policy needs to allow it.

        Raises:
            UsageProblem: the coordinator has no such request.
            Unavailable: the coordinator cannot be reached.
            WardroundError: what the trainer says.
        """
        try:
            table, denied = self._policy.policy().statistics, ""
        except WardroundError as error:
            table, denied = StatisticsTable(), error.message
        made = self._make(name, data, table)
        denied = denied or self._denial(made)
        return ShownSummary(
            request=name, title=made.request.title, data=data, digest=made.entry.summary_sha256,
            min_count=made.figures.min_count, rows=made.figures.rows,
            columns=tuple(
                TellingColumn(column.name, column.kind, here, column.until, column.words, figures)
                for column, (_, here), figures in zip(
                    made.request.columns, made.read, made.figures.columns, strict=False
                )
            ),
            denied=denied, before=self._before(made), notes=made.notes,
        )  # fmt: skip

    def tell(self, name: str, data: str, digest: str, person: Person, *, again: bool) -> Told:
        """Let exactly the figures leave that were shown.

        Args:
            digest: of what was shown.
            again: also of columns of which figures have left before.

        Raises:
            NotPermitted: the policy does not let them leave.
            NeedsPerson: there is no policy; they are not what was shown; or figures of one of the columns have left.
            UsageProblem: the coordinator has no such request.
            WardroundError: what the trainer says; or the coordinator cannot be reached, after the ledger's line.
        """
        made = self._make(name, data, self._table())
        show = f"`site-agent data summary {data} --request {name}`"
        if made.entry.summary_sha256 != digest:
            raise NeedsPerson(
                f"the figures for `{name}` are not those that were shown: the request, the table, its mapping or the "
                "policy changed; nothing was sent",
                hint=f"look again: {show}",
            )
        if denied := self._denial(made):
            raise NotPermitted(
                f"the policy does not let figures leave for `{name}`: {denied}; nothing was sent",
                hint=f"edit [statistics] in {self._state.policy} if they should leave",
            )
        if (before := self._before(made)) and not again:
            raise NeedsPerson(
                f"figures of these columns have left already: {', '.join(before)}; nothing was sent",
                hint="two summaries of almost the same patients can tell of the few who are in one alone; if they "
                "should leave once more: `--again`",
            )
        with self._session.use() as connection:
            self._ledger.append(replace(made.entry, by=person_entry(person)))
            self._ledger.sign()
            connection.tell_summary(made.figures)
        return Told(made.figures.numbers)

    def _table(self) -> StatisticsTable:
        try:
            return self._policy.policy().statistics
        except NeedsPerson as error:
            raise NeedsPerson(
                error.message, hint="write one with [study], [quotas] and [statistics]: docs/summaries.md"
            ) from None

    def _requests(self) -> dict[str, SummaryRequest]:
        with self._session.use() as connection:
            return {request.name: request for request in connection.summary_requests()}

    def _make(self, name: str, data: str, table: StatisticsTable) -> _Made:
        offered = self._requests()
        if name not in offered:
            raise no_summary_request(name, offered)
        request = offered[name]
        answer = handoff.ask(
            self._state.root,
            Summarize(request=request.document(), data=data, min_count=table.min_count, digits=table.digits),
        )
        figures = judged(request, answer, table)
        entry = entry_of(request, figures, answer.sources, self._policy.coordinator)
        return _Made(request, figures, entry, tuple(answer.notes))

    def _denial(self, made: _Made) -> str:
        """What of it may not leave, and by which rule; "" where all of it may."""
        try:
            denial = self._policy.summary_denial(made.figures, made.read)
        except WardroundError as error:
            return error.message
        return "" if denial is None else f"{denial.what}: {denial.rule}"

    def _before(self, made: _Made) -> tuple[str, ...]:
        """The columns of which figures have left, in words."""
        left = self._ledger.summarized()
        absent = {place for place, column in enumerate(made.figures.columns) if column.absent}
        found = {
            name: left[name]
            for place, (asked, here) in enumerate(made.read)
            for name in dict.fromkeys((here, asked))
            if name in left and here and place not in absent
        }
        return tuple(f"`{name}` on {time[:10]} for `{request}`" for name, (request, time) in found.items())


def judged(request: SummaryRequest, answer: Summarized, table: StatisticsTable) -> SiteFigures:
    """What the trainer says, as it may leave: it runs code of others, so nothing of it is believed.

    Raises:
        BadData: it is not what the request asks, or not as coarse as the policy wants it.
    """
    figures = SiteFigures(
        request=request.name, digest=request.digest, min_count=table.min_count, digits=table.digits, rows=answer.rows,
        columns=tuple(answer.columns),
    )  # fmt: skip
    try:
        figures.refuse_misfit(request)
        if len(answer.sources) < len(request.read):
            raise BadData("it does not say where each column is from")
        if twice := next((own for own in answer.sources if own and answer.sources.count(own) > 1), ""):
            raise BadData(f"two columns of the request are `{twice}` here, and their difference would be told")
    except BadData as error:
        raise BadData(f"the trainer's answer cannot leave: {error.message}", hint="its log may say more") from None
    return figures


def entry_of(
    request: SummaryRequest, figures: SiteFigures, sources: list[str], destination: str
) -> SummaryEntry:  # fmt: skip
    """The ledger's entry of figures that leave for ``destination``, without the person."""
    entry = SummaryEntry(
        request=request.name, request_sha256=figures.digest, summary_sha256=NO_DIGEST, destination=destination,
        min_count=figures.min_count, digits=figures.digits, rows=figures.rows, sources=tuple(sources),
        columns=tuple(map(_row, request.columns, figures.columns)),
    )  # fmt: skip
    return replace(entry, summary_sha256=canonical.digest(entry.left()))


def _row(column: AskedColumn, figures: ColumnFigures) -> SummaryColumn:
    counted = zip(column.words, figures.categories, strict=False)
    return SummaryColumn(
        column=column.name, values=figures.values, missing=figures.missing, unfit=figures.unfit,
        mean=figures.mean or None, std=figures.std or None, low=figures.low or None, high=figures.high or None,
        categories=tuple(CategoryRow(category=text, rows=rows) for text, rows in counted), other=figures.other,
        absent=1 if figures.absent else None,
    )  # fmt: skip
