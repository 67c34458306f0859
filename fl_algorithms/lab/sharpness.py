"""Sharpness: the curvature of the training loss around a model, the extreme eigenvalue of its Hessian.

Yao, Gholami, Keutzer, Mahoney, PyHessian: Neural Networks Through the Lens of the Hessian, 2020.
https://arxiv.org/abs/1912.07145. Power iteration on Hv, which two backward passes give; the Hessian is never formed.
"""

import copy
import math
from collections.abc import Callable, Sequence
from statistics import median

import torch
from torch import Tensor

from fl_algorithms.engine.device import device_of
from fl_algorithms.engine.training import Networks
from fl_algorithms.tasks.base import Inputs, in_parts

ITERATIONS = 100
TOLERANCE = 1e-3  # relative change of v'Hv


def sharpness(
    networks: Networks, loss: Callable[[Networks, Tensor, Tensor], Tensor], x: Inputs, y: Tensor, batch: int, seed: int
) -> float:
    """The median over the batches of (x, y), in this order, of the eigenvalue of each batch's loss.

    Args:
        loss: (networks, x, y) -> a scalar. The networks are in evaluation mode, so dropout is off.
        seed: of the power iterations' starts.

    Returns:
        nan where a batch's loss or its derivatives are not finite.
    """
    copies = {slot: copy.deepcopy(network).eval() for slot, network in networks.items()}
    parameters = [p for network in copies.values() for p in network.parameters() if p.requires_grad]
    generator, where = torch.Generator().manual_seed(seed), device_of(copies)
    found = [
        extreme_eigenvalue(loss(copies, rows.to(where), labels.to(where)), parameters, generator)
        for rows, labels in zip(in_parts(x, batch), torch.split(y, batch), strict=True)
    ]
    return median(found) if all(map(math.isfinite, found)) else math.nan


def extreme_eigenvalue(loss: Tensor, parameters: Sequence[Tensor], generator: torch.Generator) -> float:
    """The eigenvalue of largest magnitude, with its sign, of the Hessian of ``loss`` (a scalar with its graph).

    A parameter that ``loss`` does not depend on counts as one without curvature. 0 where the Hessian is 0; not finite
    where it is not.
    """
    gradient = _flat(torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True), parameters)
    if gradient.grad_fn is None:
        return 0.0
    vector = torch.randn(len(gradient), generator=generator, dtype=gradient.dtype).to(gradient.device)
    found: float | None = None
    for _ in range(ITERATIONS):
        length = float(vector.norm())
        if length == 0 or not math.isfinite(length):
            return length
        vector = vector / length
        product = torch.autograd.grad(gradient, parameters, vector, retain_graph=True, allow_unused=True)
        next_vector = _flat(product, parameters).detach()
        before, found = found, float(vector @ next_vector)
        if before is not None and abs(found - before) < TOLERANCE * (abs(before) + 1e-6):
            break
        vector = next_vector
    assert found is not None
    return found


def _flat(gradients: Sequence[Tensor | None], parameters: Sequence[Tensor]) -> Tensor:
    return torch.cat(
        [
            (torch.zeros_like(parameter) if gradient is None else gradient).reshape(-1)
            for gradient, parameter in zip(gradients, parameters, strict=True)
        ]
    )
