"""A study's learning curves in the files of other tools: the numbers of its report, and nothing sent."""

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from coordinator.answers import StudyReport
from coordinator.cli.main import app
from coordinator.studies.curves import MEAN, curves
from fl_algorithms.tracking import to_tensorboard
from tests.coordinator.conftest import Place
from tests.coordinator.test_page import attempt, report


def accepted(loss: str) -> dict[str, object]:
    return {
        "answer": "accepted", "code": "", "tensor": "", "attempt": 1, "num_examples": 9, "num_validation": 3,
        "metrics": {"val_loss": loss}, "update_digest": "ab" * 32,
    }  # fmt: skip


def told() -> StudyReport:
    rounds = [attempt(1, {}), attempt(1, {}, attempt=2, val_loss=0.8), attempt(2, {}, val_loss=None)]
    for row, loss in zip(rounds, ("0.9", "0.7", "nan"), strict=True):
        row["answers"] = {"alpha": accepted(loss), "bravo": {"answer": "declined", "code": "X", "tensor": ""}}
    return report(attempts=rounds, study={"study": {"seed": 7}, "training": {"batch_size": 4}})


def test_each_site_has_a_series_of_each_metric_and_of_a_round_what_came_last() -> None:
    run = curves(told())
    assert run.series == {MEAN: [(0, 0.8)], "alpha/val_loss": [(0, 0.7)]}
    assert (run.group, run.seed, run.settings["training.batch_size"]) == ("trial-1", 7, "4")


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (path,) = to_tensorboard([curves(told())], tmp_path)
    events = EventAccumulator(str(path))
    events.Reload()
    (point,) = events.Scalars("alpha/val_loss")
    assert (point.step, point.value) == (0, pytest.approx(0.7))
    assert b"training.batch_size = 4" in events.Tensors("settings/text_summary")[0].tensor_proto.string_val[0]


def exported(place: Place, out: Path) -> Result:
    words = ["study", "export", "trial", "--state", str(place.state.root), "--to", "tensorboard", "--out", str(out)]
    return CliRunner().invoke(app, words)


def test_a_study_without_numbers_has_no_curves_yet(place: Place, tmp_path: Path) -> None:
    place.create()
    ended = exported(place, tmp_path / "out")
    assert "no site has reported a number of study `trial` yet" in str(ended.exception)


def test_a_running_study_is_exported(place: Place, tmp_path: Path) -> None:
    for one in place.begin():
        one.answer(one.next_assignment())
    place.until(lambda status: status["round"] == 2)
    ended = exported(place, tmp_path / "out")
    assert ended.exit_code == 0, ended.output
    assert (tmp_path / "out" / "trial-1").is_dir()
    assert "4 curves; to see them: `tensorboard --logdir" in ended.output
