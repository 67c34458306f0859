"""A volume out of the slices of a DICOM series: one folder, one file a slice.

The slices are sorted by where they lie, never by their names or numbers. What would make a wrong volume is refused
with the file that is to blame: slices of another series, size, direction or spacing; a slice too few, or one too many;
slices that are shifted against each other, as with a tilted gantry.

Of the headers, the pixels' form (see ``dicom``) and where they lie are read, and the series' identifier to compare it.
None of it is kept but the grid, and none but lengths in mm is ever shown.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_algorithms.tasks.images.decoding import guarded, require_pixels
from fl_algorithms.tasks.images.dicom import dicom, header_of
from fl_algorithms.tasks.images.files import DICOM_MAGIC, unit
from wardround.errors import BadData, NeedsPerson

PLACE = ("ImagePositionPatient", "ImageOrientationPatient", "PixelSpacing")
READ = ("SeriesInstanceUID", "Rows", "Columns", "NumberOfFrames", *PLACE)
SAME_DIRECTION = 1e-3  # of a unit vector: a twentieth of a degree
SAME_LENGTH = 1e-3  # as a share
SAME_PLACE = 0.01  # of the usual step between two slices
UNEVEN = 0.2  # of the usual step
SHIFTED = 0.05  # of a step along the normal: 3 degrees
# DICOM's axes run to the left and to the back, NIfTI's to the right and to the front.
TO_RAS = np.diag([-1.0, -1.0, 1.0])
ONE_FOLDER = "give each series a folder of its own"

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class Slice:
    """Where one file's pixels lie. ``step``: from a pixel to the next, in mm, (across, down)."""

    name: str
    series: str
    sides: tuple[int, int]  # (rows, columns)
    corner: Vector  # the middle of the first pixel
    across: Vector  # from a column to the next, a unit vector
    down: Vector  # from a row to the next, a unit vector
    step: tuple[float, float]

    @property
    def normal(self) -> Vector:
        return np.cross(self.across, self.down)


def is_dicom(path: Path) -> bool:
    """Whether it begins as a DICOM file does, whatever its name. Raises BadData: it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(DICOM_MAGIC[1] + len(DICOM_MAGIC[0])).startswith(*DICOM_MAGIC)
    except OSError as error:
        raise BadData(f"{path}: {error.strerror}") from None


def series_in(files: Mapping[str, Path], folder: Path) -> dict[str, Path]:
    """``files`` below ``folder`` by name, with each folder of slices as one, by the folder's name.

    A folder of slices lies below ``folder`` and directly holds nothing but DICOM files of one frame, two or more.

    Raises:
        BadData: a file cannot be read. NeedsPerson: pydicom is not installed.
    """
    by_parent: dict[Path, list[Path]] = {}
    for path in files.values():
        by_parent.setdefault(path.parent, []).append(path)
    slices = {
        parent
        for parent, paths in by_parent.items()
        if parent != folder and len(paths) > 1 and all(map(is_dicom, paths)) and _is_slice(min(paths))
    }
    found: dict[str, Path] = {}
    for name, path in files.items():
        whole = path.parent in slices
        found[path.parent.relative_to(folder).as_posix() if whole else name] = path.parent if whole else path
    return dict(sorted(found.items()))


def digest_of_series(digests: Sequence[Sequence[str]]) -> str:
    """SHA-256 (hex) of the slices' own, each (name, SHA-256)."""
    return hashlib.sha256("".join(f"{name}\0{digest}\n" for name, digest in digests).encode()).hexdigest()


