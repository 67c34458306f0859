"""FedPer: its card and settings. No torch: ``client`` has what a site does."""

from fl_algorithms.methods.settings import HeadSettings
from fl_algorithms.rows import MethodRow
from fl_algorithms.settings.models import BODY_AND_HEAD

ROWS = (
    MethodRow(
        name="fedper",
        title="FedPer",
        paper="Arivazhagan et al., 2019, https://arxiv.org/abs/1912.00818",
        upload="the body",
        private="records, the head, optimizer state",
        client="fl_algorithms.methods.fedper.client:fedper",
        settings=HeadSettings,
        needs=frozenset({BODY_AND_HEAD}),
    ),
)
