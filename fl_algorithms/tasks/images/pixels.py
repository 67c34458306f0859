"""Images of one file or folder, each prepared as the study says: kept decoded, or read again in their turn. No torch.

Every file is decoded once when it is first read, so training never starts on a part of a set.
"""

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from fl_algorithms.settings.images import PixelSettings
from fl_algorithms.tasks.images.decoding import Array
from fl_algorithms.tasks.images.files import finite, unit
from fl_algorithms.tasks.images.reading import Digests, Files, Origin, decoded, files_of, origin_of, prepared
from wardround.errors import BadData

DECODERS = min(8, os.cpu_count() or 1)  # threads; what they give does not depend on their number
VOLUMES = min(2, DECODERS)  # decoded at a time: each takes several times its size
MIB = 1 << 20
Item = TypeVar("Item")
Result = TypeVar("Result")


class ByPlace(Protocol):
    """Images by place, brought to the study's size; those of a study that looks at pieces keep their own."""

    @property
    def is_kept(self) -> bool:
        """Whether they stay decoded."""

    def __len__(self) -> int: ...

    def take(self, places: NDArray[np.int64]) -> NDArray[np.float32]:
        """(k, channels, *size), on the scale of ``files.unit``.

        Raises:
            BadData: a file is not what it was when the set was read.
        """

    def image(self, place: int) -> NDArray[np.float32]:
        """One, (channels, *size), or (channels, *sides) where the study looks at pieces; on that scale."""

    def hashes(self) -> list[str]:
        """One of each image."""

    def for_worker(self) -> "ByPlace":
        """The same, to be pickled; decoded one at a time: workers are several already."""


class Pixels:
    """``ByPlace`` of one file or folder: kept decoded, or read again from their files."""

    def __init__(
        self,
        settings: PixelSettings,
        kept: Sequence[Array] | Array | None,
        files: Sequence[tuple[str, Path, str]],
        decoders: int = DECODERS,
    ) -> None:
        """
        Args:
            kept: each (channels, *size), as stored; None where files are to be read again.
            files: name, path and digest of each.
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
        if isinstance(self._kept, np.ndarray):
            return unit(self._kept[places])
        return np.stack(_each(self.image, places.tolist(), 1 if self.is_kept else self._decoders))

    def image(self, place: int) -> NDArray[np.float32]:
        if self._kept is not None:
            return unit(self._kept[place])
        name, path, digest = self._files[place]
        files = files_of(name, path)
        if files.digest != digest:
            raise BadData(
                f"{path}: not the file that was read at the start",
                hint="leave the data alone while training",
                code="DECLINED_DATA_CHANGED",
            )
        found = decoded(files, self._settings)
        return unit(prepared(path, found.array, origin_of(path, found, self._settings), self._settings))

    def hashes(self) -> list[str]:
        if self._kept is None:
            return [digest for _, _, digest in self._files]
        return [hashlib.sha256(image.tobytes()).hexdigest() for image in self._kept]


class _Room:
    """What may be kept decoded. Once something found no room, nothing does."""

    def __init__(self, room: int) -> None:
        self._room, self._lock = room, Lock()

    def take(self, size: int) -> bool:
        with self._lock:
            self._room -= size
            return self._room >= 0


def pixels_of_arrays(path: Path, images: Array, settings: PixelSettings) -> tuple[Pixels, list[Origin]]:
    dimensions = len(settings.size)
    if images.ndim == dimensions + 1:
        images = images[..., None]
    if images.ndim != dimensions + 2 or not len(images) or images.dtype.kind not in "buif":
        wanted = ", ".join(["n", *("depth", "height", "width")[-dimensions:], "channels"])
        raise BadData(f"{path}: `images` is {list(images.shape)}, wanted numbers ({wanted})")
    for place, image in enumerate(images) if images.dtype.kind == "f" else ():
        finite(path.with_name(f"{path.name}, image {place}"), image)
    if images.dtype == np.bool_:
        images = images.astype(np.uint8) * 255
    origin = origin_of(path, images[0], settings)
    return Pixels(settings, np.stack([prepared(path, image, origin, settings) for image in images]), []), [
        origin
    ] * len(images)


def pixels_of_files(
    files: Mapping[str, Path], settings: PixelSettings
) -> tuple[Pixels, list[Origin], dict[str, Digests]]:
    """All images decoded once: kept if they fit the cache, as float32 where some have 8 and some 16 bit."""
    room = _Room(settings.cache_mib * MIB)

    def one(item: tuple[str, Path]) -> tuple[Array | None, Origin, Files]:
        files, path = files_of(*item), item[1]
        found = decoded(files, settings)
        origin = origin_of(path, found, settings)
        image = prepared(path, found.array, origin, settings)
        return image if room.take(image.nbytes) else None, origin, replace(files, content=b"")

    read = _each(one, list(files.items()), DECODERS if len(settings.size) == 2 else VOLUMES)
    images = [image for image, _, _ in read if image is not None]
    kept: Sequence[Array] | Array | None = None
    if len(images) == len(files):
        kept = images
        if settings.fit != "patches":
            wide = len({image.dtype for image in images}) > 1
            wide_size = 4 * sum(image.size for image in images)
            if not wide:
                kept = np.stack(images)
            else:
                kept = np.stack([unit(image) for image in images]) if wide_size <= settings.cache_mib * MIB else None
    again = [(name, path, found.digest) for (name, path), (_, _, found) in zip(files.items(), read, strict=True)]
    digests = {name: found.digests for name, (_, _, found) in zip(files, read, strict=True)}
    return Pixels(settings, kept, again), [origin for _, origin, _ in read], digests


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
