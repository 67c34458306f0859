"""Any network of yours, made one that the methods know: by a body and a head, or by two extractors and a head.

    BodyHead(body, head)                  FedPer, FedRep, FedBABU, LG-FedAvg, MOON, MH-pFLGB
    TwoExtractors(make, shape, outputs)   FENDA-FL of any body

Both take a batch (n, *shape) of float32 and give logits: (n, outputs), or for masks (n, outputs, *size).
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F  # noqa: N812  its name everywhere
from torch import Tensor, nn

from wardround.errors import BadData

Shape = tuple[int, ...]  # of one sample: (columns,), or (channels, *size)
CONVOLUTIONS: dict[int, Callable[..., nn.Module]] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
ANSWERING = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)  # layers that can be a head
INTERPOLATIONS = {1: "linear", 2: "bilinear", 3: "trilinear"}


class BodyHead(nn.Module):
    """``head`` of ``body``. Methods find the tensors of both by name: "body.*" and "head.*".

    Where each pixel is judged, the head's answer must have the input's size.
    """

    def __init__(self, body: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.body, self.head = body, head

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x))
        return logits


class TwoExtractors(nn.Module):
    """A shared and a private body see the same sample; one head judges their features, one beside the other.

    y = head([shared(x); private(x)]): FENDA-FL, 2023, equation 1. https://arxiv.org/abs/2309.16825. Method `fenda`
    shares "shared_extractor.*" alone. Maps smaller than the image are interpolated to its size first.
    """

    def __init__(
        self,
        make: Callable[[], nn.Module],
        shape: Sequence[int],
        outputs: int,
        *,
        private: Callable[[], nn.Module] | None = None,
        dropout: float = 0.0,
    ) -> None:
        """Args:
            make: gives a body, a new one at each call: (n, *shape) to features (n, width), or to maps.
            shape: of one sample; both bodies are tried with one of zeros, to see how wide their features are.
            private: gives the private body, where that is another than the shared one.
            dropout: on the concatenated features.

        Raises:
            BadData: one body gives maps and the other gives none.
        """
        super().__init__()
        self.shared_extractor = make()
        self.private_extractor = (private or make)()
        found = [features_shape(body, shape) for body in (self.shared_extractor, self.private_extractor)]
        if len(found[0]) != len(found[1]):
            raise BadData(
                f"the shared extractor gives features {list(found[0])} of a sample, the private one {list(found[1])}: "
                "they cannot stand beside each other",
                hint="two bodies that both give one vector for a sample, or both maps",
            )
        self.head = head_of((found[0][0] + found[1][0], *found[0][1:]), outputs)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        both = [of_size(body(x), x.shape[2:]) for body in (self.shared_extractor, self.private_extractor)]
        features = torch.cat(both, dim=1)
        if self.dropout:
            features = F.dropout(features, self.dropout, self.training)
        logits: Tensor = self.head(features)
        return logits


def features_shape(body: nn.Module, shape: Sequence[int]) -> Shape:
    """What ``body`` makes of one sample of ``shape``. The body is left as it was, and no stream is drawn from."""
    training = body.training
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        found = tuple(body.eval()(torch.zeros(1, *shape)).shape[1:])
    body.train(training)
    return found


def head_of(features: Sequence[int], outputs: int) -> nn.Module:
    """A linear layer on features (width,), or a convolution of one pixel on maps (width, *size)."""
    width, *size = features
    return CONVOLUTIONS[len(size)](width, outputs, 1) if size else nn.Linear(width, outputs)


def of_size(features: Tensor, size: Sequence[int]) -> Tensor:
    """Maps (n, width, *any) interpolated to ``size``; features without one as they are."""
    if features.dim() == 2 or tuple(features.shape[2:]) == tuple(size):
        return features
    return F.interpolate(features, size=tuple(size), mode=INTERPOLATIONS[len(size)], align_corners=False)


class DropFeatures:
    """A forward hook of a body: dropout on what it gives, so that no name in its state changes."""

    def __init__(self, share: float) -> None:
        self.share = share

    def __call__(self, module: nn.Module, inputs: object, features: Tensor) -> Tensor:
        return F.dropout(features, self.share, module.training)


def with_dropout(network: BodyHead, share: float) -> BodyHead:
    """``network`` with dropout between body and head."""
    if share:
        network.body.register_forward_hook(DropFeatures(share))
    return network


def divided(network: nn.Module, shape: Sequence[int]) -> str | None:
    """The name of the layer, linear or a convolution, that gives the network's answer; None where what it gives is
    changed once more. Without that layer the network is a body, whose head it is.
    """
    layers = [name for name, module in network.named_modules() if isinstance(module, ANSWERING)]
    training = network.training
    network.eval()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        x = torch.randn(1, *shape)
        answer = network(x)
        found = None
        if layers and isinstance(answer, Tensor):
            layer = network.get_submodule(layers[-1])
            replace_module(network, layers[-1], nn.Identity())
            features = network(x)
            replace_module(network, layers[-1], layer)
            if _takes(layer, features) and torch.equal(layer(features), answer):
                found = layers[-1]
    network.train(training)
    return found


def _takes(layer: nn.Module, features: object) -> bool:
    if not isinstance(features, Tensor):
        return False
    if isinstance(layer, nn.Linear):
        return features.dim() == 2 and features.shape[1] == layer.in_features
    width = getattr(layer, "in_channels", 0)
    return features.dim() > 2 and features.shape[1] == width


def replace_module(network: nn.Module, name: str, new: nn.Module) -> None:
    """Put ``new`` in the place of the submodule ``name``."""
    parent, _, last = name.rpartition(".")
    setattr(network.get_submodule(parent), last, new)
