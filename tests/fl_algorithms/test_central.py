"""One model of the sites' pooled records, and the scale on which it is judged."""

import csv
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fl_algorithms.engine.partition import task_of
from fl_algorithms.engine.session import Restored
from fl_algorithms.lab.central import pooled_study, run_central
from fl_algorithms.lab.data import heart_disease
from fl_algorithms.lab.evaluation import summary
from fl_algorithms.lab.federation import run_federation
from fl_algorithms.lab.protocol_settings import Protocol
from fl_algorithms.lab.runs import perform
from fl_algorithms.lab.site_data import load_sites
from fl_algorithms.lab.sources import find
from fl_algorithms.lab.suite import Job
from fl_algorithms.resolving import resolve
from fl_algorithms.study import ResolvedStudy
from fl_algorithms.tasks.base import Pooling, Source, Split
from fl_algorithms.tasks.images.labels import classes_among
from fl_algorithms.tasks.images.pool import pooled as pooled_images
from fl_algorithms.tasks.images.sets import ImageSet, read_set
from fl_algorithms.tasks.tables.tabular import TabularTask
from tests.fl_algorithms.image_toys import (
    CLASSES,
    IMAGES,
    MASKS,
    SIDE,
    image_study,
    image_task,
    labeled,
    packed,
    pictures,
    write_images,
    write_table,
)
from tests.fl_algorithms.toys import FENDA, toy_data, toy_study
from wardround.errors import BadData
from wardround.records.study import load

ROOT = Path(__file__).resolve().parents[2]
SHIFT = {"ash": 0.0, "birch": 5.0}  # the second hospital measures all on another scale


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for site, shift in SHIFT.items():
        data = toy_data(site)
        (tmp_path / site).mkdir()
        assert data.test is not None
        for name, split in (("train", data.train), ("test", data.test)):
            with (tmp_path / site / f"{name}.csv").open("w", newline="") as file:
                writer = csv.writer(file)
                writer.writerow(["u", "v", "w", "ill"])
                rows = zip((split.x + shift).tolist(), split.y.tolist(), strict=True)
                writer.writerows([*x, ("no", "yes")[y]] for x, y in rows)
    return tmp_path


def raw(folder: Path, name: str, sites: Any = SHIFT) -> torch.Tensor:
    rows = []
    for site in sites:
        with (folder / site / f"{name}.csv").open(newline="") as file:
            rows += [[float(row[column]) for column in "uvw"] for row in csv.DictReader(file)]
    return torch.tensor(rows, dtype=torch.float64)


def pooled(study: ResolvedStudy, folder: Path) -> Any:
    task = task_of(study)
    assert isinstance(task, TabularTask)
    return task.load_pooled(find(study, folder), site="central", seed=5, validation_fraction=0.2)


def test_central_on_one_site_is_that_site_alone(folder: Path) -> None:
    study = toy_study("silo", sites=["ash"], rounds=4)
    task = task_of(study)
    alone = run_federation(study, task, load_sites(study, task, folder)).checkpoints["ash"]
    central = run_central(study, task, folder, site="ash").checkpoints["ash"]
    assert central.keys() == alone.keys() == {"latest", "best_local"}
    for kind, checkpoint in central.items():
        assert all(torch.equal(tensor, alone[kind].tensors[name]) for name, tensor in checkpoint.tensors.items())
        assert (checkpoint.scores, checkpoint.val_loss, checkpoint.round, checkpoint.split) == (
            alone[kind].scores,
            alone[kind].val_loss,
            alone[kind].round,
            "test",
        )


def test_the_pool_is_standardized_as_one_table_with_its_training_rows_statistics(folder: Path) -> None:
    data, tests = pooled(toy_study(), folder)
    train = raw(folder, "train")
    mean, std = train.mean(0), train.std(0)
    found = torch.cat([data.train.x, data.validation.x])
    wanted = ((train - mean) / std).float()
    assert (len(data.validation), len(found)) == (8, 44)  # floor(0.2 * 44)
    torch.testing.assert_close(found[found[:, 0].argsort()], wanted[wanted[:, 0].argsort()])
    for site in SHIFT:
        torch.testing.assert_close(tests[site].x, ((raw(folder, "test", [site]) - mean) / std).float())
    assert torch.equal(data.test.x, torch.cat([tests["ash"].x, tests["birch"].x]))


