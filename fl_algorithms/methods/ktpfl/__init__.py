"""KT-pFL: its card and settings. No torch: ``client`` has what a site does.

``server`` has what the coordinator does.
"""

from typing import Literal

from pydantic import Field

from fl_algorithms.methods.distillation import DistillationSettings
from fl_algorithms.methods.settings import Amount
from fl_algorithms.rows import SITES, MethodRow


class KtPflSettings(DistillationSettings):
    distil_batch_size: int = Field(default=256, ge=2, le=65536)
    temperature: float = Field(default=10.0, gt=0)  # of the predictions
    rho: float = Field(default=0.5, ge=0)  # pull of the coefficients towards 1/N
    # on the site's own rows, before the first exchange
    initial: Amount = Field(default_factory=lambda: Amount(epochs=25))
    coefficients: Literal["released", "projected"] = "released"  # as the authors' code moves them, or on the simplex
    sharpness: float = Field(default=5.0, gt=0)  # released: of the softmax that follows each step


ROWS = (
    MethodRow(
        name="ktpfl",
        title="KT-pFL",
        paper="Zhang et al., NeurIPS 2021, https://arxiv.org/abs/2111.02625",
        upload="its softened class probabilities of rows of the public data set; the mixture made for it is kept apart",
        private="records, the whole network, optimizer state",
        client="fl_algorithms.methods.ktpfl.client:ktpfl",
        settings=KtPflSettings,
        server="fl_algorithms.methods.ktpfl.server:ktpfl",
        single_updates="the coordinator learns by how much each site's predictions help each other one",
        public_data=SITES,
        exposure="coordinator",
        personalized="the mixture of all sites' predictions made for the site, and how much of each is in it",
        differs="the coefficients' loss: a squared distance, as in the authors' code, where the paper has a "
        "divergence; the private passes: as [training] says, where that code has 1 to 10, rising; the "
        "divergence of the distillation: not divided by the classes",
    ),
)
