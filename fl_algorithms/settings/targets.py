"""What a study predicts, as [task] says it: a class, a number, several labels, or the time to an event. No torch.

The same settings serve tables, images and data sets of one's own; ``fl_algorithms.tasks.objectives`` has the losses.
"""

import re
from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from wardround.records.schema import Strict

Range = tuple[float, float]

SHARE: Range = (0.0, 1.0)
ERROR: Range = (0.0, 1e6)  # in the unit of what is predicted
RATIO: Range = (-10.0, 10.0)  # of what can be any number; what lies outside is reported as the bound
RANGES: Mapping[str, Range] = {
    "accuracy": SHARE,
    "balanced_accuracy": SHARE,
    "auc": SHARE,
    "auprc": SHARE,
    "brier": (0.0, 2.0),
    "calibration_slope": RATIO,
    "calibration_intercept": RATIO,
    "macro_f1": SHARE,
    "kappa": (-1.0, 1.0),
    "mae": ERROR,
    "rmse": ERROR,
    "r2": (-10.0, 1.0),
    "c_index": SHARE,
    "integrated_brier": SHARE,
    "dice": SHARE,
    "hausdorff95": (0.0, 1e4),  # mm, or pixels
}
SMALLER_IS_BETTER = frozenset({"val_loss", "brier", "mae", "rmse", "integrated_brier", "hausdorff95"})

ClassMetric = Literal[
    "accuracy", "balanced_accuracy", "auc", "auprc", "brier", "calibration_slope", "calibration_intercept", "macro_f1"
]
ClassHeadline = Literal["auc", "auprc", "brier", "accuracy", "balanced_accuracy", "macro_f1"]
CLASS_METRICS: tuple[ClassMetric, ...] = (
    "accuracy", "balanced_accuracy", "auc", "macro_f1", "auprc", "brier", "calibration_slope", "calibration_intercept",
)  # fmt: skip
LABEL_METRICS = ("auc", "auprc", "brier", "macro_f1")
NUMBER_METRICS = ("mae", "rmse", "r2")
ORDINAL_METRICS = ("kappa", "mae", "accuracy", "macro_f1")
SURVIVAL_METRICS = ("c_index", "integrated_brier")

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


def repeated(texts: list[str]) -> str | None:
    """The first that stands twice."""
    return next((text for text, count in Counter(texts).items() if count > 1), None)


def check_levels(levels: tuple[str, ...], what: str) -> None:
    """Raises ValueError: one is empty, or two are the same."""
    if not all(text.strip() for text in levels):
        raise ValueError(f"{what} has an empty entry")
    if twice := repeated([level(text) for text in levels]):
        raise ValueError(f"{what} has `{twice}` twice")


def _weights(value: Any) -> Any:
    if value in ("none", "balanced"):
        return value
    if isinstance(value, list | tuple) and all(_positive(weight) for weight in value):
        return tuple(float(weight) for weight in value)
    raise ValueError('not "none", "balanced", or one positive number for each class')


def _positive(weight: Any) -> bool:
    try:
        return not isinstance(weight, bool) and 0 < float(weight) <= 1e6
    except (TypeError, ValueError):
        return False


Weights = Annotated[str | tuple[float, ...], BeforeValidator(_weights)]


def check_weights(weights: str | tuple[float, ...], classes: tuple[str, ...]) -> None:
    """Raises ValueError: they are numbers, but not one for each class."""
    if not isinstance(weights, str) and len(weights) != len(classes):
        raise ValueError(f"`class_weights` has {len(weights)} numbers, there are {len(classes)} classes")


