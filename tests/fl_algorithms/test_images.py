"""The images task: sets that are read whole or refused, splits by patient, augmentation, loss, and a federation."""

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fl_algorithms import registry
from fl_algorithms.engine.partition import task_of
from fl_algorithms.engine.session import Restored, SiteSession
from fl_algorithms.engine.training import Batches
from fl_algorithms.lab.federation import run_federation
from fl_algorithms.lab.site_data import load_sites
from fl_algorithms.resolving import resolve
from fl_algorithms.settings.images import Augmentation, ImageSettings
from fl_algorithms.settings.models import BODY_AND_HEAD, NORM_LAYERS
from fl_algorithms.streams import stream_seed
from fl_algorithms.tasks.base import Source, Split, in_parts
from fl_algorithms.tasks.images import pixels
from fl_algorithms.tasks.images.augment import augmented, uniform
from fl_algorithms.tasks.images.pixels import Pixels
from fl_algorithms.tasks.images.sets import source_digest
from fl_algorithms.tasks.selection import chosen, joined, rows_at
from tests import reference
from tests.fl_algorithms.image_toys import (
    CLASSES,
    IMAGES,
    image_study,
    image_task,
    labeled,
    load,
    packed,
    pictures,
    public_bytes,
    settings_of,
    write_images,
    write_table,
)
from wardround.errors import BadData
from wardround.records.schema import check
from wardround.records.study import StudyFile


def everything(data: Any) -> torch.Tensor:
    """Training and validation images, in the order of the split."""
    return torch.cat([*in_parts(data.train.x, 100), *in_parts(data.validation.x, 100)])


def refused(task: Any, source: Source, **changes: Any) -> BadData:
    with pytest.raises(BadData) as caught:
        load(task, source, **changes)
    return caught.value


# Reading a set


def test_a_folder_and_the_same_arrays_are_the_same_data(tmp_path: Path) -> None:
    folder = load(image_task(), labeled(tmp_path))
    arrays = load(image_task(), Source({"arrays": packed(tmp_path / "a.npz")}))
    assert torch.equal(everything(folder), everything(arrays))
    assert torch.equal(folder.train.y, arrays.train.y)


def test_each_image_keeps_its_label_whatever_the_order_of_the_table(tmp_path: Path) -> None:
    names = write_images(tmp_path / "images", [np.full((8, 8), value, np.uint8) for value in range(20)])
    rows = list(range(20))
    random.Random(3).shuffle(rows)
    columns = {"image": [names[row] for row in rows], "shape": [CLASSES[row >= 10] for row in rows]}
    table = write_table(tmp_path / "labels.csv", columns)
    task = image_task(mean=[0.0], std=[1.0])
    data = load(task, Source({"images": tmp_path / "images", "labels": table}))
    for split in (data.train, data.validation):
        values = (split.x.take(torch.arange(len(split)))[:, 0, 0, 0] * 255).round()
        assert ((values >= 10).long() == split.y).all()


def test_images_are_standardized_over_all_of_the_sites_training_images(tmp_path: Path) -> None:
    images, _ = pictures(12)
    rows = everything(load(image_task(), labeled(tmp_path)))
    numbers = (images / 255).ravel().tolist()
    mean = math.fsum(numbers) / len(numbers)
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in numbers) / len(numbers))
    assert rows.sum().item() == pytest.approx(0, abs=1e-2)
    assert sorted(rows.ravel().tolist()) == pytest.approx(sorted((value - mean) / std for value in numbers), abs=1e-5)


def test_a_studys_own_scale_is_used_as_written(tmp_path: Path) -> None:
    data = load(image_task(mean=[0.5], std=[0.25]), labeled(tmp_path))
    images, _ = pictures(12)
    expected = sorted(((images / 255).ravel() - 0.5) / 0.25)
    assert sorted(everything(data).ravel().tolist()) == pytest.approx(expected, abs=1e-6)


