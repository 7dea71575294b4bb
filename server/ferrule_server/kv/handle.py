"""The handle: a value that names the KV of the first ``length`` tokens of one sequence."""

from __future__ import annotations

import enum
import functools
import hashlib
from typing import NamedTuple


class Handle(NamedTuple):
    """The value that a client holds. Its meaning never changes. A named tuple: each decoded token makes two.

    Attributes:
        cache_id: ``<instance>.<epoch>.<128 random bits>``, url-safe; a secret, never logged.
        length: Number of tokens.
        lineage: 16 bytes over model and tokens (see ``kv/lineage.py``); never logged.
    """

    cache_id: str
    length: int
    lineage: bytes

    def __repr__(self) -> str:
        return f"Handle(handle_id={self.handle_id}, length={self.length})"

    @property
    def handle_id(self) -> str:
        """The loggable name of the sequence: see :func:`handle_id_of`."""
        return handle_id_of(self.cache_id)


@functools.lru_cache(maxsize=4096)  # each decoded token asks for them
def names_of(cache_id: str) -> tuple[str, str]:
    """Return the server that has a sequence, and the loggable name of the sequence."""
    return cache_id.partition(".")[0], handle_id_of(cache_id)


def handle_id_of(cache_id: str) -> str:
    """Return the first 16 hex digits of SHA-256 over ``cache_id``: safe in logs, metrics and lists."""
    return hashlib.sha256(cache_id.encode()).hexdigest()[:16]


class StalePolicy(enum.Enum):
    """What an append does if its handle is before the tip and other tokens are committed there."""

    FAIL = "fail"
    FORK = "fork"
    REWIND = "rewind"
