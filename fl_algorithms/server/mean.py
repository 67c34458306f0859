"""The weighted mean of the sites' deltas, added to the round's model: what most methods do at the coordinator.

    new = float32(float64(base) + sum_i n_i * delta_i / sum_i n_i)

summed in float64 in site order, rounded once. McMahan et al. 2017, Algorithm 1. https://arxiv.org/abs/1602.05629
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from fl_algorithms.methods.settings import MethodSettings
from fl_algorithms.server.aggregator import F64, Kept, Round, ServerAggregator, Specs, write_tensor
from fl_algorithms.study import ResolvedStudy


class InMemory:
    """Arrays as a block source."""

    def __init__(self, tensors: Mapping[str, NDArray[np.float32]]) -> None:
        self._flat = {key: array.reshape(-1) for key, array in tensors.items()}

    def block(self, key: str, start: int, count: int) -> NDArray[np.float32]:
        return self._flat[key][start : start + count]


def mean(settings: MethodSettings, study: ResolvedStudy, upload: Specs) -> ServerAggregator:
    """FedAvg's aggregator: upload, kept tensors and download are the same list."""

    def aggregate(round_: Round) -> None:
        for spec in upload:

            def new(start: int, count: int, key: str = spec.key) -> F64:
                return round_.mean_delta(key, start, count) + round_.kept.block(key, start, count)

            write_tensor(spec, new, round_.sink)

    return ServerAggregator(upload, tuple(Kept(spec, spec.key) for spec in upload), upload, aggregate, weighted=True)
