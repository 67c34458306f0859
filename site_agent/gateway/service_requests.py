"""What a command asks of the running service about itself, and to do with the coordinator at once.

Apart from the other requests, so that a command which asks no more than this loads neither accounts nor ledger lines.
"""

from dataclasses import dataclass

from site_agent.gateway.request_form import Answer, Done, Request


@dataclass(frozen=True)
class ServiceStatus(Answer):
    """How the service runs.

    Attributes:
        certificate_fork_since: since when the coordinator sees two holders of this site's keys; "" if it sees one.
        trainer_problem: why its trainer does not answer now; "" while it does, or is not this service's child.
    """

    connected: bool
    uid: int
    certificate_fork_since: str
    trainer_problem: str


@dataclass(frozen=True)
class Receipts(Answer):
    """How many receipts the coordinator's copy has."""

    receipts: int


@dataclass(frozen=True)
class Status(Request[ServiceStatus]):
    """Answered at once."""

    command = "status"


@dataclass(frozen=True)
class Refresh(Request[Done]):
    """Fails where the coordinator is not reached."""

    command = "refresh"


@dataclass(frozen=True)
class FetchReceipts(Request[Receipts]):
    """Fails where the coordinator is not reached."""

    command = "receipts"
