"""A coordinator with honest sites and one that is not, for the tests of what a member may do to a model."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from coordinator.state_directory import State
from fl_algorithms.resolving import resolve
from tests.coordinator.conftest import Place
from tests.coordinator.fake_site import FakeSite, Update, write_initial
from tools.world import World
from wardround.local import control
from wardround.records.study import StudyFile
from wardround.tensors.manifests import TensorSpec

HONEST = ("alpha", "bravo", "charlie", "delta")
CROOK = "mallory"
WAIT_S = 20


def study_of(algorithm: str = "fedavg", **study: Any) -> dict[str, Any]:
    """Four honest sites and a fifth, of which four must answer."""
    tables = {
        "study": {"name": "trial", "sites": [*HONEST, CROOK], "quorum": 4, "rounds": 2, **study},
        "task": {"name": "tabular", "label": "y", "classes": ["0", "1"], "features": [{"name": "x"}]},
        "model": {"name": "mlp"},
        "algorithm": {"name": algorithm},
        "training": {"local_steps": 1},
    }
    return resolve(StudyFile.model_validate(tables)).document()


def honest_update(site: str, number: int, specs: tuple[TensorSpec, ...]) -> Update:
    """Values of about one tenth, 100 rows."""
    generator = np.random.default_rng([*site.encode(), number])
    tensors = tuple((spec, (0.1 * generator.standard_normal(spec.shape)).astype("<f4").tobytes()) for spec in specs)
    return Update(tensors, (("val_loss", "0.5"),), 100, 25)


class Federation:
    """A coordinator process with sites that speak to it over TLS; ``crook`` is one of them."""

    def __init__(self, world: World, document: dict[str, Any]) -> None:
        self._control = State(world.coordinator_state).control
        world.init()
        world.serve()
        self.world = world
        initial = world.state / "initial.safetensors"
        write_initial(initial)
        self.sites = {}
        for name in document["study"]["sites"]:
            self.sites[name] = FakeSite(self.ask("invite", site=name, expires_s=3600)["invitation"])
            self.sites[name].watch()
        self.ask("create", document=document, initial=str(initial), public_data=None)
        for site in self.sites.values():
            site.declare("trial")
        self.ask("start", study="trial")

    @property
    def crook(self) -> FakeSite:
        return self.sites[CROOK]

    def ask(self, command: str, **fields: Any) -> Any:
        return control.call(self._control, {"command": command, **fields}, timeout_s=WAIT_S)

    def honest_round(self) -> None:
        """Every honest site answers the assignment that it has."""
        for name in HONEST:
            site = self.sites[name]
            assignment = site.next_assignment()
            specs = site.specs("trial") if assignment.HasField("train") else ()
            assert site.answer(assignment, honest_update(name, assignment.round, specs)).decision == "accepted"

    def model(self) -> np.ndarray[Any, Any]:
        """All values of the newest model."""
        digest = self.ask("status", study="trial")["model_digest"]
        tensors = load_file(self.world.coordinator_state / "blobs" / "models" / f"{digest}.safetensors")
        return np.concatenate([tensor.reshape(-1) for _, tensor in sorted(tensors.items())])


@contextmanager
def federation(world: World, document: dict[str, Any]) -> Iterator[Federation]:
    found = Federation(world, document)
    try:
        yield found
    finally:
        for site in found.sites.values():
            site.close()


@contextmanager
def place(folder: Path) -> Iterator[Place]:
    """A coordinator in this process, whose files and database a test may damage."""
    found = Place(folder)
    try:
        yield found
    finally:
        found.close()
