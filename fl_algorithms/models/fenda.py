"""The network of FENDA-FL: what a site learns with the others beside what it learns alone.

A network that offers two extractors calls its parts ``shared_extractor``, ``private_extractor`` and ``head``.

FENDA-FL, 2023, equation 1: y = g([f_shared(x); f_private(x)]), in this order. https://arxiv.org/abs/2309.16825.
The dropout on the concatenated features is in the authors' code, not in the paper.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812  its name everywhere
from torch import Tensor, nn

from fl_algorithms.models.mlp import Extractor
from fl_algorithms.settings.models import FendaSettings


class Fenda(nn.Module):
    """(n, inputs) float32 to logits (n, outputs)."""

    def __init__(
        self, inputs: int, outputs: int, shared: Sequence[int], private: Sequence[int], dropout: float
    ) -> None:
        super().__init__()
        self.shared_extractor = Extractor(inputs, shared)
        self.private_extractor = Extractor(inputs, private)
        self.head = nn.Linear(self.shared_extractor.width + self.private_extractor.width, outputs)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        features = torch.cat([self.shared_extractor(x), self.private_extractor(x)], dim=1)
        logits: Tensor = self.head(F.dropout(features, self.dropout, self.training))
        return logits


def fenda(settings: FendaSettings, inputs: int, outputs: int) -> nn.Module:
    return Fenda(inputs, outputs, settings.shared_hidden, settings.private_hidden, settings.dropout)
