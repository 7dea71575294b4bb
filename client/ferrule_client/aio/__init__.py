"""The Ferrule client for asyncio: the classes and methods of the sync one, to be awaited.

Begin with ``AsyncClient.connect``::

    from ferrule_client import greedy
    from ferrule_client.aio import AsyncClient

    async with AsyncClient.connect("127.0.0.1:50051") as client, client.prefill([1, 2, 3], policy=greedy()) as cache:
        output = await cache.decode(cache.last.token, policy=greedy())

Policies, errors and all values are those of ``ferrule_client``. Many tasks may use one client, each with caches of its
own; a client belongs to the event loop it was connected in. Cancelling a task is safe at any point: an append that was
under way is in doubt, as after a timeout, and the next call on the cache sees to it.

How the twins stay equal: what needs no network is shared outright; the classes here are written by
``client/generate_aio.py`` from the sync ones, so every rule, text and fix exists once; only ``_wire``,
``_stream_call`` and ``_lease``, the ends that touch network and clock, are written by hand. Weighed and left: a common
base class with two ends (every public method with its docstring would still be there twice) and an asyncio core that
the sync client drives (a loop and a thread under every plain script).
"""

from __future__ import annotations

from ferrule_client.aio.admin import AsyncAdmin
from ferrule_client.aio.cache import AsyncCache
from ferrule_client.aio.client import AsyncClient
from ferrule_client.aio.detokenizer import AsyncDetokenizer
from ferrule_client.aio.forward import AsyncForwardPass
from ferrule_client.aio.generation import AsyncBranch, AsyncGeneration, AsyncTextGeneration
from ferrule_client.aio.stream import AsyncStream

__all__ = [
    "AsyncAdmin",
    "AsyncBranch",
    "AsyncCache",
    "AsyncClient",
    "AsyncDetokenizer",
    "AsyncForwardPass",
    "AsyncGeneration",
    "AsyncStream",
    "AsyncTextGeneration",
]
