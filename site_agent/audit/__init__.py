"""The ledger of what left, read from its files alone: verified, shown, compared with a count, exported.

Imports ``wardround`` and ``site_agent.state``; no network and no torch. Refuses to say more than the files show.
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
