"""Which point of a row's grid its reported runs use: the one of lowest validation loss. No test score is looked at."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from fl_algorithms.lab.space import Settings
from fl_algorithms.lab.suite import shown
from wardround.errors import BadData

Run = Mapping[str, Any]  # what a run's result file holds


@dataclass(frozen=True)
class Tried:
    """A point of a grid, and its loss: None where a run's was not finite."""

    settings: Settings
    val_loss: float | None


@dataclass(frozen=True)
class Choice:
    """The chosen point, and what every point gave.

    Attributes:
        kind: the checkpoint whose loss it is.
        seeds: how many runs each loss is the mean of.
    """

    point: int
    kind: str
    seeds: int
    tried: tuple[Tried, ...]


def choose(row: str, runs: Sequence[Run]) -> Choice:
    """The point whose loss, averaged over its tuning runs, is lowest; of equals the first.

    Args:
        runs: of the row: every point with every tuning seed.

    Raises:
        BadData: no point has a finite loss.
    """
    points: dict[int, list[Run]] = {}
    for run in runs:
        points.setdefault(run["point"], []).append(run)
    kind = next((chosen_kind(run) for run in runs if run["checkpoints"]), "latest")
    tried = tuple(
        Tried(points[point][0]["settings"], run_mean([site_mean(run, kind) for run in points[point]]))
        for point in sorted(points)
    )
    finite = [(one.val_loss, point) for point, one in enumerate(tried) if one.val_loss is not None]
    if not finite:
        raise BadData(
            f"row `{row}`: no point of its grid has a finite validation loss: "
            f"{'; '.join(shown(one.settings) for one in tried)}",
            hint="try smaller learning rates in [row.tune]",
        )
    return Choice(min(finite)[1], kind, len(points[0]), tried)


def chosen_kind(run: Run) -> str:
    """The checkpoint that a hospital would use: what the site selects, or the one tuned at the site, where the row's
    runs end with that; else the best global one, or each site's best.
    """
    kinds = [set(found) for found in run["checkpoints"].values()]
    wanted = ["selected", "fine_tuned", "best_global", "best_local", "latest"]
    return next(kind for kind in wanted if all(kind in found for found in kinds))


def site_mean(run: Run, kind: str) -> float | None:
    """The sites' validation losses of that checkpoint, weighted by validation rows; None if one is not finite, or the
    run left the finite numbers on its way.
    """
    if not run["checkpoints"]:
        return None
    total, rows = 0.0, 0
    for site, kinds in run["checkpoints"].items():
        loss = kinds[kind]["val_loss"]
        if loss is None:
            return None
        weight = run["rows"][site]["validation"] if site in run["rows"] else 1
        total, rows = total + weight * loss, rows + weight
    return float(total / rows)


def run_mean(losses: Sequence[float | None]) -> float | None:
    """The mean over the runs of one point; None if one is not finite."""
    finite = [loss for loss in losses if loss is not None]
    return fmean(finite) if len(finite) == len(losses) else None
