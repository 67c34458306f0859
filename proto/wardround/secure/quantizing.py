"""Floats to integers of a ring and back, so that sums are exact, whatever their order.

A tensor's value v of a site that counts for w rows becomes round(v * w * 2^k), half to even, in the ring 2^32. k is the
largest for which the sum over all sites stays below 2^31, so nothing ever wraps around. Since k is a power of two and w
at most 2^24, the only rounding is that one, and it is the same on every machine.

Counts and metrics are few and need more room: they are integers in the ring 2^64.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from wardround.errors import BadData

U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]
LARGEST_WEIGHT = 2**24  # a float32 times it is exact in float64
HALF32, HALF64 = 2**31, 2**63
FINEST = 64  # k beyond it would say more than a float32 holds


class BeyondRange(BadData):
    """A value that the study's range does not hold. ``largest`` is its size: infinite for what is no number."""

    def __init__(self, largest: float, limit: float, tensor: str = "") -> None:
        super().__init__(
            f"a value of size {largest:.4g}{f' in `{tensor}`' if tensor else ''} is beyond the study's range of "
            f"{limit:g}",
            hint=f"`range = {range_for(largest):g}` in [secure_aggregation] would hold it"
            if math.isfinite(largest)
            else "",
        )
        self.largest, self.limit = largest, limit


@dataclass(frozen=True)
class Quantizer:
    """How a study's tensors become integers.

    Attributes:
        sites: the most vectors in a sum. limit: the largest size of a value. largest_weight: of one site.
    """

    sites: int
    limit: float
    largest_weight: int

    def __post_init__(self) -> None:
        if not (0 < self.limit < math.inf and 1 <= self.largest_weight <= LARGEST_WEIGHT and self.sites >= 1):
            raise BadData(
                f"a range of {self.limit:g} and weights up to {self.largest_weight} have no quantizer: the range is "
                f"above 0, a weight is 1 to {LARGEST_WEIGHT}"
            )

    @cached_property
    def bits(self) -> int:
        """k."""
        return _bits(Fraction((HALF32 - 1) // self.sites), Fraction(self.limit) * self.largest_weight)

    @property
    def step(self) -> float:
        """The distance of two neighboring values of a sum of weight 1."""
        return math.ldexp(1.0, -self.bits)

    def quantized(self, values: NDArray[np.float32], weight: int) -> U32:
        """The ring's elements of a site's values.

        Raises:
            BeyondRange: a value is beyond ``limit``, or no number.
            BadData: the weight is below 0 or beyond ``largest_weight``.
        """
        if not 0 <= weight <= self.largest_weight:
            raise BadData(
                f"a weight of {weight} rows, the study takes 0 to {self.largest_weight}",
                hint='a larger `largest_weight` in [secure_aggregation], or `counts = "uniform"` in [reported]',
            )
        if (largest := largest_of(values)) > self.limit:
            raise BeyondRange(largest, self.limit)
        scaled = values * np.float64(math.ldexp(weight, self.bits))  # exact: 24 bits times 24 bits
        return np.rint(scaled, out=scaled).astype(np.int32).view(np.uint32)

    def mean(self, total: U32, weight: int) -> NDArray[np.float64]:
        """sum_i w_i v_i / sum_i w_i of a sum of the ring's elements, rounded once."""
        return np.ldexp(total.view(np.int32).astype(np.float64), -self.bits) / weight


def largest_of(values: NDArray[np.float32]) -> float:
    """The largest size; infinite where something is no number."""
    if not values.size:
        return 0.0
    largest = max(float(values.max()), -float(values.min()))
    return math.inf if math.isnan(largest) else largest


def range_for(largest: float) -> float:
    """A range that holds a value with room for one twice as large: a power of two."""
    return math.ldexp(1.0, math.frexp(max(largest, 2.0**-40))[1] + 1)


def number_bits(sites: int, largest: float) -> int:
    """k of a number of at most ``largest`` at each site, whose sum has to stay in the ring 2^64."""
    return min(FINEST, _bits(Fraction((HALF64 - 1) // sites), Fraction(largest)))


def fixed(value: float, bits: int) -> int:
    """round(value * 2^bits), half to even, exactly."""
    scaled = Fraction(value) * (Fraction(2) ** bits)
    return round(scaled)


def numbers(values: Iterable[int]) -> U64:
    """Integers between -2^63 and 2^63 as the ring's elements."""
    return np.array([value % 2**64 for value in values], dtype=np.uint64)


def signed(total: U64) -> tuple[int, ...]:
    """The integers of a sum."""
    return tuple(int(value) for value in total.view(np.int64))


def _bits(room: Fraction, largest: Fraction) -> int:
    """The largest k, at most ``FINEST``, with largest * 2^k <= room."""
    if largest * 2**FINEST <= room:
        return FINEST
    found = math.frexp(float(room / largest))[1]
    while largest * Fraction(2) ** found > room:
        found -= 1
    return found


def added(rows: Sequence[U32]) -> U32:
    """The sum of vectors in the ring."""
    total = np.zeros_like(rows[0])
    for row in rows:
        total += row
    return total
