"""What every objective has; and a task that is a reader of files with an objective."""

import copy
from collections.abc import Mapping
from typing import Any, Protocol, Self

from torch import Tensor

from fl_algorithms.tasks.base import OutputsOf, Predictions, Scores, SiteData


class Objective(Protocol):
    """Methods named as those of ``fl_algorithms.tasks.base.Task`` are these."""

    headline: str
    outputs: int

    def at(self, data: SiteData) -> "Objective":
        """As it judges at the site of ``data``: itself, unless its loss is weighed by the site's training rows."""

    def losses(self, logits: Tensor, y: Tensor) -> Tensor: ...

    def loss(self, logits: Tensor, y: Tensor) -> Tensor: ...

    def metrics(self, logits: Tensor, y: Tensor, fit: Mapping[str, Any] | None = None) -> Scores: ...

    def fit_outputs(self, outputs_of: OutputsOf, data: SiteData) -> dict[str, Any]: ...

    def predictions(self, logits: Tensor, fit: Mapping[str, Any]) -> Predictions: ...

    def kinds(self, y: Tensor) -> Tensor | None: ...

    def counts(self, y: Tensor) -> dict[str, int]: ...

    def about(self, part: str, y: Tensor) -> list[str]:
        """Warnings about the rows of a part, which is called as in "training part"."""


class Judged:
    """The half of a task that its objective answers. The other half reads files."""

    objective: Objective

    def at(self, data: SiteData) -> Self:
        """With the loss weighed by the site's training rows, where the study says so."""
        own = copy.copy(self)
        own.objective = self.objective.at(data)
        return own

    def fitted(self, data: SiteData) -> dict[str, Any]:
        """What ``load`` took from the site's files to prepare rows, as plain JSON with numbers as text."""
        return dict(data.preprocessing)

    @property
    def outputs(self) -> int:
        return self.objective.outputs

    @property
    def headline(self) -> str:
        return self.objective.headline

    def losses(self, logits: Tensor, y: Tensor) -> Tensor:
        return self.objective.losses(logits, y)

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        return self.objective.loss(logits, y)

    def metrics(self, logits: Tensor, y: Tensor, fit: Mapping[str, Any] | None = None) -> Scores:
        return self.objective.metrics(logits, y, fit)

    def fit_outputs(self, outputs_of: OutputsOf, data: SiteData) -> dict[str, Any]:
        return self.objective.fit_outputs(outputs_of, data)

    def predictions(self, logits: Tensor, fit: Mapping[str, Any]) -> Predictions:
        return self.objective.predictions(logits, fit)

    def kinds(self, y: Tensor) -> Tensor | None:
        return self.objective.kinds(y)

    def counts(self, y: Tensor) -> dict[str, int]:
        return self.objective.counts(y)
