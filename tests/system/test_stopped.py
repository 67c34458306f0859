"""Parts of a site that are killed or stopped in the middle of a study, and a site that runs twice."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from site_agent.handoff import Trainer
from tests.system.conftest import lab_run
from tests.system.test_faults import LABEL, PAIR, study_file
from tools.world import Service, World, command_line, descendants, wait_until

pytestmark = [pytest.mark.system, pytest.mark.chaos]


def test_a_study_that_needs_all_its_sites_outlives_every_killed_and_stopped_part_of_a_trainer(
    world: World, breast_data: Path, tmp_path: Path
) -> None:
    file = study_file(tmp_path, name="parts", sites=PAIR, quorum=2, rounds=12, round_deadline_s=120)
    world.start(breast_data, LABEL, PAIR)
    study = world.create_study(file)
    world.approve(study, PAIR)
    world.ask_coordinator("study", "start", study)

    def worker(site: str) -> int:
        def found() -> int:
            status = Trainer(world.state / site).status()
            return (status.worker or 0) if status is not None else 0

        return int(wait_until(found, f"{site} has a worker", 60))

    def listener(site: str) -> int:
        def found() -> int:
            below = descendants(world.agents[site].process.pid)
            return next((pid for pid in below if "--only" in command_line(pid)), 0)

        return int(wait_until(found, f"{site} has a listener", 60))

    blows: list[tuple[Callable[[str], int], tuple[int, int]]] = [
        (worker, (signal.SIGKILL, signal.SIGSTOP)),
        (listener, (signal.SIGSTOP, signal.SIGKILL)),
    ]
    for find, numbers in blows:
        before = world.study_status(study)["round"]
        for site, number in zip(PAIR, numbers, strict=True):
            os.kill(find(site), number)
        wait_until(lambda before=before: world.study_status(study)["round"] > before + 1, "it goes on", 90)
    status = world.finish(study)
    assert status["state"] == "finished"
    assert {site: row["rounds_contributed"] for site, row in status["sites"].items()} == {
        site: list(range(1, 13)) for site in PAIR
    }
    assert status["model_digest"] == lab_run(file, breast_data)["digests"][0]
    said = {site: world.agents[site].log.read_text() for site in PAIR}
    assert "is stopped and was ended; another is started" in said[PAIR[0]]
    assert "the trainer's worker is stopped while" in said[PAIR[1]] or "is stopped: another is started" in said[PAIR[1]]
    assert "ended (SIGKILL); another is started" in said[PAIR[1]]
    for site in PAIR:
        assert world.agents[site].stop(20) == 0


def test_a_site_that_runs_twice_is_named_and_floods_neither_log_nor_ledger(
    world: World, breast_data: Path, tmp_path: Path
) -> None:
    """A machine was copied with its state directory, and both copies run."""
    site = PAIR[0]
    world.start(breast_data, LABEL, [site])
    study = world.create_study(study_file(tmp_path, name="twice", sites=[site], quorum=1, rounds=3))
    world.approve(study, [site])
    world.agents[site].stop()
    copy = world.state / "copy"
    shutil.copytree(world.state / site, copy)
    world.run_agent(site)
    second = Service(world.logs / "copy.log", "site-agent", "run", "--state", copy)
    try:
        second.wait_line("ready")
        assert world.coordinator is not None
        named = f"site {site}: two programs run with its identity"
        wait_until(lambda: named in world.coordinator.log.read_text(), "the operator is told", 30)  # type: ignore[union-attr]
        first = world.agents[site].log
        refused = "another program with this site's identity is connected"
        wait_until(lambda: refused in first.read_text(), "the older one is told", 30)
        ledgers = [folder / "ledger" / "000001.jsonl" for folder in (world.state / site, copy)]
        before = [len(ledger.read_text().splitlines()) for ledger in ledgers]
        connections = world.coordinator.log.read_text().count(" is connected from ")
        world.ask_coordinator("study", "start", study)
        assert world.finish(study)["state"] == "finished"  # by the younger one
        assert len(ledgers[0].read_text().splitlines()) == before[0]
        assert world.coordinator.log.read_text().count(" is connected from ") == connections
        (row,) = json.loads(world.ask_coordinator("sites", "--json"))["sites"]
        assert (row["site"], row["state"]) == (site, "ready") or row["state"] == "connected"
        assert row["copied_since"]
        assert second.stop() == 0
        wait_until(lambda: " connected to the coordinator" in tail_after(first, refused), "the older one is taken", 30)
    finally:
        second.kill()


def tail_after(log: Path, words: str) -> str:
    return log.read_text().rpartition(words)[2]