def test_the_test_images_never_touch_the_scale(tmp_path: Path) -> None:
    arrays = packed(tmp_path / "train.npz")
    bright = packed(tmp_path / "test.npz", images=np.full((12, 8, 8), 255, np.uint8))
    alone, tested = (
        load(image_task(), Source(paths)) for paths in ({"arrays": arrays}, {"arrays": arrays, "test": bright})
    )
    assert alone.preprocessing == tested.preprocessing
    assert torch.equal(everything(alone), everything(tested))


def test_the_preprocessing_is_plain_json_without_floats_and_reads_new_images_alike(tmp_path: Path) -> None:
    source, task = labeled(tmp_path), image_task(augment={"flip_horizontal": True})
    data = load(task, source)
    fitted = task.fitted(data)
    assert all(isinstance(text, str) for text in (*fitted["mean"], *fitted["std"]))
    rows, names = task.read_new(tmp_path / "images", fitted)
    assert names == [f"{place:03}.png" for place in range(12)]
    found = rows.take(torch.arange(12))
    same = {tuple(image.ravel().tolist()) for image in everything(data)}
    assert {tuple(image.ravel().tolist()) for image in found} == same
    from_arrays, _ = task.read_new(packed(tmp_path / "a.npz"), fitted)
    assert torch.equal(from_arrays.take(torch.arange(12)), found)


@pytest.mark.parametrize("change", [{"shape": [3, 8, 8]}, {"mean": ["x"]}, {"std": ["0"]}, {"mean": ["1", "2"]}])
def test_preprocessing_of_another_study_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    task = image_task()
    fitted = task.fitted(load(task, labeled(tmp_path)))
    with pytest.raises(BadData, match="preprocessing"):
        task.read_new(tmp_path / "images", {**fitted, **change})


def test_the_digest_is_of_names_and_contents_and_can_be_made_without_decoding(tmp_path: Path) -> None:
    source = labeled(tmp_path)
    first = load(image_task(), source).digest
    assert source_digest(source) == first
    (tmp_path / "images" / ".hidden").write_text("x")
    assert source_digest(source) == first
    (tmp_path / "images" / "000.png").rename(tmp_path / "images" / "zzz.png")
    assert source_digest(source) != first
    assert source_digest(Source(source.paths, "other")) != source_digest(source)
    arrays = Source({"arrays": packed(tmp_path / "a.npz"), "test": packed(tmp_path / "b.npz", seed=2)})
    assert source_digest(arrays) == load(image_task(), arrays).digest


def test_images_beyond_the_cache_are_read_again_and_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, task = labeled(tmp_path), image_task()
    kept = load(task, source)
    monkeypatch.setattr(pixels, "MIB", 1)  # the cache of 2048 MiB has 2048 bytes, 12 images need 768
    assert torch.equal(everything(load(task, source)), everything(kept))
    small = load(image_task(cache_mib=500), source)
    assert torch.equal(everything(small), everything(kept))
    said = "images: 12 images take more than the study's 500 MiB, so they are read and decoded again in each epoch"
    assert small.warnings == (said,)


@pytest.mark.parametrize("decoders", [1, 2, 5])
def test_the_number_of_decoders_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, decoders: int) -> None:
    source, task = labeled(tmp_path), image_task(cache_mib=500)
    kept = everything(load(image_task(), source))
    monkeypatch.setattr(pixels, "MIB", 1)
    monkeypatch.setattr(pixels, "DECODERS", decoders)
    monkeypatch.setattr(Pixels.__init__, "__defaults__", (decoders,))
    assert torch.equal(everything(load(task, source)), kept)


def test_a_file_that_changes_while_training_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = labeled(tmp_path)
    monkeypatch.setattr(pixels, "MIB", 1)
    data = load(image_task(cache_mib=500), source)
    write_images(tmp_path / "images", list(pictures(12, seed=9)[0]))
    with pytest.raises(BadData, match=r"not the file that was read at the start"):
        data.train.x.take(torch.arange(3))


