"""The studies: their course as a pure state machine, the one thread that owns them, their rounds, streams and reports.

Imports ``coordinator.models`` and ``coordinator.storage``, never ``updates``. A fault of one study pauses it alone.
"""
