"""A site's images with what is known of each: class or mask, and patient. Checked as a whole, or refused. No torch.

A set comes from one .npz file or from a folder with a table of labels. What fits into the study's cache stays decoded.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fl_algorithms.settings.images import PixelSettings
from fl_algorithms.tasks.findings import where
from fl_algorithms.tasks.images.decoding import Array
from fl_algorithms.tasks.images.files import ARRAYS, files_in, read_arrays, read_bytes, sha256
from fl_algorithms.tasks.images.labels import Labels, LabelSource, ReadLabels, paired, rows_of
from fl_algorithms.tasks.images.nifti import require_same_grid, require_same_kind
from fl_algorithms.tasks.images.pixels import MIB, ByPlace, pixels_of_arrays, pixels_of_files
from fl_algorithms.tasks.images.reading import Digests as Pairs
from fl_algorithms.tasks.images.reading import Origin, decoded, files_of, flattened, images_in
from fl_algorithms.tasks.source import Source
from fl_algorithms.tasks.tables.table import read_table
from wardround.errors import BadData
from wardround.signing import canonical

Digests = str | list[list[str]]  # of a file, or [name, SHA-256] of each in a folder


@dataclass(frozen=True)
class ImageSet:
    """Images for one purpose.

    Attributes:
        path: the .npz file or the folder, for messages.
        names: of each image; places from 0 where they came as arrays.
        y: class of each, int64 (n,); or of each pixel, uint8 (n, *size), packed where the study looks at pieces; None
            for images to be predicted.
        patients: of each image; () where the data do not say.
        digests: role -> what was read.
        origins: of each image to be predicted, before it was brought to the study's size.
    """

    path: Path
    pixels: ByPlace
    names: tuple[str, ...]
    y: Labels | None
    patients: tuple[str, ...]
    digests: Mapping[str, Digests]
    origins: tuple[Origin, ...] = ()

    def __len__(self) -> int:
        return len(self.pixels)


def source_digest(source: Source, tell: Callable[[int, int], object] = lambda done, of: None) -> str:
    """What a site's approval pins (hex), from the files as they are now.

    Args:
        tell: called after each file of a folder, with how many were read, and of how many in that folder.

    Raises:
        BadData: one cannot be read.
    """
    return digest_of({role: _digest_of_path(path, tell) for role, path in source.paths.items()}, source)


def digest_of(digests: Mapping[str, Digests], source: Source) -> str:
    """SHA-256 (hex) of the canonical JSON of every file's name and SHA-256, by role, with the columns' names."""
    columns = {"label": source.label, "patient": source.patient, "image": source.image}
    return canonical.digest({"files": dict(digests), **columns})


def read_set(
    source: Source, settings: PixelSettings, read_y: ReadLabels, *, test: bool, masks: bool
) -> ImageSet | None:
    """The training or the test images of ``source``; None where it has none to test.

    Args:
        read_y: what is to be learned of the images that were found.

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


def read_plain(path: Path, settings: PixelSettings) -> ImageSet:
    """Images to be predicted, of a folder or a .npz file.

    Raises:
        BadData: as ``read_set``.
    """
    if path.suffix.lower() == ARRAYS:
        digest, found = read_arrays(path, {"images": True}, settings.cache_mib * MIB)
        pixels, origins = pixels_of_arrays(path, found["images"], settings)
        return ImageSet(path, pixels, tuple(map(str, range(len(pixels)))), None, (), {"arrays": digest}, tuple(origins))
    files = images_in(path, settings)
    pixels, origins, digests = pixels_of_files(files, settings)
    return ImageSet(path, pixels, tuple(files), None, (), {"images": flattened(digests)}, tuple(origins))


