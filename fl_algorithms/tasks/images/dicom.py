"""The pixels of a DICOM file, through pydicom. Who the patient is is never read, and of the header nothing is kept.

What a gray number becomes, by DICOM PS3.3 C.7.6.3 (stored bits) and C.11.1 (rescale):

    it measures something   stored x slope + intercept, in its unit: Hounsfield units of a CT, whatever is stored
    it is rescaled only     the same, where slope and intercept are not 1 and 0
    else                    stored / the largest number of its stored bits, so that 12 bits of 16 reach 1 as 8 of 8 do

A rescale measures where its type names a unit (any but US, unspecified), or names none in a CT or a PET. MONOCHROME1,
in which 0 is white, is turned round within its range, so that the same tissue is bright at every site; not where
numbers measure, for a Hounsfield unit stays one however it is shown. Windows (VOI) are for screens and not applied.

A file is refused whose slices have scales of their own (enhanced multi-frame), or whose numbers go through a table.
"""

import io
import logging
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from fl_algorithms.tasks.images.decoding import AGAIN, Result, guarded, require_pixels
from wardround.errors import BadData, NeedsPerson

PALETTE = [
    f"{kind}{color}PaletteColorLookupTable{part}"
    for color in ("Red", "Green", "Blue")
    for kind, part in (("", "Descriptor"), ("", "Data"), ("Segmented", "Data"))
]
SLICES = ("SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence")
READ = [
    "Modality", "SamplesPerPixel", "PhotometricInterpretation", "PlanarConfiguration", "NumberOfFrames", "Rows",
    "Columns", "BitsAllocated", "BitsStored", "HighBit", "PixelRepresentation", "RescaleSlope", "RescaleIntercept",
    "RescaleType", "ModalityLUTSequence", "ExtendedOffsetTable", "ExtendedOffsetTableLengths", "PixelData", *SLICES,
    *PALETTE,
]  # fmt: skip
GRAY, LOOKED_UP = ("MONOCHROME1", "MONOCHROME2"), "PALETTE COLOR"
COLORS = ("RGB", "YBR_FULL", "YBR_FULL_422", "YBR_ICT", "YBR_RCT")
# Transfer syntax -> the plugin of pydicom that decodes it; "" needs none. Of JPEG and JPEG 2000 each frame says its own
# size, which Pillow can compare before it decodes. Nothing here can do that for the others.
DECODED = {
    "1.2.840.10008.1.2": "", "1.2.840.10008.1.2.1": "", "1.2.840.10008.1.2.2": "",
    "1.2.840.10008.1.2.5": "pydicom",  # RLE
    "1.2.840.10008.1.2.4.50": "pillow", "1.2.840.10008.1.2.4.51": "pillow",  # JPEG of 8 bit
    "1.2.840.10008.1.2.4.90": "pillow", "1.2.840.10008.1.2.4.91": "pillow",  # JPEG 2000
}  # fmt: skip
DEFLATED = b"1.2.840.10008.1.2.1.99"  # all but the first part is packed, and pydicom would unpack it without a limit
UNPACK = "decompress it: `gdcmconv --raw IN OUT`"
MEASURED = ("CT", "PT")
_QUIET = threading.Lock()  # the filter of warnings is the process's, and files are decoded in threads


def dicom(path: Path, data: bytes, max_pixels: int, *, mask: bool) -> NDArray[Any]:
    """(height, width, channels), of several frames (frames, height, width, channels).

    Args:
        mask: the file holds classes: its numbers as stored, whatever they are shown as.

    Raises:
        BadData: it is no such file, is damaged, has more than ``max_pixels``, or is of a kind that is not read.
        NeedsPerson: pydicom is not installed.
    """
    return _quietly(path, data, partial(_pixels, path, data, max_pixels, mask))


def header_of(path: Path, data: bytes, keywords: Sequence[str]) -> Mapping[str, Any]:
    """What a file's header has under ``keywords``, None where nothing; no other element is looked at.

    Raises:
        BadData: it is no such file, or damaged. NeedsPerson: pydicom is not installed.
    """

    def read() -> dict[str, Any]:
        header = _header(path, data, keywords)
        return {keyword: header.get(keyword) for keyword in keywords}

    return _quietly(path, data, read)


def _quietly(path: Path, data: bytes, decoded: Callable[[], Result]) -> Result:
    try:
        import pydicom
    except ImportError:
        raise NeedsPerson(f"{path}: pydicom is not installed", hint="`pip install 'wardround[dicom]'`") from None
    if DEFLATED in data:
        raise BadData(f"{path}: a deflated DICOM file, which is not unpacked", hint=UNPACK)
    # Its warnings and its log quote what stands in a header.
    logging.getLogger(pydicom.__name__).setLevel(logging.CRITICAL)
    with _QUIET, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return guarded(path, decoded)


def _header(path: Path, data: bytes, keywords: Sequence[str]) -> Any:
    from pydicom import dcmread
    from pydicom.errors import InvalidDicomError

    try:
        return dcmread(io.BytesIO(data), specific_tags=list(keywords), stop_before_pixels="PixelData" not in keywords)
    except InvalidDicomError:
        raise BadData(f"{path}: not a DICOM file, whatever its name says", hint=AGAIN) from None


