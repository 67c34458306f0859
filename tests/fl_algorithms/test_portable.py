"""A model that left our programs: the same answers in a process in which none of them can be imported."""

import csv
import itertools
import json
import random
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from fl_algorithms import registry
from fl_algorithms.engine.algorithm import algorithm_of
from fl_algorithms.engine.beside import joined
from fl_algorithms.engine.partition import all_tensors, build, task_of
from fl_algorithms.engine.selection import restored
from fl_algorithms.lab.data import heart_disease
from fl_algorithms.portable import card
from fl_algorithms.portable.card import MODEL_FILE, ONNX_FILE, PREPROCESSING_FILE, STUDY_FILE
from fl_algorithms.portable.folder import add_program
from fl_algorithms.portable.program import captured, source
from fl_algorithms.resolving import resolve
from fl_algorithms.study import SiteStudy
from fl_algorithms.tasks.base import Source
from site_agent.trainer.rounds import predictions
from wardround.errors import BadData, NeedsPerson
from wardround.records.study import StudyFile, load
from wardround.signing import canonical

ROOT = Path(__file__).resolve().parents[2]
LOADER = """
import runpy, sys
sys.modules.update(dict.fromkeys(("wardround", "fl_algorithms", "site_agent", "coordinator")))
for folder in sys.argv[1:]:
    runpy.run_path(folder + "/predict.py")["main"](folder + "/new.csv", folder + "/theirs.csv")
"""
FEATURES = [
    {"name": "age", "low": 0.0, "high": 120.0, "outside": "missing"},
    {"name": "sex", "kind": "categorical", "categories": ["f", "m", "1"], "other": "m"},
    {"name": "smokes", "kind": "boolean"},
    {"name": "born", "kind": "date", "until": "seen", "unit": "years"},
    {"name": "weeks", "kind": "date", "until": "2024-06-30", "unit": "days"},
]
MISSING = {"policy": "median", "indicators": ["age", "sex", "smokes"]}
TARGETS: dict[str, dict[str, Any]] = {
    "tabular": {"label": "grade", "classes": ["I", "III"]},
    "three": {"label": "stage", "classes": ["I", "II", "III"]},
    "ordinal": {"label": "stage", "classes": ["I", "II", "III"]},
    "regression": {"label": "stay", "mean": 5.0, "std": 2.0},
    "multilabel": {"labels": ["sepsis", "stroke"], "absent": "no", "present": "yes"},
    "survival": {"time": "days", "event": "died", "horizons": [2.0, 5.0]},
}


def study_of(task: dict[str, Any], **changes: Any) -> SiteStudy:
    tables = {
        "study": {"name": "toy", "sites": ["ash", "birch"], "rounds": 2},
        "task": task,
        "model": {"name": "mlp", "hidden": [4], "norm": "batch", "dropout": 0.2},
        "algorithm": {"name": "fedavg"},
        "training": {"local_steps": 1},
    }
    return resolve(StudyFile.model_validate({**tables, **changes})).at("ash")


def write_patients(path: Path, rows: int, seed: int) -> Path:
    draw = random.Random(seed)
    header = ["age", "sex", "smokes", "born", "seen", "weeks", "grade", "stage", "stay", "sepsis", "stroke", "days",
              "died", "note"]  # fmt: skip
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        for number in range(rows):
            writer.writerow([
                draw.choice(["", "NA", f"{draw.uniform(1, 200):.2f}", "4e1"]), draw.choice(["f", "m", "1.0", "x", "?"]),
                draw.choice(["Yes", "n", "1", "FALSE", ""]), f"19{draw.randint(20, 99)}-0{draw.randint(1, 9)}-15",
                "2020-02-29T08:15", f"2023-1{draw.randint(0, 2)}-01 10:00", draw.choice(["I", "III"]),
                draw.choice(["I", "II", "III"]), f"{draw.uniform(1, 9):.2f}", draw.choice(["yes", "no"]),
                draw.choice(["yes", "no"]), f"{draw.uniform(1, 9):.2f}", number % 2,
                "two\nlines" if number % 3 else "one",
            ])  # fmt: skip
    return path


def drawn(study: SiteStudy) -> dict[str, torch.Tensor]:
    """A model's tensors, none of which is as it began."""
    tensors = all_tensors(build(study, task_of(study), algorithm_of(study), site="ash"))
    generator = torch.Generator().manual_seed(3)
    return {
        name: tensor + torch.rand(tensor.shape, generator=generator)
        if tensor.dtype == torch.float32
        else tensor.clone()
        for name, tensor in tensors.items()
    }


