"""LC-Fed: its card and settings. No torch: ``client`` has what a site does.

``server`` has what the coordinator does.
"""

from typing import Self

from pydantic import Field, model_validator

from fl_algorithms.methods.settings import Amount, MethodSettings
from fl_algorithms.rows import MethodRow
from fl_algorithms.settings.models import BODY_AND_HEAD, DEPTHS


class LcFedSettings(MethodSettings):
    train_head: Amount = Field(default_factory=lambda: Amount(steps=10))
    train_body: Amount | None = None  # None: as long as [training] says
    train_calibration: Amount | None = None  # None: as long as [training] says
    selection: bool = True  # channels of the body are chosen by the site's code
    calibration: bool = True  # the head is corrected where the sites' heads disagree, and so each is shown to all
    reduction: int = Field(default=16, ge=1, le=4096)  # of the selection's squeeze
    alpha: float = Field(default=0.0, ge=0)  # how strongly the selections of two sites are driven apart
    blur: int = Field(default=31, ge=1, le=255)  # pixels, of the kernel that softens what the calibration looks at
    blur_sigma: float = Field(default=4.0, gt=0)  # pixels

    @model_validator(mode="after")
    def _odd(self) -> Self:
        if self.blur % 2 == 0:
            raise ValueError(f"`blur` is {self.blur}; a kernel has a middle, so it is odd")
        if self.alpha and not self.selection:
            raise ValueError("`alpha` drives the selections of sites apart, and `selection` is off")
        return self

    @property
    def exposes(self) -> bool:
        return self.calibration


ROWS = (
    MethodRow(
        name="lcfed",
        title="LC-Fed",
        paper="Wang, Jin, Wang, ECCV 2022, https://arxiv.org/abs/2207.04655",
        upload="the body with the channel selection; the head, kept apart and sent to all sites (not without "
        "calibration)",
        private="records, the calibration, optimizer state",
        client="fl_algorithms.methods.lcfed.client:lcfed",
        settings=LcFedSettings,
        server="fl_algorithms.methods.lcfed.server:lcfed",
        single_updates="the coordinator keeps each site's head and sends it to the others",
        needs=frozenset({BODY_AND_HEAD, DEPTHS}),
        exposure="sites",
        personalized="the site's head",
        differs="the channel selection: trained and averaged, where the released code has it in no optimizer; "
        "amounts of steps of their own for head and body",
    ),
)