def _pixels(path: Path, data: bytes, max_pixels: int, mask: bool) -> NDArray[Any]:
    from pydicom.pixels import pixel_array

    header = _header(path, data, READ)
    if not (header.get("PixelData") and header.get("Rows") and header.get("Columns")):
        raise BadData(f"{path}: a DICOM file without an image", hint="move it out of the folder")
    frames = int(header.get("NumberOfFrames") or 1)
    sides = int(header.Rows), int(header.Columns)
    require_pixels(path, (frames, *sides), max_pixels)
    _require_kind(path, header, mask)
    plugin = _plugin(path, header)
    if plugin == "pillow":
        _require_sides(path, header, frames, sides)
    stored = _stored(pixel_array(header, decoding_plugin=plugin), int(header.BitsStored))
    if mask:
        return stored[..., None]
    if header.PhotometricInterpretation == LOOKED_UP:
        from pydicom.pixels import apply_color_lut

        return np.asarray(apply_color_lut(stored, header))
    if header.PhotometricInterpretation in GRAY:
        return _gray(header, stored)[..., None]
    return _scaled(stored, (1 << int(header.BitsStored)) - 1)


def _require_kind(path: Path, header: Any, mask: bool) -> None:
    samples, shown = int(header.get("SamplesPerPixel", 1)), header.PhotometricInterpretation
    if mask and samples != 1:
        raise BadData(f"{path}: a mask in colors", hint="a mask has one number for each pixel")
    if (samples, shown) not in {(1, LOOKED_UP), *((1, gray) for gray in GRAY), *((3, color) for color in COLORS)}:
        raise BadData(f"{path}: its colors are of a kind that is not read", hint="export it as gray or RGB")
    if int(header.get("HighBit", header.BitsStored - 1)) != int(header.BitsStored) - 1:
        raise BadData(f"{path}: its numbers do not begin at the lowest bit", hint=AGAIN)
    if mask:
        return
    if header.get("ModalityLUTSequence"):
        raise BadData(f"{path}: its numbers go through a table (Modality LUT)", hint="export it with a linear scale")
    groups = [group for name in SLICES for group in header.get(name) or ()]
    if any("PixelValueTransformationSequence" in group for group in groups):
        raise BadData(
            f"{path}: its slices are scaled one by one", hint="export it as one file for each slice, or as NIfTI"
        )


def _plugin(path: Path, header: Any) -> str:
    syntax = header.file_meta.TransferSyntaxUID
    if syntax not in DECODED:
        known = f" as {syntax.name}" if syntax.type == "Transfer Syntax" else ""
        raise BadData(f"{path}: compressed{known}, which is not decoded", hint=UNPACK)
    return DECODED[syntax]


def _require_sides(path: Path, header: Any, frames: int, sides: tuple[int, int]) -> None:
    """That each compressed frame is as large as the header says."""
    from pydicom.encaps import generate_frames

    for frame in generate_frames(header.PixelData, number_of_frames=frames):
        try:
            with Image.open(io.BytesIO(frame), formats=("JPEG", "JPEG2000")) as image:
                width, height = image.size
        except UnidentifiedImageError:
            raise BadData(f"{path}: a JPEG of a kind that is not decoded, such as 12 bit", hint=UNPACK) from None
        if (height, width) != sides:
            wanted = " x ".join(map(str, sides))
            raise BadData(f"{path}: its header says {wanted} pixels, its frame {height} x {width}", hint=AGAIN)


def _stored(pixels: NDArray[Any], bits: int) -> NDArray[Any]:
    """In the machine's order of bytes, and without what lies above the stored bits, such as an overlay."""
    native = pixels.astype(pixels.dtype.newbyteorder("="))
    unused = 8 * native.dtype.itemsize - bits
    return (native << unused) >> unused if unused else native


def _gray(header: Any, stored: NDArray[Any]) -> NDArray[Any]:
    bits, signed = int(header.BitsStored), stored.dtype.kind == "i"
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)
    measures = _measures(header)
    if header.PhotometricInterpretation == "MONOCHROME1" and not measures:
        stored = low + high - stored
    slope, intercept = (header.get(name) for name in ("RescaleSlope", "RescaleIntercept"))
    slope, intercept = 1.0 if slope is None else float(slope), float(intercept or 0)
    if measures or (slope, intercept) != (1.0, 0.0):
        with np.errstate(over="ignore"):
            return (stored * np.float64(slope) + intercept).astype(np.float32)
    return _scaled(stored, high)


def _measures(header: Any) -> bool:
    if header.get("RescaleSlope") is None:
        return False
    kind = header.get("RescaleType")
    return kind != "US" if kind else header.get("Modality") in MEASURED


def _scaled(stored: NDArray[Any], high: int) -> NDArray[Any]:
    """``stored / high``; itself where ``imagefiles.unit`` will do the same."""
    if stored.dtype.kind == "u" and high == np.iinfo(stored.dtype).max:
        return stored
    return (stored / np.float64(high)).astype(np.float32)
