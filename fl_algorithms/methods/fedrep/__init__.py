"""FedRep: its card and settings. No torch: ``client`` has what a site does."""

from fl_algorithms.methods.settings import Amount, HeadSettings
from fl_algorithms.rows import MethodRow
from fl_algorithms.settings.models import BODY_AND_HEAD


class FedRepSettings(HeadSettings):
    train_head: Amount = Amount(epochs=10)
    train_body: Amount | None = None  # None: as long as [training] says


ROWS = (
    MethodRow(
        name="fedrep",
        title="FedRep",
        paper="Collins et al., ICML 2021, https://arxiv.org/abs/2102.07078",
        upload="the body",
        private="records, the head, optimizer state",
        client="fl_algorithms.methods.fedrep.client:fedrep",
        settings=FedRepSettings,
        needs=frozenset({BODY_AND_HEAD}),
    ),
)
