"""FedFomo: its card and settings. No torch: ``client`` has what a site does.

``server`` has what the coordinator does.
"""

from pydantic import Field

from fl_algorithms.methods.settings import MethodSettings
from fl_algorithms.rows import MethodRow


class FedFomoSettings(MethodSettings):
    peers: int = Field(default=5, ge=1)  # M: other sites' models that a site downloads
    explore: float = Field(default=0.3, ge=0, le=1)  # epsilon: chance that a peer is drawn at random, where M < N - 1
    explore_decay: float = Field(default=0.05, ge=0, le=1)  # subtracted each round
    norm_guard: float = Field(default=1e-5, gt=0)  # added to the distance that a difference of losses is divided by


ROWS = (
    MethodRow(
        name="fedfomo",
        title="FedFomo",
        paper="Zhang et al., ICLR 2021, https://arxiv.org/abs/2012.08565",
        upload="the whole network, kept apart and sent to other sites; what others' networks are worth here",
        private="records, validation losses, optimizer state",
        client="fl_algorithms.methods.fedfomo.client:fedfomo",
        settings=FedFomoSettings,
        server="fl_algorithms.methods.fedfomo.server:fedfomo",
        single_updates="the coordinator keeps each site's network and sends it to others",
        validation=True,
        exposure="sites",
        personalized="the site's own network",
        differs="what the coordinator is told: the worth of peers alone, without the site's own",
    ),
)
