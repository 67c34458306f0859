"""How well probabilities say which class it was. Plain numpy: these run in every round, on small splits.

The definitions are scikit-learn's (``accuracy_score``, ``balanced_accuracy_score``, ``roc_auc_score``, ``f1_score``,
``average_precision_score``, ``brier_score_loss``), whose import alone costs more than a round; the tests hold each
against it.
"""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from fl_algorithms.settings.targets import CLASS_METRICS

Floats: TypeAlias = NDArray[np.float64]
SMALLEST = 1e-12  # of a probability whose logit is taken
STEPS, TOLERANCE = 50, 1e-9  # of the calibration's Newton steps
BEYOND = 1e3  # a slope or intercept on its way to infinity: the classes are told apart without a fault


def scores(probabilities: Floats, y: NDArray[np.int64]) -> dict[str, float | None]:
    """All of them, by name; None where one is undefined: on no rows, on nan, and where only one class occurs for the
    areas. ``brier``, of several classes, sums over the classes (0 to 2); calibration is of two classes.

    Args:
        probabilities: (n, classes).
        y: (n,), class indices.
    """
    if len(y) == 0 or np.isnan(probabilities).any():
        return dict.fromkeys(CLASS_METRICS, None)
    predicted = probabilities.argmax(axis=1)
    slope, intercept = calibration(probabilities[:, 1], y == 1) if probabilities.shape[1] == 2 else (None, None)
    return {
        "accuracy": float(np.mean(predicted == y)),
        "balanced_accuracy": balanced_accuracy(predicted, y),
        "auc": auc(probabilities, y),
        "macro_f1": macro_f1(predicted, y),
        "auprc": auprc(probabilities, y),
        "brier": brier(probabilities, y),
        "calibration_slope": slope,
        "calibration_intercept": intercept,
    }


def balanced_accuracy(predicted: NDArray[np.int64], y: NDArray[np.int64]) -> float:
    """The mean over the classes that occur of the share of their rows that was recognized."""
    return float(np.mean([np.mean(predicted[y == place] == place) for place in np.unique(y)]))


def macro_f1(predicted: NDArray[np.int64], y: NDArray[np.int64]) -> float:
    """The mean of F1 = 2 TP / (2 TP + FP + FN) over the classes that occur or were predicted."""
    f1 = []
    for place in np.union1d(y, predicted):
        hits = np.sum((predicted == place) & (y == place))
        f1.append(2 * hits / (np.sum(predicted == place) + np.sum(y == place)))
    return float(np.mean(f1))


def auc(probabilities: Floats, y: NDArray[np.int64]) -> float | None:
    """The area under the ROC curve; of several classes, the mean of one against the rest over those that occur.

    Where a class does not occur at a site, scikit-learn gives no multi-class value at all; leaving that class out says
    something about the others.
    """
    occurring = np.unique(y)
    if len(occurring) < 2:
        return None
    if probabilities.shape[1] == 2:
        return binary_auc(probabilities[:, 1], y == 1)
    return float(np.mean([binary_auc(probabilities[:, place], y == place) for place in occurring]))


def binary_auc(score: Floats, positive: NDArray[np.bool_]) -> float:
    """P(a positive scores higher than a negative), ties counting half: the Mann-Whitney statistic from mean ranks."""
    _, place, count = np.unique(score, return_inverse=True, return_counts=True)
    mean_rank = np.cumsum(count) - (count - 1) / 2
    positives = int(positive.sum())
    rank_sum = float(mean_rank[place][positive].sum())
    return (rank_sum - positives * (positives + 1) / 2) / (positives * (len(score) - positives))


def auprc(probabilities: Floats, y: NDArray[np.int64]) -> float | None:
    """The average precision; of several classes as ``auc``. By chance it is the share of positives."""
    occurring = np.unique(y)
    if len(occurring) < 2:
        return None
    if probabilities.shape[1] == 2:
        return average_precision(probabilities[:, 1], y == 1)
    return float(np.mean([average_precision(probabilities[:, place], y == place) for place in occurring]))


