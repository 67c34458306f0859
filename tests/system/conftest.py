"""Real processes over real TLS on loopback, on the hospitals of the heart disease study."""

import json
import os
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.coordinator.conftest import Place
from tools.world import World, command

ROOT = Path(__file__).resolve().parents[2]
HEART = ROOT / "examples" / "heart_disease.toml"
BREAST = ROOT / "examples" / "breast_cancer.toml"


def sites_of(study: Path) -> list[str]:
    with study.open("rb") as file:
        return sorted(tomllib.load(file)["study"]["sites"])


def label_of(study: Path) -> str:
    with study.open("rb") as file:
        return str(tomllib.load(file)["task"]["label"])


def lab_run(study: Path, data: Path, *options: str) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(command("fl-lab", "run", study, "--data", data, *options, "--json"))
    return answer


@pytest.fixture(scope="session")
def heart_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The four hospitals, divided as the papers do."""
    raw = Path(os.environ.get("WARDROUND_DATA", ROOT.parent / "shared" / "data")) / "heart_disease"
    out = tmp_path_factory.mktemp("heart")
    command("fl-lab", "data", "heart-disease", raw, "--out", out)
    return out


@pytest.fixture(scope="session")
def breast_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("breast")
    command("fl-lab", "data", "breast-cancer", "--out", out)
    return out


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with World(tmp_path) as world:
        yield world


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """A coordinator in this process, beside whose folder a test has room for sites of its own."""
    (tmp_path / "there").mkdir()
    place = Place(tmp_path / "there")
    try:
        yield place
    finally:
        place.close()
