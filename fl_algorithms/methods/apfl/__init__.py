"""APFL: its card and settings. No torch: ``client`` has what a site does."""

from typing import Literal

from pydantic import Field

from fl_algorithms.methods.settings import MeanSettings
from fl_algorithms.rows import MethodRow


class ApflSettings(MeanSettings):
    """APFL.

    Attributes:
        alpha: how much of the private model is in the mixture, at first.
        alpha_learning_rate: of alpha, which each site learns; 0 leaves it.
        mixing: of the two networks' probabilities, or of their weights.
    """

    alpha: float = Field(default=0.5, ge=0, le=1)
    alpha_learning_rate: float = Field(default=0.1, ge=0)
    mixing: Literal["outputs", "weights"] = "outputs"

    @property
    def compares_classes(self) -> bool:
        return self.mixing == "outputs"

    @property
    def without_classes(self) -> str:
        return '`mixing = "weights"` in [algorithm] mixes the networks and not the classes\' probabilities'


ROWS = (
    MethodRow(
        name="apfl",
        title="APFL",
        paper="Deng et al., 2020, https://arxiv.org/abs/2003.13461",
        upload="the global one of two networks",
        private="records, the personal network, the weight of the mixture, optimizer state",
        client="fl_algorithms.methods.apfl.client:apfl",
        settings=ApflSettings,
        same_start=True,
        differs="the mixture: of outputs, as in the authors' code (`mixing = \"weights\"` is the paper's); alpha, "
        "which moves once a round and shrinks by .02 alpha, as there; the start of a site that comes "
        "late: the model of that round",
    ),
)
