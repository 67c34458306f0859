"""Tent: a model adapts to the rows it is asked about, by making its answers surer. No label is seen.

Wang, Shelhamer, Liu, Olshausen, Darrell, Tent: Fully Test-Time Adaptation by Entropy Minimization, ICLR 2021.
https://arxiv.org/abs/2006.10726. Batch norms use each batch's own statistics, and only their scale and shift learn: for
each batch the answers are given, then one Adam step on their mean entropy is taken. Dropout stays off, or an answer
would be a draw.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  its name everywhere
from torch import Tensor, nn

from fl_algorithms.engine.device import device_of
from fl_algorithms.engine.phases import BATCH_NORMS
from fl_algorithms.engine.training import Networks
from fl_algorithms.tasks.base import Inputs
from fl_algorithms.tasks.selection import rows_at
from wardround.errors import BadData

Infer = Callable[[Networks, Tensor], Tensor]


class Tent:
    """A copy of a model that adapts as it answers; the model itself is not touched."""

    def __init__(
        self, networks: Networks, infer: Infer, *, learning_rate: float = 1e-3, episodic: bool = False
    ) -> None:
        """``episodic``: each batch meets the model as it was given, so with one step, which comes after the answers,
        these are what batch statistics alone give.

        Raises:
            BadData: no network has a batch norm with scale and shift.
        """
        self.networks = with_batch_statistics(networks)
        self._infer, self._rate, self._episodic = infer, learning_rate, episodic
        self._learning: list[nn.Parameter] = []
        for module in _batch_norms(self.networks):
            for parameter in module.parameters():
                self._learning.append(parameter.requires_grad_(True))
        if not self._learning:
            raise BadData(
                "Tent adapts batch norms, and the study's network has none",
                hint="in the study's [model]: `norm = \"batch\"`; or `tent = false` in the suite's [protocol]",
            )
        self._start = [parameter.detach().clone() for parameter in self._learning]
        self._optimizer = self._fresh()

    def __call__(self, x: Tensor) -> Tensor:
        """The logits (n, outputs) of one batch of at least two rows, on the CPU, then a step."""
        if self._episodic:
            self._reset()
        self._optimizer.zero_grad(set_to_none=True)
        logits = self._infer(self.networks, x.to(device_of(self.networks)))
        entropy(logits).mean().backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        return logits.detach().to("cpu")

    def _reset(self) -> None:
        with torch.no_grad():
            for parameter, start in zip(self._learning, self._start, strict=True):
                parameter.copy_(start)
        self._optimizer = self._fresh()

    def _fresh(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self._learning, lr=self._rate, betas=(0.9, 0.999))


def adapted_logits(networks: Networks, infer: Infer, x: Inputs, *, batch: int = 16, **options: Any) -> Tensor:
    """The logits (n, outputs) of a stream of rows in this order, ``batch`` at a time.

    A single last row has no variance, so it joins the batch before it.

    Args:
        options: of ``Tent``.

    Raises:
        BadData: the stream is one row, or see ``Tent``.
    """
    if len(x) < 2:
        raise BadData(
            f"Tent was given {len(x)} row, and the statistics of a batch need two",
            hint="a site's test table needs more rows; or `tent = false` in the suite's [protocol]",
        )
    parts = list(torch.split(torch.arange(len(x)), batch))
    if len(parts[-1]) == 1:
        parts[-2:] = [torch.cat(parts[-2:])]
    model = Tent(networks, infer, **options)
    return torch.cat([model(rows_at(x, places)) for places in parts])


def entropy(logits: Tensor) -> Tensor:
    """Of each row's predicted classes, in nats: (n,). One logit is that of the last of two classes."""
    if logits.shape[1] == 1:
        logits = torch.cat([torch.zeros_like(logits), logits], dim=1)
    log_probabilities = F.log_softmax(logits, dim=1)
    return -(log_probabilities.exp() * log_probabilities).sum(dim=1)


def with_batch_statistics(networks: Networks) -> dict[str, nn.Module]:
    """A copy, in evaluation mode and without gradient, whose batch norms know each batch's own statistics alone."""
    copies = {slot: copy.deepcopy(network).eval().requires_grad_(False) for slot, network in networks.items()}
    for module in _batch_norms(copies):
        module.track_running_stats = False
        module.running_mean = module.running_var = module.num_batches_tracked = None
    return copies


def _batch_norms(networks: Networks) -> list[Any]:
    return [module for network in networks.values() for module in network.modules() if isinstance(module, BATCH_NORMS)]
