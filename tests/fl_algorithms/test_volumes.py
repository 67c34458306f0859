"""Volumes as hospitals have them: spacings, windows, each image's own scale, and pieces to train on and to judge."""

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from pydantic import ValidationError

from fl_algorithms.engine.algorithm import algorithm_of, compute_logits, judged
from fl_algorithms.engine.partition import build, initial_model, task_of
from fl_algorithms.engine.session import SiteSession
from fl_algorithms.lab.federation import run_federation
from fl_algorithms.lab.site_data import load_sites
from fl_algorithms.resolving import resolve
from fl_algorithms.settings.images import Window
from fl_algorithms.settings.segmentation import Patches, SegmentationSettings
from fl_algorithms.study import ResolvedStudy
from fl_algorithms.tasks.base import OwnSizes, Source, Split
from fl_algorithms.tasks.images.intensity import normalized, windowed
from fl_algorithms.tasks.images.reading import decoded, files_of
from fl_algorithms.tasks.images.segmentation import dice_by_class
from fl_algorithms.tasks.images.volumes.patches import PatchRows, filled_up
from fl_algorithms.tasks.images.volumes.spacing import lengths_of, respaced, spaced_sides
from fl_algorithms.tasks.images.volumes.windows import in_windows
from fl_algorithms.tasks.selection import chosen, joined
from tests.fl_algorithms.image_toys import (
    MASKS,
    image_study,
    image_task,
    load,
    mask_task,
    masked,
    packed,
    pictures,
    settings_of,
)
from tests.fl_algorithms.toys import bundles
from tests.fl_algorithms.volume_toys import ball, write_nifti, write_series
from wardround.errors import BadData
from wardround.records.schema import check
from wardround.records.study import StudyFile

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "organs.toml"
PIECES: dict[str, Any] = {"size": [8, 8, 8], "fit": "patches"}
SIDES = [(10, 12, 9), (8, 9, 14), (6, 12, 12), (12, 7, 8)]  # none that 4 divides in all directions, some below a piece


def volumes(folder: Path, n: int = 8, spacing: tuple[float, ...] = (1.0, 1.0, 1.0)) -> Source:
    for place in range(n):
        volume, mask = ball(place, SIDES[place % len(SIDES)])
        write_nifti(folder / "images" / f"{place}.nii.gz", volume, spacing)
        write_nifti(folder / "masks" / f"{place}.nii.gz", mask, spacing)
    return Source({"images": folder / "images", "masks": folder / "masks"})


def pieces(folder: Path, **changes: Any) -> Split:
    return load(mask_task(**{**PIECES, **changes}), volumes(folder)).train


# Spacing


def test_a_field_that_grows_evenly_is_the_same_at_any_spacing() -> None:
    at = np.stack(np.meshgrid(*(np.arange(n) for n in (7, 9, 11)), indexing="ij"), axis=-1) * (3.0, 1.0, 0.5)
    field = at @ (1.0, -2.0, 0.5)
    wanted = (1.5, 2.0, 0.7)
    sides = spaced_sides(field.shape, (3.0, 1.0, 0.5), wanted)
    assert sides == (13, 5, 8)
    there = np.stack(np.meshgrid(*(np.arange(n) for n in sides), indexing="ij"), axis=-1) * wanted
    assert np.allclose(respaced(field, (3.0, 1.0, 0.5), wanted, sides), there @ (1.0, -2.0, 0.5), atol=1e-5)


def test_a_mask_has_the_nearest_voxels_class_and_comes_back_as_it_was() -> None:
    mask = np.random.default_rng(1).integers(0, 3, (5, 6, 7)).astype(np.uint8)
    finer = respaced(mask, (2.0, 1.0, 3.0), (1.0, 0.5, 1.0), (9, 11, 19), nearest=True)
    assert finer.dtype == np.uint8
    assert np.array_equal(finer[::2, ::2, ::3], mask)
    assert np.array_equal(respaced(finer, (1.0, 0.5, 1.0), (2.0, 1.0, 3.0), mask.shape, nearest=True), mask)


def test_the_lengths_of_voxels_are_those_of_their_grid() -> None:
    askew = np.array([[0.6, 0, 0, 5], [0.8, 2, 0, -3], [0, 0, 3.0, 9], [0, 0, 0, 1]])
    assert lengths_of(askew) == pytest.approx((3.0, 2.0, 1.0))


