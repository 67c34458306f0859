"""A coordinator and its standby on one PostgreSQL server, with real sites that know one name of two addresses."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.coordinator.conftest import postgres
from tests.coordinator.postgres import Postgres
from tests.system.conftest import BREAST, lab_run, label_of, sites_of
from tests.system.test_faults import study_file
from tools.world import Service, World, command, free_port, wait_until

__all__ = ["postgres"]
SITES = sites_of(BREAST)[:2]
ADDRESSES = ("127.0.0.1", "[::1]")
pytestmark = [pytest.mark.system, pytest.mark.chaos]


class Pair(World):
    """Two coordinators, of which one serves. Commands go to the one that does."""

    def __init__(self, state: Path, url: str) -> None:
        super().__init__(state)
        self.port = free_port()
        self.address = f"localhost:{self.port}"
        self.url = url
        self.states = (state / "first", state / "second")
        self.running: dict[Path, Service] = {}
        self.coordinator_state = self.states[0]

    def init(self) -> None:
        shared = self.state / "shared"
        self.ask_coordinator(
            "init", "--federation", "demo", "--address", self.address, "--database", self.url, "--blobs", shared
        )
        settings = self.states[0] / "config.toml"
        settings.write_text(settings.read_text() + "lease_s = 3\n")  # its last table is [storage]
        secret, sealed = self.state / "passphrase", self.state / "standby.bin"
        secret.write_text("a passphrase of some length\n")
        self.ask_coordinator("standby", "export", "--out", sealed, "--passphrase", secret)
        command("coordinator", "standby", "import", sealed, "--state", self.states[1], "--passphrase", secret)

    def serve(self) -> Service:
        """The leader, and its standby."""
        self.coordinator = self.begin(self.states[0])
        self.coordinator.wait_line("ready")
        self.begin(self.states[1]).wait_line("standby, waiting")
        return self.coordinator

    def begin(self, state: Path) -> Service:
        listen = f"{ADDRESSES[self.states.index(state)]}:{self.port}"
        service = Service(self.logs / f"{state.name}.log", "coordinator", "serve", "--state", state, "--listen", listen)
        self.running[state] = service
        return service

    def kill_the_leader(self) -> None:
        """The other one takes over, and the one that was killed comes back as its standby."""
        killed = self.coordinator_state
        other = next(state for state in self.states if state != killed)
        self.running[killed].kill()
        self.coordinator_state, self.coordinator = other, self.running[other]
        self.coordinator.wait_line("ready")
        self.begin(killed).wait_line("standby, waiting")

    def __exit__(self, *exception: object) -> None:
        for service in self.running.values():
            service.kill()
        self.coordinator = None
        super().__exit__(*exception)


@pytest.fixture
def pair(tmp_path: Path, postgres: Postgres) -> Iterator[Pair]:
    with Pair(tmp_path, postgres.new_database()) as pair:
        yield pair


def test_each_leader_is_killed_once_and_the_model_is_that_of_the_lab(
    pair: Pair, breast_data: Path, tmp_path: Path
) -> None:
    """No receipt is lost: each site's ledger and the coordinator's receipts are complete beside each other."""
    pair.start(breast_data, label_of(BREAST), SITES)
    file = study_file(tmp_path, sites=SITES, quorum=2)
    study = pair.create_study(file)
    pair.approve(study, SITES)
    pair.ask_coordinator("study", "start", study)
    for reached in (2, 4):
        wait_until(lambda r=reached: pair.study_status(study)["round"] >= r, f"round {reached}", 120)
        pair.kill_the_leader()
    status = pair.finish(study)
    assert status["state"] == "finished"
    assert status["model_digest"] == lab_run(file, breast_data)["digests"][0]
    for site in SITES:
        pair.heard(site, study)
        assert pair.site_json(site, "audit", "verify", "--ask", ok=(0, 2))["complete"]
