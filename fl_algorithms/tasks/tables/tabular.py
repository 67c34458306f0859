"""The tasks of tables: a CSV file per hospital, numeric and categorical columns, and what is to be predicted.

``table`` reads the file, ``encoding`` makes numbers of it, ``targets`` reads what is to be learned and an objective
judges it; here they become tensors and splits.
"""

import copy
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_algorithms.settings.tabular import TableSettings, TabularSettings
from fl_algorithms.streams import stream_seed
from fl_algorithms.tasks.base import PublicData, SiteData, Source, Split
from fl_algorithms.tasks.objectives import ClassObjective, objective_of
from fl_algorithms.tasks.objectives.base import Judged
from fl_algorithms.tasks.tables.encoding import (
    Preprocessing,
    Values,
    encode,
    fit,
    scale_of,
    settle_missing,
    values_of,
)
from fl_algorithms.tasks.tables.table import data_digest, read_table
from fl_algorithms.tasks.tables.targets import Y, target_of
from wardround.errors import BadData
from wardround.signing import canonical


@dataclass(frozen=True)
class _Rows:
    """A file's usable rows, before any scale."""

    path: Path
    sha256: str
    values: Values
    y: Y
    dropped: int


class TableTask(Judged):
    """See ``fl_algorithms.tasks.base.Task``."""

    def __init__(self, settings: TableSettings) -> None:
        self.settings = settings
        self.input_shape: tuple[int, ...] = (settings.inputs,)
        self.target = target_of(settings)
        self.objective = objective_of(settings)

    def load(self, source: Source, *, site: str, seed: int, validation_fraction: float) -> SiteData:
        """Read, check, encode and split a site's table and its test table.

        Statistics come from all usable rows of ``table``, before the validation split, and never from ``test``. The
        split is a permutation from the stream (seed, site, 0, "split"); validation is its end, floor(fraction * n)
        rows, as ``torch.utils.data.random_split`` counts fractions.

        Raises:
            BadData: see ``table`` and ``encoding``; or too few rows for a training and a validation part.
        """
        table, test = source.path("table"), source.paths.get("test")
        rows = self._read(table, source.label)
        test_rows = self._read(test, source.label) if test is not None else None
        return self._site_data(rows, test_rows, source.label, site, seed, validation_fraction)[0]

    def load_pooled(
        self, sources: Mapping[str, Source], *, site: str, seed: int, validation_fraction: float
    ) -> tuple[SiteData, dict[str, Split]]:
        """See ``fl_algorithms.tasks.base.Pooling``: statistics are of all training rows."""
        train = [self._read(source.path("table"), source.label) for source in sources.values()]
        tests = {
            name: self._read(source.path("test"), source.label)
            for name, source in sources.items()
            if "test" in source.paths
        }
        test = _pool(list(tests.values())) if tests else None
        data, fitted = self._site_data(_pool(train), test, "", site, seed, validation_fraction)
        return data, {name: self._split(rows, fitted) for name, rows in tests.items()}

    def at(self, data: SiteData) -> "TableTask":
        """With the loss weighed by the site's classes, where the study balances them."""
        own = copy.copy(self)
        own.objective = self.objective.at(data)
        return own

    def fitted(self, data: SiteData) -> dict[str, Any]:
        """The statistics that ``load`` took from the site's table, as plain JSON with numbers as text."""
        return dict(data.preprocessing)

    def read_new(self, rows: Path, fitted: Mapping[str, Any]) -> tuple[Tensor, list[int]]:
        """Rows whose class is not known, encoded as the site's own: float32 (n, inputs), and each one's line.

        A label column need not be there. Where the study drops rows with missing values, their lines are absent.

        Raises:
            BadData: as ``load``; or ``fitted`` was not made for this study's inputs.
        """
        preprocessing = Preprocessing.from_document(fitted, self.settings)
        table = read_table(rows, [feature.name for feature in self.settings.features])
        table, _ = settle_missing(table, self.settings, ())
        encoded = encode(values_of(table, self.settings), self.settings, preprocessing)
        return torch.from_numpy(encoded), table.lines

    def read_public_data(self, path: Path, *, labeled: bool) -> PublicData:
        """See ``fl_algorithms.tasks.base.ReadsPublicData``: a CSV file in which every value is given."""
        targets = self.target.columns("") if labeled else ()
        table = read_table(path, [*(feature.name for feature in self.settings.features), *targets])
        strict = self.settings.missing.model_copy(update={"policy": "refuse", "indicators": ()})
        try:
            settle_missing(table, self.settings.model_copy(update={"missing": strict}), targets)
        except BadData as error:
            raise BadData(error.message, hint="a public data set has every value: leave these rows out") from None
        encoded = encode(values_of(table, self.settings), self.settings, scale_of(self.settings))
        y = torch.from_numpy(self.target.read(table, targets)) if labeled else None
        return PublicData(torch.from_numpy(encoded), y)

    def _read(self, path: Path, label: str) -> _Rows:
        names, targets = [feature.name for feature in self.settings.features], self.target.columns(label)
        if label in names:
            raise BadData(f"{path}: `{label}` is named as the label, but the study uses it as a feature")
        whole = read_table(path, [*names, *targets])
        table, dropped = settle_missing(whole, self.settings, targets)
        values = values_of(table, self.settings)
        return _Rows(path, table.sha256, values, self.target.read(table, targets), dropped)

    def _site_data(
        self, rows: _Rows, test_rows: _Rows | None, label: str, site: str, seed: int, validation_fraction: float
    ) -> tuple[SiteData, Preprocessing]:
        validation_rows = math.floor(validation_fraction * len(rows.y))
        if validation_rows == 0:
            raise BadData(
                f"{rows.path}: {len(rows.y)} usable row{'s' if len(rows.y) > 1 else ''}; a validation part of "
                f"{validation_fraction:g} needs at least {math.ceil(1 / validation_fraction)}"
            )
        fitted = fit(rows.values, self.settings)
        whole = self._split(rows, fitted)
        order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(stream_seed(seed, site, 0, "split")))
        train, validation = _take(whole, order[:-validation_rows]), _take(whole, order[-validation_rows:])
        held_out = self._split(test_rows, fitted) if test_rows else None
        data = SiteData(
            train=train,
            validation=validation,
            test=held_out,
            digest=data_digest(
                rows.sha256, test_rows.sha256 if test_rows else None, label or self.target.columns("")[0]
            ),
            warnings=(
                *_about_rows(rows),
                *self._about_columns(rows, fitted),
                *self.objective.about("training part", train.y),
                *self.objective.about("validation part", validation.y),
                *(_about_rows(test_rows) if test_rows else ()),
                *(self.objective.about("test table", held_out.y) if held_out else ()),
                *_about_overlap(rows, test_rows),
            ),
            preprocessing=fitted.document(),
        )
        return data, fitted

    def _split(self, rows: _Rows, fitted: Preprocessing) -> Split:
        return Split(torch.from_numpy(encode(rows.values, self.settings, fitted)), torch.from_numpy(rows.y))

    def _about_columns(self, rows: _Rows, fitted: Preprocessing) -> list[str]:
        empty = [name for name, cells in rows.values.items() if np.isnan(cells).all()]
        constant = [name for name, std in zip(fitted.columns, fitted.std, strict=True) if std == 0]
        said = [f"{rows.path.name}: `{name}` has no value in any row; it tells nothing here" for name in empty]
        said += [
            f"{rows.path.name}: `{name}` is the same in every row, so it is 0 for the model, in the test table too"
            for name in constant
            if name not in empty
        ]
        return said


