"""MOON: its card and settings. No torch: ``client`` has what a site does."""

from pydantic import Field

from fl_algorithms.methods.settings import MeanSettings
from fl_algorithms.rows import MethodRow
from fl_algorithms.settings.models import BODY_AND_HEAD


class MoonSettings(MeanSettings):
    """MOON.

    Attributes:
        mu: the weight of the contrastive loss.
        temperature: of that loss.
    """

    mu: float = Field(default=1.0, ge=0)
    temperature: float = Field(default=0.5, gt=0)


ROWS = (
    MethodRow(
        name="moon",
        title="MOON",
        paper="Li et al., CVPR 2021, https://arxiv.org/abs/2103.16257",
        upload="the whole network",
        private="records, the network as trained in the round before, optimizer state",
        client="fl_algorithms.methods.moon.client:moon",
        settings=MoonSettings,
        one_global_model=True,
        needs=frozenset({BODY_AND_HEAD}),
        differs="the features: what the network's head sees, without the paper's projection head",
    ),
)
