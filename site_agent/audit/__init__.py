"""Reads ledgers from their files alone: verifies, shows, compares, exports, reports them.

Imports ``wardround``, ``site_agent.state`` and the words of consents; no network, no torch. Refuses to say more than
the files show.
"""

from site_agent.audit.form import lines
from site_agent.audit.verify import (
    CANNOT_VERIFY,
    CONSISTENT,
    TAMPERED,
    UNRESOLVED,
    VERIFIED,
    Copy,
    Pins,
    Verdict,
    verify,
)

__all__ = [
    "CANNOT_VERIFY",
    "CONSISTENT",
    "TAMPERED",
    "UNRESOLVED",
    "VERIFIED",
    "Copy",
    "Pins",
    "Verdict",
    "lines",
    "verify",
]
