"""A federation of data sets and a network that are Python objects."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from fl_algorithms.engine.partition import task_of
from fl_algorithms.lab import Federation, load
from fl_algorithms.lab.federation import run_federation
from fl_algorithms.settings.dataset import NumberDatasetSettings
from tests.fl_algorithms.toys import toy_data
from wardround.errors import BadData, UsageProblem, WardroundError


class Net(nn.Module):
    """A body and a head on three columns."""

    def __init__(self, outputs: int = 1, inputs: int = 3) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(inputs, 4), nn.ReLU())
        self.head = nn.Linear(4, outputs)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x))
        return logits


class Fenda(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared_extractor, self.private_extractor = nn.Linear(3, 2), nn.Linear(3, 2)
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.cat([self.shared_extractor(x), self.private_extractor(x)], dim=1))
        return logits


def rows(site: str, part: str = "train") -> Dataset[Any]:
    split = getattr(toy_data(site), part)
    return TensorDataset(split.x, split.y)


SITES = {"ash": rows("ash"), "birch": rows("birch")}
STEPS = {"local_steps": 4, "batch_size": 4}


def federation(model: Any = Net, method: Any = "fedavg", **options: Any) -> Federation:
    return Federation.from_datasets(SITES, model, method, **({"rounds": 2, "training": STEPS} | options))


def test_it_is_the_federation_that_the_lab_runs() -> None:
    """The same rows, split alike, through ``run_federation`` of the study that was put together."""
    made = federation()
    task = task_of(made.study)
    data = {
        site: task.site_data(found, None, Path(site), "0" * 64, site=site, seed=1, validation_fraction=0.2)  # type: ignore[attr-defined]
        for site, found in made.rows.items()
    }
    assert made.run().digests == [run_federation(made.study, task, data).digest]


def test_it_can_be_run_again_and_kept_and_gives_the_same(tmp_path: Path) -> None:
    made = federation()
    first = made.run(seeds=2)
    assert made.run(seeds=2).digests == first.digests
    assert first.digests[0] != first.digests[1]
    assert made.run(seeds=2, out=tmp_path / "out").digests == first.digests
    assert made.run(seeds=2, out=tmp_path / "out").digests == first.digests  # all is there
    assert len(load(tmp_path / "out").scores) == len(first.scores)


def test_a_module_is_where_every_seed_begins_and_is_left_as_it_was() -> None:
    net = Net()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    result = federation(net, rounds=1, training={"local_steps": 0}).run(seeds=2)
    assert result.digests[0] == result.digests[1]
    assert all(torch.equal(result.shared()[name], tensor) for name, tensor in before.items())
    assert all(torch.equal(net.state_dict()[name], tensor) for name, tensor in before.items())


def test_other_rows_or_another_start_are_not_mixed_in_one_folder(tmp_path: Path) -> None:
    federation(Net(), rounds=1).run(out=tmp_path)
    other = Federation.from_datasets({"ash": rows("ash"), "birch": rows("oak")}, Net(), rounds=1, training=STEPS)
    for seeds in (1, 2):
        with pytest.raises(BadData, match=r"holds a run of something else: data\.birch was"):
            other.run(out=tmp_path, seeds=seeds)


@pytest.mark.parametrize(
    ("method", "model", "shared"),
    [
        pytest.param({"name": "fedprox", "mu": 0.1}, Net, {"body", "head"}, id="fedprox"),
        pytest.param("fedper", Net, {"body"}, id="fedper"),
        pytest.param("fenda", Fenda, {"shared_extractor"}, id="fenda"),
        pytest.param("silo", Net, set(), id="alone"),
    ],
)
def test_methods_know_the_parts_of_a_network_by_their_names(
    method: Any, model: Callable[[], nn.Module], shared: set[str]
) -> None:
    result = federation(model, method).run()
    assert {name.partition(".")[0] for name in result.shared()} == shared
    assert result.model("ash", "best_local").probabilities(torch.zeros(2, 3)).shape == (2, 2)


def test_test_rows_are_what_is_scored() -> None:
    result = federation(tests={"ash": rows("ash", "test")}).run()
    splits = result.scores.groupby("site")["split"].unique()
    assert (splits["ash"].tolist(), splits["birch"].tolist()) == (["test"], ["validation"])


def test_classes_are_counted_or_named_and_numbers_are_asked_for() -> None:
    assert federation().study.task.settings.classes == ("0", "1")  # type: ignore[attr-defined]
    assert federation(classes=["no", "yes"]).study.task.settings.classes == ("no", "yes")  # type: ignore[attr-defined]
    three = TensorDataset(torch.randn(30, 3), torch.arange(30) % 3)
    assert Federation.from_datasets({"ash": three}, lambda: Net(3)).run().headline == "auc"
    number = TensorDataset(torch.randn(30, 3), torch.randn(30))
    task = NumberDatasetSettings(shape=(3,))
    result = Federation.from_datasets({"ash": number}, Net, task=task, rounds=1).run()
    assert "mae" in set(result.scores["metric"])


def test_other_tables_of_a_study_can_be_given() -> None:
    study = federation(study={"quorum": 1}, checkpoints={"validation_fraction": 0.4}).study
    assert (study.study.quorum, study.checkpoints.validation_fraction) == (1, 0.4)


class Reading(Dataset[Any]):
    """Rows of which one cannot be read."""

    def __len__(self) -> int:
        return 9

    def __getitem__(self, place: int) -> Any:
        if place == 7:
            raise OSError("patient 4711")
        return torch.zeros(3), 0


@pytest.mark.parametrize(
    ("make", "kind", "message", "hint"),
    [
        pytest.param(
            lambda: Federation.from_datasets({}, Net), UsageProblem, "Federation.from_datasets: there is no site",
            '`{"ashford": dataset, "birchwood": dataset}`', id="no-site",
        ),
        pytest.param(
            lambda: federation(tests={"oak": rows("oak")}), UsageProblem,
            "Federation.from_datasets: `tests` has site `oak`, which `datasets` does not have", "", id="unknown-site",
        ),
        pytest.param(
            lambda: Federation.from_datasets({"ash": Reading()}, Net), BadData,
            "Federation.from_datasets: a row of site `ash` cannot be read as (x, class): OSError",
            "`__getitem__` gives x and the index of a class, `__len__` how many; `task=` for what is no class",
            id="unreadable",
        ),
        pytest.param(
            lambda: federation(lambda: 3), BadData,
            "Federation.from_datasets: `model` gives a int and not an nn.Module",
            "a network, or a function without arguments that makes one: `lambda: Net(30)`", id="no-module",
        ),
        pytest.param(
            lambda: federation(lambda: Net(2)), BadData,
            "model `Net` gives [2, 2] for 2 rows, the task needs [2, 1]",
            "of two classes one logit, the last class's; of more classes one each; for a number one", id="outputs",
        ),
        pytest.param(
            lambda: federation(lambda: Net(1, 5)), BadData,
            "model `Net` does not take rows of [3]: RuntimeError", "`model(torch.zeros(2, 3))` shows the error",
            id="inputs",
        ),
        pytest.param(
            lambda: federation(method="fedmd"), UsageProblem,
            "Federation.from_datasets has no public data set, which algorithm `fedmd` needs",
            "a study file with [public_data], and `run(study, data)`", id="public-data",
        ),
        pytest.param(
            lambda: federation(method="fedavgg"), BadData,
            "Federation.from_datasets: there is no algorithm `fedavgg`", "did you mean `fedavg`?", id="method",
        ),
        pytest.param(
            lambda: federation(training={"local_steps": 2, "learning_rat": 1}), BadData,
            "Federation.from_datasets: unknown key `learning_rat` in [training]", "did you mean `learning_rate`?",
            id="key",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_a_federation_is_said(
    make: Callable[[], object], kind: type[WardroundError], message: str, hint: str
) -> None:
    with pytest.raises(kind) as refused:
        make()
    assert (refused.value.message, refused.value.hint) == (message, hint)


def test_fenda_of_a_network_without_two_extractors_is_refused() -> None:
    with pytest.raises(BadData, match="needs a network with a shared and a private extractor, model `module`"):
        federation(Net, "fenda")
