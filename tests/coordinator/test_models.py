"""What `coordinator models export` refuses, and what it says where sites download models of their own."""

import json
from pathlib import Path
from typing import Any

import pytest

from coordinator.cli import models as command
from coordinator.models import Which
from coordinator.models.export import export
from coordinator.study_answers import StudyReport
from fl_algorithms.resolving import resolve
from tests.coordinator.conftest import Place, study_document
from wardround.errors import NotPermitted, UsageProblem
from wardround.records.study import StudyFile


def report_of(place: Place, **changed: Any) -> StudyReport:
    document = place.ask("report", study="trial")
    return StudyReport.from_document({**document, **changed})


def give(place: Place, out: Path, which: Which = "latest", site: str = "", **changed: Any) -> list[Path]:
    blobs = place.coordinator.context.blobs
    return export(report_of(place, **changed), blobs, which, site, out, keep=place.state.root)


def test_a_study_without_a_round_has_no_model_to_export(place: Place, tmp_path: Path) -> None:
    place.create()
    with pytest.raises(UsageProblem, match="study `trial` has made no model yet: no round has closed"):
        give(place, tmp_path / "out")
    with pytest.raises(UsageProblem, match=r"study `trial` has no best global model$") as refused:
        give(place, tmp_path / "out", "best")
    assert refused.value.hint == "the newest one: `--model latest`"
    with pytest.raises(UsageProblem, match="no best global model: its method makes none"):
        give(place, tmp_path / "out", "best", best_rule="")
    assert not (tmp_path / "out").exists()


def test_a_model_is_never_written_into_the_state_directory(place: Place) -> None:
    place.create()
    with pytest.raises(NotPermitted):
        give(place, place.state.root / "out")


def test_where_each_site_downloads_its_own_a_site_must_be_named(place: Place, tmp_path: Path) -> None:
    place.create()
    made = one_round(place)
    document = study_document()
    document["algorithm"] = {"name": "fedsm"}
    fedsm = {**made, "study": {**document, "algorithm": algorithm("fedsm")}}
    with pytest.raises(UsageProblem, match="each site downloads a model of its own") as refused:
        give(place, tmp_path / "out", **fedsm)
    assert refused.value.hint == "`--site`, one of: alpha, bravo, charlie"
    with pytest.raises(UsageProblem, match="study `trial` has no site `delta`"):
        give(place, tmp_path / "out", site="delta", **made)


def algorithm(name: str) -> dict[str, Any]:
    tables = {**study_document(), "algorithm": {"name": name}}
    tables = json.loads(json.dumps(tables))
    return dict(resolve(StudyFile.from_document(tables)).document()["algorithm"])


def one_round(place: Place) -> dict[str, Any]:
    """A report in which a round was closed with the initial model."""
    told = place.ask("report", study="trial")
    row = {
        "round": 1, "attempt": 1, "closing": False, "outcome": "closed", "opened": "2026-01-01T00:00:00Z",
        "closed": "2026-01-01T00:01:00Z", "seconds": 60.0, "asked": ["alpha", "bravo", "charlie"],
        "contributors": ["alpha", "bravo"], "unanswered": ["charlie"], "answers": {},
        "base_digest": told["initial_digest"], "model_digest": told["model_digest"], "val_loss": None, "norms": {},
        "limits": {}, "shares": {}, "capped": [], "left_out": {"bravo": "LEFT_OUT"},
    }  # fmt: skip
    return {"rounds_closed": [row]}


def test_the_card_says_who_is_not_in_a_round(place: Place, tmp_path: Path) -> None:
    place.create()
    files = give(place, tmp_path / "out", **one_round(place))
    card = json.loads(files[0].read_text())
    assert card["lineage"][0] | {"closed": ""} == {
        "round": 1, "attempt": 1, "closed": "", "model_digest": card["kept_digest"], "contributors": ["alpha"],
        "left_out": ["bravo"], "absent": ["charlie"],
    }  # fmt: skip
    assert "| alpha | bravo, charlie |" in files[2].read_text()
    assert "No score of this model is known here" in files[2].read_text()


def test_why_there_is_no_program_is_what_the_lab_says(tmp_path: Path) -> None:
    """It ends at once: an empty folder is no export."""
    files, why = command._with_program(tmp_path, onnx=False, force=False)
    assert files == []
    assert why == f"{tmp_path} has no card.json"
