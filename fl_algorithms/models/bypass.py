"""The small network that MH-pFLGB shares, and the fusion of its features with those of a site's own network.

A bypass is a ``body`` and a ``head``, whose tensors depend neither on the images' size nor on the network beside it;
either can be left out. Its norms are group norms, so it has no statistics to share. What its features are:

    columns   (n, width)                  beside a body that gives (n, features)
    images    (n, width), their mean      the same
    masks     (n, width, *size / 4)       beside a body that gives (n, channels, *any size)

Xie, Lin, Xu, Luan, Zeng, Qian, Li, et al., MH-pFLGB, MICCAI 2024, section 2. https://arxiv.org/abs/2407.00474
The paper names the resampling layers and gives no sizes; theirs are chosen here so that the bypass has the paper's
number of parameters.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import ceil, gcd, prod

import torch
import torch.nn.functional as F  # noqa: N812  its name everywhere
from torch import Tensor, nn

from fl_algorithms.models.adapters import CONVOLUTIONS, INTERPOLATIONS
from fl_algorithms.models.mlp import Extractor
from fl_algorithms.models.unet import TRANSPOSED
from fl_algorithms.models.vision import GROUPS, Pool

Shape = tuple[int, ...]
POOLS: dict[int, Callable[..., Tensor]] = {2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d}
COLUMN_WIDTHS = (32,)
IMAGE_WIDTHS = (16, 32, 80)  # 0.03 million parameters for three channels, as in the paper
MASK_WIDTHS = (32, 96, 192)  # 0.2 million


class Bypass(nn.Module):
    """``body``: a batch to its features, ``head``: those to logits; None where it is left out.

    Args:
        shape: of one sample. masks: each pixel is judged.
        widths: of its layers; () for the defaults above.
    """

    def __init__(
        self, shape: Shape, outputs: int, widths: Sequence[int], *, masks: bool, body: bool = True, head: bool = True
    ) -> None:
        super().__init__()
        dimensions = len(shape) - 1
        default = MASK_WIDTHS if masks else IMAGE_WIDTHS if dimensions else COLUMN_WIDTHS
        widths = tuple(widths) or default
        if dimensions:
            made: nn.Module = convolutions(shape[0], widths, dimensions, masks=masks)
        else:
            made = Extractor(shape[0], widths)
        self.body = made if body else None
        last = CONVOLUTIONS[dimensions](widths[-1], outputs, 1) if masks else nn.Linear(widths[-1], outputs)
        self.head = last if head else None


def convolutions(channels: int, widths: Sequence[int], dimensions: int, *, masks: bool) -> nn.Sequential:
    """3x3 convolutions that halve each side, for masks all but the first; for classes the mean over the image."""
    layers: list[nn.Module] = []
    for place, (inputs, outputs) in enumerate(pairwise((channels, *widths))):
        stride = 1 if masks and place == 0 else 2
        layers.append(CONVOLUTIONS[dimensions](inputs, outputs, 3, stride, 1, bias=False))
        layers += [nn.GroupNorm(gcd(GROUPS, outputs), outputs), nn.ReLU()]
    return nn.Sequential(*layers) if masks else nn.Sequential(*layers, Pool())


class Resample(nn.Module):
    """Features of shape ``inputs`` to ``outputs``, both (channels, *size): a linear layer where there is no size, else
    one convolution down or one transposed up, and the mean to the exact size.
    """

    def __init__(self, inputs: Shape, outputs: Shape) -> None:
        super().__init__()
        channels, size, width = inputs[0], inputs[1:], outputs[0]
        self.size = outputs[1:]
        if not size:
            self.layer: nn.Module = nn.Linear(channels, width)
            return
        grows = prod(self.size) > prod(size)
        large, small = (self.size, size) if grows else (size, self.size)
        step = tuple(max(1, ceil(a / b) if grows else a // b) for a, b in zip(large, small, strict=True))
        build: Callable[..., nn.Module] = (TRANSPOSED if grows else CONVOLUTIONS)[len(size)]
        self.layer = build(channels, width, step, step)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x)
        return found if tuple(found.shape[2:]) == self.size else POOLS[len(self.size)](found, self.size)


class Fusion(nn.Module):
    """Features of a site's own body and of the bypass become one; all of it stays at the site.

    ``up`` is the paper's R, from the bypass's features to the site's; ``down`` is R', from the fused ones to the width
    of the bypass's head.
    """

    def __init__(self, local: Shape, bypass: Shape, *, up: bool, down: bool, weighed: bool) -> None:
        super().__init__()
        self.up = Resample(bypass, local) if up else None
        self.down = Resample(local, bypass) if down else None
        self.weighed = weighed

    def forward(self, local: Tensor, beside: Tensor | None) -> Tensor:
        """Equation 5: I_fl of I_l and I_g; I_l itself where there is no I_g."""
        if self.up is None or beside is None:
            return local
        raised: Tensor = self.up(beside)
        if raised.shape[2:] != local.shape[2:]:  # images of another size than the site's own
            raised = POOLS[raised.dim() - 2](raised, local.shape[2:])
        if not self.weighed:
            return (local + raised) / 2
        a, b = source_weights(local, raised)
        return a * local + b * raised


def source_weights(local: Tensor, raised: Tensor) -> tuple[Tensor, Tensor]:
    """Equation 4: for each sample and channel how much either source counts, a softmax over the two of them.

    Both are (n, channels, *size); the weights are (n, channels, 1, ...) and sum to 1.
    """
    scores = torch.stack([_pooled(local), _pooled(raised)])
    a, b = torch.softmax(scores, dim=0).reshape(2, *local.shape[:2], *(1 for _ in local.shape[2:]))
    return a, b


def judged(head: nn.Module, features: Tensor, shape: Shape) -> Tensor:
    """The bypass's logits, of the images' size where each pixel of ``shape`` is judged."""
    logits: Tensor = head(features)
    if logits.dim() > 2 and logits.shape[2:] != shape[1:]:
        how = INTERPOLATIONS[logits.dim() - 2]
        logits = F.interpolate(logits, size=shape[1:], mode=how, align_corners=False)
    return logits


def _pooled(x: Tensor) -> Tensor:
    return x.flatten(2).mean(2) if x.dim() > 2 else x
