"""MH-pFLGB: its card and settings. No torch: ``client`` has what a site does."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from fl_algorithms.methods.settings import Amount, Rate, ServerSettings
from fl_algorithms.rows import MethodRow
from fl_algorithms.settings.models import BODY_AND_HEAD

Widths = tuple[Annotated[int, Field(ge=1, le=4096)], ...]


class MhPflgbSettings(ServerSettings):
    """MH-pFLGB.

    Attributes:
        widths: of the bypass's layers; without them as its task asks.
        train_local: the first stage: the site's own network learns, and the bypass stays.
        train_global: the second stage: the bypass learns, and the site's own network stays.
        local_learning_rate, global_learning_rate: of the two stages.
        own, other: the weights of the losses of the stage's own head and of the other one.
    """

    widths: Widths = Field(default=(), max_length=6)
    train_local: Amount = Field(default_factory=lambda: Amount(epochs=4))
    train_global: Amount = Field(default_factory=lambda: Amount(epochs=1))
    local_learning_rate: Rate = 1e-4
    global_learning_rate: Rate = 1e-5
    own: float = Field(default=0.9, ge=0)
    other: float = Field(default=0.1, ge=0)
    global_body: bool = True  # without: the bypass is a head on what the site's own body sees
    global_head: bool = True  # without: the bypass is a body, and the site's own head alone is asked
    feature_fusion: bool = True  # without: both sources count alike, whatever the channels hold

    @model_validator(mode="after")
    def _something_shared(self) -> Self:
        if not (self.global_body or self.global_head):
            raise ValueError("without `global_body` and `global_head` nothing is shared")
        return self


ROWS = (
    MethodRow(
        name="mhpflgb",
        title="MH-pFLGB",
        paper="Xie et al., MICCAI 2024, https://arxiv.org/abs/2407.00474",
        upload="the bypass: a small network beside the site's own",
        private="records, the site's own network, which may be another at each site, the fusion layers, optimizer "
        "state",
        client="fl_algorithms.methods.mhpflgb.client:mhpflgb",
        settings=MhPflgbSettings,
        needs=frozenset({BODY_AND_HEAD}),
        differs="what the paper leaves blank: the fusion's layers, and the learning rates, which are those of "
        "the same group's MH-pFLID",
    ),
)
