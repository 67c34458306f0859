"""The median, or a trimmed mean, of each value of the updates by itself.

    median          [g]_k = median { [g_i]_k : i }; of an even number the mean of the middle two
    trimmed mean    [g]_k = 1 / (n - 2 f) sum_{x in U_k} x, with U_k what is left of { [g_i]_k : i } without its f
                    smallest and its f largest

Each site counts alike: rows as reported would let one site outvote the others. The order of the sites does not matter
to the bit, as values are sorted before they are summed.

Yin, Chen, Ramchandran, Bartlett, Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates, ICML 2018,
definitions 1 and 2. https://arxiv.org/abs/1803.01498. There f = beta n, and what is combined are gradients.
"""

from collections.abc import Sequence

from fl_algorithms.server.aggregator import Specs, Update
from fl_algorithms.server.combining import F64, Combine, Combined, value_by_value
from wardround.records.aggregation import AggregationSection


def median(section: AggregationSection) -> Combine:
    """It tolerates f < n / 2."""

    def combine(updates: Sequence[Update], specs: Specs, max_weight: float) -> Combined:
        n = len(updates)
        return Combined(value_by_value(updates, lambda rows: (rows[(n - 1) // 2] + rows[n // 2]) / 2))

    return combine


def trimmed_mean(section: AggregationSection) -> Combine:
    """It tolerates f, of more than 2 f."""
    f = section.bad_sites or 0

    def combine(updates: Sequence[Update], specs: Specs, max_weight: float) -> Combined:
        n = len(updates)

        def of(rows: F64) -> F64:
            total: F64 = rows[f].copy()
            for row in rows[f + 1 : n - f]:
                total += row
            return total / (n - 2 * f)

        return Combined(value_by_value(updates, of))

    return combine
