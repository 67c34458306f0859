"""Images of another size at each site: who says so, what stays alike, and what is asked across sizes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from fl_algorithms.engine.partition import describe, initial_model, task_of
from fl_algorithms.engine.session import Restored
from fl_algorithms.lab.central import pooled_study
from fl_algorithms.lab.cli import app
from fl_algorithms.lab.federation import Outcome, run_federation
from fl_algorithms.lab.protocol import Matrix, measure
from fl_algorithms.lab.protocol_settings import Protocol
from fl_algorithms.lab.site_data import load_sites
from fl_algorithms.lab.sizes import sizes
from fl_algorithms.resolving import resolve
from fl_algorithms.settings.vision import VggSettings
from fl_algorithms.study import ResolvedStudy
from fl_algorithms.tasks.base import SiteData, Task
from fl_algorithms.tasks.selection import row_shape
from tests.fl_algorithms.image_toys import (
    IMAGES,
    MASKS,
    PUBLIC_ROWS,
    RESNET,
    UNET,
    image_study,
    packed,
    pictures,
    public_bytes,
    write_images,
)
from wardround.errors import BadData
from wardround.records.study import StudyFile

LARGE: dict[str, Any] = {**RESNET, "size": [16, 16]}
LARGE_UNET: dict[str, Any] = {**UNET, "size": [16, 16]}
PLAIN = {"name": "mhpflgb", "train_local": {"steps": 2}, "train_global": {"steps": 1}, "widths": [4, 4]}


def study_of(algorithm: Any = "fedavg", **tables: Any) -> ResolvedStudy:
    """Images of 8 x 8 at ash, of 16 x 16 at birch; ``tables`` replace others."""
    known = algorithm if isinstance(algorithm, str) else algorithm["name"]
    table = {} if isinstance(algorithm, str) else {"algorithm": algorithm}
    whole = image_study(algorithm=known).file.model_dump()
    return resolve(
        StudyFile.model_validate(
            {**whole, "networks": {"large": LARGE}, "assigned": {"birch": "large"}, **table, **tables}
        ),
        lab=True,
    )


def mask_study(**tables: Any) -> ResolvedStudy:
    return study_of(**{"algorithm": PLAIN, "task": MASKS, "model": UNET, "networks": {"large": LARGE_UNET}, **tables})


def site_folders(folder: Path) -> Path:
    for seed, site in enumerate(("ash", "birch")):
        packed(folder / site / "train.npz", n=15, seed=seed)
        packed(folder / site / "test.npz", n=8, seed=seed + 10)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return site_folders(tmp_path)


def federate(study: ResolvedStudy, folder: Path) -> tuple[Task, dict[str, SiteData], Outcome]:
    task = task_of(study)
    data = load_sites(study, task, folder)
    return task, data, run_federation(study, task, data)


# What a study may say


def test_a_site_trains_the_study_at_the_size_of_its_network() -> None:
    study = study_of()
    own = {site: study.at(site) for site in ("ash", "birch", "")}
    assert {site: task_of(one).input_shape for site, one in own.items()} == {
        "ash": (1, 8, 8), "birch": (1, 16, 16), "": (1, 8, 8),
    }  # fmt: skip
    assert own["birch"].at("birch") == own["birch"]
    assert task_of(study.at("ash", "large")).input_shape == (1, 16, 16)
    assert task_of(study.at("birch", "default")).input_shape == (1, 8, 8)


def test_the_size_of_the_model_itself_is_that_of_all_sites_but_those_with_another_network() -> None:
    study = study_of(model=LARGE, networks={"tasks": RESNET}, assigned={"birch": "tasks"})
    shapes = [task_of(study.at(site)).input_shape for site in ("ash", "birch")]
    assert shapes == [(1, 16, 16), (1, 8, 8)]
    assert task_of(study).input_shape == (1, 16, 16)
    alone = study_of(model=LARGE, networks={}, assigned={})
    assert task_of(alone).input_shape == (1, 16, 16)
    assert alone.at("ash").file.task.settings["size"] == [16, 16]
    assert alone.file.task.settings["size"] == [8, 8]


def test_resolving_twice_changes_nothing_and_the_pool_has_the_default_networks_size() -> None:
    study = study_of(model=LARGE, networks={"tasks": RESNET}, assigned={"birch": "tasks"})
    assert study.file.model.settings["size"] == [16, 16]
    assert resolve(StudyFile.from_document(study.document())) == study
    pooled = pooled_study(study)
    assert task_of(pooled).input_shape == (1, 16, 16)
    assert resolve(pooled.file, lab=True) == pooled


def test_a_network_without_a_size_has_the_settings_that_it_always_had() -> None:
    document = study_of(networks={"other": RESNET}, assigned={}).document()
    for table in (document["model"], document["networks"]["other"]):
        assert table.keys() == {"name", "width", "stem", "norm", "dropout"}
    assert mask_study(networks={}, assigned={}).document()["model"].keys() == {"name", "widths", "norm", "dropout"}


def test_the_size_is_part_of_the_digest() -> None:
    wide = {**RESNET, "size": [16, 24]}
    digests = {study_of(networks={"large": one}).digest("0" * 64) for one in (RESNET, LARGE, wide)}
    assert len(digests) == 3


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        (
            {"networks": {"large": {**RESNET, "size": [4, 16, 16]}}},
            "study.toml: `size` in [networks.large] has 3 numbers, that in [task] has 2",
        ),
        (
            {"model": {**RESNET, "size": [4, 16, 16]}, "networks": {}, "assigned": {}},
            "study.toml: `size` in [model] has 3 numbers, that in [task] has 2",
        ),
        (
            {"networks": {"large": {**RESNET, "size": [2, 16]}}},
            "study.toml: `size` in [networks.large]: input should be greater than or equal to 4, found 2",
        ),
        (
            {"networks": {"large": {"name": "densenet", "size": [4, 16]}}},
            "study.toml: [networks.large]: model `densenet` with its small stem needs images of 8 x 8 pixels or more, "
            "its `size` gives 1 x 4 x 16",
        ),
        (
            {"task": MASKS, "model": UNET, "networks": {"large": {**UNET, "size": [16, 9]}}},
            "study.toml: [networks.large]: model `unet` with 2 `widths` needs sides that 2 divides, its `size` gives "
            "1 x 16 x 9",
        ),
        (
            {
                "task": {**IMAGES, "augment": {"quarter_turns": True}},
                "networks": {"large": {**RESNET, "size": [16, 12]}},
            },
            "study.toml: `size` in [networks.large]: [task]: `quarter_turns` need images as high as wide",
        ),
        (
            {"networks": {"large": {"name": "mlp", "size": [16, 16]}}},
            "study.toml: unknown key `size` in [networks.large]",
        ),
        (
            {"task": {"name": "tabular", "label": "ill", "classes": ["no", "yes"], "features": ["u"]},
             "model": {"name": "mlp"}},
            "study.toml: [networks.large]: model `resnet10` takes images, task `tabular` gives columns",
        ),
    ],
    ids=["dimensions", "dimensions of the model", "a side", "too small", "not divided", "not square", "no images",
         "no images in the task"],
)  # fmt: skip
def test_a_size_that_cannot_be_is_refused_with_its_network(tables: dict[str, Any], said: str) -> None:
    with pytest.raises(BadData) as refusal:
        study_of(**tables)
    assert refusal.value.message == said


@pytest.mark.parametrize("algorithm", ["feddf", "pfeddf"])
def test_a_coordinator_that_distils_needs_one_size(algorithm: str) -> None:
    with pytest.raises(BadData) as refusal:
        study_of(algorithm)
    assert refusal.value.message == (
        f"study.toml: algorithm `{algorithm}` needs networks that see images of one size, found `default` 8 x 8, "
        "`large` 16 x 16"
    )
    assert task_of(study_of(algorithm, model=LARGE)).input_shape == (1, 16, 16)


def test_networks_that_share_other_tensors_at_other_sizes_are_refused_by_name() -> None:
    """An MLP as FedSM's selector is of the flattened image; a convolutional one takes images of any size."""
    assert "selector/head.weight" in initial_model(study_of("fedsm"))
    study = study_of({"name": "fedsm", "selector": "mlp"})
    with pytest.raises(BadData, match=r"network `large` of \[networks\] shares `selector/.*weight` \[\d+, 256\]"):
        initial_model(study)