def test_8_and_16_bit_files_may_mix(tmp_path: Path) -> None:
    source = labeled(tmp_path)
    plain = everything(load(image_task(), source))
    deep = np.asarray(Image.open(tmp_path / "images" / "003.png")).astype(np.uint16) * 257  # 255 * 257 = 65535
    Image.fromarray(deep).save(tmp_path / "images" / "003.png")
    assert torch.allclose(everything(load(image_task(), source)), plain, atol=1e-5)


# Splits


def test_without_patients_the_split_is_that_of_tables(tmp_path: Path) -> None:
    data = load(image_task(mean=[0.0], std=[1.0]), Source({"arrays": packed(tmp_path / "a.npz", n=12)}), seed=7)
    images, _ = pictures(12)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(stream_seed(7, "ash", 0, "split"))).tolist()
    found = (everything(data)[:, 0] * 255).round().numpy()
    assert (found == images[order]).all()
    assert len(data.validation) == 3  # floor(0.25 * 12)
    assert data.validation.groups is None


def test_a_patient_is_never_in_training_and_validation(tmp_path: Path) -> None:
    who = [f"p{place // 3}" for place in range(24)]
    of = {image.tobytes(): patient for image, patient in zip(pictures(24)[0], who, strict=True)}
    source = Source({"arrays": packed(tmp_path / "a.npz", n=24, patient=np.array(who))})
    for seed in range(5):
        data = load(image_task(patient="patient", mean=[0.0], std=[1.0]), source, seed=seed)
        parts = []
        for split in (data.train, data.validation):
            images = (split.x.take(torch.arange(len(split)))[:, 0] * 255).round().byte().numpy()
            parts.append({of[image.tobytes()] for image in images})
        assert not parts[0] & parts[1]
        assert len(parts[1]) == 2  # floor(0.25 * 8 patients)
        assert len(data.train) + len(data.validation) == 24
        assert data.validation.groups is not None
        assert data.validation.groups.bincount().tolist() == [3, 3]


def test_a_patient_in_training_and_test_is_refused(tmp_path: Path) -> None:
    train = packed(tmp_path / "train.npz", patient=np.arange(12))
    test = packed(tmp_path / "test.npz", seed=2, patient=np.arange(11, 23))
    found = refused(image_task(patient="patient"), Source({"arrays": train, "test": test}))
    assert found.message == f"{test}: 1 of its 12 patients are also in {train}"
    assert found.hint == "a patient's images are all for training or all for testing"


