"""Shamir's secret sharing, byte by byte in GF(256) with the polynomial of AES: t of n shares give the secret.

    share x of a secret s:   s + r_1 x + ... + r_(t-1) x^(t-1)       x from 1 to n

This is the arithmetic of draft-mcgrew-tss-03, whose test vector the tests hold. Products are by tables, whose look-ups
depend on the secret: a program that measures this process's cache is not defended against. Shares are not checked here:
whoever combines compares the outcome with a commitment.

Shamir, How to share a secret, Communications of the ACM 22(11), 1979.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from wardround.errors import BadData

POLYNOMIAL = 0x11B  # x^8 + x^4 + x^3 + x + 1
Bytes = NDArray[np.uint8]


def _tables() -> tuple[Bytes, NDArray[np.int64]]:
    """powers[i] = 3^i over two periods, and the logarithms to the base 3."""
    powers, logarithms, value = np.zeros(510, np.uint8), np.zeros(256, np.int64), 1
    for exponent in range(255):
        powers[exponent] = powers[exponent + 255] = value
        logarithms[value] = exponent
        value ^= value << 1
        if value & 0x100:
            value ^= POLYNOMIAL
    return powers, logarithms


_POWERS, _LOGARITHMS = _tables()


def _times(vector: Bytes, factor: int) -> Bytes:
    if factor == 0:
        return np.zeros_like(vector)
    product = _POWERS[_LOGARITHMS[vector] + _LOGARITHMS[factor]]
    return np.where(vector == 0, np.uint8(0), product)


def share(secret: bytes, coefficients: Sequence[bytes], point: int) -> bytes:
    """The share at ``point``, 1 to 255. ``coefficients``: r_1 to r_(t-1), each random and as long as the secret."""
    value = np.zeros(len(secret), np.uint8)
    for coefficient in (*reversed(coefficients), secret):  # Horner
        value = _times(value, point) ^ np.frombuffer(coefficient, np.uint8)
    return value.tobytes()


def combine(shares: Mapping[int, bytes]) -> bytes:
    """The secret of t shares by their points. Of fewer, or of wrong ones, it is another value.

    Raises:
        BadData: no share, unlike lengths, or a point that is none.
    """
    if not shares or len({len(one) for one in shares.values()}) != 1 or not all(0 < x < 256 for x in shares):
        raise BadData("shares of a secret have points from 1 to 255 and equal lengths")
    secret = np.zeros(len(next(iter(shares.values()))), np.uint8)
    for x, value in shares.items():
        exponent = sum(int(_LOGARITHMS[other] - _LOGARITHMS[other ^ x]) for other in shares if other != x)
        secret ^= _times(np.frombuffer(value, np.uint8), int(_POWERS[exponent % 255]))
    return secret.tobytes()
