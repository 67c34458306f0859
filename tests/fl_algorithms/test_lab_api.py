"""The lab for notebooks: runs, frames and models in Python."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from fl_algorithms import lab, registry
from fl_algorithms.engine.partition import task_of
from fl_algorithms.lab import Comparison, Participation, Result, compare, load, run
from fl_algorithms.lab.evaluation import interval, paired
from tests.fl_algorithms.test_lab_compare import FEDAVG, FENDA, HEAD, STUDY, compared, hospitals, suite_file
from wardround.errors import BadData, NeedsPerson, UsageProblem


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("api")
    (path / "study.toml").write_text(STUDY)
    hospitals(path / "data")
    return path


@pytest.fixture(scope="module")
def result(folder: Path) -> Result:
    return run(folder / "study.toml", folder / "data", variant="fedavg", seeds=2)


def test_importing_the_lab_is_cheap_and_names_what_it_has() -> None:
    code = (
        "import sys, fl_algorithms.lab as lab; assert 'run' in dir(lab); "
        "loaded = {'torch', 'pandas', 'ray', 'numpy', 'pydantic', 'fl_algorithms.lab.api'} & sys.modules.keys(); "
        "assert not loaded, loaded; lab.run; assert not {'torch', 'pandas', 'ray'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match=r"module 'fl_algorithms\.lab' has no attribute 'rnu'"):
        lab.rnu  # noqa: B018 - a name that is not there


def test_a_run_has_its_scores_its_curves_and_its_steps_as_frames(result: Result) -> None:
    assert (result.seeds, len(result.digests)) == ([5, 6], 2)
    assert result.headline == task_of(result.study).headline
    scores = result.scores
    assert list(scores.columns) == ["seed", "site", "checkpoint", "metric", "split", "value"]
    assert set(scores["site"]) == {"ash", "birch"}
    assert {"latest", "best_local", "best_global"} == set(scores["checkpoint"])
    curves = result.curves.set_index(["seed", "round", "site"])
    assert sorted({number for _, number, _ in curves.index}) == [0, 1, 2]
    assert {"val_loss", "train_loss", "bytes_sent", "accuracy"} <= set(curves.columns)
    steps = result.steps
    mean = steps[(steps["seed"] == 6) & (steps["round"] == 2) & (steps["site"] == "ash")]["loss"].mean()
    assert curves.loc[(6, 2, "ash"), "train_loss"] == pytest.approx(mean)


def test_models_are_state_dicts_and_can_be_asked(result: Result) -> None:
    latest, shared = result.state_dict("ash"), result.shared()
    assert all(torch.equal(latest[name], tensor) for name, tensor in shared.items())
    other = result.state_dict("ash", seed=6)
    assert any(not torch.equal(latest[name], tensor) for name, tensor in other.items())
    model = result.model("ash", "best_local")
    assert model.probabilities(torch.zeros(2, 3)).sum(dim=1).tolist() == pytest.approx([1, 1])
    assert all(
        torch.equal(model.networks["model"].state_dict()[n], t)
        for n, t in result.state_dict("ash", "best_local").items()
    )


def test_what_is_kept_is_what_is_loaded(folder: Path, result: Result) -> None:
    kept = run(folder / "study.toml", folder / "data", variant="fedavg", seeds=2, out=folder / "kept")
    found = load(folder / "kept")
    assert isinstance(found, Result)
    for other in (kept, found):
        assert other.digests == result.digests
        pd.testing.assert_frame_equal(other.scores, result.scores)
        pd.testing.assert_frame_equal(other.curves, result.curves)
        pd.testing.assert_frame_equal(other.steps, result.steps)
        assert torch.equal(other.state_dict("birch")["head.weight"], result.state_dict("birch")["head.weight"])
    assert found.study.document() == result.study.document()
    assert repr(found) == "<Result: fedavg, seeds 5, 6>"


def test_settings_and_participation_change_the_run(folder: Path, result: Result) -> None:
    data, study = folder / "data", folder / "study.toml"
    changed = run(study, data, variant="fedavg", settings={"training.learning_rate": 0.5})
    assert changed.study.training.learning_rate == 0.5
    assert changed.digests[0] != result.digests[0]
    fewer = run(study, data, variant="fedavg", settings={"study.quorum": 1}, participation=Participation(sample=0.5))
    assert fewer.curves.groupby("round")["averaged"].sum().tolist() == [0, 1, 1]
    assert run(study, data, alone=True).shared() == {}


def test_results_are_compared_seed_by_seed(folder: Path, result: Result) -> None:
    fenda = run(folder / "study.toml", folder / "data", seeds=2)
    table = compare({"fedavg": result, "fenda": fenda}).table("auc", reference="fedavg")
    means = {}
    for name, one in (("fedavg", result), ("fenda", fenda)):
        auc = one.scores[(one.scores["metric"] == "auc") & (one.scores["checkpoint"] == "latest")]
        means[name] = auc.groupby("seed")["value"].mean().tolist()
    assert table.loc["fenda", "mean"] == interval(means["fenda"]).mean
    assert table.loc["fenda", "ci95"] == interval(means["fenda"]).ci95
    assert table.loc["fenda", "difference"] == paired(means["fenda"], means["fedavg"]).mean
    assert pd.isna(table.loc["fedavg", "difference"])
    assert list(compare({"x": result}).table().columns) == ["runs", "mean", "ci95"]


def test_a_suite_is_loaded_as_it_was_compared(folder: Path) -> None:
    path = suite_file(folder / "suite", HEAD + FEDAVG + FENDA)
    compared(path, folder / "data", folder / "runs")
    found = load(folder / "runs")
    assert isinstance(found, Comparison)
    assert list(found.table(reference="fedavg").index) == ["fedavg", "fenda"]
    again = compare(path, folder / "data", folder / "runs", jobs=1)  # all is there
    pd.testing.assert_frame_equal(again.scores, found.scores)


@pytest.mark.parametrize(
    ("ask", "message", "hint"),
    [
        pytest.param(
            lambda r: r.state_dict("oak"), "there is no checkpoint `latest` of site `oak`",
            "there are: ash (best_global, best_local, latest), birch (best_global, best_local, latest)", id="site",
        ),
        pytest.param(
            lambda r: r.state_dict("ash", seed=9), "there is no run of seed 9", "there are: 5, 6", id="seed",
        ),
        pytest.param(
            lambda r: compare({"a": r}).table("acuracy"), "there is no metric `acuracy`",
            f"there are: {', '.join(sorted(registry.TABULAR.metrics))}", id="metric",
        ),
        pytest.param(
            lambda r: compare({"a": r}).table(reference="b"), "there is no row `b`", "there are: a", id="row",
        ),
        pytest.param(
            lambda _: compare({}), "there is nothing to compare",
            "`compare({'fedavg': run(...), 'fenda': run(...)})`", id="nothing",
        ),
        pytest.param(
            lambda _: compare("suite.toml"), "a suite needs `data` and `out`",
            "`compare('suite.toml', data='DIR', out='RUNS')`", id="suite-alone",
        ),
    ],
)  # fmt: skip
def test_what_is_not_there_is_said(ask: Any, message: str, hint: str, result: Result) -> None:
    with pytest.raises(UsageProblem) as refused:
        ask(result)
    assert (refused.value.message, refused.value.hint) == (message, hint)


def test_a_folder_that_holds_no_runs_is_said(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(BadData) as refused:
        load(tmp_path)
    assert refused.value.message == f"{tmp_path} has neither run.json nor suite.json"
    assert refused.value.hint == "the folder that `--out` named in `fl-lab run` or `fl-lab compare`"
    (tmp_path / "run.json").write_bytes((folder / "kept" / "run.json").read_bytes())
    with pytest.raises(BadData, match="has no run that is whole yet"):
        load(tmp_path)


def test_without_pandas_the_way_out_is_said(monkeypatch: pytest.MonkeyPatch, result: Result) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(NeedsPerson) as refused:
        Result(result.study, result.runs).scores  # noqa: B018 - made when it is asked for
    assert (refused.value.message, refused.value.hint) == ("pandas is not installed", "`pip install 'wardround[lab]'`")
