"""Rows of a ``torch.utils.data.Dataset`` of one's own: read, checked, split, trained on."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from fl_algorithms import registry
from fl_algorithms.engine.device import CPU
from fl_algorithms.engine.partition import task_of
from fl_algorithms.engine.session import Restored
from fl_algorithms.lab.federation import run_federation
from fl_algorithms.lab.site_data import load_sites
from fl_algorithms.resolving import resolve
from fl_algorithms.rows import dataset_row
from fl_algorithms.settings.dataset import NumberDatasetSettings, SurvivalDatasetSettings
from fl_algorithms.study import ResolvedStudy
from fl_algorithms.tasks.base import Classifies, FromFiles, SiteData, Task
from fl_algorithms.tasks.dataset import DatasetRows, checked_rows
from fl_algorithms.tasks.source import Source
from tests.fl_algorithms.own_data import Own, OwnTask, settings, write_rows
from wardround.errors import BadData
from wardround.records.study import StudyFile


class Listed(Dataset[Any]):
    """Rows that are given."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> Any:
        found = self.rows[row]
        return found() if callable(found) else found


def load(folder: Path, test: Path | None = None, **changes: Any) -> SiteData:
    paths = {"files": folder} if test is None else {"files": folder, "test_files": test}
    return OwnTask(settings(**changes)).load(Source(paths), site="ash", seed=5, validation_fraction=0.25)


def test_rows_are_read_checked_and_split(tmp_path: Path) -> None:
    task: Task = OwnTask(settings())
    data = load(write_rows(tmp_path / "train", 20), write_rows(tmp_path / "test", 7, seed=1))
    assert isinstance(task, Classifies)
    assert (len(data.train), len(data.validation), data.test and len(data.test)) == (15, 5, 7)
    assert (task.input_shape, task.outputs, task.headline) == ((2, 3), 1, "auc")
    own = Own(tmp_path / "train")
    rows = torch.cat([torch.as_tensor(data.train.x), torch.as_tensor(data.validation.x)])
    assert sorted(rows.flatten(1).tolist()) == sorted(own[k][0].flatten().tolist() for k in range(20))


def test_a_groups_rows_are_all_in_one_part(tmp_path: Path) -> None:
    folder = write_rows(tmp_path / "train", 24, patients=8)
    who = {tuple(Own(folder)[k][0].flatten().tolist()): name for k, name in enumerate(Own(folder).groups)}
    data = load(folder)
    parts = [
        {who[tuple(row)] for row in torch.as_tensor(part.x).flatten(1).tolist()}
        for part in (data.train, data.validation)
    ]
    assert len(parts[1]) == 2
    assert not parts[0] & parts[1]
    with pytest.raises(BadData, match=r"8 of its 8 groups are in the test rows too"):
        load(folder, folder)


def test_the_digest_is_of_the_files_whatever_they_are_called_through(tmp_path: Path) -> None:
    one, same = load(write_rows(tmp_path / "a", 12)), load(write_rows(tmp_path / "b", 12))
    assert one.digest == same.digest
    (tmp_path / "b" / "notes.txt").write_text("another file that the data set may read")
    assert load(tmp_path / "b").digest != one.digest


def test_rows_that_do_not_fit_into_the_cache_are_the_same_bits(tmp_path: Path) -> None:
    folder = write_rows(tmp_path / "train", 12)
    kept, read = load(folder), load(folder, cache_mib=0)
    assert isinstance(kept.train.x, Tensor)
    assert not isinstance(read.train.x, Tensor)
    assert torch.equal(read.train.x.take(torch.arange(9)), kept.train.x)
    assert torch.equal(read.train.y, kept.train.y)


def test_rows_may_be_read_by_worker_processes() -> None:
    rows = DatasetRows(Listed([(torch.ones(3) * k, 0) for k in range(4)]), (3,), "mine")
    assert isinstance(rows, FromFiles)
    make = rows.for_worker()
    assert make is not None
    x, _ = make(torch.tensor([2, 0]).numpy(), torch.tensor([0, 0]).numpy(), 1)
    assert x[:, 0].tolist() == [2.0, 0.0]
    assert DatasetRows(Listed([lambda: 1]), (3,), "mine").for_worker() is None  # a lambda goes to no other process


def fails() -> Any:
    raise KeyError("Jane Roe, 1950-01-01")


@pytest.mark.parametrize(
    ("row", "said", "hint"),
    [
        pytest.param((torch.ones(2, 2), 1), "x is [2, 2], `shape` in [task] is [2, 3]", "every row", id="shape"),
        pytest.param((torch.full((2, 3), torch.nan), 1), "x holds nan or infinity", "fill gaps", id="nan"),
        pytest.param(fails, "cannot be read: KeyError", "`dataset[1000]` in Python", id="error"),
        pytest.param({"x": 1}, "is dict, and not a pair (x, y)", "`return x, y`", id="no pair"),
        pytest.param((torch.ones(2, 3), 2), "y, [], is not what", "the index of a class, 0 to 1", id="class"),
        pytest.param((torch.ones(2, 3), "yes"), "y is str, which is no number", "the index of a class", id="text"),
    ],
)  # fmt: skip
def test_a_row_that_is_unlike_the_others_is_named_by_its_number(row: Any, said: str, hint: str) -> None:
    rows = [(torch.ones(2, 3), 1)] * 1000 + [row]
    with pytest.raises(BadData) as refused:
        checked_rows(Listed(rows), settings(), "mine")
    assert refused.value.message.startswith(f"mine: row 1000{'' if said.startswith(('is ', 'cannot')) else ':'} {said}")
    assert refused.value.hint.startswith(hint)
    assert "Roe" not in refused.value.message + refused.value.hint


