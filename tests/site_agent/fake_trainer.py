"""A trainer for the gateway's tests: answers on the real socket, with files that tests prescribe."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from wardround.errors import TryAgain, WardroundError
from wardround.local import control, durable
from wardround.records.trainer.failures import own_code
from wardround.tensors.files import TensorFile, file_header
from wardround.tensors.manifests import TensorSpec

SHARED = (TensorSpec("shared.weight", "F32", (64, 64)), TensorSpec("shared.bias", "F32", (64,)))
STAYS = [{"name": "private.weight", "dtype": "F32", "shape": [8, 8], "bytes": 256, "why": "private"}]
WAIT_S = 60


def write_tensors(path: Path, specs: tuple[TensorSpec, ...], seed: int, poison: str = "") -> Path:
    """A safetensors file of random float32; ``poison`` names a tensor that gets one nan."""
    random = np.random.default_rng(seed)
    pieces = [file_header(specs)]
    for spec in specs:
        values = random.standard_normal(spec.shape).astype("<f4")
        if spec.name == poison:
            values.flat[0] = np.nan
        pieces.append(values.tobytes())
    durable.write_file(path, pieces)
    return path


def leaf(spec: TensorSpec) -> dict[str, Any]:
    shape = list(spec.shape)
    return {"bundle": spec.bundle, "name": spec.name, "dtype": spec.dtype, "shape": shape, "bytes": spec.bytes}


class FakeTrainer:
    """Records what it is asked. ``specs`` is what its model shares; ``metrics`` what a round tells."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self.uid = 1234
        self.specs = SHARED
        self.described: tuple[TensorSpec, ...] = SHARED
        self.comes: tuple[TensorSpec, ...] | None = None  # None: what is described as leaving
        self.exposure = ""
        self.apart = ""
        self.network = ""
        self.common = ""
        self.weights: dict[str, Any] | None = None
        self.metrics: dict[str, str] = {"val_loss": "0.5"}
        self.own_loss = ""
        self.train_rows = 80
        self.num_examples: Any = 80  # of the 100 rows that ``_check`` says, as a trainer tells them that is honest
        self.num_validation: Any = 20
        self.poison = ""
        self.digest = "ab" * 32
        self.seen = "a5" * 32
        self.missing: list[str] = []
        self.unreadable: list[WardroundError] = []  # what the next looks at data end with
        self.misfits: list[dict[str, Any]] = []  # what of the data does not fit
        self.summary: dict[str, Any] = {}  # what it makes of the table for a summary request
        self.before_check: Callable[[], object] = lambda: None
        self.failure: WardroundError | None = None
        self.dies: list[WardroundError] = []  # of the next rounds, how each of them fails
        self.deaf = threading.Event()  # while set, nothing is answered
        self.says: Any = None  # instead of any answer
        self.progress: list[Any] = []  # what a round's training tells on its way
        self.honest = True  # else its failures have codes that are not its own
        self.asked: list[dict[str, Any]] = []
        self.bases: list[str] = []
        self.hold = threading.Event()  # while set, training does not end by itself
        self.aborted = threading.Event()
        self.heard = threading.Event()  # ends what is not answered
        self.changed = threading.Condition()
        self._server = control.ControlServer(state / "staging" / "trainer.sock", self.answer)

    def close(self) -> None:
        self.aborted.set()
        self.heard.set()
        self._server.close()

    def commands(self, *names: str) -> list[dict[str, Any]]:
        with self.changed:
            return [request for request in self.asked if request["command"] in names]

    def wait_committed(self, round_: int) -> None:
        """A round may be told twice, so their number says nothing."""
        with self.changed:
            told = self.changed.wait_for(
                lambda: any((one["command"], one.get("round")) == ("commit", round_) for one in self.asked),
                timeout=WAIT_S,
            )
        if not told:
            raise TimeoutError(f"the trainer did not hear that round {round_} was accepted")

    def wait_asked(self, command: str, count: int = 1) -> list[dict[str, Any]]:
        with self.changed:
            done = self.changed.wait_for(
                lambda: sum(request["command"] == command for request in self.asked) >= count, timeout=WAIT_S
            )
        if not done:
            raise TimeoutError(f"the trainer was not asked to {command} {count} times")
        return self.commands(command)

    def answer(self, request: dict[str, Any], progress: Callable[[Any], None]) -> Any:
        with self.changed:
            self.asked.append(request)
            self.changed.notify_all()
        if self.deaf.is_set():
            self.heard.wait(WAIT_S)
        if self.says is not None:
            return self.says
        for step in self.progress if request["command"] == "train" else ():
            progress(step.model_dump())
        try:
            return getattr(self, "_" + request["command"])(request)
        except WardroundError as error:
            if self.honest:
                error.code = own_code(error)
            raise

    def _describe(self, request: dict[str, Any]) -> dict[str, Any]:
        comes = self.described if self.comes is None else self.comes
        return {
            "upload": [leaf(spec) for spec in self.described], "download": [leaf(spec) for spec in comes],
            "exposure": self.exposure, "personalized": self.apart, "private": STAYS, "network": self.network,
            "model": "mlp", "parameters": 4224, "weights": self.weights,
        }  # fmt: skip

    def _inspect(self, request: dict[str, Any]) -> dict[str, Any]:
        if self.unreadable:
            raise self.unreadable.pop(0)
        return {
            "digest": self.digest, "rows": 100, "test_rows": None, "columns": 3, "patients": None, "forms": {},
            "weights": "",
        }  # fmt: skip

    def _check(self, request: dict[str, Any]) -> dict[str, Any]:
        self.before_check()
        return {
            "digest": self.digest, "rows": 100, "train_rows": self.train_rows, "validation_rows": 100 - self.train_rows,
            "test_rows": None,
            "gives": "columns", "classes": {}, "warnings": ["one class"], "common": self.common,
            "weights": self.weights, "status": {"data": self.seen, "weights": ""},
        }  # fmt: skip

    def _examine(self, request: dict[str, Any]) -> dict[str, Any]:
        if self.misfits:
            return {"findings": self.misfits, "more": 0, "checked": None}
        return {"findings": [], "more": 0, "checked": self._check(request)}

    def _summarize(self, request: dict[str, Any]) -> dict[str, Any]:
        return self.summary

    def _stat_files(self, request: dict[str, Any]) -> dict[str, Any]:
        status = {"data": self.seen, "weights": ""}
        return {"status": status, "bytes": 10, "missing": self.missing, "unreadable": []}

    def _hash_files(self, request: dict[str, Any]) -> dict[str, Any]:
        return {"data": self.digest, "weights": ""}

    def _train(self, request: dict[str, Any]) -> dict[str, Any]:
        if self.failure is not None:
            raise self.failure
        if self.dies:
            raise self.dies.pop(0)
        with TensorFile(self.state / "staging" / request["base"]) as base:
            self.bases.append(base.manifest().digest())
        if self.hold.is_set():
            self.aborted.wait(WAIT_S)
            raise TryAgain("the worker ended", code="DECLINED_TRAINING_FAILED")
        name = f"update-{request['study']['study']['name']}-{request['round']}.safetensors"
        write_tensors(self.state / "staging" / name, self.specs, request["round"], self.poison)
        return {"update": name, **self._numbers()}

    def _validate(self, request: dict[str, Any]) -> dict[str, Any]:
        return self._numbers()

    def _numbers(self) -> dict[str, Any]:
        counts = {"num_examples": self.num_examples, "num_validation": self.num_validation}
        return {**counts, "metrics": self.metrics, "own_loss": self.own_loss}

    def _commit(self, request: dict[str, Any]) -> dict[str, Any]:
        return {}

    _discard = _commit

    def _finish(self, request: dict[str, Any]) -> dict[str, Any]:
        if request["best"]:
            assert (self.state / "staging" / request["best"]["file"]).is_file()
        return {}

    def _status(self, request: dict[str, Any]) -> dict[str, Any]:
        in_force = {"isolation": "network-namespace", "missing": []}
        return {**in_force, "user": "trainer", "uid": self.uid, "worker": None, "device": "cpu"}

    def _abort(self, request: dict[str, Any]) -> dict[str, Any]:
        self.aborted.set()
        return {}
