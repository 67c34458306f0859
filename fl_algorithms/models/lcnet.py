"""The parts of LC-Fed: a U whose channels each site chooses by its code, and a correction where sites' heads disagree.

Wang, Jin, Wang, Personalizing Federated Medical Image Segmentation via Local Calibration, ECCV 2022, sections 3.2 and
3.3. https://arxiv.org/abs/2207.04655. In the published code the selections of the deeper network stand in a plain list,
so they are neither trained nor shared; here they are both.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812  its name everywhere
from torch import Tensor, nn

from fl_algorithms.models.adapters import CONVOLUTIONS
from fl_algorithms.models.unet import UnetBody

CONVOLVE = {2: F.conv2d, 3: F.conv3d}


class Selection(nn.Module):
    """Channels weighed by what the image holds and by the site's code: ``x * h + x``, with h in (0, 1)."""

    def __init__(self, channels: int, sites: int, reduction: int) -> None:
        super().__init__()
        self.sites = sites
        self.embed = nn.Sequential(nn.Linear(sites, channels), nn.ReLU(), nn.Linear(channels, channels))
        narrow = max(1, 2 * channels // reduction)
        self.squeeze = nn.Sequential(nn.Linear(2 * channels, narrow), nn.ReLU(), nn.Linear(narrow, channels))

    def weights(self, x: Tensor, site: int) -> Tensor:
        """h (n, channels) for ``x`` (n, channels, *size) at the site of that position."""
        code = F.one_hot(torch.tensor(site), self.sites).to(x)
        embedding = self.embed(code).expand(len(x), -1)
        flat = x.flatten(2)
        pooled = [self.squeeze(torch.cat([one, embedding], dim=1)) for one in (flat.mean(2), flat.amax(2))]
        return torch.sigmoid(pooled[0] + pooled[1])

    def forward(self, x: Tensor, site: int) -> Tensor:
        h = self.weights(x, site)
        return x * h.reshape(*h.shape, *(1 for _ in x.shape[2:])) + x


class SelectingBody(nn.Module):
    """A U's body with a ``Selection`` after each depth on the way down; without ``sites``, the body alone.

    ``position`` is the site's place in the study. It is an integer, so it never travels.
    """

    def __init__(self, body: UnetBody, widths: Sequence[int], sites: int, reduction: int) -> None:
        super().__init__()
        self.body = body
        self.sites = sites
        self.select = nn.ModuleList(Selection(width, sites, reduction) for width in widths if sites)
        self.register_buffer("position", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if not self.select:
            return self._features(x, None)
        site = self.site
        return self._features(x, lambda depth, seen: self.select[depth](seen, site))

    def with_distance(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The features, and how far this site's h are from those that the other sites would choose: a scalar, the mean
        over depths and other sites of the mean squared difference.
        """
        site = self.site
        apart: list[Tensor] = []

        def choose(depth: int, seen: Tensor) -> Tensor:
            selection = self.select[depth]
            assert isinstance(selection, Selection)
            own = selection.weights(seen, site)
            others = [selection.weights(seen, other) for other in range(self.sites) if other != site]
            apart.extend(F.mse_loss(own, other) for other in others)
            chosen: Tensor = selection(seen, site)
            return chosen

        features = self._features(x, choose)
        return features, torch.stack(apart).mean() if apart else features.new_zeros(())

    @property
    def site(self) -> int:
        return int(self.get_buffer("position"))

    def _features(self, x: Tensor, choose: object) -> Tensor:
        features: Tensor = self.body(x, choose)
        return features


class Calibration(nn.Module):
    """(n, outputs, *size) logits anew, of the features, the site's own logits and those of the other sites' heads.

    For each output: a 3x3 convolution of the features with the places of disagreement brought out, beside the features
    with the places of the own prediction brought out. Both maps are softened, and no gradient passes through them.
    """

    def __init__(self, features: int, outputs: int, dimensions: int, *, blur: int, sigma: float) -> None:
        super().__init__()
        self.correct = nn.ModuleList(CONVOLUTIONS[dimensions](2 * features, 1, 3, padding=1) for _ in range(outputs))
        places = torch.arange(blur, dtype=torch.float32) - blur // 2
        kernel = torch.exp(-(places**2) / (2 * sigma**2))
        self.register_buffer("kernel", kernel / kernel.sum(), persistent=False)

    def forward(self, features: Tensor, own: Tensor, others: Sequence[Tensor]) -> Tensor:
        with torch.no_grad():
            p = probabilities(own)
            maps = [self._soft(one) for one in (disagreement(p, [probabilities(other) for other in others]), p)]
        corrected = []
        for place, convolution in enumerate(self.correct):
            brought = [features * one[:, place : place + 1] + features for one in maps]
            corrected.append(convolution(torch.cat(brought, dim=1)))
        return torch.cat(corrected, dim=1)

    def _soft(self, maps: Tensor) -> Tensor:
        """Blurred along each side, with nothing beyond the edges."""
        kernel, dimensions = self.get_buffer("kernel"), maps.dim() - 2
        x = maps.flatten(0, 1).unsqueeze(1)
        for side in range(dimensions):
            shape = [1] * dimensions
            shape[side] = len(kernel)
            padding = [len(kernel) // 2 if other == side else 0 for other in range(dimensions)]
            x = CONVOLVE[dimensions](x, kernel.reshape(1, 1, *shape), padding=padding)
        return x.reshape(maps.shape)


def probabilities(logits: Tensor) -> Tensor:
    """Of each output: (n, outputs, *size); one alone is that of the foreground."""
    return torch.sigmoid(logits) if logits.shape[1] == 1 else torch.softmax(logits, dim=1)


def disagreement(own: Tensor, others: Sequence[Tensor]) -> Tensor:
    """The root of the mean squared distance of the others' probabilities to the own ones, at each pixel of each output,
    divided by its largest in the image: in [0, 1], and 0 where nobody disagrees anywhere.
    """
    if not others:
        return torch.zeros_like(own)
    distance = torch.stack([(other - own) ** 2 for other in others]).mean(0).sqrt()
    largest = distance.flatten(2).amax(2).reshape(*distance.shape[:2], *(1 for _ in distance.shape[2:]))
    return distance / torch.where(largest > 0, largest, 1.0)
