"""The four hospitals of the UCI heart disease study in the lab, with few seeds and bands wider than the 20-seed ones.

The bands are those of an independent simulation of the paper's settings over 20 seeds, widened by 0.01;
``docs/researchers.md`` has the command and what it gave. With 4 seeds the mean moves more, so they are 0.03 wider here.
"""

import os
from pathlib import Path
from typing import Any

import pytest

from fl_algorithms.engine.partition import task_of
from fl_algorithms.lab.data import heart_disease
from fl_algorithms.lab.evaluation import summary
from fl_algorithms.lab.federation import run_federation
from fl_algorithms.lab.site_data import load_sites
from fl_algorithms.resolving import resolve
from wardround.records.study import load

ROOT = Path(__file__).resolve().parents[2]
SEEDS = 4
WIDER = 0.03
pytestmark = pytest.mark.data


@pytest.fixture(scope="module")
def hospitals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    raw = Path(os.environ.get("WARDROUND_DATA", ROOT.parent / "shared" / "data")) / "heart_disease"
    out = tmp_path_factory.mktemp("heart")
    heart_disease(raw, out)
    return out


def scores(algorithm: str, hospitals: Path) -> dict[str, Any]:
    study = resolve(load(ROOT / "examples" / "heart_disease.toml", [f"algorithm.name={algorithm}"]))
    task, runs = task_of(study), []
    for seed in range(study.study.seed, study.study.seed + SEEDS):
        one = study.changed(study={"seed": seed})
        runs.append(run_federation(one, task, load_sites(one, task, hospitals)).checkpoints)
    return summary(runs)


@pytest.mark.parametrize(
    ("algorithm", "bands"),
    [
        ("fedavg", {"latest": (0.712, 0.020), "best_global": (0.710, 0.017), "best_local": (0.722, 0.017)}),
        ("fenda", {"latest": (0.794, 0.015), "best_local": (0.798, 0.016)}),
    ],
)
@pytest.mark.chaos
def test_the_published_level_is_reached(algorithm: str, bands: dict[str, tuple[float, float]], hospitals: Path) -> None:
    found = scores(algorithm, hospitals)
    for kind, (mean, radius) in bands.items():
        assert abs(found[kind]["mean"] - mean) <= radius + WIDER, (kind, found[kind])
