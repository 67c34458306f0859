"""DICOM files as they come out of machines: what their numbers become, what is refused, and that no patient is told.

The files are those of pydicom's own distribution.
"""

import io
import logging
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
import pytest
from pydicom.dataset import Dataset
from pydicom.pixels import apply_color_lut
from pydicom.sequence import Sequence

from fl_algorithms.tasks.images.files import decode, read_bytes, unit
from wardround.errors import BadData

FILES = Path(pydicom.__file__).parent / "data" / "test_files"
LIMIT = 10_000_000
CANARY = "Canary^Yellow"


def theirs(name: str) -> Any:
    """pydicom's own view of a file."""
    return pydicom.dcmread(FILES / name)


def read(path: Path, **options: Any) -> Any:
    return decode(path, read_bytes(path), LIMIT, **options)


def saved(path: Path, header: Any, **changes: Any) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what no machine should write
        for name, value in changes.items():
            setattr(header, name, value)
        header.save_as(path, enforce_file_format=True)
    return path


def refusal(path: Path, **options: Any) -> BadData:
    with pytest.raises(BadData) as caught:
        read(path, **options)
    return caught.value


# name -> what a network sees, of pydicom's pixels
MEANINGS: dict[str, Callable[[Any], Any]] = {
    "CT_small.dcm": lambda x: x - 1024.0,  # signed, 16 of 16 bit: Hounsfield units
    "693_J2KI.dcm": lambda x: x - 1024.0,  # JPEG 2000, 14 of 16 bit
    "J2K_pixelrep_mismatch.dcm": lambda x: x * 1.0,  # a CT that stores Hounsfield units as they are
    "MR_small.dcm": lambda x: x / 32767,  # signed, without a unit
    "MR_small_RLE.dcm": lambda x: x / 32767,
    "MR_small_bigendian.dcm": lambda x: x / 32767,
    "MR_small_implicit.dcm": lambda x: x / 32767,
    "MR_small_jp2klossless.dcm": lambda x: x / 32767,
    "MR_small_padded.dcm": lambda x: x / 32767,  # pydicom warns of bytes too many
    "examples_overlay.dcm": lambda x: x / 4095,  # 12 of 16 bit
    "liver_1frame.dcm": lambda x: x / 1,  # 1 bit
    "SC_rgb_small_odd.dcm": lambda x: x / 255,
    "SC_rgb_small_odd_big_endian.dcm": lambda x: x / 255,
    "SC_rgb_dcmtk_+eb+cy+np.dcm": lambda x: x / 255,  # JPEG in another color space
    "SC_ybr_full_422_uncompressed.dcm": lambda x: x / 255,
    "SC_rgb_rle_16bit_2frame.dcm": lambda x: x / 65535,
    "SC_rgb_rle_32bit.dcm": lambda x: x / 4294967295,
}


