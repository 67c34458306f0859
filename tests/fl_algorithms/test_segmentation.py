"""The segmentation task: masks and what they may not be, Dice, the loss, and a federation; images and volumes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fl_algorithms.engine.partition import task_of
from fl_algorithms.lab.federation import run_federation
from fl_algorithms.lab.site_data import load_sites
from fl_algorithms.settings.segmentation import SegmentationSettings
from fl_algorithms.tasks.base import Source
from fl_algorithms.tasks.images.segmentation import dice
from fl_algorithms.tasks.images.sets import source_digest
from tests import reference
from tests.fl_algorithms.image_toys import (
    MASKS,
    SIDE,
    image_study,
    load,
    mask_task,
    masked,
    packed,
    pictures,
    settings_of,
    write_images,
    write_table,
)
from tests.fl_algorithms.test_imagefiles import nifti
from wardround.errors import BadData
from wardround.records.schema import check


def refused(task: Any, source: Source) -> BadData:
    with pytest.raises(BadData) as caught:
        load(task, source)
    return caught.value


def test_a_folder_of_masks_and_the_same_arrays_are_the_same_data(tmp_path: Path) -> None:
    folder = load(mask_task(), masked(tmp_path))
    arrays = load(mask_task(), Source({"arrays": packed(tmp_path / "a.npz")}))
    assert torch.equal(folder.train.y, arrays.train.y)
    assert folder.train.y.dtype == torch.uint8
    assert folder.train.y.shape[1:] == (SIDE, SIDE)
    every = torch.arange(len(folder.train))
    assert torch.equal(folder.train.x.take(every), arrays.train.x.take(every))


def test_each_mask_stays_with_its_image(tmp_path: Path) -> None:
    data = load(mask_task(mean=[0.0], std=[1.0]), masked(tmp_path))
    for split in (data.train, data.validation):
        bright = (
            split.x.take(torch.arange(len(split)))[:, 0] > 0.35
        )  # the block is 120 or 250, the rest below 60 of 255
        assert torch.equal(bright, split.y == 1)


def test_the_digest_can_be_made_without_decoding(tmp_path: Path) -> None:
    source = masked(tmp_path)
    assert source_digest(source) == load(mask_task(), source).digest
    Image.fromarray(pictures(1)[1][0] * 0).save(tmp_path / "masks" / "000.png")
    assert source_digest(source) != load(mask_task(), masked(tmp_path / "again")).digest


def test_a_masks_numbers_mean_what_the_study_says(tmp_path: Path) -> None:
    masks = pictures(12)[1] * 255
    data = load(mask_task(values=[0, 255]), Source({"arrays": packed(tmp_path / "a.npz", masks=masks)}))
    plain = load(mask_task(), Source({"arrays": packed(tmp_path / "b.npz")}))
    assert torch.equal(data.train.y, plain.train.y)


def test_true_and_false_are_one_and_zero(tmp_path: Path) -> None:
    masks = pictures(12)[1].astype(bool)
    data = load(mask_task(), Source({"arrays": packed(tmp_path / "a.npz", masks=masks)}))
    assert set(data.train.y.unique().tolist()) == {0, 1}


def test_larger_images_and_their_masks_are_made_smaller_together(tmp_path: Path) -> None:
    images, masks = pictures(12)
    double = np.ones((1, 2, 2), np.uint8)
    path = packed(tmp_path / "a.npz", images=np.kron(images, double), masks=np.kron(masks, double))
    found = load(mask_task(), Source({"arrays": path}))
    plain = load(mask_task(), Source({"arrays": packed(tmp_path / "b.npz")}))
    assert torch.equal(found.train.y, plain.train.y)
    assert found.train.x.shape == (1, SIDE, SIDE)


def test_patients_may_be_told_in_a_table_beside_masks(tmp_path: Path) -> None:
    source = masked(tmp_path)
    names = [f"{place:03}.png" for place in range(12)]
    table = write_table(tmp_path / "patients.csv", {"image": names, "who": [place // 6 for place in range(12)]})
    with_patients = Source({**source.paths, "labels": table})
    data = load(mask_task(patient="who"), with_patients, validation_fraction=0.5)
    assert (len(data.train), len(data.validation)) == (6, 6)
    assert data.validation.groups is not None
    assert data.validation.groups.tolist() == [0] * 6
    assert source_digest(with_patients) == data.digest


def other_size(folder: Path) -> None:
    Image.fromarray(np.zeros((8, 9), np.uint8)).save(folder / "masks" / "003.png")


def no_mask(folder: Path) -> None:
    (folder / "masks" / "003.png").unlink()


def no_image(folder: Path) -> None:
    (folder / "images" / "003.png").unlink()


def unknown_number(folder: Path) -> None:
    Image.fromarray(np.full((8, 8), 7, np.uint8)).save(folder / "masks" / "003.png")


def empty_mask(folder: Path) -> None:
    (folder / "masks" / "003.png").write_bytes(b"")


def all_background(folder: Path) -> None:
    write_images(folder / "masks", list(np.zeros((12, 8, 8), np.uint8)))


def two_endings(folder: Path) -> None:
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(folder / "images" / "003.tif")


@pytest.mark.parametrize(
    ("break_it", "message", "hint"),
    [
        (other_size, "{}/masks/003.png: 8 x 9 pixels, its image has 8 x 8", "a mask is exactly as large as its image"),
        (no_mask, "{}/images: 003.png has no mask in {}/masks", "a mask has its image's name"),
        (no_image, "{}/masks: 003.png has no image in {}/images", "add it, or move the mask elsewhere"),
        (unknown_number, "{}/masks/003.png: 64 of 64 pixels hold a number that means no class", "numbers are: 0, 1"),
        (empty_mask, "{}/masks/003.png: the file is empty", "export or copy it again"),
        (all_background, "no mask of the 9 training images has anything but `background`", "`values` in [task]"),
        (two_endings, "{}/images: 003.png and 003.tif have the same name but for the ending", "rename one"),
    ],
)
def test_a_broken_folder_is_refused_with_the_file_and_what_to_do(
    tmp_path: Path, break_it: Callable[[Path], None], message: str, hint: str
) -> None:
    source = masked(tmp_path)
    break_it(tmp_path)
    found = refused(mask_task(), source)
    assert found.message.startswith(message.replace("{}", str(tmp_path)))
    assert hint in found.hint


@pytest.mark.parametrize(
    ("masks", "message"),
    [
        pytest.param(np.zeros((11, 8, 8), np.uint8), "12 images, but `masks` is [11, 8, 8]", id="too few"),
        pytest.param(np.zeros((12, 9, 8), np.uint8), "mask 0: 9 x 8 pixels, its image has 8 x 8", id="size"),
        pytest.param(np.full((12, 8, 8), 0.5), "mask 0: numbers with a fraction", id="fraction"),
        pytest.param(np.full((12, 8, 8), -1, np.int8), "mask 0: 64 of 64 pixels hold a number that", id="negative"),
        pytest.param(np.full((12, 8, 8), "x"), "`masks` holds no numbers", id="text"),
    ],
)
def test_broken_masks_in_arrays_are_refused(tmp_path: Path, masks: Any, message: str) -> None:
    path = packed(tmp_path / "a.npz", masks=masks)
    found = refused(mask_task(), Source({"arrays": path}))
    assert found.message.startswith(str(path))
    assert message in found.message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"values": [0, 255, 1]}, "`values` has 3 different numbers, there are 2 classes"),
        ({"values": [1, 1]}, "`values` has 1 different numbers, there are 2 classes"),
        ({"classes": ["a"]}, "at least 2 items"),
        ({"loss": "focal"}, "`loss` in [task]"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BadData) as caught:
        check(SegmentationSettings, settings_of(MASKS, **changes), "study.toml", "task")
    assert message in caught.value.message


@pytest.mark.parametrize("classes", [2, 3])
def test_dice_matches_the_slow_reference_and_is_a_mean_over_images(classes: int) -> None:
    generator = torch.Generator().manual_seed(3)
    predicted, y = (torch.randint(0, classes, (6, 5, 4), generator=generator) for _ in range(2))
    predicted[0], y[0] = 0, 0  # both empty: 1
    y[1] = 0
    expected = [
        reference.dice_of_image(ours.ravel().tolist(), theirs.ravel().tolist(), classes)
        for ours, theirs in zip(predicted, y, strict=True)
    ]
    assert dice(predicted, y, classes).tolist() == pytest.approx(expected)
    task = mask_task(classes=["rest", "a", "b"][:classes])
    logits = (
        (predicted * 2.0 - 1).unsqueeze(1) if classes == 2 else torch.stack([predicted == k for k in range(3)], 1) * 1.0
    )
    assert task.metrics(logits, y.to(torch.uint8))["dice"] == pytest.approx(sum(expected) / 6)


def test_dice_of_logits_that_are_no_numbers_is_undefined() -> None:
    assert mask_task().metrics(torch.full((1, 1, 2, 2), torch.nan), torch.zeros(1, 2, 2, dtype=torch.uint8)) == {
        "dice": None
    }


@pytest.mark.parametrize("loss", ["dice", "dice_ce"])
@pytest.mark.parametrize("classes", [2, 3])
def test_the_loss_matches_the_slow_reference(classes: int, loss: str) -> None:
    task = mask_task(classes=["rest", "a", "b"][:classes], loss=loss)
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(4, 1 if classes == 2 else classes, 3, 5, generator=generator)
    y = torch.randint(0, classes, (4, 3, 5), generator=generator).to(torch.uint8)
    found = task.losses(logits, y).tolist()
    for place in range(4):
        rows = task.probabilities(logits)[place].flatten(1).T.tolist()
        labels = y[place].ravel().tolist()
        expected = reference.soft_dice_loss(rows, labels, classes)
        if loss == "dice_ce":
            expected += sum(reference.focal_loss(row, label, 0) for row, label in zip(rows, labels, strict=True)) / 15
        assert found[place] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("model", ["unet", "resunet", "unetpp", "fcn", "monai_unet"])
def test_a_federation_of_masks_gives_the_same_model_twice(tmp_path: Path, model: str) -> None:
    for seed, site in enumerate(("ash", "birch")):
        packed(tmp_path / site / "train.npz", n=14, seed=seed)
    study = image_study({**MASKS, "augment": {"rotate_degrees": 20}}, {"name": model, "widths": [4, 8]})
    task = task_of(study)
    first, second = (run_federation(study, task, load_sites(study, task, tmp_path)) for _ in range(2))
    assert first.digest == second.digest
    assert first.digest != first.initial_digest
    assert 0 <= first.checkpoints["ash"]["latest"].scores["dice"] <= 1


def test_a_network_learns_to_find_the_block(tmp_path: Path) -> None:
    for seed, site in enumerate(("ash", "birch")):
        packed(tmp_path / site / "train.npz", n=24, seed=seed)
        packed(tmp_path / site / "test.npz", n=8, seed=seed + 10)
    study = image_study(MASKS, local_steps=30, optimizer="adamw", learning_rate=0.02)
    task = task_of(study)
    outcome = run_federation(study, task, load_sites(study, task, tmp_path))
    assert outcome.checkpoints["ash"]["latest"].score > 0.9


def test_volumes_are_segmented_as_images_are(tmp_path: Path) -> None:
    for site in ("ash", "birch"):
        for folder in ("images", "masks"):
            (tmp_path / site / folder).mkdir(parents=True)
        for place in range(8):
            volume = np.random.default_rng(place).normal(size=(8, 8, 6)).astype(np.float32)
            mask = np.zeros((8, 8, 6), np.uint8)
            mask[2:5, 3:6, 1:4] = 1
            (tmp_path / site / "images" / f"{place}.nii").write_bytes(nifti(volume + 3 * mask, 16))
            (tmp_path / site / "masks" / f"{place}.nii").write_bytes(nifti(mask, 2))
    settings = {**MASKS, "size": [8, 8, 8], "fit": "crop", "augment": {"flip_vertical": True}}
    study = image_study(settings, {"name": "unet", "widths": [2, 4]})
    task = task_of(study)
    data = load_sites(study, task, tmp_path)
    assert data["ash"].train.x.shape == (1, 8, 8, 8)
    assert data["ash"].train.y.sum(dim=(1, 2, 3)).tolist() == [27] * len(data["ash"].train)
    outcome = run_federation(study, task, data)
    assert outcome.digest != outcome.initial_digest


def test_an_image_among_volumes_is_refused(tmp_path: Path) -> None:
    settings = {"size": [8, 8, 8], "fit": "crop"}
    found = refused(mask_task(**settings), masked(tmp_path))
    assert found.message == f"{tmp_path}/images/000.png: 8 x 8 pixels, the study's size is 8 x 8 x 8"


def test_a_volume_of_one_slice_is_an_image(tmp_path: Path) -> None:
    images, masks = pictures(12)
    for folder, arrays in (("images", images), ("masks", masks)):
        (tmp_path / "flat" / folder).mkdir(parents=True)
        for place, array in enumerate(arrays):
            (tmp_path / "flat" / folder / f"{place:03}.nii").write_bytes(nifti(array[None], 2))
    flat = load(mask_task(), Source({"images": tmp_path / "flat/images", "masks": tmp_path / "flat/masks"}))
    plain = load(mask_task(), masked(tmp_path))
    assert torch.equal(flat.train.y, plain.train.y)
    every = torch.arange(len(flat.train))  # in their own units, so equal but for each site's own scale
    assert torch.allclose(flat.train.x.take(every), plain.train.x.take(every), atol=1e-5)
