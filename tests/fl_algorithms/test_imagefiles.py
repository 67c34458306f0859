"""Reading single files: what is decoded to what, and what is refused before it is decoded."""

import gzip
import io
import struct
import sys
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fl_algorithms.tasks.images.files import decode, fitted_to, read_arrays, read_bytes, unit, with_channels
from wardround.errors import BadData, NeedsPerson

RAMP = np.arange(48, dtype=np.uint8).reshape(6, 8)
LIMIT = 1000


def saved(path: Path, array: Any, **options: Any) -> Path:
    Image.fromarray(array).save(path, **options)
    return path


def read(path: Path, **options: Any) -> Any:
    return decode(path, read_bytes(path), LIMIT, **options)


def refusal(path: Path, **options: Any) -> BadData:
    with pytest.raises(BadData) as caught:
        read(path, **options)
    return caught.value


def nifti(volume: Any, code: int, *, slope: float = 1.0, intercept: float = 0.0, order: str = "<") -> bytes:
    """A NIfTI-1 file of ``volume`` (depth z, height y, width x) of 1 mm, by the layout of its header."""
    header = bytearray(352)
    struct.pack_into(f"{order}i", header, 0, 348)
    depth, height, width = volume.shape
    struct.pack_into(f"{order}8h", header, 40, 3, width, height, depth, 1, 1, 1, 1)
    struct.pack_into(f"{order}2h", header, 70, code, 8 * volume.dtype.itemsize)
    struct.pack_into(f"{order}3f", header, 108, 352.0, slope, intercept)
    struct.pack_into(f"{order}h", header, 254, 1)  # what follows says how it lies
    struct.pack_into(f"{order}12f", header, 280, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0)
    header[344:348] = b"n+1\0"
    return bytes(header) + volume.astype(volume.dtype.newbyteorder(order)).tobytes()


