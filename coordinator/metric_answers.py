"""What the sites of a study reported over its rounds, as the commands, the report and a dashboard draw it.

A site validates the model that it downloads before it trains: the numbers of round ``r`` are of model ``r - 1``, and
those of the closing round of the last one. They are kept as the text that the site sent; ``number`` reads it.
"""

import math
from collections.abc import Mapping

from coordinator.answers import Answer

VAL_LOSS = "val_loss"  # by which the best global model is chosen


class ReportedNumbers(Answer):
    """What one site reported with one accepted update, or in the closing round.

    Attributes:
        model: the round of the model that ``metrics`` are of; 0 is the initial one.
        rows, validation_rows: trained on and validated on, in the form of the study's counts.
        seconds: from the opening of the attempt to the verdict.
    """

    site: str
    model: int
    round: int
    attempt: int
    closing: bool
    rows: int
    validation_rows: int
    metrics: Mapping[str, str]
    seconds: float | None


class ModelMeans(Answer):
    """The means over the sites that validated a model, weighted by their validation rows as reported.

    ``metrics``: those of which a mean can be taken. ``sites``: how many reported.
    """

    model: int
    metrics: Mapping[str, float]
    sites: int


class StudyMetrics(Answer):
    """What the sites of a study reported, in the order of models and sites.

    With secure aggregation nobody knows what one site reported: ``reported`` is empty, and ``means`` are over all rows
    of all sites that were summed.

    Attributes:
        metrics: the names, as the study lists them.
        counts: the form of the numbers of rows: exact, bucketed or uniform.
        means: one for each model that sites validated. sums_alone: whether they are all that is known.
    """

    id: str
    title: str
    revision: int
    state: str
    rounds: int
    sites: tuple[str, ...]
    metrics: tuple[str, ...]
    counts: str
    reported: tuple[ReportedNumbers, ...]
    means: tuple[ModelMeans, ...]
    sums_alone: bool = False

    @property
    def summed(self) -> str:
        """Over how many sites the means are: "3", or "2 to 3"."""
        counts = sorted({row.sites for row in self.means})
        return "" if not counts else str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"

    def curve(self, metric: str, site: str) -> tuple[tuple[int, float], ...]:
        """A site's ``metric`` by the model that it is of; what is no finite number is left out."""
        values = ((row.model, number(row.metrics.get(metric, ""))) for row in self.reported if row.site == site)
        return tuple((model, value) for model, value in values if value is not None)

    def mean_curve(self, metric: str) -> tuple[tuple[int, float], ...]:
        """The mean over the sites of ``metric``, by the model that it is of."""
        return tuple((row.model, row.metrics[metric]) for row in self.means if metric in row.metrics)


def number(text: str) -> float | None:
    """What a site reported, as a number; None of what is none, or not finite."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
