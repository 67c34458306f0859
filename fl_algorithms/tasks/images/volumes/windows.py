"""One image judged in pieces: windows laid over all of it, and their logits averaged.

The places, the weights and the padding are those of MONAI's ``sliding_window_inference``, whose import alone takes
seconds in each process; the tests hold it against that.
"""

import itertools
from collections.abc import Callable, Sequence
from math import ceil, prod

import torch
from torch import Tensor

from fl_algorithms.settings.segmentation import Patches

SIGMA = 0.125  # of the Gaussian, as a share of the window's side
SMALLEST_WEIGHT = 1e-3
NUMBERS = 1 << 20  # in the windows of one forward pass
Infer = Callable[[Tensor], Tensor]


def in_windows(image: Tensor, size: Sequence[int], how: Patches, infer: Infer) -> Tensor:
    """The logits of each pixel: (outputs, *sides), float32, on the CPU.

    Args:
        image: (channels, *sides), no side smaller than the window's.
        infer: logits (k, outputs, *size) of windows (k, channels, *size), both on the CPU.
    """
    sides = tuple(image.shape[1:])
    corners = list(itertools.product(*map(_starts, sides, size, [how.overlap] * len(size))))
    boxes = [tuple(slice(start, start + side) for start, side in zip(corner, size, strict=True)) for corner in corners]
    weight = weights(size, how.weight)
    together = max(1, NUMBERS // (prod(size) * image.shape[0]))
    total, sums = torch.zeros(sides), torch.zeros(0)
    for first in range(0, len(boxes), together):
        some = boxes[first : first + together]
        logits = infer(torch.stack([image[(slice(None), *box)] for box in some])).float()
        if first == 0:
            sums = torch.zeros(logits.shape[1], *sides)
        for box, part in zip(some, logits, strict=True):
            sums[(slice(None), *box)] += weight * part
            total[box] += weight
    return sums.div_(total)


def weights(size: Sequence[int], kind: str) -> Tensor:
    """Of a window's pixels, (*size): all 1, or a Gaussian about the middle that is 1 there and nowhere too small."""
    out = torch.ones(tuple(size))
    if kind == "constant":
        return out
    for dim, side in enumerate(size):
        at = torch.arange(-(side - 1) / 2, (side - 1) / 2 + 1)
        along = torch.exp(at**2 / (-2 * (SIGMA * side) ** 2))
        out = out * along.reshape([-1 if other == dim else 1 for other in range(len(size))])
    return out.clamp(min=max(float(out.min()), SMALLEST_WEIGHT))


def _starts(side: int, window: int, overlap: float) -> list[int]:
    """Where windows begin along a side: at equal distances, but for the last, which ends where the image does."""
    step = window if window == side else max(1, int(window * (1 - overlap)))
    count = ceil(max(0, side - window) / step) + 1
    return sorted({min(place * step, side - window) for place in range(count)})