def test_two_scanners_of_one_patient_agree_at_the_studys_spacing(tmp_path: Path) -> None:
    at = np.stack(np.meshgrid(*(np.arange(n) for n in (9, 17, 17)), indexing="ij"), axis=-1)
    fine = (at @ (30.0, 10.0, 5.0)).astype(np.float32)
    task = mask_task(size=[9, 9, 9], fit="crop", spacing=[2.0, 2.0, 2.0], mean=[0.0], std=[1.0])
    found = []
    for name, volume, spacing in (("fine", fine, (2.0, 1.0, 1.0)), ("coarse", fine[::2, ::2, ::2], (4.0, 2.0, 2.0))):
        for place in range(4):
            write_nifti(tmp_path / name / "images" / f"{place}.nii", volume, spacing)
            write_nifti(tmp_path / name / "masks" / f"{place}.nii", (volume > 200).astype(np.uint8), spacing)
        source = Source({"images": tmp_path / name / "images", "masks": tmp_path / name / "masks"})
        found.append(load(task, source).train)
    assert found[0].x.shape == (1, 9, 9, 9)
    assert torch.allclose(*(split.x.take(torch.arange(3)) for split in found), atol=1e-3)
    assert (found[0].y == found[1].y).float().mean() > 0.9


@pytest.mark.parametrize("kind", ["arrays", "png"])
def test_images_that_do_not_say_their_spacing_are_refused_where_the_study_has_one(tmp_path: Path, kind: str) -> None:
    task = mask_task(size=[8, 8, 8], fit="crop", spacing=[1.0, 1.0, 1.0])
    source = Source({"arrays": packed(tmp_path / "a.npz", images=np.zeros((4, 8, 8, 8)), masks=np.zeros((4, 8, 8, 8)))})
    if kind == "png":
        source = volumes(tmp_path)
        (tmp_path / "images" / "0.nii.gz").unlink()
        Image.fromarray(np.zeros((8, 8), np.uint8)).save(tmp_path / "images" / "0.png")
    with pytest.raises(BadData, match="it does not say how far apart its voxels are") as caught:
        load(task, source)
    assert "give NIfTI files or DICOM series" in caught.value.hint


def test_a_volume_that_the_studys_spacing_makes_endless_is_refused(tmp_path: Path) -> None:
    task = mask_task(size=[8, 8, 8], fit="crop", spacing=[0.01, 0.01, 0.01])
    with pytest.raises(BadData, match=r"0\.nii\.gz: 901 x 1101 x 801 voxels at the study's spacing, the study takes"):
        load(task, volumes(tmp_path))


# Windows, and each image's own scale


def test_a_window_brings_its_part_of_the_range_to_0_to_1() -> None:
    found = windowed(np.array([-2000.0, -160, 40, 140, 240, 3000]), Window(center=40, width=400))
    assert found.tolist() == pytest.approx([0, 0, 0.5, 0.75, 1, 1])


def test_a_window_of_percentiles_is_each_images_own() -> None:
    numbers = np.arange(101.0)
    assert windowed(numbers, Window(percentiles=(10, 90)))[[5, 50, 95]].tolist() == pytest.approx([0, 0.5, 1])
    assert windowed(numbers * 7 + 3, Window(percentiles=(10, 90)))[[5, 50, 95]].tolist() == pytest.approx([0, 0.5, 1])
    assert not windowed(np.full(4, 7.0), Window(percentiles=(10, 90))).any()


def test_an_images_own_scale_leaves_the_background_alone() -> None:
    image = np.array([0.0, 0, 0, 2, 4, 6]).reshape(-1, 1)
    assert normalized(image, foreground=True).ravel().tolist() == pytest.approx([0, 0, 0, -(1.5**0.5), 0, 1.5**0.5])
    assert normalized(image, foreground=False).mean() == pytest.approx(0, abs=1e-6)
    assert not normalized(np.zeros((4, 1)), foreground=True).any()


