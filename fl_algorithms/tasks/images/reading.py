"""One image of a site as the study sees it: decoded, at the study's spacing, in its window. No torch.

An image is one file or, in a study of volumes, the folder of a DICOM series.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fl_algorithms.settings.images import PixelSettings
from fl_algorithms.tasks.images import intensity
from fl_algorithms.tasks.images.decoding import Array
from fl_algorithms.tasks.images.files import (
    decode,
    files_in,
    finite,
    fitted_to,
    read_bytes,
    sha256,
    unit,
    with_channels,
)
from fl_algorithms.tasks.images.nifti import NIFTI, affine_of, grid
from fl_algorithms.tasks.images.volumes import series
from fl_algorithms.tasks.images.volumes.spacing import lengths_of, respaced, spaced_sides
from wardround.errors import BadData

Digests = list[list[str]]  # name and SHA-256 of each file


@dataclass(frozen=True)
class Origin:
    """An image before anything was done to it, so that a mask can go back there.

    Attributes:
        sides: its own.
        spaced: at the study's spacing; ``sides`` where the study has none.
        places: where its voxels lie, (4, 4), places (x, y, z) to mm; None where the file does not say.
        affine: the same of the voxels as the file has them, before they were turned.
    """

    sides: tuple[int, ...]
    spaced: tuple[int, ...]
    places: NDArray[np.float64] | None = None
    affine: NDArray[np.float64] | None = None


@dataclass(frozen=True)
class Files:
    """An image's bytes: of its one file, or of each slice by the slice's name; and their digests."""

    path: Path
    content: bytes | Mapping[str, bytes]
    digests: Digests

    @property
    def digest(self) -> str:
        """Of all of them."""
        return self.digests[0][1] if len(self.digests) == 1 else series.digest_of_series(self.digests)


@dataclass(frozen=True)
class Decoded:
    """What ``decoded`` gives: (*sides, channels), a mask's (*sides), as the files have it. See ``Origin``."""

    array: Array
    places: NDArray[np.float64] | None = None
    affine: NDArray[np.float64] | None = None


def images_in(folder: Path, settings: PixelSettings) -> dict[str, Path]:
    """Every image below ``folder`` by its name there, in the order of the names; of volumes, also folders of slices.

    Raises:
        BadData: as ``files_in`` and ``series_in``.
    """
    files = files_in(folder)
    return files if len(settings.size) == 2 else series.series_in(files, folder)


def files_of(name: str, path: Path) -> Files:
    """All bytes of an image, or a mask. ``name``: below its folder. Raises BadData: one cannot be read."""
    if path.is_dir():
        data = {file.name: read_bytes(file) for file in sorted(files_in(path, below=False).values())}
        return Files(path, data, [[f"{name}/{file}", sha256(content)] for file, content in data.items()])
    content = read_bytes(path)
    return Files(path, content, [[name, sha256(content)]])


def decoded(files: Files, settings: PixelSettings, *, mask: bool = False) -> Decoded:
    """An image, or a mask, as its files have it.

    Raises:
        BadData, NeedsPerson: as ``decode`` and ``series.volume``.
    """
    path, content, limit = files.path, files.content, settings.max_pixels
    if not isinstance(content, bytes):
        array, places, affine = series.volume(path, content, limit, mask=mask)
        return Decoded(finite(path, array[..., 0] if mask else array), places, affine)
    array = decode(path, content, limit, mask=mask)
    lies = (grid(path, content)[1], affine_of(path, content)) if path.name.lower().endswith(NIFTI) else ()
    flat = array.ndim == (3 if mask else 4) and len(settings.size) == 2 and len(array) == 1
    return Decoded(array[0] if flat else array, *lies)


def origin_of(path: Path, image: Decoded | Array, settings: PixelSettings) -> Origin:
    """Raises BadData: the study wants a spacing, and the image does not say its own; or would be too large in that."""
    if not isinstance(image, Decoded):
        image = Decoded(image)
    sides = tuple(image.array.shape[:-1])
    if not settings.spacing:
        return Origin(sides, sides, image.places, image.affine)
    if image.places is None:
        raise BadData(
            f"{path}: it does not say how far apart its voxels are, and the study wants a spacing",
            hint="give NIfTI files or DICOM series; or the study leaves `spacing` out of [task]",
        )
    spaced = spaced_sides(sides, lengths_of(image.places), settings.spacing)
    if math.prod(spaced) > settings.max_pixels:
        raise BadData(
            f"{path}: {' x '.join(map(str, spaced))} voxels at the study's spacing, the study takes "
            f"{settings.max_pixels:,}",
            hint="is its own spacing right? then the study's author raises `max_pixels` or `spacing` in [task]",
        )
    return Origin(sides, spaced, image.places, image.affine)


def prepared(path: Path, array: Array, origin: Origin, settings: PixelSettings) -> Array:
    """(channels, *size), or (channels, *sides) where the study looks at pieces. As stored, or float32 where the study
    changes the numbers.

    Raises:
        BadData: it has other channels or dimensions than the study, or another size where ``fit`` is "exact".
    """
    out = with_channels(path, array, settings.channels)
    if settings.spacing and origin.places is not None:
        out = unit(out)
        out = respaced(out, lengths_of(origin.places), settings.spacing, origin.spaced)
    if intensity.changes(settings):
        out = intensity.adjusted(unit(out), settings)
    filling = 0.0 if settings.normalize == "foreground" else None
    return np.ascontiguousarray(np.moveaxis(fitted_to(path, out, settings.size, settings.fit, filling=filling), -1, 0))


def prepared_mask(path: Path, mask: Array, origin: Origin, settings: PixelSettings) -> Array:
    """A mask of places of classes as ``prepared`` brings its image. Raises BadData as ``prepared``."""
    if settings.spacing and origin.places is not None:
        mask = respaced(mask, lengths_of(origin.places), settings.spacing, origin.spaced, nearest=True)
    return fitted_to(path, mask, settings.size, settings.fit, mask=True)


def flattened(digests: Mapping[str, Digests]) -> Digests:
    """Of all files of several images, in the order of the files' names."""
    return sorted(pair for pairs in digests.values() for pair in pairs)
