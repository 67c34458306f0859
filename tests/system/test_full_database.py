"""A database server whose disk is full in the middle of a study: nothing is lost, and the study goes on by itself."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from tests.coordinator.postgres import Postgres, missing
from tests.system.conftest import BREAST, lab_run, label_of, sites_of
from tests.system.test_faults import study_file
from tools import evidence_disk
from tools.world import Service, World, wait_until

SITES = sites_of(BREAST)[:2]
ROUNDS = 40
ROOM = 200 * 1024 * 1024  # an empty cluster, its databases and its log
SETTINGS = ("wal_recycle=off", "min_wal_size=2MB", "max_wal_size=16MB")
SAID = {"tables": "the server has no room (53100); free some space there", "log": "cannot be reached now"}
pytestmark = [
    pytest.mark.system,
    pytest.mark.chaos,
    pytest.mark.skipif(missing() and not os.environ.get("CI"), reason="no PostgreSQL server is installed"),
    pytest.mark.skipif(not evidence_disk.available(), reason="no right to mount a tmpfs"),
]


class OnAServer(World):
    """A coordinator whose database is on a server."""

    def __init__(self, state: Path, url: str) -> None:
        super().__init__(state)
        self.url = url

    def init(self) -> None:
        self.ask_coordinator("init", "--federation", "demo", "--address", self.address, "--database", self.url)

    def tend(self) -> Service:
        """As a service manager does: start the coordinator again if it has ended, unless it waits for a person."""
        assert self.coordinator is not None
        code = self.coordinator.process.poll()
        if code is not None:
            assert code not in (64, 65, 77, 78), self.coordinator.tail(8)
            self.coordinator = Service(
                self.logs / "coordinator.log", "coordinator", "serve", "--state", self.coordinator_state
            )
        return self.coordinator

    @property
    def log(self) -> str:
        return (self.logs / "coordinator.log").read_text()


@pytest.fixture
def disks() -> Iterator[dict[str, Path]]:
    """A disk for the server's tables, and one for its write-ahead log, where the server's own user may go."""
    with tempfile.TemporaryDirectory(prefix="wardround-disks-") as place:
        Path(place).chmod(0o755)
        found = {name: Path(place) / name for name in ("tables", "log")}
        for folder in found.values():
            folder.mkdir()
        with evidence_disk.small_disk(found["tables"], ROOM), evidence_disk.small_disk(found["log"], ROOM):
            yield found


@pytest.mark.parametrize("full", ["tables", "log"])
def test_a_database_server_without_room_costs_no_update(
    full: str, disks: dict[str, Path], breast_data: Path, tmp_path: Path
) -> None:
    """Without room for its tables the server refuses statements; without room for its log it ends."""
    with Postgres(disks["tables"], disks["log"]) as server:
        server.stop("fast")
        server.start(*SETTINGS)
        with OnAServer(tmp_path, server.new_database()) as world:
            world.start(breast_data, label_of(BREAST), SITES)
            file = study_file(tmp_path, sites=SITES, quorum=2, rounds=ROUNDS)
            study = world.create_study(file)
            world.approve(study, SITES)
            world.ask_coordinator("study", "start", study)
            wait_until(lambda: world.study_status(study)["round"] >= 2, "round 2", 120)

            evidence_disk.fill(disks[full], 0)
            wait_until(lambda: ran_out_of_room(server, full), "the server has run out of room", 90)
            wait_until(lambda: world.tend() and SAID[full] in world.log, "the coordinator says so", 60)
            (disks[full] / "ballast").unlink()
            if server.process is None or server.process.poll() is not None:
                server.process = None
                server.start(*SETTINGS)

            def finished() -> bool:
                world.tend()
                status = world.study_status(study, ok=(0, 3, 69, 75))
                if status["state"] == "paused":
                    world.ask_coordinator("study", "start", study)
                return bool(status["state"] == "finished")

            wait_until(finished, "the study is finished", 240)
            assert world.study_status(study)["model_digest"] == lab_run(file, breast_data)["digests"][0]
            assert "Traceback" not in world.log
            for site in SITES:
                world.heard(site, study)
                assert world.site_json(site, "audit", "verify", "--ask", ok=(0, 2))["complete"]


def ran_out_of_room(server: Postgres, full: str) -> bool:
    """Whether it has met its full disk. Its log is made to need a new segment, which it creates on that disk."""
    if full == "log":
        try:
            server.execute("SELECT pg_switch_wal()")
        except psycopg.OperationalError:
            return True
    return "No space left on device" in (server.folder / "log").read_text(errors="replace")
