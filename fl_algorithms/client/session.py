"""A site's part in a study, round by round: what the trainer runs at a hospital, and the lab in one process.

It touches no file and no network. The caller brings the downloaded tensors, carries away the deltas, keeps the
checkpoints, and stores ``export_state`` so that another process can go on with the next round bit for bit.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fl_algorithms import catalog
from fl_algorithms.client.algorithm import (
    Algorithm,
    Context,
    Downlink,
    algorithm_of,
    compute_logits,
    validation_loss,
)
from fl_algorithms.streams import stream_seed
from fl_algorithms.tasks.base import SiteData, Split, Task
from fl_algorithms.training import (
    Batches,
    Networks,
    Optimizers,
    Phase,
    Progress,
    make_deterministic,
    only_trainable,
    run_steps,
    seeded,
    trainable_parameters,
)
from wardround.errors import BadData
from wardround.study import StudyFile
from wardround.tensors import MODEL, TensorSpec

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


@dataclass(frozen=True)
class Stay:
    """A tensor that never leaves, and why."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    why: str


@dataclass(frozen=True)
class Partition:
    """Every tensor of a study at a site: those that leave, in the order of the payload, and those that stay."""

    leaves: tuple[TensorSpec, ...]
    stays: tuple[Stay, ...]


@dataclass(frozen=True)
class Checkpoint:
    """A model to be kept at the site.

    Attributes:
        kind: "latest", "best_local" or "best_global".
        round: the round whose model it is; of "best_local", for a method that judges models right after training, the
            round in which it was trained.
        tensors: all of the networks' tensors, private ones too; names as in a safetensors file.
        score: the headline ``metric`` on ``split``, "test" where the site has one, else "validation".
        val_loss: on the validation split.
        scores: every metric on ``split``; None where undefined.
    """

    kind: str
    round: int
    tensors: dict[str, Tensor]
    score: float | None
    metric: str
    split: str
    val_loss: float | None
    scores: dict[str, float | None]


@dataclass(frozen=True)
class RoundResult:
    """What a round gave. Counts and metrics are raw; the study's [told] says how they may be told.

    Attributes:
        uplink: bundle -> name -> float32 delta against the downloaded model; {} for a validation.
        num_examples: rows of the training split.
        num_validation: rows of the validation split.
        metrics: of the downloaded model, with the private parts, on the validation split; "val_loss" among them.
        checkpoints: to be kept now, in place of an older one of the same kind.
    """

    uplink: dict[str, dict[str, Tensor]]
    num_examples: int
    num_validation: int
    metrics: dict[str, float | None]
    checkpoints: tuple[Checkpoint, ...]


@dataclass(frozen=True)
class SessionState:
    """All that a site must keep between two rounds: tensors by name, and plain JSON without floats."""

    tensors: dict[str, Tensor]
    meta: dict[str, Any]


def describe(study: StudyFile, site: str) -> Partition:
    """What leaves ``site`` in a resolved study, and what stays. Needs torch, no data."""
    task = task_of(study)
    algorithm = algorithm_of(study)
    networks = _build(study, task, algorithm, site)
    leaves = _shared_specs(algorithm, networks)
    shared = {spec.key for spec in leaves}
    kept = tuple(
        Stay(spec.name, spec.dtype, spec.shape, spec.bytes, f"kept by {study.algorithm.name}")
        for spec in algorithm.keeps(networks)
    )
    private = tuple(
        Stay(key, DTYPES[tensor.dtype], tuple(tensor.shape), tensor.nbytes, _why_private(tensor, study.algorithm.name))
        for key, tensor in sorted(_all_tensors(networks).items())
        if key not in shared
    )
    return Partition(leaves, private + kept)


def initial_model(study: StudyFile) -> dict[str, Tensor]:
    """The shared tensors before the first round, by name as in a safetensors file, in the order of the payload."""
    task = task_of(study)
    algorithm = algorithm_of(study)
    networks = _build(study, task, algorithm, site="")
    tensors = _all_tensors(networks)
    return {spec.key: tensors[spec.key].detach().clone() for spec in _shared_specs(algorithm, networks)}


