"""How well probabilities say which class it was. Plain numpy: these run in every round, on small splits.

The definitions are scikit-learn's (``accuracy_score``, ``balanced_accuracy_score``, ``roc_auc_score``, ``f1_score``),
whose import alone costs more than a round; the tests hold each against it.
"""

import numpy as np
from numpy.typing import NDArray


def scores(probabilities: NDArray[np.float64], y: NDArray[np.int64]) -> dict[str, float | None]:
    """All of them, by name; None where one is undefined: on no rows, on nan, and ``auc`` where only one class occurs.

    Args:
        probabilities: (n, classes).
        y: (n,), class indices.
    """
    if len(y) == 0 or np.isnan(probabilities).any():
        return {"accuracy": None, "balanced_accuracy": None, "auc": None, "macro_f1": None}
    predicted = probabilities.argmax(axis=1)
    return {
        "accuracy": float(np.mean(predicted == y)),
        "balanced_accuracy": balanced_accuracy(predicted, y),
        "auc": auc(probabilities, y),
        "macro_f1": macro_f1(predicted, y),
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


def auc(probabilities: NDArray[np.float64], y: NDArray[np.int64]) -> float | None:
    """The area under the ROC curve; of several classes, the mean of one against the rest over those that occur.

    Where a class does not occur at a site, scikit-learn gives no multi-class value at all; leaving that class out says
    something about the others.
    """
    occurring = np.unique(y)
    if len(occurring) < 2:
        return None
    if probabilities.shape[1] == 2:
        return _binary_auc(probabilities[:, 1], y == 1)
    return float(np.mean([_binary_auc(probabilities[:, place], y == place) for place in occurring]))


def _binary_auc(score: NDArray[np.float64], positive: NDArray[np.bool_]) -> float:
    """P(a positive scores higher than a negative), ties counting half: the Mann-Whitney statistic from mean ranks."""
    _, place, count = np.unique(score, return_inverse=True, return_counts=True)
    mean_rank = np.cumsum(count) - (count - 1) / 2
    positives = int(positive.sum())
    rank_sum = float(mean_rank[place][positive].sum())
    return (rank_sum - positives * (positives + 1) / 2) / (positives * (len(score) - positives))