@pytest.mark.parametrize("normalize", ["image", "foreground"])
def test_images_of_two_scanners_have_one_scale(tmp_path: Path, normalize: str) -> None:
    found = []
    for name, gain in (("one", 1.0), ("other", 3.5)):
        source = volumes(tmp_path / name)
        for place in range(8):
            volume = ball(place, SIDES[place % 4])[0] * gain
            write_nifti(tmp_path / name / "images" / f"{place}.nii.gz", volume.astype(np.float32))
        found.append(load(mask_task(size=[8, 8, 8], fit="crop", normalize=normalize), source))
    assert torch.allclose(*(data.train.x.take(torch.arange(6)) for data in found), atol=1e-4)
    assert found[0].preprocessing["mean"] == ["0.0"]


def test_flat_images_have_windows_and_scales_too(tmp_path: Path) -> None:
    path = packed(tmp_path / "a.npz")
    data = load(
        image_task(window={"center": 0.5, "width": 0.5}, normalize="image", patient=""), Source({"arrays": path})
    )
    x = data.train.x.take(torch.arange(len(data.train)))
    assert torch.allclose(x.mean(dim=(1, 2, 3)), torch.zeros(len(x)), atol=1e-5)


# Pieces


def test_pieces_are_rows_of_volumes_of_any_size(tmp_path: Path) -> None:
    data = load(mask_task(**PIECES, patches={"per_image": 3}), volumes(tmp_path))
    assert (len(data.train), len(data.validation)) == (18, 2)
    assert isinstance(data.train.x, PatchRows)
    assert data.train.x.images == 6
    x, y = data.train.x.augmented(torch.arange(18), data.train.y, 5)
    assert (tuple(x.shape), tuple(y.shape), y.dtype) == ((18, 1, 8, 8, 8), (18, 8, 8, 8), torch.uint8)
    assert data.train.x.take(torch.tensor([0, 17])).shape == (2, 1, 8, 8, 8)
    sums = data.train.x.pixels_by_class.sum(1).tolist()
    assert sorted(set(sums)) == sorted({int(np.prod(sides)) for sides in SIDES if int(np.prod(sides)) in sums})


def test_a_piece_follows_from_the_seed_and_its_place_alone(tmp_path: Path) -> None:
    rows = pieces(tmp_path, augment={"flip_vertical": True, "brightness": 0.1}).x
    assert isinstance(rows, PatchRows)
    every = torch.arange(len(rows))
    x, y = rows.augmented(every, every, 5)
    few = torch.tensor([7, 3])
    again = rows.augmented(few, few, 5)
    assert torch.equal(again[0], x[few])
    assert torch.equal(again[1], y[few])
    assert not torch.equal(rows.augmented(every, every, 6)[0], x)


def test_a_pieces_mask_moves_with_it(tmp_path: Path) -> None:
    rows = pieces(tmp_path, augment={"flip_vertical": True, "flip_horizontal": True}, mean=[0.0], std=[1.0]).x
    every = torch.arange(len(rows))
    x, y = rows.augmented(every, every, 5)
    assert torch.equal(x[:, 0] > 100, y == 1)


def test_the_share_of_pieces_around_the_foreground_is_the_studys(tmp_path: Path) -> None:
    source = volumes(tmp_path)
    for place in range(8):  # one voxel of foreground in a corner
        mask = np.zeros(SIDES[place % 4], np.uint8)
        mask[0, 0, 0] = 1
        write_nifti(tmp_path / "masks" / f"{place}.nii.gz", mask)
    for share in (0.0, 0.25, 1.0):
        rows = load(mask_task(**PIECES, patches={"per_image": 50, "foreground": share}), source).train.x
        every = torch.arange(len(rows))
        hits = float(rows.augmented(every, every, 1)[1].flatten(1).any(1).float().mean())
        by_chance = {0.0: hits, 0.25: hits - 0.25, 1.0: 0}[share]
        assert hits == 1 if share == 1 else 0 <= by_chance < 0.35


def test_a_volume_smaller_than_a_piece_is_filled_up_around_its_middle() -> None:
    image = np.arange(1.0, 13).reshape(1, 2, 6)
    filled, inside = filled_up(image, (5, 4), -1)
    assert filled.shape == (1, 5, 6)
    assert np.array_equal(filled[(slice(None), *inside)], image)
    assert (filled == -1).sum() == 18
    assert inside == (slice(1, 3), slice(0, 6))


