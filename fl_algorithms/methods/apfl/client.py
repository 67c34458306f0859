"""APFL: each site mixes a private network with the global one, and learns how much of each.

Deng, Kamani, Mahdavi, Adaptive Personalized Federated Learning, 2020, Algorithm 1. https://arxiv.org/abs/2003.13461

    personal prediction     alpha p_v(x) + (1 - alpha) p_w(x)         v private, w global, p the classes' probabilities

For each batch: a step of w on its own loss, then a step of v on the personal loss of the same rows. Once a round, at
its first batch and before v's step, with the gradients of the personal loss,

    g = <v - w, alpha grad_v + (1 - alpha) grad_w> + 0.02 alpha       alpha <- clip(alpha - rate g, 0, 1)

This is what the authors' code (https://github.com/MLOPTPSU/FedTorch) does. The paper mixes weights, so that
p_(alpha v + (1 - alpha) w) predicts, has <v - w, gradient at the mixed weights> there, and not the term 0.02 alpha:
``mixing = "weights"``, but for that term, which stays.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812  its name everywhere
from torch import Tensor, nn
from torch.func import functional_call

from fl_algorithms.engine.algorithm import (
    Algorithm,
    Context,
    Share,
    beginning_as_shared,
    loss_of,
    loss_of_slot,
    study_network,
)
from fl_algorithms.engine.training import Batch, Networks, clip_gradients, trainable_parameters
from fl_algorithms.methods.apfl import ApflSettings
from fl_algorithms.registry import load
from fl_algorithms.study import SiteStudy
from fl_algorithms.tasks.base import Task
from wardround.tensors.manifests import MODEL

PERSONAL, MIXTURE = "personal", "mixture"
SHRINK = 0.02


class Mixture(nn.Module):
    """Alpha, a network of its own: so it is kept and restored as networks are, and no optimizer sees it."""

    def __init__(self, alpha: float) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.tensor(alpha), requires_grad=False)


def apfl(settings: ApflSettings) -> Algorithm:
    """v begins as the first model that the site receives. w trains as FedAvg's network, except that its dropout and its
    batch norms' statistics meet each batch twice.
    """
    by_weights = settings.mixing == "weights"
    infer = mixed_weights if by_weights else mixed_outputs

    def mixture(study: SiteStudy, task: Task) -> nn.Module:
        return Mixture(settings.alpha)

    def after_step(context: Context, batch: Batch) -> None:
        w, v = (list(context.networks[slot].parameters()) for slot in (MODEL, PERSONAL))
        for parameter in w:
            parameter.grad = None
        with context.device.arithmetic():
            loss = loss_of(context, infer(context.networks, batch.x), batch)
        loss.backward()  # type: ignore[no-untyped-call]
        if settings.alpha_learning_rate and "alpha_moved" not in context.scratch:
            alpha = context.networks[MIXTURE].get_parameter("alpha")
            g = alpha_gradient(alpha, v, w, by_weights=by_weights)
            alpha.copy_((alpha - settings.alpha_learning_rate * g).clamp(0, 1))
            context.scratch["alpha_moved"] = True
        own = trainable_parameters(context.networks, [f"{PERSONAL}/*"])
        clip_gradients(own.values(), context.study.training.clip_norm)
        context.optimizers.get(PERSONAL, own).step()

    return Algorithm(
        slots={MODEL: study_network, PERSONAL: study_network, MIXTURE: mixture},
        shares=(Share(),),
        receive=beginning_as_shared(PERSONAL),
        loss=loss_of_slot(MODEL),
        after_step=after_step,
        after_step_together=lambda stack: load("fl_algorithms.methods.apfl.together:after_step")(settings)(stack),
        infer=infer,
    )


def alpha_gradient(alpha: Tensor, v: Sequence[Tensor], w: Sequence[Tensor], *, by_weights: bool) -> Tensor:
    """g of the module's docstring from the twins' parameters and their ``grad``: a scalar.

    With mixed weights the gradient at the mixture is grad_v + grad_w, for these are its alpha and (1 - alpha) parts.
    """
    of_v, of_w = (1.0, 1.0) if by_weights else (alpha, 1 - alpha)
    total = SHRINK * alpha.detach()
    for mine, theirs in zip(v, w, strict=True):
        if mine.grad is not None and theirs.grad is not None:
            total = total + ((mine - theirs).detach() * (of_v * mine.grad + of_w * theirs.grad)).sum()
    return total


def alpha_of(networks: Networks) -> Tensor:
    """The mixture's weight; what stands in its place, where models are trained together, is no parameter."""
    alpha: Tensor = networks[MIXTURE].alpha  # type: ignore[assignment]
    return alpha


def mixed_outputs(networks: Networks, x: Tensor) -> Tensor:
    """The logits whose probabilities are the mixture of the twins'; at alpha 0 and 1 one twin's own."""
    alpha = alpha_of(networks)
    of_v, of_w = networks[PERSONAL](x), networks[MODEL](x)
    if alpha.item() in (0.0, 1.0):
        alone: Tensor = alpha * of_v + (1 - alpha) * of_w
        return alone
    return mixed(of_v, of_w, alpha)


def mixed(of_v: Tensor, of_w: Tensor, alpha: Tensor) -> Tensor:
    """``mixed_outputs`` of the twins' logits, for alpha between 0 and 1."""
    if of_v.shape[1] > 1:
        return _mix(F.log_softmax(of_v, dim=1), F.log_softmax(of_w, dim=1), alpha)
    positive = _mix(F.logsigmoid(of_v), F.logsigmoid(of_w), alpha)
    return positive - _mix(F.logsigmoid(-of_v), F.logsigmoid(-of_w), alpha)


def _mix(log_v: Tensor, log_w: Tensor, alpha: Tensor) -> Tensor:
    """log(alpha exp(log_v) + (1 - alpha) exp(log_w))"""
    return torch.logaddexp(log_v + alpha.log(), log_w + (1 - alpha).log())


def mixed_weights(networks: Networks, x: Tensor) -> Tensor:
    """The buffers are v's own: the statistics of norm layers become those of the mixture."""
    alpha = alpha_of(networks)
    w = dict(networks[MODEL].named_parameters())
    mixed = {name: alpha * v + (1 - alpha) * w[name] for name, v in networks[PERSONAL].named_parameters()}
    logits: Tensor = functional_call(networks[PERSONAL], mixed, (x,))
    return logits
