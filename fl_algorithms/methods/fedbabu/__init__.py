"""FedBABU: its card and settings. No torch: ``client`` has what a site does."""

from pydantic import Field

from fl_algorithms.methods.settings import FineTuning, HeadSettings
from fl_algorithms.rows import MethodRow
from fl_algorithms.settings.models import BODY_AND_HEAD


class FedBabuSettings(HeadSettings):
    # of the whole network; 0 epochs: the one model for all
    fine_tuning: FineTuning = Field(default_factory=lambda: FineTuning(epochs=5))


ROWS = (
    MethodRow(
        name="fedbabu",
        title="FedBABU",
        paper="Oh et al., ICLR 2022, https://arxiv.org/abs/2106.06042",
        upload="the body",
        private="records, the head, the fine-tuned network, optimizer state",
        client="fl_algorithms.methods.fedbabu.client:fedbabu",
        settings=FedBabuSettings,
        one_global_model=True,
        needs=frozenset({BODY_AND_HEAD}),
        same_start=True,
    ),
)
