"""Several findings for each row, each there or not: a cross entropy for each."""

from collections.abc import Mapping
from statistics import fmean
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor

from fl_algorithms.settings.targets import LABEL_METRICS, LabelsTarget
from fl_algorithms.tasks.base import OutputsOf, Predictions, Scores, SiteData
from fl_algorithms.tasks.metrics import average_precision, best_threshold, binary_auc
from fl_algorithms.tasks.objectives.classes import HALF, threshold_note


class LabelsObjective:
    """Outputs are (n, labels), the logit of each; ``y`` is float32 (n, labels), 0 or 1."""

    def __init__(self, settings: LabelsTarget) -> None:
        self.settings = settings
        self.outputs = len(settings.labels)
        self.headline: str = settings.headline

    def at(self, data: SiteData) -> "LabelsObjective":
        return self

    def losses(self, logits: Tensor, y: Tensor) -> Tensor:
        """The mean over the labels of their binary cross entropies: (n,)."""
        return F.binary_cross_entropy_with_logits(logits, y.to(logits.dtype), reduction="none").mean(dim=1)

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        return self.losses(logits, y).mean()

    def metrics(self, logits: Tensor, y: Tensor, fit: Mapping[str, Any] | None = None) -> Scores:
        """Each a mean over the labels; auc and auprc over those of which some rows have it and some not. F1 is of the
        label itself, from a probability of a half on; a label that nowhere is nor is predicted is left out.
        """
        if len(y) == 0 or not torch.isfinite(logits).all():
            return dict.fromkeys(LABEL_METRICS, None)
        probability, there = torch.sigmoid(logits.detach().double()).cpu().numpy(), y.cpu().numpy() == 1
        mixed = [place for place in range(self.outputs) if 0 < there[:, place].sum() < len(there)]
        predicted = probability >= HALF
        seen = [place for place in range(self.outputs) if (predicted[:, place] | there[:, place]).any()]
        hits = (predicted & there).sum(axis=0)
        return {
            "auc": _mean(binary_auc(probability[:, place], there[:, place]) for place in mixed),
            "auprc": _mean(average_precision(probability[:, place], there[:, place]) for place in mixed),
            "brier": float(np.mean((probability - there) ** 2)),
            "macro_f1": _mean(2 * hits[k] / (predicted[:, k].sum() + there[:, k].sum()) for k in seen),
        }

    def fit_outputs(self, outputs_of: OutputsOf, data: SiteData) -> dict[str, Any]:
        """A threshold for each label, chosen on the validation part."""
        if self.settings.threshold == "half":
            return {}
        probability = torch.sigmoid(outputs_of(data.validation).double()).numpy()
        there = data.validation.y.numpy() == 1
        chosen = [best_threshold(probability[:, place], there[:, place]) for place in range(self.outputs)]
        return {"thresholds": [repr(threshold) for threshold in chosen], "validation_rows": len(data.validation)}

    def predictions(self, logits: Tensor, fit: Mapping[str, Any]) -> Predictions:
        """For each label whether it is there, 1 or 0, and its probability."""
        probability = torch.sigmoid(logits.double()).numpy()
        thresholds = [float(text) for text in fit.get("thresholds", [HALF] * self.outputs)]
        names = self.settings.labels
        header = tuple(text for name in names for text in (f"predicted_{name}", f"probability_{name}"))
        rows: list[tuple[str | float, ...]] = []
        for row in probability.tolist():
            cells: list[str | float] = []
            for value, threshold in zip(row, thresholds, strict=True):
                cells += ["1" if value >= threshold else "0", value]
            rows.append(tuple(cells))
        kept = {**fit, "threshold": ""} if "thresholds" in fit else fit
        return Predictions(header, rows, tuple(map(threshold_note, names, thresholds, [kept] * len(names))))

    def kinds(self, y: Tensor) -> Tensor | None:
        return None

    def counts(self, y: Tensor) -> dict[str, int]:
        """Rows that have each label."""
        return dict(zip(self.settings.labels, [int(count) for count in y.sum(dim=0).tolist()], strict=True))

    def about(self, part: str, y: Tensor) -> list[str]:
        """A warning where a label is in all rows or in none."""
        counts = self.counts(y)
        same = [f"`{name}`" for name, count in counts.items() if count in (0, len(y))]
        if not same:
            return []
        return [f"The {part} ({len(y)} rows) has all or none of {', '.join(same)}: left out of the mean AUC"]


def _mean(values: Any) -> float | None:
    found = list(values)
    return float(fmean(found)) if found else None
