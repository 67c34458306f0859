"""FedProx: FedAvg whose local steps are pulled back to the round's model.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, Federated Optimization in Heterogeneous Networks, MLSys 2020, equation 2.
https://arxiv.org/abs/1812.06127
"""

from collections.abc import Mapping

from torch import Tensor, nn

from fl_algorithms.engine.algorithm import Algorithm, Context, task_loss
from fl_algorithms.engine.training import Batch
from fl_algorithms.methods.fedprox import FedProxSettings
from wardround.tensors.manifests import MODEL


def fedprox(settings: FedProxSettings) -> Algorithm:
    """FedAvg plus the proximal term; with mu = 0 it is FedAvg, bit for bit."""
    if settings.mu == 0:
        return Algorithm()

    def loss(context: Context, batch: Batch) -> Tensor:
        pull = proximal_term(context.networks[MODEL], context.base[MODEL], settings.mu)
        return task_loss(context, batch) + pull

    return Algorithm(loss=loss)


def proximal_term(network: nn.Module, anchor: Mapping[str, Tensor], mu: float) -> Tensor:
    """mu/2 sum ||w - anchor_w||^2 over the network's trainable parameters, not its buffers: a scalar with gradient."""
    distances = [
        (parameter - anchor[name]).square().sum()
        for name, parameter in network.named_parameters()
        if parameter.requires_grad
    ]
    return mu / 2 * sum(distances[1:], distances[0])
