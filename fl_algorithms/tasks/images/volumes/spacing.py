"""Volumes brought to another distance between their voxels, and their masks back. No torch.

Along each axis in turn, since the axes stay as they are: numbers by linear interpolation, classes by the nearest voxel.
The first voxel stays where it is, and what lies beyond the last has its value. This is what MONAI's ``Spacing`` gives
(``align_corners``, padding "border"), which the tests hold it against; it needs no grid of all coordinates.
"""

import numpy as np
from numpy.typing import NDArray

from fl_algorithms.tasks.images.decoding import Array

ALIKE = 1e-3  # as a share: distances that differ less are one
Lengths = tuple[float, ...]  # mm from a voxel to the next, (depth, height, width)


def lengths_of(places: NDArray[np.float64]) -> Lengths:
    """Of a grid, (4, 4), places (x, y, z) to mm."""
    return tuple(float(length) for length in reversed(np.linalg.norm(places[:3, :3], axis=0)))


def spaced_sides(sides: tuple[int, ...], lengths: Lengths, wanted: Lengths) -> tuple[int, ...]:
    """How many voxels ``wanted`` apart there are of ``sides`` that are ``lengths`` apart."""
    return tuple(
        side if _alike(length, new) else round((side - 1) * length / new) + 1
        for side, length, new in zip(sides, lengths, wanted, strict=True)
    )


def respaced(
    array: Array, lengths: Lengths, wanted: Lengths, sides: tuple[int, ...], *, nearest: bool = False, first: int = 0
) -> Array:
    """``array``, whose voxels are ``lengths`` apart, at ``sides`` voxels that are ``wanted`` apart: float32, or, of the
    ``nearest``, its own type.

    Args:
        first: the dimension of ``array`` that is the depth; height and width follow.
    """
    steps = [(first + axis, side, new / old, _alike(old, new) and array.shape[first + axis] == side)
             for axis, (side, old, new) in enumerate(zip(sides, lengths, wanted, strict=True))]  # fmt: skip
    out = array if nearest else array.astype(np.float32, copy=False)
    for axis, side, step, same in sorted(steps, key=lambda one: one[1] / array.shape[one[0]]):  # what shrinks first
        if not same:
            out = _along(out, axis, side, step, nearest)
    return out


def _along(array: Array, axis: int, side: int, step: float, nearest: bool) -> Array:
    at = np.clip(np.arange(side) * step, 0, array.shape[axis] - 1)
    if nearest:
        near: Array = np.take(array, np.rint(at).astype(np.int64), axis=axis)
        return near
    low = np.floor(at).astype(np.int64)
    weight = (at - low).astype(np.float32).reshape([-1 if dim == axis else 1 for dim in range(array.ndim)])
    out: Array = np.take(array, low, axis=axis)
    beyond = np.take(array, np.minimum(low + 1, array.shape[axis] - 1), axis=axis)
    out += weight * (beyond - out)
    return out


def _alike(length: float, wanted: float) -> bool:
    return abs(length - wanted) <= ALIKE * wanted
