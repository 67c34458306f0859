"""What a table may be trained for beside classes: a number, several labels, the time to an event."""

import csv
import itertools
import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics as sk
from torch import Tensor

from fl_algorithms.engine.partition import task_of
from fl_algorithms.engine.session import Restored
from fl_algorithms.lab.federation import run_federation
from fl_algorithms.lab.site_data import load_sites
from fl_algorithms.resolving import resolve
from fl_algorithms.settings.targets import LabelsTarget, NumberTarget, OrdinalTarget, SurvivalTarget
from fl_algorithms.study import ResolvedStudy
from fl_algorithms.tasks import survival_scores
from fl_algorithms.tasks.base import SiteData, Source, Split
from fl_algorithms.tasks.objectives.labels import LabelsObjective
from fl_algorithms.tasks.objectives.numbers import NumberObjective
from fl_algorithms.tasks.objectives.ordinal import OrdinalObjective, log_probabilities
from fl_algorithms.tasks.objectives.survival import SurvivalObjective, partial_likelihood_terms
from fl_algorithms.tasks.tables.tabular import TabularTask
from wardround.errors import BadData, NeedsPerson
from wardround.records.study import StudyFile

REGRESSION = {"name": "regression", "label": "stay", "mean": 5.0, "std": 2.0, "lowest": 0.0, "highest": 100.0}
MULTILABEL = {"name": "multilabel", "labels": ["sepsis", "stroke"], "absent": "no", "present": "yes"}
SURVIVAL = {"name": "survival", "time": "days", "event": "died", "horizons": [2.0, 5.0, 9.0]}
ORDINAL = {"name": "ordinal", "label": "grade", "classes": ["I", "II", "III"], "stratified": True}
TASKS = {"ordinal": ORDINAL, "regression": REGRESSION, "multilabel": MULTILABEL, "survival": SURVIVAL}
COLUMNS = ("u", "v", "stay", "sepsis", "stroke", "days", "died", "grade")


def study_of(task: dict[str, Any], method: str = "fedavg", **changes: Any) -> ResolvedStudy:
    tables = {
        "study": {"name": "toy", "sites": ["ash", "birch"], "rounds": 3, "seed": 5},
        "task": {"features": ["u", "v"], **task},
        "model": {"name": "mlp", "hidden": [4]},
        "algorithm": {"name": method},
        "training": {"learning_rate": 0.05, "batch_size": 8, "local_steps": 8},
    }
    return resolve(StudyFile.model_validate({**tables, **changes}))


def rows(seed: int, count: int = 40) -> list[list[str]]:
    """Patients whose u says how long they stay, what they have and how soon they die."""
    generator = np.random.default_rng(seed)
    u, v = generator.normal(size=(2, count))
    death = generator.exponential(6 * np.exp(-u))
    seen = generator.uniform(1, 12, size=count)
    columns = [
        [f"{value:.4f}" for value in u],
        [f"{value:.4f}" for value in v],
        [f"{max(0.0, 5 + 2 * value):.2f}" for value in u + 0.2 * v],
        ["yes" if value > 0 else "no" for value in u],
        ["yes" if value > 0.5 else "no" for value in v],
        [f"{max(0.05, min(one, other)):.3f}" for one, other in zip(death, seen, strict=True)],
        ["1" if one <= other else "0" for one, other in zip(death, seen, strict=True)],
        ["I" if value < -0.4 else "II" if value < 0.5 else "III" for value in u],
    ]
    return [list(row) for row in zip(*columns, strict=True)]


