"""What a command asks of the running service about the members of a study, and about a round's sum."""

from dataclasses import dataclass

from site_agent.gateway.request_form import Answer, Done, Request
from site_agent.state.person import KnownPerson


@dataclass(frozen=True)
class PeerRow:
    """A member of a study. ``by``, ``at``: who compared its key here, and when; "" where nobody did."""

    site: str
    fingerprint: str
    here: bool
    by: str
    at: str


@dataclass(frozen=True)
class ShownPeers(Answer):
    """``threshold``: how many must sign a set. ``colluding``: how many may work with the coordinator."""

    members: tuple[PeerRow, ...]
    threshold: int
    colluding: int


@dataclass(frozen=True)
class ShownSum(Answer):
    """``result``: same, other or blocks_alone. ``looked_at``: so many of ``of`` blocks. ``why``: what is other.
    ``kept``: the folder with all that it was checked with, where it was to be kept; "" else.
    """

    result: str
    looked_at: int
    of: int
    sites: tuple[str, ...]
    why: str
    kept: str


@dataclass(frozen=True)
class GetPeers(Request[ShownPeers]):
    """Of a study with secure aggregation."""

    command = "peers"
    study: str


@dataclass(frozen=True)
class KnowPeer(Request[Done]):
    """``fingerprint`` as it was heard."""

    command = "know"
    site: str
    fingerprint: str
    by: KnownPerson


@dataclass(frozen=True)
class ForgetPeer(Request[Done]):
    """From here on it counts as a stranger."""

    command = "forget"
    site: str
    by: KnownPerson


@dataclass(frozen=True)
class CheckSum(Request[ShownSum]):
    """``blocks``: how many to look at; None: all. ``keep``: what it is checked with, for others. Fails where the
    coordinator is not reached.
    """

    command = "check_sum"
    study: str
    round: int
    blocks: int | None
    keep: bool
