"""The study files in examples/, each with every variant, and the commands that make their data."""

import tomllib
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from fl_algorithms.engine.partition import describe
from fl_algorithms.lab import suite
from fl_algorithms.lab.cli import app
from fl_algorithms.resolving import resolve
from tests.fl_algorithms.test_image_data import made_up_skin
from wardround.records import study as study_file

EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "examples").glob("*.toml"))
SUITES = sorted((EXAMPLES[0].parent / "suites").glob("*.toml"))
CASES = [(path, variant) for path in EXAMPLES for variant in ("", *tomllib.loads(path.read_text()).get("variants", {}))]


@pytest.mark.parametrize(("path", "variant"), CASES, ids=[f"{path.stem} {variant}".strip() for path, variant in CASES])
def test_example_resolves_with_every_variant_and_shares_something(path: Path, variant: str) -> None:
    study = resolve(study_file.load(path, None, variant), lab=True, source=path.name)
    assert bool(describe(study, study.study.sites[0]).upload) == (study.method.name != "silo")


@pytest.mark.parametrize("path", SUITES, ids=[path.stem for path in SUITES])
def test_suite_resolves(path: Path) -> None:
    assert suite.load(path).rows


def test_skin_is_made_by_its_command_and_said_in_images(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    raw.mkdir()
    made_up_skin(raw)
    done = CliRunner().invoke(app, ["data", "skin", str(raw), "--out", str(tmp_path / "out")], catch_exceptions=False)
    assert done.exit_code == 0
    assert "first-place: 16 images to train, 4 to test" in done.stderr
    with np.load(tmp_path / "out" / "second" / "train.npz") as file:
        assert file["images"].shape[1:] == (32, 32, 3)


def test_size_that_nobody_made_is_refused(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["data", "skin", str(tmp_path), "--out", str(tmp_path), "--size", "48"])
    assert done.exit_code == 2
    assert "48" in done.stderr
