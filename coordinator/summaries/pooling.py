"""What several sites told of one column, as if their rows were one site's. Judges only.

A count that a site did not tell counts as none, and ``below`` says at how many sites that is so. Counts are rounded, so
what is pooled is about right and no more.
"""

import math
from collections.abc import Sequence

from coordinator.summary_answers import PooledColumn
from wardround.records.summaries.figures import ColumnFigures, SiteFigures, decimal
from wardround.records.summaries.request import SummaryRequest


def pooled(request: SummaryRequest, sites: Sequence[SiteFigures]) -> tuple[PooledColumn, ...]:
    """Each column over all sites that told it, in the request's order."""
    return tuple(
        _pool(column.name, column.kind, column.words, [site.columns[place] for site in sites], _digits(sites))
        for place, column in enumerate(request.columns)
    )


def _pool(name: str, kind: str, words: Sequence[str], told: Sequence[ColumnFigures], digits: int) -> PooledColumn:
    present = [column for column in told if not column.absent]
    counted = [column for column in present if column.mean and column.values]
    mean, std = _spread(counted)
    ends = [column for column in present if column.low]
    low = min((float(column.low) for column in ends), default=None)
    high = max((float(column.high) for column in ends), default=None)
    return PooledColumn(
        column=name, kind=kind, words=tuple(words), sites=len(present), absent=len(told) - len(present),
        below=sum(not column.values for column in present),
        values=sum(column.values for column in present), missing=sum(column.missing for column in present),
        unfit=sum(column.unfit for column in present), mean=_text(mean, digits), std=_text(std, digits),
        low=_text(low, digits), high=_text(high, digits),
        categories=tuple(sum(column.categories[place] for column in present) for place in range(len(words))),
        other=sum(column.other for column in present),
    )  # fmt: skip


def _spread(columns: Sequence[ColumnFigures]) -> tuple[float | None, float | None]:
    """Mean and standard deviation over all rows: within the sites, and between them."""
    rows = sum(column.values for column in columns)
    if not rows:
        return None, None
    mean = sum(column.values * float(column.mean) for column in columns) / rows
    within = sum(column.values * float(column.std) ** 2 for column in columns)
    between = sum(column.values * (float(column.mean) - mean) ** 2 for column in columns)
    return mean, math.sqrt((within + between) / rows)


def _digits(sites: Sequence[SiteFigures]) -> int:
    """No more digits than the coarsest site tells."""
    return min((site.digits for site in sites), default=1)


def _text(value: float | None, digits: int) -> str:
    return "" if value is None or not math.isfinite(value) else decimal(value, digits)
