"""Random changes of training images. What happens to an image depends on (seed, its place) alone."""

import math

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor

from fl_algorithms.settings.images import Augmentation

DRAWS = 9  # of each image, used or not, so that switching one change on leaves the others as they were
_GOLDEN, _MIX_1, _MIX_2 = (np.uint64(number) for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def uniform(seed: int, places: Tensor, draws: int) -> Tensor:
    """(k, draws) float64 in [0, 1): row i is a function of (seed, places[i]).

    SplitMix64 as a counter: Steele, Lea, Flood, Fast Splittable Pseudorandom Number Generators, OOPSLA 2014, Figure 16.
    """
    rows = _mixed(np.array([seed], dtype=np.uint64) + _GOLDEN * (places.numpy().astype(np.uint64) + np.uint64(1)))
    numbers = _mixed(rows[:, None] + _GOLDEN * np.arange(1, draws + 1, dtype=np.uint64))
    return torch.from_numpy((numbers >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def _mixed(z: np.ndarray[tuple[int, ...], np.dtype[np.uint64]]) -> np.ndarray[tuple[int, ...], np.dtype[np.uint64]]:
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))


def augmented(x: Tensor, y: Tensor, places: Tensor, seed: int, how: Augmentation) -> tuple[Tensor, Tensor]:
    """``x`` (k, channels, *size) on the scale of ``imagefiles.unit`` and its labels, changed as ``how`` says.

    Masks, ``y`` (k, *size), move with their images; classes stay.
    """
    if how == Augmentation():
        return x, y
    u = uniform(seed, places, DRAWS)
    masks = y.dim() > 1
    for wanted, dim, draw in ((how.flip_horizontal, -1, 0), (how.flip_vertical, -2, 1)):
        if wanted:
            turned = u[:, draw] < 0.5
            x = _where(turned, x.flip(dim), x)
            y = _where(turned, y.flip(dim), y) if masks else y
    if how.quarter_turns:
        quarters = (u[:, 2] * 4).long()
        for k in (1, 2, 3):
            x = _where(quarters == k, torch.rot90(x, k, (-2, -1)), x)
            y = _where(quarters == k, torch.rot90(y, k, (-2, -1)), y) if masks else y
    if how.bends:
        grid = _grid(u, how, x.shape)
        x = F.grid_sample(x, grid, mode="bilinear", padding_mode="border", align_corners=False)
        if masks:
            moved = F.grid_sample(
                y.to(x.dtype).unsqueeze(1), grid, mode="nearest", padding_mode="border", align_corners=False
            )
            y = moved.squeeze(1).to(y.dtype)
    if how.contrast:
        mean = x.flatten(1).mean(1).reshape(_column(x))
        x = (x - mean) * (1 + how.contrast * _signed(u[:, 7])).reshape(_column(x)) + mean
    if how.brightness:
        x = x + (how.brightness * _signed(u[:, 8])).reshape(_column(x))
    return x, y


def _grid(u: Tensor, how: Augmentation, shape: torch.Size) -> Tensor:
    """Where each pixel comes from, (k, height, width, 2): turned about the middle, zoomed and shifted."""
    height, width = shape[-2:]
    angle = math.radians(how.rotate_degrees) * _signed(u[:, 3])
    scale = 1 / (1 + how.zoom * _signed(u[:, 4]))
    cos, sin = angle.cos() * scale, angle.sin() * scale
    across, down = 2 * how.shift * _signed(u[:, 5]), 2 * how.shift * _signed(u[:, 6])
    # in units of half a side, so that a turn of an oblong image is a turn
    rows = torch.stack((cos, -sin * height / width, across, sin * width / height, cos, down), dim=1)
    return F.affine_grid(rows.reshape(-1, 2, 3).float(), [len(u), 1, height, width], align_corners=False)


def _signed(u: Tensor) -> Tensor:
    """From [0, 1) to [-1, 1), float32."""
    return (2 * u - 1).float()


def _column(x: Tensor) -> tuple[int, ...]:
    return (len(x), *(1 for _ in x.shape[1:]))


def _where(rows: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    return torch.where(rows.reshape(_column(no)), yes, no)
