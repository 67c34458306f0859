"""The schema of a tabular study: columns, categories, classes, and what to do with missing values.

All sites share it, so that the same column means the same input everywhere, whatever a hospital happens to have seen.
"""

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from fl_algorithms.settings.targets import (
    ClassTarget,
    LabelsTarget,
    Level,
    NumberTarget,
    SurvivalTarget,
    check_levels,
    level,
    repeated,
)
from wardround.records.schema import Strict


class Feature(Strict):
    """One column of the table."""

    name: str
    kind: Literal["numeric", "categorical"] = "numeric"
    categories: tuple[Level, ...] = ()  # categorical only; the first is the one the others are told apart from
    mean: float | None = None  # numeric only: the study's own scale for all sites, in place of each site's statistics
    std: float | None = Field(default=None, gt=0)

    @field_validator("name")
    @classmethod
    def _name(cls, name: str) -> str:
        if not name or name != name.strip() or not name.isprintable() or len(name) > 200:
            raise ValueError(f"feature {name[:60]!r} is not 1 to 200 printable characters without spaces around")
        return name

    @model_validator(mode="after")
    def _categories(self) -> Self:
        if self.kind == "numeric" and self.categories:
            raise ValueError(f'feature `{self.name}` has categories, but its kind is "numeric"')
        if (self.mean is None) != (self.std is None):
            raise ValueError(f"feature `{self.name}` has one of `mean` and `std`; a scale is both")
        if self.kind == "categorical" and self.mean is not None:
            raise ValueError(f'feature `{self.name}` has a `mean`, but its kind is "categorical"')
        if self.kind == "categorical":
            if len(self.categories) < 2:
                raise ValueError(f"feature `{self.name}` needs at least 2 categories, found {len(self.categories)}")
            check_levels(self.categories, f"feature `{self.name}`")
        return self


class Missing(Strict):
    """What a cell without a value means.

    ``refuse`` takes no such table. ``drop_row`` leaves the row out. ``median`` fills in the median of the site's own
    table (the most frequent category, of a categorical feature) and tells so in an extra input, the feature's
    indicator; only features with an indicator are filled.
    """

    policy: Literal["refuse", "drop_row", "median"] = "refuse"
    tokens: tuple[str, ...] = ("", "?", "NA", "N/A", "NULL")  # compared without spaces around and without case
    indicators: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _indicators(self) -> Self:
        if self.policy == "median" and not self.indicators:
            raise ValueError('policy "median" needs `indicators`: the features that may be missing')
        if self.policy != "median" and self.indicators:
            raise ValueError(f'`indicators` belong to policy "median", the policy is "{self.policy}"')
        if twice := repeated(list(self.indicators)):
            raise ValueError(f"indicator `{twice}` stands twice")
        return self

    @property
    def blanks(self) -> frozenset[str]:
        """The tokens in the form in which a cell is compared with them: stripped and case-folded."""
        return frozenset(token.strip().casefold() for token in self.tokens)


class TableSettings(Strict):
    """What the tasks of tables have in common: the columns that a network sees."""

    features: tuple[Feature, ...] = Field(min_length=1)
    missing: Missing = Missing()

    @field_validator("features", mode="before")
    @classmethod
    def _numeric_by_name(cls, features: Any) -> Any:
        """``"age"`` alone is a numeric feature."""
        if not isinstance(features, list | tuple):
            return features
        return [{"name": feature} if isinstance(feature, str) else feature for feature in features]

    @model_validator(mode="after")
    def _whole(self) -> Self:
        names = [feature.name for feature in self.features]
        if twice := repeated(names):
            raise ValueError(f"feature `{twice}` stands twice")
        for target in self.targets:
            if target in names:
                raise ValueError(f"`{target}` is the label and a feature")
        if twice := repeated(list(self.targets)):
            raise ValueError(f"`{twice}` is to be predicted twice")
        for name in self.missing.indicators:
            if name not in names:
                raise ValueError(f"indicator `{name}` is no feature")
        categories = [text for feature in self.features for text in feature.categories]
        for text in (*self.target_levels, *categories):
            if text.strip().casefold() in self.missing.blanks:
                raise ValueError(f"`{text}` is a class or category, and also written for a missing value")
        if twice := repeated(list(self.columns)):
            raise ValueError(f"two inputs are called `{twice}`")
        return self

    @property
    def targets(self) -> tuple[str, ...]:
        """The columns of what is to be predicted, as the study names them."""
        return ()

    @property
    def target_levels(self) -> tuple[str, ...]:
        """The words that may stand in those columns."""
        return ()

    @property
    def columns(self) -> tuple[str, ...]:
        """The encoded inputs in their order: features, one per level after the first, then the indicators."""
        encoded: list[str] = []
        for feature in self.features:
            if feature.kind == "numeric":
                encoded.append(feature.name)
            else:
                encoded += [f"{feature.name}={level(text)}" for text in feature.categories[1:]]
        return (*encoded, *(f"missing({name})" for name in self.missing.indicators))

    @property
    def unscaled(self) -> tuple[str, ...]:
        """The numeric features whose scale the study leaves to each site's statistics."""
        return tuple(f.name for f in self.features if f.kind == "numeric" and f.mean is None)

    @property
    def one_scale(self) -> bool:
        """Whether the study gives the scale of each of its numbers, so that no site's statistics enter the inputs."""
        return not self.unscaled

    @property
    def inputs(self) -> int:
        """How many numbers a network is fed for each row."""
        return len(self.columns)


class LabelSettings(TableSettings):
    """One column is to be predicted."""

    label: str = Field(min_length=1)  # its name in the lab's data; a hospital may call its own otherwise

    @property
    def targets(self) -> tuple[str, ...]:
        return (self.label,)


class TabularSettings(ClassTarget, LabelSettings):
    """[task] of a study whose task is ``tabular``: the class in a column."""

    @property
    def target_levels(self) -> tuple[str, ...]:
        return self.classes


class RegressionSettings(NumberTarget, LabelSettings):
    """[task] of a study whose task is ``regression``: the number in a column."""


class MultilabelSettings(LabelsTarget, TableSettings):
    """[task] of a study whose task is ``multilabel``: a column for each finding."""

    absent: Level = "0"  # what stands in a finding's column where it is not there, and where it is
    present: Level = "1"

    @property
    def targets(self) -> tuple[str, ...]:
        return self.labels

    @property
    def target_levels(self) -> tuple[str, ...]:
        return (self.absent, self.present)

    @model_validator(mode="after")
    def _absent_and_present(self) -> Self:
        check_levels(self.target_levels, "`absent` and `present`")
        return self


class SurvivalSettings(SurvivalTarget, TableSettings):
    """[task] of a study whose task is ``survival``: a column of times, and one that says whether the event happened."""

    time: str = Field(min_length=1)
    event: str = Field(min_length=1)
    censored: Level = "0"  # what stands in the column ``event`` of a patient seen no longer, and of one who had it
    happened: Level = "1"

    @property
    def targets(self) -> tuple[str, ...]:
        return (self.time, self.event)

    @property
    def target_levels(self) -> tuple[str, ...]:
        return (self.censored, self.happened)

    @model_validator(mode="after")
    def _censored_and_happened(self) -> Self:
        check_levels(self.target_levels, "`censored` and `happened`")
        return self
