"""The entry of a summary in a site's ledger: every figure that left, with the request's words for it."""

from dataclasses import dataclass

from wardround.records.ledger.base import BaseEntry, Person
from wardround.records.ledger.form import Digest, Record, Unjudged, encoded

SUMMARY = ("request", "request_sha256", "destination", "min_count", "digits", "rows", "columns")


@dataclass(frozen=True, kw_only=True)
class CategoryRow(Record):
    """How many rows of a category were told."""

    category: str
    rows: int


@dataclass(frozen=True, kw_only=True)
class SummaryColumn(Record):
    """What was told of one column; 0 is fewer than the entry's ``min_count``. ``absent`` is 1 where there is none."""

    column: str
    values: int
    missing: int
    unfit: int | None = None
    mean: Unjudged | None = None
    std: Unjudged | None = None
    low: Unjudged | None = None
    high: Unjudged | None = None
    categories: tuple[CategoryRow, ...] | None = None
    other: int | None = None
    absent: int | None = None

    @property
    def numbers(self) -> int:
        """How many numbers that is."""
        if self.absent:
            return 0
        decimals = sum(text is not None for text in (self.mean, self.std, self.low, self.high))
        return 4 + decimals + len(self.categories or ())


@dataclass(frozen=True, kw_only=True)
class SummaryEntry(BaseEntry):
    """Figures of a table that leave from here on, for a request of the coordinator's, as a person let them.

    ``summary_sha256`` is the digest over all of it. ``sources`` are this site's names of the columns, then those of
    all else that was read for them; they do not leave.
    """

    type = "summary"
    request: str
    request_sha256: Digest
    summary_sha256: Digest
    destination: str
    min_count: int
    digits: int
    rows: int
    columns: tuple[SummaryColumn, ...]
    sources: tuple[str, ...] | None = None
    by: Person | None = None

    def left(self) -> dict[str, object]:
        """Everything that left: what ``summary_sha256`` is the digest of."""
        return encoded(self, SUMMARY)

    @property
    def numbers(self) -> int:
        """How many numbers left."""
        return 1 + sum(column.numbers for column in self.columns)
