"""Values into an encoding's numbers and back, in numpy and element by element, so that every machine has the same bits.

``encoded`` is what a site's trainer does. ``Decoded`` reads values out of an update a block at a time, at the
coordinator from its file and in the lab from memory; what a hostile site could write is refused by ``fault`` first.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from wardround.tensors.encodings import INDEX, SCALE, Encoding, beside
from wardround.tensors.manifests import TensorSpec

F32 = NDArray[np.float32]
Numbers = NDArray[Any]  # as they are written; of bfloat16 the bits, which numpy has no dtype for
LARGEST = 127  # of a number of int8; -128 is never written
LARGEST_BFLOAT16 = 0x7F7F
LOOKED_AT = 1 << 18  # numbers in one piece


class NumberSource(Protocol):
    """Tensors that are read in pieces, as they are written."""

    def numbers(self, key: str, start: int, count: int) -> Numbers:
        """``count`` elements of the flat tensor ``key`` from element ``start`` on, in its own dtype."""
        ...


class InMemoryNumbers:
    """Arrays as a source."""

    def __init__(self, arrays: Mapping[str, Numbers]) -> None:
        self._flat = {key: array.reshape(-1) for key, array in arrays.items()}

    def numbers(self, key: str, start: int, count: int) -> Numbers:
        return self._flat[key][start : start + count]


def encoded(encoding: Encoding, spec: TensorSpec, values: F32) -> dict[str, Numbers]:
    """The numbers that leave for a tensor's values, each under its key and in its shape.

    Values that are not finite make numbers that are not: they are found where what leaves is measured.

    Args:
        values: flat.
    """
    parts = encoding.parts(spec)
    if parts == (spec,):
        return {spec.key: values.reshape(spec.shape)}
    if encoding.name == "bfloat16":
        return {spec.key: _to_bfloat16(values).reshape(spec.shape)}
    if encoding.name == "int8":
        numbers, scales = _to_int8(values, encoding.block)
        return {spec.key: numbers.reshape(spec.shape), parts[1].key: scales}
    places = _largest(values, parts[0].shape[0])
    return {spec.key: values[places], parts[1].key: places}


class Decoded:
    """The float32 values of an update that leaves in an encoding."""

    def __init__(self, encoding: Encoding, specs: Sequence[TensorSpec], source: NumberSource) -> None:
        """``specs``: the float32 tensors that ``source`` has in the encoding."""
        self.specs = tuple(specs)
        self._encoding, self._source = encoding, source
        self._specs = {spec.key: spec for spec in specs}
        self._raw = {spec.key for spec in specs if encoding.parts(spec) == (spec,)}

    def block(self, key: str, start: int, count: int) -> F32:
        """Values of one tensor. Numbers that the encoding never writes give some values, or an IndexError."""
        spec, source, name = self._specs[key], self._source, self._encoding.name
        if name == "topk" and key not in self._raw:
            return self._scattered(spec, start, count)
        numbers = source.numbers(key, start, count)
        if key in self._raw:
            return numbers.astype("<f4", copy=False)
        if name == "bfloat16":
            return widened(numbers)
        size = self._encoding.block
        first, last = start // size, -(-(start + count) // size)
        scales = source.numbers(beside(spec, SCALE, "F32", 0).key, first, last - first)
        with np.errstate(over="ignore", invalid="ignore"):
            each = np.repeat(scales, size)[start - first * size :][:count]
            values: F32 = numbers.astype("<f4") * each
            return values

    def _scattered(self, spec: TensorSpec, start: int, count: int) -> F32:
        """The values that left of a block; zeros where none did."""
        kept, places = self._encoding.kept(prod(spec.shape)), beside(spec, INDEX, "I32", 0).key
        low, high = self._first_from(places, kept, start), self._first_from(places, kept, start + count)
        values = np.zeros(count, dtype="<f4")
        at = self._source.numbers(places, low, high - low).astype(np.int64) - start
        values[at] = self._source.numbers(spec.key, low, high - low)
        return values

    def _first_from(self, key: str, kept: int, place: int) -> int:
        """Which of the sorted places is the first that is not before ``place``: by halves, a few reads of 4 bytes."""
        low, high = 0, kept
        while low < high:
            middle = (low + high) // 2
            if int(self._source.numbers(key, middle, 1)[0]) < place:
                low = middle + 1
            else:
                high = middle
        return low


def widened(bits: Numbers) -> F32:
    """The float32 values that bits of bfloat16 are."""
    return (bits.astype("<u4") << np.uint32(16)).view("<f4")


def fault(encoding: Encoding, specs: Sequence[TensorSpec], source: NumberSource) -> str:
    """The key of the first tensor that holds what the encoding never writes, "" if none does: a negative scale, a
    number of -128, places that are outside, stand twice or are not in order. Whether values are finite is not asked.
    """
    for spec in specs if encoding.is_lossy else ():
        for part in encoding.parts(spec):
            before = -1
            for start in range(0, prod(part.shape), LOOKED_AT):
                numbers = source.numbers(part.key, start, min(LOOKED_AT, prod(part.shape) - start))
                if part.dtype == "I8" and (numbers < -LARGEST).any():
                    return part.key
                if part.bundle == f"{spec.bundle}_{SCALE}" and (numbers < 0).any():
                    return part.key
                if part.dtype == "I32":
                    ordered = np.concatenate(([before], numbers.astype(np.int64)))
                    if (np.diff(ordered) <= 0).any() or ordered[-1] >= prod(spec.shape):
                        return part.key
                    before = int(ordered[-1])
    return ""


def _to_bfloat16(values: F32) -> Numbers:
    """Rounded to the nearest, halves to even. What would round to infinity becomes the largest; NaN stays one."""
    bits = np.ascontiguousarray(values, dtype="<f4").view("<u4")
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype("<u2")
    sign, finite = (bits >> np.uint32(16)).astype("<u2") & np.uint16(0x8000), np.isfinite(values)
    beyond = finite & ((rounded & np.uint16(0x7FFF)) > LARGEST_BFLOAT16)
    rounded = np.where(beyond, sign | np.uint16(LARGEST_BFLOAT16), rounded)
    unlike = np.where(np.isnan(values), np.uint16(0x7FC0), sign | np.uint16(0x7F80))
    return np.where(finite, rounded, unlike).astype("<u2")


def _to_int8(values: F32, block: int) -> tuple[NDArray[np.int8], F32]:
    """Numbers and the scale of each block: its largest size is 127 of them. NaN and infinities make the scale one."""
    count = len(values)
    padded = np.zeros(-(-count // block) * block, dtype="<f4")
    padded[:count] = values
    blocks = padded.reshape(-1, block)
    scales = (np.abs(blocks).max(axis=1) / np.float32(LARGEST)).astype("<f4")
    divisors = np.where((scales > 0) & np.isfinite(scales), scales, np.float32(1))
    with np.errstate(over="ignore", invalid="ignore"):
        numbers = np.clip(np.nan_to_num(np.rint(blocks / divisors[:, None])), -LARGEST, LARGEST)
    return numbers.astype(np.int8).reshape(-1)[:count], scales


def _largest(values: F32, kept: int) -> NDArray[np.int32]:
    """The places of the ``kept`` largest sizes, in order; of equal ones the first. NaN counts as largest."""
    sizes = np.abs(values)
    sizes[np.isnan(sizes)] = np.inf
    least = np.partition(sizes, len(sizes) - kept)[len(sizes) - kept]
    above = np.flatnonzero(sizes > least)
    equal = np.flatnonzero(sizes == least)[: kept - len(above)]
    return np.sort(np.concatenate((above, equal))).astype("<i4")
