"""DICOM series as volumes: the order of their slices, where they lie, and what is refused."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest

from fl_algorithms.tasks.base import Source
from fl_algorithms.tasks.images.files import files_in
from fl_algorithms.tasks.images.reading import decoded, files_of, images_in
from fl_algorithms.tasks.images.sets import source_digest
from tests.fl_algorithms.image_toys import load, mask_task, write_table
from tests.fl_algorithms.volume_toys import (
    CANARY,
    ball,
    in_body_order,
    slice_file,
    write_nifti,
    write_series,
)
from wardround.errors import BadData, NeedsPerson

SIDES = (5, 6, 8)
VOLUME = np.random.default_rng(1).integers(-1000, 1000, SIDES).astype(np.int16)
SETTINGS = mask_task(size=[8, 8, 8], fit="crop").settings


def read(folder: Path, **options: Any) -> Any:
    return decoded(files_of("ct", folder), SETTINGS, **options)


def refusal(folder: Path) -> BadData:
    with pytest.raises(BadData) as caught:
        read(folder)
    assert CANARY not in str(caught.value)
    return caught.value


def test_slices_are_sorted_by_where_they_lie_and_keep_their_hounsfield_units(tmp_path: Path) -> None:
    found = read(write_series(tmp_path / "ct", VOLUME))
    assert np.array_equal(found.array[..., 0], in_body_order(VOLUME))
    assert found.array.dtype == np.float32


def test_a_series_lies_as_the_same_volume_in_a_nifti_file(tmp_path: Path) -> None:
    series = read(write_series(tmp_path / "ct", VOLUME, (2.5, 0.5, 0.75)))
    affine = series.affine  # places (column, row, slice) to mm
    assert np.allclose(affine, [[-0.75, 0, 0, 7], [0, -0.5, 0, -5], [0, 0, 2.5, 0], [0, 0, 0, 1]])
    file = read(write_nifti(tmp_path / "a.nii.gz", VOLUME, affine=affine))
    assert np.array_equal(series.array, file.array)
    assert np.allclose(series.places, file.places)


@pytest.mark.parametrize(
    ("directions", "axis"),
    [pytest.param((0, 1, 0, 0, 0, -1), 0, id="sagittal"), pytest.param((1, 0, 0, 0, 0, -1), 1, id="coronal")],
)
def test_a_series_of_another_direction_is_turned_to_the_common_one(
    tmp_path: Path, directions: tuple[float, ...], axis: int
) -> None:
    (tmp_path / "ct").mkdir()
    for place, pixels in enumerate(VOLUME):
        position = tuple(2.0 * place if dim == axis else 0.0 for dim in range(3))
        data = slice_file(pixels, position, ImageOrientationPatient=list(directions))
        (tmp_path / "ct" / f"{place}.dcm").write_bytes(data)
    found = read(tmp_path / "ct")
    step = [2.0 * (dim == axis) for dim in range(3)]
    affine = np.eye(4)
    affine[:3, :3] = np.diag([-1, -1, 1]) @ np.array([directions[:3], directions[3:], step]).T
    by_hand = nibabel.as_closest_canonical(nibabel.Nifti1Image(VOLUME.transpose(2, 1, 0), affine))
    assert np.array_equal(found.array[..., 0], np.asarray(by_hand.dataobj).transpose(2, 1, 0))
    assert nibabel.aff2axcodes(found.places) == ("R", "A", "S")


def test_slices_may_have_scales_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "pt").mkdir()
    for place, slope in enumerate((1, 0.5, 2)):
        scale = {"RescaleSlope": slope, "RescaleType": "BQML", "Modality": "PT"}
        data = slice_file(VOLUME[place], (0.0, 0.0, float(place)), **scale)
        (tmp_path / "pt" / str(place)).write_bytes(data)
    expected = np.stack([(VOLUME[place] + 1024.0) * slope - 1024 for place, slope in enumerate((1, 0.5, 2))])
    assert np.allclose(read(tmp_path / "pt").array[..., 0], in_body_order(expected))


def test_a_mask_of_slices_has_their_numbers_as_stored(tmp_path: Path) -> None:
    classes = (VOLUME > 0).astype(np.int16)
    found = read(write_series(tmp_path / "mask", classes - 1024), mask=True)
    assert np.array_equal(found.array, in_body_order(classes))


def test_a_folder_of_slices_is_one_volume_and_everything_else_is_as_it_was(tmp_path: Path) -> None:
    write_series(tmp_path / "p1" / "ct", VOLUME)
    write_series(tmp_path / "1.2.3", VOLUME)
    write_nifti(tmp_path / "p2" / "a.nii.gz", VOLUME)
    (tmp_path / "DICOMDIR").write_bytes(b"\0" * 128 + b"DICM")
    (tmp_path / "p1" / "ct" / ".hidden").write_bytes(b"")
    assert list(images_in(tmp_path, SETTINGS)) == ["1.2.3", "p1/ct", "p2/a.nii.gz"]
    assert len(images_in(tmp_path, mask_task().settings)) == 11  # in a study of flat images each slice is one
    assert all(name.endswith(".nii.gz") or "IM" in name for name in files_in(tmp_path))


def other_series(folder: Path) -> None:
    data = slice_file(VOLUME[0], (-7.0, 5.0, 9.0), SeriesInstanceUID="1.2.3.4")
    (folder / "zz").write_bytes(data)


def localizer(folder: Path) -> None:
    data = slice_file(VOLUME[0], (0.0, 0.0, 0.0), ImageOrientationPatient=[0, 1, 0, 0, 0, -1])
    (folder / "zz").write_bytes(data)


def other_size(folder: Path) -> None:
    (folder / "zz").write_bytes(slice_file(VOLUME[0, :4], (-7.0, 5.0, 5.0)))


def other_spacing(folder: Path) -> None:
    (folder / "zz").write_bytes(slice_file(VOLUME[0], (-7.0, 5.0, 5.0), (1.0, 0.5)))


def twice(folder: Path) -> None:
    (folder / "zz").write_bytes(slice_file(VOLUME[0], (-7.0, 5.0, 2.0)))


def one_missing(folder: Path) -> None:
    (folder / at(2.0, folder)).unlink()


def uneven(folder: Path) -> None:
    (folder / "zz").write_bytes(slice_file(VOLUME[0], (-7.0, 5.0, 5.4)))


def tilted(folder: Path) -> None:
    for place in range(5):
        (folder / at(place, folder)).write_bytes(slice_file(VOLUME[place], (-7.0, 5.0 + 0.3 * place, float(place))))


def nowhere(folder: Path) -> None:
    (folder / "zz").write_bytes(slice_file(VOLUME[0], (0.0, 0.0, 9.0), ImagePositionPatient=None))


def no_directions(folder: Path) -> None:
    (folder / "zz").write_bytes(slice_file(VOLUME[0], (0.0, 0.0, 9.0), ImageOrientationPatient=[1, 0, 0, 1, 0, 0]))


def alone(folder: Path) -> None:
    for place in (1.0, 2.0, 3.0, 4.0):
        (folder / at(place, folder)).unlink()


def of_frames(folder: Path) -> None:
    data = slice_file(np.concatenate([VOLUME[0], VOLUME[1]]), (-7.0, 5.0, 5.0), Rows=6, NumberOfFrames=2)
    (folder / "zz").write_bytes(data)


def cut_off(folder: Path) -> None:
    data = slice_file(VOLUME[0], (-7.0, 5.0, 5.0))
    (folder / "zz").write_bytes(data[: len(data) - 20])


def at(height: float, folder: Path) -> str:
    """The name of the slice of that height."""
    from pydicom import dcmread

    return next(p.name for p in folder.iterdir() if float(dcmread(p).ImagePositionPatient[2]) == height)


def garbage(folder: Path) -> None:
    data = slice_file(VOLUME[0], (-7.0, 5.0, 5.0))
    assert data.count(b"-7.0\\5.0\\5.0") == 1
    (folder / "zz").write_bytes(data.replace(b"-7.0\\5.0\\5.0", b"Can\\ary\\Yel!"))


BROKEN: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "two series": (other_series, "{}/zz: of another series than IM0000 beside it", "a folder of its own"),
    "a localizer": (localizer, "in another direction than IM0000 beside it (90 degrees between", "take it out"),
    "another size": (other_size, "{}/zz: 4 x 8 pixels, IM0000 beside it has 6 x 8", "a folder of its own"),
    "another spacing": (other_spacing, "{}/zz: pixels of 1 x 0.5 mm, IM0000 beside it has 1 x 1 mm", "of its own"),
    "a slice twice": (twice, "and zz lie at the same place", "another phase or echo"),
    "a gap": (one_missing, "elsewhere 1 mm: 1 slice missing", "export the series again, whole"),
    "uneven": (uneven, "{}: 1.4 mm between ", "one distance between its slices"),
    "a tilted gantry": (tilted, "is shifted by 0.3 mm against", "dcm2niix"),
    "no position": (nowhere, "{}/zz: it does not say where it lies (ImagePositionPatient)", "take it out"),
    "no directions": (no_directions, "{}/zz: it does not say where it lies: its directions are none", "again"),
    "one slice": (alone, "{}: one slice alone", "is the export complete"),
    "several frames": (of_frames, "{}/zz: a slice in colors, or of several frames", "export it as gray"),
    "garbage": (garbage, "{}/zz: damaged or cut off (", "export or copy it again"),
    "cut off": (cut_off, "{}/zz: damaged or cut off (", "export or copy it again"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_no_whole_series_is_refused_with_the_file_and_what_to_do(tmp_path: Path, name: str) -> None:
    break_it, message, hint = BROKEN[name]
    folder = write_series(tmp_path / "ct", VOLUME)
    break_it(folder)
    found = refusal(folder)
    assert message.replace("{}", str(folder)) in found.message
    assert hint in found.hint


def test_a_slice_among_volumes_says_that_it_needs_a_folder_of_its_own(tmp_path: Path) -> None:
    images, masks = tmp_path / "images", tmp_path / "masks"
    for place in range(4):
        write_nifti(images / f"{place}.nii", VOLUME)
        write_nifti(masks / f"{place}.nii", (VOLUME > 0).astype(np.uint8))
    (images / "0.dcm").write_bytes(slice_file(VOLUME[0], (0.0, 0.0, 0.0)))
    (images / "0.nii").unlink()
    with pytest.raises(BadData, match=r"0\.dcm: 6 x 8 pixels, the study's size is 8 x 8 x 8") as caught:
        load(mask_task(size=[8, 8, 8], fit="crop"), Source({"images": images, "masks": masks}))
    assert "each series in a folder of its own" in caught.value.hint


def series_with_masks(folder: Path, n: int = 4) -> Source:
    for place in range(n):
        volume, mask = ball(place, SIDES)
        affine = read(write_series(folder / "images" / f"p{place}", volume, (2.0, 1.0, 1.0))).affine
        write_nifti(folder / "masks" / f"p{place}.nii.gz", mask, affine=affine)
    return Source({"images": folder / "images", "masks": folder / "masks"})


def test_series_are_trained_on_with_nifti_masks_drawn_on_them(tmp_path: Path) -> None:
    source = series_with_masks(tmp_path)
    task = mask_task(size=[8, 8, 8], fit="crop", window={"center": 100, "width": 400}, mean=[0.0], std=[1.0])
    data = load(task, source)
    assert data.digest == source_digest(source)
    bright = data.train.x.take(torch_range(len(data.train)))[:, 0] > 0.5
    assert (bright == (data.train.y == 1)).float().mean() > 0.98  # the ball is 200, the rest 0 with a deviation of 20
    (tmp_path / "images" / "p1" / "IM0000").write_bytes(slice_file(VOLUME[0], (-7.0, 5.0, 0.0)))
    assert source_digest(source) != data.digest


def test_a_mask_that_lies_elsewhere_than_its_series_is_refused(tmp_path: Path) -> None:
    source = series_with_masks(tmp_path)
    write_nifti(tmp_path / "masks" / "p2.nii.gz", ball(2, SIDES)[1], (2.0, 1.0, 1.0))
    with pytest.raises(BadData, match=r"p2\.nii\.gz: lies up to .* mm from its image, whose voxels are 1 mm"):
        load(mask_task(size=[8, 8, 8], fit="crop"), source)


def test_a_table_names_a_series_by_its_folder(tmp_path: Path) -> None:
    source = series_with_masks(tmp_path)
    names = [f"p{place}" for place in range(4)]
    table = write_table(tmp_path / "patients.csv", {"image": names, "who": ["a", "a", "b", "b"]})
    data = load(
        mask_task(size=[8, 8, 8], fit="crop", patient="who"),
        Source({**source.paths, "labels": table}),
        validation_fraction=0.5,
    )
    assert (len(data.train), len(data.validation)) == (2, 2)


def test_a_series_is_read_again_in_each_epoch_where_it_does_not_fit_and_a_change_is_noticed(tmp_path: Path) -> None:
    source = series_with_masks(tmp_path)
    data = load(mask_task(size=[64, 128, 128], fit="crop", cache_mib=1), source)
    first = data.train.x.take(torch_range(len(data.train)))
    assert np.array_equal(first, data.train.x.take(torch_range(len(data.train))))
    for place in range(4):
        (tmp_path / "images" / f"p{place}" / "IM0000").write_bytes(slice_file(VOLUME[0], (-7.0, 5.0, 0.0)))
    with pytest.raises(BadData, match="not the file that was read at the start"):
        data.train.x.take(torch_range(len(data.train)))


def test_without_its_extra_a_series_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_series(tmp_path / "ct", VOLUME)
    monkeypatch.setitem(sys.modules, "nibabel.orientations", None)
    with pytest.raises(NeedsPerson) as caught:
        read(folder)
    assert caught.value.message == f"{folder}: nibabel is not installed"
    assert caught.value.hint == "`pip install 'wardround[dicom]'`"


def torch_range(n: int) -> Any:
    import torch

    return torch.arange(n)
