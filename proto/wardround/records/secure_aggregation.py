"""[secure_aggregation] of a study: whether sums alone are learned, and in which numbers.

``wardround.secure`` computes; ``fl_algorithms.server.secure_study`` says which studies it goes with.
"""

from pydantic import Field

from wardround.records.schema import Strict
from wardround.secure.rules import Rules


class SecureAggregationSection(Strict):
    """With this table, updates are integers with masks, which only the sum over enough sites is without. In the lab
    alone so far: `fl-lab run --masked`.

    Attributes:
        range: the largest size of a value in an update; a site with a larger one is not in the round.
        largest_weight: the most rows that a site counts for, where sites count by their rows.
        threshold: how many sites must agree before a sum is opened. None: floor(2 n / 3) + 1 of n sites.
        colluding: how many members may work with the coordinator without learning more than a sum.
    """

    range: float = Field(default=1.0, gt=0, le=2**20)
    largest_weight: int = Field(default=65_536, ge=1, le=2**24)
    threshold: int | None = Field(default=None, ge=1, le=255)
    colluding: int = Field(default=1, ge=1, le=253)

    def rules(self, sites: int) -> Rules:
        """Raises BadData: a threshold that does not stand so many colluding sites of so many."""
        return Rules.of(sites, self.threshold, self.colluding)
