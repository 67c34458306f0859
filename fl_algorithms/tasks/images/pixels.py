"""Images of one file or folder, each brought to the study's size: kept decoded, or read again in their turn. No torch.

Every file is decoded once when it is first read, so training never starts on a part of a set.
"""

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from fl_algorithms.settings.images import PixelSettings
from fl_algorithms.tasks.images.files import (
    Array,
    decode,
    finite,
    fitted_to,
    read_bytes,
    sha256,
    unit,
    with_channels,
)
from wardround.errors import BadData

DECODERS = min(8, os.cpu_count() or 1)  # threads; what they give does not depend on their number
MIB = 1 << 20
Item = TypeVar("Item")
Result = TypeVar("Result")


class ByPlace(Protocol):
    """Images by place, brought to the study's size."""

    @property
    def is_kept(self) -> bool:
        """Whether they stay decoded."""

    def __len__(self) -> int: ...

    def take(self, places: NDArray[np.int64]) -> NDArray[np.float32]:
        """(k, channels, *size), on the scale of ``files.unit``.

        Raises:
            BadData: a file is not what it was when the set was read.
        """

    def hashes(self) -> list[str]:
        """One of each image."""

    def for_worker(self) -> "ByPlace":
        """The same, to be pickled; decoded one at a time: workers are several already."""


class Pixels:
    """``ByPlace`` of one file or folder: kept decoded, or read again from their files."""

    def __init__(
        self, settings: PixelSettings, kept: Array | None, files: Sequence[tuple[Path, str]], decoders: int = DECODERS
    ) -> None:
        """
        Args:
            kept: (n, channels, *size), as stored; None where files are to be read again.
            files: path and SHA-256 of each.
        """
        self._settings, self._kept, self._files, self._decoders = settings, kept, files, decoders

    @property
    def is_kept(self) -> bool:
        return self._kept is not None

    def __len__(self) -> int:
        return len(self._files) if self._kept is None else len(self._kept)

    def for_worker(self) -> "Pixels":
        return Pixels(self._settings, self._kept, self._files, decoders=1)

    def take(self, places: NDArray[np.int64]) -> NDArray[np.float32]:
        if self._kept is not None:
            return unit(self._kept[places])
        return np.stack(_each(self._again, places.tolist(), self._decoders))

    def hashes(self) -> list[str]:
        if self._kept is None:
            return [digest for _, digest in self._files]
        return [hashlib.sha256(image.tobytes()).hexdigest() for image in self._kept]

    def _again(self, place: int) -> NDArray[np.float32]:
        path, digest = self._files[place]
        data = read_bytes(path)
        if sha256(data) != digest:
            raise BadData(
                f"{path}: not the file that was read at the start",
                hint="leave the data alone while training",
                code="DECLINED_DATA_CHANGED",
            )
        return unit(_image(path, data, self._settings))


def pixels_of_arrays(path: Path, images: Array, settings: PixelSettings) -> tuple[Pixels, list[tuple[int, ...]]]:
    dimensions = len(settings.size)
    if images.ndim == dimensions + 1:
        images = images[..., None]
    if images.ndim != dimensions + 2 or not len(images) or images.dtype.kind not in "buif":
        wanted = ", ".join(["n", *("depth", "height", "width")[-dimensions:], "channels"])
        raise BadData(f"{path}: `images` is {list(images.shape)}, wanted numbers ({wanted})")
    sides = tuple(images.shape[1:-1])
    for place, image in enumerate(images) if images.dtype.kind == "f" else ():
        finite(path.with_name(f"{path.name}, image {place}"), image)
    if images.dtype == np.bool_:
        images = images.astype(np.uint8) * 255
    ready = [_fitted(path, image, settings) for image in images]
    return Pixels(settings, np.stack(ready), []), [sides] * len(images)


def pixels_of_files(
    folder: Path, files: Mapping[str, Path], settings: PixelSettings
) -> tuple[Pixels, list[tuple[int, ...]], list[list[str]]]:
    """All files decoded once: kept if they fit the cache, as float32 where some have 8 and some 16 bit."""
    room = settings.cache_mib * MIB
    numbers = settings.channels * int(np.prod(settings.size))
    keep = len(files) * numbers <= room  # 8 bit is the least

    def one(path: Path) -> tuple[Array | None, tuple[int, ...], str]:
        data = read_bytes(path)
        array = decode(path, data, settings.max_pixels)
        image = _fitted(path, array, settings)
        return image if keep and len(files) * image.nbytes <= room else None, _own_sides(array, settings), sha256(data)

    read = _each(one, list(files.values()), DECODERS)
    images = [image for image, _, _ in read if image is not None]
    kept = None
    same = len({image.dtype for image in images}) == 1
    if len(images) == len(files) and (same or 4 * len(files) * numbers <= room):
        kept = np.stack(images if same else [unit(image) for image in images])
    digests = [digest for _, _, digest in read]
    pixels = Pixels(settings, kept, list(zip(files.values(), digests, strict=True)))
    return pixels, [sides for _, sides, _ in read], [list(pair) for pair in zip(files, digests, strict=True)]


def _own_sides(array: Array, settings: PixelSettings) -> tuple[int, ...]:
    sides = array.shape[:-1]
    return sides[1:] if len(sides) == 3 and len(settings.size) == 2 and sides[0] == 1 else sides


def _image(path: Path, data: bytes, settings: PixelSettings) -> Array:
    return _fitted(path, decode(path, data, settings.max_pixels), settings)


def _fitted(path: Path, array: Array, settings: PixelSettings) -> Array:
    """(channels, *size)."""
    wanted = with_channels(path, array, settings.channels)
    return np.ascontiguousarray(np.moveaxis(fitted_to(path, wanted, settings.size, settings.fit), -1, 0))


def _each(function: Callable[[Item], Result], items: Sequence[Item], threads: int) -> list[Result]:
    """``function`` of each, in their order; the first failure in that order is raised."""
    if threads == 1 or len(items) == 1:
        return [function(item) for item in items]
    with ThreadPoolExecutor(threads) as pool:
        try:
            return list(pool.map(function, items))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