def _from_arrays(role: str, source: Source, settings: PixelSettings, read_y: ReadLabels, *, masks: bool) -> ImageSet:
    path, label, patient = source.path(role), source.label or _own_label(settings), source.patient or settings.patient
    wanted = {"images": True, "masks" if masks else label: True} | ({patient: True} if patient else {})
    digest, arrays = read_arrays(path, wanted, settings.cache_mib * MIB)
    pixels, origins = pixels_of_arrays(path, arrays["images"], settings)
    for name, array in arrays.items():
        if array.ndim == 0 or len(array) != len(pixels):
            raise BadData(f"{path}: {len(pixels)} images, but `{name}` is {list(array.shape)}")
    if masks and arrays["masks"].dtype.kind not in "buif":
        raise BadData(f"{path}: `masks` holds no numbers")
    labels = LabelSource(
        path, label, tuple(map(str, range(len(pixels)))), origins, () if masks else _texts(path, label, arrays[label]),
        (), ((path, mask) for mask in arrays["masks"]) if masks else (),
    )  # fmt: skip
    patients = _texts(path, patient, arrays[patient]) if patient else ()
    return ImageSet(path, pixels, labels.names, read_y(labels), patients, {role: digest})


def _from_folder(
    role: str,
    source: Source,
    settings: PixelSettings,
    read_y: ReadLabels,
    *,
    masks: bool,
    prefix: str,
) -> ImageSet:
    folder, label = source.path(role), source.label or _own_label(settings)
    files = images_in(folder, settings)
    patient, image = source.patient or settings.patient, source.image or settings.image
    digests: dict[str, Digests] = {}
    table = None
    if patient or not masks:
        at = source.path(f"{prefix}labels")
        table = read_table(at, [image, *([] if masks else [label]), *([patient] if patient else [])])
        digests[f"{prefix}labels"] = table.sha256
    elif f"{prefix}labels" in source.paths:
        digests[f"{prefix}labels"] = sha256(read_bytes(source.paths[f"{prefix}labels"]))
    rows = rows_of(table, folder, files, image) if table else []
    at = source.path(f"{prefix}masks") if masks else folder
    mask_files = paired(folder, files, at, images_in(at, settings)) if masks else []
    pixels, origins, pairs = pixels_of_files(files, settings)
    digests[role] = flattened(pairs)
    labels = LabelSource(
        table.path if table and not masks else folder,
        label,
        tuple(files),
        origins,
        tuple(table.columns[label][row] for row in rows) if table and not masks else (),
        tuple(table.lines[row] for row in rows) if table and not masks else (),
        _mask_arrays(list(files.values()), origins, mask_files, settings, digests, f"{prefix}masks") if masks else (),
    )
    y = read_y(labels)
    patients = tuple(table.columns[patient][row] for row in rows) if table and patient else ()
    if table and "" in patients:
        lines = sorted(table.lines[row] for row, who in zip(rows, patients, strict=True) if not who)
        raise BadData(
            f"{table.path}: {where(lines)}: column `{patient}` has no value", hint="enter who it is, in any code"
        )
    return ImageSet(folder, pixels, labels.names, y, patients, digests)


def _mask_arrays(
    images: Sequence[Path],
    origins: Sequence[Origin],
    files: Sequence[tuple[str, Path]],
    settings: PixelSettings,
    digests: dict[str, Digests],
    role: str,
) -> Iterable[tuple[Path, Array]]:
    """Each mask of ``images`` as it is read; when the last has been, their digests stand in ``digests``."""
    seen: dict[str, Pairs] = {}
    for image, origin, (name, path) in zip(images, origins, files, strict=True):
        data = files_of(name, path)
        found = decoded(data, settings, mask=True)
        seen[name] = data.digests
        require_same_kind(image, path, origin.places, found.places)
        if found.array.shape == origin.sides:  # what else is said where they are compared
            require_same_grid(path, origin.sides, origin.places, found.places)
        yield path, found.array
    digests[role] = flattened(seen)


def _texts(path: Path, name: str, array: Array) -> tuple[str, ...]:
    if array.ndim != 1 or array.dtype.kind not in "buiU":
        raise BadData(f"{path}: `{name}` is not one whole number or text for each image")
    return tuple(str(int(value)) if array.dtype.kind != "U" else str(value).strip() for value in array)


def _digest_of_path(path: Path, tell: Callable[[int, int], object]) -> Digests:
    if not path.is_dir():
        return sha256(read_bytes(path))
    digests, files = [], files_in(path)
    for name, file in files.items():
        digests.append([name, sha256(read_bytes(file))])
        tell(len(digests), len(files))
    return digests


def _own_label(settings: Any) -> str:
    return str(getattr(settings, "label", ""))
