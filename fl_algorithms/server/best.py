"""Which round's model is the best global one, by the sites' validation losses.

The loss that came with upload r judges the model that the site had downloaded for it, model r-1; the closing
validation judges the last. The initial model does not compete. A later equal loss replaces.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fl_algorithms.server.aggregator import averaging_weights


@dataclass(frozen=True)
class BestGlobal:
    """The best round so far and its weighted mean validation loss; both None before the first."""

    round: int | None = None
    loss: float | None = None

    def offered(self, model_round: int, reported: Iterable[tuple[str, int]], max_weight: float = 1.0) -> "BestGlobal":
        """The best after model ``model_round`` was judged by each site's (loss, validation rows) as reported.

        Without a loss that counts, nothing changes. See ``mean_loss``.
        """
        loss = mean_loss(reported, max_weight) if model_round >= 1 else None
        if loss is None or (self.loss is not None and loss > self.loss):
            return self
        return BestGlobal(model_round, loss)

    def document(self) -> dict[str, Any]:
        """Plain JSON, the loss as text."""
        return {"round": self.round, "loss": None if self.loss is None else repr(self.loss)}

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> "BestGlobal":
        return cls(document["round"], None if document["loss"] is None else float(document["loss"]))


def mean_loss(reported: Iterable[tuple[str, int]], max_weight: float = 1.0) -> float | None:
    """The mean of (loss, validation rows) as reported, weighted by the rows; None where there is none.

    A loss that is no finite decimal ("null") is left out, as one of no rows is. No site weighs more than
    ``max_weight``, as in a mean of updates. The sum is exact before its one rounding, so the order of the sites does
    not matter; losses whose sum no float can hold say nothing.
    """
    judged = [(loss, n) for loss, n in ((_number(text), n) for text, n in reported) if loss is not None and n > 0]
    if not judged:
        return None
    weights = averaging_weights([n for _, n in judged], max_weight)
    try:
        loss = math.fsum(weight * loss for weight, (loss, _) in zip(weights, judged, strict=True)) / math.fsum(weights)
    except (OverflowError, ValueError):  # beyond a float; or infinities of both signs
        return None
    return loss if math.isfinite(loss) else None


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