def test_a_hospital_may_call_its_columns_otherwise(tmp_path: Path) -> None:
    source = labeled(tmp_path, person=[place // 2 for place in range(12)])
    data = load(image_task(label="other"), Source(source.paths, label="shape", patient="person"))
    assert len(data.validation) == 2  # one patient of six, floor(0.25 * 6)


def test_an_image_that_is_also_in_the_test_set_is_told(tmp_path: Path) -> None:
    train, test = packed(tmp_path / "train.npz"), packed(tmp_path / "test.npz")
    assert load(image_task(), Source({"arrays": train, "test": test})).warnings == (
        "12 of the 12 test images are also training images, so scores will be too good",
    )


# Bad input. Nothing is trained on a part of a set.


def drop_image(folder: Path) -> None:
    (folder / "images" / "003.png").unlink()


def extra_image(folder: Path) -> None:
    write_images(folder / "images", list(pictures(14)[0]))


def zero_bytes(folder: Path) -> None:
    (folder / "images" / "003.png").write_bytes(b"")


def truncated(folder: Path) -> None:
    path = folder / "images" / "003.png"
    path.write_bytes(path.read_bytes()[:60])


def foreign_file(folder: Path) -> None:
    (folder / "images" / "notes.txt").write_text("read me")


def no_images(folder: Path) -> None:
    for path in (folder / "images").iterdir():
        path.unlink()


def listed_twice(folder: Path) -> None:
    with (folder / "labels.csv").open("a") as file:
        file.write("003.png,oval\n")


def unknown_class(folder: Path) -> None:
    table = folder / "labels.csv"
    table.write_text(table.read_text().replace("003.png,oval", "003.png,square"))


@pytest.mark.parametrize(
    ("break_it", "message", "hint"),
    [
        (drop_image, "{}/labels.csv: line 5: column `image` names a file that is not in {}/images", "add the image"),
        (extra_image, "{}/images: 012.png and 013.png have no row in {}/labels.csv", "add the row"),
        (zero_bytes, "{}/images/003.png: the file is empty", "export or copy it again"),
        (truncated, "{}/images/003.png: damaged or cut off", "export or copy it again"),
        (foreign_file, "{}/images: notes.txt has no row in {}/labels.csv", "add the row, or move the image elsewhere"),
        (no_images, "{}/images: no files in it", ""),
        (listed_twice, "{}/labels.csv: lines 5 and 14: the same file in column `image`", "one row for each image"),
        (unknown_class, "{}/labels.csv: line 5, column `shape`: no class", "the classes are: round, oval"),
    ],
)
def test_a_broken_folder_is_refused_with_the_file_and_what_to_do(
    tmp_path: Path, break_it: Callable[[Path], None], message: str, hint: str
) -> None:
    source = labeled(tmp_path)
    break_it(tmp_path)
    found = refused(image_task(), source)
    assert found.message.startswith(message.replace("{}", str(tmp_path)))
    assert hint in found.hint


def test_a_row_without_a_patient_is_refused(tmp_path: Path) -> None:
    source = labeled(tmp_path, who=["", *(f"p{place}" for place in range(11))])
    found = refused(image_task(patient="who"), source)
    assert found.message == f"{tmp_path}/labels.csv: line 2: column `who` has no value"


def test_half_a_test_set_is_refused(tmp_path: Path) -> None:
    source = labeled(tmp_path)
    both = {**source.paths, "test_images": tmp_path / "images"}
    assert refused(image_task(), Source(both)).message == f"{tmp_path}/images: no `test_labels` beside it"
    assert "no images" in refused(image_task(), Source({"table": tmp_path})).message


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        pytest.param({"shape": np.array(["round"] * 11)}, "12 images, but `shape` is [11]", id="too few labels"),
        pytest.param({"shape": np.array(["square"] * 12)}, "12 of 12 entries of `shape` are no class", id="labels"),
        pytest.param({"shape": np.zeros(12)}, "`shape` is not one whole number or text for each image", id="floats"),
        pytest.param({"images": np.zeros((12, 8), np.uint8)}, "`images` is [12, 8], wanted numbers", id="flat"),
        pytest.param({"images": np.zeros((0, 8, 8), np.uint8)}, "`images` is [0, 8, 8, 1], wanted", id="none"),
        pytest.param({"images": np.full((12, 8, 8), np.nan)}, "64 of 64 numbers are nan or infinite", id="nan"),
        pytest.param({"images": np.array([{}] * 12)}, "`images` holds Python objects", id="objects"),
        pytest.param({"images": np.zeros((12, 8, 8, 2), np.uint8)}, "2 channels, the study wants 1", id="channels"),
    ],
)
def test_broken_arrays_are_refused(tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    path = packed(tmp_path / "a.npz", **arrays)
    found = refused(image_task(), Source({"arrays": path}))
    assert found.message.startswith(str(path))
    assert message in found.message


def test_numbers_are_classes_where_the_study_says_so(tmp_path: Path) -> None:
    path = packed(tmp_path / "a.npz", shape=np.array([1, 2] * 6, dtype=np.int8))
    data = load(image_task(classes=[1, 2]), Source({"arrays": path}))
    assert sorted(torch.cat([data.train.y, data.validation.y]).tolist()) == [0] * 6 + [1] * 6


def test_too_few_images_for_a_validation_part_are_refused(tmp_path: Path) -> None:
    found = refused(image_task(), Source({"arrays": packed(tmp_path / "a.npz", n=3)}))
    assert found.message == f"{tmp_path}/a.npz: 3 images; a validation part of 0.25 needs at least 4"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": [8]}, "`size` in [task]: tuple should have at least 2 items"),
        ({"mean": [0.5]}, "[task]: `mean` and `std` have 1 and 0 numbers, the images 1 channels"),
        ({"class_weights": [1.0]}, "[task]: `class_weights` has 1 numbers, there are 2 classes"),
        ({"class_weights": "even"}, '`class_weights` in [task]: not "none", "balanced", or one positive number'),
        ({"size": [8, 8, 8]}, "[task]: volumes are not resized"),
        ({"size": [8, 8, 8], "fit": "crop", "augment": {"zoom": 0.1}}, "only flips, `brightness` and `contrast`"),
        ({"size": [8, 16], "augment": {"quarter_turns": True}}, "`quarter_turns` need images as high as wide"),
        ({"label": "image"}, "`image`, `label` and `patient` are not three different columns"),
        ({"classes": ["a", "a"]}, "`classes` has `a` twice"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BadData) as caught:
        check(ImageSettings, settings_of(IMAGES, **changes), "study.toml", "task")
    assert message in caught.value.message


# Augmentation


def test_a_rows_draws_depend_on_seed_and_place_alone() -> None:
    together = uniform(7, torch.tensor([3, 1, 2]), 4)
    assert torch.equal(together[1:2], uniform(7, torch.tensor([1]), 4))
    assert torch.equal(together[:, :2], uniform(7, torch.tensor([3, 1, 2]), 2))
    assert not torch.equal(together, uniform(8, torch.tensor([3, 1, 2]), 4))


def test_the_draws_match_the_slow_reference() -> None:
    found = uniform(2**62 + 5, torch.tensor([0, 41]), 3)
    assert found.tolist() == [reference.splitmix_uniform(2**62 + 5, place, 3) for place in (0, 41)]


def test_the_draws_are_even() -> None:
    many = uniform(1, torch.arange(4000), 5)
    assert many.mean().item() == pytest.approx(0.5, abs=0.01)  # sd of the mean: 0.289 / sqrt(20000) = 0.002
    assert torch.corrcoef(many.T).triu(1).abs().max() < 0.08


ALL = Augmentation(
    flip_horizontal=True, flip_vertical=True, quarter_turns=True, rotate_degrees=20, shift=0.1, zoom=0.1,
    brightness=0.1, contrast=0.1,
)  # fmt: skip


def test_an_augmented_image_is_the_same_in_any_batch() -> None:
    x, y = torch.rand(6, 2, 8, 8), torch.randint(0, 2, (6, 8, 8), dtype=torch.uint8)
    places = torch.tensor([9, 4, 7, 1, 0, 3])
    whole, masks = augmented(x, y, places, 11, ALL)
    alone, mask = augmented(x[2:3], y[2:3], places[2:3], 11, ALL)
    assert torch.allclose(whole[2:3], alone, atol=1e-6)
    assert torch.equal(masks[2:3], mask)
    assert not torch.allclose(whole, augmented(x, y, places, 12, ALL)[0])


def test_flips_and_turns_move_pixels_and_change_none() -> None:
    x, y = torch.rand(40, 1, 8, 8), torch.zeros(40, dtype=torch.int64)
    how = Augmentation(flip_horizontal=True, flip_vertical=True, quarter_turns=True)
    found, labels = augmented(x, y, torch.arange(40), 3, how)
    assert torch.equal(found.flatten(1).sort().values, x.flatten(1).sort().values)
    assert labels is y
    turns = [torch.rot90(x, k, (-2, -1)) for k in range(4)]
    ways = torch.stack([*turns, *(turn.flip(-1) for turn in turns)])  # the eight symmetries of a square
    hits = (ways == found).flatten(2).all(2)
    assert hits.any(0).all()
    assert hits.any(1).all()


def test_a_mask_moves_with_its_image() -> None:
    images, masks = pictures(30, side=16)
    x, y = torch.from_numpy(images).float().unsqueeze(1), torch.from_numpy(masks)
    found, moved = augmented(x, y, torch.arange(30), 5, ALL.model_copy(update={"brightness": 0.0, "contrast": 0.0}))
    bright = found[:, 0] > 90  # the block is 120 or 250, the rest below 60
    agree = 2 * (bright & (moved == 1)).sum() / (bright.sum() + (moved == 1).sum())
    assert agree > 0.8
    assert set(moved.unique().tolist()) <= {0, 1}
    unmoved = 2 * (bright & (y == 1)).sum() / (bright.sum() + (y == 1).sum())
    assert unmoved < 0.5


def test_a_turn_by_a_quarter_is_a_quarter_turn_in_an_oblong_image_too() -> None:
    u = torch.full((1, 9), 0.5, dtype=torch.float64)
    u[0, 3] = 0.75  # rotate_degrees=180 * (2 * 0.75 - 1) = 90 degrees
    from fl_algorithms.tasks.images.augment import _grid

    grid = _grid(u, Augmentation(rotate_degrees=180), torch.Size([1, 1, 4, 8]))
    pixels = (grid[0] * torch.tensor([8.0, 4.0])) / 2  # in pixels from the middle: x, y
    # the pixel 1.5 to the right and 0.5 below comes from one as far from the middle, at a right angle
    source, target = pixels[2, 5], torch.tensor([1.5, 0.5])
    assert source.norm().item() == pytest.approx(target.norm().item(), abs=1e-5)
    assert (source @ target).item() == pytest.approx(0, abs=1e-5)


def test_training_sees_new_changes_in_each_epoch_and_the_same_again_when_rerun(tmp_path: Path) -> None:
    task = image_task(augment={"shift": 0.3})
    data = load(task, labeled(tmp_path))
    study = image_study(batch_size=len(data.train))

    def epochs(round_number: int) -> list[torch.Tensor]:
        batches = Batches(data.train.x, data.train.y, study, "ash", round_number, "", {})
        made = []
        for _ in range(2):
            batch = batches.next()
            made.append(batch.x[batch.x.flatten(1).sum(1).argsort()])
        return made

    first, second = epochs(1)
    assert not torch.allclose(first, second)
    assert torch.equal(first, epochs(1)[0])
    assert not torch.allclose(first, epochs(2)[0])
    assert torch.equal(data.validation.x.take(torch.arange(3)), data.validation.x.take(torch.arange(3)))


def test_an_iterator_that_lives_as_long_as_the_run_goes_on_within_an_augmented_epoch(tmp_path: Path) -> None:
    data = load(image_task(augment={"shift": 0.3}), labeled(tmp_path))
    study = image_study(iterator="run")
    whole, place = Batches(data.train.x, data.train.y, study, "ash", 1, "", {}), {}
    expected = [whole.next().x for _ in range(4)]
    first = Batches(data.train.x, data.train.y, study, "ash", 1, "", place)
    found = [first.next().x]
    again = Batches(data.train.x, data.train.y, study, "ash", 2, "", dict(place))
    found += [again.next().x for _ in range(3)]
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


# Loss and scores


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0])
def test_the_focal_loss_matches_the_slow_reference(classes: int, gamma: float) -> None:
    weights = [0.5, 2.0, 1.5][:classes]
    task = image_task(classes=["a", "b", "c"][:classes], loss="focal", gamma=gamma, class_weights=weights)
    logits = torch.randn(7, 1 if classes == 2 else classes)
    y = torch.randint(0, classes, (7,))
    probabilities = task.probabilities(logits).tolist()
    expected = [
        weights[label] * reference.focal_loss(row, label, gamma)
        for row, label in zip(probabilities, y.tolist(), strict=True)
    ]
    assert task.losses(logits, y).tolist() == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_the_focal_loss_of_a_sure_answer_has_a_finite_gradient() -> None:
    logits = torch.tensor([[200.0], [-200.0]], requires_grad=True)
    image_task(loss="focal", gamma=0.5).losses(logits, torch.tensor([1, 0])).sum().backward()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()


