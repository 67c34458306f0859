"""Masked vectors added, their masks taken out, and a block of a sum checked by whoever wants to know.

The masked vectors are no secret, integers add exactly, and a mask can be computed from any place on. So one block of
every vector, each checked against what its site signed, and the opened secrets give that block of the sum, bit by bit.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wardround.errors import BadData
from wardround.secure.layout import ELEMENTS, NUMBERS, TENSORS, Blocks, Layout, Numbers
from wardround.secure.masking import Mask, Masks, Ring
from wardround.secure.opening import Group, OpenedSecrets, remaining
from wardround.secure.quantizing import U32
from wardround.secure.statements import Submission


@dataclass(frozen=True)
class Unmasking:
    """The masks that the sum of a set still has, by the label of the part."""

    tensors: tuple[Mask, ...]
    numbers: tuple[Mask, ...]

    @classmethod
    def of(cls, opened: OpenedSecrets, group: Group, chosen: Sequence[str]) -> "Unmasking":
        """Raises BadData: what was opened is not what its sites had signed."""
        return cls(tuple(remaining(opened, group, chosen, TENSORS)), tuple(remaining(opened, group, chosen, NUMBERS)))


class Summing:
    """Sums of a set's vectors, block by block; blocks in order are the fastest."""

    def __init__(self, layout: Layout, unmasking: Unmasking) -> None:
        self._layout = layout
        self._tensors, self._numbers = Masks(unmasking.tensors), Masks(unmasking.numbers)

    def tensors(self, index: int, blocks: Iterable[bytes]) -> U32:
        """Block ``index`` of the sum, from that block of every vector of the set.

        Raises:
            BadData: a block is of another length.
        """
        total = _added(blocks, np.zeros(self._elements(index), np.uint32))
        self._tensors.add(total, index * ELEMENTS)
        return total

    def numbers(self, blocks: Iterable[bytes]) -> Numbers:
        """What the last block of every vector says together. Raises BadData: a block is of another length."""
        total = _added(blocks, np.zeros(1 + 2 * len(self._layout.metrics), np.uint64))
        self._numbers.add(total)
        return self._layout.read_numbers(total)

    def _elements(self, index: int) -> int:
        if not 0 <= index < self._layout.blocks:
            raise BadData(f"there is no block {index}: the vectors have {self._layout.blocks}")
        return min(ELEMENTS, self._layout.elements - index * ELEMENTS)


def _added(blocks: Iterable[bytes], total: Ring) -> Ring:
    for block in blocks:
        if len(block) != total.nbytes:
            raise BadData(f"a block of {len(block)} bytes, it has {total.nbytes}")
        total += np.frombuffer(block, total.dtype.newbyteorder("<"))
    return total


def refuse_other_block(submission: Submission, blocks: Blocks, index: int, block: bytes) -> None:
    """Raises BadData: the list of digests, or the block, is not what the site had signed."""
    if blocks.root != submission.blocks:
        raise BadData(f"the blocks' digests of site `{submission.site}` are not what it had signed")
    if not 0 <= index < len(blocks.digests) or hashlib.sha256(block).hexdigest() != blocks.digests[index]:
        raise BadData(f"block {index} of site `{submission.site}` is not what it had signed")


@dataclass(frozen=True)
class Evidence:
    """What every member is shown of a round, and what it checks a sum with: the signed set, and what was opened."""

    layout: Layout
    group: Group
    submissions: Sequence[Submission]
    opened: OpenedSecrets

    def block(self, index: int, blocks: Mapping[str, tuple[Blocks, bytes]]) -> U32:
        """Block ``index`` of the sum, as anybody computes it.

        Args:
            blocks: site -> the digests of its blocks, and that block.

        Raises:
            BadData: a block or an opened secret is not what its site had signed, or one of a site is missing.
        """
        return self._summing().tensors(index, self._shown(index, blocks))

    def numbers(self, blocks: Mapping[str, tuple[Blocks, bytes]]) -> Numbers:
        """The sums of weights and metrics, from the last block of each vector. Raises BadData: as ``block``."""
        return self._summing().numbers(self._shown(self.layout.blocks, blocks))

    def refuse_other_secrets(self) -> None:
        """Raises BadData: what was opened is not what its sites had signed, or of another set."""
        self.opened.refuse_other(self.group, [one.site for one in self.submissions])

    def _summing(self) -> Summing:
        sites = [one.site for one in self.submissions]
        return Summing(self.layout, Unmasking.of(self.opened, self.group, sites))

    def _shown(self, index: int, blocks: Mapping[str, tuple[Blocks, bytes]]) -> list[bytes]:
        found = []
        for one in self.submissions:
            if one.site not in blocks:
                raise BadData(f"block {index} of site `{one.site}` was not shown")
            digests, block = blocks[one.site]
            refuse_other_block(one, digests, index, block)
            found.append(block)
        return found


def model_values(
    layout: Layout, total: U32, weight: int, base: NDArray[np.float32], *, variance: bool = False
) -> NDArray[np.float32]:
    """A part of the next model where it is the mean of the updates on top of the last: what was published must be these
    bits.

    Args:
        total: that part of the sum. weight: of all sites, from ``Evidence.numbers``.
        base: the same part of the model that the round began with.
        variance: of a norm layer: what rounding has brought below zero is zero.
    """
    new = (layout.quantizer.mean(total, weight) + base).astype(np.float32)
    return np.maximum(new, 0) if variance else new


def chance_to_miss(blocks: int, altered: int, looked_at: int, members: int = 1) -> float:
    """How likely it is that none of ``members``, each with ``looked_at`` random blocks, meets an altered one."""
    missed = 1.0
    for place in range(min(looked_at, blocks)):
        missed *= max(0, blocks - altered - place) / (blocks - place)
    return missed**members
