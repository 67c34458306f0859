"""From columns of text to standardized numbers: what each cell means, which rows count, and on what scale. No torch.

Order: missing values are refused, dropped or marked; cells become numbers and category indices; ``fit`` takes medians,
means and standard deviations from all rows of the site's own table; ``encode`` applies them to any rows.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fl_algorithms.settings.tabular import Feature, TableSettings
from fl_algorithms.settings.targets import level
from fl_algorithms.tasks.tables.table import NUMBER, Table, where
from wardround.errors import BadData
from wardround.records.schema import Strict, check
from wardround.signing import canonical

EPSILON = 1e-9  # added to each standard deviation, as FLamby does
MAX_MAGNITUDE = 1e100  # of a cell; its square still has room in float64
MAX_STANDARDIZED = 1e6  # a cell so far from all that the fit has seen counts as this far, and float32 stays finite

Floats: TypeAlias = NDArray[np.float64]
Values: TypeAlias = dict[str, Floats]  # feature -> (n,): the number, or the category's index; nan where missing

_TEXT = "text where a number belongs"
_ENDLESS = "nan or infinity where a number belongs"
_HUGE = "a number beyond any measurement"
_NOT_FINITE = re.compile(r"[+-]?(?:nan|inf|infinity)", re.IGNORECASE)


class Preprocessing(Strict):
    """What ``fit`` learned from one site's table; computed from patients, so it stays at the site."""

    columns: tuple[str, ...]  # the encoded inputs that ``mean`` and ``std`` belong to
    mean: tuple[float, ...]
    std: tuple[float, ...]  # unbiased (n - 1); 0 for a column that is the same in every row
    medians: dict[str, float]  # of the numeric features that may be missing
    commonest: dict[str, str]  # of the categorical features that may be missing

    def document(self) -> dict[str, Any]:
        """Plain JSON, numbers as their shortest round-trip text."""
        document = canonical.with_text_floats(self.model_dump(mode="json"))
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
            if text not in _levels(may_be_missing[name]):
                raise BadData(f"{source}: feature `{name}` is filled with no category of the study")
        return found


def settle_missing(table: Table, settings: TableSettings, targets: Sequence[str]) -> tuple[Table, int]:
    """The table as the study's policy leaves it, and how many rows were dropped.

    Args:
        targets: the columns of what is to be predicted, whose missing cells no policy fills; () where none is read.

    Raises:
        BadData: values are missing where the policy refuses that, or every row was dropped.
    """
    missing = settings.missing
    names = [*(feature.name for feature in settings.features), *targets]
    gaps = {name: rows for name in names if (rows := _gaps(table.columns[name], missing.blanks))}
    if missing.policy == "drop_row":
        dropped = {row for rows in gaps.values() for row in rows}
        if len(dropped) == len(table):
            raise BadData(f"{table.path}: every row has a missing value, so none is left")
        return (table.without(dropped), len(dropped)) if dropped else (table, 0)
    for target in targets:
        if target in gaps:
            lines = [table.lines[row] for row in gaps[target]]
            raise BadData(
                f"{table.path}: {where(lines)}: label column `{target}` has no value",
                hint="leave these rows out of the file, or enter it",
            )
    refused = {name: rows for name, rows in gaps.items() if name not in missing.indicators}
    if refused:
        total = sum(map(len, refused.values()))
        first = table.lines[min(min(rows) for rows in refused.values())]
        counts = ", ".join(f"`{name}` {len(rows)}" for name, rows in refused.items())
        raise BadData(
            f"{table.path}: {total} missing value{'s' if total > 1 else ''}: {counts}; the first is in line {first}",
            hint="complete them or leave the rows out; or ask the study's author for "
            '`policy = "drop_row"`, or "median" with these `indicators`, in [task.missing]',
        )
    return table, 0


def values_of(table: Table, settings: TableSettings) -> Values:
    """Each feature's cells as numbers or category indices, nan where missing.

    Raises:
        BadData: text, nan or infinity in a numeric column, or a category that the study does not know.
    """
    blanks = settings.missing.blanks
    return {
        feature.name: numbers_of(table, feature.name, blanks)
        if feature.kind == "numeric"
        else _categories(table, feature, blanks)
        for feature in settings.features
    }


