"""One file of pixels as an array, or a sentence that says what is wrong with it. No torch.

PNG, JPEG and TIFF are decoded by Pillow, DICOM and NIfTI in modules of their own, .npz by numpy. Whatever a file says
of its size is compared with the limit before anything is decoded, nothing is ever unpickled, and of a header nothing is
kept.
"""

import hashlib
import io
import math
import zipfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from fl_algorithms.tasks.images.decoding import AGAIN, Array, guarded, require_pixels
from fl_algorithms.tasks.images.dicom import dicom
from fl_algorithms.tasks.images.nifti import NIFTI, volume
from wardround.errors import BadData

PILLOW = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".tif": "TIFF", ".tiff": "TIFF"}
DICOM, ARRAYS = ".dcm", ".npz"
DICOM_MAGIC = (b"DICM", 128)  # and its place: what a DICOM file begins with, whatever its name
DIRECTORY = "DICOMDIR"  # lists what is on a disc; has no image
MAX_FILE_BYTES = 1 << 32
Image.MAX_IMAGE_PIXELS = None  # it would warn and go on; ``require_pixels`` refuses


def kind_of(path: Path) -> str:
    """The ending that says how a file is read, lower case; "" if it is none of ours."""
    name = path.name.lower()
    if name.endswith(".nii.gz"):
        return ".nii.gz"
    ending = path.suffix.lower()
    return ending if ending in (*PILLOW, *NIFTI, DICOM) else ""


def read_bytes(path: Path) -> bytes:
    """The whole file.

    Raises:
        BadData: it cannot be read, is no file, is empty or above 4 GiB.
    """
    try:
        if path.exists() and not path.is_file():
            raise BadData(f"{path}: not a file")
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise BadData(f"{path}: {size:,} bytes, the largest file taken has {MAX_FILE_BYTES:,}")
        data = path.read_bytes()
    except OSError as error:
        raise BadData(f"{path}: {error.strerror}") from None
    if not data:
        raise BadData(f"{path}: the file is empty", hint=AGAIN)
    return data


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def decode(path: Path, data: bytes, max_pixels: int, *, mask: bool = False) -> Array:
    """The pixels that ``data``, the bytes of ``path``, hold: (height, width, channels), of a volume (depth, height,
    width, 1). Numbers are as stored, but see ``dicom`` and ``nifti``; a palette's colors are looked up.

    Args:
        mask: the file holds classes: (height, width) or (depth, height, width), a palette's places themselves.

    Raises:
        BadData: it is not what its name says, is damaged, has more than ``max_pixels``, or holds nan or infinity.
        NeedsPerson: what reads files of this kind is not installed.
    """
    kind = kind_of(path) or (DICOM if data.startswith(*DICOM_MAGIC) else "")
    if kind in PILLOW:
        array = guarded(path, partial(_pillow, path, data, PILLOW[kind], max_pixels, mask))
    elif kind in NIFTI:
        array = volume(path, data, max_pixels, mask=mask)
    elif kind == DICOM:
        array = dicom(path, data, max_pixels, mask=mask)
    else:
        known = ", ".join((*PILLOW, *NIFTI, DICOM))
        raise BadData(f"{path}: no image that a study reads", hint=f"move it out of the folder; known are {known}")
    if mask and array.ndim and array.shape[-1] == 1 and kind not in PILLOW:
        array = array[..., 0]
    return finite(path, array)


def finite(path: Path, array: Array) -> Array:
    """``array``, of finite numbers.

    Raises:
        BadData: nan or infinity, with the count.
    """
    if array.dtype.kind == "f" and (bad := int(array.size - np.isfinite(array).sum())):
        raise BadData(
            f"{path}: {bad} of {array.size} numbers are nan or infinite", hint="fill them in, or take the file out"
        )
    return array


def _pillow(path: Path, data: bytes, form: str, max_pixels: int, mask: bool) -> Array:
    try:
        image = Image.open(io.BytesIO(data), formats=(form,))
    except UnidentifiedImageError:
        raise BadData(f"{path}: not a {form} file, whatever its name says", hint=AGAIN) from None
    with image:
        require_pixels(path, (image.height, image.width), max_pixels)
        if form == "TIFF" and getattr(image, "n_frames", 1) > 1:
            raise BadData(f"{path}: has several pages", hint="one file for each image")
        image.load()
        if mask:
            if image.mode not in ("1", "L", "P", "I;16", "I;16B", "I"):
                raise BadData(f"{path}: a mask of color mode {image.mode}", hint="a mask has one number for each pixel")
            return np.asarray(image).astype(np.int32)
        return _samples(path, image)


