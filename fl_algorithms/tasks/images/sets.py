"""A site's images with what is known of each: class or mask, and patient. Checked as a whole, or refused. No torch.

A set comes from one .npz file or from a folder with a table of labels. Every file is decoded once when the set is read,
so training never starts on a part of it; what fits into the study's cache stays decoded.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from fl_algorithms.settings.images import PixelSettings
from fl_algorithms.settings.tabular import level
from fl_algorithms.tasks.images.files import (
    ARRAYS,
    Array,
    decode,
    finite,
    fitted_to,
    kind_of,
    read_arrays,
    read_bytes,
    sha256,
    unit,
    with_channels,
)
from fl_algorithms.tasks.images.nifti import require_same_grid
from fl_algorithms.tasks.source import Source
from fl_algorithms.tasks.tables.encoding import classes_of
from fl_algorithms.tasks.tables.table import Table, read_table, where
from wardround.errors import BadData
from wardround.signing import canonical

DECODERS = min(8, os.cpu_count() or 1)  # threads; what they give does not depend on their number
MIB = 1 << 20
SHOWN = 3  # files named in a message

Digests = str | list[list[str]]  # of a file, or [name, SHA-256] of each in a folder


class ByPlace(Protocol):
    """Images by place, brought to the study's size."""

    @property
    def is_kept(self) -> bool:
        """Whether they stay decoded."""

    def __len__(self) -> int: ...

    def take(self, places: NDArray[np.int64]) -> NDArray[np.float32]:
        """(k, channels, *size), on the scale of ``imagefiles.unit``.

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


@dataclass(frozen=True)
class ImageSet:
    """Images for one purpose.

    Attributes:
        path: the .npz file or the folder, for messages.
        names: of each image; places from 0 where they came as arrays.
        y: class of each, int64 (n,); or of each pixel, uint8 (n, *size); None for images to be predicted.
        patients: of each image; () where the data do not say.
        digests: role -> what was read.
        sides: of each image to be predicted, before it was brought to the study's size.
    """

    path: Path
    pixels: ByPlace
    names: tuple[str, ...]
    y: Array | None
    patients: tuple[str, ...]
    digests: Mapping[str, Digests]
    sides: tuple[tuple[int, ...], ...] = ()

    def __len__(self) -> int:
        return len(self.pixels)


def source_digest(source: Source) -> str:
    """What a site's approval pins (hex), from the files as they are now.

    Raises:
        BadData: one cannot be read.
    """
    return digest_of({role: _digest_of_path(path) for role, path in source.paths.items()}, source)


def digest_of(digests: Mapping[str, Digests], source: Source) -> str:
    """SHA-256 (hex) of the canonical JSON of every file's name and SHA-256, by role, with the columns' names."""
    columns = {"label": source.label, "patient": source.patient, "image": source.image}
    return canonical.digest({"files": dict(digests), **columns})


def files_in(folder: Path) -> dict[str, Path]:
    """Every file below ``folder`` by its name there, in the order of the names; hidden ones are skipped.

    Raises:
        BadData: the folder cannot be read or has none.
    """
    if not folder.is_dir():
        raise BadData(f"{folder}: not a folder")
    try:
        found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    except OSError as error:
        raise BadData(f"{folder}: {error.strerror}") from None
    seen = {name: path for name, path in sorted(found.items()) if not any(p.startswith(".") for p in name.split("/"))}
    if not seen:
        raise BadData(f"{folder}: no files in it")
    return seen


def read_set(
    source: Source, settings: PixelSettings, read_y: Callable[["Found"], Array], *, test: bool, masks: bool
) -> ImageSet | None:
    """The training or the test images of ``source``; None where it has none to test.

    Args:
        read_y: what is to be learnt of the images that were found.

    Raises:
        BadData: a file is missing, too many, damaged or unlike its fellows; the message has which, and never a value.
    """
    arrays, prefix = "test" if test else "arrays", "test_" if test else ""
    if arrays in source.paths:
        return _from_arrays(arrays, source, settings, read_y, masks=masks)
    roles = [f"{prefix}images", f"{prefix}{'masks' if masks else 'labels'}"]
    present = [role for role in roles if role in source.paths]
    if test and not present:
        return None
    if absent := [role for role in roles if role not in source.paths]:
        raise BadData(
            f"{source.paths[present[0]]}: no `{absent[0]}` beside it" if present else "this site's data has no images",
            hint="give both or neither",
        )
    return _from_folder(roles[0], source, settings, read_y, masks=masks, prefix=prefix)


@dataclass(frozen=True)
class Found:
    """What ``read_y`` may look at.

    Attributes:
        sides: of each image before it was brought to the study's size.
        cells: the label of each, as text.
        lines: of the table of labels; () for arrays.
        masks: path and array of each, one at a time.
    """

    path: Path
    label: str
    names: tuple[str, ...]
    sides: Sequence[tuple[int, ...]]
    cells: tuple[str, ...]
    lines: tuple[int, ...]
    masks: Iterable[tuple[Path, Array]]


def classes_among(found: Found, classes: Sequence[str]) -> NDArray[np.int64]:
    """The index of each image's class.

    Raises:
        BadData: a label is none of the study's classes.
    """
    if found.lines:
        table = Table(found.path, "", {found.label: list(found.cells)}, list(found.lines))
        return classes_of(table, found.label, classes)
    place = {level(text): place for place, text in enumerate(classes)}
    indices = [place.get(level(cell)) for cell in found.cells]
    if unknown := indices.count(None):
        raise BadData(
            f"{found.path}: {unknown} of {len(indices)} entries of `{found.label}` are no class of the study",
            hint=f"the classes are: {', '.join(classes)}",
        )
    return np.array(indices, dtype=np.int64)


def masks_among(found: Found, settings: PixelSettings, values: Sequence[int]) -> NDArray[np.uint8]:
    """The class of each pixel, (n, *size).

    Raises:
        BadData: a mask is not as large as its image, or has a number that means no class.
    """
    largest = max(values)
    place = np.full(largest + 2, -1, dtype=np.int32)  # of each number; the last stands for all that are larger
    place[list(values)] = range(len(values))
    masks = []
    for (path, mask), sides, name in zip(found.masks, found.sides, found.names, strict=True):
        at = str(path) if path != found.path else f"{path}: mask {name}"
        if mask.shape != sides:
            raise BadData(
                f"{at}: {_sides(mask.shape)} pixels, its image has {_sides(sides)}",
                hint="a mask is exactly as large as its image; export it again",
            )
        if mask.dtype.kind not in "bui" and (mask != np.rint(mask)).any():
            raise BadData(f"{at}: numbers with a fraction", hint="a mask has a whole number for each pixel")
        whole = mask.astype(np.int64)
        known = place[np.where((whole < 0) | (whole > largest), largest + 1, whole)]
        if wrong := int((known < 0).sum()):
            raise BadData(
                f"{at}: {wrong} of {whole.size} pixels hold a number that means no class of the study",
                hint=f"the study's numbers are: {', '.join(map(str, values))} (`values` in [task])",
            )
        masks.append(fitted_to(path, known, settings.size, settings.fit, mask=True).astype(np.uint8))
    return np.stack(masks)


def read_plain(path: Path, settings: PixelSettings) -> ImageSet:
    """Images to be predicted, of a folder or a .npz file.

    Raises:
        BadData: as ``read_set``.
    """
    if path.suffix.lower() == ARRAYS:
        digest, found = read_arrays(path, {"images": True}, settings.cache_mib * MIB)
        pixels, sides = _kept_arrays(path, found["images"], settings)
        return ImageSet(path, pixels, tuple(map(str, range(len(pixels)))), None, (), {"arrays": digest}, tuple(sides))
    files = files_in(path)
    pixels, sides, digests = _kept_files(path, files, settings)
    return ImageSet(path, pixels, tuple(files), None, (), {"images": digests}, tuple(sides))


def _from_arrays(
    role: str, source: Source, settings: PixelSettings, read_y: Callable[[Found], Array], *, masks: bool
) -> ImageSet:
    path, label, patient = source.path(role), source.label or _own_label(settings), source.patient or settings.patient
    wanted = {"images": True, "masks" if masks else label: True} | ({patient: True} if patient else {})
    digest, arrays = read_arrays(path, wanted, settings.cache_mib * MIB)
    pixels, sides = _kept_arrays(path, arrays["images"], settings)
    for name, array in arrays.items():
        if array.ndim == 0 or len(array) != len(pixels):
            raise BadData(f"{path}: {len(pixels)} images, but `{name}` is {list(array.shape)}")
    if masks and arrays["masks"].dtype.kind not in "buif":
        raise BadData(f"{path}: `masks` holds no numbers")
    found = Found(
        path, label, tuple(map(str, range(len(pixels)))), sides, () if masks else _texts(path, label, arrays[label]),
        (), ((path, mask) for mask in arrays["masks"]) if masks else (),
    )  # fmt: skip
    patients = _texts(path, patient, arrays[patient]) if patient else ()
    return ImageSet(path, pixels, found.names, read_y(found), patients, {role: digest})


def _from_folder(
    role: str, source: Source, settings: PixelSettings, read_y: Callable[[Found], Array], *, masks: bool, prefix: str
) -> ImageSet:
    folder, label = source.path(role), source.label or _own_label(settings)
    files, patient, image = files_in(folder), source.patient or settings.patient, source.image or settings.image
    digests: dict[str, Digests] = {}
    table = None
    if patient or not masks:
        at = source.path(f"{prefix}labels")
        table = read_table(at, [image, *([] if masks else [label]), *([patient] if patient else [])])
        digests[f"{prefix}labels"] = table.sha256
    elif f"{prefix}labels" in source.paths:
        digests[f"{prefix}labels"] = sha256(read_bytes(source.paths[f"{prefix}labels"]))
    rows = rows_of(table, folder, files, image) if table else []
    mask_files = paired(folder, files, source.path(f"{prefix}masks")) if masks else []
    pixels, sides, digests[role] = _kept_files(folder, files, settings)
    found = Found(
        table.path if table and not masks else folder,
        label,
        tuple(files),
        sides,
        tuple(table.columns[label][row] for row in rows) if table and not masks else (),
        tuple(table.lines[row] for row in rows) if table and not masks else (),
        _mask_arrays(list(files.values()), mask_files, settings, digests, f"{prefix}masks") if masks else (),
    )
    y = read_y(found)
    patients = tuple(table.columns[patient][row] for row in rows) if table and patient else ()
    if table and "" in patients:
        lines = sorted(table.lines[row] for row, who in zip(rows, patients, strict=True) if not who)
        raise BadData(
            f"{table.path}: {where(lines)}: column `{patient}` has no value", hint="enter who it is, in any code"
        )
    return ImageSet(folder, pixels, found.names, y, patients, digests)


def rows_of(table: Table, folder: Path, files: Mapping[str, Path], column: str) -> list[int]:
    """The table's row of each file, which must be one.

    Raises:
        BadData: a row has no file, a file has no row or several.
    """
    rows = {name: row for row, name in enumerate(table.columns[column])}
    counts = Counter(table.columns[column])
    absent = [line for line, name in zip(table.lines, table.columns[column], strict=True) if name not in files]
    if absent:
        raise BadData(
            f"{table.path}: {where(absent)}: column `{column}` names a file that is not in {folder}",
            hint="add the image or take the row out; names are as in the folder, with their ending",
        )
    if twice := [line for line, name in zip(table.lines, table.columns[column], strict=True) if counts[name] > 1]:
        raise BadData(
            f"{table.path}: {where(twice)}: the same file in column `{column}`", hint="one row for each image"
        )
    if unlabelled := [name for name in files if name not in rows]:
        raise BadData(
            f"{folder}: {_named(unlabelled)} no row in {table.path}", hint="add the row, or move the image elsewhere"
        )
    return [rows[name] for name in files]


def paired(folder: Path, images: Mapping[str, Path], masks: Path) -> list[tuple[str, Path]]:
    """Each image's mask, with its name in its folder: the same name but for the ending.

    Raises:
        BadData: an image has no mask or several, a mask has no image.
    """
    found = {stem(name): (name, path) for name, path in files_in(masks).items()}
    stems = Counter(map(stem, images))
    if twice := [name for name in images if stems[stem(name)] > 1]:
        raise BadData(f"{folder}: {_named(twice)} the same name but for the ending", hint="rename one, and its mask")
    if absent := [name for name in images if stem(name) not in found]:
        raise BadData(
            f"{folder}: {_named(absent)} no mask in {masks}",
            hint="a mask has its image's name, whatever the ending; add it, or move the image elsewhere",
        )
    if extra := [name for stem, (name, _) in found.items() if stem not in stems]:
        raise BadData(f"{masks}: {_named(extra)} no image in {folder}", hint="add it, or move the mask elsewhere")
    if len(files_in(masks)) != len(found):
        raise BadData(f"{masks}: two masks have the same name but for the ending", hint="one mask for each image")
    return [found[stem(name)] for name in images]


def _mask_arrays(
    images: Sequence[Path],
    files: Sequence[tuple[str, Path]],
    settings: PixelSettings,
    digests: dict[str, Digests],
    role: str,
) -> Iterable[tuple[Path, Array]]:
    """Each mask of ``images`` as it is read; when the last has been, their digests stand in ``digests``."""
    seen: list[list[str]] = []
    for image, (name, path) in zip(images, files, strict=True):
        data = read_bytes(path)
        seen.append([name, sha256(data)])
        require_same_grid(image, path, data)
        array = decode(path, data, settings.max_pixels, mask=True)
        yield path, array[0] if array.ndim == 3 and len(settings.size) == 2 and len(array) == 1 else array
    digests[role] = sorted(seen)


def _kept_arrays(path: Path, images: Array, settings: PixelSettings) -> tuple[Pixels, list[tuple[int, ...]]]:
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


def _kept_files(
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


def _texts(path: Path, name: str, array: Array) -> tuple[str, ...]:
    if array.ndim != 1 or array.dtype.kind not in "buiU":
        raise BadData(f"{path}: `{name}` is not one whole number or text for each image")
    return tuple(str(int(value)) if array.dtype.kind != "U" else str(value).strip() for value in array)


def _digest_of_path(path: Path) -> Digests:
    if path.is_dir():
        return [[name, sha256(read_bytes(file))] for name, file in files_in(path).items()]
    return sha256(read_bytes(path))


Item = TypeVar("Item")
Result = TypeVar("Result")


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


def _own_label(settings: Any) -> str:
    return str(getattr(settings, "label", ""))


def _named(names: Sequence[str]) -> str:
    """ "a.png has", "a.png and b.png have", "a.png, b.png, c.png and 7 more have"."""
    if len(names) == 1:
        return f"{names[0]} has"
    if len(names) <= SHOWN:
        return f"{', '.join(names[:-1])} and {names[-1]} have"
    return f"{', '.join(names[:SHOWN])} and {len(names) - SHOWN} more have"


def _sides(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def stem(name: str) -> str:
    """Without the ending that says how the file is read."""
    kind = kind_of(Path(name))
    return name[: len(name) - len(kind)] if kind else name
