"""How good a model is on a split, with no more of it in memory at once than a piece, where the task allows that."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from fl_algorithms.study import ResolvedStudy
from fl_algorithms.tasks.base import Inputs, OwnSizes, RowByRow, Scores, Split, Task, in_parts

EVALUATION_BATCH = 1024  # rows in one forward pass outside training, at most
EVALUATION_BYTES = (
    1 << 28
)  # of all that the networks make of the rows of one such pass, at most; one row is always taken
EVALUATION_NUMBERS = 1 << 20  # in the rows of one piece, where rows are images and no network is asked
LogitsOf = Callable[[Inputs], Tensor]  # of rows in their order, (n, outputs), on the CPU


@dataclass(frozen=True)
class Judged:
    """A model on a split. ``logits`` and ``y`` are of all rows; or ``rows`` what each counts for, see ``RowByRow``."""

    task: Task
    logits: Tensor | None = None
    y: Tensor | None = None
    rows: Tensor | None = None

    @property
    def losses(self) -> Tensor:
        """Of each row, (n,), float64."""
        if self.rows is not None:
            return self.rows[:, 0]
        assert self.logits is not None
        assert self.y is not None
        return self.task.losses(self.logits, self.y).to(torch.float64)

    def at(self, places: Tensor) -> "Judged":
        """Of the rows at ``places`` alone, int64 (k,), as often as each stands there."""
        logits, y, rows = (None if one is None else one[places] for one in (self.logits, self.y, self.rows))
        return Judged(self.task, logits, y, rows)

    def metrics(self, fit: Mapping[str, Any] | None = None) -> Scores:
        """The task's, over all rows. ``fit``: what ``Task.fit_outputs`` gave for the model."""
        if self.rows is not None:
            assert isinstance(self.task, RowByRow)
            return self.task.overall(self.rows)
        assert self.logits is not None
        assert self.y is not None
        return self.task.metrics(self.logits, self.y, fit)


def judged_by(logits_of: LogitsOf, split: Split, task: Task) -> Judged:
    """A model on ``split``. Where the task judges row by row, one piece's logits are in memory at a time."""
    if not isinstance(task, RowByRow):
        return Judged(task, logits_of(split.x), split.y)
    if isinstance(split.x, OwnSizes):
        rows = [task.judgements(*split.x.judged(place, logits_of)) for place in range(len(split))]
    else:
        rows = [task.judgements(logits_of(x), y) for x, y in labeled_parts(split)]
    return Judged(task, rows=torch.cat(rows))


def evaluation_parts(x: Inputs, row_bytes: int = 0) -> Iterator[Tensor]:
    """``x`` in its order, in pieces of bounded size.

    Args:
        row_bytes: what networks take for a row, as ``footprint`` counts it, where they are asked about the pieces.
    """
    size = EVALUATION_BATCH
    if row_bytes:
        size = min(size, max(1, EVALUATION_BYTES // row_bytes))
    elif not isinstance(x, Tensor):
        size = min(size, max(1, EVALUATION_NUMBERS // prod(x.shape)))
    return in_parts(x, size)


def labeled_parts(split: Split) -> Iterator[tuple[Tensor, Tensor]]:
    """The rows of ``split`` in its order, in pieces of bounded size, as a loss takes them; of images that are seen in
    pieces, each one's middle.
    """
    if isinstance(split.x, OwnSizes):
        yield from (split.x.middle(place) for place in torch.split(torch.arange(len(split)), 1))
        return
    start = 0
    for part in evaluation_parts(split.x):
        yield part, split.y[start : start + len(part)]
        start += len(part)


def validation_loss(logits: Tensor, split: Split, task: Task, study: ResolvedStudy) -> float:
    """``reduced_loss`` of a split, from the logits of all its rows."""
    return reduced_loss(task.losses(logits, split.y).to(torch.float64), study)


def reduced_loss(losses: Tensor, study: ResolvedStudy) -> float:
    """The mean loss of rows, by ``loss_reduction``: over its samples, or over the means of its batches.

    "batch_mean" counts a short last batch as much as a full one, as the code behind FENDA-FL's table does.
    """
    if study.checkpoints.loss_reduction == "batch_mean":
        losses = torch.stack([part.mean() for part in torch.split(losses, study.training.batch_size)])
    return float(losses.mean())
