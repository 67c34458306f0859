"""What becomes of a round's updates before a method's aggregator sees them: the shares of a mean, or a robust rule.

A rule is given the updates in site order and what each of them holds, and says what stands in place of their mean.
Memory is bounded whatever the number of sites: their values are read side by side, ``ROOM`` of them at once.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from fl_algorithms.server.aggregator import Specs, Update

F64 = NDArray[np.float64]
Delta = Callable[[str, int, int], F64]  # (tensor, first element, count) -> what stands in place of the mean there
ROOM = 2**20  # values that are held at once, of all sites


@dataclass(frozen=True)
class Combined:
    """What stands in place of the mean of a round's deltas.

    Attributes:
        delta: None: the mean, weighted by rows.
        shares: what each site's update counts for, where that is one number for all its values.
        capped: the sites whose share is smaller than their rows, or their one voice among equals, would give.
    """

    delta: Delta | None = None
    shares: Mapping[str, float] = field(default_factory=dict)
    capped: tuple[str, ...] = ()


Combine = Callable[["Sequence[Update]", "Specs", float], Combined]  # (updates, what each holds, max_weight)


def weighted_sum(updates: "Sequence[Update]", weights: Sequence[float]) -> Delta:
    """sum_i w_i delta_i, in float64 and in site order. A site of weight zero is not read."""

    def delta(key: str, start: int, count: int) -> F64:
        total = np.zeros(count, dtype=np.float64)
        for weight, update in zip(weights, updates, strict=True):
            if weight:
                total += weight * update.deltas.block(key, start, count).astype(np.float64)
        return total

    return delta


def value_by_value(updates: "Sequence[Update]", of: Callable[[F64], F64]) -> Delta:
    """``of`` takes (sites, values), each column sorted, and gives (values,)."""

    def delta(key: str, start: int, count: int) -> F64:
        return np.concatenate([of(np.sort(rows, axis=0)) for rows in _side_by_side(updates, key, start, count)])

    return delta


def every_value(updates: "Sequence[Update]", specs: "Specs") -> Iterator[F64]:
    """All values of the updates, as float64 arrays (sites, some values)."""
    for spec in specs:
        yield from _side_by_side(updates, spec.key, 0, prod(spec.shape))


def squared_distances(updates: "Sequence[Update]", specs: "Specs") -> F64:
    """(sites, sites): ||delta_i - delta_j||^2 over all that the sites send."""
    found = np.zeros((len(updates), len(updates)))
    for rows in every_value(updates, specs):
        for i in range(len(updates)):
            for j in range(i):
                found[i, j] += dot(gap := rows[i] - rows[j], gap)
    return found + found.T


def dot(one: F64, other: F64) -> float:
    """In one thread, so the same bits everywhere."""
    return float(np.einsum("i,i->", one, other))


def _side_by_side(updates: "Sequence[Update]", key: str, start: int, count: int) -> Iterator[F64]:
    width = max(1, ROOM // len(updates))
    for first in range(start, start + count, width):
        some = min(width, start + count - first)
        yield np.stack([update.deltas.block(key, first, some) for update in updates]).astype(np.float64)
