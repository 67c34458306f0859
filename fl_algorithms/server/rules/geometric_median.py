"""The geometric median of the updates, by the smoothed Weiszfeld algorithm (RFA).

    g = argmin_v sum_i ||v - w_i||        v <- sum_i beta_i w_i / sum_i beta_i,  beta_i = 1 / max(nu, ||v - w_i||)

It begins at the mean and goes on until v stays where it is: the steps need no further look at the updates, because v is
always a mean of them, so that all distances follow from the products <w_i - c, w_j - c>, taken once. c is the update of
median norm: taken about it, the products of honest updates keep their digits beside an update of any size.

Each site counts alike; in the paper it counts by its rows, which a bad site may report as it likes. The shares that are
told are the last beta_i.

Pillutla, Kakade, Harchaoui, Robust Aggregation for Federated Learning, IEEE Transactions on Signal Processing 2022,
algorithm 2. https://arxiv.org/abs/1912.13445. There three steps are made, each of which asks all sites; these are free.
"""

from collections.abc import Sequence
from statistics import median_low

import numpy as np

from fl_algorithms.server.aggregator import Specs, Update
from fl_algorithms.server.combining import F64, Combine, Combined, dot, every_value, weighted_sum
from fl_algorithms.server.rules.clipped_mean import norms_of
from wardround.records.aggregation import AggregationSection

MOST_STEPS = 1000
SETTLED = 1e-12  # change of every share, of itself: the smallest counts, as it is of the update that is furthest


def geometric_median(section: AggregationSection) -> Combine:
    """It tolerates f < n / 2."""
    smoothing = section.smoothing or 0.0

    def combine(updates: Sequence[Update], specs: Specs, max_weight: float) -> Combined:
        norms = norms_of(updates, specs)
        shares = weiszfeld(products(updates, specs, norms.index(median_low(norms))), smoothing).tolist()
        named = {update.site: share for update, share in zip(updates, shares, strict=True)}
        return Combined(weighted_sum(updates, shares), named)

    return combine


def weiszfeld(inner: F64, smoothing: float) -> F64:
    """What each update counts for in the geometric median; they sum to one.

    Args:
        inner: (sites, sites), their products about any point.
    """
    n = len(inner)
    shares = np.full(n, 1 / n)
    for _ in range(MOST_STEPS):
        across = np.einsum("ij,j->i", inner, shares)  # <w_i, v>
        squares = np.diagonal(inner) - 2 * across + np.einsum("i,i->", shares, across)
        beta = 1 / np.maximum(np.sqrt(np.maximum(squares, 0)), smoothing)
        before, shares = shares, beta / np.einsum("i->", beta)
        if (np.abs(shares - before) <= SETTLED * shares).all():
            break
    return shares


def products(updates: Sequence[Update], specs: Specs, center: int) -> F64:
    """(sites, sites): <w_i - c, w_j - c>, with c the update at place ``center``."""
    found = np.zeros((len(updates), len(updates)))
    for rows in every_value(updates, specs):
        about = rows - rows[center]
        for i in range(len(updates)):
            for j in range(i + 1):
                found[i, j] += dot(about[i], about[j])
    return found + np.tril(found, -1).T