def test_windows_put_together_what_each_pixel_says() -> None:
    image = torch.randn(2, 13, 9, 8, generator=torch.Generator().manual_seed(1))
    for weight in ("gaussian", "constant"):
        whole = in_windows(image, (8, 8, 8), Patches(weight=weight), lambda x: x * 2)
        assert torch.allclose(whole, image * 2, atol=1e-6)


def test_a_volume_is_judged_as_a_whole_in_its_own_size(tmp_path: Path) -> None:
    data = load(mask_task(**PIECES, mean=[0.0], std=[1.0]), volumes(tmp_path))
    split = data.validation
    assert isinstance(split.x, OwnSizes)
    for place in range(len(split)):
        logits, mask = split.x.judged(place, lambda x: x - 100)
        assert tuple(mask.shape[1:]) in SIDES
        assert torch.equal(logits[:, 0] > 0, mask == 1)


def network_of(study: Any) -> tuple[Any, Any]:
    algorithm = algorithm_of(study)
    networks = build(study, task_of(study), algorithm, "")
    for network in networks.values():
        network.eval()
    return algorithm, networks


def test_scores_are_those_of_all_logits_at_once_though_these_are_never_held(tmp_path: Path) -> None:
    study = image_study({**MASKS, "classes": ["rest", "a", "b"], "hausdorff": True})
    task, (algorithm, networks) = task_of(study), network_of(study)
    masks = np.random.default_rng(1).integers(0, 3, (40, 8, 8)).astype(np.uint8)
    split = load(task, Source({"arrays": packed(tmp_path / "a.npz", n=40, masks=masks)})).train
    logits = compute_logits(algorithm, networks, split.x)
    found = judged(algorithm, networks, split, task)
    assert found.metrics() == task.metrics(logits, split.y)
    assert tuple(found.metrics()) == ("dice", "dice_a", "dice_b", "hausdorff95") == task.settings.metrics
    each = dice_by_class(logits.argmax(1), split.y, 3).mean(0)
    assert [found.metrics()["dice_a"], found.metrics()["dice_b"]] == pytest.approx(each.tolist())
    assert torch.allclose(found.losses, task.losses(logits, split.y).double())
    assert found.logits is None


def test_selected_and_joined_volumes_are_judged_as_their_own(tmp_path: Path) -> None:
    one, two = (load(mask_task(**PIECES), volumes(tmp_path / name)).validation for name in "ab")
    both = joined([one, chosen(two, torch.tensor([1]))])
    assert isinstance(both.x, OwnSizes)
    assert isinstance(two.x, OwnSizes)
    assert torch.equal(both.x.judged(2, lambda x: x)[1], two.x.judged(1, lambda x: x)[1])
    assert torch.equal(both.x.pixels_by_class[2], two.x.pixels_by_class[1])
    train = load(mask_task(**PIECES), volumes(tmp_path / "c")).train
    some = chosen(train, torch.tensor([9, 8, 0]))  # pieces of two images
    assert isinstance(some.x, OwnSizes)
    assert isinstance(train.x, OwnSizes)
    assert torch.equal(some.x.pixels_by_class, train.x.pixels_by_class[[2, 0]])
    for ours, theirs in zip(
        some.x.augmented(torch.tensor([2, 0]), some.y, 4),
        train.x.augmented(torch.tensor([0, 9]), train.y, 4),
        strict=True,
    ):
        assert torch.equal(ours, theirs)
    assert torch.equal(some.x.middle(torch.tensor([1]))[1], train.x.middle(torch.tensor([8]))[1])
    assert not isinstance(chosen(load(mask_task(), arrays(tmp_path)).train, torch.tensor([1])).x, OwnSizes)


def arrays(folder: Path) -> Source:
    return Source({"arrays": packed(folder / "a.npz")})


def test_pieces_are_read_again_where_they_do_not_fit_and_in_workers_alike(tmp_path: Path) -> None:
    source = volumes(tmp_path)
    task = mask_task(**PIECES, cache_mib=1)
    kept = load(task, source).train
    big = np.zeros((128, 64, 80), np.int16)
    write_nifti(tmp_path / "images" / "9.nii.gz", big)
    write_nifti(tmp_path / "masks" / "9.nii.gz", big.astype(np.uint8))
    rows = load(task, source).train.x
    assert isinstance(rows, PatchRows)
    assert isinstance(kept.x, PatchRows)
    assert kept.x.for_worker() is None
    worker = rows.for_worker()
    assert worker is not None
    places = np.array([0, 9], dtype=np.int64)
    x, y = rows.augmented(torch.from_numpy(places), torch.from_numpy(places), 3)
    made = worker(places, places, 3)
    assert np.array_equal(made[0], x.numpy())
    assert np.array_equal(made[1], y.numpy())


