"""FedDyn: a regularizer that moves with the training makes the sites' optima agree with the optimum of all.

    theta_k <- near argmin L_k(theta) - <g_k, theta> + alpha/2 ||theta - theta||^2, by the local steps
    g_k     <- g_k - alpha (theta_k - theta)

with theta as downloaded, and g_k, which stays at the site, zero at first. Where the local steps end at the minimum, g_k
is the gradient of L_k there. Then a model at which the sites stand still is one at which the sum of their gradients is
zero: the optimum of all, which FedAvg's sites walk away from. Only trainable parameters have a g_k.

Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama, Federated Learning Based on Dynamic Regularization, ICLR 2021,
Algorithm 1. https://openreview.net/forum?id=B7v4QMR6Z9w
"""

import torch
from torch import Tensor, nn

from fl_algorithms.engine.algorithm import Algorithm, Context, task_loss
from fl_algorithms.engine.training import Batch, Networks
from fl_algorithms.methods.feddyn import FedDynSettings
from fl_algorithms.methods.fedprox.client import proximal_term
from fl_algorithms.study import SiteStudy
from wardround.tensors.manifests import MODEL, TensorSpec

GRADIENT = "gradient"  # prefix of what is kept


def feddyn(settings: FedDynSettings) -> Algorithm:
    """FedAvg of the whole network, but for the loss and what is kept after the steps."""

    def loss(context: Context, batch: Batch) -> Tensor:
        pull = proximal_term(context.networks[MODEL], context.base[MODEL], settings.alpha)
        return task_loss(context, batch) - along_gradient(context) + pull

    def after_round(context: Context) -> None:
        for name, parameter in regularized(context.networks).items():
            moved = parameter.detach() - context.base[MODEL][name]
            context.kept[_kept_name(name)] = gradient(context, name) - settings.alpha * moved

    return Algorithm(keeps=_kept, loss=loss, after_round=after_round)


def regularized(networks: Networks) -> dict[str, nn.Parameter]:
    """The trainable parameters, live."""
    return {name: parameter for name, parameter in networks[MODEL].named_parameters() if parameter.requires_grad}


def gradient(context: Context, name: str) -> Tensor:
    """g_k of one parameter; zero before the first round."""
    return context.kept.get(_kept_name(name), torch.zeros_like(context.base[MODEL][name]))


def along_gradient(context: Context) -> Tensor:
    """<g_k, theta>: a scalar that carries gradient to theta."""
    parts = [(gradient(context, name) * parameter).sum() for name, parameter in regularized(context.networks).items()]
    return torch.stack(parts).sum()


def _kept(networks: Networks, study: SiteStudy) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(_kept_name(name), "F32", tuple(parameter.shape)) for name, parameter in regularized(networks).items()
    )


def _kept_name(name: str) -> str:
    return f"{GRADIENT}.{name}"