def _samples(path: Path, image: Image.Image) -> Array:
    mode = image.mode
    if mode.startswith("I;16"):
        return np.asarray(image).astype(np.uint16)[..., None]
    if mode == "I":
        wide = np.asarray(image)
        if wide.min() < 0 or wide.max() > 65535:
            raise BadData(f"{path}: numbers of more than 16 bit", hint="export it with 8 or 16 bit")
        return wide.astype(np.uint16)[..., None]
    if mode == "F":
        return np.asarray(image)[..., None]
    if mode in ("1", "L", "LA"):
        return np.asarray(image.convert("L"))[..., None]
    if mode in ("P", "PA", "RGB", "RGBA"):
        return np.asarray(image.convert("RGB"))
    raise BadData(f"{path}: color mode {mode}", hint="export it as gray or RGB")


def read_arrays(path: Path, wanted: Mapping[str, bool], max_bytes: int) -> tuple[str, dict[str, Array]]:
    """The ``wanted`` arrays of a .npz file, name -> whether it must be there, and the file's SHA-256 (hex).

    Raises:
        BadData: it is no such file or damaged, lacks an array, holds Python objects in place of numbers or text, or has
            more than ``max_bytes`` unpacked.
    """
    data = read_bytes(path)
    try:
        archive = zipfile.ZipFile(io.BytesIO(data))
    except (zipfile.BadZipFile, ValueError, NotImplementedError):
        raise BadData(f"{path}: not a .npz file, or cut off", hint=AGAIN) from None
    found: dict[str, Array] = {}
    with archive:
        present = {name.removesuffix(".npy") for name in archive.namelist()}
        for name, needed in wanted.items():
            if name in present:
                found[name] = guarded(path, partial(_member, path, archive, name, max_bytes))
            elif needed:
                shown = ", ".join(f"`{other[:40]}`" for other in sorted(present)[:8]) or "nothing"
                raise BadData(f"{path}: no array `{name}`", hint=f"the file has {shown}")
    return sha256(data), found


