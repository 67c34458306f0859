"""The schema of a tabular study: columns, categories, classes, and what to do with missing values.

All sites share it, so that the same column means the same input everywhere, whatever a hospital happens to have seen.
"""

import re
from collections import Counter
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from wardround.records.schema import Strict

Metric = Literal["accuracy", "balanced_accuracy", "auc", "macro_f1"]

_WHOLE_OR_DECIMAL = re.compile(r"(?P<sign>[+-]?)(?P<whole>[0-9]+)(?:\.(?P<part>[0-9]*))?")


def level(text: str) -> str:
    """A category or class in the form in which two are compared: "3", "3.0" and " 3 " are all "3".

    Case counts, and so does an exponent: a code such as "3E1" is not the number 30.
    """
    text = text.strip()
    number = _WHOLE_OR_DECIMAL.fullmatch(text)
    if number is None:
        return text
    whole, part = number["whole"].lstrip("0") or "0", (number["part"] or "").rstrip("0")
    written = f"{whole}.{part}" if part else whole
    return f"-{written}" if number["sign"] == "-" and written != "0" else written


def _text(value: Any) -> Any:
    """TOML's ``categories = [1, 2, 3]`` is as good as text; a boolean is not a number here."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


Level = Annotated[str, BeforeValidator(_text)]


def _repeated(texts: list[str]) -> str | None:
    return next((text for text, count in Counter(texts).items() if count > 1), None)


def check_levels(levels: tuple[str, ...], what: str) -> None:
    if not all(text.strip() for text in levels):
        raise ValueError(f"{what} has an empty entry")
    if twice := _repeated([level(text) for text in levels]):
        raise ValueError(f"{what} has `{twice}` twice")


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
        if twice := _repeated(list(self.indicators)):
            raise ValueError(f"indicator `{twice}` stands twice")
        return self

    @property
    def blanks(self) -> frozenset[str]:
        """The tokens in the form in which a cell is compared with them: stripped and case-folded."""
        return frozenset(token.strip().casefold() for token in self.tokens)


class TabularSettings(Strict):
    """[task] of a study whose task is ``tabular``."""

    label: str = Field(min_length=1)  # the class's column in the lab's data; a hospital may call its own otherwise
    classes: tuple[Level, ...] = Field(min_length=2)  # of two, the last is the positive one
    features: tuple[Feature, ...] = Field(min_length=1)
    missing: Missing = Missing()
    metric: Metric = "accuracy"  # what a checkpoint's score is

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
        if twice := _repeated(names):
            raise ValueError(f"feature `{twice}` stands twice")
        if self.label in names:
            raise ValueError(f"`{self.label}` is the label and a feature")
        check_levels(self.classes, "`classes`")
        for name in self.missing.indicators:
            if name not in names:
                raise ValueError(f"indicator `{name}` is no feature")
        for text in (*self.classes, *(text for feature in self.features for text in feature.categories)):
            if text.strip().casefold() in self.missing.blanks:
                raise ValueError(f"`{text}` is a class or category, and also written for a missing value")
        if twice := _repeated(list(self.columns)):
            raise ValueError(f"two inputs are called `{twice}`")
        return self

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