def average_precision(score: Floats, positive: NDArray[np.bool_]) -> float:
    """The sum over thresholds of (recall - recall before) x precision; rows of one score share a threshold."""
    _, place, count = np.unique(-score, return_inverse=True, return_counts=True)
    hits = np.bincount(place, weights=positive)
    precision = np.cumsum(hits) / np.cumsum(count)
    return float(np.sum(hits * precision) / positive.sum())


def brier(probabilities: Floats, y: NDArray[np.int64]) -> float:
    """The mean squared distance of the last class's probability, of two; else of all, summed."""
    happened = y[:, None] == np.arange(probabilities.shape[1])
    squares = (probabilities - happened) ** 2
    return float(np.mean(squares[:, 1] if probabilities.shape[1] == 2 else squares.sum(axis=1)))


def calibration(probability: Floats, positive: NDArray[np.bool_]) -> tuple[float | None, float | None]:
    """Slope and intercept of calibration: 1 and 0 of a model whose probabilities are right.

    The slope is that of a logistic regression of the outcome on the logit of the probability: below 1, the
    probabilities are too extreme. The intercept is that of one whose slope is held at 1 (calibration in the large):
    below 0, they are too high. None with one class, and where it has no end.

    Reference:
        Van Calster, McLernon, van Smeden, Wynants, Steyerberg, Calibration: the Achilles heel of predictive analytics,
        BMC Medicine 2019. https://doi.org/10.1186/s12916-019-1466-7
    """
    if positive.all() or not positive.any():
        return None, None
    clipped = probability.clip(SMALLEST, 1 - SMALLEST)
    logit = np.log(clipped) - np.log1p(-clipped)
    ones = np.ones((len(logit), 1))
    both = _logistic(np.column_stack([ones, logit]), np.zeros(len(logit)), positive) if np.ptp(logit) > 0 else None
    alone = _logistic(ones, logit, positive)
    return None if both is None else float(both[1]), None if alone is None else float(alone[0])


def _logistic(x: Floats, offset: Floats, positive: NDArray[np.bool_]) -> Floats | None:
    """The coefficients of an unpenalized logistic regression, by Newton steps; None where they have no end."""
    coefficients = np.zeros(x.shape[1])
    for _ in range(STEPS):
        p = 1 / (1 + np.exp(-(x @ coefficients + offset).clip(-500, 500)))
        weights = p * (1 - p)
        try:
            step = np.linalg.solve((x * weights[:, None]).T @ x, x.T @ (positive - p))
        except np.linalg.LinAlgError:
            return None
        coefficients = coefficients + step
        if not np.isfinite(coefficients).all() or np.abs(coefficients).max() > BEYOND:
            return None
        if np.abs(step).max() < TOLERANCE:
            return coefficients
    return None


def best_threshold(probability: Floats, positive: NDArray[np.bool_]) -> float:
    """The probability from which on a row is best called positive, by balanced accuracy: midway between two of the
    given ones, of several equally good thresholds the one nearest to a half. A half where one class only occurs.

    Reference:
        Youden, Index for rating diagnostic tests, Cancer 1950.
    """
    if positive.all() or not positive.any() or np.isnan(probability).any():
        return 0.5
    values, place = np.unique(probability, return_inverse=True)
    if len(values) < 2:
        return 0.5
    found = np.bincount(place, weights=positive)[::-1].cumsum()[::-1][1:] / positive.sum()  # from each value on
    wrong = np.bincount(place, weights=~positive)[::-1].cumsum()[::-1][1:] / (~positive).sum()
    between = (values[1:] + values[:-1]) / 2
    index = found - wrong
    best = np.flatnonzero(index >= index.max() - TOLERANCE)
    return float(between[best[np.abs(between[best] - 0.5).argmin()]])
