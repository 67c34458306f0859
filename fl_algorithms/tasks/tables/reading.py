"""What each cell of a table means: numbers, category indices, missing values. All that does not fit is said at once.

Each spelling of a cell is read once. Order: cells become numbers; a number outside of the study's range is refused or
missing; then rows with missing values are refused, dropped or kept for ``encoding`` to fill. No torch.
"""

import datetime
import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from fl_algorithms.settings.tabular import Feature, TableSettings, iso_date
from fl_algorithms.settings.targets import level
from fl_algorithms.tasks.findings import Finding
from fl_algorithms.tasks.tables.table import NUMBER, Table

MAX_MAGNITUDE = 1e100  # of a cell; its square still has room in float64
MISSING = "\0"  # what a mapping writes for a missing value: no file has it, whatever the study's tokens are
YES = frozenset({"yes", "y", "true", "t", "1"})
NO = frozenset({"no", "n", "false", "f", "0"})
DAYS_A_YEAR = 365.25

Floats: TypeAlias = NDArray[np.float64]
Values: TypeAlias = dict[str, Floats]  # feature -> (n,): the number, or the category's index; nan where missing

NO_VALUE = "no value"
_TEXT = "text where a number belongs"
_ENDLESS = "nan or infinity where a number belongs"
_HUGE = "a number beyond any measurement"
_OUTSIDE = "a number outside of the study's range"
_NO_DATE = "no date of the form YYYY-MM-DD"
_NOT_FINITE = re.compile(r"[+-]?(?:nan|inf|infinity)", re.IGNORECASE)
_TIME = re.compile(r"[T ][0-9]{2}:[0-9]{2}(?::[0-9]{2}(?:\.[0-9]+)?)?(?:Z|[+-][0-9]{2}:?[0-9]{2})?")
_COMPLETE = (
    "complete them or leave the rows out; or ask the study's author for "
    '`policy = "drop_row"`, or "median" with these `indicators`, in [task.missing]'
)


@dataclass(frozen=True)
class FeatureRows:
    """A file's usable rows.

    Attributes:
        table: their cells.
        values: see ``Values``; features whose column is absent are not in it.
        dropped: how many rows were, for missing values.
        findings: what refuses the table.
        notes: what does not, and a person should know.
    """

    table: Table
    values: Values
    dropped: int
    findings: tuple[Finding, ...]
    notes: tuple[Finding, ...]


@dataclass
class _Column:
    """A feature's cells as read: ``faults`` and ``notes`` map (column, what, hint) to rows."""

    values: Floats
    faults: dict[tuple[str, str, str], list[int]] = field(default_factory=lambda: defaultdict(list))
    notes: dict[tuple[str, str, str], list[int]] = field(default_factory=lambda: defaultdict(list))

    def gaps(self) -> list[int]:
        """The rows without a value and without a fault."""
        faulty = {row for rows in self.faults.values() for row in rows}
        return [row for row in np.flatnonzero(np.isnan(self.values)).tolist() if row not in faulty]


def read_features(table: Table, settings: TableSettings, beside: Sequence[str] = ()) -> FeatureRows:
    """The features of a table's rows, as the study's policy on missing values leaves them.

    Args:
        beside: other columns of the table, whose missing cells nothing can fill: a label, a patient.
    """
    blanks, policy = settings.missing.blanks, settings.missing
    unreadable = {finding.column for finding in table.absent}  # already said, of the whole column
    features = [feature for feature in settings.features if _has(table, feature, unreadable)]
    columns = {feature.name: _read(table, feature, blanks) for feature in features}
    found = list(table.absent)

    # Missing values.
    gaps = {name: rows for name, column in columns.items() if (rows := column.gaps())}
    others = [name for name in beside if name in table.columns and name not in unreadable]
    gaps_beside = {name: rows for name in others if (rows := gaps_in(table.columns[name], blanks))}
    dropped: set[int] = set()
    if policy.policy == "drop_row":
        dropped = {row for rows in (*gaps.values(), *gaps_beside.values()) for row in rows}
        if len(dropped) == len(table):
            found.append(Finding(table.path, "", "every row has a missing value, so none is left"))
    else:
        refused = {name: rows for name, rows in gaps.items() if name not in policy.indicators}
        found += [table.finding(name, NO_VALUE, rows, _COMPLETE) for name, rows in refused.items()]
        found += [
            table.finding(name, NO_VALUE, rows, "leave these rows out of the file, or complete them")
            for name, rows in gaps_beside.items()
        ]

    # What else does not fit, in the rows that count.
    read = columns.values()
    found += [found for column in read for found in _findings(table, column.faults, dropped)]
    notes = [note for column in read for note in _findings(table, column.notes, dropped)]
    values = {name: column.values for name, column in columns.items()}
    if dropped:
        keep = np.array([row not in dropped for row in range(len(table))])
        values = {name: cells[keep] for name, cells in values.items()}
        table = table.without(dropped)
    return FeatureRows(table, values, len(dropped), tuple(found), tuple(notes))


