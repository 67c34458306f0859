"""Images of their own sizes as rows: pieces of them to train on, and whole ones to be judged in windows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fl_algorithms.settings.images import PixelSettings
from fl_algorithms.settings.segmentation import SegmentationSettings
from fl_algorithms.tasks.base import Made
from fl_algorithms.tasks.images.augment import DRAWS, augmented, uniform
from fl_algorithms.tasks.images.decoding import Array
from fl_algorithms.tasks.images.labels import PackedMasks
from fl_algorithms.tasks.images.pixels import ByPlace
from fl_algorithms.tasks.images.reading import Origin
from fl_algorithms.tasks.images.volumes.windows import in_windows

Scale = tuple[Tensor, Tensor]


class PatchRows:
    """``fl_algorithms.tasks.base.OwnSizes``: of n images, ``per_image`` rows each.

    Row i is a piece of image i // ``per_image``, of the study's size. Where ``augmented`` takes it follows from
    (seed, i): around a pixel of the foreground, or anywhere. An image smaller than a piece is filled up around its
    middle with its smallest number, and its mask with class 0.
    """

    def __init__(
        self,
        pixels: ByPlace,
        masks: PackedMasks | None,
        places: Tensor,
        settings: PixelSettings,
        scale: Scale,
        per_image: int,
        origins: Sequence[Origin] = (),
    ) -> None:
        """
        Args:
            masks: of ``pixels``; None: images to be predicted.
            places: of the images among ``pixels``, int64 (n,).
            scale: mean and deviation of each channel, (channels,), float32.
            origins: of each image before anything was done to it; () where nobody will ask.
        """
        assert isinstance(settings, SegmentationSettings)
        self.origins, self.per_image = origins, per_image
        self._pixels, self._masks, self._places, self._settings = pixels, masks, places, settings
        column = (-1, *(1 for _ in settings.size))
        self._scale, (self._mean, self._std) = scale, (part.reshape(column) for part in scale)

    @property
    def shape(self) -> tuple[int, ...]:
        return self._settings.input_shape

    def __len__(self) -> int:
        return len(self._places) * self.per_image

    @property
    def images(self) -> int:
        """How many there are, whatever the number of rows."""
        return len(self._places)

    @property
    def pixels_by_class(self) -> Tensor:
        """Of each image, (n, classes), int64."""
        assert self._masks is not None
        return torch.from_numpy(self._masks.counts[self._places.numpy()])

    def take(self, places: Tensor) -> Tensor:
        """The middle of each row's image."""
        images = [self._pixels.image(self._image_of(place)) for place in places.tolist()]
        pieces = [_middle(image, self._settings.size, self._filling(image)) for image in images]
        return self._standardized(torch.from_numpy(np.stack(pieces)))

    def middle(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """See ``fl_algorithms.tasks.base.OwnSizes``."""
        assert self._masks is not None
        masks = [self._masks[self._image_of(place)][None] for place in places.tolist()]
        return self.take(places), torch.from_numpy(np.stack([_middle(one, self._settings.size, 0)[0] for one in masks]))

    def augmented(self, places: Tensor, y: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """Pieces (k, *shape) and their masks, uint8 (k, *size). ``y`` is not looked at: a piece's mask is its own."""
        draws = uniform(seed, places, DRAWS + 2 + len(self._settings.size))[:, DRAWS:].numpy()
        pieces = [self._piece(place, own) for place, own in zip(places.tolist(), draws, strict=True)]
        x, masks = (torch.from_numpy(np.stack(part)) for part in zip(*pieces, strict=True))
        x, masks = augmented(x, masks, places, seed, self._settings.augment)
        return self._standardized(x), masks

    def judged(self, place: int, infer: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """See ``fl_algorithms.tasks.base.OwnSizes``."""
        assert self._masks is not None
        own = self._image_of(place)
        return self.logits(place, infer)[None], torch.from_numpy(self._masks[own].copy())[None]

    def logits(self, place: int, infer: Callable[[Tensor], Tensor]) -> Tensor:
        """Of each pixel of a row's image, (outputs, *sides): all windows of it, averaged."""
        settings = self._settings
        image = self._pixels.image(self._image_of(place))
        filled, inside = filled_up(image, settings.size, self._filling(image))
        x = self._standardized(torch.from_numpy(filled.copy())[None])[0]
        return in_windows(x, settings.size, settings.patches, infer)[(slice(None), *inside)]

    def for_worker(self) -> "PatchWorker | None":
        """See ``fl_algorithms.tasks.base.FromFiles``."""
        if self._pixels.is_kept:
            return None
        mean, std = (part.numpy() for part in self._scale)
        places = self._places.numpy()
        return PatchWorker(self._pixels.for_worker(), self._masks, places, self._settings, mean, std, self.per_image)

    def _piece(self, place: int, draws: NDArray[np.float64]) -> tuple[Array, Array]:
        """Its numbers (channels, *size) and its mask (*size). ``draws``: from [0, 1): of the kind, the pixel, and each
        side.
        """
        assert self._masks is not None
        own, size, how = self._image_of(place), self._settings.size, self._settings.patches
        image = self._pixels.image(own)
        image, inside = filled_up(image, size, self._filling(image))
        mask = np.zeros(image.shape[1:], dtype=np.uint8)
        mask[inside] = self._masks[own]
        room = np.array(mask.shape) - size
        corner = np.floor(draws[2:] * (room + 1)).astype(np.int64)
        if draws[0] < how.foreground and (found := np.flatnonzero(mask)).size:
            pixel = np.unravel_index(found[int(draws[1] * found.size)], mask.shape)
            corner = np.clip(np.array(pixel) - np.array(size) // 2, 0, room)
        box = tuple(slice(start, start + side) for start, side in zip(corner.tolist(), size, strict=True))
        return image[(slice(None), *box)], mask[box]

    def _image_of(self, place: int) -> int:
        """The place of a row's image among all."""
        return int(self._places[place // self.per_image])

    def _filling(self, image: Array) -> float:
        """What lies around an image: its smallest number, or 0 where that is the background's."""
        return 0.0 if self._settings.normalize == "foreground" else float(image.min())

    def _standardized(self, x: Tensor) -> Tensor:
        return x.sub_(self._mean).div_(self._std)


@dataclass(frozen=True)
class PatchWorker:
    """``PatchRows.augmented`` for a worker process; the fields are its arguments, without a tensor."""

    pixels: ByPlace
    masks: PackedMasks | None
    places: NDArray[np.int64]
    settings: PixelSettings
    mean: NDArray[np.float32]
    std: NDArray[np.float32]
    per_image: int

    def __call__(self, places: NDArray[np.int64], y: NDArray[Any], seed: int) -> Made:
        scale = (torch.from_numpy(self.mean), torch.from_numpy(self.std))
        own = torch.from_numpy(self.places)
        rows = PatchRows(self.pixels, self.masks, own, self.settings, scale, self.per_image)
        x, masks = rows.augmented(torch.from_numpy(places), torch.from_numpy(y), seed)
        return x.numpy(), masks.numpy()


def filled_up(image: Array, size: Sequence[int], filling: Any) -> tuple[Array, tuple[slice, ...]]:
    """``image`` (channels, *sides) with no side below ``size``'s, and where it lies in that."""
    sides = image.shape[1:]
    wide = [max(side, wanted) for side, wanted in zip(sides, size, strict=True)]
    starts = [(new - side) // 2 for side, new in zip(sides, wide, strict=True)]
    inside = tuple(slice(start, start + side) for start, side in zip(starts, sides, strict=True))
    if list(sides) == wide:
        return image, inside
    out = np.full((len(image), *wide), filling, dtype=image.dtype)
    out[(slice(None), *inside)] = image
    return out, inside


def _middle(image: Array, size: Sequence[int], filling: Any) -> Array:
    """The middle of ``image`` (channels, *sides): (channels, *size)."""
    filled, _ = filled_up(image, size, filling)
    starts = [(side - wanted) // 2 for side, wanted in zip(filled.shape[1:], size, strict=True)]
    middle: Array = filled[
        (slice(None), *(slice(start, start + side) for start, side in zip(starts, size, strict=True)))
    ]
    return middle
