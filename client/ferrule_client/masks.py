"""Sets of tokens that may be chosen: by ids, by a bool array, packed, or kept on the server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ferrule_client import _check
from ferrule_client._public import publish

__all__ = ["MaskLike", "TokenMask", "as_mask"]


@dataclass(frozen=True, slots=True, weakref_slot=True)
class TokenMask:
    """A set of tokens that may be chosen, in one of three forms.

    Wherever a mask is taken, its content is too: ids, a bool array with an entry per token id, or packed bits. One that
    is used again and again is cheaper registered: ``client.register_mask`` returns it with its ``fingerprint``, and
    only those 16 bytes travel. A server that has dropped it meanwhile is given it again by the client.

    Attributes:
        allowed_ids: The allowed token ids; None: see ``bits``.
        bits: One bit per token id, ceil(vocab_size / 8) bytes, id i at bit (i mod 8) of byte (i div 8), 1 = allowed.
        fingerprint: Name under which the server keeps it, 16 bytes; None: it does not. Alone it is enough, for a mask
            that another process of the same principal has registered, but then this client cannot give it again.
    """

    allowed_ids: tuple[int, ...] | None = None
    bits: bytes | None = field(default=None, repr=False)
    fingerprint: bytes | None = None

    def __post_init__(self) -> None:
        if self.allowed_ids is not None and self.bits is not None:
            raise ValueError("a mask is either allowed_ids or bits")
        if self.allowed_ids is None and self.bits is None and self.fingerprint is None:
            raise ValueError("a mask needs allowed_ids, bits, or the fingerprint of one that is registered")
        if self.allowed_ids is not None and not self.allowed_ids:
            raise ValueError("a mask must allow at least one token")

    def to_bits(self, vocab_size: int) -> bytes:
        """Return the packed form of the mask for ``vocab_size`` token ids.

        Raises:
            ValueError: An allowed id is out of the vocabulary, or the mask is known by its fingerprint alone.
        """
        if self.bits is not None:
            return self.bits
        if self.allowed_ids is None:
            raise ValueError("the mask is known by its fingerprint alone: register it by its content")
        if max(self.allowed_ids) >= vocab_size:
            raise ValueError(f"token {max(self.allowed_ids)} is not in the vocabulary of {vocab_size} tokens")
        allowed = np.zeros(vocab_size, dtype=np.bool_)
        allowed[list(self.allowed_ids)] = True
        return _pack(allowed)


MaskLike = TokenMask | Sequence[int] | npt.NDArray[np.bool_] | npt.NDArray[np.integer] | bytes
"""A mask, or its content: token ids, a bool array [vocab_size], or packed bits."""


def as_mask(mask: MaskLike) -> TokenMask:
    """Return a mask in whatever form it was given; raise TypeError if it is none, ValueError if it allows nothing."""
    if isinstance(mask, TokenMask):
        return mask
    if isinstance(mask, (bytes, bytearray, memoryview)):
        return TokenMask(bits=bytes(mask))
    if isinstance(mask, np.ndarray) and mask.dtype == np.bool_:
        if mask.ndim != 1:
            raise TypeError(f"a mask has one entry per token id, got an array of {mask.ndim} dimensions")
        if not mask.any():
            raise ValueError("a mask must allow at least one token")
        return TokenMask(bits=_pack(mask.astype(np.bool_, copy=False)))
    if isinstance(mask, Sequence) and mask and all(isinstance(one, (bool, np.bool_)) for one in mask):
        raise TypeError("a mask of bools must be a numpy array of bool; a list is taken for token ids")
    return TokenMask(allowed_ids=tuple(_check.token_list(mask)))


def _pack(allowed: npt.NDArray[np.bool_]) -> bytes:
    return np.packbits(allowed, bitorder="little").tobytes()


publish(globals(), ("TokenMask",))
