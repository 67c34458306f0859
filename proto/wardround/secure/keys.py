"""Secrets of one site for one attempt of a round, all derived from 32 random bytes: erase these, and all are gone.

    mask key      X25519; with a peer's gives the seed of the mask that the two share
    share key     X25519; with a peer's gives the key under which a share travels
    self mask     32 bytes; the seed of the site's own mask
    coefficients  of the polynomials by which mask key and self mask are shared

A seed is bound to everything that it is for: HKDF-SHA256 with a canonical description as ``info``. Two sites that were
given different models, rounds, rosters or quantizers have masks that do not cancel.
"""

import hashlib
from dataclasses import dataclass

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from wardround.errors import BadData
from wardround.signing import canonical

LENGTH = 32  # bytes of every secret
MASK_KEY, SELF_MASK = "mask-key", "self-mask"  # the two kinds of secret that are shared


def derive(secret: bytes, *purpose: str) -> bytes:
    """32 bytes for one purpose. Other words of it give bytes that have nothing in common."""
    info = canonical.dumps(["wardround secure aggregation v1", *purpose])
    return HKDF(hashes.SHA256(), LENGTH, salt=None, info=info).derive(secret)


def commitment(self_mask: bytes, context: str) -> str:
    """What a site tells of its self mask before it is opened. 32 random bytes cannot be guessed from it."""
    return hashlib.sha256(derive(self_mask, "commitment", context)).hexdigest()


def public_of(private: bytes) -> str:
    """The public key (hex) of a private one."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw().hex()


def agreed(private: bytes, public: str) -> bytes:
    """What two key pairs have in common.

    Raises:
        BadData: the other's key is no key, or one whose outcome is known to everybody.
    """
    try:
        other = X25519PublicKey.from_public_bytes(bytes.fromhex(public))
        return X25519PrivateKey.from_private_bytes(private).exchange(other)
    except ValueError:
        raise BadData("a public key of secure aggregation is none of X25519") from None


@dataclass(frozen=True)
class Secrets:
    """The secrets of one attempt. ``root``: 32 random bytes, drawn for it alone. context: its digest."""

    root: bytes
    context: str

    def __post_init__(self) -> None:
        if len(self.root) != LENGTH:
            raise BadData("the secrets of this round are erased")

    def __repr__(self) -> str:
        return f"Secrets(context={self.context[:12]}…)"  # never the root, in whatever log

    @property
    def mask_key(self) -> bytes:
        return derive(self.root, MASK_KEY, self.context)

    @property
    def share_key(self) -> bytes:
        return derive(self.root, "share-key", self.context)

    @property
    def self_mask(self) -> bytes:
        return derive(self.root, SELF_MASK, self.context)

    def coefficients(self, kind: str, threshold: int) -> tuple[bytes, ...]:
        """r_1 to r_(t-1) of one of the two shared secrets."""
        return tuple(
            derive(self.root, "coefficient", kind, str(degree), self.context) for degree in range(1, threshold)
        )
