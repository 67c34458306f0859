"""What a trainer whose code was taken over may try, alone or with the coordinator."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.site_agent.site_world import STUDY, SiteWorld


@pytest.fixture
def hospital(tmp_path: Path) -> Iterator[SiteWorld]:
    world = SiteWorld(tmp_path)
    try:
        world.ready()
        yield world
    finally:
        world.close()


@pytest.mark.attack(promise="P6", refused_by="site_agent/gateway/consent.py")
@pytest.mark.parametrize(
    "told",
    [
        pytest.param({"num_examples": 2**53 - 1}, id="as many rows as a message holds"),
        pytest.param({"num_examples": 81}, id="one row more"),
        pytest.param({"num_validation": 2**40}, id="validation rows"),
        pytest.param({"num_validation": 0}, id="no validation rows"),
        pytest.param({"metrics": {"val_loss": "1.234e+300"}}, id="a loss that is none"),
        pytest.param({"metrics": {"val_loss": "-1"}}, id="a loss below nought"),
        pytest.param({"metrics": {"val_loss": "0.5", "accuracy": "17"}}, id="more than all are right"),
    ],
)
def test_told_counts_are_false(hospital: SiteWorld, told: dict[str, Any]) -> None:
    """Counts and metrics that the data cannot give: two channels of 53 bits a round, and more in each metric."""
    assert hospital.trainer is not None
    for name, value in told.items():
        setattr(hospital.trainer, name, value)
    hospital.coordinator.assign(STUDY, 1)
    hospital.coordinator.wait_declared("DECLINED", "DECLINED_POLICY")
    assert not hospital.coordinator.uploads
    assert not hospital.lines("upload")
