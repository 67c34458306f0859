"""The account of what left, read from the files alone: judged, shown, compared, exported. No network, no torch."""

from site_agent.audit.form import MANIFEST_FIELDS, records
from site_agent.audit.verify import CANNOT_VERIFY, TAMPERED, UNRESOLVED, VERIFIED, Verdict, verify

__all__ = [
    "CANNOT_VERIFY",
    "MANIFEST_FIELDS",
    "TAMPERED",
    "UNRESOLVED",
    "VERIFIED",
    "Verdict",
    "records",
    "verify",
]
