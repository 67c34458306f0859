"""APFL's second step for many models at once, as ``client`` makes it for one."""

from collections.abc import Callable

import torch
from torch import Tensor

from fl_algorithms.engine.algorithm import Context, loss_of
from fl_algorithms.engine.together import Stack
from fl_algorithms.engine.training import Batch, Networks
from fl_algorithms.methods.apfl import ApflSettings
from fl_algorithms.methods.apfl.client import MIXTURE, PERSONAL, SHRINK, alpha_of, mixed, mixed_weights
from wardround.tensors.manifests import MODEL


def after_step(settings: ApflSettings) -> Callable[[Stack], None]:
    by_weights = settings.mixing == "weights"
    infer = mixed_weights if by_weights else _mixed_outputs

    def personal_loss(context: Context, batch: Batch) -> Tensor:
        return loss_of(context, infer(context.networks, batch.x), batch)

    def step(stack: Stack) -> None:
        found = stack.gradients(personal_loss, (MODEL, PERSONAL))
        of_v = {name: gradient for name, gradient in found.items() if name.startswith(f"{PERSONAL}/")}
        if settings.alpha_learning_rate and stack.first_step:
            alpha = stack.values[f"{MIXTURE}/alpha"]
            share_v, share_w = (torch.ones_like(alpha),) * 2 if by_weights else (alpha, 1 - alpha)
            g = SHRINK * alpha
            for name, gradient in of_v.items():
                twin = f"{MODEL}/{name.partition('/')[2]}"
                along = (stack.values[name] - stack.values[twin]).flatten(1)
                g = (
                    g
                    + share_v * (along * gradient.flatten(1)).sum(1)
                    + share_w * (along * found[twin].flatten(1)).sum(1)
                )
            stack.put(f"{MIXTURE}/alpha", (alpha - settings.alpha_learning_rate * g).clamp(0, 1))
        stack.step(PERSONAL, of_v)

    return step


def _mixed_outputs(networks: Networks, x: Tensor) -> Tensor:
    """``mixed_outputs`` without a look at alpha's value: both answers, of which one is taken."""
    alpha = alpha_of(networks)
    of_v, of_w = networks[PERSONAL](x), networks[MODEL](x)
    return torch.where((alpha == 0) | (alpha == 1), alpha * of_v + (1 - alpha) * of_w, mixed(of_v, of_w, alpha))
