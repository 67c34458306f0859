"""Which of its models a site uses, chosen at the site on its own validation rows; and the reason, in words.

The procedure is called "hedged". What there is to choose from, the safest first:

    two together     the mean of the outputs (logits) of one of the study's checkpoints and of "alone"
    the checkpoints  fine_tuned, best_global, best_local, latest, as far as the method has them
    alone            what the site trained beside the federation

The two together are the safest because losses are convex in the outputs: they are never further off than the mean of
both, whichever of them is the worse one for this site. For each candidate the loss of each validation row is computed.
The one of the lowest mean loss is the best. The first candidate is chosen that is not behind the best by more than two
standard errors of the differences, row by row, sd / sqrt(n). So what so few rows cannot tell from chance moves nobody
away from the hedge; two, because the best is the best of several.

The same rows chose the rounds of "best_local", "best_global" and "alone", each among as many. So their losses are a
little too low, alike for all of them, and say nothing of new patients; a site's test rows, which are never looked at
here, do.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fl_algorithms.engine.beside import ALONE, JOINT, SINGLE, joined, members_of
from fl_algorithms.engine.device import CPU, Device
from fl_algorithms.engine.judging import judged_by, reduced_loss
from fl_algorithms.engine.session import Checkpoint, Restored
from fl_algorithms.study import SiteStudy
from fl_algorithms.tasks.base import Classifies, Inputs, SiteData, Task

SELECTED = "selected"
FEWEST = 2  # validation rows that have a standard error
ERRORS = 2.0  # standard errors that a candidate may be behind

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Kept:
    """A checkpoint's round and tensors."""

    round: int
    tensors: Tensors


@dataclass(frozen=True)
class Judged:
    """A candidate: its members' kinds, and the loss of each validation row, float64 (n,)."""

    members: tuple[str, ...]
    losses: Tensor

    @property
    def name(self) -> str:
        return " and ".join(self.members)

    @property
    def mean(self) -> float:
        return float(self.losses.mean())


class Together:
    """Models of a study that answer together: what ``Restored`` is for one. Outputs are the mean of theirs."""

    def __init__(self, study: SiteStudy, task: Task, tensors: Tensors, device: Device = CPU) -> None:
        """Raises BadData: the tensors are not those of the study's networks."""
        self._task = task
        self.members = {
            kind: Restored(study.alone() if kind == ALONE else study, task, own, device)
            for kind, own in members_of(tensors).items()
        }

    @property
    def networks(self) -> dict[str, nn.Module]:
        return {
            f"{kind}{JOINT}{slot}": network
            for kind, member in self.members.items()
            for slot, network in member.networks.items()
        }

    def logits(self, x: Inputs, tell: Callable[[int], object] = lambda rows: None) -> Tensor:
        """(n, outputs) for ``x`` (n, features). ``tell``: as ``compute_logits``, for each of the models."""
        return torch.stack([member.logits(x, tell) for member in self.members.values()]).mean(dim=0)

    def probabilities(self, x: Inputs) -> Tensor:
        """(n, classes) for ``x`` (n, features). For a task of classes."""
        assert isinstance(self._task, Classifies)
        return self._task.probabilities(self.logits(x))


Model = Restored | Together


def restored(study: SiteStudy, task: Task, tensors: Tensors, device: Device = CPU) -> Model:
    """The model of any checkpoint's tensors. Raises BadData: they are not those of the study's networks."""
    return (Together if members_of(tensors) else Restored)(study, task, tensors, device)


def selected(
    study: SiteStudy, task: Task, data: SiteData, checkpoints: Mapping[str, Kept], device: Device = CPU
) -> Checkpoint:
    """What the site will use, by the procedure of this module: a checkpoint that holds its members.

    Args:
        task: as it judges at the site, which ``Task.at`` gives.
        checkpoints: the site's, by kind; at least one.
    """
    kept = {kind: members_of(found.tensors).get(kind, found.tensors) for kind, found in checkpoints.items()}
    kept = {kind: kept[kind] for kind in SINGLE if kind in kept}
    judged = []
    for members in candidates(tuple(kept)):
        model = restored(study, task, joined({kind: kept[kind] for kind in members}), device)
        judged.append(Judged(members, judged_by(model.logits, data.validation, task).losses.detach()))
    choice, why = choose(judged)
    tensors = joined({kind: kept[kind] for kind in choice.members})
    model = restored(study, task, tensors, device)
    fit = task.fit_outputs(lambda split: model.logits(split.x), data)
    split, where = (data.validation, "validation") if data.test is None else (data.test, "test")
    scores = judged_by(model.logits, split, task).metrics(fit)
    loss = reduced_loss(choice.losses, study)
    return Checkpoint(
        SELECTED,
        max(checkpoints[kind].round for kind in choice.members),
        tensors,
        scores[task.headline],
        task.headline,
        where,
        loss if math.isfinite(loss) else None,
        scores,
        fit,
        why,
    )


def candidates(kinds: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """What may be chosen, the safest first."""
    if ALONE in kinds:
        yield from ((kind, ALONE) for kind in kinds if kind not in ("latest", ALONE))
    yield from ((kind,) for kind in kinds)


def choose(judged: list[Judged]) -> tuple[Judged, str]:
    """The first that is not clearly behind the best, and why. ``judged`` is not empty, the safest first."""
    finite = [one for one in judged if math.isfinite(one.mean)]
    if not finite or len(finite[0].losses) < FEWEST:
        return judged[0], f"{judged[0].name}: too few validation rows, or no finite loss on them, to choose by"
    best = min(finite, key=lambda one: one.mean)
    for one in finite:
        behind, error = difference(one, best)
        if behind <= ERRORS * error:
            break
    said = f"{one.name}: validation loss {one.mean:.4g}"
    if one is best:
        return one, f"{said}, the lowest; all that is safer is behind by more than two standard errors"
    return one, (
        f"{said}; the lowest is {best.mean:.4g} of {best.name}, and the difference, {behind:.2g}, is within two "
        f"standard errors, {ERRORS * error:.2g}"
    )


def difference(one: Judged, best: Judged) -> tuple[float, float]:
    """How far ``one`` is behind, and the standard error of that, row by row."""
    differences = one.losses - best.losses
    return float(differences.mean()), float(differences.std() / math.sqrt(len(differences)))
