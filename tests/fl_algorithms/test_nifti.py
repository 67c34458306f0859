"""NIfTI files as nibabel writes them: how they lie, what their numbers become, and what is refused."""

import gzip
import io
import itertools
import struct
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import torch
from nibabel.orientations import apply_orientation, inv_ornt_aff

from fl_algorithms.tasks.base import Source
from fl_algorithms.tasks.images.files import decode, read_bytes, unit
from fl_algorithms.tasks.images.nifti import affine_of, grid, packed_mask
from tests.fl_algorithms.image_toys import load, mask_task, write_images
from wardround.errors import BadData, NeedsPerson

LIMIT = 1000
VOXELS = np.arange(24, dtype=np.int16).reshape(2, 3, 4)  # x, y, z: to the right, the front and the head
SEEN = VOXELS.transpose(2, 1, 0)  # depth, height, width
PLACES = np.array([[2.0, 0, 0, -10], [0, 3, 0, 5], [0, 0, 4, 7], [0, 0, 0, 1]])
WAYS = [
    np.array(list(zip(order, signs, strict=True)), dtype=float)
    for order in itertools.permutations(range(3))
    for signs in itertools.product((1, -1), repeat=3)
]


def image(voxels: Any = VOXELS, places: Any = PLACES, **more: Any) -> Any:
    return nibabel.Nifti1Image(voxels, places, **more)


def turned(way: Any, voxels: Any = VOXELS) -> Any:
    """The same body at ``PLACES``, written with other axes."""
    return image(apply_orientation(voxels, way), PLACES @ inv_ornt_aff(way, voxels.shape))


