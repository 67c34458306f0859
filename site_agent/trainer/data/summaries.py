"""A hospital's table as figures, for a summary request. Reads patients, so it runs in the trainer alone. No torch."""

from collections.abc import Iterable
from pathlib import Path

from fl_algorithms.tasks.tables.mapping import SiteMapping, load_mapping, read_mapped
from fl_algorithms.tasks.tables.summary import Disclosure, figures_of
from fl_algorithms.tasks.tables.table import Table
from site_agent.trainer.data import layouts
from site_agent.trainer.data.sources import DATA_INVALID, DataSource, source
from wardround.errors import BadData, UsageProblem
from wardround.records.summaries.request import SummaryRequest
from wardround.records.trainer import Summarize, Summarized

_PATIENT = "\0"  # beside the request's columns, none of whose names can be this


def summarized(state: Path, request: Summarize) -> Summarized:
    """The figures of the data's table.

    Raises:
        UsageProblem: there is no data of that name, or it is no table.
        BadData: the table or its mapping cannot be read, none of the columns is there, or one of them says who a
            patient is; code DECLINED_DATA_INVALID.
    """
    named, asked = table_of(state, request.data), SummaryRequest.from_document(request.request)
    try:
        mapping = load_mapping(named.paths["mapping"]).rules if "mapping" in named.paths else SiteMapping()
        table = _read(named, asked, mapping)
        own = {name: table.here.get(name, name) for name in asked.read if name in table.columns}
        ends = [mapping.columns[name].until_column for name in own if name in mapping.columns]
        further = list(dict.fromkeys(end for end in ends if end and end not in own.values()))
        _refuse_identifiers(named, [*own.items(), *zip(further, further, strict=True)])
        found = figures_of(table, asked, Disclosure(request.min_count, request.digits), table.columns.get(_PATIENT, ()))
    except BadData as error:
        error.code = DATA_INVALID
        raise
    unread = [f"{note.column}: {note.what}".removeprefix(": ") for note in table.absent]
    return Summarized(
        rows=found.rows, columns=list(found.columns), notes=[*unread, *found.notes],
        sources=[*(own.get(name, "") for name in asked.read), *further],
    )  # fmt: skip


def table_of(state: Path, data: str) -> DataSource:
    """Where the table of the data called ``data`` is.

    Raises:
        UsageProblem: there is no data of that name, or it is no table.
    """
    named = source(state, data)
    if named.layout is not layouts.TABLE:
        raise UsageProblem(f"data `{data}` is no table: a summary is of the columns of one")
    return named


def _read(named: DataSource, asked: SummaryRequest, mapping: SiteMapping) -> Table:
    wanted = {name: named.label if name == asked.label and name not in mapping.columns else "" for name in asked.read}
    return read_mapped(named.paths["table"], wanted | ({_PATIENT: named.patient} if named.patient else {}), mapping)


def _refuse_identifiers(named: DataSource, read: Iterable[tuple[str, str]]) -> None:
    """Raises BadData: a column of the request is the one that says who a patient is."""
    for name, here in read:
        if named.patient and here == named.patient:
            raise BadData(
                f"column `{name}` of the request says here who a patient is: nothing is told of it",
                hint="ask the coordinator's operator for a request without it",
            )
