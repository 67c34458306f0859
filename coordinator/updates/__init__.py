"""One update on its way in: ``receive`` (bytes to a spool), ``admission`` (may it count?), ``decide`` (the verdict).

Imports ``coordinator.studies`` and ``coordinator.storage``, and nothing of gRPC. Refuses by code from a closed list.
"""
