"""A site's part in a study, round by round: what the trainer runs at a hospital, and the lab in one process.

It touches no file and no network. The caller brings the downloaded tensors, carries away the deltas, keeps the
checkpoints, and stores ``export_state`` so that another process can go on with the next round bit for bit.
"""

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from fl_algorithms.engine.algorithm import Context, Downlink, algorithm_of, compute_logits, fit_outputs, judged
from fl_algorithms.engine.device import CPU, Device, at_home, make_deterministic, seen_at_home
from fl_algorithms.engine.encoding import Encoder
from fl_algorithms.engine.fine_tuning import fine_tuned
from fl_algorithms.engine.judging import reduced_loss
from fl_algorithms.engine.partition import all_tensors, build, download_specs, restore, upload_specs
from fl_algorithms.engine.phases import refuse_single_rows, run_phase
from fl_algorithms.engine.taking import downloaded, taken
from fl_algorithms.engine.training import Networks, Optimizers, Phase, Progress, Watch, flat_key
from fl_algorithms.methods.settings import FineTuning
from fl_algorithms.rows import VAL_LOSS
from fl_algorithms.study import ResolvedStudy, SiteStudy
from fl_algorithms.tasks.base import Classifies, Inputs, SiteData, Split, Task, samples
from wardround.errors import BadData


@dataclass(frozen=True)
class Checkpoint:
    """A model to be kept at the site.

    Attributes:
        kind: "latest", "best_local", "best_global" or "fine_tuned"; "alone", see ``beside``; "selected", see
            ``selection``.
        round: the round whose model it is; of "best_local", for a method that judges models right after training, the
            round in which it was trained.
        tensors: all of the networks' tensors, private ones too; names as in a safetensors file.
        fit: what ``Task.fit_outputs`` gave for it: a threshold, a baseline hazard. It stays at the site.
        score: the headline ``metric`` on ``split``, "test" where the site has one, else "validation".
        val_loss: on the validation split.
        scores: every metric on ``split``; None where undefined. {} where the session scores none at once.
        why: of "selected", the reason in words.
    """

    kind: str
    round: int
    tensors: dict[str, Tensor]
    score: float | None
    metric: str
    split: str
    val_loss: float | None
    scores: dict[str, float | None]
    fit: dict[str, Any] = field(default_factory=dict)
    why: str = ""


@dataclass(frozen=True)
class RoundResult:
    """What a round gave. Counts and metrics are raw; the study's [reported] says how they are reported.

    Attributes:
        uplink: bundle -> name -> float32 delta against the downloaded model, or what stands for it in the study's
            encoding; {} for a validation.
        num_examples: rows of the training split; of pieces of images, the images.
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
    """All that a site must keep between two rounds: tensors by name, on the CPU, and plain JSON without floats."""

    tensors: dict[str, Tensor]
    meta: dict[str, Any]


class Restored:
    """A model of a study out of a checkpoint's tensors, to be asked about any rows.

    ``study`` is that of the site whose checkpoint it is.
    """

    def __init__(self, study: SiteStudy, task: Task, tensors: Mapping[str, Tensor], device: Device = CPU) -> None:
        """Raises BadData: the tensors are not those of the study's network."""
        self.algorithm = algorithm_of(study)
        self._task = task
        self.networks = build(study, task, self.algorithm, site="")
        device.place(self.networks)
        restore(all_tensors(self.networks), tensors, "the checkpoint")

    def logits(self, x: Inputs, tell: Callable[[int], object] = lambda rows: None) -> Tensor:
        """(n, outputs) for ``x`` (n, features). ``tell``: as ``compute_logits``."""
        return compute_logits(self.algorithm, self.networks, x, tell)

    def metrics(self, split: Split) -> dict[str, float | None]:
        """The task's, of all rows of ``split``."""
        return judged(self.algorithm, self.networks, split, self._task).metrics()

    def probabilities(self, x: Inputs) -> Tensor:
        """(n, classes) for ``x`` (n, features). For a task of classes."""
        assert isinstance(self._task, Classifies)
        return self._task.probabilities(self.logits(x))


@dataclass(frozen=True)
class OpenRound:
    """A round between its download and its upload.

    Attributes:
        phases: to be trained, in this order.
        metrics: of the downloaded model.
        checkpoints: of the downloaded model.
    """

    context: Context
    phases: tuple[Phase, ...]
    metrics: dict[str, float | None]
    checkpoints: list[Checkpoint]


