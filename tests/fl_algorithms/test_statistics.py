"""The tests of a comparison, against scipy's and against values that are worked out by hand or printed in papers."""

import numpy as np
import pytest
from scipy import stats

from fl_algorithms.lab.statistics import (
    friedman,
    holm,
    paired_t,
    percentile_interval,
    resampled,
    size,
    wilcoxon,
)

A = [0.80, 0.82, 0.79, 0.85, 0.81, 0.84]
B = [0.78, 0.80, 0.80, 0.81, 0.80, 0.79]
# Demšar, Statistical Comparisons of Classifiers over Multiple Data Sets, JMLR 7 (2006), table 6: AUC of C4.5 with no
# change, with cross-validated m, with cf, and with both, on 14 data sets.
DEMSAR = {
    "C4.5": [
        0.763, 0.599, 0.954, 0.628, 0.882, 0.936, 0.661, 0.583, 0.775, 1.000, 0.940, 0.619, 0.972, 0.957,
    ],
    "C4.5+m": [
        0.768, 0.591, 0.971, 0.661, 0.888, 0.931, 0.668, 0.583, 0.838, 1.000, 0.962, 0.666, 0.981, 0.978,
    ],
    "C4.5+cf": [
        0.771, 0.590, 0.968, 0.654, 0.886, 0.916, 0.609, 0.563, 0.866, 1.000, 0.965, 0.614, 0.9751, 0.946,
    ],
    "C4.5+m+cf": [
        0.798, 0.569, 0.967, 0.657, 0.898, 0.931, 0.685, 0.625, 0.875, 1.000, 0.962, 0.669, 0.975, 0.970,
    ],
}  # fmt: skip


def test_the_paired_t_test_is_scipys_and_its_effect_is_the_mean_over_the_deviation() -> None:
    found, expected = paired_t(A, B), stats.ttest_rel(A, B)
    differences = np.subtract(A, B)
    assert found.p == pytest.approx(expected.pvalue)
    assert found.statistic == pytest.approx(expected.statistic)
    assert found.effect == pytest.approx(differences.mean() / differences.std(ddof=1))


def test_swapping_the_rows_turns_the_effect_round_and_leaves_p() -> None:
    for test in (paired_t, wilcoxon):
        there, back = test(A, B), test(B, A)
        assert there.p == pytest.approx(back.p)
        assert there.effect == pytest.approx(-back.effect)


def test_wilcoxons_test_is_exact_without_ties_and_leaves_equal_pairs_out() -> None:
    # Five pairs, all higher in a, of distinct sizes: of 2^5 sign patterns 2 are as extreme, so p = 2/32.
    found = wilcoxon([0.1, 0.3, 0.5, 0.7, 0.95, 0.5], [0.0, 0.1, 0.2, 0.3, 0.4, 0.5])
    assert (found.n, found.statistic, found.effect) == (5, 0.0, 1.0)
    assert found.p == pytest.approx(2 / 32)


def test_runs_that_do_not_differ_have_no_test() -> None:
    assert paired_t(A, A).p is None
    assert wilcoxon(A, A) == wilcoxon([], [])
    assert paired_t([0.8], [0.7]).p is None
    assert paired_t([0.75, 0.5], [0.5, 0.25]).p is None  # the same difference in every run has no deviation


def test_friedmans_test_and_the_ranks_are_those_printed_by_demsar() -> None:
    found = friedman(DEMSAR)
    assert found is not None
    assert [round(rank, 3) for rank in found.mean.values()] == [3.143, 2.000, 2.893, 1.964]  # table 6, last row
    assert found.critical_difference == pytest.approx(1.25, abs=0.005)  # section 3.2.2: 2.569 sqrt(4 * 5 / (6 * 14))
    expected = stats.friedmanchisquare(*DEMSAR.values())
    assert found.statistic == pytest.approx(expected.statistic)
    assert found.p == pytest.approx(expected.pvalue)
    assert found.agreement == pytest.approx(found.statistic / (14 * 3))


def test_nemenyis_p_is_5_percent_at_the_critical_difference() -> None:
    found = friedman(DEMSAR)
    assert found is not None
    apart = type(found)(found.n, {**found.mean, "C4.5": 1.0, "C4.5+m": 1 + found.critical_difference}, None, None, None)
    assert apart.nemenyi("C4.5", "C4.5+m") == pytest.approx(0.05, abs=1e-4)
    assert found.nemenyi("C4.5", "C4.5") == pytest.approx(1.0)


def test_friedmans_test_needs_three_rows_and_two_runs() -> None:
    assert friedman({"a": A, "b": B}) is None
    assert friedman({"a": [1.0], "b": [2.0], "c": [3.0]}) is None
    same = friedman({"a": A, "b": A, "c": A})
    assert same is not None
    assert same.p is None
    assert set(same.mean.values()) == {2.0}


def test_holms_procedure_steps_down_and_never_turns_back() -> None:
    # .01 * 4, then max(.04, .02 * 3), then max(.06, .03 * 2), then max(.06, .04 * 1).
    assert holm([0.04, None, 0.01, 0.03, 0.02]) == pytest.approx([0.06, None, 0.04, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]


def test_effects_have_cohens_words() -> None:
    assert [size(effect) for effect in (0.0, -0.3, 0.5, -2.0)] == ["negligible", "small", "medium", "large"]


def test_resampling_draws_the_same_rows_for_every_model_and_covers_the_mean() -> None:
    values = np.random.default_rng(1).normal(5.0, 2.0, 400)

    def mean(places: np.ndarray) -> float:
        return float(values[places].mean())

    draws = resampled(mean, 400, 600, seed=3)
    assert draws == resampled(mean, 400, 600, seed=3)
    low, high = percentile_interval([draw for draw in draws if draw is not None])
    assert high - low == pytest.approx(2 * 1.96 * values.std() / 20, rel=0.1)  # the mean's own interval
    assert low < values.mean() < high


def test_a_patient_is_drawn_with_all_of_its_rows() -> None:
    groups = np.array([0, 0, 0, 1, 2, 2])
    seen: list[list[int]] = []
    resampled(lambda places: seen.append(np.bincount(places, minlength=6).tolist()), 6, 20, seed=1, groups=groups)
    assert all(counts[0] == counts[1] == counts[2] and counts[4] == counts[5] for counts in seen)
    assert all(counts[0] + counts[3] + counts[4] == 3 for counts in seen)