def volume(
    folder: Path, files: Mapping[str, bytes], max_pixels: int, *, mask: bool
) -> tuple[NDArray[Any], Vector, Vector]:
    """(depth, height, width, 1), turned as a NIfTI volume is; where its voxels lie, (4, 4), places (x, y, z) to mm; and
    where the places (column, row, slice) of the series do.

    Args:
        files: the slices' bytes by name.
        mask: the files hold classes: their numbers as stored.

    Raises:
        BadData: a slice is of a kind that is not read, or they are no whole series.
        NeedsPerson: pydicom or nibabel is not installed.
    """
    slices = sorted_slices(folder, [_slice(folder, name, data) for name, data in files.items()])
    require_pixels(folder, (len(slices), *slices[0].sides), max_pixels)
    planes = [dicom(folder / one.name, files[one.name], max_pixels, mask=mask) for one in slices]
    for one, plane in zip(slices, planes, strict=True):
        if plane.shape != (*one.sides, 1):
            raise BadData(f"{folder / one.name}: a slice in colors, or of several frames", hint="export it as gray")
    if len({plane.dtype for plane in planes}) > 1:  # each slice may have a scale of its own, and one a scale of 1
        planes = [unit(plane) for plane in planes]
    places = grid_of(slices)
    return *_turned(folder, np.stack(planes), places), places


def headers_of(folder: Path, files: Mapping[str, bytes]) -> tuple[list[Slice], str]:
    """The slices of one whole series, sorted, without their pixels; and the first file's modality.

    Raises:
        BadData, NeedsPerson: as ``volume``.
    """
    slices = sorted_slices(folder, [_slice(folder, name, data) for name, data in files.items()])
    first = slices[0].name
    return slices, str(header_of(folder / first, files[first], ("Modality",))["Modality"])


def sorted_slices(folder: Path, slices: Sequence[Slice]) -> list[Slice]:
    """The slices of one whole series, from the first along its normal to the last.

    Raises:
        BadData: they are not.
    """
    first = slices[0]
    for one in slices[1:]:
        _require_alike(folder, first, one)
    if len(slices) == 1:
        raise BadData(f"{folder}: one slice alone", hint="a volume needs two or more; is the export complete?")
    along = {one.name: float(one.corner @ first.normal) for one in slices}
    ordered = sorted(slices, key=lambda one: (along[one.name], one.name))
    steps = np.diff([along[one.name] for one in ordered])
    usual = float(np.median(steps))
    for (one, other), step in zip(pairwise(ordered), steps.tolist(), strict=True):
        if step <= SAME_PLACE * usual or step <= 0:
            raise BadData(
                f"{folder}: {one.name} and {other.name} lie at the same place",
                hint=f"a copy, or another phase or echo? {ONE_FOLDER}, or take one out",
            )
        if step > (2 - UNEVEN) * usual:
            missing = round(step / usual) - 1
            raise BadData(
                f"{folder}: {step:.4g} mm between {one.name} and {other.name}, elsewhere {usual:.4g} mm: "
                f"{missing} slice{'s' if missing > 1 else ''} missing",
                hint="export the series again, whole",
            )
        if abs(step - usual) > UNEVEN * usual:
            raise BadData(
                f"{folder}: {step:.4g} mm between {one.name} and {other.name}, elsewhere {usual:.4g} mm",
                hint="a series has one distance between its slices; export it so, or convert it: `dcm2niix`",
            )
    _require_straight(folder, ordered)
    return ordered


def grid_of(slices: Sequence[Slice]) -> Vector:
    """Where the voxels (column, row, slice) of sorted slices lie: (4, 4), to mm to the right, front and head."""
    first, last = slices[0], slices[-1]
    out = np.eye(4)
    out[:3, 0] = TO_RAS @ (first.across * first.step[0])
    out[:3, 1] = TO_RAS @ (first.down * first.step[1])
    out[:3, 2] = TO_RAS @ ((last.corner - first.corner) / (len(slices) - 1))
    out[:3, 3] = TO_RAS @ first.corner
    return out


def _is_slice(path: Path) -> bool:
    with path.open("rb") as file:
        return int(header_of(path, file.read(), ("NumberOfFrames",))["NumberOfFrames"] or 1) == 1


