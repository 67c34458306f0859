"""What is to be learned of each image: its class by the table of labels, or its mask. No torch.

Every image must have exactly one label, and every label an image, or the whole set is refused.
"""

import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fl_algorithms.settings.images import PixelSettings
from fl_algorithms.settings.targets import level
from fl_algorithms.tasks.findings import where
from fl_algorithms.tasks.images.decoding import Array
from fl_algorithms.tasks.images.files import stem
from fl_algorithms.tasks.images.reading import Origin, prepared_mask
from fl_algorithms.tasks.tables.table import Table
from fl_algorithms.tasks.tables.targets import classes_of
from wardround.errors import BadData

SHOWN = 3  # files named in a message


@dataclass(frozen=True)
class LabelSource:
    """What the labels of a set of images are read from.

    Attributes:
        origins: of each image before it was brought to the study's size.
        cells: the label of each, as text.
        lines: of the table of labels; () for arrays.
        masks: path and array of each, one at a time.
    """

    path: Path
    label: str
    names: tuple[str, ...]
    origins: Sequence[Origin]
    cells: tuple[str, ...]
    lines: tuple[int, ...]
    masks: Iterable[tuple[Path, Array]]


class PackedMasks:
    """Masks of their own sizes, compressed, since most of a mask is one number."""

    def __init__(self, packed: Sequence[tuple[bytes, tuple[int, ...]]], counts: NDArray[np.int64]) -> None:
        """
        Args:
            packed: each mask's places of classes as bytes, and its sides.
            counts: its pixels of each class, (n, classes).
        """
        self._packed, self.counts = packed, counts

    def __len__(self) -> int:
        return len(self._packed)

    def __getitem__(self, place: int) -> NDArray[np.uint8]:
        data, sides = self._packed[place]
        return np.frombuffer(zlib.decompress(data), dtype=np.uint8).reshape(sides)

    @classmethod
    def of(cls, masks: Iterable[NDArray[np.uint8]], classes: int) -> "PackedMasks":
        packed, counts = [], []
        for mask in masks:
            packed.append((zlib.compress(mask.tobytes(), 1), mask.shape))
            counts.append(np.bincount(mask.ravel(), minlength=classes))
        return cls(packed, np.stack(counts))

    @classmethod
    def joined(cls, parts: Sequence["PackedMasks"]) -> "PackedMasks":
        return cls([one for part in parts for one in part._packed], np.concatenate([part.counts for part in parts]))


Labels = Array | PackedMasks
ReadLabels = Callable[[LabelSource], Labels]  # what is to be learned of each image, in their order


def classes_among(labels: LabelSource, classes: Sequence[str]) -> NDArray[np.int64]:
    """The index of each image's class.

    Raises:
        BadData: a label is none of the study's classes.
    """
    if labels.lines:
        table = Table(labels.path, "", {labels.label: list(labels.cells)}, list(labels.lines))
        return classes_of(table, labels.label, classes)
    place = {level(text): place for place, text in enumerate(classes)}
    indices = [place.get(level(cell)) for cell in labels.cells]
    if unknown := indices.count(None):
        raise BadData(
            f"{labels.path}: {unknown} of {len(indices)} entries of `{labels.label}` are no class of the study",
            hint=f"the classes are: {', '.join(classes)}",
        )
    return np.array(indices, dtype=np.int64)


def masks_among(labels: LabelSource, settings: PixelSettings, values: Sequence[int]) -> Labels:
    """The class of each pixel, (n, *size), uint8; packed where the study looks at pieces of images.

    Raises:
        BadData: a mask is not as large as its image, or has a number that means no class.
    """
    masks = _classes_of_pixels(labels, settings, values)
    return PackedMasks.of(masks, len(values)) if settings.fit == "patches" else np.stack(list(masks))


def _classes_of_pixels(
    labels: LabelSource, settings: PixelSettings, values: Sequence[int]
) -> Iterator[NDArray[np.uint8]]:
    largest = max(values)
    place = np.full(largest + 2, -1, dtype=np.int32)  # of each number; the last stands for all that are larger
    place[list(values)] = range(len(values))
    for (path, mask), origin, name in zip(labels.masks, labels.origins, labels.names, strict=True):
        at = str(path) if path != labels.path else f"{path}: mask {name}"
        if mask.shape != origin.sides:
            raise BadData(
                f"{at}: {_sides(mask.shape)} pixels, its image has {_sides(origin.sides)}",
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
        yield prepared_mask(path, known.astype(np.uint8), origin, settings)


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
    if unlabeled := [name for name in files if name not in rows]:
        raise BadData(
            f"{folder}: {_named(unlabeled)} no row in {table.path}", hint="add the row, or move the image elsewhere"
        )
    return [rows[name] for name in files]


def paired(folder: Path, images: Mapping[str, Path], masks: Path, given: Mapping[str, Path]) -> list[tuple[str, Path]]:
    """Each image's mask, with its name in its folder: the same name but for the ending.

    Args:
        given: what is in the folder ``masks``, by name.

    Raises:
        BadData: an image has no mask or several, a mask has no image.
    """
    found = {stem(name): (name, path) for name, path in given.items()}
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
    if len(given) != len(found):
        raise BadData(f"{masks}: two masks have the same name but for the ending", hint="one mask for each image")
    return [found[stem(name)] for name in images]


def _named(names: Sequence[str]) -> str:
    """ "a.png has", "a.png and b.png have", "a.png, b.png, c.png and 7 more have"."""
    if len(names) == 1:
        return f"{names[0]} has"
    if len(names) <= SHOWN:
        return f"{', '.join(names[:-1])} and {names[-1]} have"
    return f"{', '.join(names[:SHOWN])} and {len(names) - SHOWN} more have"


def _sides(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
