"""What can be said of a site's images before there is a study: how many, of how many patients. No pixel is decoded."""

from dataclasses import dataclass
from pathlib import Path

from fl_algorithms.tasks.images.files import ARRAYS, DICOM, PILLOW, array_shapes, files_in, kind_of, read_arrays
from fl_algorithms.tasks.images.labels import paired, rows_of
from fl_algorithms.tasks.images.nifti import NIFTI
from fl_algorithms.tasks.source import Source
from fl_algorithms.tasks.tables.table import read_table
from wardround.errors import BadData

MAX_BYTES = 1 << 30  # of the patients' array, unpacked


@dataclass(frozen=True)
class Survey:
    """``patients``: None where no column of theirs is named."""

    images: int
    patients: int | None


def survey(source: Source, *, test: bool) -> Survey | None:
    """The training or the test images of ``source``, as far as their names and tables go; None where it has none.

    Raises:
        BadData: a file is missing, too many, or of a kind that no study reads; a named column is not there.
    """
    arrays, prefix = ("test", "test_") if test else ("arrays", "")
    if arrays in source.paths:
        return _of_arrays(source, source.paths[arrays])
    if f"{prefix}images" not in source.paths:
        return None
    folder, masks, labels = (source.paths.get(f"{prefix}{role}") for role in ("images", "masks", "labels"))
    assert folder is not None
    files = files_in(folder)
    _refuse_other_kinds(folder, files)
    if masks is not None:
        _refuse_other_kinds(masks, files_in(masks))
        paired(folder, files, masks)
    if labels is None:
        return Survey(len(files), None)
    return Survey(len(files), _patients_of(source, folder, files, labels, masks=masks is not None))


def _of_arrays(source: Source, path: Path) -> Survey:
    if path.suffix.lower() != ARRAYS:
        raise BadData(f"{path}: not a {ARRAYS} file by its name", hint="`numpy.savez_compressed(FILE, images=...)`")
    shapes = array_shapes(path)
    for name in filter(None, ("images", source.label, source.patient)):
        if name not in shapes:
            shown = ", ".join(f"`{other[:40]}`" for other in sorted(shapes)[:8]) or "nothing"
            raise BadData(f"{path}: no array `{name}`", hint=f"the file has {shown}")
        if not shapes[name] or shapes[name][0] != shapes["images"][0]:
            raise BadData(f"{path}: `images` is {list(shapes['images'])}, but `{name}` is {list(shapes[name])}")
    if not source.patient:
        return Survey(shapes["images"][0], None)
    _, found = read_arrays(path, {source.patient: True}, MAX_BYTES)
    return Survey(shapes["images"][0], len(set(found[source.patient].tolist())))


def _patients_of(source: Source, folder: Path, files: dict[str, Path], labels: Path, *, masks: bool) -> int | None:
    """Their number where the column is named; whether the table fits the folder, as far as columns are named."""
    wanted = [source.image, "" if masks else source.label, source.patient]
    table = read_table(labels, [name for name in wanted if name])
    if source.image:
        rows_of(table, folder, files, source.image)
    if len(table) != len(files):
        raise BadData(f"{labels}: {len(table)} rows, {folder} has {len(files)} images", hint="one row for each image")
    return len(set(table.columns[source.patient])) if source.patient else None


def _refuse_other_kinds(folder: Path, files: dict[str, Path]) -> None:
    if other := [name for name, path in files.items() if not kind_of(path)]:
        more = f" and {len(other) - 1} more" if len(other) > 1 else ""
        raise BadData(
            f"{folder}: {other[0]}{more}: no image that a study reads",
            hint=f"move it out of the folder; known are {', '.join((*PILLOW, *NIFTI, DICOM))}",
        )
