"""DSSE: a signature over bytes and the type that they claim to be.

The pre-authentication encoding is that of the DSSE protocol, https://github.com/secure-systems-lab/dsse. Keys are
Ed25519; a key's id is the SHA-256 (hex) of its 32 public bytes.
"""

import base64
import hashlib
from dataclasses import dataclass
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from wardround.errors import BadData
from wardround.signing import canonical


@dataclass(frozen=True)
class Envelope:
    """Signed bytes, with their type and the id of the key."""

    payload_type: str
    payload: bytes
    keyid: str
    signature: bytes

    def document(self) -> dict[str, str]:
        """As it stands in a ledger line: the payload as text, for it is canonical JSON.

        Raises:
            BadData: it is none, which nobody had verified before.
        """
        try:
            payload = self.payload.decode()
        except UnicodeDecodeError:
            raise BadData("a signed envelope whose payload is no text") from None
        return {
            "payload_type": self.payload_type,
            "payload": payload,
            "keyid": self.keyid,
            "signature": base64.b64encode(self.signature).decode(),
        }

    @classmethod
    def from_document(cls, document: Any) -> "Envelope":
        """Raises BadData: not an envelope."""
        try:
            fields = {key: document[key] for key in ("payload_type", "payload", "keyid", "signature")}
            if not all(isinstance(text, str) for text in fields.values()):
                raise TypeError
            signature = base64.b64decode(fields["signature"], validate=True)
            if base64.b64encode(signature).decode() != fields["signature"]:  # its last character has bits to spare
                raise ValueError
            return cls(fields["payload_type"], fields["payload"].encode(), fields["keyid"], signature)
        except (KeyError, TypeError, ValueError, AttributeError):
            raise BadData("not a signed envelope") from None


def keyid(key: Ed25519PublicKey) -> str:
    return fingerprint(key.public_bytes_raw())


def fingerprint(key: bytes) -> str:
    """The id of a public key, by which people compare it: SHA-256 (hex) of its 32 bytes."""
    return hashlib.sha256(key).hexdigest()


def sign(payload_type: str, value: Any, key: Ed25519PrivateKey) -> Envelope:
    """The canonical JSON of ``value``, signed."""
    payload = canonical.dumps(value)
    return Envelope(payload_type, payload, keyid(key.public_key()), key.sign(encoding(payload_type, payload)))


def verify(envelope: Envelope, payload_type: str, key: Ed25519PublicKey) -> Any:
    """The value that was signed.

    Raises:
        BadData: another type, another key, a signature that does not verify, or a payload that is not canonical JSON.
    """
    if envelope.payload_type != payload_type:
        raise BadData(f"signed as {envelope.payload_type[:60]!r}, wanted {payload_type!r}")
    if envelope.keyid != keyid(key):
        theirs = envelope.keyid[:12] if envelope.keyid.isalnum() else repr(envelope.keyid[:12])
        raise BadData(f"signed by key {theirs}…, wanted {keyid(key)[:12]}…")
    try:
        key.verify(envelope.signature, encoding(payload_type, envelope.payload))
    except InvalidSignature:
        raise BadData(f"the signature of key {envelope.keyid[:12]}… does not verify") from None
    return canonical.loads(envelope.payload)


def encoding(payload_type: str, payload: bytes) -> bytes:
    """What is signed: "DSSEv1", then each part with its length."""
    kind = payload_type.encode()
    return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)
