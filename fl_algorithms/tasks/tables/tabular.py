"""The tasks of tables: a CSV file per hospital, its columns as inputs, and one or more of them to be predicted.

``table`` reads the file, ``encoding`` makes numbers of it, ``targets`` reads what is to be learned, an objective judges
it; here they become tensors and splits.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fl_algorithms.settings.tabular import TableSettings
from fl_algorithms.streams import stream_seed
from fl_algorithms.tasks.base import Draft, PublicData, SiteData, Source, Split, numbered
from fl_algorithms.tasks.findings import DoesNotFit, refuse
from fl_algorithms.tasks.objectives import objective_of
from fl_algorithms.tasks.objectives.base import Judged
from fl_algorithms.tasks.objectives.classes import ClassObjective
from fl_algorithms.tasks.tables import advice
from fl_algorithms.tasks.tables.draft import draft
from fl_algorithms.tasks.tables.encoding import Preprocessing, encode, fit, scale_of
from fl_algorithms.tasks.tables.mapping import read_mapped
from fl_algorithms.tasks.tables.reading import NO_VALUE, read_features
from fl_algorithms.tasks.tables.rows import PATIENT, Rows, SiteRows, pooled, read_site, repeated
from fl_algorithms.tasks.tables.splits import split_rows
from fl_algorithms.tasks.tables.table import read_table
from fl_algorithms.tasks.tables.targets import names_at_site, target_of, words_of
from wardround.errors import BadData


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
        return self._site_data(self._read(source), site, seed, validation_fraction)[0]

    def load_pooled(
        self, sources: Mapping[str, Source], *, site: str, seed: int, validation_fraction: float
    ) -> tuple[SiteData, dict[str, Split]]:
        """See ``fl_algorithms.tasks.base.Pooling``: statistics are of all training rows."""
        sites = {name: self._read(source) for name, source in sources.items()}
        data, fitted = self._site_data(pooled(sites), site, seed, validation_fraction)
        return data, {name: self._split(both.test, fitted) for name, both in sites.items() if both.test is not None}

    def draft_mapping(self, source: Source) -> Draft:
        """See ``fl_algorithms.tasks.base.TakesMapping``."""
        patient = self.settings.patient or (PATIENT if source.patient else "")
        names = names_at_site(self.settings, source.label)
        labels = {target: (own, words_of(self.settings, target)) for target, own in names.items()}
        who = (patient, source.patient) if patient else None
        return draft(source.path("table"), self.settings.features, self.settings.missing.blanks, labels, who)

    def read_new(self, rows: Path, fitted: Mapping[str, Any]) -> tuple[Tensor, list[int]]:
        """Rows whose class is not known, encoded as the site's own: float32 (n, inputs), and each one's line.

        A label column need not be there. Where the study drops rows with missing values, their lines are absent.

        Raises:
            BadData: as ``load``; or ``fitted`` was not made for this study's inputs.
        """
        preprocessing = Preprocessing.from_document(fitted, self.settings)
        table = read_mapped(rows, dict.fromkeys(self.settings.read, ""), preprocessing.mapping)
        read = read_features(table, self.settings)
        refuse(read.findings)
        return torch.from_numpy(encode(read.values, self.settings, preprocessing)), read.table.lines

    def read_public_data(self, path: Path, *, labeled: bool) -> PublicData:
        """See ``fl_algorithms.tasks.base.ReadsPublicData``: a CSV file in which every value is given."""
        labels = self.settings.targets if labeled else ()
        strict = self.settings.missing.model_copy(update={"policy": "refuse", "indicators": ()})
        settings = self.settings.model_copy(update={"missing": strict})
        read = read_features(read_table(path, [*self.settings.read, *labels]), settings, labels)
        try:
            refuse(read.findings)
        except DoesNotFit as error:
            gap = error.findings[0].what == NO_VALUE
            hint = "a public data set has every value: leave these rows out" if gap else error.hint
            raise BadData(error.message, hint=hint) from None
        encoded = encode(read.values, self.settings, scale_of(self.settings))
        y = torch.from_numpy(self.target.read(read.table)) if labeled else None
        return PublicData(torch.from_numpy(encoded), y)

    def _read(self, source: Source) -> SiteRows:
        return read_site(source, self.settings, names_at_site(self.settings, source.label), self.target.read)

    def _site_data(
        self, both: SiteRows, site: str, seed: int, validation_fraction: float
    ) -> tuple[SiteData, Preprocessing]:
        rows, test_rows = both.rows, both.test
        generator = torch.Generator().manual_seed(stream_seed(seed, site, 0, "split"))
        places = split_rows(
            len(rows.y), validation_fraction, generator, rows.path,
            patients=rows.patients, strata=self.target.strata(rows.y),
        )  # fmt: skip
        fitted = fit(rows.values, self.settings, both.mapping)
        whole = self._split(rows, fitted)
        train, validation = (_take(whole, part) for part in places)
        held_out = self._split(test_rows, fitted) if test_rows else None
        data = SiteData(
            train=train,
            validation=validation,
            test=held_out,
            digest=both.digest,
            warnings=(
                *advice.about_rows(rows),
                *advice.about_columns(rows, fitted),
                *self.objective.about("training part", train.y),
                *self.objective.about("validation part", validation.y),
                *(advice.about_rows(test_rows) if test_rows else ()),
                *(self.objective.about("test table", held_out.y) if held_out else ()),
                *advice.sentences(repeated(rows, test_rows)),
            ),
            preprocessing=fitted.document(),
        )
        return data, fitted

    def _split(self, rows: Rows, fitted: Preprocessing) -> Split:
        x = torch.from_numpy(encode(rows.values, self.settings, fitted))
        return Split(x, torch.from_numpy(rows.y), numbered(rows.patients))


class TabularTask(TableTask):
    """The class in a column."""

    objective: ClassObjective

    @property
    def classes(self) -> tuple[str, ...]:
        return self.objective.classes

    def probabilities(self, logits: Tensor) -> Tensor:
        """(n, classes)."""
        return self.objective.probabilities(logits)


def _take(split: Split, rows: Tensor) -> Split:
    assert isinstance(split.x, Tensor)
    groups = None if split.groups is None else split.groups[rows]
    return Split(split.x[rows].contiguous(), split.y[rows].contiguous(), groups)
