"""Shares of a site's two secrets, each encrypted to its receiver: X25519, HKDF, ChaCha20-Poly1305.

The key and the associated data name the attempt, who deals and who receives, so that a share which is given to another
receiver, in another round, or as another's, is no share.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from wardround.errors import BadData
from wardround.secure import shamir
from wardround.secure.keys import LENGTH, MASK_KEY, SELF_MASK, Secrets, agreed, derive
from wardround.secure.statements import Keys, Roster
from wardround.signing import canonical

NONCE, TAG = 12, 16
CIPHERTEXT = NONCE + 2 * LENGTH + TAG  # bytes of what travels from one site to another


@dataclass(frozen=True)
class Share:
    """What one site holds of another's secrets."""

    mask_key: bytes
    self_mask: bytes

    def __repr__(self) -> str:
        return "Share(…)"


def deal(secrets: Secrets, own: Keys, peers: Sequence[Keys], roster: Roster, threshold: int) -> dict[str, bytes]:
    """Receiver -> ciphertext, for each of ``peers``, the dealer itself too. Dealt again, the shares are the same.

    Raises:
        BadData: a peer's public key is none.
    """
    masks, selves = (secrets.coefficients(kind, threshold) for kind in (MASK_KEY, SELF_MASK))
    found = {}
    for peer in peers:
        point = roster.point(peer.site)
        plain = shamir.share(secrets.mask_key, masks, point) + shamir.share(secrets.self_mask, selves, point)
        nonce = os.urandom(NONCE)
        cipher, bound = _cipher(secrets, own, peer, dealer=own.site, receiver=peer.site)
        found[peer.site] = nonce + cipher.encrypt(nonce, plain, bound)
    return found


def open_share(secrets: Secrets, own: Keys, dealer: Keys, ciphertext: bytes) -> Share:
    """What ``dealer`` gave to this site.

    Raises:
        BadData: it is not for this site, not from that one, of another attempt, or damaged.
    """
    cipher, bound = _cipher(secrets, own, dealer, dealer=dealer.site, receiver=own.site)
    try:
        if len(ciphertext) != CIPHERTEXT:
            raise InvalidTag
        plain = cipher.decrypt(ciphertext[:NONCE], ciphertext[NONCE:], bound)
    except InvalidTag:
        raise BadData(f"what came as the share of site `{dealer.site}` for this one is not that") from None
    return Share(plain[:LENGTH], plain[LENGTH:])


def _cipher(secrets: Secrets, own: Keys, peer: Keys, *, dealer: str, receiver: str) -> tuple[ChaCha20Poly1305, bytes]:
    common = agreed(secrets.share_key, peer.share_key)
    bound = canonical.dumps([own.context.document(), dealer, receiver])
    return ChaCha20Poly1305(derive(common, "share", own.context.digest, dealer, receiver)), bound
