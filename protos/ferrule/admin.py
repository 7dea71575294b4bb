"""Calls for operators, ``client.admin``, and what they return."""

from ferrule_client.aio.admin import AsyncAdmin
from ferrule_client.sync.admin import Admin
from ferrule_client.types import CacheMetrics, Caller, Drained, MemoryUsage, Quotas, Warmed, WarmStep
from ferrule_client.views import BlockMap, Histogram, PrincipalView, SequenceView, ServerView

__all__ = [
    "Admin",
    "AsyncAdmin",
    "BlockMap",
    "CacheMetrics",
    "Caller",
    "Drained",
    "Histogram",
    "MemoryUsage",
    "PrincipalView",
    "Quotas",
    "SequenceView",
    "ServerView",
    "WarmStep",
    "Warmed",
]