def test_balanced_weights_make_every_class_count_alike(tmp_path: Path) -> None:
    labels = np.array(["round"] * 9 + ["oval"] * 3)
    task = image_task(class_weights="balanced")
    data = load(task, Source({"arrays": packed(tmp_path / "a.npz", shape=labels)}))
    ovals = int(data.train.y.sum())
    zero = torch.zeros(len(data.train), 1)  # each loss is log 2
    losses = task.at(data).losses(zero, data.train.y)
    assert losses[data.train.y == 1].sum().item() == pytest.approx(len(data.train) / 2 * math.log(2))
    assert losses.sum().item() == pytest.approx(len(data.train) * math.log(2))
    assert 0 < ovals < 9
    assert image_task().at(data).losses(zero, data.train.y).tolist() == pytest.approx([math.log(2)] * len(zero))


# Studies


def site_folders(folder: Path) -> Path:
    for seed, site in enumerate(("ash", "birch")):
        packed(folder / site / "train.npz", n=18, seed=seed)
        packed(folder / site / "test.npz", n=6, seed=seed + 10)
    (folder / "public_data").mkdir()
    (folder / "public_data" / "public_data.npz").write_bytes(public_bytes())
    return folder


@pytest.mark.parametrize("algorithm", ["fedavg", "fedbn"])
def test_a_federation_of_images_gives_the_same_model_twice(tmp_path: Path, algorithm: str) -> None:
    study = image_study({**IMAGES, "augment": {"flip_horizontal": True, "shift": 0.1}}, algorithm=algorithm)
    task, folder = task_of(study), site_folders(tmp_path)
    first, second = (run_federation(study, task, load_sites(study, task, folder)) for _ in range(2))
    assert first.digest == second.digest
    assert first.digest != first.initial_digest
    upload = {name for name in first.shared if ".bn" in name or "downsample.1" in name}
    assert bool(upload) == (algorithm == "fedavg")
    checkpoint = first.checkpoints["ash"]["latest"]
    assert checkpoint.split == "test"
    rows, _ = task.read_new(tmp_path / "ash" / "test.npz", load_sites(study, task, folder)["ash"].preprocessing)
    probabilities = Restored(study, task, checkpoint.tensors).probabilities(rows)
    y = torch.tensor([place % 2 for place in range(6)])
    assert (probabilities.argmax(1) == y).double().mean().item() == checkpoint.scores["accuracy"]


