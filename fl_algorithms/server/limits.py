"""How much one site may move the model: the cap on its weight in a mean, and the limit on its update's norm.

Both are the study's [limits], hold at the coordinator and in the lab by this code, and need nothing but the updates of
the round and the norms of the rounds before. So the same contributing sites give the same model.

The norm of an update is held against the median of those that are like it: of sites that send the same tensors, in this
round and in the last rounds that closed. Three norms make a median that one site cannot choose; with fewer nothing is
learned. An update beyond the limit is left out by name, and so is one whose model has a negative variance in a norm
layer, and, one at a time, the largest update of a sum that no float32 can hold, or the one of which the method knows
that it is no number.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median_low
from typing import Any, TypeVar

import numpy as np

from fl_algorithms.server.aggregator import (
    BLOCK,
    BeyondFloat32,
    BlockSource,
    ServerAggregator,
    Specs,
    Update,
    averaging_weights,
    is_variance,
)
from fl_algorithms.server.combining import Combined
from fl_algorithms.study import ResolvedStudy
from wardround.errors import BadData
from wardround.tensors.manifests import TensorSpec

ENOUGH = 3  # norms, for a median that one site cannot choose
REMEMBERED = 5  # closed rounds whose norms are looked at
ROUNDING = 2.0**-20  # of the summands' size; what float32 subtraction at the site may leave of a variance of zero
LEFT_OUT = "TENSOR_NORM"  # the code of a site whose accepted update is not averaged

T = TypeVar("T")


@dataclass(frozen=True)
class Account:
    """What became of each accepted update of a round.

    Attributes:
        norms: L2 over all of an update's tensors, of every site that had one accepted.
        limits: what each was held against; a site without one is not in it.
        shares: of the averaged sites' updates in the mean, where the method weights by counts; or in what the study's
            rule gives, where that is one number for a whole update.
        capped: the sites whose share is smaller than their count would give; or to whose update the rule gives none.
        left_out: site -> why its update is not in the model, in words.
        largest: the largest size of a value in an update, where the lab added integers of secure aggregation.
        weight: of all summed sites; and ``metrics`` over all of them: where the coordinator learned sums alone.
    """

    norms: Mapping[str, float] = field(default_factory=dict)
    limits: Mapping[str, float] = field(default_factory=dict)
    shares: Mapping[str, float] = field(default_factory=dict)
    capped: tuple[str, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    largest: float = 0.0
    weight: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """Plain JSON; a norm that is infinite has no place in it, and none is: updates are finite float32."""
        return asdict(self)

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> "Account":
        return cls(**{**document, "capped": tuple(document["capped"])})


class TooFewLeft(BadData):
    """Not enough updates are left to average. ``account`` names those that were left out."""

    def __init__(self, account: Account) -> None:
        super().__init__("; ".join(f"site {site}: {why}" for site, why in account.left_out.items()))
        self.account = account


def averaged(
    study: ResolvedStudy,
    aggregator: ServerAggregator,
    updates: Sequence[Update],
    before: Sequence[Account],
    make: Callable[[Sequence[Update], Combined], T],
    *,
    kept: BlockSource,
    round_number: int,
) -> tuple[T, Account]:
    """What ``make`` gives for the updates within the limits, and the account of them all.

    Args:
        updates: the accepted ones, in site order.
        kept: the kept tensors as the round opened.
        before: the accounts of the closed rounds, the last one last.
        make: aggregates the updates that it is given, with what the study's rule made of them; called again without
            the update to blame where the result is beyond float32.

    Raises:
        TooFewLeft: some were left out, and fewer than the study's quorum are left.
        BadData: as ``make``.
    """
    norms = {
        update.site: norm(update.deltas, aggregator.upload_of(update.site)) if update.norm is None else update.norm
        for update in updates
    }
    limits, left_out = {}, {}
    if study.limits.norm_multiple and study.study.max_update_norm is None:
        limits = learned_limits(aggregator, norms, before, study.limits.norm_multiple)
        left_out = {
            site: f"norm {norms[site]:.4g}, the limit is {limit:.4g}: {study.limits.norm_multiple:g} medians"
            for site, limit in limits.items()
            if norms[site] > limit
        }
    for update in updates:
        if update.site not in left_out and (name := negative_variance(aggregator, update, kept, round_number)):
            left_out[update.site] = f"norm {norms[update.site]:.4g}, and `{name}` of its model, a variance, is negative"
    within = [update for update in updates if update.site not in left_out]
    while within and (not left_out or len(within) >= study.study.needed):
        combined = combine(aggregator, within, study.limits.max_weight)
        try:
            made = make(within, combined)
        except BeyondFloat32 as error:
            blamed, why = next((update for update in within if update.site == error.site), None), "of which"
            if blamed is None:  # of equal ones the first in site order
                blamed, why = max(within, key=lambda update: norms[update.site]), "the largest of a sum in which"
            left_out[blamed.site] = f"norm {norms[blamed.site]:.4g}, {why} {error.message}"
            within.remove(blamed)
        else:
            return made, Account(norms, limits, combined.shares, combined.capped, dict(sorted(left_out.items())))
    raise TooFewLeft(Account(norms, limits, left_out=dict(sorted(left_out.items()))))


def norm(deltas: BlockSource, specs: Specs) -> float:
    """L2 over all tensors, read block by block."""
    return math.sqrt(sum(squares(deltas, spec) for spec in specs))


def squares(deltas: BlockSource, spec: TensorSpec) -> float:
    """The sum of a tensor's squares, read block by block; not finite where a value is not, and nowhere else: squares of
    float32 fit float64, and so does their sum.
    """
    total, size = 0.0, math.prod(spec.shape)
    for start in range(0, size, BLOCK):
        block = deltas.block(spec.key, start, min(BLOCK, size - start)).astype(np.float64)
        total += float(np.einsum("i,i->", block, block))  # one thread, so the same bits everywhere
    return total


def negative_variance(aggregator: ServerAggregator, update: Update, kept: BlockSource, round_number: int) -> str:
    """The first running variance of a norm layer that is negative in the site's model, or "".

    The network divides by its root: a negative one makes every later model say what is no number, in whatever norm.
    The site's model is what it downloaded plus its update.
    """
    variances = [spec for spec in aggregator.upload_of(update.site) if is_variance(spec)]
    if not variances:
        return ""
    downloaded = [spec.key for spec in aggregator.download_of(update.site)]
    sources = dict(zip(downloaded, aggregator.sources(kept, update.site, round_number), strict=True))
    for spec in variances:
        size = math.prod(spec.shape)
        for start in range(0, size, BLOCK):
            count = min(BLOCK, size - start)
            delta = update.deltas.block(spec.key, start, count).astype(np.float64)
            base = np.zeros(count)
            if spec.key in sources:
                base = kept.block(sources[spec.key], start, count).astype(np.float64)
            if (base + delta < -ROUNDING * (np.abs(base) + np.abs(delta))).any():
                return spec.key
    return ""


def learned_limits(
    aggregator: ServerAggregator, norms: Mapping[str, float], before: Sequence[Account], multiple: float
) -> dict[str, float]:
    """Site -> the largest norm that its update may have; a site of which too little is known is not in it.

    It is ``multiple`` times the larger of two medians: of this round's norms, and of those averaged in the last rounds.
    The larger, because norms fall while a model learns, and a site that still learns when others do not is no offender.
    """
    alike: dict[Specs, list[str]] = {}
    for site in norms:
        alike.setdefault(aggregator.upload_of(site), []).append(site)
    found: dict[str, float] = {}
    for specs, sites in alike.items():
        here = [norms[site] for site in sites]
        past = [
            value
            for account in before[-REMEMBERED:]
            for site, value in account.norms.items()
            if site not in account.left_out and aggregator.upload_of(site) == specs
        ]
        limit = multiple * max((median_low(values) for values in (here, past) if len(values) >= ENOUGH), default=0.0)
        if limit > 0:
            found |= dict.fromkeys(sites, limit)
    return found


def combine(aggregator: ServerAggregator, updates: Sequence[Update], max_weight: float) -> Combined:
    """What the study's rule makes of the updates. Of a mean, each site's share in the one that it is in, and the sites
    whose share the cap made smaller.

    Raises:
        BadData: the rule needs more updates; of a study that ``resolve`` has checked, a round never has so few.
    """
    if aggregator.combine is not None:
        if len(updates) < aggregator.fewest:
            raise BadData(
                f"the study's rule in [aggregation] needs {aggregator.fewest} updates, a round has {len(updates)}",
                hint="more sites, or another rule: `fl-lab methods` says what each needs",
            )
        return aggregator.combine(updates, aggregator.upload, max_weight)
    if not aggregator.weighted:
        return Combined()
    alike: dict[Specs, list[Update]] = {}
    for update in updates:
        alike.setdefault(aggregator.upload_of(update.site), []).append(update)
    shares: dict[str, float] = {}
    capped: list[str] = []
    for some in alike.values():
        counts = [update.num_examples for update in some]
        weights = averaging_weights(counts, max_weight)
        total = math.fsum(weights)
        shares |= {update.site: weight / total for update, weight in zip(some, weights, strict=True)}
        capped += [
            update.site
            for update, weight, count in zip(some, weights, counts, strict=True)
            if weight / total < count / sum(counts)
        ]
    return Combined(None, dict(sorted(shares.items())), tuple(sorted(capped)))
