"""Which point of a row's grid its reported runs use: the one of lowest validation loss. No test score is looked at."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from fl_algorithms.lab.suite import Row, Settings, shown
from wardround.errors import BadData

Run = Mapping[str, Any]  # what a tuning run's result file holds


@dataclass(frozen=True)
class Choice:
    """The chosen point, and the loss of every point: None where a run's was not finite."""

    point: int
    kind: str  # the checkpoint whose loss it is
    losses: tuple[float | None, ...]

    def document(self, row: Row) -> dict[str, Any]:
        points = [
            {"settings": point.settings, "val_loss": loss} for point, loss in zip(row.points, self.losses, strict=True)
        ]
        return {"chosen": self.point, "checkpoint": self.kind, "points": points}


def choose(row: Row, runs: Mapping[int, Sequence[Run]]) -> Choice:
    """The point whose loss, meant over its runs, is lowest; of equals the first.

    Args:
        runs: point -> its tuning runs, one for each seed.

    Raises:
        BadData: no point has a finite loss.
    """
    kind = chosen_kind(runs[0][0], row.points[0].settings)
    losses = tuple(_mean([site_mean(run, kind) for run in runs[point]]) for point in range(len(row.points)))
    finite = [(loss, point) for point, loss in enumerate(losses) if loss is not None]
    if not finite:
        raise BadData(
            f"row `{row.name}`: no point of its grid has a finite validation loss "
            f"({'; '.join(shown(point.settings) for point in row.points)})",
            hint="try smaller learning rates in [row.tune]",
        )
    return Choice(min(finite)[1], kind, losses)


def chosen_kind(run: Run, settings: Settings | Mapping[str, Any]) -> str:
    """The checkpoint that a hospital would use: what the grid tunes, the best global one, or each site's best."""
    kinds = [set(found) for found in run["checkpoints"].values()]
    wanted = ["best_global", "best_local", "latest"]
    if any(key.startswith("algorithm.fine_tuning.") for key in settings):
        wanted.insert(0, "fine_tuned")
    return next(kind for kind in wanted if all(kind in found for found in kinds))


def site_mean(run: Run, kind: str) -> float | None:
    """The sites' validation losses of that checkpoint, weighted by validation rows; None if one is not finite."""
    total, rows = 0.0, 0
    for site, kinds in run["checkpoints"].items():
        loss = kinds[kind]["val_loss"]
        if loss is None:
            return None
        weight = run["rows"][site]["validation"] if site in run["rows"] else 1
        total, rows = total + weight * loss, rows + weight
    return total / rows


def _mean(losses: Sequence[float | None]) -> float | None:
    finite = [loss for loss in losses if loss is not None]
    return fmean(finite) if len(finite) == len(losses) else None