# The lab


def test_sites_of_unlike_sizes_share_one_bypass_and_read_their_data_at_their_own(folder: Path) -> None:
    study = study_of(PLAIN)
    task, data, outcome = federate(study, folder)
    assert [row_shape(data[site].train.x) for site in ("ash", "birch")] == [(1, 8, 8), (1, 16, 16)]
    assert describe(study, "ash").upload == describe(study, "birch").upload
    ash, birch = (outcome.checkpoints[site]["latest"].tensors for site in ("ash", "birch"))
    for name, tensor in outcome.shared.items():
        assert name.startswith("bypass/")
        assert torch.equal(ash[name], birch[name])
        assert torch.equal(ash[name], tensor)
    assert task.input_shape == (1, 8, 8)


def test_one_architecture_is_averaged_over_sites_of_unlike_sizes(folder: Path) -> None:
    study, alike = study_of(), study_of(networks={}, assigned={})
    outcome = federate(study, folder)[2]
    for site in ("ash", "birch"):
        latest = outcome.checkpoints[site]["latest"].tensors
        assert all(torch.equal(latest[name], tensor) for name, tensor in outcome.shared.items())
    assert outcome.initial_digest == federate(alike, folder)[2].initial_digest
    assert outcome.digest != federate(alike, folder)[2].digest


