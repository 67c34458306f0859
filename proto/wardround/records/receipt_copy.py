"""A copy of one site's receipts: the envelopes, oldest first, and after them the coordinator's signed statement.

The statement says of which site and ledger key they are, how many, which is the last, and when the copy was made. So a
copy that lost its end, and an old one, can be told from a whole and a fresh one.
"""

from dataclasses import asdict, dataclass, fields
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from wardround.errors import BadData
from wardround.signing import dsse
from wardround.signing.canonical import MAX_INTEGER

COPY_TYPE = "application/vnd.wardround.receipts.v1+json"
_HEX = set("0123456789abcdef")


@dataclass(frozen=True)
class Statement:
    """What the coordinator says about a copy of a site's receipts.

    ``earlier`` counts receipts of the site's earlier enrolments, which are in no copy of this one.
    """

    federation: str
    site: str
    ledger_key: str  # hex; with which the site is enrolled
    receipts: int
    last: str  # SHA-256 (hex) of the newest receipt's payload; EMPTY_HEAD where there is none
    earlier: int
    time: str  # RFC 3339, UTC, by the coordinator's clock

    def sign(self, key: Ed25519PrivateKey) -> dsse.Envelope:
        return dsse.sign(COPY_TYPE, asdict(self), key)

    @classmethod
    def from_document(cls, document: Any) -> "Statement":
        """Raises BadData: not a statement."""
        if not isinstance(document, dict) or document.keys() != {item.name for item in fields(cls)}:
            raise BadData("signed, but not a statement about receipts")
        for item in fields(cls):
            value = document[item.name]
            count = type(value) is int and 0 <= value <= MAX_INTEGER
            if not (count if item.type is int else isinstance(value, str)):
                raise BadData(f"signed, but not a statement about receipts: {item.name}")
        for name in ("ledger_key", "last"):
            if len(document[name]) != 64 or set(document[name]) - _HEX:
                raise BadData(f"signed, but not a statement about receipts: {name}")
        return cls(**document)
