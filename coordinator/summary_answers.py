"""What the coordinator answers the commands about summaries."""

from collections.abc import Mapping

from pydantic import JsonValue

from coordinator.answers import Answer
from wardround.records.summaries.figures import SiteFigures


class SummaryCreated(Answer):
    """A summary request that its sites are offered. ``new``: False where it was known with exactly this content."""

    name: str
    digest: str
    new: bool
    not_enrolled: tuple[str, ...]


class SummaryRow(Answer):
    """One summary request in the list. ``told``: how many of its ``sites`` have told their figures."""

    name: str
    title: str
    open: bool
    columns: int
    sites: int
    told: int


class SummaryList(Answer):
    """Every summary request."""

    requests: tuple[SummaryRow, ...]


class PooledColumn(Answer):
    """What the sites told of one column, together.

    Attributes:
        words: what its rows are counted by.
        sites: how many have the column. ``absent``: how many do not. ``below``: how many have too few values to tell.
    """

    column: str
    kind: str
    words: tuple[str, ...]
    sites: int
    absent: int
    below: int
    values: int
    missing: int
    unfit: int
    mean: str
    std: str
    low: str
    high: str
    categories: tuple[int, ...]
    other: int


class SiteTold(Answer):
    """What one site told, and when (UTC)."""

    figures: SiteFigures
    said: str


class SummaryShown(Answer):
    """A summary request as it was written, each site's figures (None of one that told none), and all together."""

    name: str
    open: bool
    request: dict[str, JsonValue]
    sites: Mapping[str, SiteTold | None]
    pooled: tuple[PooledColumn, ...]
