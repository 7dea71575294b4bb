"""Appends of several caches in one frame, without the words that most tests do not need."""

from __future__ import annotations

from collections.abc import Sequence

from ferrule import Cache, Client, Policy, Stream
from ferrule.types import Append, Output, Tokens

__all__ = ["append_all", "append_by_stream"]


def append_all(
    stream: Stream, caches: Sequence[Cache], tokens: Sequence[Tokens], policy: Policy | None = None
) -> list[Output]:
    """Append to each cache its tokens, all in one frame of a stream."""
    return stream.run([Append(cache, one, policy) for cache, one in zip(caches, tokens, strict=True)])


def append_by_stream(
    client: Client, caches: Sequence[Cache], tokens: Sequence[Tokens], policy: Policy | None = None
) -> list[Output]:
    """Do the same on a stream that is opened for it."""
    with client.stream() as stream:
        return append_all(stream, caches, tokens, policy)
