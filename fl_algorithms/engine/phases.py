"""One phase of a round at one site: which rows in which batches, which parameters, how many steps, which noise."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from fl_algorithms.engine.algorithm import Context, kinds_of
from fl_algorithms.engine.early_stopping import EarlyStop, mean_loss
from fl_algorithms.engine.judging import labeled_parts
from fl_algorithms.engine.schedule import rate_factor
from fl_algorithms.engine.training import (
    Batch,
    Batches,
    Networks,
    Phase,
    Progress,
    Watch,
    clip_gradients,
    only_trainable,
    run_steps,
    seeded,
    trainable_parameters,
)
from fl_algorithms.streams import stream_seed
from fl_algorithms.study import SiteStudy
from wardround.errors import BadData

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@dataclass(frozen=True)
class Prepared:
    """A phase as it is run.

    Attributes:
        parameters: what is trained, "SLOT/PARAMETER" -> the live one.
        loss: of one batch; a scalar that carries gradient.
        noise: the seed of dropout and the like.
    """

    batches: Batches
    parameters: dict[str, nn.Parameter]
    steps: int
    loss: Callable[[Context, Batch], Tensor]
    noise: int


def prepared(context: Context, phase: Phase, place: dict[str, int]) -> Prepared:
    """``phase`` at the context's site in its round. ``place``: as ``Batches`` takes it."""
    study = context.study
    x, y = context.data.train.x, context.data.train.y
    kinds = kinds_of(context)
    if phase.rows is not None:
        (x, y), place, kinds = phase.rows, {}, None
        study = _of_own_rows(study, phase.batch_size, len(y))
    batches = Batches(x, y, study, context.site, context.round_number, phase.name, place, context.device, kinds)
    purpose = f"noise.{phase.name}" if phase.name else "noise"
    return Prepared(
        batches,
        trainable_parameters(context.networks, phase.trainable),
        _steps(phase, study, batches.per_epoch),
        phase.loss or context.algorithm.loss,
        stream_seed(study.study.seed, context.site, context.round_number, purpose),
    )


def run_phase(
    context: Context,
    phase: Phase,
    place: dict[str, int],
    progress: Progress | None = None,
    watch: Watch | None = None,
) -> None:
    """Train ``phase``. Raises as ``run_steps``."""
    made, after_step = prepared(context, phase, place), context.algorithm.after_step
    optimizer = context.optimizers.get(phase.optimizer, made.parameters, phase.learning_rate)
    stop = _early_stop(context, phase, made.parameters)
    with seeded(made.noise), only_trainable(context.networks, made.parameters):
        context.steps += run_steps(
            made.batches,
            made.steps,
            optimizer,
            _loss(context, phase.name, made.loss, watch),
            _after_backward(context, made.parameters),
            None if after_step is None else lambda batch: after_step(context, batch),
            progress,
            context.device,
            _before_step(context, made.steps),
            None if stop is None else stop.after,
        )
        if stop is not None:
            stop.go_back()


def _loss(
    context: Context, phase: str, loss: Callable[[Context, Batch], Tensor], watch: Watch | None
) -> Callable[[Batch], Tensor]:
    """``loss`` of a batch, of which ``watch`` is told."""
    if watch is None:
        return partial(loss, context)

    def told(batch: Batch) -> Tensor:
        found = loss(context, batch)
        watch(phase, found.detach())
        return found

    return told


def _before_step(context: Context, steps: int) -> Callable[[int], None] | None:
    """The study's schedule of the learning rate."""
    schedule = context.study.training.schedule
    if schedule.is_constant:
        return None
    rounds, number = context.study.study.rounds, context.round_number
    return lambda step: context.optimizers.scale(rate_factor(schedule, rounds, number, step, steps))


def _after_backward(context: Context, parameters: Mapping[str, nn.Parameter]) -> Callable[[Batch], None] | None:
    """The method's edit of the gradient, and the study's bound on it."""
    hook, norm = context.algorithm.after_backward, context.study.training.clip_norm
    if hook is None and norm is None:
        return None

    def edit(batch: Batch) -> None:
        if hook is not None:
            hook(context, batch)
        clip_gradients(parameters.values(), norm)

    return edit


def _early_stop(context: Context, phase: Phase, parameters: dict[str, nn.Parameter]) -> EarlyStop | None:
    """What ends the steps on the site's own rows early, if the study says so."""
    settings = context.study.training.early_stopping
    if settings is None or phase.rows is not None:
        return None
    split, loss = context.data.validation, phase.loss or context.algorithm.loss

    def loss_now() -> float:
        parts = (Batch(*map(context.device.bring, part)) for part in labeled_parts(split))
        return mean_loss(lambda batch: loss(context, batch), parts)

    return EarlyStop(settings, context.networks, parameters, loss_now)


def _steps(phase: Phase, study: SiteStudy, per_epoch: int) -> int:
    if phase.steps is not None:
        return phase.steps
    if phase.epochs is not None:
        return phase.epochs * per_epoch
    if study.training.local_steps is not None:
        return study.training.local_steps
    return (study.training.local_epochs or 0) * per_epoch


def _of_own_rows(study: SiteStudy, batch_size: int, rows: int) -> SiteStudy:
    """The study for a phase of other rows, which differ from round to round. A last batch of one row, which no batch
    norm could learn from, is left out.
    """
    lone = rows > 1 and rows % batch_size == 1
    changed = {"batch_size": batch_size, "iterator": "round", "drop_last": lone}
    return study.changed(training=changed)


def refuse_single_rows(study: SiteStudy, networks: Networks, rows: int) -> None:
    """A batch of one row has no variance for a batch norm.

    Raises:
        BadData: training would meet one.
    """
    if not any(isinstance(module, BATCH_NORMS) for network in networks.values() for module in network.modules()):
        return
    size = min(study.training.batch_size, rows)
    if size == 1 or (rows % size == 1 and not study.training.drop_last):
        raise BadData(
            f"{rows} training rows in batches of {study.training.batch_size} give a batch of one row, which a batch "
            "norm cannot learn from",
            hint="in the study's [training]: `drop_last = true`, or another `batch_size`",
            code="DECLINED_DATA_INVALID",
        )
