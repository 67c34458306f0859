"""The account of what left, read from the files alone: judged, shown, compared, exported. No network, no torch."""

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
