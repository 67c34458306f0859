"""Several sites' images as if they were one site's: what central training learns from. For the lab alone.

A patient, and an image, is known by site and name: the same name at two sites is two people.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fl_algorithms.settings.images import PixelSettings
from fl_algorithms.tasks.images.labels import PackedMasks
from fl_algorithms.tasks.images.pixels import ByPlace
from fl_algorithms.tasks.images.sets import ImageSet


class PooledPixels:
    """``ByPlace``: the images of ``parts`` after one another. None is copied before it is asked for."""

    def __init__(self, parts: Sequence[ByPlace], shape: tuple[int, ...]) -> None:
        """``shape``: of one image, (channels, *size)."""
        self._parts, self._shape = parts, shape
        self._ends = np.cumsum([len(part) for part in parts])

    @property
    def is_kept(self) -> bool:
        return all(part.is_kept for part in self._parts)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def take(self, places: NDArray[np.int64]) -> NDArray[np.float32]:
        of = np.searchsorted(self._ends, places, side="right")
        out = np.empty((len(places), *self._shape), dtype=np.float32)
        for number in np.unique(of):
            part = self._parts[number]
            out[of == number] = part.take(places[of == number] - (self._ends[number] - len(part)))
        return out

    def image(self, place: int) -> NDArray[np.float32]:
        number = int(np.searchsorted(self._ends, place, side="right"))
        part = self._parts[number]
        return part.image(place - int(self._ends[number] - len(part)))

    def for_worker(self) -> "PooledPixels":
        return PooledPixels([part.for_worker() for part in self._parts], self._shape)

    def hashes(self) -> list[str]:
        return [one for part in self._parts for one in part.hashes()]


def pooled(sets: Mapping[str, ImageSet], settings: PixelSettings) -> ImageSet:
    """All images of the sites' ``sets``, in their order, called by the folder that holds them all."""
    ys = [images.y for images in sets.values() if images.y is not None]
    packed = [y for y in ys if isinstance(y, PackedMasks)]
    return ImageSet(
        Path(os.path.commonpath([images.path for images in sets.values()])),
        PooledPixels([images.pixels for images in sets.values()], settings.input_shape),
        tuple(f"{site}/{name}" for site, images in sets.items() for name in images.names),
        PackedMasks.joined(packed) if packed else np.concatenate([y for y in ys if isinstance(y, np.ndarray)]),
        tuple(f"{site}/{patient}" for site, images in sets.items() for patient in images.patients),
        {f"{site}/{role}": digest for site, images in sets.items() for role, digest in images.digests.items()},
    )
