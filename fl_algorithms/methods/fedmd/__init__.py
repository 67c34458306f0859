"""FedMD: its card and settings. No torch: ``client`` has what a site does.

``server`` has what the coordinator does.
"""

from pydantic import Field

from fl_algorithms.methods.distillation import DistillationSettings
from fl_algorithms.methods.settings import Amount
from fl_algorithms.rows import SITES, MethodRow


class FedMdSettings(DistillationSettings):
    # on the public data set's own classes, before anything else
    transfer: Amount = Field(default_factory=lambda: Amount(epochs=20))
    # on the site's own rows after that, before the first exchange
    initial: Amount = Field(default_factory=lambda: Amount(epochs=25))

    @property
    def labeled(self) -> bool:
        return self.transfer.is_any


ROWS = (
    MethodRow(
        name="fedmd",
        title="FedMD",
        paper="Li and Wang, 2019, https://arxiv.org/abs/1910.03581",
        upload="its scores (logits) of rows of the public data set",
        private="records, the whole network, optimizer state",
        client="fl_algorithms.methods.fedmd.client:fedmd",
        settings=FedMdSettings,
        server="fl_algorithms.methods.fedmd.server:fedmd",
        public_data=SITES,
        differs="the end of the first training: after a number of passes, where the authors' code stops early "
        "on rows for testing",
    ),
)