@pytest.mark.parametrize("name", MEANINGS)
def test_numbers_are_pydicoms_on_the_scale_that_their_header_gives(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pixels = theirs(name).pixel_array.astype(np.float64)
    found = unit(read(FILES / name))
    expected = MEANINGS[name](pixels)
    assert found.shape == (expected.shape if expected.shape[-1] == 3 else (*expected.shape, 1))
    assert np.allclose(found.reshape(expected.shape), expected, rtol=1e-6, atol=1e-7)


def test_a_palettes_colors_are_looked_up_in_an_image_and_kept_as_places_in_a_mask() -> None:
    header = theirs("examples_palette.dcm")
    places = header.pixel_array
    assert (read(FILES / "examples_palette.dcm") == apply_color_lut(places, header)).all()
    assert (read(FILES / "examples_palette.dcm", mask=True) == places).all()


def test_a_masks_numbers_are_as_stored_however_they_are_shown(tmp_path: Path) -> None:
    assert set(np.unique(read(FILES / "liver_1frame.dcm", mask=True))) == {0, 1}
    header = theirs("CT_small.dcm")
    path = saved(tmp_path / "a.dcm", header, PhotometricInterpretation="MONOCHROME1")
    assert (read(path, mask=True) == header.pixel_array).all()
    assert refusal(FILES / "SC_rgb_small_odd.dcm", mask=True).message.endswith(": a mask in colors")


def test_where_0_is_white_the_range_is_turned_round(tmp_path: Path) -> None:
    signed = theirs("MR_small.dcm")
    path = saved(tmp_path / "a.dcm", signed, PhotometricInterpretation="MONOCHROME1")
    assert np.allclose(read(path)[..., 0], (-1 - signed.pixel_array.astype(int)) / 32767)
    twelve = theirs("examples_overlay.dcm")
    path = saved(tmp_path / "b.dcm", twelve, PhotometricInterpretation="MONOCHROME1")
    assert np.allclose(read(path)[..., 0], (4095 - twelve.pixel_array.astype(int)) / 4095)


def test_where_0_is_white_a_scale_without_a_unit_is_turned_too_and_a_measurement_is_not(tmp_path: Path) -> None:
    shown = {"PhotometricInterpretation": "MONOCHROME1", "RescaleSlope": "2", "RescaleIntercept": "-10"}
    header = theirs("examples_overlay.dcm")
    stored = header.pixel_array.astype(int)
    plain = read(saved(tmp_path / "a.dcm", header, **shown))
    assert np.allclose(plain[..., 0], (4095 - stored) * 2.0 - 10)  # an MR has no unit
    unspecified = read(saved(tmp_path / "b.dcm", header, Modality="CT", RescaleType="US", **shown))
    assert np.allclose(unspecified, plain)
    measured = read(saved(tmp_path / "c.dcm", header, Modality="OT", RescaleType="HU", **shown))
    assert np.allclose(measured[..., 0], stored * 2.0 - 10)


def test_an_x_ray_with_a_scale_of_1_reaches_from_0_to_1(tmp_path: Path) -> None:
    """Digital X-rays must carry slope 1, intercept 0 and the type US, which say nothing."""
    header = theirs("examples_overlay.dcm")
    said = {"Modality": "DX", "RescaleSlope": "1", "RescaleIntercept": "0", "RescaleType": "US"}
    path = saved(tmp_path / "a.dcm", header, PhotometricInterpretation="MONOCHROME1", **said)
    assert np.allclose(read(path)[..., 0], (4095 - header.pixel_array.astype(int)) / 4095)


def test_two_cts_that_store_hounsfield_units_differently_agree(tmp_path: Path) -> None:
    header = theirs("CT_small.dcm")
    units = header.pixel_array - np.int16(1024)
    direct = saved(tmp_path / "a.dcm", header, PixelData=units.tobytes(), RescaleIntercept="0")
    assert (read(direct) == read(FILES / "CT_small.dcm")).all()


def test_what_lies_above_the_stored_bits_is_no_part_of_the_image(tmp_path: Path) -> None:
    header = theirs("examples_overlay.dcm")
    plain = read(FILES / "examples_overlay.dcm")
    crowded = (header.pixel_array | np.uint16(0xA000)).tobytes()
    assert (read(saved(tmp_path / "a.dcm", header, PixelData=crowded)) == plain).all()


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        (
            "JPEGLSNearLossless_08.dcm",
            "compressed as JPEG-LS Lossy (Near-Lossless)",
            "gdcmconv --raw",
        ),
        ("SC_rgb_jpeg_gdcm.dcm", "compressed as JPEG Lossless", "gdcmconv --raw"),
        ("JPEG-lossy.dcm", "a JPEG of a kind that is not decoded, such as 12 bit", "gdcmconv --raw"),
        ("image_dfl.dcm", "a deflated DICOM file", "gdcmconv --raw"),
        ("MR_truncated.dcm", "damaged or cut off (ValueError)", "export or copy it again"),
        ("badVR.dcm", "damaged or cut off (ValueError)", "export or copy it again"),
        ("rtplan.dcm", "a DICOM file without an image", "move it out of the folder"),
        ("no_meta.dcm", "not a DICOM file, whatever its name says", "export or copy it again"),
        # Its frame's own header says 3,722,445,056 rows.
        ("JPEG2000-embedded-sequence-delimiter.dcm", "its header says 1024 x 256 pixels, its frame 1024 x", "again"),
    ],
)
def test_a_file_that_is_not_read_is_refused_with_its_name_and_what_to_do(name: str, message: str, hint: str) -> None:
    found = refusal(FILES / name)
    assert found.message.startswith(f"{FILES / name}: {message}")
    assert hint in found.hint


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "the file is empty"),
        (b"hello" * 100, "not a DICOM file, whatever its name says"),
        (bytes(128) + b"DICM", "a DICOM file without an image"),
    ],
)
def test_a_file_that_is_no_dicom_file_is_refused(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "a.dcm").write_bytes(data)
    assert refusal(tmp_path / "a.dcm").message == f"{tmp_path}/a.dcm: {message}"


@pytest.mark.parametrize("share", [0.3, 0.6, 0.95])
@pytest.mark.parametrize("name", ["CT_small.dcm", "MR_small_RLE.dcm", "SC_rgb_dcmtk_+eb+cr.dcm"])
def test_a_file_that_is_cut_off_anywhere_is_refused(tmp_path: Path, name: str, share: float) -> None:
    data = (FILES / name).read_bytes()
    (tmp_path / "a.dcm").write_bytes(data[: int(len(data) * share)])
    found = refusal(tmp_path / "a.dcm")
    assert found.message.startswith(f"{tmp_path}/a.dcm: ")
    assert found.hint


