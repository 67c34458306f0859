"""DS-FL: its card and settings. No torch: ``client`` has what a site does.

``server`` has what the coordinator does.
"""

from typing import Literal

from pydantic import Field

from fl_algorithms.methods.distillation import DistillationSettings
from fl_algorithms.rows import SITES, MethodRow


class DsFlSettings(DistillationSettings):
    aggregation: Literal["era", "mean"] = "era"  # entropy reduction, or the mean as it is
    temperature: float = Field(default=0.1, gt=0)  # of era


ROWS = (
    MethodRow(
        name="dsfl",
        title="DS-FL",
        paper="Itahara et al., IEEE TMC 2023, https://arxiv.org/abs/2008.06180",
        upload="its class probabilities of rows of the public data set",
        private="records, the whole network, optimizer state",
        client="fl_algorithms.methods.dsfl.client:dsfl",
        settings=DsFlSettings,
        server="fl_algorithms.methods.dsfl.server:dsfl",
        public_data=SITES,
        differs="the coordinator: trains no network of its own, and a site's own is judged",
    ),
)