def predict(study: StudyFile, task: Task, checkpoint_tensors: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Probabilities (n, classes) of a checkpoint's model for ``x`` (n, features).

    Raises:
        BadData: the tensors are not those of the study's network.
    """
    algorithm = algorithm_of(study)
    networks = _build(study, task, algorithm, site="")
    _restore(_all_tensors(networks), checkpoint_tensors, "the checkpoint")
    return task.probabilities(compute_logits(algorithm, networks, x))


def task_of(study: StudyFile) -> Task:
    """The study's task, ready to read data."""
    settings, _, _ = catalog.settings_of(study)
    task: Task = catalog.load(catalog.task(study).implementation)(settings)
    return task


@dataclass(frozen=True)
class _Judgement:
    """The loss of a split, None where it is not finite, and the task's metrics."""

    loss: float | None
    metrics: dict[str, float | None]


class SiteSession:
    """One site in one resolved study.

    Rounds come in order, but one may be missed, and the last one may be run again after a restart from the state before
    it: the result is the same bits.
    """

    def __init__(
        self, study: StudyFile, site: str, task: Task, data: SiteData, state: SessionState | None = None
    ) -> None:
        """Set this process's torch to be deterministic, build the networks, and go on from ``state`` if given.

        Raises:
            BadData: ``state`` is of another study or another network.
        """
        make_deterministic(study.study.threads)
        algorithm = algorithm_of(study)
        networks = _build(study, task, algorithm, site)
        self._context = Context(
            study, site, catalog.settings_of(study)[2], task, data, algorithm, networks, Optimizers(study.training)
        )
        self._iterators: dict[str, dict[str, int]] = {}  # phase -> its place, where iterators live as long as the run
        self._best_loss: float | None = None
        self._best_pool = ""
        if state is not None:
            self._load(state)

    def train(self, round_number: int, base: Downlink, progress: Progress | None = None) -> RoundResult:
        """Round ``round_number`` (from 1): receive ``base``, judge it, train, and give what leaves.

        Args:
            base: the shared tensors of model ``round_number - 1``; read, never written.
            progress: told (steps done, steps in all) of each phase now and then.

        Raises:
            BadData: ``base`` is not the shared tensors.
        """
        context, algorithm = self._context, self._context.algorithm
        metrics, checkpoints = self._receive(round_number, base)
        algorithm.before_round(context)
        context.optimizers.begin_round()
        for phase in algorithm.phases(context):
            self._run(phase, progress)
        algorithm.after_round(context)
        checkpoints += self._compete(round_number, trained=True)
        uplink = algorithm.to_send(context)
        return self._result(uplink, metrics, checkpoints)

    def validate(self, round_number: int, base: Downlink) -> RoundResult:
        """The closing assignment, ``rounds + 1``: receive the last model and judge it. Nothing leaves but metrics."""
        metrics, checkpoints = self._receive(round_number, base)
        return self._result({}, metrics, checkpoints)

    def finish(self, best_round: int | None, best: Downlink | None) -> tuple[Checkpoint, ...]:
        """The best global checkpoint: ``best`` is model ``best_round``. Nothing for a method without a global model."""
        if best_round is None or best is None or not catalog.method(self._context.study).one_global_model:
            return ()
        context = self._context
        context.base = best
        context.algorithm.receive(context)
        judged = self._judge(context.networks, context.data.validation)
        return (self._checkpoint("best_global", best_round, context.networks, judged),)

    def export_state(self) -> SessionState:
        """Copies of all that the next round needs beside the download."""
        context = self._context
        shared = {spec.key for spec in _shared_specs(context.algorithm, context.networks)}
        tensors = {
            f"private/{key.replace('/', '.')}": tensor.detach().clone()
            for key, tensor in _all_tensors(context.networks).items()
            if key not in shared
        }
        tensors |= {f"optimizer/{key}": tensor for key, tensor in context.optimizers.export().items()}
        tensors |= {f"kept/{key}": tensor.detach().clone() for key, tensor in context.kept.items()}
        meta = {
            "algorithm": context.study.algorithm.name,
            "round": context.round_number,
            "best_pool": self._best_pool,
            "best_loss": None if self._best_loss is None else repr(self._best_loss),
            "iterators": {phase: dict(place) for phase, place in self._iterators.items()},
            "notes": dict(context.notes),
        }
        return SessionState(tensors, meta)

    def _load(self, state: SessionState) -> None:
        context, meta = self._context, state.meta
        if meta.get("algorithm") != context.study.algorithm.name:
            raise BadData(
                f"the kept state is of algorithm `{meta.get('algorithm')}`, the study's is "
                f"`{context.study.algorithm.name}`"
            )
        parts: dict[str, dict[str, Tensor]] = {"private": {}, "optimizer": {}, "kept": {}}
        for name, tensor in state.tensors.items():
            part, _, key = name.partition("/")
            if part not in parts:
                raise BadData(f"the kept state has a tensor `{name}` of no known part")
            parts[part][key] = tensor
        shared = {spec.key for spec in _shared_specs(context.algorithm, context.networks)}
        live = _all_tensors(context.networks)
        private = {key.replace("/", "."): tensor for key, tensor in live.items() if key not in shared}
        _restore(private, parts["private"], "the kept state")
        context.optimizers.load(parts["optimizer"])
        context.kept = {key: tensor.clone() for key, tensor in parts["kept"].items()}
        context.notes = dict(meta["notes"])
        context.round_number = meta["round"]
        self._iterators = {phase: dict(place) for phase, place in meta["iterators"].items()}
        self._best_pool = meta["best_pool"]
        self._best_loss = None if meta["best_loss"] is None else float(meta["best_loss"])

    def _receive(self, round_number: int, base: Downlink) -> tuple[dict[str, float | None], list[Checkpoint]]:
        """Load the download and judge it. The initial model is judged too, but is no checkpoint."""
        context = self._context
        context.round_number, context.base = round_number, base
        context.algorithm.receive(context)
        judged = self._judge(context.networks, context.data.validation)
        checkpoints: list[Checkpoint] = []
        if round_number > 1:
            checkpoints.append(self._checkpoint("latest", round_number - 1, context.networks, judged))
            checkpoints += self._compete(round_number - 1, trained=False)
        return {catalog.VAL_LOSS: judged.loss, **judged.metrics}, checkpoints

    def _compete(self, model_round: int, *, trained: bool) -> list[Checkpoint]:
        """Let the method's candidates compete to be the site's best. A later equal loss replaces."""
        best: list[Checkpoint] = []
        for candidate in self._context.algorithm.candidates(self._context, trained):
            judged = self._judge(candidate.networks, self._context.data.validation)
            if candidate.pool != self._best_pool:
                self._best_pool, self._best_loss = candidate.pool, None
            if judged.loss is not None and (self._best_loss is None or judged.loss <= self._best_loss):
                self._best_loss = judged.loss
                best = [self._checkpoint("best_local", model_round, candidate.networks, judged)]
        return best

    def _run(self, phase: Phase, progress: Progress | None) -> None:
        context, study = self._context, self._context.study
        place = self._iterators.setdefault(phase.name, {}) if study.training.iterator == "run" else {}
        train = context.data.train
        batches = Batches(train.x, train.y, study, context.site, context.round_number, phase.name, place)
        parameters = trainable_parameters(context.networks, phase.trainable)
        optimizer = context.optimizers.get(phase.optimizer, parameters)
        purpose = f"noise.{phase.name}" if phase.name else "noise"
        noise = stream_seed(study.study.seed, context.site, context.round_number, purpose)
        after_backward, after_step = context.algorithm.after_backward, context.algorithm.after_step
        with seeded(noise), only_trainable(context.networks, parameters):
            run_steps(
                batches,
                _steps(phase, study, batches.per_epoch),
                optimizer,
                lambda batch: context.algorithm.loss(context, batch),
                None if after_backward is None else lambda: after_backward(context),
                None if after_step is None else lambda: after_step(context),
                progress,
            )

    def _judge(self, networks: Networks, split: Split) -> _Judgement:
        context = self._context
        logits = compute_logits(context.algorithm, networks, split.x)
        loss = validation_loss(logits, split, context.task, context.study)
        return _Judgement(loss if math.isfinite(loss) else None, context.task.metrics(logits, split.y))

    def _checkpoint(self, kind: str, model_round: int, networks: Networks, judged: _Judgement) -> Checkpoint:
        """The networks as they are now. ``judged`` is what the validation split said of them."""
        data, metric = self._context.data, self._context.task.headline
        scores = judged.metrics if data.test is None else self._judge(networks, data.test).metrics
        tensors = {key: tensor.detach().clone() for key, tensor in _all_tensors(networks).items()}
        split = "validation" if data.test is None else "test"
        return Checkpoint(kind, model_round, tensors, scores[metric], metric, split, judged.loss, scores)

    def _result(
        self, uplink: dict[str, dict[str, Tensor]], metrics: dict[str, float | None], checkpoints: list[Checkpoint]
    ) -> RoundResult:
        data = self._context.data
        return RoundResult(uplink, len(data.train.y), len(data.validation.y), metrics, tuple(checkpoints))


def _steps(phase: Phase, study: StudyFile, per_epoch: int) -> int:
    if phase.steps is not None:
        return phase.steps
    if phase.epochs is not None:
        return phase.epochs * per_epoch
    if study.training.local_steps is not None:
        return study.training.local_steps
    return (study.training.local_epochs or 0) * per_epoch


def _build(study: StudyFile, task: Task, algorithm: Algorithm, site: str) -> dict[str, nn.Module]:
    """The networks as they start: shared parts equal everywhere, private parts the site's own.

    Each slot has its own stream. ``site = ""`` gives what all sites have in common.
    """
    networks = {}
    for slot, builder in algorithm.slots.items():
        purpose = "init" if slot == MODEL else f"init.{slot}"
        with seeded(stream_seed(study.study.seed, "", 0, purpose)):
            networks[slot] = builder(study, task).eval()
    shared = {spec.key for spec in _shared_specs(algorithm, networks)}
    if not site or study.training.init_private == "common" or shared == _all_tensors(networks).keys():
        return networks
    for slot, builder in algorithm.slots.items():
        purpose = "init" if slot == MODEL else f"init.{slot}"
        with seeded(stream_seed(study.study.seed, site, 0, purpose)):
            own = builder(study, task)
        mine = _all_tensors({slot: networks[slot]})
        values = _all_tensors({slot: own})
        with torch.no_grad():
            for key in mine.keys() - shared:
                mine[key].copy_(values[key])
    return networks


def _all_tensors(networks: Networks) -> dict[str, Tensor]:
    """Every parameter and buffer, live; those of the slot "model" by their own name, others as "SLOT/NAME"."""
    return {
        name if slot == MODEL else f"{slot}/{name}": tensor
        for slot, network in networks.items()
        for name, tensor in network.state_dict().items()
    }


def _shared_specs(algorithm: Algorithm, networks: Networks) -> tuple[TensorSpec, ...]:
    """What leaves, in the order in which safetensors writes float32 tensors: by key."""
    specs = [
        TensorSpec(name, DTYPES[tensor.dtype], tuple(tensor.shape), share.bundle)
        for share in algorithm.shares
        for name, tensor in share.tensors(networks).items()
    ]
    return tuple(sorted(specs, key=lambda spec: spec.key))


def _why_private(tensor: Tensor, algorithm: str) -> str:
    if not tensor.dtype.is_floating_point:
        return "an integer buffer never travels"
    return f"private in {algorithm}"


def _restore(live: Mapping[str, Tensor], values: Mapping[str, Tensor], source: str) -> None:
    """Copy ``values`` into ``live``, which must have the same names, shapes and dtypes."""
    if live.keys() != values.keys():
        odd = sorted(live.keys() ^ values.keys())[0]
        where = "is missing" if odd in live else "belongs to no tensor of this network"
        raise BadData(f"{source} does not fit the study's network: `{odd}` {where}")
    with torch.no_grad():
        for name, tensor in live.items():
            found = values[name]
            if found.shape != tensor.shape or found.dtype != tensor.dtype:
                raise BadData(
                    f"{source} does not fit the study's network: `{name}` is {DTYPES.get(found.dtype, '?')} "
                    f"{list(found.shape)}, the network's is {DTYPES[tensor.dtype]} {list(tensor.shape)}"
                )
            tensor.copy_(found)
