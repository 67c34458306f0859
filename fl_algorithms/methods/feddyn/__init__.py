"""FedDyn: its card and settings. No torch: ``client`` has what a site does.

``server`` has what the coordinator does.
"""

from pydantic import Field

from fl_algorithms.methods.settings import MethodSettings
from fl_algorithms.rows import MethodRow


class FedDynSettings(MethodSettings):
    alpha: float = Field(default=0.01, gt=0)  # of the regularizer; the paper tries 0.1, 0.01 and 0.001


ROWS = (
    MethodRow(
        name="feddyn",
        title="FedDyn",
        paper="Acar et al., ICLR 2021, https://openreview.net/forum?id=B7v4QMR6Z9w",
        upload="the whole network",
        private="records, the gradient of the site's loss, optimizer state",
        client="fl_algorithms.methods.feddyn.client:feddyn",
        settings=FedDynSettings,
        server="fl_algorithms.methods.feddyn.server:feddyn",
        one_global_model=True,
        differs="gradients: not clipped, where the authors' code clips at a norm of 10; alpha: one for all sites, as "
        "in Algorithm 1, where that code divides it by a site's share of the rows",
    ),
)
