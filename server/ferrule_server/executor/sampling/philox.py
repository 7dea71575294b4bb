"""Philox4x32-10: the counter-based random numbers of every draw. Pure integers, no state.

After Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011, section 3.3 and table 2;
checked against the known-answer vectors of the authors' library Random123. One draw needs one block of four words. At
that size Python integers (about 3 us) are faster than any array library.
"""

from __future__ import annotations

from enum import IntEnum

_MASK = 0xFFFFFFFF
_MULTIPLIER_0 = 0xD2511F53
_MULTIPLIER_1 = 0xCD9E8D57
_WEYL_0 = 0x9E3779B9
_WEYL_1 = 0xBB67AE85
_NUM_ROUNDS = 10

Words = tuple[int, int, int, int]


class Purpose(IntEnum):
    """The use of a random number. Two purposes at one position never share a number."""

    SAMPLE = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3


def philox4x32(counter: Words, key: tuple[int, int]) -> Words:
    """Return the four random 32-bit words of one counter under one key, after ten rounds.

    Args:
        counter: Four unsigned 32-bit words.
        key: Two unsigned 32-bit words.
    """
    x0, x1, x2, x3 = counter
    k0, k1 = key
    for _ in range(_NUM_ROUNDS):
        product_0 = _MULTIPLIER_0 * x0
        product_1 = _MULTIPLIER_1 * x2
        x0, x1 = (product_1 >> 32) ^ x1 ^ k0, product_1 & _MASK
        x2, x3 = (product_0 >> 32) ^ x3 ^ k1, product_0 & _MASK
        k0, k1 = (k0 + _WEYL_0) & _MASK, (k1 + _WEYL_1) & _MASK
    return x0, x1, x2, x3


def uniform(seed: int, position: int, purpose: Purpose) -> float:
    """Return the random number of one draw: a multiple of 2^-33 strictly between 0 and 1.

    Args:
        seed: Unsigned 64-bit key, low word first.
        position: Index in its sequence of the token to draw; only its low 32 bits are used.
        purpose: The use of the number.
    """
    counter = (position & _MASK, int(purpose), 0, 0)
    x0, _, _, _ = philox4x32(counter, (seed & _MASK, (seed >> 32) & _MASK))
    return (x0 + 0.5) * 2.0**-32
