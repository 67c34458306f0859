"""LG-FedAvg: its card and settings. No torch: ``client`` has what a site does."""

from fl_algorithms.methods.settings import HeadSettings
from fl_algorithms.rows import MethodRow
from fl_algorithms.settings.models import BODY_AND_HEAD

ROWS = (
    MethodRow(
        name="lgfedavg",
        title="LG-FedAvg",
        paper="Liang et al., 2020, https://arxiv.org/abs/2001.01523",
        upload="the head",
        private="records, the body, optimizer state",
        client="fl_algorithms.methods.lgfedavg.client:lg_fedavg",
        settings=HeadSettings,
        needs=frozenset({BODY_AND_HEAD}),
        differs="the start: from scratch, where the authors' code has a network that FedAvg trained; the mean: "
        "weighted by rows",
    ),
)
