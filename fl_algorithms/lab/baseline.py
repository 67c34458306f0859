"""What a model must beat to be of any use at a site: the best answer that is the same for every row.

That answer is fitted to the site's training rows and scored on the rows that the site's checkpoints are scored on. Of
classes it is each class's share, so its accuracy is that of "the majority for everyone"; of other targets it is the
constant of lowest loss. A mask has none.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fl_algorithms.engine.device import CPU, Device
from fl_algorithms.engine.judging import Judged, judged_by
from fl_algorithms.engine.partition import task_at
from fl_algorithms.engine.session import Checkpoint, Restored
from fl_algorithms.lab.statistics import resampled
from fl_algorithms.streams import stream_seed
from fl_algorithms.study import ResolvedStudy
from fl_algorithms.tasks.base import Classifies, RowByRow, SiteData, Split, Task

STEPS = 50  # of the search for the constant of lowest loss
DIGITS = 6  # of a score of the bootstrap: there are many of them


def baseline(task: Task, data: Mapping[str, SiteData]) -> dict[str, Any]:
    """For each site, as plain JSON: "counts", split -> kind of row -> how many; "constant", metric -> score."""
    return {site: {"counts": _counts(task, own), "constant": constant_scores(task, own)} for site, own in data.items()}


def constant_scores(task: Task, data: SiteData) -> dict[str, float | None]:
    """What the best constant answer scores where the site's models are scored; {} where there is none."""
    split = data.validation if data.test is None else data.test
    if isinstance(task, RowByRow):  # masks
        return {}
    outputs = _constant(task, data.train)
    return dict(task.metrics(outputs.expand(len(split), -1), split.y))


def bootstrap(
    study: ResolvedStudy,
    task: Task,
    data: Mapping[str, SiteData],
    checkpoints: Mapping[str, Mapping[str, Checkpoint]],
    draws: int,
    metrics: Sequence[str],
    device: Device = CPU,
) -> dict[str, Any]:
    """Scores on resampled rows: kind -> metric -> site -> one score a draw, None where it is undefined.

    Patients are drawn, each with all of its rows, where the data say whose each row is; else rows. A site's draws are
    the same for every seed, method and kind, so that two models may be subtracted draw by draw.
    """
    found: dict[str, Any] = {}
    for site, kinds in sorted(checkpoints.items()):
        own = data[site]
        split = own.validation if own.test is None else own.test
        own_task = task_at(study, task, site).at(own)
        for kind, checkpoint in sorted(kinds.items()):
            model = Restored(study.at(site), own_task, checkpoint.tensors, device)
            judged = judged_by(model.logits, split, own_task)
            for metric, scores in _resampled(judged, split, checkpoint, site, draws, metrics):
                found.setdefault(kind, {}).setdefault(metric, {})[site] = scores
    return found


def _resampled(
    found: Judged, split: Split, checkpoint: Checkpoint, site: str, draws: int, metrics: Sequence[str]
) -> list[tuple[str, list[float | None]]]:
    drawn: list[dict[str, float | None]] = []

    def score(places: NDArray[np.int64]) -> float | None:
        drawn.append(dict(found.at(torch.from_numpy(places)).metrics(checkpoint.fit)))
        return None

    groups = None if split.groups is None else split.groups.numpy()
    resampled(score, len(split), draws, stream_seed(0, site, 0, "protocol.bootstrap"), groups)
    return [(metric, [_short(one.get(metric)) for one in drawn]) for metric in metrics]


def _short(value: float | None) -> float | None:
    return None if value is None else round(value, DIGITS)


def _counts(task: Task, data: SiteData) -> dict[str, dict[str, int]]:
    splits = {"train": data.train, "validation": data.validation} | ({} if data.test is None else {"test": data.test})
    return {name: task.counts(split.y) for name, split in splits.items()}


def _constant(task: Task, train: Split) -> Tensor:
    """(1, outputs)"""
    if isinstance(task, Classifies) and train.y.dtype == torch.int64 and train.y.dim() == 1:
        shares = torch.bincount(train.y, minlength=len(task.classes)).float() / len(train)
        logs = shares.clamp(min=1 / (2 * len(train))).log()  # a class without a row is half a row's share
        return (logs[1:] - logs[:1])[None] if len(task.classes) == 2 else logs[None]
    outputs = torch.zeros(1, task.outputs, requires_grad=True)
    optimizer = torch.optim.LBFGS([outputs], max_iter=STEPS, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        found = task.loss(outputs.expand(len(train), -1), train.y)
        if found.requires_grad:
            found.backward()  # type: ignore[no-untyped-call]
        return found

    optimizer.step(loss)  # type: ignore[no-untyped-call]
    return outputs.detach()