def test_the_pools_split_is_its_own_for_each_seed(folder: Path) -> None:
    task, sources = task_of(toy_study()), find(toy_study(), folder)
    assert isinstance(task, TabularTask)
    first, again, other = (
        task.load_pooled(sources, site="central", seed=seed, validation_fraction=0.2)[0].validation.x
        for seed in (5, 5, 6)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_every_site_is_judged_with_the_one_model_on_the_asked_scale(folder: Path) -> None:
    study = toy_study(rounds=2)
    task = task_of(study)
    matched, by_site = (run_central(study, task, folder, scale) for scale in ("matched", "site"))
    scales = {
        "matched": (matched, pooled(study, folder)[1]),
        "site": (by_site, {site: data.test for site, data in load_sites(study, task, folder).items()}),
    }
    for outcome, tests in scales.values():
        for site in SHIFT:
            checkpoint = outcome.checkpoints[site]["best_local"]
            model = Restored(pooled_study(study), task, checkpoint.tensors)
            assert checkpoint.scores == task.metrics(model.logits(tests[site].x), tests[site].y)
            assert checkpoint.score == checkpoint.scores["accuracy"]
    one, other = (outcome.checkpoints for outcome in (matched, by_site))
    for name, tensor in one["ash"]["latest"].tensors.items():
        assert torch.equal(tensor, other["birch"]["latest"].tensors[name])
    assert one["birch"]["latest"].scores != other["birch"]["latest"].scores


def test_the_pool_trains_the_studys_own_network_as_long_as_a_site(folder: Path) -> None:
    study = toy_study("fenda", FENDA, rounds=2)
    outcome = run_central(study, task_of(study), folder)
    assert "private_extractor.layers.0.weight" in outcome.checkpoints["ash"]["latest"].tensors
    assert outcome.checkpoints["ash"]["latest"].round == 2
    assert (outcome.digest, set(outcome.sessions)) == (None, {"central"})


def test_a_site_without_test_rows_is_refused(folder: Path) -> None:
    (folder / "birch" / "test.csv").unlink()
    study = toy_study()
    with pytest.raises(BadData, match="no test table for site `birch`"):
        run_central(study, task_of(study), folder)


def test_a_task_that_cannot_pool_is_refused(folder: Path) -> None:
    class Other:
        """Another distribution's task."""

    with pytest.raises(BadData, match="task `tabular` cannot pool the sites' data"):
        run_central(toy_study(), Other(), folder)  # type: ignore[arg-type]


# Images and masks

SIZES = {"ash": 12, "birch": 18}  # training images; each has 6 for testing
KINDS = {"images": IMAGES, "segmentation": MASKS}


@pytest.fixture
def hospitals(tmp_path: Path) -> Path:
    """Images with classes and masks: one hospital's in .npz files, the other's, which are lighter, in folders."""
    folder = tmp_path / "hospitals"
    for name, n, seed in (("train", SIZES["ash"], 1), ("test", 6, 2)):
        packed(folder / "ash" / f"{name}.npz", n, seed)
    for prefix, n, seed in (("", SIZES["birch"], 3), ("test_", 6, 4)):
        images, masks = pictures(n, seed)
        names = write_images(folder / "birch" / f"{prefix}images", list(lighter(images)))
        write_images(folder / "birch" / f"{prefix}masks", list(masks))
        write_table(
            folder / "birch" / f"{prefix}labels.csv",
            {"image": names, "shape": [CLASSES[place % 2] for place in range(n)]},
        )
    return folder


def lighter(images: Any) -> Any:
    return np.minimum(images + 60, 255).astype(np.uint8)


def pixels_of(split: Split) -> torch.Tensor:
    assert not isinstance(split.x, torch.Tensor)
    return split.x.take(torch.arange(len(split)))


def pool_of(study: ResolvedStudy, folder: Path) -> Any:
    task = task_of(study)
    assert isinstance(task, Pooling)
    return task.load_pooled(find(study, folder), site="central", seed=5, validation_fraction=0.25)


@pytest.mark.parametrize("site", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_central_on_one_hospitals_images_is_that_hospital_alone(kind: str, site: str, hospitals: Path) -> None:
    study = image_study(KINDS[kind], algorithm="fedbn")
    section = study.study.model_copy(update={"sites": (site,)})
    study = resolve(study.file.model_copy(update={"study": section}), lab=True)
    task, own = task_of(study), pooled_study(study, site)
    alone = run_federation(own, task, load_sites(own, task, hospitals)).checkpoints[site]
    central = run_central(study, task, hospitals, site=site).checkpoints[site]
    assert central.keys() == alone.keys() == {"latest", "best_local"}
    for name, checkpoint in central.items():
        assert all(torch.equal(tensor, alone[name].tensors[key]) for key, tensor in checkpoint.tensors.items())
        assert (checkpoint.scores, checkpoint.val_loss, checkpoint.split) == (
            alone[name].scores,
            alone[name].val_loss,
            "test",
        )


@pytest.mark.parametrize("kind", KINDS)
def test_pooled_images_have_the_scale_of_all_training_pixels(kind: str, hospitals: Path) -> None:
    data, tests = pool_of(image_study(KINDS[kind]), hospitals)
    own = [pictures(SIZES["ash"], 1)[0], lighter(pictures(SIZES["birch"], 3)[0])]
    whole = np.concatenate(own) / 255
    found = torch.cat([pixels_of(part) for part in (data.train, data.validation)]).squeeze(1).numpy()
    assert (len(data.validation), len(found)) == (7, 30)  # floor(0.25 * 30)

    def scaled(images: Any) -> Any:
        return (images / 255 - whole.mean()) / whole.std()

    for image in np.concatenate(own):
        assert np.isclose(found, scaled(image), atol=1e-5).all(axis=(1, 2)).any()
    np.testing.assert_allclose(pixels_of(tests["ash"]).squeeze(1), scaled(pictures(6, 2)[0]), atol=1e-5)
    np.testing.assert_allclose(pixels_of(tests["birch"]).squeeze(1), scaled(lighter(pictures(6, 4)[0])), atol=1e-5)
    assert torch.equal(data.test.y, torch.cat([tests["ash"].y, tests["birch"].y]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_pooled_image_keeps_its_class_or_mask(kind: str, hospitals: Path) -> None:
    data, _ = pool_of(image_study({**KINDS[kind], "mean": [0.0], "std": [1.0]}), hospitals)
    own = [pictures(SIZES["ash"], 1), pictures(SIZES["birch"], 3)]
    known = {}
    for (images, masks), raw_images in zip(own, (own[0][0], lighter(own[1][0])), strict=True):
        for place in range(len(images)):
            y = masks[place] if kind == "segmentation" else np.int64(place % 2)
            known[raw_images[place].tobytes()] = y
    for part in (data.train, data.validation):
        for x, y in zip(pixels_of(part), part.y, strict=True):
            np.testing.assert_array_equal(y.numpy(), known[(x * 255).round().to(torch.uint8).numpy().tobytes()])


@pytest.mark.parametrize("kind", KINDS)
def test_the_studys_own_scale_is_both_the_pools_and_the_sites(kind: str, hospitals: Path) -> None:
    """Scores of the one model on the pool's scale and on each site's, and the loss of the validation rows."""

    def told(study: ResolvedStudy, scale: Any) -> Any:
        outcome = run_central(study, task_of(study), hospitals, scale)
        assert set(outcome.sessions) == {"central"}
        tests = pool_of(study, hospitals)[1]
        if scale == "site":
            tests = {site: data.test for site, data in load_sites(study, task_of(study), hospitals).items()}
        for site, kinds in outcome.checkpoints.items():
            model = Restored(pooled_study(study), task_of(study), kinds["latest"].tensors)
            wanted = task_of(study).metrics(model.logits(tests[site].x), tests[site].y)
            assert kinds["latest"].scores == wanted
            assert kinds["latest"].split == "test"
        return tests["birch"], {site: kinds["latest"].scores for site, kinds in outcome.checkpoints.items()}

    given = image_study({**KINDS[kind], "mean": [0.25], "std": [0.25]})
    assert told(given, "matched")[1] == told(given, "site")[1]
    own = image_study(KINDS[kind])
    assert not torch.equal(pixels_of(told(own, "matched")[0]), pixels_of(told(own, "site")[0]))


def test_the_same_patient_of_two_hospitals_is_two_people(tmp_path: Path) -> None:
    for site, seed in (("ash", 1), ("birch", 2)):
        packed(tmp_path / site / "train.npz", 12, seed, who=np.arange(12) // 2)
        packed(tmp_path / site / "test.npz", 6, seed + 2, who=np.arange(6) // 2 + 6)
    study = image_study({**IMAGES, "patient": "who"})
    data, _ = pool_of(study, tmp_path)
    assert (len(data.train), len(data.validation)) == (18, 6)  # floor(0.25 * 12) people, each with two images
    packed(tmp_path / "birch" / "test.npz", 6, 4, who=np.full(6, 0))
    with pytest.raises(BadData, match="1 of its 1 patients are also in"):
        pool_of(study, tmp_path)
    packed(tmp_path / "birch" / "train.npz", 12, 2, who=np.arange(12) + 20)
    assert len(pool_of(study, tmp_path)[1]["birch"]) == 6  # 0 is of the other hospital


def test_pooled_pixels_are_the_sites_own_and_none_is_copied_beforehand(tmp_path: Path) -> None:
    """One site's stay decoded, the other's are read again from their files."""
    large, n = 256, 40
    task, small = image_task(size=[large, large]), image_task(size=[large, large], cache_mib=1)
    packed(tmp_path / "train.npz", n, images=np.tile(pictures(n)[0], (1, large // SIDE, large // SIDE)))
    sets: dict[str, ImageSet] = {}
    for site, one, source in (
        ("ash", task, Source({"arrays": tmp_path / "train.npz"})),
        ("birch", small, labeled(tmp_path / "birch", n, 3)),
    ):
        found = read_set(source, one.settings, lambda rows: classes_among(rows, CLASSES), test=False, masks=False)
        assert found is not None
        sets[site] = found
    assert [images.pixels.is_kept for images in sets.values()] == [True, False]
    tracemalloc.start()
    pool = pooled_images(sets, task.settings)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < n * large * large / 8  # an eighth of what one site keeps
    assert not pool.pixels.is_kept
    assert len(pool) == len(pool.pixels) == 2 * n
    places = np.array([n + 1, 3, 0, 2 * n - 1, n, n - 1])
    wanted = [sets["birch"], sets["ash"], sets["ash"], sets["birch"], sets["birch"], sets["ash"]]
    for row, place, images in zip(pool.pixels.take(places), places, wanted, strict=True):
        np.testing.assert_array_equal(row, images.pixels.take(np.array([place % n]))[0])
    assert pool.pixels.hashes() == sets["ash"].pixels.hashes() + sets["birch"].pixels.hashes()


@pytest.mark.parametrize("kind", KINDS)
def test_a_suites_central_row_runs_on_images(kind: str, hospitals: Path) -> None:
    study = image_study(KINDS[kind])
    job = Job("central", "central", "site", False, 0, {}, study, Protocol(), "central/5.json")
    result = perform(job, hospitals)
    assert set(result["checkpoints"]) == set(SIZES)
    for kinds in result["checkpoints"].values():
        assert kinds["latest"]["split"] == "test"
        assert kinds["latest"]["score"] is not None


@pytest.mark.parametrize(("site", "absent"), [("ash", "test.npz"), ("birch", "test_images")])
def test_a_hospital_without_test_images_is_refused(site: str, absent: str, hospitals: Path) -> None:
    (hospitals / site / absent).rename(hospitals / "hidden")
    study = image_study()
    with pytest.raises(BadData, match="has no test images for site") as refused:
        run_central(study, task_of(study), hospitals)
    assert refused.value.message.endswith(f"for site `{site}`: {hospitals / site / absent} does not exist")


@pytest.mark.data
def test_on_the_heart_disease_hospitals_the_matched_scale_is_the_better_one(
    hospital_data: Path, tmp_path: Path
) -> None:
    """Means over 20 seeds of an independent simulation: .818 matched, .733 on the sites' own scales."""
    heart_disease(hospital_data / "heart_disease", tmp_path)
    file = load(ROOT / "examples" / "heart_disease.toml", ["algorithm.name=silo"])
    study = resolve(file, lab=True)
    task = task_of(study)
    found = {
        scale: summary([run_central(study, task, tmp_path, scale).checkpoints])["best_local"]["mean"]
        for scale in ("matched", "site")
    }
    assert abs(found["matched"] - 0.818) < 0.03, found
    assert abs(found["site"] - 0.733) < 0.03, found
