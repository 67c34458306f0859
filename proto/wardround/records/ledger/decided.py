"""What people at a site decided, as its ledger has it: which policy is in force, and which updates may leave.

Where the policy wants several people, those before the last one have endorsed it; nothing is in force by that.
"""

from dataclasses import dataclass

from wardround.records.ledger.base import BaseEntry, Person
from wardround.records.ledger.form import Digest, Unjudged


@dataclass(frozen=True, kw_only=True)
class PolicyEntry(BaseEntry):
    """Another policy is in force. ``by``: who put it in force; None where the file was written without a command.

    ``also_by``: who agreed to it before. ``persons``: how many different people must agree to another one; None for
    one.
    """

    type = "policy"
    event: str  # seen, changed, removed
    sha256: Unjudged | None = None  # "" for none
    by: Person | None = None
    also_by: tuple[Person, ...] | None = None
    persons: int | None = None


@dataclass(frozen=True, kw_only=True)
class ProposalEntry(BaseEntry):
    """Another policy, by its digest, was proposed, or agreed to by one more person who is not enough; or taken back.

    ``by``: who did it; ``also_by``: who agreed to it before.
    """

    type = "proposal"
    event: str  # proposed, taken back
    policy_sha256: Digest
    by: Person | None = None
    also_by: tuple[Person, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class HoldEntry(BaseEntry):
    """An update that a person must decide about: ``update`` is the digest of all that would leave.

    ``salt`` is random: the coordinator is shown each line's hash, and could find numbers that never left by trying
    which of them give it.
    """

    study: str
    revision: int | None = None
    round: int | None = None
    attempt: int | None = None
    update: Digest | None = None
    salt: Digest | None = None
    by: Person | None = None


@dataclass(frozen=True, kw_only=True)
class HeldEntry(HoldEntry):
    """It waits for a person."""

    type = "held"


@dataclass(frozen=True, kw_only=True)
class EndorsedEntry(HoldEntry):
    """Somebody would have it leave, and further people must: it still waits."""

    type = "endorsed"


@dataclass(frozen=True, kw_only=True)
class ReleasedEntry(HoldEntry):
    """A release decision: it may leave. ``also_by``: who endorsed it before."""

    type = "released"
    also_by: tuple[Person, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class RejectedEntry(HoldEntry):
    """A release decision: it does not leave."""

    type = "rejected"
