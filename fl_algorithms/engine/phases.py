"""One phase of a round at one site: which rows in which batches, which parameters, how many steps, which noise."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from fl_algorithms.engine.algorithm import Context
from fl_algorithms.engine.training import (
    Batch,
    Batches,
    Phase,
    Progress,
    only_trainable,
    run_steps,
    seeded,
    trainable_parameters,
)
from fl_algorithms.streams import stream_seed
from fl_algorithms.study import SiteStudy

Watch = Callable[[str, Tensor], object]  # (phase, the loss of a step: a scalar without gradient, on the device)


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
    if phase.rows is not None:
        (x, y), place = phase.rows, {}
        study = _of_own_rows(study, phase.batch_size, len(y))
    batches = Batches(x, y, study, context.site, context.round_number, phase.name, place, context.device)
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
    made, algorithm = prepared(context, phase, place), context.algorithm
    optimizer = context.optimizers.get(phase.optimizer, made.parameters, phase.learning_rate)
    after_backward, after_step = algorithm.after_backward, algorithm.after_step
    with seeded(made.noise), only_trainable(context.networks, made.parameters):
        run_steps(
            made.batches,
            made.steps,
            optimizer,
            lambda batch: _watched(phase.name, made.loss(context, batch), watch),
            None if after_backward is None else lambda batch: after_backward(context, batch),
            None if after_step is None else lambda batch: after_step(context, batch),
            progress,
            context.device,
        )
    context.steps += made.steps


def _watched(phase: str, loss: Tensor, watch: Watch | None) -> Tensor:
    if watch is not None:
        watch(phase, loss.detach())
    return loss


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
