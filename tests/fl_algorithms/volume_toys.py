"""Made-up volumes as hospitals have them: DICOM series and NIfTI files, of any direction and spacing."""

import io
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
from numpy.typing import NDArray
from pydicom.dataset import Dataset, FileDataset, FileMetaDataset
from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian

CANARY = "Canary^Yellow"
FLAT = (1.0, 0, 0, 0, 1, 0)  # across to the left, down to the back
SERIES = "1.2.826.0.1.3680043.8.498.1"
Array = NDArray[Any]


def slice_file(
    pixels: Array, position: tuple[float, ...], spacing: tuple[float, float] = (1.0, 1.0), **changes: Any
) -> bytes:
    """A CT slice: ``pixels`` (rows, columns) in Hounsfield units, stored 1024 higher. A change to None removes it."""
    header = FileDataset("", Dataset(), preamble=b"\0" * 128)
    header.file_meta = FileMetaDataset()
    header.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    header.file_meta.MediaStorageSOPClassUID = header.SOPClassUID = CTImageStorage
    header.file_meta.MediaStorageSOPInstanceUID = header.SOPInstanceUID = f"{SERIES}.{abs(hash(position)) % 10**9}"
    header.PatientName = header.PatientID = header.SeriesDescription = CANARY
    header.Modality, header.SeriesInstanceUID = "CT", SERIES
    header.Rows, header.Columns = pixels.shape
    header.SamplesPerPixel, header.PhotometricInterpretation = 1, "MONOCHROME2"
    header.BitsAllocated, header.BitsStored, header.HighBit, header.PixelRepresentation = 16, 16, 15, 0
    header.RescaleSlope, header.RescaleIntercept, header.RescaleType = 1, -1024, "HU"
    header.ImagePositionPatient, header.ImageOrientationPatient = list(position), list(FLAT)
    header.PixelSpacing = list(spacing)
    header.PixelData = (pixels + 1024).astype("<u2").tobytes()
    for keyword, value in changes.items():
        if value is None:
            delattr(header, keyword)
        else:
            setattr(header, keyword, value)
    file = io.BytesIO()
    header.save_as(file, enforce_file_format=True)
    return file.getvalue()


def write_series(folder: Path, volume: Array, spacing: tuple[float, float, float] = (1.0, 1.0, 1.0)) -> Path:
    """``volume`` (depth, height, width) of Hounsfield units; depth to the head, rows to the back, columns to the left.

    The files' names say nothing of their order.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = np.random.default_rng(len(volume)).permutation(len(volume))
    for place, pixels in enumerate(volume):
        data = slice_file(pixels, (-7.0, 5.0, place * spacing[0]), spacing[1:])
        (folder / f"IM{names[place]:04}").write_bytes(data)
    return folder


def in_body_order(volume: Array) -> Array:
    """A series' volume as a study sees it: height to the front, width to the right."""
    return volume[:, ::-1, ::-1]


def ball(seed: int, sides: tuple[int, ...] = (16, 16, 16)) -> tuple[Array, Array]:
    """A noisy volume (depth, height, width) of Hounsfield units with a bright ball, and its mask (0, 1)."""
    random = np.random.default_rng(seed)
    middle = [random.uniform(0.35, 0.65) * side for side in sides]
    at = np.stack(np.meshgrid(*(np.arange(side) for side in sides), indexing="ij"), axis=-1)
    mask = (((at - middle) / (np.array(sides) / 4)) ** 2).sum(-1) < 1
    return np.rint(random.normal(0, 20, sides) + 200 * mask).astype(np.int16), mask.astype(np.uint8)


def write_nifti(path: Path, volume: Array, spacing: tuple[float, ...] = (1.0, 1.0, 1.0), affine: Any = None) -> Path:
    """``volume`` (depth, height, width), to the head, the front and the right."""
    path.parent.mkdir(parents=True, exist_ok=True)
    places = np.diag([*reversed(spacing), 1.0]) if affine is None else affine
    nibabel.save(nibabel.Nifti1Image(volume.transpose(2, 1, 0), places), path)
    return path
