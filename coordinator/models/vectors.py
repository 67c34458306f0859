"""Masked vectors as they lie here: read block by block, and summed with their masks taken out. No block is kept.

The sum is computed where it is read, so memory grows neither with the model nor with the number of sites.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from fl_algorithms.server.aggregator import F64
from wardround.errors import BadData
from wardround.records.secure_round import NUMBERS, TENSORS
from wardround.secure.layout import BLOCK, ITEM, Layout, Numbers
from wardround.secure.masking import Masks
from wardround.secure.sums import Summing, Unmasking
from wardround.tensors.files import TensorFile


def blocks_of(vector: TensorFile) -> Iterator[tuple[int, bytes]]:
    """The blocks of a vector as its site has signed them: those of the tensors, then that of the numbers."""
    count = _tensor_blocks(vector)
    for index in range(count + 1):
        yield index, block_of(vector, index)


def block_of(vector: TensorFile, index: int) -> bytes:
    """Raises BadData: there is no such block."""
    sizes = {spec.key: spec.bytes for spec in vector.specs}
    count = _tensor_blocks(vector)
    if index == count:
        return vector.read(vector.place(NUMBERS), sizes[NUMBERS])
    if not 0 <= index < count:
        raise BadData(f"there is no block {index}: the vectors have {count + 1}")
    return vector.read(vector.place(TENSORS) + index * BLOCK, min(BLOCK, sizes[TENSORS] - index * BLOCK))


def _tensor_blocks(vector: TensorFile) -> int:
    return -(-sum(spec.bytes for spec in vector.specs if spec.key == TENSORS) // BLOCK)


class VectorSum:
    """The sum of a set's vectors without masks."""

    def __init__(self, layout: Layout, vectors: Mapping[str, TensorFile], unmasking: Unmasking) -> None:
        self._layout, self._unmasking = layout, unmasking
        self._vectors: Sequence[TensorFile] = list(vectors.values())
        self._masks = Masks(unmasking.tensors)
        self.numbers: Numbers = Summing(layout, unmasking).numbers(
            [block_of(one, layout.blocks) for one in self._vectors]
        )

    def mean(self, key: str, start: int, count: int) -> F64:
        """sum_i w_i delta_i / sum_i w_i of a part of a tensor."""
        first = self._layout.place(key) + start
        total: NDArray[np.uint32] = np.zeros(count, np.uint32)
        for one in self._vectors:
            total += np.frombuffer(one.read(one.place(TENSORS) + first * ITEM, count * ITEM), "<u4")
        self._masks.add(total, first)
        return self._layout.quantizer.mean(total, self.numbers.weight)
