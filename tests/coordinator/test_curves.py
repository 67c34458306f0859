"""A study's learning curves in the files of other tools: the numbers of its report, and nothing sent."""

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from coordinator.cli.main import app
from coordinator.metric_answers import StudyMetrics
from coordinator.studies.curves import curves
from fl_algorithms.tracking import Exported, to_tensorboard
from tests.coordinator.conftest import Place
from tests.coordinator.test_page import report


def told() -> Exported:
    numbers = {"round": 1, "attempt": 1, "closing": False, "rows": 9, "validation_rows": 3, "seconds": 1.0}
    metrics = StudyMetrics.from_document({
        "id": "trial", "title": "", "revision": 1, "state": "running", "rounds": 2, "sites": ["alpha", "bravo"],
        "metrics": ["val_loss"], "counts": "exact",
        "reported": [
            {**numbers, "site": "alpha", "model": 0, "metrics": {"val_loss": "0.7"}},
            {**numbers, "site": "alpha", "model": 1, "metrics": {"val_loss": "nan"}},
        ],
        "means": [{"model": 0, "metrics": {"val_loss": 0.8}, "sites": 2}],
    })  # fmt: skip
    return curves(report(study={"study": {"seed": 7}, "training": {"batch_size": 4}}), metrics)


def test_each_site_has_a_series_of_each_metric_and_what_is_no_number_is_left_out() -> None:
    run = told()
    assert run.series == {"mean/val_loss": [(0, 0.8)], "alpha/val_loss": [(0, 0.7)]}
    assert (run.group, run.seed, run.settings["training.batch_size"]) == ("trial-1", 7, "4")


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (path,) = to_tensorboard([told()], tmp_path)
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
