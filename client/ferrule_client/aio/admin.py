"""Calls for operators: health, counters, warm-up, drain, shutdown."""

from __future__ import annotations

from collections.abc import Sequence

from ferrule.v1 import admin_pb2, cache_pb2
from ferrule_client import _check, _convert
from ferrule_client._public import publish
from ferrule_client._timeouts import USE_DEFAULT, Timeout
from ferrule_client.aio._connection import Connection
from ferrule_client.types import CacheMetrics, Drained, Warmed
from ferrule_client.views import ServerView

__all__ = ["AsyncAdmin"]


class AsyncAdmin:
    """Calls for operators; ``client.admin``.

    All but ``health`` and ``cache_metrics`` need the role admin. Without the role they raise ``AuthError``, on a server
    without the service ``UnsupportedError``; all raise a ``FerruleError`` if they fail otherwise.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def health(self, service: str = "", *, timeout: Timeout = USE_DEFAULT) -> bool:
        """Return True if the server serves, by the standard gRPC health service.

        Args:
            service: Full name of a service, or empty for the server as a whole.
            timeout: Seconds this may take, retries included.

        Raises:
            UnavailableError: No server answers.
        """
        from grpc_health.v1 import health_pb2, health_pb2_grpc

        stub = health_pb2_grpc.HealthStub(self._connection.wire.channel)
        request = health_pb2.HealthCheckRequest(service=service)
        reply = await self._connection.unary(stub.Check, request, timeout=timeout)
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

    async def cache_metrics(self, *, timeout: Timeout = USE_DEFAULT) -> CacheMetrics:
        """Return the counters of the server's KV pool: for the caller's own sequences, with the role admin for all.

        Example:
            ``hits = (await client.admin.cache_metrics()).num_prefix_hit_tokens``
        """
        request = cache_pb2.GetCacheMetricsRequest()
        reply = await self._connection.unary(self._connection.executor.GetCacheMetrics, request, timeout=timeout)
        return _convert.value(CacheMetrics, reply.metrics)

    async def warmup(self, batch_sizes: Sequence[int] = (), *, timeout: Timeout = USE_DEFAULT) -> Warmed:
        """Run steps of the usual shapes on no sequence's memory, so that the first request is not slow.

        Returns once they are ready: on a GPU, kernels that are still being compiled are waited for, so give it a
        longer ``timeout`` than other calls, or None.

        Args:
            batch_sizes: Batch sizes to prepare for. Empty: those that the executor chooses.
            timeout: Seconds this may take, retries included.

        Raises:
            ValueError: A batch size is below 1.

        Example:
            ``client.admin.warmup([1, 8, 32])``
        """
        for size in batch_sizes:
            _check.whole("a batch size", size, 1, 2**32 - 1)
        request = admin_pb2.WarmupRequest(batch_sizes=batch_sizes)
        reply = await self._connection.unary(self._connection.admin.Warmup, request, timeout=timeout)
        return _convert.value(Warmed, reply)

    async def drain(self, grace: float | None = None, *, timeout: Timeout = USE_DEFAULT) -> Drained:
        """Let the server refuse new prompts and serve live handles, until its grace ends; the process stays.

        Args:
            grace: Seconds that live sequences may still be used. None: the server's setting.
            timeout: Seconds this may take, retries included.

        Raises:
            ValueError: ``grace`` is negative.
        """
        request = admin_pb2.DrainRequest(grace=_convert.duration(grace))
        reply = await self._connection.unary(self._connection.admin.Drain, request, timeout=timeout)
        return Drained(reply.live_sequences, reply.pending_jobs)

    async def shutdown(self, grace: float | None = None, *, timeout: Timeout = USE_DEFAULT) -> Drained:
        """Drain the server, then end its process; the answer comes before.

        Args:
            grace: Seconds that running requests and streams may still take. None: the server's setting; 0: end now.
            timeout: Seconds this may take, retries included.

        Returns:
            The sequences that will be lost; the number of jobs is not told and 0.

        Raises:
            ValueError: ``grace`` is negative.
        """
        request = admin_pb2.ShutdownRequest(grace=_convert.duration(grace))
        reply = await self._connection.unary(self._connection.admin.Shutdown, request, timeout=timeout)
        return Drained(reply.live_sequences, 0)

    async def server_view(
        self,
        *,
        max_cells: int | None = None,
        max_sequences: int | None = None,
        max_principals: int | None = None,
        timeout: Timeout = USE_DEFAULT,
    ) -> ServerView:
        """Return the server at one moment: counters, the block pool as a picture, sequences and principals.

        It is cheap, and shared by everybody who asks within a tenth of a second.

        Args:
            max_cells: Most cells in the picture of the pool. None: the server's choice; 0: no picture.
            max_sequences: Most sequences listed. None: the server's choice.
            max_principals: Most principals listed. None: the server's choice.
            timeout: Seconds this may take, retries included.

        Returns:
            What is there; of lists as much as was asked for, or as the server gives at most.

        Raises:
            StartingError: The model is not loaded yet.
            ValueError: A bound is negative.

        Example:
            ``client.admin.server_view(max_cells=0)``
        """
        bounds = {"max_cells": max_cells, "max_sequences": max_sequences, "max_principals": max_principals}
        for name, bound in bounds.items():
            _check.whole(name, bound, 0, 2**32 - 1)
        request = admin_pb2.GetServerViewRequest(**bounds)
        reply = await self._connection.unary(self._connection.admin.GetServerView, request, timeout=timeout)
        return _convert.server_view_from_message(reply.view)


publish(globals(), ("AsyncAdmin",))