def exported(folder: Path, study: SiteStudy, table: Path, label: str, new: Path) -> Path:
    """What `models export` makes of a model, beside what `predict` says of the rows in ``new``."""
    folder.mkdir()
    task, tensors = task_of(study), drawn(study)
    data = task.load(Source({"table": table}, label=label), site="ash", seed=1, validation_fraction=0.2)
    task = task.at(data)
    model = restored(study, task, tensors)
    fitted = {"inputs": task.fitted(data), "outputs": task.fit_outputs(lambda split: model.logits(split.x), data)}
    safetensors.torch.save_file(tensors, folder / MODEL_FILE)
    (folder / PREPROCESSING_FILE).write_text(json.dumps(fitted))
    (folder / STUDY_FILE).write_bytes(canonical.dumps(study.document()))
    add_program(folder, study, tensors, 'of `toy` """ \\')
    (folder / "new.csv").write_bytes(new.read_bytes())
    x, names = task.read_new(new, fitted["inputs"])
    predictions.write(model, task, x, names, folder / "ours.csv", fitted["outputs"])
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The exports of a model of each task of tables, each applied in one process without us."""
    place = tmp_path_factory.mktemp("portable")
    table, new = write_patients(place / "table.csv", 40, 1), write_patients(place / "new.csv", 30, 2)
    made = []
    for name, target in TARGETS.items():
        task = {"name": "tabular" if name == "three" else name, "features": FEATURES, "missing": MISSING, **target}
        label = target.get("label", "")
        try:
            made.append(exported(place / name, study_of(task), table, label, new))
        except NeedsPerson:
            assert name == "survival"  # whose scores are an extra
    dropping = {"name": "tabular", "features": FEATURES, "missing": {"policy": "drop_row"}, **TARGETS["tabular"]}
    made.append(exported(place / "dropping", study_of(dropping), table, "grade", new))
    done = subprocess.run([sys.executable, "-c", LOADER, *map(str, made)], capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr
    return made


def test_a_process_without_us_predicts_the_same(folders: list[Path]) -> None:
    assert len(folders) >= 6
    for folder in folders:
        same(folder)


def same(folder: Path) -> None:
    ours, theirs = (list(csv.reader((folder / f"{who}.csv").read_text().splitlines())) for who in ("ours", "theirs"))
    assert ours[0] == theirs[0], folder.name
    assert len(ours) == len(theirs) > 1
    for row, other in zip(ours[1:], theirs[1:], strict=True):
        assert row[0] == other[0], folder.name
        for cell, second in zip(row, other, strict=True):
            assert cell == second or abs(float(cell) - float(second)) <= 2e-6, (folder.name, row, other)


@pytest.mark.data
def test_real_patients_are_predicted_the_same(hospital_data: Path, tmp_path: Path) -> None:
    heart_disease(hospital_data / "heart_disease", tmp_path / "heart")
    study = resolve(load(ROOT / "examples" / "heart_disease.toml"))
    for site in study.study.sites:
        place = tmp_path / "heart" / site
        folder = exported(tmp_path / site, study.at(site), place / "train.csv", "", place / "test.csv")
        runpy.run_path(str(folder / "predict.py"))["main"](folder / "new.csv", folder / "theirs.csv")
        same(folder)


def program_of(study: SiteStudy, tensors: dict[str, torch.Tensor]) -> Any:
    """The program's own model, with the weights in it; and ours."""
    task = task_of(study)
    model = restored(study, task, tensors)
    graph = captured(model, task.input_shape)
    space: dict[str, Any] = {}
    exec(source(graph, tensors, "toy", tables=False), space)  # the text that was just made
    theirs = space["Model"]()
    theirs.load_state_dict(tensors)
    return theirs, model, graph


COLUMNS = {"name": "tabular", "features": ["u", "v"], "label": "y", "classes": ["a", "b"]}
IMAGES = {"name": "images", "classes": ["a", "b", "c"], "size": [32, 32], "channels": 3}
VOLUMES = {"name": "segmentation", "classes": ["rest", "organ"], "size": [16, 16], "channels": 1}