def levels_of(feature: Feature) -> list[str]:
    """The categories in the form in which two are compared."""
    return [level(text) for text in feature.categories]


def number_of(cell: str) -> float | str:
    """The number that a cell is, or what is wrong with it."""
    if not NUMBER.fullmatch(cell):
        return _ENDLESS if _NOT_FINITE.fullmatch(cell) else _TEXT
    number = float(cell)
    return number if abs(number) <= MAX_MAGNITUDE else _HUGE


def date_of(cell: str) -> datetime.date | None:
    """The day of a cell such as "2024-01-31" or "2024-01-31 08:15"; None if it is none."""
    return iso_date(cell[:10]) if len(cell) == 10 or _TIME.fullmatch(cell[10:]) else None


def gaps_in(cells: Sequence[str], blanks: Collection[str]) -> list[int]:
    """The rows without a value. Almost always none, so the spellings are looked at first, each once."""
    missing = {cell for cell in set(cells) if _is_blank(cell, blanks)}
    return [row for row, cell in enumerate(cells) if cell in missing] if missing else []


def _is_blank(cell: str, blanks: Collection[str]) -> bool:
    return cell == MISSING or cell.casefold() in blanks


def _has(table: Table, feature: Feature, unreadable: Collection[str]) -> bool:
    needed = {feature.name, *([feature.until_column] if feature.until_column else [])}
    return needed <= table.columns.keys() and needed.isdisjoint(unreadable)


def _findings(
    table: Table, faults: Mapping[tuple[str, str, str], Sequence[int]], dropped: Collection[int]
) -> Iterator[Finding]:
    for (column, what, hint), rows in faults.items():
        if kept := [row for row in rows if row not in dropped]:
            yield table.finding(column, what, kept, hint)


def _read(table: Table, feature: Feature, blanks: frozenset[str]) -> _Column:
    match feature.kind:
        case "categorical":
            return _categories(table, feature, blanks)
        case "boolean":
            return _booleans(table, feature, blanks)
        case "date":
            return _within(_spans(table, feature, blanks), feature)
        case "numeric":
            return _within(_numbers(table, feature, blanks), feature)


def _numbers(table: Table, feature: Feature, blanks: frozenset[str]) -> _Column:
    # Blanks first: a code such as -9 may stand for a missing value.
    tokens = ", ".join(f"`{token}`" if token else "an empty cell" for token in sorted(blanks))
    hints = {
        _TEXT: "numbers have a decimal point and no thousands separator",
        _ENDLESS: f"a missing value is written as one of: {tokens}",
        _HUGE: f"the largest magnitude taken is {MAX_MAGNITUDE:g}",
    }
    cells = table.columns[feature.name]
    meaning = {cell: math.nan if _is_blank(cell, blanks) else number_of(cell) for cell in set(cells)}
    return _column(feature.name, cells, meaning, hints)


def _booleans(table: Table, feature: Feature, blanks: frozenset[str]) -> _Column:
    what = "neither yes nor no"
    hint = "taken are yes, y, true, t, 1 and no, n, false, f, 0; other words by `values` in a mapping"
    cells = table.columns[feature.name]
    meaning = {cell: math.nan if _is_blank(cell, blanks) else _boolean(cell, what) for cell in set(cells)}
    return _column(feature.name, cells, meaning, {what: hint})


