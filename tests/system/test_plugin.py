"""A newcomer's own network and data set: a folder outside the package, installed with pip, trained at two sites."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fl_algorithms.lab import run
from tests.plugin_world import on_the_path
from tests.system.conftest import ROOT, sites_of
from tools.world import World, in_parallel

PLUGIN = ROOT / "examples" / "plugin"
STUDY = PLUGIN / "study.toml"
SITES = sites_of(STUDY)
pytestmark = pytest.mark.system


@pytest.fixture
def installed(tmp_path: Path) -> Iterator[Path]:
    """The example, installed in a folder that all processes of the test search."""
    target, source = tmp_path / "site-packages", tmp_path / "plugin"
    shutil.copytree(PLUGIN, source)  # what builds a wheel leaves files beside its sources
    line = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([*line, "--target", target, source], check=True, stdin=subprocess.DEVNULL)
    with on_the_path(target):
        yield target


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Wheezing adds a tone; each patient has two recordings."""
    for number, site in enumerate(SITES):
        draw = np.random.default_rng(number)
        labels = np.repeat(draw.integers(0, 2, 20), 2)
        tone = np.sin(np.arange(32) * 1.5)
        signals = draw.normal(size=(40, 32)) + labels[:, None] * tone
        (tmp_path / "data" / site).mkdir(parents=True)
        np.savez(
            tmp_path / "data" / site / "train.npz", signals=signals.astype("f4"), labels=labels,
            patients=np.repeat(np.arange(20), 2),
        )  # fmt: skip
    return tmp_path / "data"


def test_it_has_fewer_than_60_lines_of_python() -> None:
    assert sum(len(file.read_text().splitlines()) for file in PLUGIN.rglob("*.py")) < 60


def test_the_page_shows_its_network_as_it_is() -> None:
    page = (ROOT / "docs" / "plugins.md").read_text()
    network = page[page.index("class BreathNet(nn.Module)") :].partition("```")[0]
    code = (PLUGIN / "breaths" / "code.py").read_text()
    assert [line for line in network.splitlines() if line not in code.splitlines()] == []
    points = page[page.index('[project.entry-points."wardround.models"]') :].partition("```")[0]
    metadata = (PLUGIN / "pyproject.toml").read_text()
    assert [line for line in points.splitlines() if line not in metadata.splitlines()] == []


@pytest.mark.chaos
def test_two_sites_train_it_to_the_same_bits_as_the_lab(installed: Path, data: Path, tmp_path: Path) -> None:
    with World(tmp_path / "world") as world:
        world.init()
        world.serve()

        def admit(site: str) -> None:
            world.join(site)
            world.ask_site(site, "data", "add", "patients", "--files", data / site / "train.npz")
            world.run_agent(site)

        in_parallel(admit, SITES)
        study = world.create_study(STUDY)

        def allow(site: str) -> None:
            """As a person does who trusts that code: the # before its line goes."""
            world.ask_site(site, "policy", "draft", study)
            policy = world.state / site / "policy.toml"
            policy.write_text(policy.read_text().replace("  # { name = ", "  { name = "))

        in_parallel(allow, SITES)
        world.approve(study, SITES)
        world.ask_coordinator("study", "start", study)
        status = world.finish(study)
        assert (status["state"], status["round"]) == ("finished", 2)
        (row,) = world.site_json(SITES[0], "status")["studies"]
        assert row["plugins"][0].startswith("breaths 1.0, SHA-256 ")
    assert status["model_digest"] == run(STUDY, data).digests[0]
