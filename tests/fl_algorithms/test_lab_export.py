"""`fl-lab export`: the same numbers in other tools' files, and nothing sent."""

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fl_algorithms.lab.cli import app
from fl_algorithms.lab.export import export, exported
from fl_algorithms.lab.latex import escaped, latex
from tests.fl_algorithms.test_lab_compare import FEDAVG, HEAD, STUDY, compared, hospitals, suite_file
from wardround.errors import BadData, CannotWrite, NeedsPerson
from wardround.pages.blocks import Grid


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("exported")
    compared(suite_file(base, HEAD + FEDAVG), hospitals(base / "data"), base / "out")
    return base / "out"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("kept")
    (base / "study.toml").write_text(STUDY)
    words = ["run", str(base / "study.toml"), "--data", str(hospitals(base / "data")), "--variant", "fedavg"]
    assert CliRunner().invoke(app, [*words, "--out", str(base / "out")], catch_exceptions=False).exit_code == 0
    return base / "out"


def test_a_run_has_its_settings_curves_and_scores(run: Path) -> None:
    (one,) = exported(run)
    assert (one.group, one.seed, one.settings["training.batch_size"]) == ("fedavg", 5, "4")
    assert [step for step, _ in one.series["ash/val_loss"]] == [0, 1, 2]
    assert [step for step, _ in one.series["ash/latest/accuracy"]] == [2]


def test_mlflow_gets_every_number_in_a_file(run: Path, tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    (path,) = export(run, "mlflow", tmp_path)
    with pytest.raises(CannotWrite, match="exists already; MLflow would have every run twice"):
        export(run, "mlflow", tmp_path)
    client = MlflowClient(tracking_uri=f"sqlite:///{path}")
    (one,) = exported(run)
    experiment = client.get_experiment_by_name("fedavg")
    (held,) = client.search_runs([experiment.experiment_id])
    assert held.data.params["training.learning_rate"] == one.settings["training.learning_rate"]
    curve = client.get_metric_history(held.info.run_id, "ash/val_loss")
    assert [(point.step, point.value) for point in curve] == one.series["ash/val_loss"]


def test_tensorboard_gets_every_number_in_a_file(run: Path, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (path,) = export(run, "tensorboard", tmp_path)
    events = EventAccumulator(str(path))
    events.Reload()
    (one,) = exported(run)
    assert set(events.Tags()["scalars"]) == set(one.series)
    assert [event.value for event in events.Scalars("ash/val_loss")] == pytest.approx(
        [value for _, value in one.series["ash/val_loss"]]
    )


def test_a_comparison_is_tables_of_both_kinds_and_runs_of_both_tools(comparison: Path, tmp_path: Path) -> None:
    assert {path.name for path in export(comparison, "csv", tmp_path)} == {"scores.csv", "tables.csv", "tests.csv"}
    names = {path.name for path in export(comparison, "latex", tmp_path)}
    assert names == {"scores.tex", "sites.tex"}
    said = (tmp_path / "scores.tex").read_text()
    assert r"\toprule" in said
    assert r"best\_local" in said
    assert {one.name for one in exported(comparison)} == {"fedavg, seed 5", "fedavg, seed 6"}


def test_the_command_says_what_shows_it(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "files"
    said = CliRunner().invoke(app, ["export", str(run), "--to", "csv", "--out", str(out)], catch_exceptions=False)
    assert f"written: {out / 'scores.csv'}" in said.output
    assert (out / "scores.csv").read_text().startswith("seed,site,checkpoint,split,metric,value\n5,ash,")


def test_a_folder_of_neither_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadData, match="holds neither a comparison nor a run: it has no"):
        export(tmp_path, "csv", tmp_path / "out")


@pytest.mark.parametrize(
    ("target", "module", "name"),
    [("mlflow", "mlflow.entities", "mlflow"), ("tensorboard", "tensorboard.compat.proto.event_pb2", "tensorboard")],
)
def test_a_missing_extra_is_named(
    target: str, module: str, name: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(NeedsPerson, match=f"needs {name}, which is not installed") as refused:
        export(run, target, tmp_path)  # type: ignore[arg-type]
    assert refused.value.hint == f"`pip install 'wardround[{name}]'`"


def test_latex_sets_any_text_as_it_stands() -> None:
    assert escaped("50 % of a_b & {c} \\ d\n<1") == r"50 \% of a\_b \& \{c\} \textbackslash{} d $<$1"
    said = latex(Grid(("row", "mean"), (("a_b", "0.5 ± 0.1"),)), "A & B", "t")
    assert r"\begin{tabular}{lr}" in said
    assert r"a\_b & 0.5 $\pm$ 0.1 \\" in said
    assert r"\caption{A \& B}" in said
