"""A summary that left, for people: each column's figures in words, as `audit show` and the report print them."""

from collections.abc import Sequence
from dataclasses import dataclass

from wardround.records.ledger.summary import SummaryColumn, SummaryEntry

HEADS = ("column", "here", "values", "missing", "does not fit", "mean", "sd", "nine in ten", "categories")


@dataclass(frozen=True)
class SummaryFacts:
    """One summary that left. ``rows`` has what ``HEADS`` names, of each column."""

    time: str
    request: str
    by: str
    counted: str  # its number of rows, as it was told
    least: int  # a count of fewer was not told
    rows: tuple[tuple[str, ...], ...]


def facts_of_summary(time: str, entry: SummaryEntry) -> SummaryFacts:
    sources = [*(entry.sources or ()), *[""] * len(entry.columns)]
    rows = (_row(column, own, entry.min_count) for column, own in zip(entry.columns, sources, strict=False))
    by = entry.by.words() if entry.by is not None else "somebody"
    return SummaryFacts(time, entry.request, by, counted(entry.rows, entry.min_count), entry.min_count, tuple(rows))


def words_of_summary(entry: SummaryEntry) -> str:
    """All that left with it, on one line."""
    columns = "; ".join(_column_words(column, entry.min_count) for column in entry.columns)
    by = f" by {entry.by.words()}" if entry.by is not None else ""
    return f"summary for {entry.request}{by}: {counted(entry.rows, entry.min_count)} rows; {columns}"


def counted(count: int, least: int) -> str:
    """A count as it was told: "<10" for fewer than ten."""
    return str(count) if count else f"<{least}"


def between(low: str, high: str) -> str:
    return f"{low} to {high}" if low and high else ""


def _row(column: SummaryColumn, own: str, least: int) -> tuple[str, ...]:
    if column.absent:
        return (column.column, "", "no such column", "", "", "", "", "", "")
    counts = (column.values, column.missing, column.unfit or 0)
    return (
        column.column, own if own != column.column else "", *(counted(count, least) for count in counts),
        column.mean or "", column.std or "", between(column.low or "", column.high or ""),
        ", ".join(_categories(column, least)),
    )  # fmt: skip


def _column_words(column: SummaryColumn, least: int) -> str:
    if column.absent:
        return f"{column.column}: no such column"
    told = [f"{counted(column.values, least)} values", f"{counted(column.missing, least)} missing"]
    told.append(f"{counted(column.unfit or 0, least)} do not fit")
    told += [f"mean {column.mean}, sd {column.std}"] if column.mean and column.std else []
    told += [f"nine in ten {between(column.low or '', column.high or '')}"] if column.low and column.high else []
    return f"{column.column}: {', '.join([*told, *_categories(column, least)])}"


def _categories(column: SummaryColumn, least: int) -> Sequence[str]:
    named = [f"{row.category} {counted(row.rows, least)}" for row in column.categories or ()]
    return [*named, f"other {counted(column.other, least)}"] if named and column.other is not None else named
