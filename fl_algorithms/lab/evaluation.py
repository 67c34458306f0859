"""Scores over sites and seeds: means, and how sure they are.

Within a run the sites count alike; then the mean over the runs, with the 95 % interval of Student's t (n - 1 degrees of
freedom). A score that is undefined at a site (AUC with one class) is left out of the means.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from fl_algorithms.settings.targets import SMALLER_IS_BETTER

if TYPE_CHECKING:
    from fl_algorithms.engine.session import Checkpoint

KINDS = ("latest", "best_local", "best_global", "fine_tuned", "alone", "selected")


@dataclass(frozen=True)
class Interval:
    """A mean with the radius of its 95 % interval, None for one run alone."""

    mean: float
    ci95: float | None
    sd: float | None


def interval(values: Sequence[float]) -> Interval:
    """The mean of ``values``, one for each run, and t(0.975, n - 1) s / sqrt(n)."""
    if len(values) < 2:
        return Interval(values[0], None, None)
    sd = stdev(values)
    return Interval(fmean(values), student_t(len(values) - 1) * sd / sqrt(len(values)), sd)


@dataclass(frozen=True)
class PairedDifference:
    """How much a exceeds b over the runs that both have, and in how many of them a is the better one."""

    mean: float
    ci95: float | None
    wins: int
    n: int


def paired(values_a: Sequence[float], values_b: Sequence[float], metric: str = "") -> PairedDifference:
    """The differences a - b, run by run. Not for no runs; a tie is no win, and of an error the smaller one wins."""
    differences = [a - b for a, b in zip(values_a, values_b, strict=True)]
    found = interval(differences)
    sign = -1 if metric in SMALLER_IS_BETTER else 1
    wins = sum(sign * difference > 0 for difference in differences)
    return PairedDifference(found.mean, found.ci95, wins, len(differences))


def student_t(degrees: int) -> float:
    """The 97.5 % quantile of Student's t."""
    from scipy.special import stdtrit  # scikit-learn brings it; only here, for it takes long to import

    return float(stdtrit(degrees, 0.975))


def summary(runs: "Sequence[dict[str, dict[str, Checkpoint]]]") -> dict[str, Any]:
    """For each kind of checkpoint its scores: mean, ci95, sd, per_seed, per_site, and where it is undefined.

    A kind that no run has is None.

    Args:
        runs: for each seed, site -> kind -> checkpoint.
    """
    return {kind: _of_kind([_at_sites(run, kind) for run in runs]) for kind in KINDS}


def _at_sites(run: "dict[str, dict[str, Checkpoint]]", kind: str) -> "dict[str, Checkpoint]":
    return {site: kinds[kind] for site, kinds in run.items() if kind in kinds}


def _of_kind(runs: "Sequence[dict[str, Checkpoint]]") -> dict[str, Any] | None:
    scores = [{site: c.score for site, c in run.items() if c.score is not None} for run in runs]
    means = [fmean(run.values()) for run in scores if run]
    if not means:
        return None
    over_runs = interval(means)
    some = next(iter(run for run in runs if run))
    per_site = {site: _mean_or_none([run[site] for run in scores if site in run]) for site in some}
    splits = sorted({checkpoint.split for checkpoint in some.values()})
    return {
        "metric": next(iter(some.values())).metric,
        "split": "/".join(splits),
        "mean": over_runs.mean,
        "ci95": over_runs.ci95,
        "sd": over_runs.sd,
        "per_seed": means,
        "per_site": per_site,
        "undefined_at": [site for site, score in per_site.items() if score is None],
    }


def _mean_or_none(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None
