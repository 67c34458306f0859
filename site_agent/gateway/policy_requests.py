"""What a command asks about a change of the policy that waits for further people, and what the service answers."""

from dataclasses import dataclass

from site_agent.gateway.request_form import Answer, Done, Request
from site_agent.state.person import KnownPerson


@dataclass(frozen=True)
class Proposed(Answer):
    """A change of the policy that waits.

    Attributes:
        sha256: the digest of ``text``, the policy as it should be; "" where nothing waits.
        before: the digest of the policy in force.
        changes: what it says otherwise, a sentence each.
        by: who agreed so far. persons: how many different people must.
    """

    sha256: str
    text: str
    before: str
    changes: tuple[str, ...]
    by: tuple[str, ...]
    persons: int


NOTHING = Proposed("", "", "", (), (), 1)


@dataclass(frozen=True)
class GetProposed(Request[Proposed]):
    """Answered at once."""

    command = "proposed"


@dataclass(frozen=True)
class TakeBackPolicy(Request[Done]):
    """``sha256`` is the digest of what the person saw."""

    command = "take_back_policy"
    sha256: str
    by: KnownPerson