class ClassTarget(Strict):
    """Each row is of one of two or more classes.

    Attributes:
        classes: of two, the last is the positive one.
        class_weights: of the loss: "balanced" is n / (classes x n of the class) among a site's training rows; or one
            number for each class.
        loss: the focal loss looks less at rows that are right already (Lin et al., ICCV 2017).
        gamma: of the focal loss: how much less.
        headline: what a checkpoint's score is.
        threshold: of two classes, for `site-agent predict`: the one of the highest balanced accuracy on the site's
            validation rows, or 0.5.
    """

    classes: tuple[Level, ...] = Field(min_length=2)
    class_weights: Weights = "none"
    loss: Literal["cross_entropy", "focal"] = "cross_entropy"
    gamma: float = Field(default=2.0, ge=0, le=10)
    headline: ClassHeadline = "auc"
    threshold: Literal["balanced_accuracy", "half"] = "balanced_accuracy"

    @model_validator(mode="after")
    def _classes_and_weights(self) -> Self:
        check_levels(self.classes, "`classes`")
        check_weights(self.class_weights, self.classes)
        return self

    @property
    def metrics(self) -> tuple[str, ...]:
        """Those that a study may report."""
        return CLASS_METRICS if len(self.classes) == 2 else CLASS_METRICS[:6]


class OrdinalTarget(Strict):
    """Each row is of one of three or more classes that have an order."""

    classes: tuple[Level, ...] = Field(min_length=3, max_length=1000)  # from the least to the most
    headline: Literal["kappa", "mae", "accuracy", "macro_f1"] = "kappa"  # what a checkpoint's score is

    @model_validator(mode="after")
    def _classes_in_order(self) -> Self:
        check_levels(self.classes, "`classes`")
        return self

    @property
    def metrics(self) -> tuple[str, ...]:
        """Those that a study may report."""
        return ORDINAL_METRICS


class NumberTarget(Strict):
    """A number for each row: a length of stay, a pressure.

    Attributes:
        mean, std: a network learns (number - mean) / std, with these for all sites; scores and predictions are in the
            number's own unit.
        lowest, highest: what is beyond is refused, as a wrong unit or a code for "missing".
        loss: of the standardized number; huber's border is 1.
        headline: what a checkpoint's score is.
    """

    mean: float = 0.0
    std: float = Field(default=1.0, gt=0)
    lowest: float | None = None
    highest: float | None = None
    loss: Literal["squared", "absolute", "huber"] = "squared"
    headline: Literal["mae", "rmse", "r2"] = "mae"

    @model_validator(mode="after")
    def _lowest_and_highest(self) -> Self:
        if self.lowest is not None and self.highest is not None and self.lowest >= self.highest:
            raise ValueError(f"`lowest` is {self.lowest:g} and `highest` {self.highest:g}")
        return self

    @property
    def metrics(self) -> tuple[str, ...]:
        """Those that a study may report."""
        return NUMBER_METRICS


class LabelsTarget(Strict):
    """Several findings for each row, each there or not: a network gives a number for each."""

    labels: tuple[str, ...] = Field(min_length=2, max_length=1000)  # columns, or names in the order of a row's y
    headline: Literal["auc", "auprc", "brier", "macro_f1"] = "auc"  # what a checkpoint's score is
    threshold: Literal["balanced_accuracy", "half"] = "balanced_accuracy"  # of each label, for `site-agent predict`

    @model_validator(mode="after")
    def _labels(self) -> Self:
        check_levels(self.labels, "`labels`")
        return self

    @property
    def metrics(self) -> tuple[str, ...]:
        """Those that a study may report."""
        return LABEL_METRICS


class SurvivalTarget(Strict):
    """The time to an event, or to the end of what is known of a patient (censoring): Cox's proportional hazards.

    Attributes:
        horizons: in the unit of time: for which survival is predicted, and over which the Brier score is integrated.
        headline: what a checkpoint's score is.
    """

    horizons: tuple[Annotated[float, Field(gt=0)], ...] = Field(min_length=1, max_length=64)
    headline: Literal["c_index", "integrated_brier"] = "c_index"

    @model_validator(mode="after")
    def _rising(self) -> Self:
        if list(self.horizons) != sorted(set(self.horizons)):
            raise ValueError(f"`horizons` {list(self.horizons)} does not rise")
        return self

    @property
    def metrics(self) -> tuple[str, ...]:
        """Those that a study may report."""
        return SURVIVAL_METRICS
