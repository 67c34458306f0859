"""[aggregation] of a study: how the sites' updates become one, and how many bad sites that tolerates.

``fl_algorithms.server.rules`` computes. What people read before they approve is said here, where the gateway can read
it.
"""

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from wardround.records.schema import Strict

Rule = Literal["mean", "clipped_mean", "median", "trimmed_mean", "krum", "multi_krum", "geometric_median"]
SETTINGS: Mapping[str, Mapping[str, float | None]] = {  # of each rule, with its default
    "mean": {},
    "clipped_mean": {"clip": 1.0, "clip_norm": None},
    "median": {},
    "trimmed_mean": {"bad_sites": 1},
    "krum": {"bad_sites": 1},
    "multi_krum": {"bad_sites": 1, "chosen": None},
    "geometric_median": {"smoothing": 1e-6},
}
WEIGHTED = ("mean", "clipped_mean")  # by rows as reported; in the others each site counts alike
FEWEST = 3  # updates, of which a median outvotes one
KRUM_MORE = 3  # updates beside twice the bad ones: n > 2 f + 2


class AggregationSection(Strict):
    """How the coordinator makes one update of the sites' updates, and the settings of the rule that does.

    Attributes:
        rule: the mean, or one that bounds what a few bad sites can do.
        bad_sites: of trimmed_mean, krum and multi_krum: how many bad sites the rule is set to stand, f.
        chosen: of multi_krum: how many updates are averaged, m. None: n - f - 2, the most for which there is a proof.
        clip: of clipped_mean: the largest norm of an update, in medians of the round's norms.
        clip_norm: of clipped_mean: the largest norm itself, in place of ``clip``.
        smoothing: of geometric_median: the smallest distance that an update is taken to have.
    """

    rule: Rule = "mean"
    bad_sites: int | None = Field(default=None, ge=1, le=127)
    chosen: int | None = Field(default=None, ge=1, le=256)
    clip: float | None = Field(default=None, gt=0, le=1000)
    clip_norm: float | None = Field(default=None, gt=0)
    smoothing: float | None = Field(default=None, gt=0, le=1)

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, table: Any) -> Any:
        if not isinstance(table, dict):
            return table
        defaults = dict(SETTINGS.get(str(table.get("rule", "mean")), {}))
        if table.get("clip_norm") is not None:
            defaults.pop("clip", None)
        given = {key: value for key, value in table.items() if value is not None}
        return {**{key: value for key, value in defaults.items() if value is not None}, **given}

    @model_validator(mode="after")
    def _of_the_rule(self) -> Self:
        for key in self.model_fields_set - {"rule"} - SETTINGS[self.rule].keys():
            rules = ", ".join(f"`{rule}`" for rule, settings in SETTINGS.items() if key in settings)
            raise ValueError(f"`{key}` belongs to {rules}, the rule is `{self.rule}`")
        if self.clip is not None and self.clip_norm is not None:
            raise ValueError("give either `clip` or `clip_norm`")
        return self

    @property
    def is_mean(self) -> bool:
        """Whether it is the mean, weighted by rows."""
        return self.rule == "mean"

    @property
    def is_weighted(self) -> bool:
        """Whether a site's rows count."""
        return self.rule in WEIGHTED

    @property
    def fewest(self) -> int:
        """The number of updates that the rule needs in a round."""
        bad = self.bad_sites or 0
        if self.rule == "trimmed_mean":
            return 2 * bad + 1
        if self.rule in ("krum", "multi_krum"):
            return max(2 * bad + KRUM_MORE, (self.chosen or 0) + bad + 2)
        return 1 if self.is_mean or self.clip_norm is not None else FEWEST

    def tolerates(self, updates: int) -> int:
        """How many bad sites of so many cannot carry the model away; of too few updates for the rule: none."""
        if self.is_weighted or updates < self.fewest:
            return 0
        return self.bad_sites if self.bad_sites is not None else (updates - 1) // 2

    @property
    def words(self) -> str:
        """What the rule makes of the updates."""
        bad = self.bad_sites or 0
        most = f"{self.clip_norm:g}" if self.clip_norm is not None else f"{self.clip or 1:g} medians"
        return {
            "mean": "the mean of the updates, weighted by rows",
            "clipped_mean": f"the mean of the updates, weighted by rows, each of which is shortened where its norm is "
            f"above {most}",
            "median": "the median of each value, each site counting alike",
            "trimmed_mean": f"the mean of each value without its {bad} smallest and {bad} largest, each site counting "
            "alike",
            "krum": "the one update that is nearest to its neighbors (Krum)",
            "multi_krum": f"the mean of the {self.chosen or f'n - {bad + 2}'} updates that are nearest to their "
            "neighbors (multi-Krum), each site counting alike",
            "geometric_median": "the geometric median of the updates, each site counting alike",
        }[self.rule]

    def sentence(self, sites: int, needed: int) -> str:
        """The rule, and how many bad sites it tolerates.

        Args:
            sites: of the study. needed: updates that close a round.
        """
        counts = [sites] if sites == needed else [sites, needed]
        told = " and ".join(f"{self.tolerates(n)} of {n}" for n in counts)
        if self.is_weighted:
            bounds = "" if self.is_mean else ", and bounds how far each may move the model"
            return f"a round's model is {self.words}: it tolerates no bad site{bounds}"
        return f"a round's model is {self.words}: it tolerates {told} sites being bad"