def test_a_file_that_says_too_much_is_refused_before_it_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decoded(*_: Any, **__: Any) -> None:
        raise AssertionError("it was decoded")

    monkeypatch.setattr("pydicom.pixels.pixel_array", decoded)
    for name, changes in (("MR_small.dcm", {"Rows": 60_000, "Columns": 60_000}), ("MR_small_RLE.dcm", {})):
        path = saved(tmp_path / name, theirs(name), NumberOfFrames="5000", **changes)
        sides = "60000 x 60000" if changes else "64 x 64"
        message = f"{path}: its header says 5000 x {sides} pixels, the study takes {LIMIT:,}"
        assert refusal(path).message == message


def test_a_frame_larger_than_the_header_says_is_refused_before_it_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decoded(*_: Any, **__: Any) -> None:
        raise AssertionError("it was decoded")

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", decoded)
    path = saved(tmp_path / "a.dcm", theirs("SC_rgb_dcmtk_+eb+cr.dcm"), Rows=10, Columns=10)
    assert refusal(path).message == f"{path}: its header says 10 x 10 pixels, its frame 100 x 100"


def test_scales_of_single_slices_and_tables_are_refused(tmp_path: Path) -> None:
    group, scale = Dataset(), Dataset()
    scale.RescaleSlope, scale.RescaleIntercept = "2", "0"
    group.PixelValueTransformationSequence = Sequence([scale])
    path = saved(tmp_path / "a.dcm", theirs("MR_small.dcm"), PerFrameFunctionalGroupsSequence=Sequence([group]))
    assert refusal(path).message == f"{path}: its slices are scaled one by one"
    table = Dataset()
    table.LUTDescriptor, table.LUTData = [2, 0, 16], [0, 9]
    table["LUTDescriptor"].VR, table["LUTData"].VR = "US", "US"
    path = saved(tmp_path / "b.dcm", theirs("MR_small.dcm"), ModalityLUTSequence=Sequence([table]))
    assert refusal(path).message == f"{path}: its numbers go through a table (Modality LUT)"


@pytest.mark.parametrize(
    "changes",
    [{"SamplesPerPixel": 4, "PhotometricInterpretation": "CMYK"}, {"PhotometricInterpretation": CANARY}],
)
def test_other_kinds_of_color_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = saved(tmp_path / "a.dcm", theirs("MR_small.dcm"), **changes)
    assert refusal(path).message == f"{path}: its colors are of a kind that is not read"


def test_decoding_in_threads_leaves_warnings_as_they_were() -> None:
    before, path = list(warnings.filters), FILES / "MR_small_padded.dcm"
    start = threading.Barrier(4)

    def one(_: int) -> Any:
        start.wait()
        return read(path).sum()

    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(one, range(16)))) == 1
    assert warnings.filters == before


@pytest.mark.parametrize(
    "break_it", ["not", "long name", "cut off", "no image", "too large", "colors", "number", "set"]
)
def test_nothing_that_is_said_of_a_file_quotes_its_header(
    tmp_path: Path, break_it: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    header = theirs("MR_small.dcm")
    header.PatientName = header.PatientID = header.StudyDescription = header.InstitutionName = CANARY
    path = tmp_path / "a.dcm"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if break_it == "long name":
            header.PatientID = header.PatientName = CANARY * 20
        elif break_it == "no image":
            del header.PixelData
        elif break_it == "too large":
            header.Rows = header.Columns = 60_000
        elif break_it == "colors":
            header.PhotometricInterpretation = CANARY
        elif break_it == "number":
            header.add_new("NumberOfFrames", "LO", CANARY)
        elif break_it == "set":
            header.SpecificCharacterSet = CANARY
        saved(path, header)
    if break_it == "cut off":
        path.write_bytes(path.read_bytes()[:-1000])
    caplog.clear()
    capfd.readouterr()
    said = ""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            read(path)
        except BadData as error:
            said = f"{error.message} {error.hint} {error.__cause__!r}"
    assert bool(said) == (break_it not in ("not", "long name", "set"))
    heard = [said, caplog.text, *capfd.readouterr(), *(str(one.message) for one in warned)]
    assert not any("Canary" in text for text in heard)


def test_a_round_trip_of_the_canary_shows_that_it_was_there(tmp_path: Path) -> None:
    header = theirs("MR_small.dcm")
    path = saved(tmp_path / "a.dcm", header, PatientName=CANARY)
    assert CANARY.encode() in path.read_bytes()
    assert str(pydicom.dcmread(io.BytesIO(path.read_bytes())).PatientName) == CANARY
