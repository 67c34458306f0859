"""One update on its way in: received to a spool, admitted or refused, answered by a signed receipt.

Imports ``coordinator.storage`` and the states of ``coordinator.studies``. Refuses by code from a closed list.
"""
