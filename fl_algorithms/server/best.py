"""Which round's model is the best global one, by the sites' validation losses.

The loss that came with upload r judges the model that the site had downloaded for it, model r-1; the closing
validation judges the last. The initial model does not compete. A later equal loss replaces.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class BestGlobal:
    """The best round so far and its weighted mean validation loss; both None before the first."""

    round: int | None = None
    loss: float | None = None

    def offered(self, model_round: int, told: Iterable[tuple[str, int]]) -> "BestGlobal":
        """The best after model ``model_round`` was judged by each site's (told loss, told validation rows).

        A loss that is no finite decimal ("null") is left out; without any, nothing changes. The sum is exact before its
        one rounding, so the order of the sites does not matter.
        """
        judged = [(loss, n) for loss, n in ((_number(text), n) for text, n in told) if loss is not None and n > 0]
        if model_round < 1 or not judged:
            return self
        loss = math.fsum(n * loss for loss, n in judged) / sum(n for _, n in judged)
        if self.loss is not None and loss > self.loss:
            return self
        return BestGlobal(model_round, loss)

    def document(self) -> dict[str, Any]:
        """Plain JSON, the loss as text."""
        return {"round": self.round, "loss": None if self.loss is None else repr(self.loss)}

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> "BestGlobal":
        return cls(document["round"], None if document["loss"] is None else float(document["loss"]))


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
