"""What can be said of a site's images before there is a study: how many, of how many patients, and of which form.

No pixel is decoded. What a form says (modality, size, spacing) is counted; of a header's text, only the modalities of
``MODALITIES`` are ever shown.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from PIL import Image

from fl_algorithms.tasks.images.decoding import guarded
from fl_algorithms.tasks.images.dicom import header_of
from fl_algorithms.tasks.images.files import (
    ARRAYS,
    DICOM,
    PILLOW,
    array_shapes,
    files_in,
    kind_of,
    read_arrays,
    read_bytes,
)
from fl_algorithms.tasks.images.labels import paired, rows_of
from fl_algorithms.tasks.images.nifti import NIFTI, grid
from fl_algorithms.tasks.images.volumes.series import headers_of, is_dicom, series_in
from fl_algorithms.tasks.images.volumes.spacing import lengths_of
from fl_algorithms.tasks.source import Source
from fl_algorithms.tasks.tables.table import read_table
from wardround.errors import BadData

MAX_BYTES = 1 << 30  # of the patients' array, unpacked
MODALITIES = {
    "CT", "MR", "PT", "US", "CR", "DX", "MG", "NM", "XA", "RF", "OP", "OPT", "ES", "SM", "XC", "GM", "SEG", "OCT",
    "IVUS", "IVOCT",
}  # fmt: skip
OTHER = "another"
Counts = Mapping[str, Mapping[str, int]]  # what is counted -> how often each is there, the commonest first


@dataclass(frozen=True)
class Survey:
    """``patients``: None where no column of theirs is named. ``forms``: of the images' kind, modality, size in pixels
    and spacing in mm, (depth x height x width), as far as files say them.
    """

    images: int
    patients: int | None
    forms: Counts = field(default_factory=dict)


def survey(source: Source, *, test: bool, tell: Callable[[int, int], object] = lambda done, of: None) -> Survey | None:
    """The training or the test images of ``source``, as far as their names and tables go; None where it has none.

    Args:
        tell: called after each file, with how many were looked at, and of how many.

    Raises:
        BadData: a file is missing, too many, or of a kind that no study reads; a named column is not there; slices are
            no whole series.
    """
    arrays, prefix = ("test", "test_") if test else ("arrays", "")
    if arrays in source.paths:
        return _of_arrays(source, source.paths[arrays])
    if f"{prefix}images" not in source.paths:
        return None
    folder, masks, labels = (source.paths.get(f"{prefix}{role}") for role in ("images", "masks", "labels"))
    assert folder is not None
    files, whole = _files(folder)
    given, given_whole = ({}, {}) if masks is None else _files(masks)
    wanted = len(given_whole) if masks is not None else len(read_table(labels, [])) if labels else len(whole)
    if len(whole) == wanted:  # folders of slices are volumes, and not so many images
        files, given = whole, given_whole
    if masks is not None:
        paired(folder, files, masks, given)
    patients = None if labels is None else _patients_of(source, folder, files, labels, masks=masks is not None)
    return Survey(len(files), patients, _forms(files, tell))


def _forms(files: Mapping[str, Path], tell: Callable[[int, int], object]) -> Counts:
    counts = {name: Counter[str]() for name in ("kind", "modality", "size", "spacing in mm")}
    for done, path in enumerate(files.values(), 1):
        tell(done, len(files))
        for name, text in guarded(path, partial(_form, path)).items():
            counts[name][text] += 1
    return {name: dict(counted.most_common()) for name, counted in counts.items() if counted}


def _form(path: Path) -> dict[str, str]:
    if path.is_dir():
        data = {file.name: read_bytes(file) for file in sorted(files_in(path, below=False).values())}
        slices, modality = headers_of(path, data)
        steps = (abs(float((slices[1].corner - slices[0].corner) @ slices[0].normal)), *reversed(slices[0].step))
        return {
            "kind": "DICOM series", "modality": _known(modality), "size": _text((len(slices), *slices[0].sides)),
            "spacing in mm": _text(steps),
        }  # fmt: skip
    kind = kind_of(path)
    if kind in NIFTI:
        sides, places = grid(path)
        return {"kind": "NIfTI", "size": _text(tuple(reversed(sides))), "spacing in mm": _text(lengths_of(places))}
    if kind in PILLOW:
        with Image.open(path, formats=(PILLOW[kind],)) as image:
            return {"kind": PILLOW[kind], "size": _text((image.height, image.width))}
    header = header_of(path, read_bytes(path), ("Modality", "Rows", "Columns", "NumberOfFrames"))
    frames, sides = int(header["NumberOfFrames"] or 1), (int(header["Rows"] or 0), int(header["Columns"] or 0))
    size = _text((frames, *sides) if frames > 1 else sides)
    return {"kind": "DICOM", "modality": _known(str(header["Modality"])), "size": size}


def _known(modality: str) -> str:
    return modality if modality in MODALITIES else OTHER


def _text(lengths: tuple[float, ...]) -> str:
    return " x ".join(f"{length:.4g}" for length in lengths)


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
    forms = {"kind": {"array": shapes["images"][0]}, "size": {_text(shapes["images"][1:]): shapes["images"][0]}}
    if not source.patient:
        return Survey(shapes["images"][0], None, forms)
    _, found = read_arrays(path, {source.patient: True}, MAX_BYTES)
    return Survey(shapes["images"][0], len(set(found[source.patient].tolist())), forms)


def _patients_of(source: Source, folder: Path, files: Mapping[str, Path], labels: Path, *, masks: bool) -> int | None:
    """Their number where the column is named; whether the table fits the folder, as far as columns are named."""
    wanted = [source.image, "" if masks else source.label, source.patient]
    table = read_table(labels, [name for name in wanted if name])
    if source.image:
        rows_of(table, folder, files, source.image)
    if len(table) != len(files):
        raise BadData(f"{labels}: {len(table)} rows, {folder} has {len(files)} images", hint="one row for each image")
    return len(set(table.columns[source.patient])) if source.patient else None


def _files(folder: Path) -> tuple[dict[str, Path], dict[str, Path]]:
    """All below ``folder``, and the same with each folder of slices as one.

    Raises:
        BadData: one is of a kind that no study reads.
    """
    files = files_in(folder)
    if other := [name for name, path in files.items() if not kind_of(path) and not is_dicom(path)]:
        more = f" and {len(other) - 1} more" if len(other) > 1 else ""
        raise BadData(
            f"{folder}: {other[0]}{more}: no image that a study reads",
            hint=f"move it out of the folder; known are {', '.join((*PILLOW, *NIFTI, DICOM))}",
        )
    return files, series_in(files, folder)