def test_a_row_that_changes_while_it_is_trained_on_is_refused_too() -> None:
    rows = Listed([(torch.ones(2, 3), 1), (torch.ones(2, 3), 0)])
    found = checked_rows(rows, settings(cache_mib=0), "mine").split.x
    rows.rows[1] = (torch.ones(3, 3), 0)
    assert not isinstance(found, Tensor)
    with pytest.raises(BadData, match=r"mine: row 1: x is \[3, 3\]"):
        found.take(torch.tensor([0, 1]))


def random_rows() -> Any:
    return Listed([lambda: (torch.rand(2, 3), 1)] * 4)


def without_length() -> Any:
    return SimpleNamespace(__getitem__=lambda row: None)


@pytest.mark.parametrize(
    ("dataset", "said"),
    [
        pytest.param(random_rows, "mine: row 0 is not the same when it is read again", id="random"),
        pytest.param(lambda: Listed([]), "mine: the dataset has no rows", id="empty"),
        pytest.param(without_length, "mine: the dataset has no length: TypeError", id="iterable"),
    ],
)
def test_a_dataset_that_is_none_is_refused(dataset: Callable[[], Any], said: str) -> None:
    with pytest.raises(BadData, match=said):
        checked_rows(dataset(), settings(), "mine")


def test_groups_are_of_each_row() -> None:
    rows = Listed([(torch.ones(2, 3), 1)] * 4)
    rows.groups = ["a"]  # type: ignore[attr-defined]
    with pytest.raises(BadData, match="mine: the dataset has 4 rows, and `groups` of 1"):
        checked_rows(rows, settings(), "mine")


def test_a_dataset_that_cannot_be_opened_is_a_sentence_without_its_text(tmp_path: Path) -> None:
    with pytest.raises(BadData) as refused:
        load(tmp_path)
    assert refused.value.message == f"{tmp_path}: cannot be opened: FileNotFoundError in OwnTask"


def test_numbers_and_times_are_checked_as_classes_are() -> None:
    numbers = NumberDatasetSettings(shape=(3,))
    assert checked_rows(Listed([(torch.ones(3), 1.5)] * 2), numbers, "mine").split.y.tolist() == [1.5, 1.5]
    times = SurvivalDatasetSettings(shape=(3,), horizons=(1.0,))
    assert checked_rows(Listed([(torch.ones(3), (2.0, 1))]), times, "mine").split.y.tolist() == [[2.0, 1.0]]
    with pytest.raises(BadData, match="mine: row 0: y, \\[2\\], is not what the study predicts") as refused:
        checked_rows(Listed([(torch.ones(3), (0.0, 1))]), times, "mine")
    assert refused.value.hint == "a time above 0 and, 1 or 0, whether the event happened then"


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> ResolvedStudy:
    """Of a task whose rows a plug-in reads, and a network that takes what it gives."""
    row = dataset_row("own", "tests.fl_algorithms.own_data:OwnTask", gives="images")
    model = replace(
        registry.MODELS["mlp"], name="flat", implementation="tests.fl_algorithms.test_dataset:flat", takes="images"
    )
    monkeypatch.setitem(registry.TASKS, row.name, row)
    monkeypatch.setitem(registry.MODELS, "flat", model)
    tables = {
        "study": {"name": "own", "sites": ["ash", "birch"], "rounds": 2},
        "task": {"name": "own", "shape": [2, 3], "classes": ["no", "yes"]},
        "model": {"name": "flat"},
        "algorithm": {"name": "fedavg"},
        "training": {"local_steps": 3, "batch_size": 4},
        "reported": {"metrics": ["val_loss", "auc"]},
    }
    return resolve(StudyFile.model_validate(tables))


def flat(sizes: Any, shape: tuple[int, ...], outputs: int) -> Any:
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(shape[0] * shape[1], outputs))


def test_a_study_of_a_dataset_runs_in_the_lab_and_predicts(study: ResolvedStudy, tmp_path: Path) -> None:
    for number, site in enumerate(study.study.sites):
        write_rows(tmp_path / site / "train", 20, seed=number)
    write_rows(tmp_path / "ash" / "test", 6, seed=9)
    task = task_of(study)
    data = load_sites(study, task, tmp_path)
    outcome = run_federation(study, task, data, device=CPU)
    latest = outcome.checkpoints["ash"]["latest"]
    assert (latest.metric, latest.split, outcome.checkpoints["birch"]["latest"].split) == ("auc", "test", "validation")
    x, names = task.read_new(tmp_path / "ash" / "test", task.fitted(data["ash"]))
    said = task.predictions(Restored(study, task, latest.tensors).logits(x), latest.fit)
    assert said.header == ("predicted", "probability_no", "probability_yes")
    assert len(said.rows) == len(names) == 6
    assert names[0] == "p9.0-0"
