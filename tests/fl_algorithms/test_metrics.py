"""Our scores against scikit-learn's, and where they are undefined."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics as sk

from fl_algorithms.tasks.metrics import auc, balanced_accuracy, macro_f1, scores


@st.composite
def judged(draw: st.DrawFn, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities on a coarse grid, so that ties are common, and classes."""
    rows = draw(st.integers(2, 30))
    cells = st.lists(st.integers(1, 6), min_size=classes, max_size=classes)
    weights = np.array([draw(cells) for _ in range(rows)], dtype=np.float64)
    y = np.array(draw(st.lists(st.integers(0, classes - 1), min_size=rows, max_size=rows)), dtype=np.int64)
    return weights / weights.sum(axis=1, keepdims=True), y


@given(judged(2))
def test_binary_auc_is_scikit_learns_ties_and_all(case: tuple[np.ndarray, np.ndarray]) -> None:
    probabilities, y = case
    if len(set(y)) == 2:
        assert auc(probabilities, y) == pytest.approx(sk.roc_auc_score(y, probabilities[:, 1]))
    else:
        assert auc(probabilities, y) is None


@given(judged(4))
def test_multiclass_auc_is_scikit_learns_one_against_the_rest_over_the_classes_that_occur(
    case: tuple[np.ndarray, np.ndarray],
) -> None:
    probabilities, y = case
    present = sorted(set(y))
    if len(present) == 1:
        assert auc(probabilities, y) is None
        return
    if len(present) == 4:
        whole = sk.roc_auc_score(y, probabilities, multi_class="ovr", average="macro")
        assert auc(probabilities, y) == pytest.approx(whole)
    each = [sk.roc_auc_score(y == place, probabilities[:, place]) for place in present]
    assert auc(probabilities, y) == pytest.approx(np.mean(each))


@pytest.mark.filterwarnings("ignore:y_pred contains classes not in y_true")
@pytest.mark.filterwarnings("ignore:A single label was found")
@given(judged(3))
def test_accuracy_balanced_accuracy_and_macro_f1_are_scikit_learns(case: tuple[np.ndarray, np.ndarray]) -> None:
    probabilities, y = case
    predicted = probabilities.argmax(axis=1)
    assert scores(probabilities, y)["accuracy"] == pytest.approx(sk.accuracy_score(y, predicted))
    assert balanced_accuracy(predicted, y) == pytest.approx(sk.balanced_accuracy_score(y, predicted))
    assert macro_f1(predicted, y) == pytest.approx(sk.f1_score(y, predicted, average="macro"))


def test_auc_by_hand() -> None:
    """Of the 2 x 2 pairs, the positive is above the negative in two, equal in one: (2 + 0.5) / 4."""
    positive = np.array([0.2, 0.6, 0.6, 0.4])
    y = np.array([0, 0, 1, 1])
    assert auc(np.stack([1 - positive, positive], axis=1), y) == (1 + 1 + 0.5) / 4


@pytest.mark.parametrize(
    ("probabilities", "y"),
    [
        pytest.param(np.empty((0, 2)), np.empty(0, dtype=np.int64), id="no rows"),
        pytest.param(np.array([[np.nan, np.nan], [0.5, 0.5]]), np.array([0, 1]), id="a model that diverged"),
    ],
)
def test_every_score_is_undefined_there(probabilities: np.ndarray, y: np.ndarray) -> None:
    assert set(scores(probabilities, y).values()) == {None}


def test_only_auc_is_undefined_where_one_class_occurs() -> None:
    found = scores(np.array([[0.1, 0.9], [0.8, 0.2]]), np.array([1, 1]))
    assert found == {"accuracy": 0.5, "balanced_accuracy": 0.5, "auc": None, "macro_f1": pytest.approx(1 / 3)}
