"""The tests that tell rows of a comparison apart, each by its name in the literature.

Values come run by run with the same seed in both, or row by row of a table whose columns are methods. What a test
cannot say (too few runs, no difference in any) is None, never a number that looks like one. scipy computes; it comes
with the extra ``site``, and takes so long to import that only these functions do.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, sqrt
from statistics import fmean, stdev

import numpy as np
from numpy.typing import NDArray

ALPHA = 0.05
SIZES = ((0.2, "negligible"), (0.5, "small"), (0.8, "medium"), (inf, "large"))  # Cohen's, of a standardized difference


@dataclass(frozen=True)
class Tested:
    """What a test of paired values found.

    Attributes:
        n: pairs that count; of Wilcoxon's test those that differ.
        statistic: t, or the smaller rank sum.
        p: two-sided.
        effect: of t, Cohen's d of the differences (mean / standard deviation); of Wilcoxon's, the matched-pairs
            rank-biserial correlation, from -1 to 1. Above 0 where a is higher.
    """

    n: int
    statistic: float | None
    p: float | None
    effect: float | None


def paired_t(a: Sequence[float], b: Sequence[float]) -> Tested:
    """Student's t of the differences a - b. None of it where there is one pair, or all differences are the same."""
    differences = _differences(a, b)
    if len(differences) < 2 or (deviation := stdev(differences)) == 0:
        return Tested(len(differences), None, None, None)
    from scipy.special import stdtr

    effect = fmean(differences) / deviation
    t = effect * sqrt(len(differences))
    return Tested(len(differences), t, float(2 * stdtr(len(differences) - 1, -abs(t))), effect)


def wilcoxon(a: Sequence[float], b: Sequence[float]) -> Tested:
    """Wilcoxon's signed-rank test: exact for up to 50 pairs without ties. Pairs that do not differ are left out."""
    differences = [difference for difference in _differences(a, b) if difference]
    if not differences:
        return Tested(0, None, None, None)
    from scipy import stats

    ranks = stats.rankdata(np.abs(differences))
    up = float(ranks[np.array(differences) > 0].sum())
    down = float(ranks.sum()) - up
    found = stats.wilcoxon(differences)
    return Tested(len(differences), float(found.statistic), float(found.pvalue), (up - down) / (up + down))


@dataclass(frozen=True)
class Ranks:
    """Friedman's test of whether any column differs, and what Nemenyi's test needs to say which.

    Attributes:
        n: blocks, the runs that all columns have.
        mean: column -> its mean rank; 1 is the highest value, equal values share their ranks' mean.
        statistic, p: Friedman's chi-squared; None where every block has equal values throughout.
        agreement: Kendall's W, 0 where the blocks disagree, 1 where all rank alike.
    """

    n: int
    mean: dict[str, float]
    statistic: float | None
    p: float | None
    agreement: float | None

    def nemenyi(self, a: str, b: str) -> float:
        """p that the mean ranks of two columns differ, allowing for all pairs. Demšar, JMLR 2006, section 3.2.2."""
        from scipy.stats import studentized_range

        q = abs(self.mean[a] - self.mean[b]) / self._error * sqrt(2)
        return min(1.0, float(studentized_range.sf(q, len(self.mean), inf)))

    @property
    def critical_difference(self) -> float:
        """Mean ranks nearer than this are not told apart at 5 %."""
        from scipy.stats import studentized_range

        return float(studentized_range.ppf(1 - ALPHA, len(self.mean), inf)) / sqrt(2) * self._error

    @property
    def _error(self) -> float:
        columns = len(self.mean)
        return sqrt(columns * (columns + 1) / (6 * self.n))


def friedman(columns: Mapping[str, Sequence[float]]) -> Ranks | None:
    """Friedman's test. None for fewer than three columns or two blocks.

    Args:
        columns: name -> its value in each block, the blocks in one order.
    """
    values = np.array(list(columns.values()), dtype=float)
    if len(values) < 3 or values.shape[1] < 2:
        return None
    from scipy import stats

    blocks = values.shape[1]
    mean = dict(zip(columns, stats.rankdata(-values, axis=0).mean(axis=1).tolist(), strict=True))
    if (values == values[0]).all():
        return Ranks(blocks, mean, None, None, None)
    found = stats.friedmanchisquare(*values)
    statistic = float(found.statistic)
    return Ranks(blocks, mean, statistic, float(found.pvalue), statistic / (blocks * (len(values) - 1)))


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Each p allowing for all of them, by Holm's step-down procedure. None stays None and is not counted."""
    there = sorted((p, place) for place, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    highest = 0.0
    for before, (p, place) in enumerate(there):
        highest = max(highest, min(1.0, p * (len(there) - before)))
        adjusted[place] = highest
    return adjusted


def size(effect: float) -> str:
    """Cohen's word for a standardized difference."""
    return next(word for limit, word in SIZES if abs(effect) < limit)


def resampled(
    score: Callable[[NDArray[np.int64]], float | None],
    rows: int,
    draws: int,
    seed: int,
    groups: NDArray[np.int64] | None = None,
) -> list[float | None]:
    """``score`` of ``draws`` samples of the rows, drawn with replacement: as many rows, or as many patients.

    The same seed draws the same samples whoever is scored, so that two models' scores may be subtracted draw by draw.

    Args:
        score: of the rows at these places; None where it is undefined, as AUC of one class.
        groups: (rows,), whose each row is; a patient is drawn with all of its rows.
    """
    generator = np.random.default_rng(seed)
    if groups is None:
        return [score(generator.integers(0, rows, rows)) for _ in range(draws)]
    members = [np.flatnonzero(groups == group) for group in np.unique(groups)]
    return [
        score(np.concatenate([members[one] for one in generator.integers(0, len(members), len(members))]))
        for _ in range(draws)
    ]


def percentile_interval(draws: Sequence[float]) -> tuple[float, float]:
    """The 2.5 and 97.5 % quantiles: the bootstrap's percentile interval."""
    low, high = np.quantile(draws, (ALPHA / 2, 1 - ALPHA / 2))
    return float(low), float(high)


def _differences(a: Sequence[float], b: Sequence[float]) -> list[float]:
    return [x - y for x, y in zip(a, b, strict=True)]
