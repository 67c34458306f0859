"""The images task: each image has one of two or more classes.

``imagefiles`` decodes, ``imagesets`` checks a site's files as a whole, ``imagerows`` makes splits of them, ``metrics``
scores; here are the labels and the loss.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fl_algorithms.settings.images import ImageSettings
from fl_algorithms.tasks.base import PublicData, SiteData, Source, Split
from fl_algorithms.tasks.images.labels import LabelSource, classes_among
from fl_algorithms.tasks.images.rows import (
    ImageRows,
    about_classes,
    load_images,
    load_pooled_images,
    new_images,
    public_images,
)
from fl_algorithms.tasks.objectives.base import Judged
from fl_algorithms.tasks.objectives.classes import ClassObjective


class ImageTask(Judged):
    """See ``fl_algorithms.tasks.base.Task``."""

    objective: ClassObjective

    def __init__(self, settings: ImageSettings) -> None:
        self.settings = settings
        self.input_shape: tuple[int, ...] = settings.input_shape
        self.objective = ClassObjective(settings)

    @property
    def classes(self) -> tuple[str, ...]:
        return self.objective.classes

    def probabilities(self, logits: Tensor) -> Tensor:
        """(n, classes)."""
        return self.objective.probabilities(logits)

    def load(self, source: Source, *, site: str, seed: int, validation_fraction: float) -> SiteData:
        """See ``imagerows.load_images``."""
        data = load_images(
            source,
            self.settings,
            self._classes_of,
            masks=False,
            site=site,
            seed=seed,
            validation_fraction=validation_fraction,
        )
        return self._with_warnings(data)

    def load_pooled(
        self, sources: Mapping[str, Source], *, site: str, seed: int, validation_fraction: float
    ) -> tuple[SiteData, dict[str, Split]]:
        """See ``imagerows.load_pooled_images``."""
        data, tests = load_pooled_images(
            sources,
            self.settings,
            self._classes_of,
            masks=False,
            site=site,
            seed=seed,
            validation_fraction=validation_fraction,
        )
        return self._with_warnings(data), tests

    def _classes_of(self, labels: LabelSource) -> NDArray[np.int64]:
        return classes_among(labels, self.classes)

    def _with_warnings(self, data: SiteData) -> SiteData:
        parts = {"training part": data.train, "validation part": data.validation, "test set": data.test}
        lone = [about_classes(part, split.y, self.classes) for part, split in parts.items() if split is not None]
        return replace(data, warnings=(*data.warnings, *(warning for some in lone for warning in some)))

    def read_new(self, rows: Path, fitted: Mapping[str, Any]) -> tuple[ImageRows, list[str]]:
        """Images of a folder or a .npz file, and their names."""
        found, names = new_images(rows, fitted, self.settings)
        assert isinstance(found, ImageRows)  # a study of classes sees no pieces
        return found, names

    def read_public_data(self, path: Path, *, labeled: bool) -> PublicData:
        """See ``fl_algorithms.tasks.base.ReadsPublicData``: an .npz file or, without classes, a folder."""
        return public_images(path, self.settings, self.classes if labeled else ())

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """The mean of ``losses``: a scalar."""
        return self.losses(logits, y).mean()
