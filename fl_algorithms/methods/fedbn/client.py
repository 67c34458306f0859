"""FedBN: FedAvg, but norm layers never leave, neither their weights nor their statistics.

Li, Jiang, Zhang, Kamp, Dou, FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, ICLR 2021.
https://arxiv.org/abs/2102.07623
"""

from torch import nn

from fl_algorithms.engine.algorithm import Algorithm, Share, all_but
from fl_algorithms.methods.settings import MeanSettings

NORMS = (  # batch norms of every dimension and the synchronized one are subclasses, as are the instance norms
    nn.modules.batchnorm._BatchNorm,
    nn.modules.instancenorm._InstanceNorm,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
)


def fedbn(settings: MeanSettings) -> Algorithm:
    """FedAvg of all but the norm layers. Of a network without any it is FedAvg, bit for bit."""
    return Algorithm(shares=(Share(names=all_but(norm_layers)),))


def norm_layers(network: nn.Module) -> list[str]:
    """The names of all tensors of norm layers, chosen by the layer's type: what a network calls them says nothing."""
    return [
        f"{place}.{name}" if place else name
        for place, module in network.named_modules(remove_duplicate=False)
        if isinstance(module, NORMS)
        for name in module.state_dict()
    ]
