"""The schema of a tabular study: columns, categories, classes, and what to do with missing values.

All sites share it, so that the same column means the same input everywhere, whatever a hospital happens to have seen.
"""

import datetime
import re
from typing import Any, Literal, Self

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from fl_algorithms.settings.targets import (
    ClassTarget,
    LabelsTarget,
    Level,
    NumberTarget,
    OrdinalTarget,
    SurvivalTarget,
    check_levels,
    level,
    repeated,
)
from wardround.records.schema import Strict

_ISO_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")


def check_column(name: str, what: str) -> str:
    """``name``, if a column may be called that."""
    if not name or name != name.strip() or not name.isprintable() or len(name) > 200:
        raise ValueError(f"{what} {name[:60]!r} is not 1 to 200 printable characters without spaces around")
    return name


def iso_date(text: str) -> datetime.date | None:
    """The date that ``text`` is as YYYY-MM-DD; None if it is none."""
    try:
        return datetime.date.fromisoformat(text) if _ISO_DATE.fullmatch(text) else None
    except ValueError:
        return None


class Feature(Strict):
    """One input that a table gives: a column, or the time between two dates.

    Attributes:
        name: the column's, in the study; a hospital may call its own otherwise (`site-agent data map`).
        kind: ``boolean`` is yes or no in any usual spelling, one input of 1 or 0. ``date`` is a column of dates, and
            the input is the time from it to ``until``.
        categories: of a categorical feature; the first is the one that the others are told apart from.
        other: the one of ``categories`` that a text which is none of them counts as; without it such a text is refused.
        mean, std: the study's own scale for all sites, in place of each site's statistics.
        low, high: what a number must lie between, both included. Of a date, the time.
        outside: what a number that does not is: refused with its line, or missing as an empty cell is.
        until: of a date, another column of dates, or one date for all rows (YYYY-MM-DD).
        unit: of a date, what the time is counted in; a year is 365.25 days.
    """

    name: str
    kind: Literal["numeric", "categorical", "boolean", "date"] = "numeric"
    categories: tuple[Level, ...] = ()
    other: Level | None = None
    mean: float | None = None
    std: float | None = Field(default=None, gt=0)
    low: float | None = None
    high: float | None = None
    outside: Literal["refuse", "missing"] = "refuse"
    until: str = ""
    unit: Literal["years", "days"] | None = None

    @field_validator("name")
    @classmethod
    def _name(cls, name: str) -> str:
        return check_column(name, "feature")

    @model_validator(mode="after")
    def _of_its_kind(self) -> Self:
        given = {key for key, default in OF_KIND if getattr(self, key) != default}
        for key in sorted(given):
            kinds = KINDS_WITH[key]
            if self.kind not in kinds:
                has = f"has {key}" if key == "categories" else f"has a `{key}`"
                raise ValueError(f'feature `{self.name}` {has}, but its kind is "{self.kind}"')
        if (self.mean is None) != (self.std is None):
            raise ValueError(f"feature `{self.name}` has one of `mean` and `std`; a scale is both")
        if self.kind == "categorical":
            if len(self.categories) < 2:
                raise ValueError(f"feature `{self.name}` needs at least 2 categories, found {len(self.categories)}")
            check_levels(self.categories, f"feature `{self.name}`")
            if self.other is not None and level(self.other) not in map(level, self.categories):
                raise ValueError(f"feature `{self.name}`: `other` is none of its categories")
        return self

    @model_validator(mode="after")
    def _range(self) -> Self:
        if self.low is not None and self.high is not None and not self.low < self.high:
            raise ValueError(f"feature `{self.name}`: `low` is {self.low:g} and `high` {self.high:g}; low is the lower")
        if self.outside == "missing" and not self.has_range:
            raise ValueError(f"feature `{self.name}` says what is `outside`, but has neither `low` nor `high`")
        return self

    @model_validator(mode="after")
    def _ends(self) -> Self:
        if self.kind != "date":
            return self
        if not self.until:
            raise ValueError(f"feature `{self.name}` is a date and needs `until`: a column, or one date (YYYY-MM-DD)")
        if iso_date(self.until) is None:
            check_column(self.until, "the column `until`")
        if self.until == self.name:
            raise ValueError(f"feature `{self.name}` is counted until itself")
        return self

    @model_serializer(mode="wrap")
    def _as_written(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Keys that most features do without stand where they are used: a study of sixty features stays readable."""
        document: dict[str, Any] = handler(self)
        return {key: value for key, value in document.items() if key not in SPARE or value != SPARE[key]}

    @property
    def has_range(self) -> bool:
        """Whether the study says between which numbers it lies."""
        return self.low is not None or self.high is not None

    @property
    def is_number(self) -> bool:
        """Whether it is one input that may need a scale."""
        return self.kind in ("numeric", "date")

    @property
    def until_column(self) -> str:
        """The column that a date is counted to; "" where there is none."""
        return self.until if self.kind == "date" and iso_date(self.until) is None else ""


KINDS_WITH = {  # key -> the kinds that may have it
    "categories": ("categorical",), "other": ("categorical",),
    "mean": ("numeric", "date"), "std": ("numeric", "date"),
    "low": ("numeric", "date"), "high": ("numeric", "date"), "outside": ("numeric", "date"),
    "until": ("date",), "unit": ("date",),
}  # fmt: skip
OF_KIND = tuple((key, Feature.model_fields[key].default) for key in KINDS_WITH)
SPARE = {"other": None, "low": None, "high": None, "outside": "refuse", "until": "", "unit": None}


class Missing(Strict):
    """What a cell without a value means.

    Attributes:
        policy: ``refuse`` takes no such table. ``drop_row`` leaves the row out. ``median`` fills in the median of the
            site's own table (the most frequent category, of a categorical feature) and tells so in an extra input, the
            feature's indicator.
        indicators: the features that may be missing, with ``median``; only these are filled.
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


def check_no_blank(text: str, missing: Missing) -> None:
    """Refuse a class or category that is also written for a missing value."""
    if text.strip().casefold() in missing.blanks:
        raise ValueError(f"`{text}` is a class or category, and also written for a missing value")


class TableSettings(Strict):
    """What [task] says of a table's inputs and rows, whatever is to be predicted from them.

    Attributes:
        patient: the column of the patient in the lab's data, all of whose rows are in one part; "": each row is one.
        duplicates: what rows that occur twice, test rows that are among the training rows, and patients who are in
            both tables are: a warning with their number, or a reason to refuse the table.
    """

    features: tuple[Feature, ...] = Field(min_length=1)
    missing: Missing = Field(default_factory=Missing)
    patient: str = ""
    duplicates: Literal["warn", "refuse"] = "warn"

    @field_validator("features", mode="before")
    @classmethod
    def _numeric_by_name(cls, features: Any) -> Any:
        """``"age"`` alone is a numeric feature."""
        if not isinstance(features, list | tuple):
            return features
        return [{"name": feature} if isinstance(feature, str) else feature for feature in features]

    @field_validator("patient")
    @classmethod
    def _patient(cls, patient: str) -> str:
        return check_column(patient, "the column `patient`") if patient else patient

    @model_validator(mode="after")
    def _features(self) -> Self:
        names = [feature.name for feature in self.features]
        if twice := repeated(names):
            raise ValueError(f"feature `{twice}` stands twice")
        if self.patient in names:
            raise ValueError(f"`{self.patient}` is the patient and a feature")
        for name in self.missing.indicators:
            if name not in names:
                raise ValueError(f"indicator `{name}` is no feature")
        for target in self.targets:
            if target in names:
                raise ValueError(f"`{target}` is the label and a feature")
            if target == self.patient:
                raise ValueError(f"`{target}` is the label and the patient")
        if twice := repeated(list(self.targets)):
            raise ValueError(f"`{twice}` is to be predicted twice")
        for text in (*self.target_levels, *(text for feature in self.features for text in feature.categories)):
            check_no_blank(text, self.missing)
        for feature in self.features:
            kept = self.missing.policy != "drop_row" and feature.name not in self.missing.indicators
            if feature.outside == "missing" and kept:
                raise ValueError(
                    f'feature `{feature.name}`: `outside = "missing"` needs [task.missing] to say what a missing value '
                    'becomes: policy "drop_row", or "median" with its indicator'
                )
        if twice := repeated(list(self.columns)):
            raise ValueError(f"two inputs are called `{twice}`")
        return self

    @property
    def targets(self) -> tuple[str, ...]:
        """The columns of what is to be predicted, as the study names them."""
        return ()

    @property
    def target_levels(self) -> tuple[str, ...]:
        """The words that may stand in those columns; () where they hold numbers."""
        return ()

    @property
    def read(self) -> tuple[str, ...]:
        """The columns that the features are read from, each once."""
        ends = (feature.until_column for feature in self.features if feature.until_column)
        return tuple(dict.fromkeys((*(feature.name for feature in self.features), *ends)))

    @property
    def columns(self) -> tuple[str, ...]:
        """The encoded inputs in their order: features, one per level after the first, then the indicators."""
        encoded: list[str] = []
        for feature in self.features:
            if feature.kind == "categorical":
                encoded += [f"{feature.name}={level(text)}" for text in feature.categories[1:]]
            else:
                encoded.append(feature.name)
        return (*encoded, *(f"missing({name})" for name in self.missing.indicators))

    @property
    def unscaled(self) -> tuple[str, ...]:
        """The features whose scale the study leaves to each site's statistics."""
        return tuple(f.name for f in self.features if f.is_number and f.mean is None)

    @property
    def one_scale(self) -> bool:
        """Whether the study gives the scale of each of its numbers, so that no site's statistics enter the inputs."""
        return not self.unscaled

    @property
    def inputs(self) -> int:
        """How many numbers a network is fed for each row."""
        return len(self.columns)


class LabelSettings(TableSettings):
    """One column is to be predicted.

    Attributes:
        label: its name in the lab's data; a hospital may call its own otherwise.
    """

    label: str = Field(min_length=1)

    @property
    def targets(self) -> tuple[str, ...]:
        return (self.label,)


class TabularSettings(LabelSettings, ClassTarget):
    """[task] of a study whose task is ``tabular``: the class in a column.

    Attributes:
        stratified: whether the validation part has each class's share of the rows.
    """

    stratified: bool = False

    @property
    def target_levels(self) -> tuple[str, ...]:
        return self.classes


class OrdinalSettings(LabelSettings, OrdinalTarget):
    """[task] of a study whose task is ``ordinal``: the class in a column, of classes in order.

    Attributes:
        stratified: whether the validation part has each class's share of the rows.
    """

    stratified: bool = False

    @property
    def target_levels(self) -> tuple[str, ...]:
        return self.classes


class RegressionSettings(LabelSettings, NumberTarget):
    """[task] of a study whose task is ``regression``: the number in a column."""


class MultilabelSettings(TableSettings, LabelsTarget):
    """[task] of a study whose task is ``multilabel``: a column for each finding.

    Attributes:
        absent, present: what stands in a finding's column where it is not there, and where it is.
    """

    absent: Level = "0"
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


class SurvivalSettings(TableSettings, SurvivalTarget):
    """[task] of a study whose task is ``survival``: a column of times, and one that says whether the event happened.

    Attributes:
        time: the column of times, all above 0.
        event: the column that says whether the event happened then.
        censored, happened: what stands in the column ``event`` of a patient who was seen no longer, and of one with it.
        stratified: whether the validation part has the events' share of the rows.
    """

    time: str = Field(min_length=1)
    event: str = Field(min_length=1)
    censored: Level = "0"
    happened: Level = "1"
    stratified: bool = True

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
