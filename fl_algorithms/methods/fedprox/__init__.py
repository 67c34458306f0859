"""FedProx: its card and settings. No torch: ``client`` has what a site does."""

from pydantic import Field

from fl_algorithms.methods.settings import MeanSettings
from fl_algorithms.rows import MethodRow


class FedProxSettings(MeanSettings):
    """FedProx.

    Attributes:
        mu: the pull to the round's model: mu / 2 times the squared distance.
    """

    mu: float = Field(default=0.01, ge=0)


ROWS = (
    MethodRow(
        name="fedprox",
        title="FedProx",
        paper="Li et al., MLSys 2020, https://arxiv.org/abs/1812.06127",
        upload="the whole network",
        private="records, optimizer state",
        client="fl_algorithms.methods.fedprox.client:fedprox",
        settings=FedProxSettings,
        one_global_model=True,
    ),
)