def test_a_federation_of_pieces_gives_the_same_model_twice(tmp_path: Path) -> None:
    for site in ("ash", "birch"):
        volumes(tmp_path / site)
    study = image_study({**MASKS, **PIECES, "class_weights": "balanced"}, {"name": "unet", "widths": [2, 4]})
    task = task_of(study)
    first, second = (run_federation(study, task, load_sites(study, task, tmp_path)) for _ in range(2))
    assert first.digest == second.digest != first.initial_digest
    assert 0 <= first.checkpoints["ash"]["latest"].scores["dice"] <= 1


def test_a_sites_examples_are_its_images_and_not_their_pieces(tmp_path: Path) -> None:
    for site in ("ash", "birch"):
        volumes(tmp_path / site)
    study = image_study({**MASKS, **PIECES}, {"name": "unet", "widths": [2, 4]}, local_steps=1)
    task = task_of(study)
    data = load_sites(study, task, tmp_path)["ash"]
    result = SiteSession(study, "ash", task, data).train(1, bundles(initial_model(study)))
    assert result.num_examples + result.num_validation == 8
    assert len(data.train) == 4 * result.num_examples


def test_central_training_sees_the_pieces_of_all_sites_and_judges_each_sites_volumes(tmp_path: Path) -> None:
    sources = {site: volumes(tmp_path / site) for site in ("ash", "birch")}
    task = mask_task(**PIECES)
    data, _ = task.load_pooled(sources, site="pool", seed=1, validation_fraction=0.25)
    assert isinstance(data.train.x, OwnSizes)
    assert isinstance(data.validation.x, OwnSizes)
    assert (data.train.x.images, data.validation.x.images) == (12, 4)
    own = load(task, sources["birch"])
    assert isinstance(own.train.x, OwnSizes)
    known = {tuple(row) for row in own.train.x.pixels_by_class.tolist()}
    assert known & {tuple(row) for row in data.train.x.pixels_by_class.tolist()}


def test_large_flat_images_may_be_seen_in_pieces_too(tmp_path: Path) -> None:
    source = masked(tmp_path)
    images, masks = pictures(1, side=21)
    for folder, array in (("images", images[0]), ("masks", masks[0])):
        Image.fromarray(array).save(tmp_path / folder / "011.png")
    data = load(mask_task(fit="patches", augment={"quarter_turns": True}, mean=[0.0], std=[1.0]), source)
    x, y = data.train.x.augmented(torch.arange(len(data.train)), data.train.y, 1)
    assert (x.shape[1:], y.shape[1:]) == ((1, 8, 8), (8, 8))
    assert torch.equal(x[:, 0] > 0.35, y == 1)
    sides = {tuple(data.validation.x.judged(place, lambda x: x)[1].shape[1:]) for place in range(3)}
    assert sides <= {(8, 8), (21, 21)}


# The loss


def test_balanced_weights_of_pixels_are_those_of_the_training_masks(tmp_path: Path) -> None:
    task = mask_task(class_weights="balanced")
    data = load(task, arrays(tmp_path))
    share = float((data.train.y == 1).float().mean())
    logits, y = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(1)), data.train.y[:2]
    entropy = torch.nn.functional.binary_cross_entropy_with_logits(logits[:, 0], y.float(), reduction="none")
    weight = torch.where(y == 1, 1 / (2 * share), 1 / (2 * (1 - share)))
    expected = mask_task(loss="dice").losses(logits, y) + (entropy * weight).flatten(1).mean(1)
    assert torch.allclose(task.at(data).losses(logits, y), expected)
    assert mask_task().at(data).settings.class_weights == "none"