def array_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """The shape of each array of a .npz file, as its header says.

    Raises:
        BadData: it is no such file, or damaged.
    """
    try:
        archive = zipfile.ZipFile(path)
    except OSError as error:
        raise BadData(f"{path}: {error.strerror}") from None
    except (zipfile.BadZipFile, ValueError, NotImplementedError):
        raise BadData(f"{path}: not a .npz file, or cut off", hint=AGAIN) from None
    with archive:
        names = [name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")]
        heads = {name: guarded(path, partial(_head, archive, name)) for name in names}
    return {name: shape for name, (shape, _) in heads.items()}


def _head(archive: zipfile.ZipFile, name: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
    with archive.open(f"{name}.npy") as file:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file)
    return shape, dtype


def _member(path: Path, archive: zipfile.ZipFile, name: str, max_bytes: int) -> Array:
    shape, dtype = _head(archive, name)
    if dtype.kind not in "buifU":
        raise BadData(
            f"{path}: `{name}` holds Python objects or records, which are never unpacked",
            hint="write numbers or text: `numpy.savez_compressed(FILE, images=numpy.stack(images), ...)`",
        )
    if (size := math.prod(shape) * dtype.itemsize) > max_bytes:
        raise BadData(
            f"{path}: `{name}` takes {size:,} bytes unpacked, the study keeps {max_bytes:,}",
            hint="give the images as files in a folder, or ask the study's author for a larger `cache_mib` in [task]",
        )
    with archive.open(f"{name}.npy") as file:
        array: Array = np.lib.format.read_array(file, allow_pickle=False)
    return array


def fitted_to(
    path: Path, array: Array, size: tuple[int, ...], fit: str, *, mask: bool = False, filling: float | None = None
) -> Array:
    """``array`` (*sides, channels) brought to ``size`` (*size, channels); a mask's (*sides) to (*size).

    Images are resized by area-weighted bilinear interpolation, masks by the nearest pixel. A volume is cut or filled
    up with ``filling``, or its smallest number, around the middle; a mask with class number 0. For "patches" they stay
    as they are.

    Raises:
        BadData: it has another number of dimensions, or another size where ``fit`` is "exact".
    """
    sides = array.shape if mask else array.shape[:-1]
    if len(sides) == 3 and len(size) == 2 and sides[0] == 1:
        array, sides = array[0], sides[1:]
    found, wanted = " x ".join(map(str, sides)), " x ".join(map(str, size))
    if len(sides) != len(size):
        slices = len(sides) == 2 and kind_of(path) in (DICOM, "")
        hint = "is it a slice? then each series in a folder of its own, with nothing else in it"
        raise BadData(
            f"{path}: {found} pixels, the study's size is {wanted}",
            hint=hint if slices else "volumes and images do not mix",
        )
    if sides == size or fit == "patches":
        return array
    if fit == "exact":
        raise BadData(f"{path}: {found} pixels, the study wants {wanted}", hint="resize it, or ask for another `fit`")
    if len(size) == 3:
        return _cut_or_fill(array, size, 0 if mask else array.min() if filling is None else filling)
    box = _middle(sides, size) if fit == "crop" else (0.0, 0.0, float(sides[1]), float(sides[0]))
    planes = [array] if mask else [array[..., channel] for channel in range(array.shape[-1])]
    resized = [_resized(plane, size, box, mask) for plane in planes]
    return resized[0] if mask else np.stack(resized, axis=-1)


def _resized(plane: Array, size: tuple[int, ...], box: tuple[float, float, float, float], mask: bool) -> Array:
    how = Image.Resampling.NEAREST if mask else Image.Resampling.BILINEAR
    if plane.dtype == np.uint8:
        return np.asarray(Image.fromarray(np.ascontiguousarray(plane)).resize((size[1], size[0]), how, box))
    wide = Image.fromarray(np.ascontiguousarray(plane, dtype=np.int32 if mask else np.float32))
    resized = np.asarray(wide.resize((size[1], size[0]), how, box))
    return (np.rint(resized) if plane.dtype.kind in "ui" else resized).astype(plane.dtype)


def _middle(sides: tuple[int, ...], size: tuple[int, ...]) -> tuple[float, float, float, float]:
    """The largest box of ``size``'s proportions in the middle: left, upper, right, lower."""
    height, width = sides
    factor = min(height / size[0], width / size[1])
    tall, wide = size[0] * factor, size[1] * factor
    left, upper = (width - wide) / 2, (height - tall) / 2
    return left, upper, min(left + wide, width), min(upper + tall, height)


def _cut_or_fill(array: Array, size: tuple[int, ...], filling: Any) -> Array:
    out = np.full((*size, *array.shape[3:]), filling, dtype=array.dtype)
    here, there = [], []
    for side, wanted in zip(array.shape, size, strict=False):
        common = min(side, wanted)
        here.append(slice((side - common) // 2, (side - common) // 2 + common))
        there.append(slice((wanted - common) // 2, (wanted - common) // 2 + common))
    out[tuple(there)] = array[tuple(here)]
    return out


def mask_at(mask: NDArray[np.uint8], sides: tuple[int, ...], fit: str) -> NDArray[np.uint8]:
    """The way back of ``fitted_to`` for a mask of places of classes: at the ``sides`` that its image has.

    What the study's size leaves out of the image is of class 0.
    """
    if mask.shape == sides or fit == "patches":
        return mask
    if len(sides) == 3:
        cut: NDArray[np.uint8] = _cut_or_fill(mask, sides, 0)
        return cut
    left, upper, right, lower = (0, 0, sides[1], sides[0])
    if fit == "crop":
        left, upper, right, lower = (round(edge) for edge in _middle(sides, (mask.shape[0], mask.shape[1])))
    out = np.zeros(sides, dtype=np.uint8)
    whole = (0.0, 0.0, float(mask.shape[1]), float(mask.shape[0]))
    out[upper:lower, left:right] = _resized(mask, (lower - upper, right - left), whole, True)
    return out


def with_channels(path: Path, array: Array, channels: int) -> Array:
    """``array`` (*sides, c) with ``channels``: gray is repeated, and three become gray by ITU-R BT.601.

    Raises:
        BadData: neither helps.
    """
    found = array.shape[-1]
    if found == channels:
        return array
    if found == 1:
        return np.repeat(array, channels, axis=-1)
    if found == 3 and channels == 1:
        gray = array.astype(np.float64) @ np.array([0.299, 0.587, 0.114])
        whole: Array = (np.rint(gray) if array.dtype.kind in "ui" else gray).astype(array.dtype)
        return whole[..., None]
    raise BadData(f"{path}: {found} channels, the study wants {channels}")


def unit(array: Array) -> NDArray[np.float32]:
    """Whole numbers that cannot be negative over the largest of their type, others as they are: float32."""
    if array.dtype.kind == "u":
        return array.astype(np.float32) * np.float32(1 / np.iinfo(array.dtype).max)
    return array.astype(np.float32, copy=False)


def files_in(folder: Path, *, below: bool = True) -> dict[str, Path]:
    """Every file below ``folder`` by its name there, in the order of the names; hidden ones are skipped, and DICOMDIR.

    Args:
        below: also those in folders below.

    Raises:
        BadData: the folder cannot be read or has none.
    """
    if not folder.is_dir():
        raise BadData(f"{folder}: not a folder")
    try:
        paths = folder.rglob("*") if below else folder.iterdir()
        found = {
            path.relative_to(folder).as_posix(): path for path in paths if path.is_file() and path.name != DIRECTORY
        }
    except OSError as error:
        raise BadData(f"{folder}: {error.strerror}") from None
    seen = {name: path for name, path in sorted(found.items()) if not any(p.startswith(".") for p in name.split("/"))}
    if not seen:
        raise BadData(f"{folder}: no files in it")
    return seen


def stem(name: str) -> str:
    """Without the ending that says how the file is read."""
    kind = kind_of(Path(name))
    return name[: len(name) - len(kind)] if kind else name
