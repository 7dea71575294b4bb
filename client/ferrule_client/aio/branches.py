"""Several caches that belong together, such as the branches of a fork."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, overload

from ferrule_client._public import publish
from ferrule_client.aio._calls import release_all
from ferrule_client.aio._connection import Connection
from ferrule_client.errors import FerruleError

if TYPE_CHECKING:
    from ferrule_client.aio.cache import AsyncCache

__all__ = ["AsyncBranches"]

_log = logging.getLogger(__name__)

_EXIT_S = 5.0


class AsyncBranches(Sequence["AsyncCache"]):
    """A sequence of caches that are released together when ``async with`` is left, except those that were there before.

    Made by ``AsyncCache.fork(n)``; by ``AsyncStream.branch``, where parents are among them; and ``caches`` of a
    generation is one, where the cache that it began on is the first::

        async with cache.fork(3) as branches:
            for branch in branches: ...
            best = await branches.keep(branches[1])      # releases the others; this one is yours

    Args:
        connection: Where to release them.
        caches: The caches.
        foreign: Caches among them that are released elsewhere.
    """

    def __init__(
        self, connection: Connection, caches: Iterable[AsyncCache], *, foreign: Iterable[AsyncCache] = ()
    ) -> None:
        self._connection = connection
        self._caches = tuple(caches)
        self._kept = set(map(id, foreign))

    async def __aenter__(self) -> AsyncBranches:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        try:
            await release_all(self._connection, self._losers(), _EXIT_S)
        except FerruleError as failure:  # the leases end them; the body's own error must stay visible
            _log.debug("release failed branches=%d reason=%s", len(self), failure.reason)

    def __repr__(self) -> str:
        return f"AsyncBranches({list(self._caches)})"

    def __len__(self) -> int:
        return len(self._caches)

    def __iter__(self) -> Iterator[AsyncCache]:
        return iter(self._caches)

    @overload
    def __getitem__(self, index: int) -> AsyncCache: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[AsyncCache]: ...

    def __getitem__(self, index: int | slice) -> AsyncCache | Sequence[AsyncCache]:
        return self._caches[index]

    async def keep(self, cache: AsyncCache) -> AsyncCache:
        """Release all branches but one and return that one; leaving ``async with`` does not release it.

        Args:
            cache: One of the branches.

        Raises:
            ValueError: It is not one of them, or released.
            FerruleError: The server was not reached; the leases will end the others.

        Example:
            ``winner = await branches.keep(branches[2])``
        """
        if all(one is not cache for one in self._caches):
            raise ValueError("this cache is not one of these branches")
        if cache.is_released:
            raise ValueError("this cache is released")
        self._kept.add(id(cache))
        await release_all(self._connection, self._losers())
        return cache

    def _losers(self) -> list[AsyncCache]:
        return [one for one in self._caches if not one.is_released and id(one) not in self._kept]


publish(globals(), ("AsyncBranches",))
