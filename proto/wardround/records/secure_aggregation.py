"""[secure_aggregation] of a study: whether sums alone are learned, and in which numbers.

``wardround.secure`` computes; ``fl_algorithms.server.secure_study`` says which studies it goes with.
"""

from pydantic import Field, field_validator

from wardround.records.schema import Strict
from wardround.secure.rules import Rules

HEX = frozenset("0123456789abcdef")


class SecureAggregationSection(Strict):
    """With this table, updates are integers with masks, which only the sum over enough sites is without. In the lab
    `fl-lab run --masked` does the same.

    Attributes:
        range: the largest size of a value in an update; a site with a larger one is not in the round.
        largest_weight: the most rows that a site counts for, where sites count by their rows.
        threshold: how many sites must agree before a sum is opened. None: floor(2 n / 3) + 1 of n sites.
        colluding: how many members may work with the coordinator without learning more than a sum.
        roster: site -> its ledger key (hex). The coordinator writes it when the study is created; so it is in what the
            sites approve. Empty in the lab.
    """

    range: float = Field(default=1.0, gt=0, le=2**20)
    largest_weight: int = Field(default=65_536, ge=1, le=2**24)
    threshold: int | None = Field(default=None, ge=1, le=255)
    colluding: int = Field(default=1, ge=1, le=253)
    roster: dict[str, str] = Field(default_factory=dict, max_length=255)

    @field_validator("roster")
    @classmethod
    def _roster(cls, roster: dict[str, str]) -> dict[str, str]:
        for site, key in roster.items():
            if len(site) > 64 or len(key) != 64 or not set(key) <= HEX:
                raise ValueError(f"the key of {site[:64]!r} is not 64 hexadecimal digits")
        return dict(sorted(roster.items()))

    def rules(self, sites: int) -> Rules:
        """Raises BadData: a threshold that does not stand so many colluding sites of so many."""
        return Rules.of(sites, self.threshold, self.colluding)
