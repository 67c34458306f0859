"""`fl-lab tune`: what may be tried, what is drawn, and that no search sees a test row."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fl_algorithms.lab import optuna_search, search, space, suite
from fl_algorithms.lab.cli import app
from fl_algorithms.lab.space import Range, Settings
from tests.fl_algorithms.test_lab_compare import FEDAVG, HEAD, STUDY, hospitals, refusal, suite_file, threads
from wardround.errors import BadData, NeedsPerson, UsageProblem

OVER = ("training.learning_rate={ low = 1e-4, high = 0.5, log = true }", "training.batch_size=[4, 8]")


def asked(folder: Path, over: Sequence[str] = OVER, **changes: Any) -> search.Asked:
    (folder / "study.toml").write_text(STUDY)
    given: dict[str, Any] = {"method": "random", "trials": 3, "seed": 1, "seeds": 1} | changes
    return search.Asked(folder / "study.toml", (), "fedavg", space.parse(over), **given)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return hospitals(tmp_path / "data")


def searched(one: search.Asked, data: Path, out: Path) -> search.Found:
    return search.search(one, data, out, jobs=1, pool=threads)


def trials(out: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(out.read_text())["trials"]
    return [{key: value for key, value in trial.items() if key != "seconds"} for trial in found]


def test_a_range_of_whole_numbers_draws_whole_numbers_and_its_ends_are_reached() -> None:
    whole = Range(low=1, high=4)
    assert [whole.at((2 * place + 1) / 8) for place in range(4)] == [1, 2, 3, 4]
    assert (whole.at(0.0), whole.at(1 - 1e-12)) == (1, 4)
    decades = Range(low=1e-4, high=1e-1, log=True)
    assert [decades.at(place / 3) for place in range(4)] == [1e-4, 1e-3, 1e-2, 1e-1]
    assert Range(low=0.0, high=1.0).at(1 / 3) == 0.3333  # as a person can write it


def test_another_key_changes_no_draw_of_a_key() -> None:
    both, one = space.parse(OVER), space.parse(OVER[:1])
    for number in range(5):
        assert space.drawn(both, 7, number)["training.learning_rate"] == space.drawn(one, 7, number).popitem()[1]
    assert len({str(space.drawn(both, 7, number)) for number in range(5)}) == 5
    assert space.drawn(both, 7, 0) != space.drawn(both, 8, 0)


@pytest.mark.parametrize(
    ("over", "message"),
    [
        pytest.param("training.learning_rate", "is not TABLE.KEY=[VALUE, ...] or TABLE.KEY={", id="no-value"),
        pytest.param("training.learning_rate=0.1", "is not TABLE.KEY=[VALUE, ...] or TABLE.KEY={", id="one-value"),
        pytest.param("study.rounds=[1, 2]", "'study.rounds' is no key of [model], [algorithm], [training]", id="study"),
        pytest.param("training.batch_size=[4, 4]", "needs a list of values, each once", id="twice"),
        pytest.param("training.batch_size={ low = 8, high = 4 }", "`low` is 8, which is not below `high`", id="order"),
        pytest.param("algorithm.mu={ low = 0.0, high = 1.0, log = true }", "both ends are above 0", id="log-of-0"),
    ],
)
def test_what_is_no_space_is_refused_with_its_key(over: str, message: str) -> None:
    with pytest.raises(UsageProblem) as refused:
        space.parse([over])
    assert message in refused.value.message


def test_a_grid_of_a_range_is_refused(tmp_path: Path, data: Path) -> None:
    with pytest.raises(UsageProblem, match=r"tries every value, and `training\.learning_rate` has a range of them"):
        searched(asked(tmp_path, method="grid"), data, tmp_path / "out.json")


def test_every_trial_is_kept_with_its_settings_and_losses_and_the_best_is_named(tmp_path: Path, data: Path) -> None:
    out = tmp_path / "out.json"
    found = searched(asked(tmp_path, OVER[1:], method="grid", trials=0, seeds=2), data, out)
    record = json.loads(out.read_text())
    assert [trial["settings"] for trial in record["trials"]] == [
        {"training.batch_size": 4}, {"training.batch_size": 8},
    ]  # fmt: skip
    assert [run["seed"] for run in record["trials"][0]["runs"]] == [1005, 1006]  # no reported run has these
    assert found.best is not None
    assert record["best"] == found.best.number
    assert found.best.val_loss == min(trial["val_loss"] for trial in record["trials"])


def test_no_search_reads_a_test_row(tmp_path: Path, data: Path) -> None:
    whole = searched(asked(tmp_path), data, tmp_path / "with.json")
    for table in data.rglob("test.csv"):
        table.write_text("this is no table\n")
    without = searched(asked(tmp_path), data, tmp_path / "without.json")
    assert [trial.val_loss for trial in without.trials] == [trial.val_loss for trial in whole.trials]
    assert "score" not in (tmp_path / "with.json").read_text()


@pytest.mark.parametrize("method", ["random", "optuna"])
def test_a_search_that_was_stopped_goes_on_as_if_it_had_not_been(method: str, tmp_path: Path, data: Path) -> None:
    searched(asked(tmp_path, method=method, trials=4), data, tmp_path / "whole.json")
    searched(asked(tmp_path, method=method, trials=2), data, tmp_path / "parts.json")
    searched(asked(tmp_path, method=method, trials=4), data, tmp_path / "parts.json")
    assert trials(tmp_path / "parts.json") == trials(tmp_path / "whole.json")


def test_the_file_of_another_search_is_refused(tmp_path: Path, data: Path) -> None:
    searched(asked(tmp_path, trials=1), data, tmp_path / "out.json")
    with pytest.raises(BadData, match="is not a file of this search") as refused:
        searched(asked(tmp_path, trials=1, seed=2), data, tmp_path / "out.json")
    assert refused.value.hint == "use another --out"


def test_settings_that_were_tried_are_not_run_again(tmp_path: Path, data: Path) -> None:
    found = searched(asked(tmp_path, ["training.batch_size=[4]"], trials=2), data, tmp_path / "out.json")
    assert (found.trials[1].same_as, found.trials[1].runs) == (0, [])
    assert found.trials[1].val_loss == found.trials[0].val_loss


def test_optunas_proposals_go_where_the_loss_is_low() -> None:
    over = space.parse(["training.learning_rate={ low = 0.0, high = 1.0 }", "training.batch_size=[4, 8]"])
    before: list[tuple[Settings, float | None]] = []
    for number in range(40):
        settings = optuna_search.proposed(over, 3, number, before)
        rate = settings["training.learning_rate"]
        assert isinstance(rate, float)
        before.append((settings, None if number == 5 else abs(rate - 0.2) + (settings["training.batch_size"] == 8)))
    late = [settings for settings, _ in before[25:]]
    assert sum(settings["training.batch_size"] == 4 for settings in late) > 10
    assert min(loss for _, loss in before if loss is not None) < 0.02


def test_without_optuna_the_way_out_is_said(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(NeedsPerson, match="a search with Optuna needs optuna, which is not installed") as refused:
        searched(asked(tmp_path, method="optuna"), data, tmp_path / "out.json")
    assert refused.value.hint == "`pip install 'wardround[optuna]'`"


def test_the_command_prints_what_runs_the_best(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked(tmp_path)
    monkeypatch.setattr(search.search, "__kwdefaults__", {**search.search.__kwdefaults__, "pool": threads})
    words = ["tune", str(tmp_path / "study.toml"), "--data", str(data), "--out", str(tmp_path / "out.json")]
    words += ["--over", "training.batch_size=[4]", "--trials", "1", "--seeds", "1", "--jobs", "1"]
    said = CliRunner().invoke(app, words, catch_exceptions=False)
    assert said.exit_code == 0
    assert "chosen on the validation loss of best_local, test rows were not read" in said.output
    assert f"--data {data} --set training.batch_size=4`" in said.output
    nothing = CliRunner().invoke(app, words[:6])
    assert isinstance(nothing.exception, UsageProblem)
    assert nothing.exception.message == "nothing to try: there is no --over"


def test_a_suite_draws_points_of_ranges_and_each_once(tmp_path: Path) -> None:
    tuned = "trials = 3\n[row.tune]\ntraining.learning_rate = { low = 1e-3, high = 0.1, log = true }\n"
    row = suite.load(suite_file(tmp_path, HEAD + FEDAVG + tuned)).rows[0]
    rates = [point.study.training.learning_rate for point in row.points]
    assert len(set(rates)) == 3
    assert all(1e-3 <= rate <= 0.1 for rate in rates)
    few = "trials = 9\n[row.tune]\ntraining.batch_size = [4, 8]\n"
    assert len(suite.load(suite_file(tmp_path, HEAD + FEDAVG + few)).rows[0].points) == 2


@pytest.mark.parametrize(
    ("tuned", "message"),
    [
        pytest.param(
            "[row.tune]\ntraining.learning_rate = { low = 1e-3, high = 0.1 }\n",
            "`tune` has a range for 'training.learning_rate': say with `trials` how many points are drawn",
            id="range-without-trials",
        ),
        pytest.param("trials = 3\n", "`trials` draws points of `tune`, which is empty", id="trials-of-nothing"),
    ],
)
def test_a_suites_search_at_random_needs_both_a_space_and_a_number(tuned: str, message: str, tmp_path: Path) -> None:
    assert refusal(tmp_path, HEAD + FEDAVG + tuned).message == f"suite.toml: row `fedavg`: {message}"
