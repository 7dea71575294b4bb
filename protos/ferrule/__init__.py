"""Ferrule: explicit handles to the KV cache of a language model that runs on a server.

    from ferrule import Client, greedy

    with Client("127.0.0.1:50051") as client, client.prefill("def area(", policy=greedy()) as cache:
        for _ in range(20):
            print(cache.step().token)

* ``Client``, ``AsyncClient``: a connection; makes caches, generations, chats and streams.
* ``Cache``: one sequence on the server; ``Handle`` is the value at its tip, ``Branches`` what a fork returns.
* ``Stream``: many caches decoded together, one frame per step.
* ``Chat``: a conversation by the model's chat template.
* ``greedy``, ``sample``, ``logits``, ``Policy``: what to return for each row.
* ``FerruleError``, ``HandleNotFoundError``: the root of all errors, and the one that means: prefill again.

Everything else is in ``ferrule.types``, ``ferrule.errors`` and ``ferrule.admin``. The messages of the contract are in
``ferrule.v1``, which loads nothing of the client.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ferrule_client.aio.client import AsyncClient
    from ferrule_client.errors import FerruleError, HandleNotFoundError
    from ferrule_client.policy import Policy, greedy, logits, sample
    from ferrule_client.sync.branches import Branches
    from ferrule_client.sync.cache import Cache
    from ferrule_client.sync.chat import Chat
    from ferrule_client.sync.client import Client
    from ferrule_client.sync.stream import Stream
    from ferrule_client.types import Handle

__all__ = [
    "AsyncClient",
    "Branches",
    "Cache",
    "Chat",
    "Client",
    "FerruleError",
    "Handle",
    "HandleNotFoundError",
    "Policy",
    "Stream",
    "greedy",
    "logits",
    "sample",
]

__version__ = "0.1.0"

_MODULES = {
    "AsyncClient": "aio.client",
    "Branches": "sync.branches",
    "Cache": "sync.cache",
    "Chat": "sync.chat",
    "Client": "sync.client",
    "FerruleError": "errors",
    "Handle": "types",
    "HandleNotFoundError": "errors",
    "Policy": "policy",
    "Stream": "sync.stream",
    "greedy": "policy",
    "logits": "policy",
    "sample": "policy",
}


def __getattr__(name: str) -> Any:
    """Import a name of the client at its first use (PEP 562), so that ``ferrule.v1`` alone loads nothing of it."""
    if name not in _MODULES:
        raise AttributeError(f"module 'ferrule' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"ferrule_client.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
