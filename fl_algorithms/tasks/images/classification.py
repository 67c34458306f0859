"""The images task: each image has one of two or more classes.

``imagefiles`` decodes, ``imagesets`` checks a site's files as a whole, ``imagerows`` makes splits of them, ``metrics``
scores; here are the labels and the loss.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
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
from fl_algorithms.tasks.metrics import scores

SMALLEST = 1e-12  # of 1 - p_y, whose power has no slope at 0 when gamma is below 1


class ImageTask:
    """See ``fl_algorithms.tasks.base.Task``."""

    def __init__(self, settings: ImageSettings, weights: Tensor | None = None) -> None:
        """``weights``: of the loss, one for each class, float32; None: the study's own, or none."""
        self.settings = settings
        self.input_shape: tuple[int, ...] = settings.input_shape
        self.classes: tuple[str, ...] = settings.classes
        self.headline: str = settings.metric
        self._weights = weights
        if weights is None and not isinstance(settings.class_weights, str):
            self._weights = torch.tensor(settings.class_weights)

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

    def at(self, data: SiteData) -> "ImageTask":
        """With "balanced" weights: n / (classes * n of the class) of the training part, 1 for a class without any."""
        if self.settings.class_weights != "balanced":
            return self
        counts = torch.bincount(data.train.y, minlength=len(self.classes))
        weights = len(data.train) / (len(self.classes) * counts.clamp(min=1).double())
        return ImageTask(self.settings, torch.where(counts > 0, weights, 1.0).float())

    def fitted(self, data: SiteData) -> dict[str, Any]:
        return dict(data.preprocessing)

    def read_new(self, rows: Path, fitted: Mapping[str, Any]) -> tuple[ImageRows, list[str]]:
        """Images of a folder or a .npz file, and their names."""
        found, names = new_images(rows, fitted, self.settings)
        assert isinstance(found, ImageRows)  # a study of classes sees no pieces
        return found, names

    def read_public_data(self, path: Path, *, labeled: bool) -> PublicData:
        """See ``fl_algorithms.tasks.base.ReadsPublicData``: an .npz file or, without classes, a folder."""
        return public_images(path, self.settings, self.classes if labeled else ())

    def losses(self, logits: Tensor, y: Tensor) -> Tensor:
        """Of each sample, (n,): w_y (1 - p_y)^gamma (-log p_y), gamma 0 but for "focal".

        Logits are (n, 1) for two classes, of the last; else (n, classes).

        Reference:
            Lin, Goyal, Girshick, He, Dollar, Focal Loss for Dense Object Detection, ICCV 2017, equation 5.
            https://arxiv.org/abs/1708.02002
        """
        if len(self.classes) == 2:
            losses = F.binary_cross_entropy_with_logits(logits.squeeze(1), y.to(logits.dtype), reduction="none")
        else:
            losses = F.cross_entropy(logits, y, reduction="none")
        if self.settings.loss == "focal":
            missed = -torch.expm1(-losses)  # 1 - p_y
            losses = missed.clamp(min=SMALLEST) ** self.settings.gamma * losses
        return losses if self._weights is None else self._weights.to(y.device)[y] * losses

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """The mean of ``losses``: a scalar."""
        return self.losses(logits, y).mean()

    def metrics(self, logits: Tensor, y: Tensor) -> dict[str, float | None]:
        """accuracy (of the likeliest class), balanced_accuracy, auc and macro_f1."""
        return scores(self.probabilities(logits.detach()).cpu().numpy(), y.cpu().numpy())

    def probabilities(self, logits: Tensor) -> Tensor:
        """(n, classes), float64."""
        if len(self.classes) == 2:
            positive = torch.sigmoid(logits.double().squeeze(1))
            return torch.stack((1 - positive, positive), dim=1)
        return torch.softmax(logits.double(), dim=1)