@pytest.mark.parametrize(
    ("task", "model", "method"),
    [
        (IMAGES, {"name": "resnet10", "width": 0.25}, {"name": "fedavg"}),
        (IMAGES, {"name": "squeezenet"}, {"name": "fedper"}),
        (VOLUMES, {"name": "unet", "widths": [4, 8]}, {"name": "fedavg"}),
        (COLUMNS, {"name": "mlp", "hidden": [4]}, {"name": "mhpflgb"}),
    ],
    ids=["resnet", "squeezenet", "unet", "mhpflgb"],
)  # fmt: skip
def test_networks_and_methods_are_written_down_bit_for_bit(
    task: dict[str, Any], model: dict[str, Any], method: dict[str, Any]
) -> None:
    study = study_of(task, model=model, algorithm=method)
    theirs, ours, _ = program_of(study, drawn(study))
    x = torch.randn(5, *task_of(study).input_shape, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(theirs(x), ours.logits(x))


def test_a_model_whose_own_number_decides_what_is_computed_has_no_program() -> None:
    study = study_of(COLUMNS, algorithm={"name": "apfl"})
    with pytest.raises(BadData, match=r"torch makes no one graph of this network .* \(GuardOn") as refused:
        captured(restored(study, task_of(study), drawn(study)), (2,))
    assert "build the network yourself" in refused.value.hint


def test_models_that_answer_together_are_one_program() -> None:
    study = study_of(COLUMNS, model={"name": "fenda"}, algorithm={"name": "fenda"}, checkpoints={"alone": True})
    both = joined({"best_local": drawn(study), "alone": drawn(study.alone())})
    theirs, ours, _ = program_of(study, both)
    x = torch.randn(9, 2)
    with torch.no_grad():
        assert torch.equal(theirs(x), ours.logits(x))


def test_onnx_gives_the_same_logits_in_its_own_evaluator(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    study = study_of(COLUMNS)
    tensors = drawn(study)
    files = add_program(tmp_path, study, tensors, "toy", onnx=True)
    assert [file.name for file in files] == ["model.py", ONNX_FILE]
    model = onnx.load(tmp_path / ONNX_FILE)
    onnx.checker.check_model(model, full_check=True)
    ours = restored(study, task_of(study), tensors)
    for rows in (1, 7):  # any number of them
        x = torch.randn(rows, 2)
        (found,) = onnx.reference.ReferenceEvaluator(model).run(None, {"x": x.numpy()})
        np.testing.assert_allclose(found, ours.logits(x).numpy(), atol=1e-6)


def test_tensors_that_stayed_at_the_sites_are_named(tmp_path: Path) -> None:
    study = study_of(COLUMNS, model={"name": "fenda"}, algorithm={"name": "fenda"})
    shared = {name: tensor for name, tensor in drawn(study).items() if name.startswith("shared")}
    with pytest.raises(BadData, match=r"predictions need 4 tensors that are not in model\.safetensors: `head\.bias`"):
        add_program(tmp_path, study, shared, "toy")
    assert list(tmp_path.iterdir()) == []


def test_a_counter_that_never_travels_is_not_missed(tmp_path: Path) -> None:
    study = study_of(COLUMNS)
    shared = {name: tensor for name, tensor in drawn(study).items() if tensor.dtype == torch.float32}
    assert len(shared) < len(drawn(study))
    add_program(tmp_path, study, shared, "toy")
    assert "num_batches_tracked" not in (tmp_path / "model.py").read_text()


def test_every_task_of_tables_of_ours_is_known_to_the_copied_program() -> None:
    from fl_algorithms.portable.folder import TASKS

    of_tables = {name for name in registry.TASKS if registry.TASKS[name].gives == "columns"}
    assert of_tables == TASKS


def test_a_card_tells_who_was_in_which_round() -> None:
    told = card.took_part(4, {"ash": [1, 2, 3, 4, 5], "birch": [1, 3], "elm": []}, {"ash": [2, 5]}, {"birch": [4]})
    assert told == [
        "ash: in 4 of 4 rounds; counted for less than its rows in round 2",
        "birch: in 2 of 4 rounds, not in rounds 2, 4; was left out as an outlier in round 4",
        "elm: in 0 of 4 rounds",
    ]
    assert card.took_part(4, None, {}, {}) == [
        "Which sites contributed to which round is not known here before the study has ended."
    ]


def test_a_card_is_no_place_for_markup() -> None:
    text = card.page("a `b` | <script>", {"study": "x](y)\n# z"}, [], ["who | when"])
    assert "<script>" not in text.replace("\\<script\\>", "")
    assert text.splitlines()[0] == "# a \\`b\\` \\| \\<script\\>"
    assert "# z" not in text.splitlines()


def test_the_loader_on_the_card_is_five_lines() -> None:
    lines = list(itertools.takewhile(lambda line: line != "```", card.LOADER.splitlines()[1:]))
    assert len(lines) == 5
