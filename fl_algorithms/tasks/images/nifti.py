"""The voxels of a NIfTI file, through nibabel: in the order of the body, and in the file's own units.

Axes are turned and swapped to the nearest order in which x runs to the right, y to the front and z to the head
("RAS+"), so that (depth, height, width) means the same at every site, whichever way a scanner or a converter wrote it.
Nothing is interpolated: a volume that lies askew stays so. A file that does not say which way it lies is refused.

Numbers are what the file says, scaled where it says so: whole ones of 8 and 16 bit stay whole, all others are float32.
Extensions, which may hold a whole DICOM header, are never read.
"""

import gzip
import io
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_algorithms.tasks.images.decoding import AGAIN, guarded, require_pixels
from wardround.errors import BadData, NeedsPerson

NIFTI = (".nii", ".nii.gz")
HEADERS = {348: ("Nifti1Header", b"n+1"), 540: ("Nifti2Header", b"n+2")}  # size in bytes -> class, magic of one file
LARGEST_HEADER, BEGINNING = 540, 1 << 16  # bytes
MAX_OFFSET = 1 << 24  # of the first voxel; what lies before it is skipped, but unpacked
NARROW = ("uint8", "int8", "int16")  # what an int16 holds


def volume(path: Path, data: bytes, max_pixels: int, *, mask: bool) -> NDArray[Any]:
    """(depth, height, width, 1).

    Args:
        mask: the file holds classes: its numbers as stored.

    Raises:
        BadData: it is no such file, is damaged, has more than ``max_pixels``, is a series of volumes, holds no plain
            numbers, or does not say how it lies.
        NeedsPerson: nibabel is not installed.
    """
    return guarded(path, lambda: _volume(path, data, max_pixels, mask))


def grid(path: Path, data: bytes | None = None) -> tuple[tuple[int, ...], NDArray[np.float64]]:
    """The shape (x, y, z) of a file's volume as ``volume`` turns it, and where its voxels lie: (4, 4), places to mm.

    Args:
        data: the file's bytes, where they are at hand; else no more of it than the header is read.

    Raises:
        BadData, NeedsPerson: as ``volume``; or the file cannot be read.
    """
    return guarded(path, lambda: _grid(path, _beginning(path) if data is None else data))


def affine_of(path: Path, data: bytes) -> NDArray[np.float64]:
    """Where the voxels of a file lie as it has them, before they are turned: (4, 4), places to mm.

    Raises:
        BadData, NeedsPerson: as ``volume``.
    """
    return guarded(path, lambda: np.asarray(_header(path, data).get_best_affine()))


def packed_mask(mask: NDArray[Any], places: NDArray[np.float64], affine: NDArray[np.float64]) -> bytes:
    """A .nii.gz file of a mask (depth, height, width) with the axes of its image.

    Args:
        places: where the mask's voxels lie, (4, 4), places (x, y, z) to mm: the image's ``grid``.
        affine: the same of the voxels as the image's file has them.
    """
    from nibabel.nifti1 import Nifti1Image
    from nibabel.orientations import apply_orientation, io_orientation, ornt_transform

    back = ornt_transform(io_orientation(places), io_orientation(affine))
    turned = np.ascontiguousarray(apply_orientation(mask.transpose(2, 1, 0), back))
    return gzip.compress(Nifti1Image(turned, affine).to_bytes(), mtime=0)


Places = NDArray[np.float64] | None  # where voxels lie, (4, 4), places (x, y, z) to mm; None: the file does not say


def require_same_kind(image: Path, mask: Path, theirs: Places, ours: Places) -> None:
    """Raises BadData: of an image and its mask, one only says where it lies."""
    if (theirs is None) != (ours is None):
        raise BadData(
            f"{mask}: of another kind than its image {image.name}",
            hint="give both as NIfTI files; a DICOM series may have a NIfTI mask",
        )


def require_same_grid(mask: Path, sides: tuple[int, ...], theirs: Places, ours: Places) -> None:
    """That an image and its mask, both of ``sides``, lie on each other, to half a voxel; nothing where neither says.

    Raises:
        BadData: they do not.
    """
    if theirs is None or ours is None:
        return
    depth, height, width = (1, 1, *sides)[-3:]
    corners = np.array([[x, y, z, 1] for x in (0, width) for y in (0, height) for z in (0, depth)])
    apart = float(np.linalg.norm(((theirs - ours) @ corners.T)[:3], axis=0).max())
    voxel = float(np.linalg.norm(theirs[:3, :3], axis=0).min())
    if not apart <= voxel / 2:
        raise BadData(
            f"{mask}: lies up to {apart:.3g} mm from its image, whose voxels are {voxel:.3g} mm",
            hint="the right mask? then write it with its image's affine: `nibabel.Nifti1Image(mask, image.affine)`",
        )


