"""FedBN: its card and settings. No torch: ``client`` has what a site does."""

from fl_algorithms.methods.settings import MeanSettings
from fl_algorithms.rows import MethodRow

ROWS = (
    MethodRow(
        name="fedbn",
        title="FedBN",
        paper="Li et al., ICLR 2021, https://arxiv.org/abs/2102.07623",
        upload="the network without its norm layers (of one that has none, the whole network, as in FedAvg)",
        private="records, norm layers with their statistics, optimizer state",
        client="fl_algorithms.methods.fedbn.client:fedbn",
        settings=MeanSettings,
    ),
)
