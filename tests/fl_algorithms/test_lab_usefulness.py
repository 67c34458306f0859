"""Is the model any use: what a constant scores, warnings that a person reads, and the tests in a report."""

import csv
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from fl_algorithms.engine.partition import task_of
from fl_algorithms.engine.session import Restored
from fl_algorithms.lab import report, significance, usefulness
from fl_algorithms.lab.baseline import baseline, bootstrap, constant_scores
from fl_algorithms.lab.cli import app
from fl_algorithms.lab.federation import run_federation
from fl_algorithms.lab.grouping import grouped
from fl_algorithms.lab.results import load
from fl_algorithms.tasks.base import SiteData, Split
from tests.fl_algorithms.test_lab_compare import FEDAVG, FENDA, HEAD, STUDY, compared, hospitals, suite_file
from tests.fl_algorithms.toys import toy_data, toy_study


def data_with(train: list[int], test: list[int]) -> SiteData:
    def split(classes: list[int]) -> Split:
        return Split(torch.zeros(len(classes), 3), torch.tensor(classes))

    return SiteData(split(train), split([0, 1]), split(test), digest="0" * 64)


def test_the_constant_of_classes_is_the_majority_with_its_share_as_probability() -> None:
    found = constant_scores(task_of(toy_study()), data_with([1, 1, 1, 0], [1, 1, 0, 1, 0]))
    assert found["accuracy"] == pytest.approx(3 / 5)  # the training rows' majority is 1
    assert found["auc"] == 0.5
    assert found["brier"] == pytest.approx(3 / 5 * (1 - 0.75) ** 2 + 2 / 5 * 0.75**2)


def test_the_constant_of_numbers_is_their_mean() -> None:
    class Numbers:
        outputs = 1

        def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return (logits.squeeze(1) - y).square().mean()

        def metrics(self, logits: torch.Tensor, y: torch.Tensor) -> dict[str, float | None]:
            return {"mae": float((logits.squeeze(1) - y).abs().mean())}

    train, test = torch.tensor([1.0, 2.0, 6.0]), torch.tensor([3.0, 5.0])
    data = SiteData(Split(train[:, None], train), Split(test[:, None], test), None, digest="0" * 64)
    assert constant_scores(Numbers(), data) == {"mae": pytest.approx(1.0, abs=1e-4)}  # type: ignore[arg-type]


def test_counts_of_each_class_in_each_split_stand_beside_the_constant() -> None:
    found = baseline(task_of(toy_study()), {"ash": data_with([1, 1, 1, 0], [0, 1])})["ash"]
    assert found["counts"]["train"] == {"no": 1, "yes": 3}
    assert found["counts"]["test"] == {"no": 1, "yes": 1}


def test_a_model_that_only_equals_the_constant_is_behind_it_and_errors_count_the_other_way() -> None:
    constants = {"ash": {"accuracy": 0.9, "brier": 0.09, "auc": 0.5}, "birch": {"accuracy": 0.6, "brier": 0.24}}
    scores: dict[str, dict[str, float | None]] = {
        "ash": {"accuracy": 0.9, "brier": 0.08, "auc": None}, "birch": {"accuracy": 0.7, "brier": 0.25},
    }  # fmt: skip
    found = usefulness.behind("FedAvg", scores, constants)
    assert [(one.site, one.metric) for one in found] == [("ash", "accuracy"), ("birch", "brier")]
    assert usefulness.warnings(found) == [
        "In accuracy no better than the same answer for every row: FedAvg at ash (0.900, the constant 0.900).",
        "In brier no better than the same answer for every row: FedAvg at birch (0.250, the constant 0.240).",
    ]


def test_many_models_behind_a_constant_are_one_sentence() -> None:
    found = [usefulness.Behind(f"row {number}", "ash", "auc", 0.5, 0.5) for number in range(9)]
    (said,) = usefulness.warnings(found)
    assert said.endswith("; and 3 more.")


def test_warnings_of_one_kind_are_one_line_and_few_stay_as_they_are() -> None:
    many = [f"site{number}: train.csv: `x{number}` is the same in {number} rows" for number in range(9)]
    few = ["ash: one row is twice", "birch: something else"]
    assert grouped([*many, *few]) == [
        f"{many[0]} (and 8 more of this kind, at site0, site1, site2, site3, site4, site5 and 3 more)", *few
    ]  # fmt: skip


def test_the_command_shows_what_a_constant_scores_and_warns(tmp_path: Path) -> None:
    data = hospitals(tmp_path / "data", one_class=True)
    (tmp_path / "study.toml").write_text(STUDY)
    words = ["run", str(tmp_path / "study.toml"), "--data", str(data), "--variant", "fedavg"]
    said = CliRunner().invoke(app, words, catch_exceptions=False)
    assert "a constant" in said.stdout
    assert "no: 4" in said.stdout  # the second hospital's test rows
    found = json.loads(CliRunner().invoke(app, [*words, "--json"], catch_exceptions=False).stdout)["usefulness"]
    assert found["constant"]["birch"].keys() == found["metrics"]["birch"].keys()
    assert set(found["thresholds"]) == {"ash", "birch"}
    behind = [site for site, own in found["metrics"].items() if own["accuracy"] <= found["constant"][site]["accuracy"]]
    assert all(any(site in warning for warning in found["warnings"]) for site in behind)


