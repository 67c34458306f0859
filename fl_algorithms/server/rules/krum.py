"""Krum: the update that is nearest to its neighbors; multi-Krum: the mean of the m that are.

    s(i) = sum_{i -> j} ||V_i - V_j||^2        over the n - f - 2 updates j that are nearest to i
    Krum = V_i of the smallest s(i)            multi-Krum = 1 / m sum of the m of the smallest scores

n > 2 f + 2. Of equal scores the first in the order of the study's sites wins. Distances are over all that a site sends;
rows do not count.

Blanchard, El Mhamdi, Guerraoui, Stainer, Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent,
NeurIPS 2017, sections 4 and 6. https://arxiv.org/abs/1703.02757. The default m = n - f - 2 is the largest for which El
Mhamdi, Guerraoui, Rouault, ICML 2018, https://arxiv.org/abs/1802.07927, have a proof.
"""

from collections.abc import Sequence
from math import fsum

from fl_algorithms.server.aggregator import Specs, Update
from fl_algorithms.server.combining import Combine, Combined, squared_distances, weighted_sum
from wardround.records.aggregation import AggregationSection


def krum(section: AggregationSection) -> Combine:
    """Both rules. They tolerate f, of more than 2 f + 2."""
    f = section.bad_sites or 0

    def combine(updates: Sequence[Update], specs: Specs, max_weight: float) -> Combined:
        n = len(updates)
        m = 1 if section.rule == "krum" else section.chosen or n - f - 2
        distances = squared_distances(updates, specs)
        scores = [fsum(sorted(distances[i, j] for j in range(n) if j != i)[: n - f - 2]) for i in range(n)]
        chosen = sorted(range(n), key=lambda i: (scores[i], i))[:m]
        shares = [1 / m if i in chosen else 0.0 for i in range(n)]
        named = {update.site: share for update, share in zip(updates, shares, strict=True)}
        return Combined(
            weighted_sum(updates, shares), named, tuple(sorted(site for site, share in named.items() if not share))
        )

    return combine
