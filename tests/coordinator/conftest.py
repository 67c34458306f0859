"""A coordinator on loopback inside the test process, with sites that speak the real protocol to it."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import grpc
import pytest

from coordinator import state_directory as places
from coordinator.calls import Bounds
from coordinator.server import Coordinator
from coordinator.state_directory import State, Storage
from fl_algorithms.resolving import resolve
from tests.coordinator.fake_site import FakeSite, write_initial
from tests.coordinator.postgres import Postgres, missing
from tools.world import free_port
from wardround import rpc
from wardround.records.study import StudyFile

WAIT_S = 60
SITES = ("alpha", "bravo", "charlie")


def study_document(**study: Any) -> dict[str, Any]:
    """A resolved study of three sites and two rounds, with some keys of [study] replaced."""
    tables: dict[str, Any] = {
        "study": {"name": "trial", "sites": list(SITES), "rounds": 2, "round_deadline_s": 60, **study},
        "task": {"name": "tabular", "label": "y", "classes": ["0", "1"], "features": [{"name": "x"}]},
        "model": {"name": "mlp"},
        "algorithm": {"name": "fedavg"},
        "training": {"local_steps": 1},
    }
    if secure := tables["study"].pop("secure_aggregation", None):
        tables |= {"secure_aggregation": secure, "limits": {"max_weight": 1.0}}
    return resolve(StudyFile.model_validate(tables)).document()


class Place:
    """One state directory, the coordinator that serves it, and its sites."""

    def __init__(self, folder: Path, storage: Storage = Storage()) -> None:
        self.state = State(folder / "state")
        self.address = f"127.0.0.1:{free_port()}"
        self.initial = folder / "initial.safetensors"
        self.specs = write_initial(self.initial)
        self.failures: list[BaseException] = []
        self.sites: dict[str, FakeSite] = {}
        self.ahead_s = 0.0
        places.create(self.state, "north", self.address, time.time(), storage)
        self.coordinator = self.serve()

    def serve(self) -> Coordinator:
        self.coordinator = Coordinator(
            self.state, fatal=self.failures.append, wall_clock=lambda: time.time() + self.ahead_s
        )
        self.coordinator.start()
        return self.coordinator

    def bound(self, **bounds: float) -> None:
        """Other bounds than a coordinator's own, of the calls that begin from now on."""
        self.coordinator.calls.bounds = replace(Bounds(), **bounds)  # type: ignore[arg-type]

    def restart(self) -> None:
        self.coordinator.stop()
        self.serve()

    def ask(self, command: str, **fields: Any) -> Any:
        return self.coordinator.administration.run({"command": command, **fields}, lambda item: None)

    def invite(self, site: str) -> str:
        return str(self.ask("invite", site=site, expires_s=3600)["invitation"])

    def join(self, site: str) -> FakeSite:
        self.sites[site] = FakeSite(self.invite(site))
        self.sites[site].watch()
        return self.sites[site]

    def create(self, **study: Any) -> str:
        document = study_document(**study)
        return str(self.ask("create", document=document, initial=str(self.initial))["id"])

    def begin(self, **study: Any) -> list[FakeSite]:
        """All sites joined, connected and ready, and the study started."""
        sites = [self.join(site) for site in study.get("sites", SITES)]
        name = self.create(**study)
        for site in sites:
            site.declare(name)
        self.ask("start", study=name)
        return sites

    def status(self, study: str = "trial") -> dict[str, Any]:
        return dict(self.ask("status", study=study))

    def until(self, true: Callable[[dict[str, Any]], bool], study: str = "trial") -> dict[str, Any]:
        """The status as soon as ``true`` holds; woken by each change of the study."""
        changes = self.coordinator.engine.follow(study)
        deadline = time.monotonic() + WAIT_S
        try:
            while not true(status := self.status(study)):
                changes.wait(timeout_s=max(0.0, deadline - time.monotonic()))
        finally:
            self.coordinator.engine.unfollow(changes)
        return status

    def close(self, *, broken: bool = False) -> None:
        """Stop all of it. ``broken``: the test broke the database, which calls under way may meet until the end."""
        for site in self.sites.values():
            site.close()
        self.coordinator.stop()
        assert broken or not self.failures


@contextmanager
def refused(said: str) -> Iterator[None]:
    """The block's call is refused. ``said``: the code, which is all that the caller hears; then the coordinator's words
    for itself, or their beginning."""
    code, _, sentence = said.partition("\n")
    with mock.patch.object(rpc, "abort", wraps=rpc.abort) as abort, pytest.raises(grpc.RpcError) as caught:
        yield
    assert caught.value.details() == code
    assert [call.args[1].message for call in abort.call_args_list if call.args[1].message.startswith(sentence)]


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """A PostgreSQL server of these tests' own."""
    if missing() and not os.environ.get("CI"):
        pytest.skip("no PostgreSQL server is installed")
    with Postgres() as server:
        yield server


@pytest.fixture
def place(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Place]:
    """Its database is a file; where a test wears ``on_both``, or WARDROUND_TEST_STORE is "server", one on a server."""
    storage = Storage()
    if getattr(request, "param", os.environ.get("WARDROUND_TEST_STORE", "file")) == "server":
        storage = Storage(database=request.getfixturevalue("postgres").new_database())
    place = Place(tmp_path, storage)
    try:
        yield place
    finally:
        place.close()


on_both = pytest.mark.parametrize("place", ["file", "server"], indirect=True)
on_file = pytest.mark.parametrize("place", ["file"], indirect=True)  # a test that copies the database with the folder
on_server = pytest.mark.parametrize("place", ["server"], indirect=True)
