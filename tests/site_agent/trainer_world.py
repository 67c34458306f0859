"""A hospital in a folder: a small table, a small study, and what the gateway would put into staging."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch

from fl_algorithms.engine.partition import initial_model
from fl_algorithms.resolving import resolve
from fl_algorithms.study import ResolvedStudy
from site_agent.trainer.data import inspection, sources
from site_agent.trainer.requests import Requests
from wardround.records.study import StudyFile
from wardround.records.trainer import DataFiles, request_from
from wardround.tensors.files import TensorFile

STUDY_DIGEST = "5d" * 32
NAME = "small"
NETWORKS = {
    "fedavg": {"name": "mlp", "hidden": [4]},
    "fedsoup": {"name": "mlp", "hidden": [4]},
    "fenda": {"name": "fenda", "shared_hidden": [3], "private_hidden": [2]},
}


def small_study(algorithm: str = "fenda", **study: Any) -> ResolvedStudy:
    """Two numbers, two classes, four rounds of five steps."""
    tables = {
        "study": {"name": NAME, "sites": ["north", "south"], "rounds": 4, "seed": 7, **study},
        "task": {
            "name": "tabular",
            "label": "ill",
            "classes": ["no", "yes"],
            "features": ["age", "dose"],
            "headline": "accuracy",
        },
        "model": NETWORKS[algorithm],
        "algorithm": {"name": algorithm},
        "training": {"local_steps": 5, "batch_size": 8},
        "reported": {"metrics": ["val_loss", "accuracy"], "digits": 4},
    }
    return resolve(StudyFile.model_validate(tables))


def write_table(path: Path, rows: int, seed: int) -> Path:
    draw = random.Random(seed)
    lines = ["age,dose,ill,nurse"]
    for _ in range(rows):
        age, dose = draw.uniform(20, 90), draw.gauss(0, 1)
        ill = "yes" if age / 40 + dose > 1.4 else "no"
        lines.append(f"{age:.1f},{dose:.3f},{ill},Ines")
    path.write_text("\n".join(lines) + "\n")
    return path


@dataclass
class Hospital:
    """``requests`` answers in this process; what a worker would say, without the worker."""

    state: Path
    table: Path
    test: Path
    study: ResolvedStudy
    requests: Requests

    @classmethod
    def make(cls, folder: Path, algorithm: str = "fenda") -> "Hospital":
        state = folder / "state"
        for name in ("staging", "studies", "offers", "identity"):
            (state / name).mkdir(parents=True)
        table, test = write_table(folder / "train.csv", 60, seed=1), write_table(folder / "test.csv", 20, seed=2)
        hospital = cls(state, table, test, small_study(algorithm), Requests(state))
        hospital.name_data()
        return hospital

    def name_data(self) -> None:
        fields = {"table": str(self.table), "test": str(self.test), "label": "ill"}
        source = sources.DataSource(**fields, digest=inspection.inspect(DataFiles(**fields)).digest)
        sources.add(self.state, "patients", source, replace=True)

    @property
    def document(self) -> dict[str, Any]:
        return self.study.document()

    def stage_base(self, name: str = "base.safetensors", scale: float = 1.0) -> str:
        """Put a model into staging as the gateway does, and return its digest."""
        tensors = {key: tensor * scale for key, tensor in sorted(initial_model(self.study).items())}
        safetensors.torch.save_file(tensors, self.state / "staging" / name)
        with TensorFile(self.state / "staging" / name) as file:
            return file.manifest().digest()

    def round(self, number: int, command: str = "train", **replaced: Any) -> dict[str, Any]:
        """The gateway's request, as it is sent, of a round whose base is the initial model over the round's number."""
        base = f"base-{number}.safetensors"
        request = {
            "command": command, "study": self.document, "revision": 1, "study_digest": STUDY_DIGEST, "site": "north",
            "round": number, "base": base, "base_digest": self.stage_base(base, 1 / number),
            "data": {"name": "patients", "digest": sources.sources(self.state)["patients"].digest},
        }  # fmt: skip
        return {**request, **replaced}

    def ask(self, command: str, **fields: Any) -> dict[str, Any]:
        """A request and its answer, both as they are on the socket."""
        return self.answer({**fields, "command": command})

    def answer(self, document: dict[str, Any]) -> dict[str, Any]:
        return self.requests.answer(request_from(document), lambda _: None).to_document()

    def train(self, number: int, **replaced: Any) -> dict[str, Any]:
        return self.answer(self.round(number, **replaced))

    def commit(self, number: int) -> None:
        self.ask("commit", study=NAME, revision=1, round=number)

    def discard(self, number: int) -> None:
        self.ask("discard", study=NAME, revision=1, round=number)

    def update_digest(self, answer: dict[str, Any]) -> str:
        with TensorFile(self.state / "staging" / answer["update"]) as file:
            return file.manifest().digest()

    def restarted(self) -> "Hospital":
        """The same hospital after its worker was ended and started again."""
        return Hospital(self.state, self.table, self.test, self.study, Requests(self.state))
