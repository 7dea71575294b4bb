"""Where the public classes say that they are from: the module that users import them from."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["publish"]

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

    Args:
        namespace: Their own module's.
        names: Their names.
        module: Where users find those that are neither of ``ferrule`` itself nor of ``ferrule.admin``.
    """
    for name in names:
        value = namespace[name]
        if isinstance(value, type) or callable(value):
            value.__module__ = "ferrule" if name in _TOP else "ferrule.admin" if name in _ADMIN else module