SPATIAL = sorted(
    name for name, row in registry.METHODS.items() if not row.lab_only and row.needs <= {BODY_AND_HEAD, NORM_LAYERS}
)


@pytest.mark.parametrize("algorithm", SPATIAL)
def test_every_method_for_divided_networks_trains_on_images(tmp_path: Path, algorithm: str) -> None:
    same_start = {"init_private": "common"} if registry.METHODS[algorithm].same_start else {}
    study = image_study(algorithm=algorithm, local_steps=1, **same_start)
    task = task_of(study)
    outcome = run_federation(study, task, load_sites(study, task, site_folders(tmp_path)))
    assert outcome.digest != outcome.initial_digest
    assert all(torch.isfinite(tensor).all() for tensor in outcome.shared.values())
    assert outcome.checkpoints["ash"]["latest"].scores["accuracy"] is not None


def test_rows_can_be_chosen_and_joined_as_those_of_tables(tmp_path: Path) -> None:
    study = image_study({**IMAGES, "augment": {"shift": 0.2}})
    sites = load_sites(study, task_of(study), site_folders(tmp_path))
    images = joined([sites["ash"].train, sites["birch"].test])
    tensors = joined(
        [Split(torch.cat([*in_parts(split.x, 99)]), split.y) for split in (sites["ash"].train, sites["birch"].test)]
    )
    places = torch.tensor([20, 0, 17, 3, 3])
    assert len(images) == len(tensors) == 21
    assert torch.equal(rows_at(images.x, places), rows_at(tensors.x, places))
    assert torch.equal(torch.cat([*in_parts(chosen(images, places).x, 2)]), chosen(tensors, places).x)
    assert torch.equal(chosen(images, places).y, tensors.y[places])
    own, _ = sites["birch"].test.x.augmented(torch.tensor([2]), torch.tensor([0]), 5)
    mixed, _ = images.x.augmented(torch.tensor([1, 17]), torch.tensor([0, 0]), 5)
    assert torch.equal(mixed[1:], own)


