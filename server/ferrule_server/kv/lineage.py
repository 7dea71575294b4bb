"""Lineage: 16 bytes that are equal exactly if model and tokens are equal.

BLAKE2b with 16-byte digests, chained over chunks of 16 tokens whatever the pool's block size is::

    link[0]     = H[root](root)
    link[i + 1] = H[full](link[i] + 16 tokens)
    at(length)  = link[n]                                   length == 16 * n
                = H[part](link[n] + the 1..15 tokens left)  otherwise

Tokens are hashed as little-endian uint32. The three kinds of hash differ in BLAKE2b's ``person`` parameter, so a
partial chunk never has the hash of a full one, and a root has the hash of neither.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from bisect import bisect_left
from collections.abc import Iterable
from itertools import takewhile

CHUNK_TOKENS = 16
"""Tokens per link. Part of the contract between servers; it never changes."""

LINEAGE_BYTES = 16
"""Size of a lineage."""

_IS_SWAPPED = sys.byteorder == "big"

# Empty hashes; a copy for each use costs less than half of a new one.
_ROOT = hashlib.blake2b(digest_size=LINEAGE_BYTES, person=b"ferrule.root")
_FULL = hashlib.blake2b(digest_size=LINEAGE_BYTES, person=b"ferrule.full")
_PART = hashlib.blake2b(digest_size=LINEAGE_BYTES, person=b"ferrule.part")


class LineageChain:
    """The tokens of one sequence and the links over their full chunks.

    Copies of the whole chain share tokens and links until one of them changes: a thousand new branches of a long prompt
    hold its tokens once.

    Invariant: there are ``len(token_ids) // 16 + 1`` links, and link i is the lineage of the first 16 * i tokens.

    Args:
        root: Identifies the model: weights, data types and all else that determines the KV.

    Attributes:
        token_ids: array("I"), index = position; read only (slices are copies). Keep no buffer of it: an array with an
            exported buffer cannot grow.
    """

    __slots__ = ("_is_shared", "_last_at", "_links", "token_ids")

    def __init__(self, root: bytes) -> None:
        self.token_ids: array[int] = array("I")
        self._links = [_digest(root, _ROOT)]
        self._is_shared = False
        # The last result of `at`: the tip of one append is the handle of the next.
        self._last_at = (0, self._links[0])

    def __len__(self) -> int:
        return len(self.token_ids)

    def extend(self, token_ids: Iterable[int]) -> None:
        """Append tokens, with one hash per chunk filled, so most single tokens need no hash.

        Raises:
            OverflowError: A token does not fit 32 bits; nothing changed.
        """
        added = array("I", token_ids)
        if self._is_shared:
            self._own()
        tokens = self.token_ids
        tokens.extend(added)
        while len(tokens) >= (stop := CHUNK_TOKENS * len(self._links)):
            self._links.append(self._link(stop - CHUNK_TOKENS, stop, _FULL))

    def at(self, length: int) -> bytes:
        """Return the lineage of the first ``length`` tokens with at most one hash.

        Raises:
            ValueError: The chain is shorter, or ``length`` is negative.
        """
        last_length, lineage = self._last_at
        if length == last_length:
            return lineage
        if not 0 <= length <= len(self.token_ids):  # inline: this runs twice for every token
            self._check_length(length)
        num_left = length % CHUNK_TOKENS
        lineage = self._link(length - num_left, length, _PART) if num_left else self._links[length // CHUNK_TOKENS]
        self._last_at = (length, lineage)
        return lineage

    def num_common(self, other: LineageChain) -> int:
        """Return how many of the first tokens are those of ``other`` too."""
        links, others = self._links, other._links
        chunks = range(1, min(len(links), len(others)))
        start = CHUNK_TOKENS * bisect_left(chunks, True, key=lambda index: links[index] != others[index])
        pairs = zip(
            self.token_ids[start : start + CHUNK_TOKENS], other.token_ids[start : start + CHUNK_TOKENS], strict=False
        )
        return start + sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    def truncate(self, length: int) -> None:
        """Keep the first ``length`` tokens.

        Raises:
            ValueError: The chain is shorter, or ``length`` is negative; nothing changed.
        """
        self._check_length(length)
        if self._is_shared:
            self._own()
        if self._last_at[0] > length:
            self._last_at = (0, self._links[0])
        del self.token_ids[length:]
        del self._links[length // CHUNK_TOKENS + 1 :]

    def copy(self, length: int) -> LineageChain:
        """Return an independent chain over the first ``length`` tokens, without hashing.

        Raises:
            ValueError: The chain is shorter, or ``length`` is negative.
        """
        self._check_length(length)
        twin = object.__new__(LineageChain)
        if length == len(self.token_ids):
            twin.token_ids, twin._links = self.token_ids, self._links
            twin._is_shared = self._is_shared = True
        else:
            twin.token_ids = self.token_ids[:length]
            twin._links = self._links[: length // CHUNK_TOKENS + 1]
            twin._is_shared = False
        twin._last_at = (0, self._links[0])
        return twin

    def check_integrity(self) -> None:
        """Raise AssertionError unless the invariant holds; computes every link after the first again."""
        fresh = LineageChain(b"")
        fresh._links, fresh._last_at = self._links[:1], (0, self._links[0])
        fresh.extend(self.token_ids)
        assert fresh._links == self._links, "links differ from those computed again"
        length, lineage = self._last_at
        assert fresh.at(length) == lineage, "the last lineage returned is not that of its length"

    def _own(self) -> None:
        """Copy shared tokens and links before they change."""
        self.token_ids, self._links = self.token_ids[:], self._links[:]
        self._is_shared = False

    def _check_length(self, length: int) -> None:
        if not 0 <= length <= len(self.token_ids):
            raise ValueError(f"length {length} is outside [0, {len(self.token_ids)}]")

    def _link(self, start: int, stop: int, kind: hashlib.blake2b) -> bytes:
        chunk = self.token_ids[start:stop]
        if _IS_SWAPPED:
            chunk.byteswap()
        return _digest(self._links[start // CHUNK_TOKENS] + chunk.tobytes(), kind)


def _digest(data: bytes, kind: hashlib.blake2b) -> bytes:
    hasher = kind.copy()
    hasher.update(data)
    return hasher.digest()