# The tests in a report

THIRD = '[[row]]\nname = "hot"\nvariant = "fedavg"\nset = ["training.learning_rate=0.3"]\n'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three rows, four seeds, and a bootstrap of the test rows."""
    base = tmp_path_factory.mktemp("tested")
    protocol = '[protocol]\nbootstrap = 40\nbootstrap_metrics = ["accuracy"]\n'
    suite = suite_file(
        base, HEAD.replace("[suite]", '[suite]\nmetric = "accuracy"') + protocol + FEDAVG + FENDA + THIRD
    )
    tally = compared(suite, hospitals(base / "data"), base / "out", seeds=4)
    assert not tally.failed
    return base / "out"


def test_the_tests_of_a_report_are_those_of_its_scores(folder: Path) -> None:
    from scipy import stats

    results = load(folder)
    found = {one.name: one for one in significance.compared(results)}
    fenda, fedavg = results.line("fenda"), results.line("fedavg")
    assert fenda is not None
    assert fedavg is not None
    a, b = (list(line.means("best_local").values()) for line in (fenda, fedavg))
    assert found["fenda"].t.p == pytest.approx(stats.ttest_rel(a, b).pvalue)
    ps = sorted(one.t.p for one in found.values() if one.t.p is not None)
    assert min(one.t_holm for one in found.values() if one.t_holm is not None) == pytest.approx(min(1, ps[0] * len(ps)))


def test_a_report_has_its_tests_ranks_patients_and_the_constants(folder: Path, tmp_path: Path) -> None:
    report.write(folder, tmp_path)
    said = (tmp_path / "report.md").read_text()
    for heading in ("Is it of any use?", "Tests against the reference", "Ranks over the seeds", "Other patients"):
        assert f"## {heading}" in said
    assert "Friedman's test over 4 seeds and 3 rows" in said
    assert "| ash | train no: " in said
    lines = list(csv.DictReader(io.StringIO((tmp_path / "tests.csv").read_text())))
    assert {(line["row"], line["test"]) for line in lines} == {
        (row, test) for row in ("fenda", "hot") for test in ("paired_t", "wilcoxon")
    }


def test_the_bootstraps_draws_are_of_the_same_rows_in_every_row_and_seed(folder: Path) -> None:
    def draws(row: str, seed: int) -> Any:
        run = json.loads((folder / "runs" / row / f"{seed}.json").read_text())
        return run["measures"]["bootstrap"]["latest"]["accuracy"]

    again = draws("fedavg", 5)
    assert {site: len(scores) for site, scores in again.items()} == {"ash": 40, "birch": 40}
    same = toy_data("ash")
    assert same.test is not None
    assert all(
        score * len(same.test) == pytest.approx(round(score * len(same.test)), abs=1e-4) for score in again["ash"]
    )


def test_the_bootstrap_draws_patients_with_all_of_their_rows_where_the_data_name_them() -> None:
    study = toy_study(sites=["ash", "birch"])
    data = {site: toy_data(site) for site in study.study.sites}
    held = data["ash"].test
    assert held is not None
    by_patient = torch.arange(len(held)) // 6  # two patients of six rows each
    data["ash"] = replace(data["ash"], test=replace(held, groups=by_patient))
    task = task_of(study)
    outcome = run_federation(study, task, data)
    latest = {site: {"latest": kinds["latest"]} for site, kinds in outcome.checkpoints.items()}
    drawn = bootstrap(study, task, data, latest, 60, ["accuracy"])["latest"]["accuracy"]

    model = Restored(study.at("ash"), task, outcome.checkpoints["ash"]["latest"].tensors)
    right = (model.logits(held.x)[:, 0] > 0).long() == held.y
    one, other = (float(right[by_patient == patient].double().mean()) for patient in (0, 1))
    assert set(drawn["ash"]) == {round(score, 6) for score in (one, other, (one + other) / 2)}
    assert len(set(drawn["birch"])) > 3  # rows


@pytest.mark.parametrize(
    ("difference", "metric", "words"),
    [
        pytest.param(0.1, "accuracy", "better than FedAvg; for the spread over seeds large", id="higher-is-better"),
        pytest.param(0.1, "brier", "worse than FedAvg; for the spread over seeds large", id="lower-is-better"),
    ],
)
def test_the_words_know_which_way_is_better(difference: float, metric: str, words: str) -> None:
    tested = significance.Tested(9, 5.0, 0.001, 1.7)
    one = significance.Compared("X", "x", "latest", difference, tested, tested, 0.002, 0.002)
    assert one.words("FedAvg", metric) == words
    unclear = significance.Compared("X", "x", "latest", difference, tested, tested, 0.2, 0.2)
    assert unclear.words("FedAvg", metric) == "no difference from FedAvg is shown"
