"""The figures of a table's columns that may be told outside: counts, means, spreads and coarse ranges. No torch.

What a single patient could be seen in is not told:

* a count of fewer than ``min_count`` patients is 0, and every other is rounded to a multiple of it
* a mean and a spread need ``min_count`` patients whose value is not the commonest one, and no two patients may make
  more than half of the spread or of the rows; of what looks like an identifier, none is told
* instead of the smallest and the largest value, two bounds are told with at least ``min_count`` patients, and a
  twentieth of all, on or beyond each; they lie on a grid as coarse as half the spread

Where rows name their patient, patients are counted for all of this, and rows are told.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fl_algorithms.settings.tabular import Feature
from fl_algorithms.tasks.tables.reading import Floats, cells_of
from fl_algorithms.tasks.tables.table import Table
from wardround.records.schema import check
from wardround.records.summaries.figures import ColumnFigures, decimal
from wardround.records.summaries.request import SummaryColumn, SummaryRequest

TAIL = 0.05  # of the patients, on or beyond each end of the range
ENDS = 4  # so many times a tail's patients are needed for a range
LARGEST_SHARE = 0.5  # of the spread, or of the rows, that two patients may make

Mask: TypeAlias = NDArray[np.bool_]
Patients: TypeAlias = NDArray[np.int64]  # of each row


@dataclass(frozen=True)
class Disclosure:
    """How coarsely numbers are told: ``min_count`` patients at least, and ``digits`` significant digits."""

    min_count: int
    digits: int

    def count(self, rows: Mask, patients: Patients) -> int:
        """How many rows there are, as it is told."""
        if len(np.unique(patients[rows])) < self.min_count:
            return 0
        return max(1, round(int(rows.sum()) / self.min_count)) * self.min_count

    def decimal(self, value: float) -> str:
        return decimal(value, self.digits)


@dataclass(frozen=True)
class TableFigures:
    """A table's rows and columns as they are told, and what a person should know before."""

    rows: int
    columns: tuple[ColumnFigures, ...]
    notes: tuple[str, ...]


def features_of(request: SummaryRequest) -> tuple[Feature, ...]:
    """The columns of a request as a study's features.

    Raises:
        BadData: two categories of one are the same to a study, as 1 and 1.0 are.
    """
    return tuple(_feature(column) for column in request.columns)


def blanks_of(request: SummaryRequest) -> frozenset[str]:
    """What is written for a missing value, in the form in which a cell is compared with it."""
    return frozenset(token.strip().casefold() for token in request.missing)


def figures_of(
    table: Table, request: SummaryRequest, disclosure: Disclosure, patients: Sequence[str] = ()
) -> TableFigures:
    """The figures of a table for a request.

    Args:
        table: the columns that the request reads and the site has.
        patients: who each row is; () where each is a patient.

    Raises:
        BadData: as ``features_of``.
    """
    blanks = blanks_of(request)
    of_row = np.unique(np.array(patients), return_inverse=True)[1] if patients else np.arange(len(table))
    columns, notes = [], []
    for column, feature in zip(request.columns, features_of(request), strict=True):
        if not {column.name, column.until_column} - {""} <= table.columns.keys():
            columns.append(ColumnFigures(absent=True))
            continue
        values, unfit = cells_of(table, feature, blanks)
        identifies = column.kind == "numeric" and counts_off(values)
        columns.append(_column(column, values, unfit, of_row, disclosure, with_decimals=not identifies))
        if identifies:
            notes.append(
                f"`{column.name}`: almost every row has another whole number, as an identifier has: no mean and no "
                "range is told"
            )
    rows = disclosure.count(np.ones(len(table), dtype=bool), of_row)
    return TableFigures(rows, tuple(columns), tuple(notes))


def spread(values: Floats, patients: Patients, disclosure: Disclosure) -> tuple[float, float] | None:
    """Mean and standard deviation; None where few patients could be seen in them."""
    if len(values) < 2 or len(np.unique(patients)) < disclosure.min_count:
        return None
    place = np.unique(values, return_inverse=True)[1]
    others = patients[place != np.bincount(place).argmax()]
    if len(np.unique(others)) < disclosure.min_count:
        return None
    mean, std = float(values.mean()), float(values.std(ddof=1))
    whose = np.unique(patients, return_inverse=True)[1]
    away = np.bincount(whose, weights=(values - mean) ** 2)
    if _of_two(away) > LARGEST_SHARE or _of_two(np.bincount(whose).astype(float)) > LARGEST_SHARE:
        return None
    return (mean, std) if std > 0 else None


def coarse_range(values: Floats, patients: Patients, std: float, min_count: int) -> tuple[float, float] | None:
    """About nine in ten values lie between these; None of too few patients."""
    many = len(np.unique(patients))
    tail = max(min_count, math.ceil(TAIL * many))
    if many < ENDS * tail:
        return None
    step = _grid(std / 2)
    low, high = _bound(values, patients, tail), -_bound(-values, patients, tail)
    return math.floor(low / step) * step, math.ceil(high / step) * step


def _feature(column: SummaryColumn) -> Feature:
    return check(Feature, column.model_dump(exclude_defaults=True), f"column `{column.name}`")


def _column(
    column: SummaryColumn, values: Floats, unfit: Mask, patients: Patients, disclosure: Disclosure, *,
    with_decimals: bool,
) -> ColumnFigures:  # fmt: skip
    known = ~np.isnan(values)
    missing = ~known & ~unfit
    if not column.is_number:
        words = tuple(disclosure.count(values == place, patients) for place in range(len(column.words)))
        others = column.kind == "categorical"
        return ColumnFigures(
            values=disclosure.count(known | unfit if others else known, patients),
            missing=disclosure.count(missing, patients), unfit=0 if others else disclosure.count(unfit, patients),
            categories=words, other=disclosure.count(unfit, patients) if others else 0,
        )  # fmt: skip
    figures = ColumnFigures(
        values=disclosure.count(known, patients), missing=disclosure.count(missing, patients),
        unfit=disclosure.count(unfit, patients),
    )  # fmt: skip
    seen = spread(values[known], patients[known], disclosure) if with_decimals else None
    if seen is None:
        return figures
    mean, std = seen
    decimals = {"mean": disclosure.decimal(mean), "std": disclosure.decimal(std)}
    ends = coarse_range(values[known], patients[known], std, disclosure.min_count)
    if ends is not None:
        decimals |= {"low": disclosure.decimal(ends[0]), "high": disclosure.decimal(ends[1])}
    return figures.model_copy(update=decimals)


def _bound(values: Floats, patients: Patients, tail: int) -> float:
    """The smallest value with so many patients on or below it."""
    order = np.argsort(values, kind="stable")
    _, first = np.unique(patients[order], return_index=True)
    return float(values[order][np.sort(first)[tail - 1]])


def _of_two(parts: NDArray[Any]) -> float:
    """The share of the whole that the two largest parts have."""
    whole = float(parts.sum())
    return float(np.sort(parts)[-2:].sum()) / whole if whole > 0 else 0.0


def _grid(least: float) -> float:
    """The step of a grid: 1, 2 or 5 times a power of ten, at least so much."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= least)


def counts_off(values: Floats) -> bool:
    """Whether nearly each row has a whole number of its own, as numbers that are given out have."""
    known = values[~np.isnan(values)]
    whole = len(known) >= 20 and bool((known == np.floor(known)).all())
    return whole and len(np.unique(known)) > 0.95 * len(known)