def write(path: Path, lines: Sequence[Sequence[str]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([COLUMNS, *lines])
    return path


@pytest.fixture(scope="module")
def hospitals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hospitals")
    for number, site in enumerate(("ash", "birch")):
        write(folder / site / "train.csv", rows(number))
        write(folder / site / "test.csv", rows(10 + number, 30))
    return folder


@pytest.mark.parametrize(
    ("task", "metrics", "headline", "header"),
    [
        pytest.param("regression", {"mae", "rmse", "r2"}, "mae", ("predicted",), id="regression"),
        pytest.param(
            "ordinal",
            {"kappa", "mae", "accuracy", "macro_f1"},
            "kappa",
            ("predicted", "probability_I", "probability_II", "probability_III"),
            id="ordinal",
        ),
        pytest.param(
            "multilabel",
            {"auc", "auprc", "brier", "macro_f1"},
            "auc",
            ("predicted_sepsis", "probability_sepsis", "predicted_stroke", "probability_stroke"),
            id="multilabel",
        ),
        pytest.param(
            "survival",
            {"c_index", "integrated_brier"},
            "c_index",
            ("relative_hazard", "survival_2", "survival_5", "survival_9"),
            id="survival",
        ),
    ],
)
@pytest.mark.parametrize("method", ["fedavg", "fedsoup"])
def test_a_federation_learns_it_and_a_site_predicts(
    hospitals: Path, tmp_path: Path, task: str, metrics: set[str], headline: str, header: tuple[str, ...], method: str
) -> None:
    study = study_of(TASKS[task], method, reported={"metrics": ["val_loss", *sorted(metrics)]})
    own = task_of(study)
    data = load_sites(study, own, hospitals)
    outcome = run_federation(study, own, data)
    best = outcome.checkpoints["ash"]["best_local"]
    assert set(best.scores) == metrics
    assert (best.metric, best.split) == (headline, "test")
    assert all(score is not None for score in best.scores.values())
    at_first = own.metrics(torch.zeros(30, own.outputs), data["ash"].test.y)[headline]  # type: ignore[union-attr]
    found = best.scores[headline]
    assert found is not None
    assert at_first is not None
    assert found < at_first if headline == "mae" else found > max(at_first, 0.3)
    new = write(tmp_path / "new.csv", rows(3, 5))
    x, names = own.read_new(new, own.fitted(data["ash"]))
    said = own.predictions(Restored(study, own, best.tensors).logits(x), best.fit)
    assert said.header == header
    assert [len(row) for row in said.rows] == [len(header)] * len(names)


# Regression.


def test_scores_of_numbers_are_scikit_learns_in_the_numbers_own_unit() -> None:
    objective = NumberObjective(NumberTarget(mean=10.0, std=4.0))
    logits, y = torch.tensor([[0.0], [1.0], [-0.5]]), torch.tensor([11.0, 12.0, 9.0])
    numbers = [10.0, 14.0, 8.0]
    found = objective.metrics(logits, y)
    assert found["mae"] == pytest.approx(sk.mean_absolute_error(y, numbers))
    assert found["rmse"] == pytest.approx(sk.mean_squared_error(y, numbers) ** 0.5)
    assert found["r2"] == pytest.approx(sk.r2_score(y, numbers))
    assert objective.losses(logits, y).tolist() == pytest.approx(
        [((n - 10) / 4 - z) ** 2 for n, z in ((11, 0), (12, 1), (9, -0.5))]
    )
    assert objective.predictions(logits, {}).rows == [("10",), ("14",), ("8",)]


def test_scores_of_numbers_that_are_all_alike_or_of_a_model_that_diverged_are_undefined() -> None:
    objective = NumberObjective(NumberTarget())
    assert objective.metrics(torch.zeros(2, 1), torch.ones(2))["r2"] is None
    assert set(objective.metrics(torch.full((2, 1), torch.nan), torch.ones(2)).values()) == {None}
    assert objective.about("test table", torch.ones(2)) == [
        "The test table (2 rows) has one number only: R2 is undefined there and left out of means"
    ]


def test_huber_and_absolute_losses_are_of_the_standardized_number() -> None:
    y, logits = torch.tensor([14.0]), torch.tensor([[-1.0]])  # standardized 1: two apart
    for loss, expected in (("squared", 4.0), ("absolute", 2.0), ("huber", 1.5)):
        objective = NumberObjective(NumberTarget(mean=10.0, std=4.0, loss=loss))  # type: ignore[arg-type]
        assert objective.losses(logits, y).tolist() == [expected]


# Classes in order.


def test_ordinal_probabilities_are_differences_of_sigmoids_and_sum_to_one() -> None:
    o = torch.randn(20, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 4
    found = log_probabilities(o).exp()
    for row, given in zip(found.tolist(), o.tolist(), strict=True):
        z = [given[0], given[0] - math.log1p(math.exp(given[1]))]
        z.append(z[1] - math.log1p(math.exp(given[2])))
        above = [1.0, *(1 / (1 + math.exp(-value)) for value in z), 0.0]
        assert row == pytest.approx([high - low for high, low in itertools.pairwise(above)])
        assert sum(row) == pytest.approx(1)


def test_scores_of_classes_in_order_are_scikit_learns() -> None:
    objective = OrdinalObjective(OrdinalTarget(classes=("a", "b", "c", "d")))
    generator = torch.Generator().manual_seed(2)
    logits, y = torch.randn(50, 3, generator=generator), torch.randint(0, 4, (50,), generator=generator)
    predicted = log_probabilities(logits.double()).argmax(dim=1)
    found = objective.metrics(logits, y)
    assert found["kappa"] == pytest.approx(sk.cohen_kappa_score(y, predicted, weights="quadratic"))
    assert found["mae"] == pytest.approx(sk.mean_absolute_error(y, predicted))
    assert found["macro_f1"] == pytest.approx(sk.f1_score(y, predicted, average="macro"))
    alike = torch.zeros(3).long()
    assert objective.metrics(torch.tensor([[-9.0, 0.0, 0.0]] * 3), alike)["kappa"] is None
    assert objective.about("training part", alike) == [
        "The training part (3 rows) has one class only, `a`: kappa is undefined there and left out of means"
    ]


# Several labels.


def test_scores_of_labels_are_means_of_scikit_learns_over_the_labels() -> None:
    objective = LabelsObjective(LabelsTarget(labels=("a", "b", "c")))
    logits = torch.randn(40, 3, generator=torch.Generator().manual_seed(1))
    y = (torch.rand(40, 3, generator=torch.Generator().manual_seed(2)) > 0.6).float()
    y[:, 2] = 0  # a finding that nobody has
    p = torch.sigmoid(logits.double()).numpy()
    found = objective.metrics(logits, y)
    assert found["auc"] == pytest.approx(np.mean([sk.roc_auc_score(y[:, k], p[:, k]) for k in (0, 1)]))
    assert found["auprc"] == pytest.approx(np.mean([sk.average_precision_score(y[:, k], p[:, k]) for k in (0, 1)]))
    assert found["macro_f1"] == pytest.approx(sk.f1_score(y, p >= 0.5, average="macro", zero_division=0.0))
    assert found["brier"] == pytest.approx(np.mean((p - y.numpy()) ** 2))
    assert objective.about("training part", y) == [
        "The training part (40 rows) has all or none of `c`: left out of the mean AUC"
    ]


def test_each_label_has_a_threshold_of_its_own() -> None:
    objective = LabelsObjective(LabelsTarget(labels=("a", "b")))
    y = torch.tensor([[0.0, 1.0], [1.0, 0.0], [1.0, 0.0], [1.0, 0.0]])
    logits = torch.tensor([[-5.0, -1.0], [-3.0, -4.0], [-2.0, -4.0], [-2.0, -5.0]])
    data = SiteData(Split(torch.zeros(4, 1), y), Split(torch.zeros(4, 1), y), None, "0" * 64)
    fit = objective.fit_outputs(lambda split: logits, data)
    said = objective.predictions(logits, fit)
    assert [(row[0], row[2]) for row in said.rows] == [("0", "1"), ("1", "0"), ("1", "0"), ("1", "0")]
    assert said.notes[0].startswith("`a` is predicted from a probability of ")
    assert said.notes[0].endswith("chosen on this site's 4 validation rows for the best balanced accuracy")


# Survival.


def cohort(count: int = 60, ties: bool = True, seed: int = 4) -> tuple[Tensor, Tensor]:
    """Outputs and (time, event) with many ties."""
    generator = torch.Generator().manual_seed(seed)
    time = torch.rand(count, generator=generator) * 10 + 0.1
    if ties:
        time = time.ceil()
    event = (torch.rand(count, generator=generator) > 0.4).float()
    return torch.randn(count, 1, generator=generator), torch.stack([time, event], dim=1)


def slow_efron(f: Sequence[float], y: Sequence[Sequence[float]]) -> float:
    """Efron's formula, moment by moment."""
    total = 0.0
    for moment in sorted({time for time, event in y if event}):
        dead = [np.exp(h) for h, (time, event) in zip(f, y, strict=True) if time == moment and event]
        at_risk = sum(np.exp(h) for h, (time, _) in zip(f, y, strict=True) if time >= moment)
        for place in range(len(dead)):
            total += float(np.log(at_risk - place / len(dead) * sum(dead)))
        total -= sum(float(np.log(h)) for h in dead)
    return total


@pytest.mark.parametrize("ties", [True, False])
def test_the_partial_likelihood_is_efrons_and_torchsurvs(ties: bool) -> None:
    f, y = cohort(ties=ties)
    objective = SurvivalObjective(SurvivalTarget(horizons=(1.0,)))
    terms = partial_likelihood_terms(f.squeeze(1), y)
    assert float(terms.sum()) == pytest.approx(slow_efron(f.squeeze(1).tolist(), y.tolist()), rel=1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchsurv.loss.cox import neg_partial_log_likelihood

        theirs = neg_partial_log_likelihood(f.squeeze(1), y[:, 1] > 0, y[:, 0], ties_method="efron", reduction="sum")
    assert float(objective.loss(f, y)) == pytest.approx(float(theirs) / float(y[:, 1].sum()), rel=1e-4)
    assert float(objective.losses(f, y).mean()) == pytest.approx(float(objective.loss(f, y)))


def test_the_partial_likelihood_has_the_gradient_of_the_slow_one() -> None:
    f, y = cohort(12)
    f = f.double().requires_grad_()
    SurvivalObjective(SurvivalTarget(horizons=(1.0,))).loss(f, y).backward()
    flat = f.detach().squeeze(1).tolist()
    events = float(y[:, 1].sum())
    assert f.grad is not None
    for place in range(12):
        up, down = ([h + (k == place) * step for k, h in enumerate(flat)] for step in (1e-5, -1e-5))
        slope = (slow_efron(up, y.tolist()) - slow_efron(down, y.tolist())) / 2e-5 / events
        assert float(f.grad[place, 0]) == pytest.approx(slope, abs=1e-6)


def test_a_batch_without_an_event_teaches_nothing_and_large_outputs_stay_finite() -> None:
    objective = SurvivalObjective(SurvivalTarget(horizons=(1.0,)))
    f, y = torch.tensor([[1.0], [2.0]], requires_grad=True), torch.tensor([[1.0, 0.0], [2.0, 0.0]])
    loss = objective.loss(f, y)
    loss.backward()  # type: ignore[no-untyped-call]
    assert (loss.item(), f.grad is not None and f.grad.tolist()) == (0.0, [[0.0], [0.0]])
    steep = torch.tensor([[1000.0], [-1000.0]])
    assert objective.loss(steep, torch.tensor([[1.0, 1.0], [2.0, 1.0]])).item() == 0.0  # who dies first is the likelier
    assert objective.loss(-steep, torch.tensor([[1.0, 1.0], [2.0, 1.0]])).item() == pytest.approx(1000.0)


@pytest.mark.parametrize("ties", [True, False])
def test_the_c_index_counts_the_pairs_that_are_in_order_and_is_undefined_where_none_can_be_compared(ties: bool) -> None:
    f, y = cohort(ties=ties)
    found = survival_scores.concordance(f.double().squeeze(1), y[:, 1] > 0, y[:, 0].double())
    time, event = y[:, 0].numpy(), y[:, 1].numpy()
    later = [(j, i) for j in range(60) for i in range(60) if time[i] < time[j] or (time[i] == time[j] and not event[j])]
    pairs = [(i, j) for j, i in later if event[i]]
    assert found == pytest.approx(np.mean([float(f[i] > f[j]) + 0.5 * float(f[i] == f[j]) for i, j in pairs]))
    none = torch.tensor([False, False])
    assert survival_scores.concordance(torch.zeros(2), none, torch.tensor([1.0, 2.0])) is None
    alike = torch.tensor([True, True])
    assert survival_scores.concordance(torch.zeros(2), alike, torch.tensor([3.0, 3.0])) is None


def test_the_integrated_brier_score_of_a_clairvoyant_is_zero_and_of_a_coin_a_quarter() -> None:
    time, event = torch.tensor([1.0, 2.0, 3.0, 4.0, 9.0], dtype=torch.float64), torch.tensor([True] * 5)
    horizons = torch.tensor([1.5, 2.5, 3.5], dtype=torch.float64)
    knows = (time[:, None] > horizons).double()
    assert survival_scores.integrated_brier(knows, event, time, horizons) == pytest.approx(0.0)
    coin = torch.full((5, 3), 0.5, dtype=torch.float64)
    assert survival_scores.integrated_brier(coin, event, time, horizons) == pytest.approx(0.25)
    assert survival_scores.integrated_brier(coin, event, time, horizons + 100) is None


def test_the_baseline_hazard_is_breslows_and_stays_in_what_is_kept_at_the_site() -> None:
    f, y = cohort(20)
    objective = SurvivalObjective(SurvivalTarget(horizons=(3.0, 6.0, 20.0)))
    split = Split(torch.zeros(20, 1), y)
    fit = objective.fit_outputs(lambda asked: f, SiteData(split, split, None, "0" * 64))
    center = float(f.double().mean())
    slow, both = [], list(zip(f.double().squeeze(1).tolist(), y.tolist(), strict=True))
    for horizon in (3.0, 6.0, 20.0):
        total = 0.0
        for time, event in y.tolist():
            if event and time <= horizon:
                total += 1 / sum(np.exp(h - center) for h, (t, _) in both if t >= time)
        slow.append(total)
    assert [float(text) for text in fit["cumulative_hazard"]] == pytest.approx(slow)
    said = objective.predictions(torch.tensor([[center]]), fit)
    assert [float(value) for value in said.rows[0]] == pytest.approx([1.0, *np.exp(-np.array(slow))])
    assert said.notes == (
        "the baseline hazard is this site's own, from its training rows",
        "the last horizon lies beyond the longest follow-up of these rows: survival there is that of its end",
    )
    with pytest.raises(BadData, match="the checkpoint has no baseline hazard"):
        objective.predictions(f, {})


# Bad input.


@pytest.mark.parametrize(
    ("task", "column", "cell", "said", "hint"),
    [
        pytest.param("survival", "days", "0", "line 4, column `days`: a time of 0 or below", "leave out rows", id="0"),
        pytest.param("survival", "days", "-3", "line 4, column `days`: a time of 0 or below", "leave out", id="before"),
        pytest.param("survival", "days", "soon", "line 4, column `days`: text where a number", "", id="text"),
        pytest.param("survival", "days", "", "line 4, column `days`: no value", "leave these rows", id="no time"),
        pytest.param("survival", "died", "2", "line 4, column `died`: no class", "the classes are: 0, 1", id="event"),
        pytest.param("regression", "stay", "NA", "line 4, column `stay`: no value", "leave these", id="no number"),
        pytest.param("regression", "stay", "-9", "line 4, column `stay`: not from 0 to 100", "another unit", id="code"),
        pytest.param("multilabel", "stroke", "", "line 4, column `stroke`: no value", "leave these", id="no label"),
        pytest.param("multilabel", "stroke", "maybe", "line 4, column `stroke`: no class", "the classes", id="label"),
    ],
)
def test_what_cannot_be_learned_is_refused_by_line_and_column(
    tmp_path: Path, task: str, column: str, cell: str, said: str, hint: str
) -> None:
    lines = rows(0)
    lines[2][COLUMNS.index(column)] = cell
    path = write(tmp_path / "train.csv", lines)
    with pytest.raises(BadData) as refused:
        task_of(study_of(TASKS[task])).load(Source({"table": path}), site="ash", seed=1, validation_fraction=0.2)
    assert refused.value.message.startswith(f"{path}: {said}")
    assert refused.value.hint.startswith(hint)


def test_no_event_at_a_site_is_a_sentence_before_it_trains(tmp_path: Path) -> None:
    lines = [[*row[:6], "0", row[7]] for row in rows(0)]
    study = study_of(SURVIVAL)
    task = task_of(study)
    data = task.load(Source({"table": write(tmp_path / "t.csv", lines)}), site="ash", seed=1, validation_fraction=0.25)
    assert data.warnings[0] == (
        "The training part (30 rows) has no event: the C-index is undefined there and left out of means"
    )
    with pytest.raises(BadData) as refused:
        task.at(data)
    assert refused.value.message == "no event among the 30 training rows, so there is nothing to learn from here"
    assert refused.value.code == "DECLINED_DATA_INVALID"
    assert refused.value.hint.startswith("is `happened` in [task] what the file says?")


def test_a_site_that_calls_the_label_otherwise_is_told_the_studys_columns(tmp_path: Path) -> None:
    source = Source({"table": write(tmp_path / "train.csv", rows(0))}, label="dead")
    with pytest.raises(BadData, match="this site's label is `dead`, the study predicts 2 columns: days, died"):
        task_of(study_of(SURVIVAL)).load(source, site="ash", seed=1, validation_fraction=0.2)


def test_survival_without_its_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survival_scores, "find_spec", lambda name: None)
    with pytest.raises(NeedsPerson) as refused:
        task_of(study_of(SURVIVAL))
    assert refused.value.message == "task `survival` needs torchsurv for its scores, which is not installed here"
    assert refused.value.hint == "pip install 'wardround[survival]'"


@pytest.mark.parametrize(
    ("method", "settings", "hint"),
    [
        pytest.param("fedmd", {}, "a method that averages weights, such as fedavg", id="fedmd"),
        pytest.param("dsfl", {}, "a method that averages weights, such as fedavg", id="dsfl"),
        pytest.param("ktpfl", {}, "a method that averages weights, such as fedavg", id="ktpfl"),
        pytest.param("feddf", {}, "a method that averages weights, such as fedavg", id="feddf"),
        pytest.param("pfeddf", {}, "a method that averages weights, such as fedavg", id="pfeddf"),
        pytest.param("apfl", {}, '`mixing = "weights"` in [algorithm] mixes the networks', id="apfl"),
    ],
)
@pytest.mark.parametrize("task", list(TASKS))
def test_a_method_of_classes_is_refused_for_a_task_without(
    task: str, method: str, settings: dict[str, Any], hint: str
) -> None:
    with pytest.raises(BadData) as refused:
        study_of(TASKS[task], algorithm={"name": method, **settings})
    assert refused.value.message == (
        f"study.toml: algorithm `{method}` as it is set compares the classes of rows, task `{task}` has none"
    )
    assert refused.value.hint.startswith(hint)
    assert study_of(TASKS[task], algorithm={"name": "apfl", "mixing": "weights"}).method.name == "apfl"


@pytest.mark.parametrize(
    ("task", "changes", "said"),
    [
        pytest.param(REGRESSION, {"lowest": 5, "highest": 5}, "[task]: `lowest` is 5 and `highest` 5", id="range"),
        pytest.param(SURVIVAL, {"horizons": [5, 2]}, "[task]: `horizons` [5.0, 2.0] does not rise", id="horizons"),
        pytest.param(SURVIVAL, {"event": "days"}, "[task]: `days` is to be predicted twice", id="twice"),
        pytest.param(SURVIVAL, {"time": "u"}, "[task]: `u` is the label and a feature", id="feature"),
        pytest.param(MULTILABEL, {"labels": ["a", "a"]}, "[task]: `labels` has `a` twice", id="labels"),
        pytest.param(MULTILABEL, {"absent": "yes"}, "[task]: `absent` and `present` has `yes` twice", id="words"),
        pytest.param(REGRESSION, {"headline": "auc"}, "`headline` in [task]: input should be 'mae', ", id="headline"),
    ],
)
def test_a_schema_that_cannot_be_is_refused(task: dict[str, Any], changes: dict[str, Any], said: str) -> None:
    with pytest.raises(BadData) as refused:
        study_of({**task, **changes})
    assert refused.value.message.startswith(f"study.toml: {said}")


def test_a_metric_of_two_classes_is_none_of_several() -> None:
    task = {"name": "tabular", "label": "stay", "classes": ["a", "b", "c"]}
    with pytest.raises(BadData, match="names `calibration_slope`, which task `tabular` does not have"):
        study_of(task, reported={"metrics": ["calibration_slope"]})
    found = study_of({**task, "classes": ["a", "b"]}, reported={"metrics": ["calibration_slope", "r2"][:1]})
    assert found.reported.ranges == {"calibration_slope": (-10.0, 10.0)}


# Two classes.


def two_classes(**changes: Any) -> TabularTask:
    study = study_of({"name": "tabular", "label": "sepsis", "classes": ["no", "yes"], **changes})
    task = task_of(study)
    assert isinstance(task, TabularTask)
    return task


def labels_only(*y: int) -> SiteData:
    split = Split(torch.zeros(len(y), 2), torch.tensor(y))
    return SiteData(split, split, None, "0" * 64)


def test_class_weights_of_a_table_are_of_the_sites_own_training_rows() -> None:
    logits, y = torch.tensor([[0.3], [-0.2]]), torch.tensor([0, 1])
    plain, balanced = two_classes(), two_classes(class_weights="balanced").at(labels_only(0, 0, 0, 1))
    weighed = [4 / (2 * 3) * float(plain.losses(logits, y)[0]), 4 / (2 * 1) * float(plain.losses(logits, y)[1])]
    assert balanced.losses(logits, y).tolist() == pytest.approx(weighed)
    assert float(balanced.loss(logits, y)) == pytest.approx(sum(weighed) / 2)
    given = two_classes(class_weights=[1.0, 5.0])
    assert given.losses(logits, y)[1] == pytest.approx(5 * float(plain.losses(logits, y)[1]))
    assert plain.headline == "auc"


def test_a_threshold_is_chosen_on_the_validation_rows_or_a_half() -> None:
    data, logits = labels_only(0, 0, 0, 1), torch.tensor([[-4.0], [-3.0], [-3.5], [-1.0]])
    fit = two_classes().fit_outputs(lambda split: logits, data)
    said = two_classes().predictions(logits, fit)
    assert [row[0] for row in said.rows] == ["no", "no", "no", "yes"]
    between = (1 / (1 + math.exp(3)) + 1 / (1 + math.exp(1))) / 2
    where = "chosen on this site's 4 validation rows for the best balanced accuracy"
    assert said.notes == (f"`yes` is predicted from a probability of {between:.6f} on, {where}",)
    half = two_classes(threshold="half")
    assert half.fit_outputs(lambda split: logits, data) == {}
    assert {row[0] for row in half.predictions(logits, {}).rows} == {"no"}
    note = "`yes` is predicted from a probability of 0.500000 on, as the study says"
    assert half.predictions(logits, {}).notes == (note,)