def _boolean(cell: str, otherwise: str) -> float | str:
    word = level(cell).casefold()
    return 1.0 if word in YES else 0.0 if word in NO else otherwise


def _categories(table: Table, feature: Feature, blanks: frozenset[str]) -> _Column:
    what = "a category that the study does not know"
    cells = table.columns[feature.name]
    place = {text: float(place) for place, text in enumerate(levels_of(feature))}
    meaning: dict[str, float | str] = {
        cell: math.nan if _is_blank(cell, blanks) else place.get(level(cell), what) for cell in set(cells)
    }
    if feature.other is None:
        return _column(feature.name, cells, meaning, {what: f"its categories are: {', '.join(feature.categories)}"})
    column = _column(feature.name, cells, meaning, {what: ""})
    unknown = [row for rows in column.faults.values() for row in rows]
    column.faults.clear()
    if unknown:
        column.values[unknown] = place[level(feature.other)]
        column.notes[feature.name, f"{what}, counted as `{feature.other}`", ""] = unknown
    return column


def _spans(table: Table, feature: Feature, blanks: frozenset[str]) -> _Column:
    """The time from each date to ``until``, in the feature's unit."""
    hint = "as in 2024-01-31; dates in another form are read by a mapping"
    start = _days(table.columns[feature.name], feature.name, blanks, hint)
    if feature.until_column:
        end = _days(table.columns[feature.until_column], feature.until_column, blanks, hint)
        start.faults.update(end.faults)
        days = end.values - start.values
    else:
        day = iso_date(feature.until)
        assert day is not None
        days = day.toordinal() - start.values
    start.values = days if feature.unit == "days" else days / DAYS_A_YEAR
    return start


def _days(cells: Sequence[str], name: str, blanks: frozenset[str], hint: str) -> _Column:
    def day(cell: str) -> float | str:
        found = date_of(cell)
        return _NO_DATE if found is None else float(found.toordinal())

    meaning = {cell: math.nan if _is_blank(cell, blanks) else day(cell) for cell in set(cells)}
    return _column(name, cells, meaning, {_NO_DATE: hint})


def _column(name: str, cells: Sequence[str], meaning: Mapping[str, float | str], hints: Mapping[str, str]) -> _Column:
    """``meaning``: of each spelling the number, or what is wrong with it."""
    column = _Column(np.array([math.nan if isinstance(found := meaning[cell], str) else found for cell in cells]))
    wrong = {cell: found for cell, found in meaning.items() if isinstance(found, str)}
    if wrong:
        for row, cell in enumerate(cells):
            if cell in wrong:
                column.faults[name, wrong[cell], hints[wrong[cell]]].append(row)
    return column


def _within(column: _Column, feature: Feature) -> _Column:
    """The same, where no number is outside of the study's range."""
    if not feature.has_range:
        return column
    low = -math.inf if feature.low is None else feature.low
    high = math.inf if feature.high is None else feature.high
    with np.errstate(invalid="ignore"):
        rows = np.flatnonzero((column.values < low) | (column.values > high)).tolist()
    if rows:
        column.values[rows] = math.nan
        if feature.outside == "missing":
            column.notes[feature.name, f"{_OUTSIDE}, counted as missing", ""] = rows
        else:
            hint = f"the range is {range_text(feature)}; what is in another unit is converted by a mapping"
            column.faults[feature.name, _OUTSIDE, hint] = rows
    return column


def range_text(feature: Feature) -> str:
    """ "10 to 45", "at least 10", "at most 45"."""
    if feature.low is None or feature.high is None:
        return f"at least {feature.low:g}" if feature.high is None else f"at most {feature.high:g}"
    return f"{feature.low:g} to {feature.high:g}"


def cells_of(table: Table, feature: Feature, blanks: frozenset[str]) -> tuple[Floats, NDArray[np.bool_]]:
    """One feature of every row, whatever does not fit: its number, or its category's index, nan where there is none;
    and the rows in which something else stands than a value or a missing one.
    """
    column = _read(table, feature, blanks)
    unfit = np.zeros(len(table), dtype=bool)
    unfit[[row for rows in column.faults.values() for row in rows]] = True
    return column.values, unfit
