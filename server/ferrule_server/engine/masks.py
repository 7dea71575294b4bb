"""Token masks: clients register them once and then refer to them by a fingerprint of their content."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from ferrule_server.errors import MaskUnknown, QuotaExceeded
from ferrule_server.executor.base import TokenMask
from ferrule_server.fairness.places import Places
from ferrule_server.quotas import LimitsOf, unlimited

FINGERPRINT_BYTES: Final = 16
MAX_MASK_BYTES: Final = 256 << 20
"""Most bytes of the masks of all principals together."""
OVERHEAD_BYTES: Final = 1024
"""What a registered mask counts besides its bits: objects and table entries, at most 620 bytes as measured."""


def make_mask(bits: npt.NDArray[np.uint8], vocab_size: int) -> TokenMask | None:
    """Return the mask of packed bits, or None if they allow no token.

    Args:
        bits: uint8 [ceil(vocab_size / 8)]; bits beyond the vocabulary are ignored; copied.
        vocab_size: Number of token ids of the model.
    """
    kept = bits.copy()
    if vocab_size % 8:
        kept[-1] &= (1 << vocab_size % 8) - 1
    if not kept.any():
        return None
    kept.flags.writeable = False
    return TokenMask(hashlib.blake2b(kept.tobytes(), digest_size=FINGERPRINT_BYTES).digest(), kept)


def counted_bytes(mask: TokenMask) -> int:
    """Return what a registered mask counts in the quota: at least what it occupies."""
    return mask.bits.nbytes + OVERHEAD_BYTES


class MaskRegistry:
    """The registered masks of each principal, which cannot use those of others. Used on the event loop's thread only.

    If a principal exceeds its quota, its least recently used masks are dropped; beyond ``max_bytes`` the least recently
    used of all. A job that uses a dropped mask keeps it alive.

    Invariant: ``memory`` has the :func:`counted_bytes` of all masks, and is not exceeded; no principal holds more than
    its quota allowed when it last registered one.

    Args:
        limits_of: The quotas of a principal.
        max_bytes: Limit for all masks together.

    Attributes:
        memory: The bytes that are counted, by principal; read only.
    """

    def __init__(self, limits_of: LimitsOf = unlimited, max_bytes: int = MAX_MASK_BYTES) -> None:
        self._limits_of = limits_of
        self._max_bytes = max_bytes
        self._owned: dict[str, OrderedDict[bytes, TokenMask]] = {}
        self._order: OrderedDict[tuple[str, bytes], None] = OrderedDict()
        self.memory = Places(max_bytes)

    @property
    def num_masks(self) -> int:
        """Number of masks held; equal masks of two principals count twice."""
        return len(self._order)

    def register(self, principal: str, masks: Sequence[TokenMask]) -> list[bytes]:
        """Keep masks, all or none, and return their fingerprints in order.

        Raises:
            QuotaExceeded: They alone exceed the limit; nothing was dropped for them.
        """
        distinct = {mask.fingerprint: mask for mask in masks}
        limit = self._limit(principal)
        needed = sum(counted_bytes(mask) for mask in distinct.values())
        if needed > limit:
            raise QuotaExceeded("MASK_BYTES", self.memory.of(principal), limit, None, needed)
        for mask in distinct.values():
            self._keep(principal, mask)
        while self.memory.of(principal) > limit:
            self._drop(principal, next(iter(self._owned[principal])))
        while self.memory.num_free < 0:
            self._drop(*next(iter(self._order)))
        return [mask.fingerprint for mask in masks]

    def restore(self, masks: Mapping[tuple[str, bytes], bytes]) -> None:
        """Keep the masks of an earlier run, as far as there is room; the last ones are the most recently used.

        Args:
            masks: Packed bits by principal and fingerprint.
        """
        for (principal, fingerprint), bits in masks.items():
            self._keep(principal, TokenMask(fingerprint, np.frombuffer(bits, np.uint8)))
            while self.memory.num_free < 0:
                self._drop(*next(iter(self._order)))

    def find(self, principal: str, fingerprint: bytes) -> TokenMask:
        """Return a mask that the principal registered; it becomes the most recently used one.

        Raises:
            MaskUnknown: The principal did not register it, or it was dropped.
        """
        owned = self._owned.get(principal)
        mask = None if owned is None else owned.get(fingerprint)
        if mask is None:
            raise MaskUnknown(fingerprint)
        self._use(principal, fingerprint)
        return mask

    def held_by(self, principal: str) -> tuple[int, int]:
        """Return how many masks a principal has registered, and their bytes."""
        return len(self._owned.get(principal, ())), self.memory.of(principal)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the invariant of the class holds."""
        owned = {(principal, key) for principal, masks in self._owned.items() for key in masks}
        assert owned == set(self._order)
        for principal, masks in self._owned.items():
            assert masks
            assert self.memory.of(principal) == sum(counted_bytes(mask) for mask in masks.values())
        assert self.memory.held.keys() == self._owned.keys()
        assert self.memory.num_free >= 0
        self.memory.check_integrity()

    def _limit(self, principal: str) -> int:
        quota = self._limits_of(principal).mask_bytes
        return self._max_bytes if quota is None else min(quota, self._max_bytes)

    def _keep(self, principal: str, mask: TokenMask) -> None:
        owned = self._owned.setdefault(principal, OrderedDict())
        if mask.fingerprint not in owned:
            owned[mask.fingerprint] = mask
            self._order[principal, mask.fingerprint] = None
            self.memory.take(principal, counted_bytes(mask))
        self._use(principal, mask.fingerprint)

    def _use(self, principal: str, fingerprint: bytes) -> None:
        self._owned[principal].move_to_end(fingerprint)
        self._order.move_to_end((principal, fingerprint))

    def _drop(self, principal: str, fingerprint: bytes) -> None:
        owned = self._owned[principal]
        self.memory.give_back(principal, counted_bytes(owned.pop(fingerprint)))
        del self._order[principal, fingerprint]
        if not owned:
            del self._owned[principal]
