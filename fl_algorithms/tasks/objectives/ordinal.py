"""Each row is of one of several classes that have an order: stages, grades, scores.

A cumulative link model: with z_1 = o_1 and z_k = z_(k-1) - softplus(o_k), the probability of more than the k-th class
is sigmoid(z_k), so that the probabilities of the classes are never negative.

McCullagh, Regression Models for Ordinal Data, JRSS B 1980, with thresholds that depend on the row.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from numpy.typing import NDArray
from torch import Tensor

from fl_algorithms.settings.targets import ORDINAL_METRICS, OrdinalTarget
from fl_algorithms.tasks.base import OutputsOf, Predictions, Scores, SiteData
from fl_algorithms.tasks.metrics import macro_f1


class OrdinalObjective:
    """Outputs are (n, classes - 1), the o above; ``y`` is int64 (n,), the class's place."""

    def __init__(self, settings: OrdinalTarget) -> None:
        self.settings = settings
        self.outputs = len(settings.classes) - 1
        self.headline: str = settings.headline

    def at(self, data: SiteData) -> "OrdinalObjective":
        return self

    def losses(self, logits: Tensor, y: Tensor) -> Tensor:
        """-log of the probability of the row's class: (n,)."""
        return F.nll_loss(log_probabilities(logits), y, reduction="none")

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        return self.losses(logits, y).mean()

    def metrics(self, logits: Tensor, y: Tensor, fit: Mapping[str, Any] | None = None) -> Scores:
        """Of the likeliest class: quadratically weighted kappa, mae in classes, accuracy and macro_f1."""
        if len(y) == 0 or not torch.isfinite(logits).all():
            return dict.fromkeys(ORDINAL_METRICS, None)
        predicted = log_probabilities(logits.detach().double()).argmax(dim=1).cpu().numpy()
        true = y.cpu().numpy()
        return {
            "kappa": weighted_kappa(predicted, true),
            "mae": float(np.mean(np.abs(predicted - true))),
            "accuracy": float(np.mean(predicted == true)),
            "macro_f1": macro_f1(predicted, true),
        }

    def fit_outputs(self, outputs_of: OutputsOf, data: SiteData) -> dict[str, Any]:
        return {}

    def predictions(self, logits: Tensor, fit: Mapping[str, Any]) -> Predictions:
        """The likeliest class, and each class's probability."""
        probabilities = log_probabilities(logits.double()).exp()
        header = ("predicted", *(f"probability_{name}" for name in self.settings.classes))
        places = probabilities.argmax(dim=1).tolist()
        rows = [(self.settings.classes[place], *row) for place, row in zip(places, probabilities.tolist(), strict=True)]
        return Predictions(header, rows)

    def kinds(self, y: Tensor) -> Tensor | None:
        return y

    def counts(self, y: Tensor) -> dict[str, int]:
        """Rows of each class."""
        counts = torch.bincount(y, minlength=len(self.settings.classes)).tolist()
        return dict(zip(self.settings.classes, counts, strict=True))

    def about(self, part: str, y: Tensor) -> list[str]:
        """A warning where one class only occurs."""
        present = torch.unique(y).tolist()
        if len(present) != 1:
            return []
        return [
            f"The {part} ({len(y)} rows) has one class only, `{self.settings.classes[present[0]]}`: "
            "kappa is undefined there and left out of means"
        ]


def log_probabilities(o: Tensor) -> Tensor:
    """(n, classes). The log of sigmoid(a) - sigmoid(b), a above b, is log sigmoid(a) + log sigmoid(-b) + log(1 -
    exp(b - a)).
    """
    gaps = F.softplus(o[:, 1:])
    z = torch.cat([o[:, :1], o[:, :1] - gaps.cumsum(dim=1)], dim=1)
    between = F.logsigmoid(z[:, :-1]) + F.logsigmoid(-z[:, 1:]) + torch.log(-torch.expm1(-gaps))
    return torch.cat([F.logsigmoid(-z[:, :1]), between, F.logsigmoid(z[:, -1:])], dim=1)


def weighted_kappa(predicted: NDArray[np.int64], y: NDArray[np.int64]) -> float | None:
    """Cohen's kappa with quadratic weights: 1 of full agreement, 0 of chance. None where chance agrees fully."""
    disagreement = np.mean((predicted - y) ** 2)
    by_chance = predicted.var() + y.var() + (predicted.mean() - y.mean()) ** 2  # the mean over all pairs
    return None if by_chance == 0 else float(1 - disagreement / by_chance)
