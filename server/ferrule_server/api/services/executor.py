"""ModelExecutorService: each method reads a request, submits its jobs and writes their results."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Any, TypeVar

from ferrule.v1 import cache_pb2, executor_pb2, executor_pb2_grpc
from ferrule_server.api.requests.fields import lease, require
from ferrule_server.api.responses import describe, outputs
from ferrule_server.api.rpc.calls import Context, admit_new, run_job
from ferrule_server.api.rpc.refusals import Refusals
from ferrule_server.api.rpc.reply_limit import check_reply
from ferrule_server.api.rpc.state import ServerState, Serving
from ferrule_server.api.security.principal import caller_of, principal_of
from ferrule_server.api.streams.answer_stream import AnswerStream
from ferrule_server.api.streams.batches import Batch, Fill, Read
from ferrule_server.api.streams.decode_stream import DecodeStream
from ferrule_server.api.streams.replies import ForwardReplies, GenerateReplies
from ferrule_server.engine import host_calls
from ferrule_server.errors import FerruleError
from ferrule_server.text.drawn_text import BranchText, StopCut, StreamDecoder

_Response = TypeVar(
    "_Response", executor_pb2.PrefillResponse, executor_pb2.DecodeResponse, executor_pb2.ForwardVerifyResponse
)


class ModelExecutorServicer(executor_pb2_grpc.ModelExecutorServiceServicer):
    """Serves the model.

    Args:
        state: The server; its engine does the work.
    """

    def __init__(self, state: ServerState) -> None:
        self.state = state

    # ---- about the server -------------------------------------------------------------------------------------------

    async def GetModelInfo(
        self, request: executor_pb2.GetModelInfoRequest, context: Context
    ) -> executor_pb2.GetModelInfoResponse:
        """Describe the model."""
        return executor_pb2.GetModelInfoResponse(info=describe.model_info(self.state.describe()))

    async def GetCapabilities(
        self, request: executor_pb2.GetCapabilitiesRequest, context: Context
    ) -> executor_pb2.GetCapabilitiesResponse:
        """Describe the supported features and the limits."""
        serving, caller = self.state.describe(), caller_of(context)
        who = describe.caller_info(caller, self.state.limits_of(caller.principal))
        return executor_pb2.GetCapabilitiesResponse(capabilities=describe.capabilities(serving, self.state.limits, who))

    async def GetStatus(
        self, request: executor_pb2.GetStatusRequest, context: Context
    ) -> executor_pb2.GetStatusResponse:
        """Describe the state of the server, in every phase."""
        return executor_pb2.GetStatusResponse(
            status=describe.status(self.state, principal=describe.seen_by(caller_of(context)))
        )

    # ---- appends ----------------------------------------------------------------------------------------------------

    async def Prefill(self, request: executor_pb2.PrefillRequest, context: Context) -> executor_pb2.PrefillResponse:
        """Run a prompt into a new sequence, or more tokens into an existing one."""
        # A server that drains reads what it may answer: a prompt on a live handle, or one that was run before.
        may_be_known = request.input.HasField("kv_cache") or request.input.request_id
        serving = self.state.use() if may_be_known else self.state.use_for_new()
        response = executor_pb2.PrefillResponse()
        return await self._append(request, context, serving.inputs.prefill, outputs.fill_prefill, response)

    async def Decode(self, request: executor_pb2.DecodeRequest, context: Context) -> executor_pb2.DecodeResponse:
        """Append tokens to a sequence and return the row of the last token."""
        read, response = self.state.use().inputs.decode, executor_pb2.DecodeResponse()
        return await self._append(request, context, read, outputs.fill_append, response)

    async def ForwardVerify(
        self, request: executor_pb2.ForwardVerifyRequest, context: Context
    ) -> executor_pb2.ForwardVerifyResponse:
        """Check drafts against the model, and append the accepted ones."""
        read, response = self.state.use().inputs.verifies.read, executor_pb2.ForwardVerifyResponse()
        return await self._append(request, context, read, outputs.fill_verify, response)

    async def _append(self, request: Any, context: Context, read: Read, fill: Fill, response: _Response) -> _Response:
        """Run the append in ``input`` and return the response with its output."""
        serving = self.state.use()
        require(request, "input")
        planned = read(request.input, "input.", principal_of(context))
        admit_new(self.state, planned.job)
        check_reply(context, planned.reply_bytes, f"{planned.at}logits_policy")
        try:
            fill(response.output, await run_job(serving.engine, planned.job), planned)
        except FerruleError as error:
            raise planned.refusal(error) from None
        return response

    async def StreamDecode(  # type: ignore[override]  # writes its replies itself
        self,
        request_iterator: AsyncGenerator[executor_pb2.StreamDecodeRequest],  # type: ignore[override]
        context: Context,
    ) -> None:
        """Decode many sequences over one stream."""
        await DecodeStream(self.state, request_iterator, context).run()

    # ---- batches ----------------------------------------------------------------------------------------------------

    async def BatchPrefill(
        self, request: executor_pb2.BatchPrefillRequest, context: Context
    ) -> executor_pb2.BatchPrefillResponse:
        """Run several prompts."""
        serving = self.state.use()
        serving.inputs.check_batch(len(request.inputs), "inputs")
        batch = Batch(
            "BatchPrefill", "inputs", request.inputs, serving.inputs.prefill, outputs.fill_prefill, is_cohort=False
        )
        return await batch.run(self.state, serving, context, executor_pb2.BatchPrefillResponse())

    async def BatchDecode(
        self, request: executor_pb2.BatchDecodeRequest, context: Context
    ) -> executor_pb2.BatchDecodeResponse:
        """Append to several sequences."""
        serving = self.state.use()
        serving.inputs.check_batch(len(request.inputs), "inputs")
        batch = Batch("BatchDecode", "inputs", request.inputs, serving.inputs.decode, outputs.fill_append)
        return await batch.run(self.state, serving, context, executor_pb2.BatchDecodeResponse())

    async def UnifiedDecode(
        self, request: executor_pb2.UnifiedDecodeRequest, context: Context
    ) -> executor_pb2.UnifiedDecodeResponse:
        """Run the items that the client has scheduled, in one step."""
        serving = self.state.use()
        require(request, "batch")
        serving.inputs.check_unified(request.batch)
        batch = Batch("UnifiedDecode", "batch.items", request.batch.items, serving.inputs.unified, outputs.fill_prefill)
        return await batch.run(self.state, serving, context, executor_pb2.UnifiedDecodeResponse())

    # ---- answers piece by piece -------------------------------------------------------------------------------------

    async def Forward(  # type: ignore[override]  # as above
        self, request: executor_pb2.ForwardRequest, context: Context
    ) -> None:
        """Run tokens without keeping a cache."""
        serving, principal = self.state.use_for_new(), principal_of(context)
        job, plan = serving.inputs.streams.forward(request, principal)
        check_reply(context, plan.row_bytes, "logits_policy")
        replies = ForwardReplies(plan, request.request_id, Refusals("Forward", principal))
        await AnswerStream("Forward", self.state, serving.engine, context, job=job, replies=replies).run()

    async def Generate(  # type: ignore[override]  # as above
        self, request: executor_pb2.GenerateRequest, context: Context
    ) -> None:
        """Run the decode loop."""
        serving, principal = self.state.use(), principal_of(context)
        job, plan = serving.inputs.streams.generate(request, principal)
        check_reply(context, plan.row_bytes, "logits_policy")
        admit_new(self.state, job)
        replies = GenerateReplies(
            plan,
            request.request_id,
            self.state.limits.max_stream_frame_bytes,
            Refusals("Generate", principal),
            _new_text(serving, request, job.token_ids),
        )
        await AnswerStream("Generate", self.state, serving.engine, context, job=job, replies=replies).run()

    # ---- caches -----------------------------------------------------------------------------------------------------

    async def ForkCache(self, request: cache_pb2.ForkCacheRequest, context: Context) -> cache_pb2.ForkCacheResponse:
        """Branch a sequence."""
        serving = self.state.use()
        result = await run_job(serving.engine, serving.inputs.caches.fork(request, principal_of(context)))
        return outputs.fork_response(result)

    async def TruncateKv(self, request: cache_pb2.TruncateKvRequest, context: Context) -> cache_pb2.TruncateKvResponse:
        """Shorten a sequence."""
        serving = self.state.use()
        result = await run_job(serving.engine, serving.inputs.caches.truncate(request, principal_of(context)))
        return cache_pb2.TruncateKvResponse(
            kv_cache=outputs.handle_message(result.handle), freed_blocks=result.freed_blocks
        )

    async def ReserveKvSlots(
        self, request: cache_pb2.ReserveKvSlotsRequest, context: Context
    ) -> cache_pb2.ReserveKvSlotsResponse:
        """Reserve KV slots for sequences."""
        serving = self.state.use()
        result = await run_job(serving.engine, serving.inputs.caches.reserve(request, principal_of(context)))
        info = serving.engine.info
        reservation = outputs.slot_reservation(result, info.block_size, info.num_blocks - 1)
        return cache_pb2.ReserveKvSlotsResponse(reservation=reservation)

    async def ReleaseCache(
        self, request: cache_pb2.ReleaseCacheRequest, context: Context
    ) -> cache_pb2.ReleaseCacheResponse:
        """End sequences."""
        serving = self.state.use()
        handles = serving.inputs.caches.named(request.kv_caches, "kv_caches")
        freed = await run_job(serving.engine, host_calls.release(principal_of(context), handles))
        return cache_pb2.ReleaseCacheResponse(
            results=outputs.release_results(handles, freed), freed_blocks=sum(num_blocks or 0 for num_blocks in freed)
        )

    async def KeepAlive(self, request: cache_pb2.KeepAliveRequest, context: Context) -> cache_pb2.KeepAliveResponse:
        """Renew leases."""
        serving = self.state.use()
        ttl_s = lease(request.ttl, "ttl")
        handles = serving.inputs.caches.named(request.kv_caches, "kv_caches")
        leases = await run_job(serving.engine, host_calls.keep_alive(principal_of(context), handles, ttl_s))
        return await outputs.keep_alive_response(leases)

    async def GetCacheInfo(
        self, request: cache_pb2.GetCacheInfoRequest, context: Context
    ) -> cache_pb2.GetCacheInfoResponse:
        """Describe one sequence."""
        serving = self.state.use()
        result = await run_job(serving.engine, serving.inputs.caches.cache_info(request, principal_of(context)))
        return cache_pb2.GetCacheInfoResponse(info=outputs.cache_info(result, with_blocks=request.include_blocks))

    async def ListCaches(self, request: cache_pb2.ListCachesRequest, context: Context) -> cache_pb2.ListCachesResponse:
        """List the caller's sequences."""
        serving = self.state.use()
        result = await run_job(serving.engine, serving.inputs.caches.list_caches(request, principal_of(context)))
        return await outputs.list_response(result)

    async def GetCacheMetrics(
        self, request: cache_pb2.GetCacheMetricsRequest, context: Context
    ) -> cache_pb2.GetCacheMetricsResponse:
        """Return the counters of the KV pool."""
        principal = describe.seen_by(caller_of(context))
        return cache_pb2.GetCacheMetricsResponse(metrics=describe.own_cache_metrics(self.state.describe(), principal))

    async def RegisterTokenMask(
        self, request: cache_pb2.RegisterTokenMaskRequest, context: Context
    ) -> cache_pb2.RegisterTokenMaskResponse:
        """Register token masks."""
        serving, principal = self.state.use(), principal_of(context)
        fingerprints, masks = serving.inputs.register_masks(request, principal)
        if serving.engine.is_durable:
            await run_job(serving.engine, host_calls.keep_masks(principal, masks))
        return cache_pb2.RegisterTokenMaskResponse(fingerprints=fingerprints)


def _new_text(
    serving: Serving, request: executor_pb2.GenerateRequest, token_ids: tuple[int, ...]
) -> Callable[[], BranchText] | None:
    """Return the function that makes the text of a branch; None if the request asks for no text."""
    tokenizer = serving.inputs.tokenizer
    if not request.return_text or tokenizer is None:
        return None
    cut = StopCut(request.stop_strings) if request.stop_strings and not request.include_stop_text else None
    return lambda: BranchText(StreamDecoder(tokenizer, request.skip_special_tokens, token_ids), cut)
