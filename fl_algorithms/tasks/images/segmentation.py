"""The segmentation task: each pixel of an image, or voxel of a volume, has a class; the first is the background."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from numpy.typing import NDArray
from torch import Tensor

from fl_algorithms.settings.segmentation import SegmentationSettings
from fl_algorithms.tasks.base import OutputsOf, OwnSizes, Predictions, Scores, SiteData, Source, Split, samples
from fl_algorithms.tasks.images.files import mask_at
from fl_algorithms.tasks.images.labels import Labels, LabelSource, masks_among
from fl_algorithms.tasks.images.reading import Origin
from fl_algorithms.tasks.images.rows import ImageRows, load_images, load_pooled_images, new_images
from fl_algorithms.tasks.images.volumes.patches import PatchRows
from fl_algorithms.tasks.images.volumes.spacing import lengths_of, respaced
from wardround.errors import BadData

SMOOTH = 1.0  # added to both sides of the soft Dice, so that two empty masks agree
PART = 64  # images judged at a time


class SegmentationTask:
    """See ``fl_algorithms.tasks.base.Task``. Logits are (n, 1, *size) for two classes, of the last; else one each."""

    def __init__(self, settings: SegmentationSettings, weights: Tensor | None = None) -> None:
        """``weights``: of the cross entropy, one for each class, float32; None: the study's own, or none."""
        self.settings = settings
        self.input_shape: tuple[int, ...] = settings.input_shape
        self.classes: tuple[str, ...] = settings.classes
        self.headline: str = settings.headline
        self.outputs = 1 if len(settings.classes) == 2 else len(settings.classes)
        self._weights = weights
        if weights is None and not isinstance(settings.class_weights, str):
            self._weights = torch.tensor(settings.class_weights)

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

    def _masks_of(self, labels: LabelSource) -> Labels:
        return masks_among(labels, self.settings, self.settings.mask_values)

    def _with_foreground(self, data: SiteData) -> SiteData:
        """Raises BadData: there is none among the training images."""
        if not int(_images_with(data.train, len(self.classes))[1:].sum()):
            raise BadData(
                f"no mask of the {samples(data.train)} training images has anything but `{self.classes[0]}`",
                hint="`values` in [task] says what a mask's numbers mean; are they the right masks?",
            )
        return data

    def at(self, data: SiteData) -> "SegmentationTask":
        """With "balanced" weights: n / (classes * n of the class) of the training masks' pixels; 1 for none of them."""
        if self.settings.class_weights != "balanced":
            return self
        counts = _pixels(data.train, len(self.classes))
        weights = counts.sum() / (len(self.classes) * counts.clamp(min=1).double())
        return SegmentationTask(self.settings, torch.where(counts > 0, weights, 1.0).float())

    def fitted(self, data: SiteData) -> dict[str, Any]:
        return dict(data.preprocessing)

    def read_new(self, rows: Path, fitted: Mapping[str, Any]) -> tuple[ImageRows | PatchRows, list[str]]:
        """Images of a folder or a .npz file, and their names."""
        return new_images(rows, fitted, self.settings)

    def masks(
        self, rows: ImageRows | PatchRows, infer: Callable[[Tensor], Tensor]
    ) -> Iterator[tuple[NDArray[np.uint8], Origin]]:
        """For each image of ``read_new``, the likeliest class of each of its own pixels, and where it is from.

        Args:
            infer: logits of rows, both on the CPU.
        """
        settings = self.settings
        for place, origin in enumerate(rows.origins):
            own = lengths_of(origin.places) if settings.spacing and origin.places is not None else None
            if isinstance(rows, PatchRows):
                logits = rows.logits(place, infer)
                if own is not None:
                    logits = torch.from_numpy(respaced(logits.numpy(), settings.spacing, own, origin.sides, first=1))
                yield self.likeliest(logits[None])[0].to(torch.uint8).numpy(), origin
                continue
            seen = self.likeliest(infer(rows.take(torch.tensor([place]))))[0].to(torch.uint8).numpy()
            mask = mask_at(seen, origin.spaced, settings.fit)
            if own is not None:
                mask = respaced(mask, settings.spacing, own, origin.sides, nearest=True)
            yield mask, origin

    def losses(self, logits: Tensor, y: Tensor) -> Tensor:
        """Of each image, (n,): 1 minus the mean over the foreground classes of (2 sum(p t) + 1) / (sum(p) + sum(t) + 1)
        with p the pixels' probabilities and t their classes; for "dice_ce" plus the mean over the pixels of their cross
        entropy, times their class's weight.

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
        if self._weights is not None:
            entropy = entropy * self._weights.to(y.device)[y.long()].reshape(entropy.shape)
        dice = 1 - ((2 * overlap + SMOOTH) / (total + SMOOTH)).mean(1)
        return dice + entropy.flatten(1).mean(1) if self.settings.loss == "dice_ce" else dice

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """The mean of ``losses``: a scalar."""
        return self.losses(logits, y).mean()

    def metrics(self, logits: Tensor, y: Tensor, fit: Mapping[str, Any] | None = None) -> Scores:
        """dice: see ``dice``, with the likeliest class of each pixel; of several foreground classes also each alone, as
        ``dice_CLASS``. hausdorff95: see there; the mean over the images and classes that have both.
        """
        parts = zip(torch.split(logits.detach(), PART), torch.split(y, PART), strict=True)
        return self.overall(torch.cat([self.judgements(some, masks) for some, masks in parts]))

    def judgements(self, logits: Tensor, y: Tensor) -> Tensor:
        """See ``fl_algorithms.tasks.base.RowByRow``: the loss, Dice of each foreground class, and where the study wants
        it the Hausdorff distance of each.
        """
        columns = [self.losses(logits, y).double()[:, None]]
        predicted, classes = self.likeliest(logits), len(self.classes)
        whole = torch.isfinite(logits.flatten(1)).all(1)
        columns.append(torch.where(whole[:, None], dice_by_class(predicted, y, classes), torch.nan))
        if self.settings.hausdorff:
            spacing = self.settings.spacing or (1.0,) * len(self.settings.size)
            pairs = zip(predicted.cpu().numpy(), y.cpu().numpy(), strict=True)
            rows = [[hausdorff95(a == k, b == k, spacing) for k in range(1, classes)] for a, b in pairs]
            columns.append(torch.tensor(rows, dtype=torch.float64).reshape(len(y), classes - 1))
        return torch.cat([column.cpu() for column in columns], dim=1)

    def overall(self, judgements: Tensor) -> Scores:
        """See ``fl_algorithms.tasks.base.RowByRow``."""
        foreground = self.classes[1:]
        dices, distances = judgements[:, 1 : 1 + len(foreground)], judgements[:, 1 + len(foreground) :]
        found: Scores = {"dice": _mean(dices.mean(1))}
        if len(foreground) > 1:
            found |= {f"dice_{name}": _mean(dices[:, place]) for place, name in enumerate(foreground)}
        if self.settings.hausdorff:
            found["hausdorff95"] = _mean(distances[~torch.isnan(distances)])
        return found

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
    """Of each image, (n,) float64: the mean of ``dice_by_class``.

    A score of several images is the mean of theirs, so a large structure counts no more than a small one.
    """
    return dice_by_class(predicted, y, classes).mean(1)


def dice_by_class(predicted: Tensor, y: Tensor, classes: int) -> Tensor:
    """Of each image and foreground class, (n, classes - 1) float64: 2 |A and B| / (|A| + |B|), 1 where both are empty.

    Args:
        predicted, y: (n, *size), class indices.
    """
    ours, theirs = (one_hot(mask, classes)[:, 1:].flatten(2) for mask in (predicted, y))
    total = (ours.sum(2) + theirs.sum(2)).double()
    both = 2 * (ours & theirs).sum(2).double()
    return torch.where(total == 0, 1.0, both / total.clamp(min=1))


def hausdorff95(predicted: NDArray[np.bool_], mask: NDArray[np.bool_], spacing: Sequence[float]) -> float:
    """The 95th percentile of the distances from one mask's surface to the other's, of both ways the larger; nan where
    one is empty. In the unit of ``spacing``.

    The definition is that of MONAI's ``compute_hausdorff_distance``.
    """
    from scipy.ndimage import binary_erosion, distance_transform_edt

    if not predicted.any() or not mask.any():
        return math.nan
    ours, theirs = (one & ~binary_erosion(one) for one in (predicted, mask))
    ways = ((ours, theirs), (theirs, ours))
    return max(float(np.percentile(distance_transform_edt(~b, sampling=spacing)[a], 95)) for a, b in ways)


def one_hot(y: Tensor, classes: int) -> Tensor:
    """(n, *size), class indices, to bool (n, classes, *size)."""
    return torch.stack([y == place for place in range(classes)], dim=1)


def _mean(values: Tensor) -> float | None:
    """None of no values, or where one is no number."""
    return float(values.mean()) if len(values) and torch.isfinite(values).all() else None


def _pixels(split: Split, classes: int) -> Tensor:
    """Of each class, int64."""
    if isinstance(split.x, OwnSizes):
        return split.x.pixels_by_class.sum(0)
    return torch.bincount(split.y.flatten(), minlength=classes)


def _images_with(split: Split, classes: int) -> Tensor:
    """How many images have a pixel of each class, int64."""
    if isinstance(split.x, OwnSizes):
        return (split.x.pixels_by_class > 0).sum(0)
    return torch.stack([(split.y == place).flatten(1).any(1).sum() for place in range(classes)])
