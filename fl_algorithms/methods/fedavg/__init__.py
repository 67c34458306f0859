"""FedAvg: its card and settings. No torch: ``client`` has what a site does."""

from fl_algorithms.methods.settings import MeanSettings
from fl_algorithms.rows import MethodRow

ROWS = (
    MethodRow(
        name="fedavg",
        title="FedAvg",
        paper="McMahan et al., AISTATS 2017, https://arxiv.org/abs/1602.05629",
        upload="the whole network",
        private="records, optimizer state",
        client="fl_algorithms.methods.fedavg.client:fedavg",
        settings=MeanSettings,
        one_global_model=True,
    ),
)
