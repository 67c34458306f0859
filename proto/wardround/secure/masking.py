"""Masks added to a vector in pieces, from any place on: AES-256-CTR streams read as integers of a ring.

Memory is bounded by ``PIECE`` whatever the length of the vector and the number of masks. A seed is used for one vector
alone, so a stream begins at counter 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from numpy.typing import NDArray

from wardround.secure.quantizing import U32, U64

PIECE = 256 * 1024  # bytes; fits a processor's cache together with the keystream
AES_BLOCK = 16
_ZEROS = bytes(PIECE)
Ring = TypeVar("Ring", U32, U64)


@dataclass(frozen=True)
class Mask:
    """A stream that is added (sign 1) or taken away (-1)."""

    seed: bytes
    sign: int

    def __repr__(self) -> str:
        return f"Mask(sign={self.sign})"

    @property
    def undone(self) -> "Mask":
        return Mask(self.seed, -self.sign)


class _Stream:
    """One mask's keystream; going on where it ended costs nothing."""

    def __init__(self, mask: Mask) -> None:
        self.sign, self._seed, self._at = mask.sign, mask.seed, -1
        self._cipher: CipherContext | None = None

    def into(self, buffer: NDArray[np.uint8], place: int) -> None:
        """Fill ``buffer`` with the stream's bytes from ``place`` on."""
        if self._cipher is None or place != self._at:
            counter, skip = divmod(place, AES_BLOCK)
            self._cipher = Cipher(algorithms.AES(self._seed), modes.CTR(counter.to_bytes(AES_BLOCK, "big"))).encryptor()
            self._cipher.update(bytes(skip))
        self._cipher.update_into(_ZEROS[: buffer.nbytes], buffer.data)
        self._at = place + buffer.nbytes


class Masks:
    """Masks of one vector."""

    def __init__(self, masks: Sequence[Mask]) -> None:
        self._streams = [_Stream(mask) for mask in masks]
        self._room = np.empty(PIECE, np.uint8)

    def add(self, values: Ring, first: int = 0) -> None:
        """Add all masks to ``values``, in place. ``first``: the place of its first element in the vector."""
        item, ring = values.itemsize, values.dtype.newbyteorder("<")
        width = PIECE // item
        for start in range(0, values.size, width):
            piece = values[start : start + width]
            room = self._room[: piece.nbytes]
            for stream in self._streams:
                stream.into(room, (first + start) * item)
                if stream.sign > 0:
                    piece += room.view(ring)
                else:
                    piece -= room.view(ring)
