"""Where the public classes say that they are from: the module that users import them from."""

from __future__ import annotations

from collections.abc import Iterable
from types import FunctionType

_TOP = frozenset(
    {
        *("AsyncClient", "Branches", "Cache", "Chat", "Client", "FerruleError", "Handle", "HandleNotFoundError"),
        *("Policy", "Stream", "greedy", "logits", "sample"),
    }
)
"""Names of ``ferrule`` itself."""
_ADMIN = frozenset(
    {
        *("Admin", "AsyncAdmin", "BlockMap", "CacheMetrics", "Caller", "Drained", "Histogram", "MemoryUsage"),
        *("PrincipalView", "Quotas", "SequenceView", "ServerView", "WarmStep", "Warmed"),
    }
)
"""Names of ``ferrule.admin``."""


def publish(namespace: dict[str, object], names: Iterable[str], module: str = "ferrule.types") -> None:
    """Set the module of public classes and functions, as tracebacks, pickles and documentation show it.

    Those that are neither of ``ferrule`` itself nor of ``ferrule.admin`` are found in ``module``.
    """
    for name in names:
        value = namespace[name]
        if isinstance(value, (type, FunctionType)):
            value.__module__ = "ferrule" if name in _TOP else "ferrule.admin" if name in _ADMIN else module
