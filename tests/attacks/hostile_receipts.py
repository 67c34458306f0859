"""A coordinator that signs what it likes as the receipt of an upload."""

import hashlib
from dataclasses import asdict
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tests.site_agent.fake_coordinator import FakeCoordinator
from tests.site_agent.site_world import SiteWorld
from wardround.records import receipts
from wardround.records.messages import envelope_from, envelope_message, manifest_from
from wardround.signing import canonical, dsse

Document = dict[str, Any]


class LyingCoordinator(FakeCoordinator):
    """``lie`` gets each receipt's document before it is signed, and returns what is signed in its place.

    With ``raw`` it returns the payload itself, which need not be JSON.
    """

    def __init__(self) -> None:
        super().__init__()
        self.changes: Document = {}
        self.removes: tuple[str, ...] = ()
        self.raw: bytes | None = None
        self.kind = receipts.RECEIPT_TYPE
        self.told: list[bytes] = []

    def honest(self) -> None:
        self.changes, self.removes, self.raw, self.kind = {}, (), None, receipts.RECEIPT_TYPE

    def _decide(self, opening: Any, payload: bytes) -> Any:
        previous = self.previous
        said = super()._decide(opening, payload)
        envelope = self._lie(envelope_from(said))
        if envelope.payload != said.payload:
            self.previous = previous  # a lie is no link of the chain, so that the truth can still be told
            self.chain.pop()
        return envelope_message(envelope)

    def truth(self) -> None:
        """From now on honest: the uploads that were answered with a lie are answered again."""
        self.honest()
        with self.changed:
            for taken in self.uploads.values():
                if taken.receipt is not None and taken.receipt.payload in self.told:
                    opening, manifest = taken.opening, manifest_from(taken.opening.manifest)
                    head = receipts.LedgerHead(
                        opening.ledger.ledger_id, opening.ledger.lines, opening.ledger.head.hex()
                    )
                    made = self._receipt(opening.upload_id, (opening, manifest), receipts.ACCEPTED, "", head)
                    self.previous = hashlib.sha256(made.payload).hexdigest()
                    self.chain.append(made)
                    taken.receipt = envelope_message(made)

    def _lie(self, envelope: dsse.Envelope) -> dsse.Envelope:
        if not (self.changes or self.removes or self.raw is not None or self.kind != receipts.RECEIPT_TYPE):
            return envelope
        document = {**canonical.loads(envelope.payload), **self.changes}
        for name in self.removes:
            document.pop(name)
        payload = canonical.dumps(document) if self.raw is None else self.raw
        self.told.append(payload)
        return signed(self.kind, payload, self.receipt_key)


def signed(kind: str, payload: bytes, key: Ed25519PrivateKey) -> dsse.Envelope:
    return dsse.Envelope(kind, payload, dsse.keyid(key.public_key()), key.sign(dsse.encoding(kind, payload)))


def lying_world(folder: Any) -> tuple[SiteWorld, LyingCoordinator]:
    """A hospital with a coordinator that lies to order; ``close`` the first."""
    world = SiteWorld(folder)
    world.coordinator.stop()
    world.coordinator = lying = LyingCoordinator()
    return world, lying


def head(lines: Any, digest: Any = "ab" * 32, ledger_id: Any = "x") -> Document:
    return {"ledger_id": ledger_id, "lines": lines, "head": digest}


def a_head(world: SiteWorld) -> Document:
    """A head that the ledger had before the upload's line: true, but it does not cover the upload."""
    assert world.agent is not None
    found = world.agent.commands._ledger._state.head_at(1)
    return asdict(found)
