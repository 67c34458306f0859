"""The weighted mean of the sites' deltas, added to the round's model: what most methods do at the coordinator.

    new = float32(float64(base) + sum_i n_i * delta_i / sum_i n_i)

summed in float64 in site order, rounded once. McMahan et al. 2017, Algorithm 1. https://arxiv.org/abs/1602.05629
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from wardround.errors import BadData
from wardround.tensors import TensorSpec

BLOCK = 65536  # elements; the arithmetic is elementwise, so the result does not depend on it


class BlockSource(Protocol):
    """Tensors that are read in pieces: a ``wardround.tensors.TensorFile``, or ``InMemory``."""

    def block(self, key: str, start: int, count: int) -> NDArray[np.float32]:
        """``count`` elements of the flat tensor ``key`` from element ``start`` on."""
        ...


class InMemory:
    """Arrays as a block source."""

    def __init__(self, tensors: Mapping[str, NDArray[np.float32]]) -> None:
        self._flat = {key: array.reshape(-1) for key, array in tensors.items()}

    def block(self, key: str, start: int, count: int) -> NDArray[np.float32]:
        return self._flat[key][start : start + count]


def block_mean(
    base: BlockSource,
    updates: Sequence[tuple[int, BlockSource]],
    specs: Sequence[TensorSpec],
    sink: Callable[[bytes], object],
    block: int = BLOCK,
) -> None:
    """Write the next model, piece by piece, in the order of ``specs``.

    Args:
        base: the round's model, float32.
        updates: (n_i, deltas) of each accepted site **in site order**: the sums are the same bits whoever came first.
        specs: the tensors; each source holds them all. Float32, which admission has checked.
        sink: takes the payload's bytes.
        block: elements at a time. Memory is five blocks, however many sites and however large the model.

    Raises:
        BadData: a new value is beyond float32; the message names the tensor.
        ValueError: no update, or a weight below 1.
    """
    if not updates or min(n for n, _ in updates) < 1:
        raise ValueError(f"a mean needs updates that each count for at least 1, got {[n for n, _ in updates]}")
    total = float(sum(n for n, _ in updates))
    for spec in specs:
        size = prod(spec.shape)
        for start in range(0, size, block):
            count = min(block, size - start)
            acc = np.zeros(count, dtype=np.float64)
            for n, source in updates:
                acc += float(n) * source.block(spec.key, start, count).astype(np.float64)
            acc /= total
            acc += base.block(spec.key, start, count)
            with np.errstate(over="ignore"):
                new = acc.astype("<f4")
            if not np.isfinite(new).all():
                raise BadData(f"the mean of `{spec.key}` is beyond float32, though each update is finite")
            sink(new.tobytes())