def saved(path: Path, given: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = given.to_bytes()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def read(path: Path, **options: Any) -> Any:
    return decode(path, read_bytes(path), LIMIT, **options)


def refusal(path: Path, **options: Any) -> BadData:
    with pytest.raises(BadData) as caught:
        read(path, **options)
    return caught.value


@pytest.mark.parametrize("mask", [False, True])
def test_a_body_is_the_same_whichever_of_the_48_ways_its_axes_were_written(tmp_path: Path, mask: bool) -> None:
    assert len(WAYS) == 48
    for way in WAYS:
        found = read(saved(tmp_path / "a.nii", turned(way)), mask=mask)
        assert (found == (SEEN if mask else SEEN[..., None])).all()
        sides, places = grid(tmp_path / "a.nii")
        assert sides == VOXELS.shape
        assert np.allclose(places, PLACES)


def test_a_volume_that_lies_askew_is_turned_as_nibabel_does_and_not_interpolated(tmp_path: Path) -> None:
    askew = np.eye(4)
    askew[:3, :3] = np.array([[0.1, -0.99, 0.05], [-0.2, 0, 0.97], [1.9, 0.1, 0.2]])
    path = saved(tmp_path / "a.nii.gz", image(places=askew))
    canonical = nibabel.as_closest_canonical(nibabel.load(path))
    assert (read(path)[..., 0] == canonical.get_fdata().transpose(2, 1, 0)).all()
    assert np.allclose(grid(path)[1], canonical.affine, atol=1e-6)


def test_a_file_of_the_second_version_is_read(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.nii.gz", nibabel.Nifti2Image(VOXELS, PLACES))
    assert (read(path)[..., 0] == SEEN).all()


@pytest.mark.parametrize("kind", [np.uint8, np.int8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.float64])
def test_numbers_keep_their_unit_whatever_their_type(tmp_path: Path, kind: Any) -> None:
    path = saved(tmp_path / "a.nii", image(VOXELS.astype(kind), dtype=kind))
    assert (unit(read(path))[..., 0] == SEEN).all()


def test_a_scaled_file_and_a_plain_one_have_one_unit(tmp_path: Path) -> None:
    data = bytearray(image().to_bytes())
    struct.pack_into("<2f", data, 112, 2.0, -5.0)
    (tmp_path / "a.nii").write_bytes(data)
    assert (read(tmp_path / "a.nii")[..., 0] == 2 * SEEN - 5).all()


def test_a_series_of_one_is_a_volume_and_a_longer_one_is_refused(tmp_path: Path) -> None:
    assert (read(saved(tmp_path / "a.nii", image(VOXELS[..., None])))[..., 0] == SEEN).all()
    found = refusal(saved(tmp_path / "b.nii", image(np.zeros((2, 3, 4, 5), np.int16))))
    assert found.message == f"{tmp_path}/b.nii: a NIfTI file of shape [2, 3, 4, 5]"
    assert found.hint == "one volume for each file"


def says_nothing(data: bytearray) -> None:
    struct.pack_into("<2h", data, 252, 0, 0)


def two_directions(data: bytearray) -> None:
    struct.pack_into("<4f", data, 280, 0, 0, 0, 0)


def two_files(data: bytearray) -> None:
    data[344:348] = b"ni1\0"


def no_such_type(data: bytearray) -> None:
    struct.pack_into("<h", data, 70, 777)


def colors(data: bytearray) -> None:
    struct.pack_into("<2h", data, 70, 128, 24)


def late(data: bytearray) -> None:
    struct.pack_into("<f", data, 108, 2.0**30)


def endless_scale(data: bytearray) -> None:
    struct.pack_into("<2f", data, 112, 1.0, float("inf"))


def nowhere(data: bytearray) -> None:
    struct.pack_into("<f", data, 280, float("nan"))


@pytest.mark.parametrize(
    ("break_it", "message", "hint"),
    [
        (says_nothing, "it does not say which way it lies", "`nibabel.Nifti1Image(array, affine)`"),
        (two_directions, "its affine has fewer than three directions", "export or copy it again"),
        (two_files, "not a NIfTI file of one piece", "export or copy it again"),
        (no_such_type, "NIfTI data type 777", "export it as whole numbers or floats"),
        (colors, "NIfTI data type 128", "export it as whole numbers or floats"),
        (late, "its NIfTI header says that pixels begin at byte 1073741824", "export or copy it again"),
        (endless_scale, "damaged or cut off (HeaderDataError)", "export or copy it again"),
        (nowhere, "damaged or cut off (LinAlgError)", "export or copy it again"),
    ],
)
@pytest.mark.parametrize("ending", [".nii", ".nii.gz"])
def test_a_broken_file_is_refused_with_what_to_do(
    tmp_path: Path, break_it: Callable[[bytearray], None], message: str, hint: str, ending: str
) -> None:
    path, data = tmp_path / f"a{ending}", bytearray(image().to_bytes())
    break_it(data)
    path.write_bytes(gzip.compress(data) if ending == ".nii.gz" else data)
    found = refusal(path)
    assert found.message.startswith(f"{path}: {message}")
    assert hint in found.hint


def test_no_more_is_unpacked_than_the_header_says(tmp_path: Path) -> None:
    path, much = tmp_path / "a.nii.gz", 1 << 28
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb", compresslevel=1) as file:
        file.write(image().to_bytes())
        for _ in range(64):
            file.write(bytes(much // 64))
    path.write_bytes(packed.getvalue())
    read(saved(tmp_path / "b.nii.gz", image()))  # what is imported is not counted
    tracemalloc.start()
    try:
        assert (read(path)[..., 0] == SEEN).all()
        assert tracemalloc.get_traced_memory()[1] < much / 16
    finally:
        tracemalloc.stop()


def test_an_extension_is_skipped_and_never_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = image()
    given.header.extensions.append(nibabel.nifti1.Nifti1Extension("comment", b"Canary^Yellow"))
    path = saved(tmp_path / "a.nii", given)
    assert b"Canary" in path.read_bytes()

    def opened(*_: Any, **__: Any) -> None:
        raise AssertionError("it was read")

    monkeypatch.setattr("nibabel.nifti1.Nifti1Extensions.from_fileobj", opened)
    assert (read(path)[..., 0] == SEEN).all()


def test_without_its_extra_a_volume_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path / "a.nii.gz", image())
    monkeypatch.setitem(sys.modules, "nibabel", None)
    with pytest.raises(NeedsPerson) as caught:
        read(path)
    assert caught.value.message == f"{path}: nibabel is not installed"
    assert caught.value.hint == "`pip install 'wardround[monai]'`"


def pairs(folder: Path, masks: list[Any], n: int = 8) -> Source:
    """``n`` images that all lie as ``PLACES`` says, and their masks, of which the last is repeated."""
    random = np.random.default_rng(1)
    for place in range(n):
        saved(folder / "images" / f"{place}.nii", image(random.normal(size=(4, 4, 4)).astype(np.float32)))
        saved(folder / "masks" / f"{place}.nii", masks[min(place, len(masks) - 1)])
    return Source({"images": folder / "images", "masks": folder / "masks"})


def task() -> Any:
    return mask_task(size=[4, 4, 4], fit="exact")


def test_a_mask_is_turned_to_its_image_also_if_its_axes_are_written_another_way(tmp_path: Path) -> None:
    mask = np.zeros((4, 4, 4), np.uint8)
    mask[0, 1, 2] = 1
    plain = load(task(), pairs(tmp_path / "a", [image(mask)]))
    mixed = load(task(), pairs(tmp_path / "b", [turned(way, mask) for way in WAYS[5:40:6]]))
    assert torch.equal(mixed.train.y, plain.train.y)
    assert plain.train.y[0].nonzero().tolist() == [[2, 1, 0]]


def test_a_mask_that_lies_elsewhere_than_its_image_is_refused(tmp_path: Path) -> None:
    mask = np.ones((4, 4, 4), np.uint8)
    off = PLACES.copy()
    off[0, 3] += 0.9  # of voxels of 2, 3 and 4 mm
    load(task(), pairs(tmp_path / "a", [image(mask, off)]))
    off[0, 3] += 0.2
    with pytest.raises(BadData) as caught:
        load(task(), pairs(tmp_path / "b", [image(mask), image(mask, off)]))
    assert caught.value.message == f"{tmp_path}/b/masks/1.nii: lies up to 1.1 mm from its image, whose voxels are 2 mm"
    assert "image.affine" in caught.value.hint
    with pytest.raises(BadData, match="lies up to"):
        load(task(), pairs(tmp_path / "c", [image(mask, np.eye(4))]))


def test_a_mask_of_another_kind_than_its_image_is_refused(tmp_path: Path) -> None:
    source = pairs(tmp_path, [image(np.ones((4, 4, 4), np.uint8))])
    (tmp_path / "masks" / "0.nii").unlink()
    write_images(tmp_path / "masks", [np.ones((4, 4), np.uint8)])
    (tmp_path / "masks" / "000.png").rename(tmp_path / "masks" / "0.png")
    with pytest.raises(BadData) as caught:
        load(task(), source)
    assert caught.value.message == f"{tmp_path}/masks/0.png: of another kind than its image 0.nii"


def test_a_predicted_mask_has_its_images_axes_and_lies_where_it_does(tmp_path: Path) -> None:
    for way in WAYS[::7]:
        path = saved(tmp_path / "a.nii.gz", turned(way))
        mask = (read(path)[..., 0] == VOXELS[1, 0, 3]).astype(np.uint8)
        affine = affine_of(path, read_bytes(path))
        (tmp_path / "mask.nii.gz").write_bytes(packed_mask(mask, grid(path)[1], affine))
        written, given = nibabel.load(tmp_path / "mask.nii.gz"), nibabel.load(path)
        assert np.allclose(written.affine, given.affine)
        assert np.array_equal(np.asarray(written.dataobj), np.asarray(given.dataobj) == VOXELS[1, 0, 3])
