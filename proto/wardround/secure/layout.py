"""What stands where in a site's vector: the tensors, end to end, in the ring 2^32; then a few numbers in the ring 2^64.

The two parts have seeds of their own. Digests are over blocks of 1 MiB of the tensors, and one block of the numbers, so
that a part of a sum can be checked without the rest. Metrics and rows are numbers: of each metric its value times its
rows, and these rows, since it may be undefined at a site.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np
from numpy.typing import NDArray

from wardround.errors import BadData
from wardround.secure.masking import Mask, Masks
from wardround.secure.quantizing import U32, U64, BeyondRange, Quantizer, fixed, number_bits, numbers, signed
from wardround.signing import canonical
from wardround.tensors.manifests import TensorSpec

BLOCK = 2**20  # bytes
ITEM = 4  # bytes of an element of the tensors
ELEMENTS = BLOCK // ITEM
TENSORS, NUMBERS = "tensors", "numbers"  # the labels of the two parts
WEIGHT = "weight"  # the first number: what a site counts for
Block = Callable[[str, int, int], NDArray[np.float32]]  # (tensor, first element, count) -> its values


@dataclass(frozen=True)
class Layout:
    """The form of every vector of a study.

    Attributes:
        tensors: (key, number of elements).
        metrics: (name, largest size of its value).
        largest_rows: on which a metric may be computed.
    """

    quantizer: Quantizer
    tensors: tuple[tuple[str, int], ...]
    metrics: tuple[tuple[str, float], ...] = ()
    largest_rows: int = 1

    @classmethod
    def of(
        cls, quantizer: Quantizer, specs: Iterable[TensorSpec], metrics: Mapping[str, float], largest_rows: int
    ) -> "Layout":
        tensors = tuple((spec.key, prod(spec.shape)) for spec in specs)
        return cls(quantizer, tensors, tuple(sorted(metrics.items())), largest_rows)

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) of all that gives a vector its meaning."""
        return canonical.digest(
            {
                "bits": self.quantizer.bits,
                "tensors": [list(one) for one in self.tensors],
                "metrics": [[name, self.metric_bits(bound)] for name, bound in self.metrics],
            }
        )

    @cached_property
    def elements(self) -> int:
        return sum(count for _, count in self.tensors)

    @property
    def blocks(self) -> int:
        """How many blocks of tensors there are; the numbers are block ``blocks``."""
        return -(-self.elements // ELEMENTS)

    def metric_bits(self, bound: float) -> int:
        return number_bits(self.quantizer.sites, bound * self.largest_rows)

    def spans(self, first: int, count: int) -> Iterator[tuple[str, int, int]]:
        """The pieces of tensors that elements ``first`` to ``first + count`` are: (key, first element, count)."""
        begin = 0
        for key, size in self.tensors:
            low, high = max(first, begin), min(first + count, begin + size)
            if low < high:
                yield key, low - begin, high - low
            begin += size

    def place(self, key: str) -> int:
        """The first element of a tensor."""
        begin = 0
        for name, size in self.tensors:
            if name == key:
                return begin
            begin += size
        raise BadData(f"`{key}` is no tensor of these vectors")

    def quantized(self, block: Block, weight: int, first: int, count: int) -> U32:
        """Elements of a site's vector, before any mask.

        Raises:
            BeyondRange: a value is beyond the study's range; the message names the tensor.
            BadData: the weight is beyond the largest one.
        """
        pieces = []
        for key, start, some in self.spans(first, count):
            try:
                pieces.append(self.quantizer.quantized(block(key, start, some), weight))
            except BeyondRange as error:
                raise BeyondRange(error.largest, error.limit, key) from None
        return np.concatenate(pieces) if pieces else np.zeros(0, np.uint32)

    def numbers(self, weight: int, metrics: Mapping[str, tuple[float, int]]) -> U64:
        """A site's numbers, before any mask. ``metrics``: name -> value, rows; one that is undefined is not in it.

        Raises:
            BadData: a value or its rows are beyond what the study takes.
        """
        found = [weight]
        for name, bound in self.metrics:
            value, rows = metrics.get(name, (0.0, 0))
            if not (abs(value) <= bound and 0 <= rows <= self.largest_rows):
                raise BadData(
                    f"metric `{name}` on {rows} rows: the study takes a size up to {bound:g}, on {self.largest_rows} "
                    "rows"
                )
            found += [fixed(value * rows, self.metric_bits(bound)), rows]
        return numbers(found)

    def read_numbers(self, total: U64) -> "Numbers":
        """What a sum of numbers says."""
        weight, *rest = signed(total)
        means: dict[str, float] = {}
        for (name, bound), scaled, rows in zip(self.metrics, rest[::2], rest[1::2], strict=True):
            if rows > 0:
                means[name] = scaled / 2 ** self.metric_bits(bound) / rows
        return Numbers(weight, means)


@dataclass(frozen=True)
class Numbers:
    """The sum of the sites' weights, and of each metric the mean over all rows of all sites that have it."""

    weight: int
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Blocks:
    """SHA-256 (hex) of each block of a vector, that of the numbers last."""

    digests: tuple[str, ...]

    @cached_property
    def root(self) -> str:
        """What a site signs: the digest of the digests."""
        return canonical.digest(list(self.digests))


def masked(layout: Layout, block: Block, weight: int, own: U64, masks: Mapping[str, Sequence[Mask]]) -> Iterator[bytes]:
    """A site's vector with its masks, block by block, that of the numbers last: what may leave. A block at a time is in
    memory.

    Args:
        own: the site's numbers. masks: label -> those of that part.

    Raises:
        BeyondRange: a value is beyond the study's range; what was given before has left no trace but its masks.
    """
    tensors = Masks(masks[TENSORS])
    for first in range(0, layout.elements, ELEMENTS):
        values = layout.quantized(block, weight, first, min(ELEMENTS, layout.elements - first))
        tensors.add(values, first)
        yield values.astype("<u4", copy=False).tobytes()
    hidden = own.copy()
    Masks(masks[NUMBERS]).add(hidden)
    yield hidden.astype("<u8", copy=False).tobytes()


def digests(blocks: Iterable[bytes]) -> Blocks:
    return Blocks(tuple(hashlib.sha256(block).hexdigest() for block in blocks))
