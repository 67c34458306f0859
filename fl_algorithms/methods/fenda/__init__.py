"""FENDA-FL: its card and settings. No torch: ``client`` has what a site does."""

from fl_algorithms.methods.settings import MeanSettings
from fl_algorithms.rows import MethodRow
from fl_algorithms.settings.models import TWO_EXTRACTORS

ROWS = (
    MethodRow(
        name="fenda",
        title="FENDA-FL",
        paper="Fatemi Tavakoli et al., 2023, https://arxiv.org/abs/2309.16825",
        upload="the shared extractor",
        private="records, the private extractor, the head, optimizer state",
        client="fl_algorithms.methods.fenda.client:fenda",
        settings=MeanSettings,
        needs=frozenset({TWO_EXTRACTORS}),
    ),
)
