"""Early stopping by a site on its own validation rows, within a round.

Prechelt, Early Stopping - But When?, 1998: stop when the validation loss has not fallen for some time, and take the
weights from when it was smallest. What is looked at is the phase's own loss, a method's terms included, on the
validation rows in evaluation mode. A site goes at least ``every`` steps, and takes part in the round as all others do.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from fl_algorithms.engine.training import Batch, Networks, evaluating
from wardround.records.training import EarlyStopping

ValidationLoss = Callable[[], float]


class EarlyStop:
    """Watches a phase. Its optimizer's moments stay as of the last step."""

    def __init__(
        self, settings: EarlyStopping, networks: Networks, trained: dict[str, nn.Parameter], loss: ValidationLoss
    ) -> None:
        self._settings, self._networks, self._trained, self._loss = settings, networks, trained, loss
        self._smallest, self._misses = float("inf"), 0
        self._best: list[dict[str, Tensor]] = []

    def after(self, step: int) -> bool:
        """Whether ``step``, from 1, was the last one."""
        if step % self._settings.every:
            return False
        with evaluating(self._networks, self._trained), torch.no_grad():
            loss = self._loss()
        if loss < self._smallest:
            self._smallest, self._misses = loss, 0
            self._best = [
                {name: value.clone() for name, value in network.state_dict().items()}
                for network in self._networks.values()
            ]
            return False
        self._misses += 1
        return self._misses >= self._settings.patience

    def go_back(self) -> None:
        """The networks as they were when the loss was smallest; as they are where there was no look."""
        with torch.no_grad():
            for network, best in zip(self._networks.values(), self._best, strict=False):
                for name, value in network.state_dict().items():
                    value.copy_(best[name])


def mean_loss(loss: Callable[[Batch], Tensor], parts: Iterable[Batch]) -> float:
    """The mean of a batch's loss over ``parts``, each as often as it has rows."""
    total, rows = 0.0, 0
    for part in parts:
        total, rows = total + float(loss(part)) * len(part.y), rows + len(part.y)
    return total / rows
