"""Ditto: its card and settings. No torch: ``client`` has what a site does."""

from pydantic import Field

from fl_algorithms.methods.settings import ServerSettings
from fl_algorithms.rows import MethodRow


class DittoSettings(ServerSettings):
    lam: float = Field(default=1.0, ge=0)  # lambda, the pull to the global model


ROWS = (
    MethodRow(
        name="ditto",
        title="Ditto",
        paper="Li et al., ICML 2021, https://arxiv.org/abs/2012.04221",
        upload="the global one of two networks",
        private="records, the personal network, optimizer state",
        client="fl_algorithms.methods.ditto.client:ditto",
        settings=DittoSettings,
        same_start=True,
        differs="the order of the steps: the private ones first, where the authors' code takes them by turns; "
        "the start of a site that comes late: the model of that round",
    ),
)