def _slice(folder: Path, name: str, data: bytes) -> Slice:
    return guarded(folder / name, partial(_place_of, folder / name, data))


def _place_of(path: Path, data: bytes) -> Slice:
    header = header_of(path, data, READ)
    for keyword, length in zip(PLACE, (3, 6, 2), strict=True):
        value = header[keyword]
        if value is None or len(value) != length or not np.isfinite(np.array(value, dtype=float)).all():
            raise BadData(
                f"{path}: it does not say where it lies ({keyword})",
                hint="a localizer or a report? then take it out; else export the series again",
            )
    position, directions, step = (np.array(header[keyword], dtype=float) for keyword in PLACE)
    across, down = directions[:3], directions[3:]
    sizes = [float(np.linalg.norm(across)), float(np.linalg.norm(down))]
    if max(abs(size - 1) for size in sizes) > 0.01 or abs(float(across @ down)) > 0.01 or min(step) <= 0:
        raise BadData(f"{path}: it does not say where it lies: its directions are none", hint="export the series again")
    return Slice(
        path.name, str(header["SeriesInstanceUID"]), (int(header["Rows"] or 0), int(header["Columns"] or 0)),
        position, across / sizes[0], down / sizes[1], (float(step[1]), float(step[0])),
    )  # fmt: skip


def _require_alike(folder: Path, first: Slice, one: Slice) -> None:
    path = folder / one.name
    if one.series != first.series:
        raise BadData(f"{path}: of another series than {first.name} beside it", hint=ONE_FOLDER)
    turned = max(np.linalg.norm(one.across - first.across), np.linalg.norm(one.down - first.down))
    if turned > SAME_DIRECTION:
        angle = np.degrees(np.arccos(np.clip(abs(one.normal @ first.normal), 0, 1)))
        raise BadData(
            f"{path}: lies in another direction than {first.name} beside it ({angle:.0f} degrees between them)",
            hint=f"a localizer? then take it out; else {ONE_FOLDER}",
        )
    if one.sides != first.sides:
        raise BadData(
            f"{path}: {one.sides[0]} x {one.sides[1]} pixels, {first.name} beside it has "
            f"{first.sides[0]} x {first.sides[1]}",
            hint=ONE_FOLDER,
        )
    if not np.allclose(one.step, first.step, rtol=SAME_LENGTH):
        raise BadData(
            f"{path}: pixels of {one.step[1]:.4g} x {one.step[0]:.4g} mm, {first.name} beside it has "
            f"{first.step[1]:.4g} x {first.step[0]:.4g} mm",
            hint=ONE_FOLDER,
        )


def _require_straight(folder: Path, slices: Sequence[Slice]) -> None:
    """That each slice lies over the one before it."""
    normal = slices[0].normal
    for one, other in pairwise(slices):
        step = other.corner - one.corner
        along = float(step @ normal)
        aside = float(np.linalg.norm(step - along * normal))
        if aside > max(SHIFTED * along, SAME_LENGTH):
            raise BadData(
                f"{folder}: {other.name} is shifted by {aside:.3g} mm against {one.name} (a tilted gantry?)",
                hint="straighten it while converting it: `dcm2niix -z y -o OUT IN` gives a NIfTI file",
            )


def _turned(folder: Path, voxels: NDArray[Any], places: Vector) -> tuple[NDArray[Any], Vector]:
    """(depth, height, width, 1) in the order of the body, and its grid."""
    try:
        from nibabel.orientations import apply_orientation, inv_ornt_aff, io_orientation
    except ImportError:
        raise NeedsPerson(f"{folder}: nibabel is not installed", hint="`pip install 'wardround[dicom]'`") from None
    across = voxels[..., 0].transpose(2, 1, 0)  # (column, row, slice)
    turn = io_orientation(places)
    out = apply_orientation(across, turn).transpose(2, 1, 0)
    return np.ascontiguousarray(out)[..., None], places @ inv_ornt_aff(turn, across.shape)