def png_that_says(width: int, height: int) -> bytes:
    """A PNG file whose header claims a size and whose data is nothing."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("name", "array", "shape"),
    [
        pytest.param("a.png", RAMP, (6, 8, 1), id="gray"),
        pytest.param("a.png", RAMP.astype(np.uint16) * 1000, (6, 8, 1), id="16 bit"),
        pytest.param("a.tif", RAMP.astype(np.uint16) * 1000, (6, 8, 1), id="16 bit TIFF"),
        pytest.param("a.tiff", RAMP.astype(np.float32) / 7, (6, 8, 1), id="float TIFF"),
        pytest.param("A.PNG", np.dstack([RAMP, RAMP + 1, RAMP + 2]), (6, 8, 3), id="colors"),
    ],
)
def test_pixels_come_out_as_they_were_saved(tmp_path: Path, name: str, array: Any, shape: tuple[int, ...]) -> None:
    found = read(saved(tmp_path / name, array))
    assert (found.shape, found.dtype) == (shape, array.dtype)
    assert (found.reshape(array.shape) == array).all()


def test_a_palette_is_looked_up_in_an_image_and_kept_in_a_mask(tmp_path: Path) -> None:
    image = Image.fromarray(np.array([[0, 1]], dtype=np.uint8), mode=None).convert("P")
    image.putpalette([10, 20, 30, 40, 50, 60])
    image.save(tmp_path / "a.png")
    assert read(tmp_path / "a.png").tolist() == [[[10, 20, 30], [40, 50, 60]]]
    assert read(tmp_path / "a.png", mask=True).tolist() == [[0, 1]]


def test_transparency_is_left_out(tmp_path: Path) -> None:
    saved(tmp_path / "a.png", np.dstack([RAMP, RAMP, RAMP, RAMP]))
    assert read(tmp_path / "a.png").shape == (6, 8, 3)


def test_8_and_16_bit_mean_the_same_range() -> None:
    assert unit(np.array([0, 255], dtype=np.uint8)).tolist() == [0.0, 1.0]
    assert unit(np.array([0, 65535], dtype=np.uint16)).tolist() == [0.0, 1.0]


@pytest.mark.parametrize("kind", [np.int16, np.int32, np.int64, np.float32])
def test_numbers_that_may_be_negative_have_units_and_stay(kind: Any) -> None:
    assert unit(np.array([-1000, 0, 700], dtype=kind)).tolist() == [-1000.0, 0.0, 700.0]


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"")
    assert refusal(tmp_path / "a.png").message == f"{tmp_path}/a.png: the file is empty"


@pytest.mark.parametrize("name", ["a.png", "a.jpg", "a.tif", "a.nii.gz", "a.nii"])
def test_a_truncated_file_is_refused_by_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    random = np.random.default_rng(1).integers(0, 256, (30, 30)).astype(np.uint8)
    if "nii" in name:
        whole = nifti(random[None], 2)
        path.write_bytes(gzip.compress(whole) if name.endswith("gz") else whole)
    else:
        saved(path, random)
    path.write_bytes(path.read_bytes()[: len(path.read_bytes()) // 2])
    found = refusal(path)
    assert found.message.startswith(f"{path}: ")
    assert "cut off" in found.message
    assert found.hint == "export or copy it again"


def test_a_file_that_is_not_what_its_name_says_is_refused(tmp_path: Path) -> None:
    saved(tmp_path / "a.jpg", RAMP, format="PNG")
    assert refusal(tmp_path / "a.jpg").message == f"{tmp_path}/a.jpg: not a JPEG file, whatever its name says"
    (tmp_path / "b.nii").write_bytes(b"hello" * 100)
    assert "not a NIfTI file" in refusal(tmp_path / "b.nii").message
    (tmp_path / "c.txt").write_bytes(b"hello")
    assert "no image that a study reads" in refusal(tmp_path / "c.txt").message


def test_a_missing_file_is_told_as_such(tmp_path: Path) -> None:
    assert refusal(tmp_path / "a.png").message == f"{tmp_path}/a.png: No such file or directory"


def test_a_decompression_bomb_is_refused_before_it_is_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def decoded(*_: Any) -> None:
        raise AssertionError("it was decoded")

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", decoded)
    (tmp_path / "a.png").write_bytes(png_that_says(30_000, 30_000))
    found = refusal(tmp_path / "a.png")
    assert found.message == f"{tmp_path}/a.png: its header says 30000 x 30000 pixels, the study takes 1,000"
    assert "`max_pixels`" in found.hint


def test_a_packed_volume_is_refused_by_its_header_and_unpacked_no_further(tmp_path: Path) -> None:
    header = bytearray(nifti(np.zeros((1, 1, 1), np.uint8), 2))
    struct.pack_into("<8h", header, 40, 3, 30_000, 30_000, 1, 1, 1, 1, 1)
    (tmp_path / "a.nii.gz").write_bytes(gzip.compress(bytes(header)))
    assert "its header says 1 x 30000 x 30000 pixels" in refusal(tmp_path / "a.nii.gz").message


def test_several_pages_are_refused(tmp_path: Path) -> None:
    page = Image.fromarray(RAMP)
    page.save(tmp_path / "a.tif", save_all=True, append_images=[page])
    assert refusal(tmp_path / "a.tif").message == f"{tmp_path}/a.tif: has several pages"


def test_a_print_color_space_is_refused(tmp_path: Path) -> None:
    Image.fromarray(RAMP).convert("CMYK").save(tmp_path / "a.jpg")
    assert refusal(tmp_path / "a.jpg").message == f"{tmp_path}/a.jpg: color mode CMYK"


def test_a_mask_in_colors_is_refused(tmp_path: Path) -> None:
    saved(tmp_path / "a.png", np.dstack([RAMP, RAMP, RAMP]))
    assert refusal(tmp_path / "a.png", mask=True).message == f"{tmp_path}/a.png: a mask of color mode RGB"


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("ending", [".nii", ".nii.gz"])
def test_a_volume_has_depth_height_and_width_in_this_order(tmp_path: Path, ending: str, order: str) -> None:
    volume = np.arange(24, dtype=np.int16).reshape(2, 3, 4)
    data = nifti(volume, 4, order=order)
    (tmp_path / f"a{ending}").write_bytes(gzip.compress(data) if ending.endswith("gz") else data)
    found = read(tmp_path / f"a{ending}")
    assert found.dtype == np.int16
    assert (found[..., 0] == volume).all()


def test_a_volumes_own_scale_is_applied(tmp_path: Path) -> None:
    (tmp_path / "a.nii").write_bytes(nifti(np.array([[[1, 2]]], np.int16), 4, slope=0.5, intercept=-3.0))
    assert read(tmp_path / "a.nii").ravel().tolist() == [1 * 0.5 - 3, 2 * 0.5 - 3]


def test_a_volume_with_nan_is_refused_with_the_count(tmp_path: Path) -> None:
    volume = np.zeros((2, 2, 2), np.float32)
    volume[0, 0] = [np.nan, np.inf]
    (tmp_path / "a.nii").write_bytes(nifti(volume, 16))
    assert refusal(tmp_path / "a.nii").message == f"{tmp_path}/a.nii: 2 of 8 numbers are nan or infinite"


def test_dicom_without_its_extra_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydicom", None)
    (tmp_path / "a.dcm").write_bytes(b"x")
    with pytest.raises(NeedsPerson) as caught:
        read(tmp_path / "a.dcm")
    assert caught.value.hint == "`pip install 'wardround[dicom]'`"


def test_arrays_of_objects_are_refused_and_never_unpickled(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "sprung",))

    np.savez(tmp_path / "a.npz", images=np.array([Trap()], dtype=object))
    with pytest.raises(BadData) as caught:
        read_arrays(tmp_path / "a.npz", {"images": True}, LIMIT)
    assert "`images` holds Python objects or records, which are never unpacked" in caught.value.message
    assert not (tmp_path / "sprung").exists()


def test_an_array_that_unpacks_beyond_the_limit_is_refused_by_its_header(tmp_path: Path) -> None:
    member = io.BytesIO()
    np.lib.format.write_array_header_1_0(member, {"descr": "|u1", "fortran_order": False, "shape": (1 << 40,)})
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("images.npy", member.getvalue())
    with pytest.raises(BadData, match="takes 1,099,511,627,776 bytes unpacked, the study keeps 1,000"):
        read_arrays(tmp_path / "a.npz", {"images": True}, LIMIT)


def test_a_damaged_or_incomplete_npz_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", images=np.zeros(3), other=np.zeros(3))
    with pytest.raises(BadData, match="no array `shape`"):
        read_arrays(tmp_path / "a.npz", {"images": True, "shape": True}, LIMIT)
    data = bytearray((tmp_path / "a.npz").read_bytes())
    (tmp_path / "b.npz").write_bytes(data[: len(data) // 2])
    with pytest.raises(BadData, match=r"not a \.npz file, or cut off"):
        read_arrays(tmp_path / "b.npz", {"images": True}, LIMIT)
    place = data.index(np.zeros(3).tobytes())
    data[place] ^= 1
    (tmp_path / "c.npz").write_bytes(data)
    with pytest.raises(BadData, match="damaged or cut off"):
        read_arrays(tmp_path / "c.npz", {"images": True}, LIMIT)


def test_halving_an_image_averages_and_halving_a_mask_chooses() -> None:
    corners = np.array([[0, 100], [200, 50]])
    image = np.kron(corners.astype(np.uint8), np.ones((4, 4), np.uint8))
    at = Path("a.png")
    # A triangle as wide as 8 pixels around the middle of a 4-pixel block: its own weigh 0.625, 0.875, 0.875, 0.625, the
    # neighbor's 0.375 and 0.125, so it has 6/7 and the neighbor 1/7.
    mix = np.array([[6, 1], [1, 6]]) / 7
    small = fitted_to(at, image[..., None], (2, 2), "resize")[..., 0]
    assert np.abs(small - mix @ corners @ mix.T).max() <= 1
    assert set(fitted_to(at, image.astype(np.int32), (4, 4), "resize", mask=True).ravel()) == {0, 100, 200, 50}


def test_16_bit_images_keep_their_depth_when_resized() -> None:
    image = np.full((8, 8, 1), 40_001, np.uint16)
    found = fitted_to(Path("a.png"), image, (4, 4), "resize")
    assert found.dtype == np.uint16
    assert (found == 40_001).all()


def test_a_crop_keeps_the_middle_of_the_wanted_shape() -> None:
    image = np.zeros((4, 8, 1), np.uint8)
    image[:, 2:6] = 200
    assert (fitted_to(Path("a.png"), image, (4, 4), "crop") == 200).all()


def test_a_volume_is_cut_or_filled_around_its_middle() -> None:
    volume = np.arange(1, 7, dtype=np.int16).reshape(6, 1, 1, 1)
    found = fitted_to(Path("a.nii"), volume, (4, 1, 3), "crop")[..., 0]
    assert found[:, 0].tolist() == [[1, 2, 1], [1, 3, 1], [1, 4, 1], [1, 5, 1]]


def test_another_size_is_refused_where_the_study_wants_it_exactly() -> None:
    with pytest.raises(BadData, match=r"a\.png: 6 x 8 pixels, the study wants 8 x 8"):
        fitted_to(Path("a.png"), RAMP[..., None], (8, 8), "exact")


def test_channels_are_repeated_or_weighed_or_refused() -> None:
    at = Path("a.png")
    assert with_channels(at, RAMP[..., None], 3).shape == (6, 8, 3)
    red = np.array([[[255, 0, 0]]], np.uint8)
    assert with_channels(at, red, 1).tolist() == [[[76]]]  # 0.299 * 255 = 76.2
    with pytest.raises(BadData, match=r"a\.png: 2 channels, the study wants 3"):
        with_channels(at, np.zeros((1, 1, 2), np.uint8), 3)
