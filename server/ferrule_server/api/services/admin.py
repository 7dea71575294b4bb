"""AdminService: warm up, drain, shut down and view the server.

``handlers.ROLES`` names the role that all its methods require. A caller without the role learns nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from ferrule.v1 import admin_pb2, admin_pb2_grpc
from ferrule_server.api.requests.fields import check_count, seconds
from ferrule_server.api.responses.view import Views
from ferrule_server.api.rpc.calls import Context, run_job
from ferrule_server.api.rpc.state import ServerState
from ferrule_server.api.security.principal import principal_of
from ferrule_server.engine.jobs import WarmupJob
from ferrule_server.errors import InvalidRequest

_MAX_BATCH_SIZES: Final = 64


WithGrace = Callable[[float | None], None]
"""Begins to drain, serving live handles for so many seconds (None: the configured grace), and returns at once."""


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """Controls and shows the server.

    Args:
        state: The server.
        views: Takes snapshots of the server.
        begin_drain: Refuses new prompts from now on; the process continues.
        ask_to_stop: Does so too, and then ends the process.
    """

    def __init__(self, state: ServerState, views: Views, begin_drain: WithGrace, ask_to_stop: WithGrace) -> None:
        self.state = state
        self._views = views
        self._begin_drain = begin_drain
        self._ask_to_stop = ask_to_stop

    async def Warmup(self, request: admin_pb2.WarmupRequest, context: Context) -> admin_pb2.WarmupResponse:
        """Run steps of real shapes so that the first request is not slow."""
        serving = self.state.use()
        batch_sizes = _batch_sizes(request.batch_sizes, serving.inputs.max_step_rows)
        result = await run_job(serving.engine, WarmupJob(principal_of(context), batch_sizes))
        return admin_pb2.WarmupResponse(
            batch_sizes=result.batch_sizes,
            steps=[
                admin_pb2.WarmupStep(num_sequences=step.num_seqs, num_rows=step.num_rows, run_ns=step.run_ns)
                for step in result.steps
            ],
        )

    async def Drain(self, request: admin_pb2.DrainRequest, context: Context) -> admin_pb2.DrainResponse:
        """Refuse new prompts and serve live handles until the grace is over; the process continues."""
        snapshot = self.state.describe().engine.snapshot()
        self._begin_drain(_grace(request))
        return admin_pb2.DrainResponse(
            live_sequences=self.state.num_sequences, pending_jobs=snapshot.num_running + snapshot.num_waiting
        )

    async def Shutdown(self, request: admin_pb2.ShutdownRequest, context: Context) -> admin_pb2.ShutdownResponse:
        """Drain, then end the process."""
        self.state.describe()
        self._ask_to_stop(_grace(request))
        return admin_pb2.ShutdownResponse(live_sequences=self.state.num_sequences)

    async def GetServerView(
        self, request: admin_pb2.GetServerViewRequest, context: Context
    ) -> admin_pb2.GetServerViewResponse:
        """Return the counters, the pool, the sequences and the principals at one moment between two steps."""
        return admin_pb2.GetServerViewResponse(view=await self._views.view(request))


def _grace(request: admin_pb2.DrainRequest | admin_pb2.ShutdownRequest) -> float | None:
    return seconds(request.grace, "grace") if request.HasField("grace") else None


def _batch_sizes(sizes: Sequence[int], max_batch_size: int) -> tuple[int, ...]:
    check_count("batch_sizes", len(sizes), _MAX_BATCH_SIZES)
    for index, size in enumerate(sizes):
        if not 1 <= size <= max_batch_size:
            raise InvalidRequest(f"batch_sizes[{index}]", f"{size} is outside [1, {max_batch_size}]")
    return tuple(sizes)
