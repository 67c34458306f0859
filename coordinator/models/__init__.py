"""Models as files: the aggregation of updates, the downloads of sites, public data sets.

Imports ``coordinator.storage`` and ``fl_algorithms.server``. Holds blocks in memory, never a whole model.
"""
