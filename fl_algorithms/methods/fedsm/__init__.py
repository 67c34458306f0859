"""FedSM: its card and settings. No torch: ``client`` has what a site does.

``server`` has what the coordinator does.
"""

from typing import Annotated, Literal

from pydantic import Field

from fl_algorithms.methods.settings import MethodSettings, Rate
from fl_algorithms.rows import MethodRow

Widths = tuple[Annotated[int, Field(ge=1, le=65536)], ...]


class FedSmSettings(MethodSettings):
    lam: float = Field(default=0.7, ge=0, le=1)  # lambda of SoftPull
    gamma: float = Field(default=0.9, ge=0)  # a choice of the selector counts above this probability
    answer: Literal["super", "personal"] = "super"  # what predicts: the super model, or the site's personal network
    selector: Literal["convolutional", "mlp"] | None = None  # None: the first for images, the second for tables
    selector_widths: Widths = Field(default=(16, 32, 64), max_length=8)  # channels of a convolutional one
    selector_hidden: Widths = (16,)  # mlp
    selector_learning_rate: Rate = 1e-3  # Adam's
    selector_epochs: int = Field(default=1, ge=0, le=1000)  # of each round: steps on all training rows at once


ROWS = (
    MethodRow(
        name="fedsm",
        title="FedSM",
        paper="Xu et al., CVPR 2022, https://arxiv.org/abs/2203.10144",
        upload="a global network, a personal one that is kept apart and sent to all sites, the selector and its "
        "moments",
        private="records, optimizer state",
        client="fl_algorithms.methods.fedsm.client:fedsm",
        settings=FedSmSettings,
        server="fl_algorithms.methods.fedsm.server:fedsm",
        single_updates="the coordinator mixes a personal network for each site from single ones",
        exposure="sites",
        personalized="the site's personal network",
        differs="the selector: for images a small convolutional network, where the reference has VGG11; for tables, "
        "which the paper does not have, an MLP",
    ),
)
