"""What both sides sign about one upload: the site its ledger's head, the coordinator what it took.

The chain. Each ledger line holds, as ``prev``, the head before it. The head after a line is
SHA-256(head before ‖ SHA-256(the line's bytes without the newline)). So whoever knows one head, and is given the
32-byte hashes of the lines since, can compute the next head and see whether the ledger shrank or forked, without seeing
a line.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from wardround import canonical, dsse
from wardround.errors import BadData

HEAD_TYPE = "application/vnd.wardround.ledger-head.v1+json"
RECEIPT_TYPE = "application/vnd.wardround.receipt.v1+json"
EMPTY_HEAD = "0" * 64

MAX_NEW_LINES = 1000  # hashes of ledger lines in one message; a round writes a few dozen
ACCEPTED, REFUSED, NOT_RECEIVED = "accepted", "refused", "not_received"


def line_hash(line: bytes) -> bytes:
    """SHA-256 of a ledger line without its newline."""
    return hashlib.sha256(line).digest()


def next_head(head: str, hash_of_line: bytes) -> str:
    """The head (hex) after a line whose hash is given."""
    return hashlib.sha256(bytes.fromhex(head) + hash_of_line).hexdigest()


def head_after(head: str, hashes: Iterable[bytes]) -> str:
    """The head after several lines."""
    for hash_of_line in hashes:
        head = next_head(head, hash_of_line)
    return head


@dataclass(frozen=True)
class LedgerHead:
    """How long a ledger is and what its last line says of all before it."""

    ledger_id: str
    lines: int
    head: str

    def sign(self, key: Ed25519PrivateKey) -> dsse.Envelope:
        return dsse.sign(HEAD_TYPE, asdict(self), key)

    def verify(self, signature: bytes, key: Ed25519PublicKey) -> None:
        """Raises BadData: ``signature`` is not the ledger key's over this head."""
        envelope = dsse.Envelope(HEAD_TYPE, canonical.dumps(asdict(self)), dsse.keyid(key), signature)
        dsse.verify(envelope, HEAD_TYPE, key)


@dataclass(frozen=True)
class Receipt:
    """The coordinator's word on one upload. ``decision`` is accepted, refused or not_received.

    ``previous`` is the SHA-256 (hex) of the payload of the receipt before it for the same site, so that the coordinator
    cannot quietly drop one. ``tensor`` names the tensor that was refused, if it was one; a name, never a value.
    """

    receipt_id: str
    federation: str
    site: str
    study: str
    revision: int
    round: int
    attempt: int
    upload_id: str  # hex
    manifest_sha256: str
    payload_bytes: int
    decision: str
    code: str  # a name of RefusalCode, "" when accepted
    tensor: str
    time: str  # RFC 3339, UTC
    ledger: LedgerHead | None
    previous: str  # hex; EMPTY_HEAD for the first

    def sign(self, key: Ed25519PrivateKey) -> dsse.Envelope:
        return dsse.sign(RECEIPT_TYPE, asdict(self), key)

    @classmethod
    def verified(cls, envelope: dsse.Envelope, key: Ed25519PublicKey) -> "Receipt":
        """The receipt in ``envelope``.

        Raises:
            BadData: not signed by ``key``, or not a receipt.
        """
        return cls.from_document(dsse.verify(envelope, RECEIPT_TYPE, key))

    @classmethod
    def from_document(cls, document: Any) -> "Receipt":
        """Raises BadData: not a receipt."""
        try:
            ledger = document["ledger"]
            return cls(**{**document, "ledger": LedgerHead(**ledger) if ledger is not None else None})
        except (TypeError, KeyError):
            raise BadData("signed, but not a receipt") from None
