"""ModelExecutorService: each method reads a request, runs one job and writes the reply."""

from __future__ import annotations

from ferrule.v1 import cache_pb2, executor_pb2, executor_pb2_grpc
from ferrule_server.api.calls import Context, not_served, refuse, run_job, unary
from ferrule_server.api.describe import caller_info, capabilities, model_info, status
from ferrule_server.api.inputs import PlannedAppend, placed, require
from ferrule_server.api.outputs import (
    cache_info,
    fill_append,
    fork_response,
    handle_message,
    keep_alive_response,
    list_response,
    prefill_output,
    release_results,
    slot_reservation,
)
from ferrule_server.api.principal import caller_of, principal_of
from ferrule_server.api.state import Phase, ServerState, Serving
from ferrule_server.api.stream import DecodeStream
from ferrule_server.engine.jobs import (
    AppendResult,
    CacheInfo,
    ForkResult,
    KeepAliveResult,
    ListResult,
    ReleaseResult,
    TruncateResult,
)
from ferrule_server.errors import FerruleError, InvalidRequest
from ferrule_server.kv.reserved_slots import SlotReservation


class ModelExecutorServicer(executor_pb2_grpc.ModelExecutorServiceServicer):
    """Serves the model.

    Args:
        state: The server; its engine does the work.
    """

    def __init__(self, state: ServerState) -> None:
        self.state = state

    # ---- about the server -------------------------------------------------------------------------------------------

    @unary
    async def GetModelInfo(
        self, request: executor_pb2.GetModelInfoRequest, context: Context
    ) -> executor_pb2.GetModelInfoResponse:
        """Describe the model."""
        return executor_pb2.GetModelInfoResponse(info=model_info(self.state.use()))

    @unary
    async def GetCapabilities(
        self, request: executor_pb2.GetCapabilitiesRequest, context: Context
    ) -> executor_pb2.GetCapabilitiesResponse:
        """Describe what is served, and the limits."""
        serving, caller = self.state.use(), caller_of(context)
        who = caller_info(caller, self.state.limits_of(caller.principal))
        return executor_pb2.GetCapabilitiesResponse(capabilities=capabilities(serving, self.state.limits, who))

    @unary
    async def GetStatus(
        self, request: executor_pb2.GetStatusRequest, context: Context
    ) -> executor_pb2.GetStatusResponse:
        """Tell how the server is doing, in every phase."""
        return executor_pb2.GetStatusResponse(status=status(self.state))

    # ---- appends ----------------------------------------------------------------------------------------------------

    @unary
    async def Prefill(self, request: executor_pb2.PrefillRequest, context: Context) -> executor_pb2.PrefillResponse:
        """Run a prompt into a new sequence, or more tokens into an existing one."""
        is_new, request_id = not request.input.HasField("kv_cache"), request.input.request_id
        # While the server drains, a prompt that was run before is still answered; the engine knows which were.
        serving = self.state.use_for_new() if is_new and not request_id else self.state.use()
        planned = serving.inputs.prefill(request, principal_of(context))
        planned.job.is_repeat_only = is_new and self.state.phase is Phase.DRAINING
        result = await _append(serving, planned)
        output = prefill_output(result, planned.plan, request_id)
        return executor_pb2.PrefillResponse(output=output)

    @unary
    async def Decode(self, request: executor_pb2.DecodeRequest, context: Context) -> executor_pb2.DecodeResponse:
        """Append tokens to a sequence and return the row of the last one."""
        serving = self.state.use()
        require(request, "input")
        planned = serving.inputs.decode(request.input, "input.", principal_of(context))
        result = await _append(serving, planned)
        response = executor_pb2.DecodeResponse()
        fill_append(response.output, result, planned.plan, request.input.request_id)
        return response

    # A coroutine that reads and writes the context itself.
    async def StreamDecode(  # type: ignore[override]
        self, request_iterator: object, context: Context
    ) -> None:
        """Decode many sequences over one stream."""
        try:
            serving = self.state.use()
        except FerruleError as error:
            await refuse(context, "StreamDecode", error)
        await DecodeStream(self.state, serving, context).run()

    # ---- caches -----------------------------------------------------------------------------------------------------

    @unary
    async def ForkCache(self, request: cache_pb2.ForkCacheRequest, context: Context) -> cache_pb2.ForkCacheResponse:
        """Branch a sequence."""
        serving = self.state.use()
        result = await run_job(serving.engine, serving.inputs.fork(request, principal_of(context)))
        assert isinstance(result, ForkResult)
        return fork_response(result)

    @unary
    async def TruncateKv(self, request: cache_pb2.TruncateKvRequest, context: Context) -> cache_pb2.TruncateKvResponse:
        """Shorten a sequence."""
        serving = self.state.use()
        result = await run_job(serving.engine, serving.inputs.truncate(request, principal_of(context)))
        assert isinstance(result, TruncateResult)
        return cache_pb2.TruncateKvResponse(kv_cache=handle_message(result.handle), freed_blocks=result.freed_blocks)

    @unary
    async def ReserveKvSlots(
        self, request: cache_pb2.ReserveKvSlotsRequest, context: Context
    ) -> cache_pb2.ReserveKvSlotsResponse:
        """Reserve room for sequences."""
        serving = self.state.use()
        result = await run_job(serving.engine, serving.inputs.reserve(request, principal_of(context)))
        assert isinstance(result, SlotReservation)
        info = serving.engine.info
        reservation = slot_reservation(result, info.block_size, info.num_blocks - 1)
        return cache_pb2.ReserveKvSlotsResponse(reservation=reservation)

    @unary
    async def ReleaseCache(
        self, request: cache_pb2.ReleaseCacheRequest, context: Context
    ) -> cache_pb2.ReleaseCacheResponse:
        """End sequences."""
        serving = self.state.use()
        job = serving.inputs.release(request.kv_caches, "kv_caches", principal_of(context))
        result = await run_job(serving.engine, job)
        assert isinstance(result, ReleaseResult)
        freed_blocks = sum(freed or 0 for freed in result.freed_blocks)
        return cache_pb2.ReleaseCacheResponse(results=release_results(job, result), freed_blocks=freed_blocks)

    @unary
    async def KeepAlive(self, request: cache_pb2.KeepAliveRequest, context: Context) -> cache_pb2.KeepAliveResponse:
        """Renew leases."""
        serving = self.state.use()
        job = serving.inputs.keep_alive(request, principal_of(context))
        result = await run_job(serving.engine, job)
        assert isinstance(result, KeepAliveResult)
        return await keep_alive_response(job, result)

    @unary
    async def GetCacheInfo(
        self, request: cache_pb2.GetCacheInfoRequest, context: Context
    ) -> cache_pb2.GetCacheInfoResponse:
        """Describe one sequence."""
        serving = self.state.use()
        result = await run_job(serving.engine, serving.inputs.cache_info(request, principal_of(context)))
        assert isinstance(result, CacheInfo)
        block_size = serving.engine.info.block_size
        return cache_pb2.GetCacheInfoResponse(info=cache_info(result, block_size, with_blocks=request.include_blocks))

    @unary
    async def ListCaches(self, request: cache_pb2.ListCachesRequest, context: Context) -> cache_pb2.ListCachesResponse:
        """List the caller's sequences."""
        serving = self.state.use()
        result = await run_job(serving.engine, serving.inputs.list_caches(request, principal_of(context)))
        assert isinstance(result, ListResult)
        return await list_response(result)

    # ---- in the contract, not served yet ----------------------------------------------------------------------------

    BatchPrefill = not_served("BatchPrefill")
    BatchDecode = not_served("BatchDecode")
    UnifiedDecode = not_served("UnifiedDecode")
    ForwardVerify = not_served("ForwardVerify")
    Forward = not_served("Forward")
    Generate = not_served("Generate")
    RegisterTokenMask = not_served("RegisterTokenMask")
    GetCacheMetrics = not_served("GetCacheMetrics")


async def _append(serving: Serving, planned: PlannedAppend) -> AppendResult:
    try:
        result = await run_job(serving.engine, planned.job)
    except InvalidRequest as error:
        raise placed(error, planned.at) from None
    assert isinstance(result, AppendResult)
    return result