def _volume(path: Path, data: bytes, max_pixels: int, mask: bool) -> NDArray[Any]:
    header = _header(path, data)
    shape, kind = _shape(path, header), _kind(path, header)
    require_pixels(path, tuple(reversed(shape)), max_pixels)
    turned, _ = _turned(path, header, shape)
    start = int(header.get_data_offset()) or header.single_vox_offset
    if not header.sizeof_hdr <= start <= MAX_OFFSET:
        raise BadData(f"{path}: its NIfTI header says that pixels begin at byte {start}", hint=AGAIN)
    end = start + kind.itemsize * math.prod(shape)
    content = unpacked(data, end)
    if len(content) < end:
        raise BadData(f"{path}: cut off: {len(content):,} bytes, its header says {end:,}", hint=AGAIN)
    from nibabel.arrayproxy import ArrayProxy
    from nibabel.orientations import apply_orientation

    slope, intercept = header.get_slope_inter()
    scale = (1.0 if slope is None else slope, 0.0 if intercept is None else intercept)
    with np.errstate(over="ignore"):
        stored = np.asarray(ArrayProxy(io.BytesIO(content), (shape, kind, start, *scale), mmap=False))
        if not mask:
            stored = stored.astype(np.int16 if stored.dtype.name in NARROW else np.float32)
    return np.ascontiguousarray(apply_orientation(stored, turned).transpose(2, 1, 0))[..., None]


def _header(path: Path, data: bytes) -> Any:
    try:
        import nibabel
    except ImportError:
        raise NeedsPerson(f"{path}: nibabel is not installed", hint="`pip install 'wardround[monai]'`") from None
    head = unpacked(data, LARGEST_HEADER)
    for order in "<>":
        size = struct.unpack(f"{order}i", head[:4])[0] if len(head) >= 4 else 0
        if size in HEADERS and len(head) >= size:
            kind, magic = HEADERS[size]
            header = getattr(nibabel, kind)(head[:size], order, check=False)
            if bytes(header["magic"]).startswith(magic):
                return header
    raise BadData(f"{path}: not a NIfTI file of one piece, whatever its name says", hint=AGAIN)


def _shape(path: Path, header: Any) -> tuple[int, ...]:
    shape: tuple[int, ...] = header.get_data_shape()
    if not 2 <= len(shape) <= 7 or min(shape) < 1 or any(side != 1 for side in shape[3:]):
        raise BadData(f"{path}: a NIfTI file of shape {list(shape)}", hint="one volume for each file")
    return (*shape[:3], 1)[:3]


def _kind(path: Path, header: Any) -> np.dtype[Any]:
    code = int(header["datatype"])
    try:
        kind: np.dtype[Any] = header.get_data_dtype()
    except Exception:  # nibabel's, for a code that is none
        kind = np.dtype(object)
    if kind.kind not in "iuf" or kind.itemsize > 8:
        raise BadData(f"{path}: NIfTI data type {code}", hint="export it as whole numbers or floats")
    return kind


def _turned(path: Path, header: Any, shape: tuple[int, ...]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """How the axes are turned, as nibabel has it, and where the turned voxels lie."""
    from nibabel.orientations import inv_ornt_aff, io_orientation

    if header["sform_code"] <= 0 and header["qform_code"] <= 0:
        raise BadData(
            f"{path}: it does not say which way it lies (neither sform nor qform)",
            hint="write it with its affine: `nibabel.Nifti1Image(array, affine)`",
        )
    affine = header.get_best_affine()
    turned = io_orientation(affine)
    if np.isnan(turned).any():
        raise BadData(f"{path}: its affine has fewer than three directions", hint=AGAIN)
    return turned, affine @ inv_ornt_aff(turned, shape)


def _grid(path: Path, data: bytes) -> tuple[tuple[int, ...], NDArray[np.float64]]:
    header = _header(path, data)
    shape = _shape(path, header)
    turned, places = _turned(path, header, shape)
    return tuple(shape[axis] for axis in np.argsort(turned[:, 0])), places


def _beginning(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(BEGINNING)
    except OSError as error:
        raise BadData(f"{path}: {error.strerror}") from None


def unpacked(data: bytes, size: int) -> bytes:
    """The first ``size`` bytes, of gzip data unpacked, or fewer where it ends; never more in memory."""
    if data[:2] != b"\x1f\x8b":
        return data[:size]
    with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
        try:
            return file.read(size)
        except EOFError:
            return b""
