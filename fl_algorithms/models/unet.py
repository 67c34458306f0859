"""Networks that judge each pixel, of images and of volumes. ``body`` gives features of the input's size, ``head`` their
logits. The sides must be divided by 2 once for each width after the first.
"""

from collections.abc import Callable
from itertools import pairwise
from math import gcd

import torch
import torch.nn.functional as F  # noqa: N812  its name everywhere
from torch import Tensor, nn

from fl_algorithms.models.adapters import CONVOLUTIONS, INTERPOLATIONS, BodyHead
from fl_algorithms.models.vision import GROUPS
from fl_algorithms.settings.vision import UnetSettings

TRANSPOSED = {2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
BATCH_NORMS = {2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


class Double(nn.Module):
    """Twice: 3x3 convolution, norm, ReLU; ``residual``: the last ReLU after adding a 1x1 convolution of the input."""

    def __init__(self, inputs: int, outputs: int, dimensions: int, norm: str, *, residual: bool = False) -> None:
        super().__init__()
        convolution, bias = CONVOLUTIONS[dimensions], norm == "none"
        self.conv1 = convolution(inputs, outputs, 3, padding=1, bias=bias)
        self.norm1 = _norm(outputs, dimensions, norm)
        self.conv2 = convolution(outputs, outputs, 3, padding=1, bias=bias)
        self.norm2 = _norm(outputs, dimensions, norm)
        self.shortcut = convolution(inputs, outputs, 1) if residual else None

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(out if self.shortcut is None else out + self.shortcut(x))


class UnetBody(nn.Module):
    """Down and up again, with each depth's features beside what comes up to it.

    Ronneberger, Fischer, Brox, U-Net, MICCAI 2015, Figure 1, with padding. https://arxiv.org/abs/1505.04597
    ``residual``: Zhang, Liu, Wang, Road Extraction by Deep Residual U-Net, 2018. https://arxiv.org/abs/1711.10684
    """

    def __init__(self, channels: int, dimensions: int, settings: UnetSettings, *, residual: bool) -> None:
        super().__init__()
        widths, norm = settings.widths, settings.norm
        self.down = nn.ModuleList(
            Double(a, b, dimensions, norm, residual=residual) for a, b in pairwise((channels, *widths))
        )
        steps = list(pairwise(reversed(widths)))
        self.up = nn.ModuleList(TRANSPOSED[dimensions](a, b, 2, 2) for a, b in steps)
        self.merge = nn.ModuleList(Double(2 * b, b, dimensions, norm, residual=residual) for _, b in steps)
        self.dropout = settings.dropout

    def forward(self, x: Tensor, choose: Callable[[int, Tensor], Tensor] | None = None) -> Tensor:
        """``choose``: (depth, its features on the way down) -> what is made of them."""
        skips: list[Tensor] = []
        for place, block in enumerate(self.down):
            x = block(_halved(x) if place else x)
            skips.append(x if choose is None else choose(place, x))
            x = skips[-1]
        x = _dropped(skips.pop(), self.dropout, self.training)
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([skips.pop(), up(x)], dim=1))
        return x


class NestedBody(nn.Module):
    """X[i, j] = block of X[i, 0], ..., X[i, j - 1] and of X[i + 1, j - 1] made larger; the last is X[0, depth].

    Zhou, Siddiquee, Tajbakhsh, Liang, UNet++, DLMIA 2018, equation 1. https://arxiv.org/abs/1807.10165
    """

    def __init__(self, channels: int, dimensions: int, settings: UnetSettings) -> None:
        super().__init__()
        widths, norm = settings.widths, settings.norm
        self.depth = len(widths) - 1
        self.blocks, self.ups = nn.ModuleDict(), nn.ModuleDict()
        for i, (a, b) in enumerate(pairwise((channels, *widths))):
            self.blocks[f"{i}_0"] = Double(a, b, dimensions, norm)
        for j in range(1, self.depth + 1):
            for i in range(self.depth - j + 1):
                self.ups[f"{i}_{j}"] = TRANSPOSED[dimensions](widths[i + 1], widths[i], 2, 2)
                self.blocks[f"{i}_{j}"] = Double((j + 1) * widths[i], widths[i], dimensions, norm)
        self.dropout = settings.dropout

    def forward(self, x: Tensor) -> Tensor:
        found: dict[tuple[int, int], Tensor] = {}
        for i in range(self.depth + 1):
            x = self.blocks[f"{i}_0"](_halved(x) if i else x)
            found[i, 0] = x
        found[self.depth, 0] = _dropped(found[self.depth, 0], self.dropout, self.training)
        for j in range(1, self.depth + 1):
            for i in range(self.depth - j + 1):
                beside = [found[i, k] for k in range(j)]
                below = self.ups[f"{i}_{j}"](found[i + 1, j - 1])
                found[i, j] = self.blocks[f"{i}_{j}"](torch.cat([*beside, below], dim=1))
        return found[0, self.depth]


class FcnBody(nn.Module):
    """Down, and the depths' features, each through a 1x1 convolution, added from the deepest on as they grow.

    Long, Shelhamer, Darrell, Fully Convolutional Networks, CVPR 2015, section 4.2, with every depth added.
    https://arxiv.org/abs/1411.4038
    """

    def __init__(self, channels: int, dimensions: int, settings: UnetSettings) -> None:
        super().__init__()
        widths = settings.widths
        self.down = nn.ModuleList(Double(a, b, dimensions, settings.norm) for a, b in pairwise((channels, *widths)))
        self.score = nn.ModuleList(CONVOLUTIONS[dimensions](width, widths[0], 1) for width in widths)
        self.how = INTERPOLATIONS[dimensions]
        self.dropout = settings.dropout

    def forward(self, x: Tensor) -> Tensor:
        depths: list[Tensor] = []
        for place, block in enumerate(self.down):
            x = block(_halved(x) if place else x)
            depths.append(x)
        depths[-1] = _dropped(depths[-1], self.dropout, self.training)
        scores = [score(features) for score, features in zip(self.score, depths, strict=True)]
        total: Tensor = scores[-1]
        for finer in reversed(scores[:-1]):
            total = finer + F.interpolate(total, scale_factor=2.0, mode=self.how, align_corners=False)
        return total


def unet(settings: UnetSettings, shape: tuple[int, ...], outputs: int) -> nn.Module:
    return _segmenter(UnetBody(shape[0], len(shape) - 1, settings, residual=False), settings, shape, outputs)


def resunet(settings: UnetSettings, shape: tuple[int, ...], outputs: int) -> nn.Module:
    return _segmenter(UnetBody(shape[0], len(shape) - 1, settings, residual=True), settings, shape, outputs)


def unetpp(settings: UnetSettings, shape: tuple[int, ...], outputs: int) -> nn.Module:
    return _segmenter(NestedBody(shape[0], len(shape) - 1, settings), settings, shape, outputs)


def fcn(settings: UnetSettings, shape: tuple[int, ...], outputs: int) -> nn.Module:
    return _segmenter(FcnBody(shape[0], len(shape) - 1, settings), settings, shape, outputs)


def _segmenter(body: nn.Module, settings: UnetSettings, shape: tuple[int, ...], outputs: int) -> nn.Module:
    """(n, channels, *size) float32 to logits (n, outputs, *size)."""
    return BodyHead(body, CONVOLUTIONS[len(shape) - 1](settings.widths[0], outputs, 1))


def _halved(x: Tensor) -> Tensor:
    halved: Tensor = F.max_pool2d(x, 2) if x.dim() == 4 else F.max_pool3d(x, 2)
    return halved


def _dropped(x: Tensor, share: float, training: bool) -> Tensor:
    return F.dropout(x, share, training) if share else x


def _norm(channels: int, dimensions: int, norm: str) -> nn.Module:
    if norm == "batch":
        layer: nn.Module = BATCH_NORMS[dimensions](channels)
        return layer
    return nn.GroupNorm(gcd(GROUPS, channels), channels) if norm == "group" else nn.Identity()
