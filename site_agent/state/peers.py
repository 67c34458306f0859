"""The other hospitals whose ledger keys this one's people have compared with theirs: `peers.json`."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from pydantic import ConfigDict

from site_agent.state import codec
from site_agent.state.codec import STRICT
from site_agent.state.person import KnownPerson
from wardround.local import durable


@dataclass(frozen=True)
class Peer:
    """``fingerprint``: SHA-256 (hex) of the ledger key, as both sides read it to each other. ``by``: who heard it."""

    site: str
    fingerprint: str
    by: KnownPerson
    at: str

    __pydantic_config__: ClassVar[ConfigDict] = STRICT


@dataclass(frozen=True)
class Peers:
    """Those that are known, each site once."""

    known: tuple[Peer, ...] = ()

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    @property
    def fingerprints(self) -> frozenset[str]:
        return frozenset(peer.fingerprint for peer in self.known)

    def of(self, site: str, fingerprint: str) -> Peer | None:
        """Who vouched for this key of this site; None where nobody did."""
        return next((peer for peer in self.known if (peer.site, peer.fingerprint) == (site, fingerprint)), None)

    def plus(self, peer: Peer) -> "Peers":
        """With one more; a site that was known by another key is known by this one alone."""
        others = (one for one in self.known if one.site != peer.site)
        return Peers(tuple(sorted([*others, peer], key=lambda one: one.site)))

    def minus(self, site: str) -> "Peers":
        return Peers(tuple(one for one in self.known if one.site != site))


def load(path: Path) -> Peers:
    """Raises BadData: the file is damaged."""
    return codec.read(path, Peers) if path.exists() else Peers()


def save(path: Path, peers: Peers) -> None:
    durable.write_file(path, codec.to_bytes(peers))
