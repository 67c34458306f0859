"""KT-pFL's server aggregator: a matrix c of how much site i learns from site j, and each site's mixture of predictions.

    t_i = sum_j c_ij p_j        c_i lowers        MSE(p_i, sum_j c_ij p_j) + rho MSE(c_i, 1/N)

with p_j what site j sent, already softened, and MSE a mean over all numbers. Each round moves c_i by one step:

    released     as the authors' code (https://github.com/cugzj/KT-pFL): the gradient times the smallest power of 5, of
                 5**-5 to 5**5, that brings its mean size to 0.01 at least; then c_i <- softmax(sharpness c_i)
    projected    the gradient times 1/L, with L a bound of the curvature; then the nearest point of the simplex

Softened by a temperature of 10, predictions are much alike, and the pull of rho outweighs what they say: "projected"
stays within some hundredths of 1/N. In the authors' code a step never gets smaller, so weak differences sway to and fro
and strong ones part; and the softmax, in each round anew, multiplies a difference around 1/N by sharpness / N. With the
authors' 5 and their 10 or 20 sites rows settle where steps and softmax balance; with fewer than 5 sites they run on, in
tens of rounds, towards a single site.

Of sites that did not answer there is nothing to mix: the others' coefficients are scaled up for them in t, and c moves
among those that answered, whose share of each row stays.

Zhang, Guo, Ma, Wang, Xu, Wu, Parameterized Knowledge Transfer for Personalized Federated Learning, NeurIPS 2021.
https://arxiv.org/abs/2111.02625
"""

import math
from collections.abc import Sequence
from functools import partial

import numpy as np

from fl_algorithms.methods.ktpfl import KtPflSettings
from fl_algorithms.server.aggregator import (
    BLOCK,
    F64,
    BlockSource,
    Kept,
    Round,
    ServerAggregator,
    Specs,
    Update,
    write_tensor,
)
from fl_algorithms.study import ResolvedStudy
from wardround.tensors.manifests import TensorSpec

COEFFICIENTS = "coefficients"  # coefficients/I (N,): row I of c
MIXTURE, MIXTURES = "mixture", "mixtures"  # mixtures/I is what site I downloads, in bundle "mixture"
SMALLEST_STEP, POWERS = 0.01, 5


def ktpfl(settings: KtPflSettings, study: ResolvedStudy, upload: Specs) -> ServerAggregator:
    """What is kept is c, and every site's mixture."""
    sites = study.study.sites
    (sent,) = upload
    n = len(sites)
    rows = tuple(TensorSpec(str(i), "F32", (n,), COEFFICIENTS) for i in range(n))
    mixtures = tuple(TensorSpec(str(i), sent.dtype, sent.shape, MIXTURES) for i in range(n))
    keeps = (*(Kept(spec, value=1 / n) for spec in rows), *(Kept(spec) for spec in mixtures))
    download = (TensorSpec(sent.name, sent.dtype, sent.shape, MIXTURE),)

    def chosen(kept: BlockSource, site: str, round_number: int) -> tuple[str, ...]:
        return (mixtures[sites.index(site)].key,)

    def aggregate(round_: Round) -> None:
        answered = [sites.index(update.site) for update in round_.updates]
        products = mean_products(round_.updates, sent)
        weights = []
        for i, spec in enumerate(rows):
            c = round_.kept.block(spec.key, 0, n).astype(np.float64)
            if i in answered:
                c[answered] = c[answered].sum() * moved(_shares(c[answered]), products, answered.index(i), settings)
            weights.append(_shares(c[answered]))
            write_tensor(spec, partial(_part, c), round_.sink)
        for spec, shares in zip(mixtures, weights, strict=True):
            write_tensor(spec, partial(_mixed, round_.updates, sent.key, shares), round_.sink)

    return ServerAggregator(upload, keeps, download, aggregate, chosen)


def mean_products(updates: Sequence[Update], spec: TensorSpec) -> F64:
    """(k, k): the mean over all numbers of p_i p_j."""
    size = math.prod(spec.shape)
    total = np.zeros((len(updates), len(updates)))
    for start in range(0, size, BLOCK):
        count = min(BLOCK, size - start)
        blocks = [update.deltas.block(spec.key, start, count).astype(np.float64) for update in updates]
        for i, one in enumerate(blocks):
            for j in range(i + 1):
                total[i, j] += (one * blocks[j]).sum()
    return (total + np.tril(total, -1).T) / size


def moved(c: F64, products: F64, i: int, settings: KtPflSettings) -> F64:
    """Row ``i`` of c, (k,), after a step."""
    k, rho = len(c), settings.rho
    gradient = 2 * ((products * c).sum(axis=1) - products[:, i]) + 2 * rho / k * (c - 1 / k)
    if settings.coefficients == "released":
        stepped = settings.sharpness * (c - released_step(float(np.abs(gradient).mean())) * gradient)
        return _shares(np.exp(stepped - stepped.max()))
    curvature = 2 * float(np.trace(products)) + 2 * rho / k
    return nearest_on_simplex(c - gradient / curvature) if curvature > 0 else c


def released_step(size: float) -> float:
    """What the released code multiplies a gradient of that mean size with."""
    power = math.ceil(math.log(SMALLEST_STEP / size, 5)) if size > 0 else 0
    return 5.0 ** max(-POWERS, min(power, POWERS))


def nearest_on_simplex(values: F64) -> F64:
    """The point of {c >= 0, sum c = 1} nearest to ``values``.

    Duchi, Shalev-Shwartz, Singer, Chandra, ICML 2008, Figure 1.
    """
    descending = np.sort(values)[::-1]
    excess = (np.cumsum(descending) - 1) / np.arange(1, len(values) + 1)
    threshold = excess[np.nonzero(descending > excess)[0][-1]]
    found: F64 = np.maximum(values - threshold, 0.0)
    return found


def _mixed(updates: Sequence[Update], key: str, shares: F64, start: int, count: int) -> F64:
    total = np.zeros(count)
    for share, update in zip(shares, updates, strict=True):
        total += share * update.deltas.block(key, start, count)
    return total


def _part(values: F64, start: int, count: int) -> F64:
    return values[start : start + count]


def _shares(c: F64) -> F64:
    """``c`` divided by its sum; alike where that is 0."""
    total = c.sum()
    found: F64 = c / total if total > 0 else np.full(len(c), 1 / len(c))
    return found