def test_weights_of_three_classes_are_the_studys(tmp_path: Path) -> None:
    task = mask_task(classes=["rest", "a", "b"], class_weights=[1, 2, 3])
    logits = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    y = torch.randint(0, 3, (2, 4, 4), generator=torch.Generator().manual_seed(2)).to(torch.uint8)
    weights = torch.tensor([1.0, 2, 3])[y.long()]
    plain, dice = (mask_task(classes=["rest", "a", "b"], loss=loss) for loss in ("dice_ce", "dice"))
    entropy = torch.nn.functional.cross_entropy(logits, y.long(), reduction="none")
    expected = dice.losses(logits, y) + (entropy * weights).flatten(1).mean(1)
    assert torch.allclose(task.losses(logits, y), expected)
    assert not torch.allclose(plain.losses(logits, y), expected)


# What a study may not say

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a spacing for flat images": ({"spacing": [1, 1]}, "`spacing` is for volumes: three numbers in mm"),
    "a spacing of two": ({**PIECES, "spacing": [1, 1]}, "`spacing` is for volumes: three numbers in mm"),
    "a spacing of 0": (
        {**PIECES, "spacing": [0, 1, 1]},
        "`spacing` in [task]: input should be greater than or equal to 0.01",
    ),
    "a window without a width": ({"window": {"center": 40}}, "a window has a `center` and a `width`, or two"),
    "a window of both": ({"window": {"center": 1, "width": 1, "percentiles": [1, 99]}}, "or two `percentiles`"),
    "percentiles turned round": ({"window": {"percentiles": [99, 1]}}, "the lower comes first"),
    "two scales": ({"normalize": "image", "mean": [0.5], "std": [0.5]}, "each image's own, so leave `mean`"),
    "pieces without pieces": ({"patches": {"per_image": 2}}, '[task.patches] needs `fit = "patches"`'),
    "weights of too few": ({"class_weights": [1, 2, 3]}, "`class_weights` has 3 numbers, there are 2 classes"),
    "weights of nothing": ({"loss": "dice", "class_weights": "balanced"}, "weigh the cross entropy"),
    "a volume resized": ({"size": [8, 8, 8]}, '"patches" sees pieces'),
    "pieces that overlap wholly": (
        {**PIECES, "patches": {"overlap": 1}},
        "`overlap` in [task.patches]: input should be less than or equal to 0.9, found 1",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_cannot_be_meant_are_refused(name: str) -> None:
    changes, message = REFUSED[name]
    with pytest.raises(BadData) as caught:
        check(SegmentationSettings, settings_of(MASKS, **changes), "study.toml", "task")
    assert message in caught.value.message


def test_pieces_of_an_image_have_no_class() -> None:
    with pytest.raises(ValidationError, match="the class of an image is not that of its pieces"):
        image_task(fit="patches")


# The example


def example(**task: Any) -> ResolvedStudy:
    """examples/organs.toml, made small enough for 16 voxels a side."""
    tables = tomllib.loads(EXAMPLE.read_text())
    tables.pop("variants")
    tables["study"] |= {"rounds": 2, "threads": 1}
    tables["task"] |= {"size": [8, 8, 8], "spacing": [1.0, 1.0, 1.0], "cache_mib": 64, **task}
    tables["model"] |= {"widths": [4, 8]}
    tables["training"] |= {"local_epochs": 6, "learning_rate": 0.03}
    return resolve(StudyFile.model_validate(tables), lab=True)


def test_the_example_learns_from_series_of_slices_at_one_hospital_and_nifti_files_at_another(tmp_path: Path) -> None:
    for place in range(6):
        volume, mask = ball(place)
        series = write_series(tmp_path / "north" / "images" / f"p{place}", volume, (1.0, 1.0, 1.0))
        slices = files_of("", series)
        affine = decoded(slices, mask_task(**PIECES).settings).affine
        write_nifti(tmp_path / "north" / "masks" / f"p{place}.nii.gz", mask, affine=affine)
        volume, mask = ball(place + 10)
        for part, array in (("images", volume[::2]), ("masks", mask[::2])):  # thicker slices
            write_nifti(tmp_path / "south" / part / f"{place}.nii.gz", array, (2.0, 1.0, 1.0))
    study = example()
    task = task_of(study)
    data = load_sites(study, task, tmp_path)
    assert data["south"].validation.x.judged(0, lambda x: x)[1].shape == (1, 15, 16, 16)
    outcome = run_federation(study, task, data)
    for site in ("north", "south"):
        latest = outcome.checkpoints[site]["latest"]
        assert latest.score > 0.6
        assert 0 <= latest.scores["hausdorff95"] < 16
