"""SCAFFOLD: control variates c (of all) and c_i (the site's own) turn each local step towards where all sites go.

    y <- y - eta (g(y) - c_i + c), K times from x        c_i+ = c_i - c + (x - y) / (K eta)        (option II)

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML
2020, Algorithm 1. https://arxiv.org/abs/1910.06378

c_i+ is the mean of the round's gradients only where a step is eta times the gradient: plain SGD. Only trainable
parameters have a control variate. A site whose update is not accepted keeps its c_i: the state of a round becomes
current with its receipt.
"""

import torch
from torch import Tensor, nn

from fl_algorithms.engine.algorithm import Algorithm, Context, shared_deltas
from fl_algorithms.engine.training import Batch, Networks
from fl_algorithms.methods.scaffold import ScaffoldSettings
from fl_algorithms.methods.scaffold.server import CONTROL
from fl_algorithms.study import SiteStudy
from wardround.tensors.manifests import MODEL, TensorSpec


def scaffold(settings: ScaffoldSettings) -> Algorithm:
    """FedAvg of the whole network, with c beside it both ways."""
    return Algorithm(
        extras=lambda networks, study: tuple(
            TensorSpec(name, "F32", tuple(parameter.shape), CONTROL) for name, parameter in controlled(networks).items()
        ),
        keeps=_own_control,
        before_round=take_correction,
        after_backward=correct,
        after_round=move_own_control,
        to_send=lambda context: {**shared_deltas(context), CONTROL: context.scratch["control_delta"]},
    )


def controlled(networks: Networks) -> dict[str, nn.Parameter]:
    """The trainable parameters, live."""
    return {name: parameter for name, parameter in networks[MODEL].named_parameters() if parameter.requires_grad}


def take_correction(context: Context) -> None:
    """c - c_i, which is the same in every step of a round."""
    context.scratch["correction"] = {
        name: c - context.kept.get(_kept_name(name), torch.zeros_like(c)) for name, c in context.base[CONTROL].items()
    }


def correct(context: Context, batch: Batch) -> None:
    """h5: g(y) + c - c_i."""
    for name, parameter in controlled(context.networks).items():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        parameter.grad = gradient + context.scratch["correction"][name]


def move_own_control(context: Context) -> None:
    """h7: c_i+ and what of it leaves, c_i+ - c_i. Without a step c_i stays."""
    deltas: dict[str, Tensor] = {}
    for name, parameter in controlled(context.networks).items():
        c, x, y = context.base[CONTROL][name], context.base[MODEL][name], parameter.detach()
        deltas[name] = torch.zeros_like(c)
        if context.steps:
            deltas[name] = (x - y) / (context.steps * context.study.training.learning_rate) - c
        context.kept[_kept_name(name)] = context.kept.get(_kept_name(name), torch.zeros_like(c)) + deltas[name]
    context.scratch["control_delta"] = deltas


def _own_control(networks: Networks, study: SiteStudy) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(_kept_name(name), "F32", tuple(parameter.shape)) for name, parameter in controlled(networks).items()
    )


def _kept_name(name: str) -> str:
    return f"{CONTROL}.{name}"
