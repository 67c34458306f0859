"""Is the model any use? Its scores beside those of the best answer that is the same for every row. No torch."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from fl_algorithms.lab.tuning import Run
from fl_algorithms.settings.targets import SMALLER_IS_BETTER

Score = float | None
Sites = Mapping[str, Mapping[str, Score]]  # site -> metric -> score
SHOWN = (
    "accuracy", "balanced_accuracy", "auc", "auprc", "brier", "calibration_slope", "calibration_intercept",
    "mae", "rmse", "r2", "c_index", "integrated_brier",
)  # fmt: skip
"""The metrics that a reader asks for, of those that a task has."""
COMPARED = ("accuracy", "auc", "brier", "mae", "rmse", "r2", "c_index", "integrated_brier")
"""Those in which a model must beat a constant."""
NAMED = 6  # models in one sentence
SAME = 1e-9


@dataclass(frozen=True)
class Behind:
    """A model that is no better at a site than the same answer for every row."""

    label: str
    site: str
    metric: str
    score: float
    constant: float


def behind(
    label: str, scores: Mapping[str, Mapping[str, Score]], constants: Mapping[str, Mapping[str, Score]]
) -> list[Behind]:
    """Where a model is no better than a constant.

    Args:
        scores, constants: site -> metric -> score.
    """
    found = []
    for site, own in scores.items():
        for metric in (metric for metric in COMPARED if metric in own):
            score, constant = own[metric], constants.get(site, {}).get(metric)
            if score is not None and constant is not None and not _better(metric, score, constant):
                found.append(Behind(label, site, metric, score, constant))
    return found


def warnings(found: Sequence[Behind]) -> list[str]:
    """One sentence a metric."""
    sentences = []
    for metric in dict.fromkeys(one.metric for one in found):
        by_label: dict[str, list[Behind]] = {}
        for one in found:
            if one.metric == metric:
                by_label.setdefault(one.label, []).append(one)
        named = "; ".join(f"{label} at {_sites(ones)}" for label, ones in list(by_label.items())[:NAMED])
        more = f"; and {len(by_label) - NAMED} more" if len(by_label) > NAMED else ""
        sentences.append(f"In {metric} no better than the same answer for every row: {named}{more}.")
    return sentences


def of_runs(runs: Iterable[Run], kind: str) -> tuple[dict[str, dict[str, Score]], dict[str, dict[str, Score]]]:
    """Site -> metric -> the mean over the runs: of that kind of checkpoint, and of the constant."""
    runs = list(runs)
    scores = _means(runs, lambda run: {site: kinds[kind]["scores"] for site, kinds in run["checkpoints"].items()})
    known = [run for run in runs if run.get("baseline")]
    return scores, _means(known, lambda run: {site: own["constant"] for site, own in run["baseline"].items()})


def positives(run: Run) -> dict[str, str]:
    """Site -> how many rows of each kind it is trained and scored on: "train 0: 62, 1: 90; test 0: 41, 1: 63"."""
    found = {}
    for site, own in run.get("baseline", {}).items():
        parts = {split: counts for split, counts in own["counts"].items() if counts}
        found[site] = "; ".join(
            f"{split} {', '.join(f'{kind}: {count}' for kind, count in counts.items())}"
            for split, counts in parts.items()
        )
    return found


def thresholds(runs: Iterable[Run], kind: str) -> dict[str, float]:
    """Site -> the mean over the runs of the threshold that was chosen on its validation rows."""
    found: dict[str, list[float]] = {}
    for run in runs:
        for site, kinds in run["checkpoints"].items():
            if "threshold" in kinds[kind].get("fit", {}):
                found.setdefault(site, []).append(float(kinds[kind]["fit"]["threshold"]))
    return {site: fmean(values) for site, values in found.items()}


def columns(scores: Sites) -> list[str]:
    """The metrics to be shown, of those that there are."""
    there = {metric for own in scores.values() for metric, score in own.items() if score is not None}
    return [metric for metric in SHOWN if metric in there]


def mean_over(sites: Sites, metric: str) -> Score:
    """The mean over the sites where it is defined."""
    defined = [score for own in sites.values() if (score := own.get(metric)) is not None]
    return fmean(defined) if defined else None


def beside(score: Score, constant: Score) -> str:
    """A score with the constant's behind it."""
    said = "–" if score is None else f"{score:.3f}"
    return said if constant is None else f"{said} ({constant:.3f})"


def _means(runs: Sequence[Run], of: Callable[[Run], Mapping[str, Any]]) -> dict[str, dict[str, Score]]:
    each: dict[str, dict[str, list[float]]] = {}
    for run in runs:
        for site, scores in of(run).items():
            for metric, score in scores.items():
                values = each.setdefault(site, {}).setdefault(metric, [])
                values += [] if score is None else [score]
    return {
        site: {metric: fmean(values) if values else None for metric, values in own.items()}
        for site, own in each.items()
    }


def _better(metric: str, score: float, constant: float) -> bool:
    gain = constant - score if metric in SMALLER_IS_BETTER else score - constant
    return gain > SAME


def _sites(found: Sequence[Behind]) -> str:
    return ", ".join(f"{one.site} ({one.score:.3f}, the constant {one.constant:.3f})" for one in found)