def test_a_site_whose_size_the_study_gives_to_all_trains_the_same_bits(folder: Path) -> None:
    """A network's size is only another way to say [task]'s."""
    task = {**IMAGES, "size": [16, 16]}
    theirs = federate(study_of(task=task, networks={}, assigned={}), folder)[2]
    ours = federate(study_of(model=LARGE, networks={}, assigned={}), folder)[2]
    assert theirs.digest == ours.digest


def test_a_checkpoint_predicts_new_images_of_any_size_at_its_own(folder: Path, tmp_path: Path) -> None:
    study = study_of(PLAIN)
    _, data, outcome = federate(study, folder)
    write_images(tmp_path / "new", [image[:20] for image in pictures(3, seed=9, side=24)[0]])
    own = {site: study.at(site) for site in ("ash", "birch")}
    for site, shape in (("ash", (1, 8, 8)), ("birch", (1, 16, 16))):
        task = task_of(own[site])
        rows, names = task.read_new(tmp_path / "new", json.loads(json.dumps(task.fitted(data[site]))))
        assert row_shape(rows) == shape
        restored = Restored(own[site], task, outcome.checkpoints[site]["latest"].tensors)
        assert restored.probabilities(rows).shape == (len(names), 2) == (3, 2)
    with pytest.raises(BadData, match="fitted for images of another shape"):
        task_of(own["ash"]).read_new(tmp_path / "new", data["birch"].preprocessing)


def test_each_site_reads_the_public_data_set_at_its_own_size(folder: Path) -> None:
    (folder / "public_data").mkdir()
    (folder / "public_data" / "public_data.npz").write_bytes(public_bytes())
    study = study_of({"name": "fedmd", "transfer": {"epochs": 0}, "initial": {"epochs": 0}})
    data = load_sites(study, task_of(study), folder)
    shapes = {}
    for site, of_site in data.items():
        assert of_site.public_data is not None
        shapes[site] = (len(of_site.public_data.x), *row_shape(of_site.public_data.x))
    assert shapes == {"ash": (PUBLIC_ROWS, 1, 8, 8), "birch": (PUBLIC_ROWS, 1, 16, 16)}
    run_federation(study, task_of(study), data)


