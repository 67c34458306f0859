"""Each row is of one of two or more classes: cross entropy, or the focal loss."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor

from fl_algorithms.settings.targets import ClassTarget
from fl_algorithms.tasks.base import OutputsOf, Predictions, Scores, SiteData
from fl_algorithms.tasks.metrics import best_threshold, scores

SMALLEST = 1e-12  # of 1 - p_y, whose power has no slope at 0 when gamma is below 1
HALF = 0.5


class ClassObjective:
    """Outputs are (n, 1) for two classes, the logit of the last; else (n, classes)."""

    def __init__(self, settings: ClassTarget, weights: Tensor | None = None) -> None:
        """``weights``: of the loss, one for each class, float32; None: the study's own, or none."""
        self.settings = settings
        self.classes: tuple[str, ...] = settings.classes
        self.outputs = 1 if len(settings.classes) == 2 else len(settings.classes)
        self.headline: str = settings.headline
        self._weights = weights
        if weights is None and not isinstance(settings.class_weights, str):
            self._weights = torch.tensor(settings.class_weights)

    def at(self, data: SiteData) -> "ClassObjective":
        """With the weights of the site's own training rows, where the study balances classes: n / (classes x n of the
        class), 1 for a class without any.
        """
        if self.settings.class_weights != "balanced":
            return self
        counts = torch.bincount(data.train.y, minlength=len(self.classes))
        weights = len(data.train) / (len(self.classes) * counts.clamp(min=1).double())
        return ClassObjective(self.settings, torch.where(counts > 0, weights, 1.0).float())

    def losses(self, logits: Tensor, y: Tensor) -> Tensor:
        """Weight of the class times cross entropy, of each row: (n,). For "focal", with p the probability of the row's
        class, times (1 - p)^gamma.

        Reference:
            Lin, Goyal, Girshick, He, Dollár, Focal Loss for Dense Object Detection, ICCV 2017, equation 5.
            https://arxiv.org/abs/1708.02002
        """
        losses = self._cross_entropy(logits, y, "none")
        if self.settings.loss == "focal":
            missed = -torch.expm1(-losses)  # 1 - p_y
            losses = missed.clamp(min=SMALLEST) ** self.settings.gamma * losses
        return losses if self._weights is None else self._weights.to(y.device)[y] * losses

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """The mean of ``losses``: a scalar."""
        if self.settings.loss == "focal" or self._weights is not None:
            return self.losses(logits, y).mean()
        return self._cross_entropy(logits, y, "mean")

    def _cross_entropy(self, logits: Tensor, y: Tensor, reduction: str) -> Tensor:
        if len(self.classes) == 2:
            return F.binary_cross_entropy_with_logits(logits.squeeze(1), y.to(logits.dtype), reduction=reduction)
        return F.cross_entropy(logits, y, reduction=reduction)

    def metrics(self, logits: Tensor, y: Tensor, fit: Mapping[str, Any] | None = None) -> Scores:
        """See ``fl_algorithms.tasks.metrics.scores``; the class counted is the likeliest."""
        return scores(self.probabilities(logits.detach()).cpu().numpy(), y.cpu().numpy())

    def probabilities(self, logits: Tensor) -> Tensor:
        """(n, classes), float64: the likeliest class is then the same in ``metrics`` and in a file of predictions."""
        if len(self.classes) == 2:
            positive = torch.sigmoid(logits.double().squeeze(1))
            return torch.stack((1 - positive, positive), dim=1)
        return torch.softmax(logits.double(), dim=1)

    def fit_outputs(self, outputs_of: OutputsOf, data: SiteData) -> dict[str, Any]:
        """Of two classes, the threshold of the last one's probability, chosen on the validation part."""
        if len(self.classes) != 2 or self.settings.threshold == "half":
            return {}
        found = self.probabilities(outputs_of(data.validation))[:, 1].numpy()
        threshold = best_threshold(found, data.validation.y.numpy() == 1)
        return {"threshold": repr(threshold), "validation_rows": len(data.validation)}

    def predictions(self, logits: Tensor, fit: Mapping[str, Any]) -> Predictions:
        """The class, by the threshold or the likeliest, and each class's probability."""
        probabilities = self.probabilities(logits).numpy()
        notes: tuple[str, ...] = ()
        header = ("predicted", *(f"probability_{name}" for name in self.classes))
        if len(self.classes) > 2:
            places = probabilities.argmax(axis=1)
        else:
            threshold = float(fit.get("threshold", HALF))
            places = (probabilities[:, 1] >= threshold).astype(np.int64)
            notes = (threshold_note(self.classes[1], threshold, fit),)
        rows = [(self.classes[place], *values) for place, values in zip(places, probabilities.tolist(), strict=True)]
        return Predictions(header, rows, notes)

    def kinds(self, y: Tensor) -> Tensor | None:
        return y

    def counts(self, y: Tensor) -> dict[str, int]:
        """Rows of each class."""
        counts = torch.bincount(y, minlength=len(self.classes)).tolist()
        return dict(zip(self.classes, counts, strict=True))

    def about(self, part: str, y: Tensor) -> list[str]:
        """A warning where one class only occurs."""
        present = torch.unique(y).tolist()
        if len(present) != 1:
            return []
        return [
            f"The {part} ({len(y)} rows) has one class only, `{self.classes[present[0]]}`: "
            "AUC is undefined there and left out of means"
        ]


def threshold_note(name: str, threshold: float, fit: Mapping[str, Any]) -> str:
    """Which threshold predictions rest on."""
    where = "as the study says"
    if "threshold" in fit:
        where = f"chosen on this site's {fit['validation_rows']} validation rows for the best balanced accuracy"
    return f"`{name}` is predicted from a probability of {threshold:.6f} on, {where}"
