"""The segmentation task: each pixel of an image, or voxel of a volume, has a class; the first is the background."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from numpy.typing import NDArray
from torch import Tensor

from fl_algorithms.settings.segmentation import SegmentationSettings
from fl_algorithms.tasks.base import OutputsOf, Predictions, Scores, SiteData, Source, Split
from fl_algorithms.tasks.images.labels import LabelSource, masks_among
from fl_algorithms.tasks.images.rows import ImageRows, load_images, load_pooled_images, new_images
from wardround.errors import BadData

SMOOTH = 1.0  # added to both sides of the soft Dice, so that two empty masks agree
PART = 64  # images judged at a time


class SegmentationTask:
    """See ``fl_algorithms.tasks.base.Task``. Logits are (n, 1, *size) for two classes, of the last; else one each."""

    def __init__(self, settings: SegmentationSettings) -> None:
        self.settings = settings
        self.input_shape: tuple[int, ...] = settings.input_shape
        self.classes: tuple[str, ...] = settings.classes
        self.headline: str = settings.headline
        self.outputs = 1 if len(settings.classes) == 2 else len(settings.classes)

    def load(self, source: Source, *, site: str, seed: int, validation_fraction: float) -> SiteData:
        """See ``imagerows.load_images``."""
        data = load_images(
            source,
            self.settings,
            self._masks_of,
            masks=True,
            site=site,
            seed=seed,
            validation_fraction=validation_fraction,
        )
        return self._with_foreground(data)

    def load_pooled(
        self, sources: Mapping[str, Source], *, site: str, seed: int, validation_fraction: float
    ) -> tuple[SiteData, dict[str, Split]]:
        """See ``imagerows.load_pooled_images``."""
        data, tests = load_pooled_images(
            sources,
            self.settings,
            self._masks_of,
            masks=True,
            site=site,
            seed=seed,
            validation_fraction=validation_fraction,
        )
        return self._with_foreground(data), tests

    def _masks_of(self, labels: LabelSource) -> NDArray[np.uint8]:
        return masks_among(labels, self.settings, self.settings.mask_values)

    def _with_foreground(self, data: SiteData) -> SiteData:
        """Raises BadData: there is none among the training images."""
        if not data.train.y.any():
            raise BadData(
                f"no mask of the {len(data.train)} training images has anything but `{self.classes[0]}`",
                hint="`values` in [task] says what a mask's numbers mean; are they the right masks?",
            )
        return data

    def at(self, data: SiteData) -> "SegmentationTask":
        """Itself."""
        return self

    def fitted(self, data: SiteData) -> dict[str, Any]:
        return dict(data.preprocessing)

    def read_new(self, rows: Path, fitted: Mapping[str, Any]) -> tuple[ImageRows, list[str]]:
        """Images of a folder or a .npz file, and their names."""
        return new_images(rows, fitted, self.settings)

    def losses(self, logits: Tensor, y: Tensor) -> Tensor:
        """Of each image, (n,): 1 minus the mean over the foreground classes of (2 sum(p t) + 1) / (sum(p) + sum(t) + 1)
        with p the pixels' probabilities and t their classes; for "dice_ce" plus the pixels' mean cross entropy.

        Reference:
            Milletari, Navab, Ahmadi, V-Net, 3DV 2016, section 3, with plain sums in the denominator and smoothed.
            https://arxiv.org/abs/1606.04797
        """
        if len(self.classes) == 2:
            p, t = torch.sigmoid(logits), y.unsqueeze(1).to(logits.dtype)
            entropy = F.binary_cross_entropy_with_logits(logits, t, reduction="none")
        else:
            p = torch.softmax(logits, dim=1)[:, 1:]
            t = one_hot(y, len(self.classes)).to(logits.dtype)[:, 1:]
            entropy = F.cross_entropy(logits, y.long(), reduction="none")
        overlap = (p * t).flatten(2).sum(2)
        total = p.flatten(2).sum(2) + t.flatten(2).sum(2)
        dice = 1 - ((2 * overlap + SMOOTH) / (total + SMOOTH)).mean(1)
        return dice + entropy.flatten(1).mean(1) if self.settings.loss == "dice_ce" else dice

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """The mean of ``losses``: a scalar."""
        return self.losses(logits, y).mean()

    def metrics(self, logits: Tensor, y: Tensor, fit: Mapping[str, Any] | None = None) -> Scores:
        """dice: see ``dice``, with the likeliest class of each pixel."""
        if len(y) == 0 or not torch.isfinite(logits).all():
            return {"dice": None}
        parts = zip(torch.split(logits.detach(), PART), torch.split(y, PART), strict=True)
        each = torch.cat([dice(self.likeliest(some), masks, len(self.classes)) for some, masks in parts])
        return {"dice": float(each.mean())}

    def fit_outputs(self, outputs_of: OutputsOf, data: SiteData) -> dict[str, Any]:
        """Nothing: the likeliest class of each pixel counts."""
        return {}

    def predictions(self, logits: Tensor, fit: Mapping[str, Any]) -> Predictions:
        """Of each mask the share of its pixels in each class; the masks themselves are ``likeliest``'s."""
        shares = one_hot(self.likeliest(logits), len(self.classes)).flatten(2).double().mean(2)
        return Predictions(tuple(f"share_{name}" for name in self.classes), [tuple(row) for row in shares.tolist()])

    def kinds(self, y: Tensor) -> Tensor | None:
        return None

    def counts(self, y: Tensor) -> dict[str, int]:
        """How many masks have a pixel of each class."""
        seen = [int((y == place).flatten(1).any(1).sum()) for place in range(len(self.classes))]
        return dict(zip(self.classes, seen, strict=True))

    def probabilities(self, logits: Tensor) -> Tensor:
        """(n, classes, *size), float32."""
        if len(self.classes) == 2:
            positive = torch.sigmoid(logits)
            return torch.cat((1 - positive, positive), dim=1)
        return torch.softmax(logits, dim=1)

    def likeliest(self, logits: Tensor) -> Tensor:
        """The class of each pixel, (n, *size), int64."""
        return (logits > 0).squeeze(1).long() if len(self.classes) == 2 else logits.argmax(1)


def dice(predicted: Tensor, y: Tensor, classes: int) -> Tensor:
    """Of each image, (n,) float64: the mean over the foreground classes of 2 |A and B| / (|A| + |B|), 1 where both are
    empty.

    A score of several images is the mean of theirs, so a large structure counts no more than a small one.

    Args:
        predicted, y: (n, *size), class indices.
    """
    ours, theirs = (one_hot(mask, classes)[:, 1:].flatten(2).double() for mask in (predicted, y))
    total = ours.sum(2) + theirs.sum(2)
    both = 2 * (ours * theirs).sum(2)
    return torch.where(total == 0, 1.0, both / total.clamp(min=1)).mean(1)


def one_hot(y: Tensor, classes: int) -> Tensor:
    """(n, *size), class indices, to bool (n, classes, *size)."""
    return torch.stack([y == place for place in range(classes)], dim=1)