# What is asked across sizes


@pytest.mark.parametrize("study", [study_of(PLAIN), mask_study()], ids=["classes", "masks"])
def test_a_model_answers_for_another_sites_rows_as_that_site_reads_them(study: ResolvedStudy, folder: Path) -> None:
    task, data, outcome = federate(study, folder)
    tent = study.task.name == "images"
    asked = Protocol(matrix=True, personalisation=(1,), sharpness=tent, tent=tent, leave_one_out=True)
    found = measure(study, task, data, outcome, asked)
    metric = "accuracy" if study.task.name == "images" else "dice"
    for site, other in (("ash", "birch"), ("birch", "ash")):
        own = study.at(site)
        model = Restored(own, task_of(own), outcome.checkpoints[site]["latest"].tensors)
        split = data[other].test
        assert split is not None
        score = task.metrics(model.logits(split.x), split.y)[metric]
        assert found["matrix"]["kinds"]["latest"]["matrix"][metric][site][other] == score
    assert found["matrix"]["kinds"]["latest"]["global"] == dict.fromkeys(study.task.settings.metrics)
    assert found["matrix"]["kinds"]["latest"]["local"][metric] is not None
    assert found["leave_one_out"]["mean"]["latest"][metric] is not None


def test_a_network_that_does_not_take_another_sites_size_has_no_score_there(folder: Path) -> None:
    """Three halvings of 12 are not whole; one halving of 16 is."""
    deep = {**UNET, "widths": [2, 2, 2, 2], "size": [16, 16]}
    shallow = {**UNET, "size": [12, 12]}
    study = mask_study(algorithm="silo", model=shallow, networks={"large": deep})
    task, data, outcome = federate(study, folder)
    matrix = measure(study, task, data, outcome, Protocol(matrix=True))["matrix"]["kinds"]["latest"]["matrix"]["dice"]
    assert matrix["birch"]["ash"] is None
    assert all(matrix[j][i] is not None for j, i in (("ash", "ash"), ("ash", "birch"), ("birch", "birch")))
    assert Matrix({"dice": matrix}).ood("dice") == matrix["ash"]["birch"]


def test_what_a_built_network_takes_goes_by_the_stem_that_it_was_built_with() -> None:
    """Of 16 pixels "auto" is the small stem; of 96, for which the network was built, the large one."""
    sizes = VggSettings()
    assert sizes.misfit((1, 16, 16)) == ""
    assert "large stem needs images of 32 x 32" in sizes.built_for((1, 96, 96)).misfit((1, 16, 16))


# How large they are


def test_another_size_costs_other_operations_and_no_other_parameters(tmp_path: Path) -> None:
    small, large = sizes(study_of())
    assert small["parameters"] == large["parameters"]
    head = 2 * initial_model(study_of())["head.weight"].numel() / 1e6
    assert large["mflops"] - head == pytest.approx(4 * (small["mflops"] - head))
    file = tmp_path / "study.toml"
    file.write_text(
        '[study]\nname = "toy"\nsites = ["ash", "birch"]\nrounds = 1\n'
        '[task]\nname = "images"\nsize = [8, 8]\nchannels = 1\nclasses = ["round", "oval"]\n'
        '[model]\nname = "resnet10"\nwidth = 0.0625\n'
        '[networks.large]\nname = "resnet10"\nwidth = 0.0625\nsize = [16, 16]\n[assigned]\nbirch = "large"\n'
        '[algorithm]\nname = "fedavg"\n'
    )
    told = CliRunner().invoke(app, ["size", str(file), "--json"], catch_exceptions=False)
    assert [row["mflops"] for row in json.loads(told.stdout)["networks"]] == [small["mflops"], large["mflops"]]