def classes_of(table: Table, label: str, classes: Sequence[str]) -> NDArray[np.int64]:
    """The index of each row's class: (n,).

    Raises:
        BadData: a cell is none of the classes.
    """
    place = {level(text): place for place, text in enumerate(classes)}
    meaning = {cell: place.get(level(cell)) for cell in set(table.columns[label])}
    found = [meaning[cell] for cell in table.columns[label]]
    unknown = [line for line, index in zip(table.lines, found, strict=True) if index is None]
    if unknown:
        raise BadData(
            f"{table.path}: {where(unknown)}: label column `{label}` holds no class of the study",
            hint=f"the classes are: {', '.join(classes)}",
        )
    return np.array(found, dtype=np.int64)


def fit(values: Values, settings: TableSettings) -> Preprocessing:
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
        if feature.kind == "numeric":
            medians[feature.name] = float(np.median(seen)) if len(seen) else 0.0
        else:
            counts = Counter(seen.astype(int).tolist())
            place = min(counts, key=lambda place: (-counts[place], place)) if counts else 0
            commonest[feature.name] = _levels(feature)[place]
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


def _gaps(cells: Sequence[str], blanks: frozenset[str]) -> list[int]:
    """The rows without a value. Almost always none, so the spellings are looked at first, each once."""
    missing = {cell for cell in set(cells) if cell.casefold() in blanks}
    return [row for row, cell in enumerate(cells) if cell in missing] if missing else []


def numbers_of(table: Table, column: str, blanks: frozenset[str]) -> Floats:
    """The numbers of a column, nan where missing: (n,).

    Raises:
        BadData: text, nan or infinity, or a number beyond any measurement.
    """
    cells = table.columns[column]
    # Blanks first: a code such as -9 may stand for a missing value. Each spelling is read once.
    meaning = {cell: math.nan if cell.casefold() in blanks else _number(cell) for cell in set(cells)}
    tokens = ", ".join(f"`{token}`" if token else "an empty cell" for token in sorted(blanks))
    hints = {
        _TEXT: "numbers have a decimal point and no thousands separator",
        _ENDLESS: f"a missing value is written as one of: {tokens}",
        _HUGE: f"the largest magnitude taken is {MAX_MAGNITUDE:g}",
    }
    found = set(meaning.values())
    for fault, hint in hints.items():
        if fault in found:
            lines = [line for line, cell in zip(table.lines, cells, strict=True) if meaning[cell] == fault]
            raise BadData(f"{table.path}: {where(lines)}, column `{column}`: {fault}", hint=hint)
    return np.array([meaning[cell] for cell in cells], dtype=np.float64)


def _number(cell: str) -> float | str:
    """The number, or what is wrong with it."""
    if not NUMBER.fullmatch(cell):
        return _ENDLESS if _NOT_FINITE.fullmatch(cell) else _TEXT
    number = float(cell)
    return number if abs(number) <= MAX_MAGNITUDE else _HUGE


def _categories(table: Table, feature: Feature, blanks: frozenset[str]) -> Floats:
    cells = table.columns[feature.name]
    place = {text: float(place) for place, text in enumerate(_levels(feature))}
    meaning = {cell: math.nan if cell.casefold() in blanks else place.get(level(cell)) for cell in set(cells)}
    if None in meaning.values():
        unknown = [line for line, cell in zip(table.lines, cells, strict=True) if meaning[cell] is None]
        raise BadData(
            f"{table.path}: {where(unknown)}, column `{feature.name}`: a category that the study does not know",
            hint=f"its categories are: {', '.join(feature.categories)}",
        )
    return np.array([meaning[cell] for cell in cells], dtype=np.float64)


def _matrix(
    values: Values, settings: TableSettings, medians: Mapping[str, float], commonest: Mapping[str, str]
) -> Floats:
    """The inputs before standardization: (n, inputs), in the order of ``settings.columns``, gaps filled."""
    columns: list[Floats] = []
    for feature in settings.features:
        cells = values[feature.name]
        if feature.kind == "numeric":
            columns.append(np.where(np.isnan(cells), medians.get(feature.name, math.nan), cells))
        else:
            fill = _levels(feature).index(commonest[feature.name]) if feature.name in commonest else math.nan
            filled = np.where(np.isnan(cells), fill, cells)
            columns += [(filled == place).astype(np.float64) for place in range(1, len(feature.categories))]
    columns += [np.isnan(values[name]).astype(np.float64) for name in settings.missing.indicators]
    return np.stack(columns, axis=1)


def _deviation(column: list[float], mean: float) -> float:
    """The unbiased standard deviation; 0 for one row, or rows that are all alike."""
    if min(column) == max(column):
        return 0.0
    return math.sqrt(math.fsum((value - mean) ** 2 for value in column) / (len(column) - 1))


def _levels(feature: Feature) -> list[str]:
    return [level(text) for text in feature.categories]
