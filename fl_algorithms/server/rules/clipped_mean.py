"""The mean of the updates, weighted by rows, after each longer than M is shortened to M.

    g = sum_i w_i g_i min(1, M / ||g_i||)        with sum_i w_i = 1

M is ``clip`` times the median of the round's norms (of an even number the lower middle one, so that f < n / 2 bad sites
cannot raise it above every honest norm), or ``clip_norm``. Norms are over all that a site sends. The weights are the
rows as reported, under the study's ``max_weight``. A bad site is bounded and not left out: it moves the model by at
most w_i M, in a direction of its choice.

Sun, Kairouz, Suresh, McMahan, Can You Really Backdoor Federated Learning?, 2019, section 4, "norm thresholding of
updates". https://arxiv.org/abs/1911.07963. There M is a constant, and no noise is added here.
"""

from collections.abc import Sequence
from math import fsum, sqrt
from statistics import median_low

from fl_algorithms.server.aggregator import Specs, Update, averaging_weights
from fl_algorithms.server.combining import Combine, Combined, dot, every_value, weighted_sum
from wardround.records.aggregation import AggregationSection


def clipped_mean(section: AggregationSection) -> Combine:
    """It tolerates no bad site, and bounds each."""

    def combine(updates: Sequence[Update], specs: Specs, max_weight: float) -> Combined:
        norms = norms_of(updates, specs)
        most = section.clip_norm or (section.clip or 1.0) * median_low(norms)
        counts = [update.num_examples for update in updates]
        weights = averaging_weights(counts, max_weight)
        total = fsum(weights)
        shares = [
            weight / total * (most / norm if norm > most else 1.0) for weight, norm in zip(weights, norms, strict=True)
        ]
        less = [
            update.site
            for update, share, count in zip(updates, shares, counts, strict=True)
            if share < count / sum(counts)
        ]
        named = {update.site: share for update, share in zip(updates, shares, strict=True)}
        return Combined(weighted_sum(updates, shares), named, tuple(sorted(less)))

    return combine


def norms_of(updates: Sequence[Update], specs: Specs) -> list[float]:
    """L2 of each update, over all that it holds."""
    squares = [0.0] * len(updates)
    for rows in every_value(updates, specs):
        for place, row in enumerate(rows):
            squares[place] += dot(row, row)
    return [sqrt(square) for square in squares]
