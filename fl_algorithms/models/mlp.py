"""Linear layers with ReLU between them; without hidden layers, logistic regression."""

from collections.abc import Sequence
from itertools import pairwise

import torch.nn.functional as F  # noqa: N812  its name everywhere
from torch import Tensor, nn

from fl_algorithms.settings.models import MlpSettings

NORMS = {"batch": nn.BatchNorm1d, "layer": nn.LayerNorm}


class Extractor(nn.Module):
    """Hidden layers: for each, linear, norm if any, ReLU, dropout. (n, inputs) to (n, ``width``).

    Without layers, the identity.
    """

    def __init__(self, inputs: int, hidden: Sequence[int], dropout: float = 0.0, norm: str = "none") -> None:
        super().__init__()
        widths = [inputs, *hidden]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.norms = nn.ModuleList(NORMS[norm](width) for width in hidden if norm != "none")
        self.dropout = dropout
        self.width = widths[-1]

    def forward(self, x: Tensor) -> Tensor:
        for place, layer in enumerate(self.layers):
            x = layer(x)
            if self.norms:
                x = self.norms[place](x)
            x = F.relu(x)
            if self.dropout:
                x = F.dropout(x, self.dropout, self.training)
        return x


class Mlp(nn.Module):
    """Hidden layers, ``body``, and a linear ``head``. (n, inputs) float32 to logits (n, outputs)."""

    def __init__(self, inputs: int, outputs: int, hidden: Sequence[int], dropout: float, norm: str) -> None:
        super().__init__()
        self.body = Extractor(inputs, hidden, dropout, norm)
        self.head = nn.Linear(self.body.width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x) if self.body.layers else x)  # a call of nothing costs 5 % of a step
        return logits


def mlp(settings: MlpSettings, inputs: int, outputs: int) -> nn.Module:
    return Mlp(inputs, outputs, settings.hidden, settings.dropout, settings.norm)
