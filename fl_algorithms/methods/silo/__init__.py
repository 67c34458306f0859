"""Silo: its card and settings. No torch: ``client`` has what a site does."""

from fl_algorithms.methods.settings import MethodSettings
from fl_algorithms.rows import MethodRow

ROWS = (
    MethodRow(
        name="silo",
        title="Silo",
        paper="no federation: each site trains alone",
        upload="nothing",
        private="everything",
        client="fl_algorithms.methods.silo.client:silo",
        settings=MethodSettings,
        lab_only=True,
    ),
)
