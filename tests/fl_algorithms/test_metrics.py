"""Our scores against scikit-learn's, and where they are undefined."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics as sk
from sklearn.linear_model import LogisticRegression

from fl_algorithms.tasks.metrics import auc, balanced_accuracy, best_threshold, calibration, macro_f1, scores


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


def test_areas_and_calibration_are_undefined_where_one_class_occurs() -> None:
    found = scores(np.array([[0.1, 0.9], [0.8, 0.2]]), np.array([1, 1]))
    assert {name for name, score in found.items() if score is None} == {
        "auc", "auprc", "calibration_slope", "calibration_intercept",
    }  # fmt: skip
    assert found["accuracy"] == found["balanced_accuracy"] == 0.5
    assert found["macro_f1"] == pytest.approx(1 / 3)
    assert found["brier"] == pytest.approx((0.1**2 + 0.8**2) / 2)


@given(judged(2))
def test_auprc_and_brier_are_scikit_learns(case: tuple[np.ndarray, np.ndarray]) -> None:
    probabilities, y = case
    found = scores(probabilities, y)
    assert found["brier"] == pytest.approx(sk.brier_score_loss(y, probabilities[:, 1]))
    if len(set(y)) == 2:
        assert found["auprc"] == pytest.approx(sk.average_precision_score(y, probabilities[:, 1]))


@given(judged(3))
def test_brier_of_several_classes_is_the_squared_distance_to_what_happened(case: tuple[np.ndarray, np.ndarray]) -> None:
    probabilities, y = case
    squares = [
        sum((p - (place == k)) ** 2 for k, p in enumerate(row)) for row, place in zip(probabilities, y, strict=True)
    ]
    assert scores(probabilities, y)["brier"] == pytest.approx(np.mean(squares))


def test_calibration_is_that_of_a_logistic_regression_without_penalty() -> None:
    generator = np.random.default_rng(3)
    logit = generator.normal(size=300)
    positive = generator.random(300) < 1 / (1 + np.exp(-(0.5 * logit - 0.7)))
    probability = 1 / (1 + np.exp(-logit))
    slope, intercept = calibration(probability, positive)
    fitted = LogisticRegression(C=np.inf, tol=1e-10).fit(logit[:, None], positive)
    assert slope == pytest.approx(float(fitted.coef_[0, 0]), rel=1e-4)
    assert intercept is not None
    moved = 1 / (1 + np.exp(-(logit + intercept)))  # with the slope held at 1, predictions sum to what happened
    assert moved.sum() == pytest.approx(positive.sum())


def test_calibration_that_has_no_end_is_undefined() -> None:
    apart = np.array([0.1, 0.2, 0.8, 0.9])
    assert calibration(apart, np.array([False, False, True, True]))[0] is None
    assert calibration(np.full(4, 0.3), np.array([False, False, True, True]))[0] is None


@pytest.mark.parametrize(
    ("probability", "positive", "threshold"),
    [
        pytest.param([0.1, 0.2, 0.3, 0.4], [0, 0, 1, 1], 0.25, id="between the classes"),
        pytest.param([0.01, 0.02, 0.03, 0.2, 0.3], [0, 0, 0, 1, 0], 0.115, id="a rare class"),
        pytest.param([0.2, 0.9], [1, 1], 0.5, id="one class"),
        pytest.param([0.3, 0.3], [0, 1], 0.5, id="one probability"),
    ],
)
def test_the_threshold_is_the_one_of_best_balanced_accuracy(
    probability: list[float], positive: list[int], threshold: float
) -> None:
    assert best_threshold(np.array(probability), np.array(positive) == 1) == pytest.approx(threshold)
