"""A coordinator that is lost and restored from a backup, with real sites: one approval each, and nothing else."""

from pathlib import Path

import pytest

from tests.system.conftest import BREAST, label_of, sites_of
from tests.system.test_faults import study_file
from tools.world import World, wait_until

PAIR = sites_of(BREAST)[:2]
pytestmark = [pytest.mark.system, pytest.mark.chaos]


def test_a_coordinator_restored_from_a_backup_goes_on_with_the_same_sites(
    world: World, breast_data: Path, tmp_path: Path
) -> None:
    """Rounds failed for ever, one error a minute, and no command ended it."""
    world.start(breast_data, label_of(BREAST), PAIR)
    study = world.create_study(study_file(tmp_path, sites=PAIR, rounds=30, quorum=2))
    world.approve(study, PAIR)
    world.ask_coordinator("study", "start", study)
    wait_until(lambda: world.study_status(study)["round"] >= 2, "round 2", 120)
    world.ask_coordinator("backup", "--out", tmp_path / "backup")
    reached = world.study_status(study)["round"]
    wait_until(lambda: world.study_status(study)["round"] > reached + 2, "later rounds", 120)
    assert world.coordinator is not None
    world.coordinator.kill()
    world.coordinator_state.rename(tmp_path / "lost")
    world.ask_coordinator("restore", tmp_path / "backup")
    status = world.study_status(study)
    assert (status["state"], status["revision"]) == ("created", 2)
    world.serve()
    wait_until(lambda: all("it has back the" in world.agents[site].log.read_text() for site in PAIR), "given back", 60)
    world.approve(study, PAIR)
    world.ask_coordinator("study", "start", study)
    status = world.finish(study)
    assert (status["state"], status["incomplete"]) == ("finished", [])
    for site in PAIR:
        world.heard(site, study)
        assert world.site_json(site, "audit", "verify", "--ask", ok=(0, 2))["complete"]
