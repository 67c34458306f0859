"""A number for each row: regression."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor

from fl_algorithms.settings.targets import NUMBER_METRICS, NumberTarget
from fl_algorithms.tasks.base import OutputsOf, Predictions, Scores, SiteData

LOSSES: Mapping[str, Callable[..., Tensor]] = {
    "squared": F.mse_loss,
    "absolute": F.l1_loss,
    "huber": F.huber_loss,
}


class NumberObjective:
    """Outputs are (n, 1), the number on the study's scale; ``y`` is float32 (n,), in the number's own unit."""

    def __init__(self, settings: NumberTarget) -> None:
        self.settings = settings
        self.outputs = 1
        self.headline: str = settings.headline

    def at(self, data: SiteData) -> "NumberObjective":
        return self

    def losses(self, logits: Tensor, y: Tensor) -> Tensor:
        """The squared or absolute distance, or Huber's, of the standardized numbers: (n,)."""
        scaled = (y.to(logits.dtype) - self.settings.mean) / self.settings.std
        return LOSSES[self.settings.loss](logits.squeeze(1), scaled, reduction="none")

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        return self.losses(logits, y).mean()

    def numbers(self, logits: Tensor) -> Tensor:
        """In the number's own unit, float64 (n,)."""
        return logits.double().squeeze(1) * self.settings.std + self.settings.mean

    def metrics(self, logits: Tensor, y: Tensor, fit: Mapping[str, Any] | None = None) -> Scores:
        """mae, rmse, and r2, which is None where all rows have one number."""
        if len(y) == 0 or not torch.isfinite(logits).all():
            return dict.fromkeys(NUMBER_METRICS, None)
        found, true = self.numbers(logits.detach()).cpu().numpy(), y.double().cpu().numpy()
        squares, spread = float(np.sum((found - true) ** 2)), float(np.sum((true - true.mean()) ** 2))
        return {
            "mae": float(np.mean(np.abs(found - true))),
            "rmse": float(np.sqrt(squares / len(true))),
            "r2": 1 - squares / spread if spread > 0 else None,
        }

    def fit_outputs(self, outputs_of: OutputsOf, data: SiteData) -> dict[str, Any]:
        return {}

    def predictions(self, logits: Tensor, fit: Mapping[str, Any]) -> Predictions:
        return Predictions(("predicted",), [(f"{value:.7g}",) for value in self.numbers(logits).tolist()])

    def kinds(self, y: Tensor) -> Tensor | None:
        return None

    def counts(self, y: Tensor) -> dict[str, int]:
        return {}

    def about(self, part: str, y: Tensor) -> list[str]:
        """A warning where all rows have one number."""
        if len(y) == 0 or float(y.min()) < float(y.max()):
            return []
        return [f"The {part} ({len(y)} rows) has one number only: R2 is undefined there and left out of means"]
