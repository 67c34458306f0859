"""FedAvgM: its card and settings. No torch: what a site does is FedAvg."""

from typing import Literal

from pydantic import Field

from fl_algorithms.methods.settings import MeanSettings, Rate, ServerOptimizer
from fl_algorithms.rows import MethodRow


class Momentum(ServerOptimizer):
    optimizer: Literal["momentum"] = "momentum"
    learning_rate: Rate = 1.0


class FedAvgMSettings(MeanSettings):
    server: Momentum = Field(default_factory=Momentum)


ROWS = (
    MethodRow(
        name="fedavgm",
        title="FedAvgM",
        paper="Hsu et al., 2019, https://arxiv.org/abs/1909.06335",
        upload="the whole network",
        private="records, optimizer state",
        client="fl_algorithms.methods.fedavg.client:fedavg",
        settings=FedAvgMSettings,
        one_global_model=True,
        differs="the running statistics of norm layers: plain means",
    ),
)