@dataclass(frozen=True)
class _Judgement:
    """The loss of the validation split, None where it is not finite, the task's metrics on it, and what was fitted to
    the outputs for it.
    """

    loss: float | None
    metrics: dict[str, float | None]
    fit: dict[str, Any]


class SiteSession:
    """One site in one resolved study.

    Rounds come in order, but one may be missed, and the last one may be run again after a restart from the state before
    it: the result is the same bits.
    """

    def __init__(
        self,
        study: ResolvedStudy,
        site: str,
        task: Task,
        data: SiteData,
        state: SessionState | None = None,
        own: Mapping[str, Tensor] | None = None,
        device: Device = CPU,
        *,
        score_at_once: bool = True,
        shares_download: bool = False,
    ) -> None:
        """Set this process's torch to be deterministic, build the networks, and go on from ``state`` if given.

        Args:
            study: of several networks, the site trains the one that is assigned to it; ``ResolvedStudy.at`` has
                the one that it chose instead.
            task: as the site reads its data; ``partition.task_at`` says.
            own: private tensors to begin with in place of those drawn, by name; ``state`` has them already.
            score_at_once: False leaves the test split alone until ``scored`` is asked for a checkpoint's scores.
            shares_download: a checkpoint has no copies of what is as it came; for who writes it down at once.

        Raises:
            BadData: ``state`` is of another study or another network.
        """
        own_study = study.at(site)
        make_deterministic(study.study.threads)
        algorithm = algorithm_of(own_study)
        networks = build(own_study, task, algorithm, site)
        refuse_single_rows(own_study, networks, len(data.train))
        device.place(networks)
        self._context = Context(
            own_study, site, study.method.settings, task.at(data), data, algorithm, networks,
            Optimizers(study.training), device=device,
        )  # fmt: skip
        shared = upload_specs(own_study, algorithm, networks)
        self._encoder = Encoder(own_study.encoding, shared)
        self._brought = {spec.key for spec in download_specs(own_study, shared)}  # by each download
        self._score_at_once, self._shares_download = score_at_once, shares_download
        self._spare: dict[str, nn.Module] | None = None  # networks that take a checkpoint's tensors for a while
        self._iterators: dict[str, dict[str, int]] = {}  # phase -> its place, where iterators live as long as the run
        self._best_loss: float | None = None
        self._best_pool = ""
        if state is not None:
            self._load(state)
            return
        live = all_tensors(networks)
        with torch.no_grad():
            for name, tensor in (own or {}).items():
                live[name].copy_(tensor)

    def train(
        self, round_number: int, base: Downlink, progress: Progress | None = None, watch: Watch | None = None
    ) -> RoundResult:
        """Round ``round_number`` (from 1): receive ``base``, judge it, train, and give what leaves. It is ``open``,
        every phase, and ``close``.

        Args:
            base: the shared tensors of model ``round_number - 1``; read, never written.
            progress: called with (steps done, steps in all) of each phase now and then.
            watch: called with (phase, loss) of each step: a scalar without gradient, on the device.

        Raises:
            BadData: ``base`` is not the shared tensors.
        """
        opened = self.open(round_number, base)
        for phase in opened.phases:
            run_phase(opened.context, phase, self.place(phase), progress, watch)
        return self.close(opened)

    def open(self, round_number: int, base: Downlink) -> OpenRound:
        """Receive ``base``, judge it, and say what is to be trained. Raises BadData as ``train``."""
        context = self._context
        context.scratch, context.steps = {}, 0
        metrics, checkpoints = self._receive(round_number, base)
        context.algorithm.before_round(context)
        context.optimizers.begin_round()
        return OpenRound(context, context.algorithm.phases(context), metrics, checkpoints)

    def place(self, phase: Phase) -> dict[str, int]:
        """Where the phase's batches go on; kept with the session where iterators live as long as the run."""
        if self._context.study.training.iterator == "run":
            return self._iterators.setdefault(phase.name, {})
        return {}

    def close(self, opened: OpenRound) -> RoundResult:
        """What leaves, once every phase has been trained."""
        context = opened.context
        context.algorithm.after_round(context)
        for network in context.networks.values():
            network.zero_grad(set_to_none=True)  # a gradient is as large as the model, and what follows needs room
        checkpoints = opened.checkpoints + self._compete(context.round_number)
        uplink = context.algorithm.to_send(context)
        sent = {bundle: {name: delta.to("cpu") for name, delta in part.items()} for bundle, part in uplink.items()}
        return self._result(self._encoder.sent(sent), opened.metrics, checkpoints)

    def validate(self, round_number: int, base: Downlink) -> RoundResult:
        """The closing assignment, ``rounds + 1``: receive the last model, judge it, and tune a copy of it if the study
        says so. Nothing leaves but metrics.
        """
        context = self._context
        context.scratch, context.steps = {}, 0
        metrics, checkpoints = self._receive(round_number, base)
        if (tuning := context.settings.fine_tuning) is not None:
            copies = fine_tuned(context, context.networks, tuning)
            validated = self._judge(copies)
            checkpoints.append(self._checkpoint("fine_tuned", round_number - 1, copies, validated))
        return self._result({}, metrics, checkpoints)

    def tuned(self, tensors: Mapping[str, Tensor], tuning: FineTuning) -> dict[str, Tensor]:
        """A checkpoint's ``tensors`` after fine-tuning at this site; the session goes on as if never asked."""
        tuned = fine_tuned(self._context, self._spare_with(tensors), tuning)
        return {key: at_home(tensor) for key, tensor in all_tensors(tuned).items()}

    def scored(self, checkpoint: Checkpoint) -> Checkpoint:
        """``checkpoint`` with its scores, as it would have had them at once. The session goes on as if never asked."""
        data = self._context.data
        if checkpoint.scores or data.test is None:
            return checkpoint
        scores = self._tested(self._spare_with(checkpoint.tensors), data.test, checkpoint.fit)
        return replace(checkpoint, score=scores[checkpoint.metric], scores=scores)

    def finish(self, best_round: int | None, best: Downlink | None) -> tuple[Checkpoint, ...]:
        """The best global checkpoint: ``best`` is model ``best_round``. Nothing for a method without a global model."""
        if best_round is None or best is None or not self._context.study.method.row.one_global_model:
            return ()
        context = self._context
        context.base = context.device.bring_all(best)
        context.algorithm.receive(context)
        validated = self._judge(context.networks)
        return (self._checkpoint("best_global", best_round, context.networks, validated),)

    def export_state(self, *, copies: bool = True) -> SessionState:
        """All that the next round needs beside the download. Without ``copies`` it shares the session's memory where it
        can, for a reader who is done before that goes on.
        """
        context = self._context
        taken = at_home if copies else seen_at_home
        tensors = {
            f"private/{flat_key(key)}": taken(tensor)
            for key, tensor in all_tensors(context.networks).items()
            if key not in self._brought
        }
        tensors |= {f"optimizer/{key}": moment for key, moment in context.optimizers.export(copies=copies).items()}
        tensors |= {f"kept/{key}": taken(tensor) for key, tensor in context.kept.items()}
        tensors |= {f"rest/{key}": taken(tensor) for key, tensor in self._encoder.rest.items()}
        meta = {
            "algorithm": context.study.method.name,
            "round": context.round_number,
            "best_pool": self._best_pool,
            "best_loss": None if self._best_loss is None else repr(self._best_loss),
            "iterators": {phase: dict(place) for phase, place in self._iterators.items()},
            "notes": dict(context.notes),
        }
        return SessionState(tensors, meta)

    def _load(self, state: SessionState) -> None:
        context, meta = self._context, state.meta
        if meta.get("algorithm") != context.study.method.name:
            raise BadData(
                f"the kept state is of algorithm `{meta.get('algorithm')}`, the study's is "
                f"`{context.study.method.name}`"
            )
        parts: dict[str, dict[str, Tensor]] = {"private": {}, "optimizer": {}, "kept": {}, "rest": {}}
        for name, tensor in state.tensors.items():
            part, _, key = name.partition("/")
            if part not in parts:
                raise BadData(f"the kept state has a tensor `{name}` of no known part")
            parts[part][key] = tensor
        live = all_tensors(context.networks)
        private = {flat_key(key): tensor for key, tensor in live.items() if key not in self._brought}
        restore(private, parts["private"], "the kept state")
        context.optimizers.load(parts["optimizer"])
        context.kept = {key: context.device.bring(tensor.clone()) for key, tensor in parts["kept"].items()}
        self._encoder.load(parts["rest"])
        context.notes = dict(meta["notes"])
        context.round_number = meta["round"]
        self._iterators = {phase: dict(place) for phase, place in meta["iterators"].items()}
        self._best_pool = meta["best_pool"]
        self._best_loss = None if meta["best_loss"] is None else float(meta["best_loss"])

    def _spare_with(self, tensors: Mapping[str, Tensor]) -> dict[str, nn.Module]:
        """The spare networks with a checkpoint's tensors. Raises BadData: the tensors are not theirs."""
        if self._spare is None:
            self._spare = {slot: copy.deepcopy(network) for slot, network in self._context.networks.items()}
        restore(all_tensors(self._spare), tensors, "the checkpoint")
        return self._spare

    def _receive(self, round_number: int, base: Downlink) -> tuple[dict[str, float | None], list[Checkpoint]]:
        """Load the download and judge it. The initial model is judged too, but is no checkpoint."""
        context = self._context
        context.round_number, context.base = round_number, context.device.bring_all(base)
        context.algorithm.receive(context)
        validated = self._judge(context.networks)
        checkpoints: list[Checkpoint] = []
        if round_number > 1:
            latest = self._checkpoint("latest", round_number - 1, context.networks, validated)
            checkpoints += [latest, *self._compete(round_number - 1, validated, latest)]
        return {VAL_LOSS: validated.loss, **validated.metrics}, checkpoints

    def _compete(
        self, model_round: int, downloaded: _Judgement | None = None, latest: Checkpoint | None = None
    ) -> list[Checkpoint]:
        """Let the method's candidates compete to be the site's best. A later equal loss replaces.

        Args:
            downloaded: what was said of the session's networks, which are as they came; None after training.
            latest: the checkpoint of these; the best one, if it is of them, shares its tensors.
        """
        context, best = self._context, list[Checkpoint]()
        for candidate in context.algorithm.candidates(context, downloaded is None):
            known = downloaded if candidate.networks is context.networks else None
            validated = known or self._judge(candidate.networks)
            if candidate.pool != self._best_pool:
                self._best_pool, self._best_loss = candidate.pool, None
            if validated.loss is not None and (self._best_loss is None or validated.loss <= self._best_loss):
                self._best_loss = validated.loss
                same = latest if candidate.networks is context.networks else None
                found = same or self._checkpoint("best_local", model_round, candidate.networks, validated)
                best = [replace(found, kind="best_local")]
        return best

    def _judge(self, networks: Networks) -> _Judgement:
        """The networks on the validation split."""
        context = self._context
        found = judged(context.algorithm, networks, context.data.validation, context.task)
        loss, fit = reduced_loss(found.losses, context.study), fit_outputs(context, networks, found)
        return _Judgement(loss if math.isfinite(loss) else None, found.metrics(fit), fit)

    def _checkpoint(self, kind: str, model_round: int, networks: Networks, validated: _Judgement) -> Checkpoint:
        """The networks as they are now. ``validated`` is what the validation split said of them."""
        data, metric = self._context.data, self._context.task.headline
        tensors = taken(networks, downloaded(self._context) if self._shares_download else {})
        split, scores = "validation" if data.test is None else "test", validated.metrics
        if data.test is not None:
            scores = self._tested(networks, data.test, validated.fit) if self._score_at_once else {}
        return Checkpoint(
            kind, model_round, tensors, scores.get(metric), metric, split, validated.loss, scores, validated.fit
        )  # fmt: skip

    def _tested(self, networks: Networks, test: Split, fit: Mapping[str, Any]) -> dict[str, float | None]:
        """Every metric on the test split. ``fit``: what the validation split said of these networks."""
        return judged(self._context.algorithm, networks, test, self._context.task).metrics(fit)

    def _result(
        self, uplink: dict[str, dict[str, Tensor]], metrics: dict[str, float | None], checkpoints: list[Checkpoint]
    ) -> RoundResult:
        data = self._context.data
        return RoundResult(uplink, samples(data.train), samples(data.validation), metrics, tuple(checkpoints))
