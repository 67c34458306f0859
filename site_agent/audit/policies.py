"""Which policy people agreed to, by the ledger, where each change needs several of them."""

from dataclasses import dataclass
from pathlib import Path

from site_agent.audit.form import lines
from wardround.records.ledger.decided import PolicyEntry


@dataclass(frozen=True)
class Agreed:
    """The policy that is in force, whatever lies at its place, and how many different people must agree to another."""

    sha256: str
    persons: int


def agreed(ledger: Path) -> Agreed | None:
    """None: one person is enough, and what lies there is in force. Raises as ``lines``."""
    entries = (line.entry for line in lines(ledger))
    last = None
    for entry in entries:
        if isinstance(entry, PolicyEntry) and entry.sha256:
            last = Agreed(entry.sha256, entry.persons or 1)
    return last if last is not None and last.persons > 1 else None