class TabularTask(TableTask):
    """The class in a column."""

    def __init__(self, settings: TabularSettings) -> None:
        super().__init__(settings)
        self.objective: ClassObjective = ClassObjective(settings)

    @property
    def classes(self) -> tuple[str, ...]:
        return self.objective.classes

    def probabilities(self, logits: Tensor) -> Tensor:
        """(n, classes)."""
        return self.objective.probabilities(logits)


def _pool(parts: Sequence[_Rows]) -> _Rows:
    """The rows of several files after one another, called by the folder that holds them all."""
    values = {name: np.concatenate([part.values[name] for part in parts]) for name in parts[0].values}
    y = np.concatenate([part.y for part in parts])
    sha256 = canonical.digest([part.sha256 for part in parts])
    folder = Path(os.path.commonpath([part.path for part in parts]))
    return _Rows(folder, sha256, values, y, sum(part.dropped for part in parts))


def _take(split: Split, rows: Tensor) -> Split:
    assert isinstance(split.x, Tensor)
    return Split(split.x[rows].contiguous(), split.y[rows].contiguous())


def _about_rows(rows: _Rows) -> list[str]:
    if rows.dropped == 0:
        return []
    return [f"{rows.path.name}: {rows.dropped} of {rows.dropped + len(rows.y)} rows dropped for missing values"]


def _about_overlap(rows: _Rows, test: _Rows | None) -> list[str]:
    if test is None or test.sha256 != rows.sha256:
        return []
    return ["The test table is the training table, so its scores will be too good"]
