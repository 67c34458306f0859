"""FedSoup: its card and settings. No torch: ``client`` has what a site does."""

from pydantic import Field

from fl_algorithms.methods.settings import MeanSettings, Soup
from fl_algorithms.rows import MethodRow


class FedSoupSettings(MeanSettings):
    soup: Soup = Field(default_factory=Soup)


ROWS = (
    MethodRow(
        name="fedsoup",
        title="FedSoup",
        paper="Chen et al., MICCAI 2023, https://arxiv.org/abs/2307.10507",
        upload="the whole network, patched with the soup",
        private="records, the soup and its count, validation scores, optimizer state",
        client="fl_algorithms.methods.fedavg.client:fedavg",
        settings=FedSoupSettings,
        one_global_model=True,
        validation=True,
        differs="buffers: those of the local model, as in the released code; the rows that choose: for "
        "validation, where that code has those for testing",
    ),
)