def test_saving_and_going_on_is_the_same_as_never_stopping(tmp_path: Path) -> None:
    study = image_study({**IMAGES, "augment": {"shift": 0.2}}, momentum=0.9, iterator="run")
    task = task_of(study)
    data = load_sites(study, task, site_folders(tmp_path))["ash"]
    from fl_algorithms.engine.partition import initial_model

    base = {"model": initial_model(study)}
    whole = SiteSession(study, "ash", task, data)
    whole.train(1, base)
    state = whole.export_state()
    on = whole.train(2, base)
    resumed = SiteSession(study, "ash", task, data, state).train(2, base)
    assert all(torch.equal(on.uplink["model"][name], resumed.uplink["model"][name]) for name in on.uplink["model"])


def test_a_model_learns_the_bright_from_the_dim(tmp_path: Path) -> None:
    study = image_study(local_steps=30, learning_rate=0.1)
    task = task_of(study)
    outcome = run_federation(study, task, load_sites(study, task, site_folders(tmp_path)))
    assert outcome.checkpoints["ash"]["latest"].scores["auc"] == 1.0


def test_the_lab_finds_folders_of_images_too(tmp_path: Path) -> None:
    study = image_study()
    for site in ("ash", "birch"):
        labeled(tmp_path / site)
    data = load_sites(study, task_of(study), tmp_path)
    assert (len(data["ash"].train) + len(data["ash"].validation), data["ash"].test) == (12, None)


