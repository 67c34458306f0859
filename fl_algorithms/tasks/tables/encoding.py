"""From numbers and category indices to standardized inputs. No torch.

``fit`` takes medians, means and standard deviations from all rows of the site's own table; ``encode`` applies them to
any rows. What a cell means is decided in ``reading``.
"""

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_algorithms.settings.tabular import TableSettings
from fl_algorithms.tasks.tables.mapping import SiteMapping
from fl_algorithms.tasks.tables.reading import Floats, Values, levels_of
from wardround.errors import BadData
from wardround.records.schema import Strict, check
from wardround.signing import canonical

EPSILON = 1e-9  # added to each standard deviation, as FLamby does
MAX_STANDARDIZED = 1e6  # a cell so far from all that the fit has seen counts as this far, and float32 stays finite


class Preprocessing(Strict):
    """What ``fit`` learned from one site's table; computed from patients, so it stays at the site."""

    columns: tuple[str, ...]  # the encoded inputs that ``mean`` and ``std`` belong to
    mean: tuple[float, ...]
    std: tuple[float, ...]  # unbiased (n - 1); 0 for a column that is the same in every row
    medians: dict[str, float]  # of the numeric features that may be missing
    commonest: dict[str, str]  # of the categorical features that may be missing
    mapping: SiteMapping | None = None  # how this site's tables become the study's, new rows too

    def document(self) -> dict[str, Any]:
        """Plain JSON, numbers as their shortest round-trip text."""
        absent = {"mapping"} if self.mapping is None else set()
        document = canonical.with_text_floats(self.model_dump(mode="json", exclude=absent))
        assert isinstance(document, dict)
        return document

    @classmethod
    def from_document(cls, document: Mapping[str, Any], settings: TableSettings) -> "Preprocessing":
        """What ``document()`` gave.

        Raises:
            BadData: it is not that, or was fitted for other inputs than the study's.
        """
        source = "preprocessing.json"
        found = check(cls, dict(document), source)
        if found.columns != settings.columns:
            raise BadData(
                f"{source}: fitted for {len(found.columns)} inputs that are not the {settings.inputs} of the study",
                hint="use the file that lies beside the checkpoint",
            )
        may_be_missing = {feature.name: feature for feature in settings.features} if settings.missing.indicators else {}
        fitted = {*found.medians, *found.commonest}
        if not len(found.mean) == len(found.std) == len(found.columns) or fitted != set(settings.missing.indicators):
            raise BadData(f"{source}: its parts do not belong together", hint="use the file beside the checkpoint")
        for name, text in found.commonest.items():
            if text not in levels_of(may_be_missing[name]):
                raise BadData(f"{source}: feature `{name}` is filled with no category of the study")
        return found


def fit(values: Values, settings: TableSettings, mapping: SiteMapping | None = None) -> Preprocessing:
    """The statistics of a site's own table, from all of its rows, in float64 and correctly rounded sums.

    A feature whose scale the study gives has that one. If all numeric ones have, categories and indicators are 0 and 1
    as they stand, so that a row is the same input at every site.
    """
    medians: dict[str, float] = {}
    commonest: dict[str, str] = {}
    for feature in settings.features:
        if feature.name not in settings.missing.indicators:
            continue
        seen = values[feature.name][~np.isnan(values[feature.name])]
        if feature.kind != "categorical":
            median = float(np.median(seen)) if len(seen) else 0.0
            medians[feature.name] = float(median > 1 / 2) if feature.kind == "boolean" else median
        else:
            counts = Counter(seen.astype(int).tolist())
            place = min(counts, key=lambda place: (-counts[place], place)) if counts else 0
            commonest[feature.name] = levels_of(feature)[place]
    columns = _matrix(values, settings, medians, commonest).T.tolist()
    mean = [math.fsum(column) / len(column) for column in columns]
    std = [_deviation(column, center) for column, center in zip(columns, mean, strict=True)]
    if settings.one_scale:
        given = scale_of(settings)
        mean, std = list(given.mean), list(given.std)
    for feature in settings.features:
        if feature.mean is not None and feature.std is not None:
            place = settings.columns.index(feature.name)
            mean[place], std[place] = feature.mean, feature.std
    return Preprocessing(
        columns=settings.columns,
        mean=tuple(mean),
        std=tuple(std),
        medians=medians,
        commonest=commonest,
        mapping=mapping,
    )


def scale_of(settings: TableSettings) -> Preprocessing:
    """The scale of a study of ``one_scale``, for rows without missing values."""
    given = {feature.name: (feature.mean or 0.0, feature.std or 1.0) for feature in settings.features}
    pairs = [given.get(column, (0.0, 1.0)) for column in settings.columns]
    mean, std = (tuple(pair[i] for pair in pairs) for i in (0, 1))
    return Preprocessing(columns=settings.columns, mean=mean, std=std, medians={}, commonest={})


def encode(values: Values, settings: TableSettings, fitted: Preprocessing) -> NDArray[np.float32]:
    """The rows on the fit's scale: (n, inputs), (x - mean) / (std + 1e-9).

    A column that was constant in the fit is 0, whatever it holds here: 1e-9 would make an explosion of any difference.
    """
    matrix = _matrix(values, settings, fitted.medians, fitted.commonest)
    std = np.array(fitted.std)
    scaled: Floats = (matrix - np.array(fitted.mean)) / (std + EPSILON)
    scaled[:, std == 0] = 0.0
    return scaled.clip(-MAX_STANDARDIZED, MAX_STANDARDIZED).astype(np.float32)


def _matrix(
    values: Values, settings: TableSettings, medians: Mapping[str, float], commonest: Mapping[str, str]
) -> Floats:
    """The inputs before standardization: (n, inputs), in the order of ``settings.columns``, gaps filled."""
    columns: list[Floats] = []
    for feature in settings.features:
        cells = values[feature.name]
        if feature.kind != "categorical":
            columns.append(np.where(np.isnan(cells), medians.get(feature.name, math.nan), cells))
        else:
            fill = levels_of(feature).index(commonest[feature.name]) if feature.name in commonest else math.nan
            filled = np.where(np.isnan(cells), fill, cells)
            columns += [(filled == place).astype(np.float64) for place in range(1, len(feature.categories))]
    columns += [np.isnan(values[name]).astype(np.float64) for name in settings.missing.indicators]
    return np.stack(columns, axis=1)


def _deviation(column: list[float], mean: float) -> float:
    """The unbiased standard deviation; 0 for one row, or rows that are all alike."""
    if min(column) == max(column):
        return 0.0
    return math.sqrt(math.fsum((value - mean) ** 2 for value in column) / (len(column) - 1))
