"""FedAdam, FedYogi and FedAdagrad: cards and settings. No torch: what a site does is FedAvg.

``server`` has what the coordinator does.
"""

from typing import Literal

from pydantic import Field

from fl_algorithms.methods.settings import Beta, MeanSettings, ServerOptimizer
from fl_algorithms.rows import MethodRow


class Adam(ServerOptimizer):
    optimizer: Literal["adam"] = "adam"


class Yogi(ServerOptimizer):
    optimizer: Literal["yogi"] = "yogi"


class Adagrad(ServerOptimizer):
    optimizer: Literal["adagrad"] = "adagrad"
    beta1: Beta = 0.0


class FedAdamSettings(MeanSettings):
    server: Adam = Field(default_factory=Adam)


class FedYogiSettings(MeanSettings):
    server: Yogi = Field(default_factory=Yogi)


class FedAdagradSettings(MeanSettings):
    server: Adagrad = Field(default_factory=Adagrad)


ROWS = (
    MethodRow(
        name="fedadam",
        title="FedAdam",
        paper="Reddi et al., ICLR 2021, https://arxiv.org/abs/2003.00295",
        upload="the whole network",
        private="records, optimizer state",
        client="fl_algorithms.methods.fedavg.client:fedavg",
        settings=FedAdamSettings,
        one_global_model=True,
        differs="tau: 1e-9 by default, as in FENDA-FL's tables; the running statistics of norm layers: plain means",
    ),
    MethodRow(
        name="fedyogi",
        title="FedYogi",
        paper="Reddi et al., ICLR 2021, https://arxiv.org/abs/2003.00295",
        upload="the whole network",
        private="records, optimizer state",
        client="fl_algorithms.methods.fedavg.client:fedavg",
        settings=FedYogiSettings,
        one_global_model=True,
        differs="tau: 1e-9 by default, as in FENDA-FL's tables; the running statistics of norm layers: plain means",
    ),
    MethodRow(
        name="fedadagrad",
        title="FedAdagrad",
        paper="Reddi et al., ICLR 2021, https://arxiv.org/abs/2003.00295",
        upload="the whole network",
        private="records, optimizer state",
        client="fl_algorithms.methods.fedavg.client:fedavg",
        settings=FedAdagradSettings,
        one_global_model=True,
        differs="tau: 1e-9 by default, as in FENDA-FL's tables; the running statistics of norm layers: plain means",
    ),
)