def test_a_site_without_images_is_named(tmp_path: Path) -> None:
    study = image_study()
    with pytest.raises(BadData) as caught:
        load_sites(study, task_of(study), tmp_path)
    assert caught.value.message == (
        f"{tmp_path} has no images for site `ash`: neither {tmp_path}/ash/train.npz nor {tmp_path}/ash/images exists"
    )


@pytest.mark.parametrize(
    ("task", "model", "message"),
    [
        (IMAGES, {"name": "mlp"}, "model `mlp` takes columns, task `images` gives 1 x 8 x 8"),
        (
            IMAGES,
            {"name": "unet"},
            "model `unet` is for the class of each pixel, task `images` asks for the class of an",
        ),
        (None, {"name": "resnet18"}, "model `resnet18` takes images, task `tabular` gives columns"),
        (
            IMAGES,
            {"name": "vgg"},
            "model `vgg` with its small stem needs images of 16 x 16 pixels or more, task `images` gives 1 x 8 x 8",
        ),
        (
            {**IMAGES, "size": [8, 8, 8], "fit": "crop"},
            {"name": "resnet10"},
            "model `resnet10` takes images, not volumes",
        ),
    ],
)
def test_a_network_that_does_not_take_the_tasks_data_is_refused(
    task: dict[str, Any] | None, model: dict[str, Any], message: str
) -> None:
    table = task or {"name": "tabular", "label": "ill", "classes": ["no", "yes"], "features": ["age"]}
    with pytest.raises(BadData) as caught:
        image_study(table, model)
    assert message in caught.value.message


def test_an_image_study_resolves_to_itself_and_survives_its_document() -> None:
    study = image_study({**IMAGES, "mean": [0.5], "std": [0.25], "class_weights": [1, 2.5], "augment": {"zoom": 0.1}})
    assert resolve(study.file) == study
    again = resolve(StudyFile.from_document(study.document()))
    assert again.digest("0" * 64) == study.digest("0" * 64)
