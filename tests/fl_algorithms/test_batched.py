"""The batched engine: the same training as one run at a time, but for rounding; and what it refuses, by name."""

from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from fl_algorithms.engine.partition import task_of
from fl_algorithms.engine.training import Batches
from fl_algorithms.lab.batched import METHODS, run_batched
from fl_algorithms.lab.cli import app
from fl_algorithms.lab.curves import Curves
from fl_algorithms.lab.federation import Outcome, run_federation
from fl_algorithms.registry import METHODS as METHODS_THERE
from fl_algorithms.study import ResolvedStudy
from tests.fl_algorithms.test_lab_compare import STUDY, hospitals
from tests.fl_algorithms.toys import MLP, toy_data, toy_study
from wardround.errors import BadData, UsageProblem

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
"""Two runs of a handful of steps; rounding of 1e-7 grows by far less than this in them."""


def seeds_of(study: ResolvedStudy, count: int = 2) -> list[ResolvedStudy]:
    return [study.changed(study={"seed": study.study.seed + number}) for number in range(count)]


def both(study: ResolvedStudy, rows: dict[str, int] | None = None) -> tuple[list[Outcome], list[Outcome]]:
    """The study's two seeds together, and each alone. ``rows``: of each site."""
    studies, task = seeds_of(study), task_of(study)
    data = [
        {site: toy_data(site, (rows or {}).get(site, 22), seed=number) for site in study.study.sites}
        for number in range(2)
    ]
    alone = [run_federation(one, task, of_one) for one, of_one in zip(studies, data, strict=True)]
    return run_batched(studies, task, data), alone


def assert_close(together: list[Outcome], alone: list[Outcome]) -> None:
    for one, other in zip(together, alone, strict=True):
        for site, kinds in other.checkpoints.items():
            assert kinds.keys() == one.checkpoints[site].keys()
            for kind, checkpoint in kinds.items():
                mine = one.checkpoints[site][kind]
                for name, tensor in checkpoint.tensors.items():
                    torch.testing.assert_close(mine.tensors[name], tensor, msg=f"{site} {kind} {name}", **CLOSE)
                assert mine.scores == pytest.approx(checkpoint.scores, abs=1e-3)


@pytest.mark.parametrize("method", METHODS)
def test_each_method_gives_what_its_runs_give_alone(method: str) -> None:
    model: dict[str, Any] | None = None if method == "fenda" else MLP
    if method == "fenda":
        model = {"name": "fenda", "shared_hidden": [4], "private_hidden": [3], "dropout": 0.0}
    start = {"init_private": "common"} if METHODS_THERE[method].same_start else {}
    assert_close(*both(toy_study(method, model, **start)))


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"local_epochs": 2, "rounds": 2}, id="epochs"),
        pytest.param({"iterator": "run"}, id="batches-over-rounds"),
        pytest.param({"optimizer_lifetime": "round"}, id="moments-of-a-round"),
        pytest.param({"optimizer": "sgd", "momentum": 0.5}, id="sgd"),
        pytest.param({"drop_last": True}, id="without-short-batches"),
        pytest.param({"algorithm_settings": {"mixing": "weights"}, "algorithm": "apfl"}, id="apfl-of-weights"),
        pytest.param({"algorithm_settings": {"alpha": 1.0}, "algorithm": "apfl"}, id="apfl-at-the-end"),
    ],
)
def test_sites_of_unlike_sizes_and_every_way_of_batching_are_followed(changes: dict[str, Any]) -> None:
    changes = dict(changes)
    study = toy_study(changes.pop("algorithm", "fedprox"), MLP, init_private="common", **changes)
    assert_close(*both(study, {"ash": 23, "birch": 13}))


def test_its_runs_are_the_same_bits_again_also_with_dropout() -> None:
    study = toy_study("fedavg", {**MLP, "dropout": 0.4})
    first, second = (both(study)[0] for _ in range(2))
    assert [one.digest for one in first] == [one.digest for one in second]


def test_every_step_is_in_the_curves() -> None:
    study = toy_study("fedavg")
    studies, curves, alone = seeds_of(study), [Curves(), Curves()], Curves()
    data = [{site: toy_data(site, seed=number) for site in study.study.sites} for number in range(2)]
    run_batched(studies, task_of(study), data, curves=curves)
    run_federation(studies[0], task_of(study), data[0], curves=alone)
    assert [(step.round, step.site, step.step) for step in curves[0].steps] == [
        (step.round, step.site, step.step) for step in alone.steps
    ]
    assert [step.loss for step in curves[0].steps] == pytest.approx([step.loss for step in alone.steps], rel=1e-4)


@pytest.mark.parametrize("iterator", ["run", "round"])
def test_the_places_of_batches_are_those_of_their_rows(iterator: str) -> None:
    study, y = toy_study("fedavg", iterator=iterator, batch_size=4).at("ash"), torch.arange(11)
    rows, after = {"order": 1, "position": 8}, {"order": 1, "position": 8}
    if iterator == "round":
        rows, after = {}, {}
    taken = Batches(y[:, None].float(), y, study, "ash", 2, "", rows)
    whole = [taken.next().y for _ in range(7)]
    places, sizes = Batches(y[:, None].float(), y, study, "ash", 2, "", after).places(7)
    assert sizes == [len(batch) for batch in whole]
    assert torch.equal(places, torch.cat(whole))
    assert rows == after or iterator == "round"


@pytest.mark.parametrize(
    ("method", "model", "message"),
    [
        pytest.param("scaffold", None, "does not train method `scaffold`: only fedavg, ", id="method"),
        pytest.param(
            "fedavg", {**MLP, "norm": "batch"}, "does not train model `mlp` with batch norms", id="batch-norms"
        ),
    ],
)
def test_what_it_cannot_train_is_refused_by_name(method: str, model: dict[str, Any] | None, message: str) -> None:
    changes: dict[str, Any] = {"optimizer": "sgd", "weight_decay": 0.0} if method == "scaffold" else {}
    study = toy_study(method, model, **changes)
    with pytest.raises(BadData, match="the batched engine") as refused:
        run_batched([study], task_of(study), [{site: toy_data(site) for site in study.study.sites}])
    assert message in refused.value.message
    assert refused.value.hint == "leave out `--engine batched`"


def test_the_command_names_the_engine_and_keeps_its_runs_apart(tmp_path: Path) -> None:
    data = hospitals(tmp_path / "data")
    (tmp_path / "study.toml").write_text(STUDY)
    words = ["run", str(tmp_path / "study.toml"), "--data", str(data), "--variant", "fedavg", "--seeds", "2"]
    out = ["--out", str(tmp_path / "out")]
    said = CliRunner().invoke(app, [*words, *out, "--engine", "batched"], catch_exceptions=False)
    assert "engine       batched: the bits are not those of a run alone, nor of a federation" in said.stdout
    again = CliRunner().invoke(app, [*words[:-1], "3", *out])
    assert isinstance(again.exception, BadData)
    assert 'versions.engine was "batched", is now not there' in again.exception.message
    refused = CliRunner().invoke(app, [*words, "--engine", "batched", "--sample", "0.5"])
    assert isinstance(refused.exception, UsageProblem)
    assert refused.exception.message.endswith("on the CPU, without --sample, --dropout, --delay-s and --attack")
