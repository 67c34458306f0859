"""Models as files: which are kept, how the next one is aggregated, what a site downloads, public data sets.

Imports ``coordinator.storage`` and ``fl_algorithms.server``, never ``studies``. Holds blocks in memory, never a model.
"""

from typing import Literal

Which = Literal["best", "latest"]  # of a study's models: the best global one, or the newest
