"""The requests themselves, on the bare stubs: a prompt and the tokens behind it, by either of two ways."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING

import grpc
from google.protobuf.duration_pb2 import Duration

from benchmarks.load.loops import Refused, Work
from benchmarks.load.records import Record
from ferrule.v1 import cache_pb2, executor_pb2_grpc, policy_pb2, types_pb2
from ferrule.v1 import executor_pb2 as pb
from ferrule_client._route import INSTANCE_KEY
from ferrule_client._status import error_from_call, error_from_status
from ferrule_client.errors import FerruleError

MODES = ("stream", "generate")
"""``stream``: the client's own loop, a frame per token; ``generate``: the server's loop."""

_GREEDY = policy_pb2.LogitsReturnPolicy(greedy_argmax=policy_pb2.GreedyArgmax())
_CACHE = pb.CacheOptions(ttl=Duration(seconds=60))
_OPTIONS = (("grpc.use_local_subchannel_pool", 1),)
_TIMEOUT_S = 60.0
_NO_ROOM = ("KV_BLOCKS_EXHAUSTED", "DRAINING", "STARTING")
"""Reasons for which a server takes no more, besides all of RESOURCE_EXHAUSTED; one that is not there is an error."""

if TYPE_CHECKING:
    _Stub = executor_pb2_grpc.ModelExecutorServiceAsyncStub
_Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Model:
    """What prompts must keep to."""

    vocab_size: int
    max_context: int


class Target:
    """Connections to one server, to several in turn, or to a proxy. Enter it to open them.

    Args:
        addresses: Of servers; users are spread over them.
        num_connections: In all; calls share them.
    """

    def __init__(self, addresses: list[str], num_connections: int) -> None:
        self._addresses = [address for address, _ in zip(cycle(addresses), range(num_connections), strict=False)]
        self._stubs: list[_Stub] = []
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Target:
        for address in self._addresses:
            channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
            await self._stack.enter_async_context(channel)
            self._stubs.append(executor_pb2_grpc.ModelExecutorServiceStub(channel))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def model(self) -> Model:
        """Return what is served; every connection is made by that."""
        for stub in self._stubs:
            reply = await stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=_TIMEOUT_S, wait_for_ready=True)
        return Model(reply.info.vocab_size, reply.info.max_sequence_length)

    def work(self, mode: str, num_tokens: int, vocab_size: int, seed: str) -> Work:
        """Return what makes a request: a prompt of its own, then ``num_tokens`` tokens; the sequence is released."""
        draw_all = {"stream": _by_stream, "generate": _by_generate}[mode]

        async def work(number: int, record: Record) -> None:
            draw = random.Random(f"{seed}-{number}")
            prompt = draw.choices(range(vocab_size), k=record.prompt_length)
            stub = self._stubs[number % len(self._stubs)]
            try:
                await draw_all(stub, prompt, num_tokens, record)
            except grpc.aio.AioRpcError as error:
                raise _refused(error_from_call(error)) from error
            except FerruleError as error:
                raise _refused(error) from error

        return work


def _refused(error: FerruleError) -> Refused:
    has_no_room = error.code == grpc.StatusCode.RESOURCE_EXHAUSTED or error.reason in _NO_ROOM
    return Refused(error.reason, is_rejected=has_no_room)


def _owner(handle: types_pb2.KvCacheHandle) -> _Metadata:
    """Return the metadata by which a proxy finds the server that has a sequence."""
    return ((INSTANCE_KEY, handle.instance),)


async def _by_stream(stub: _Stub, prompt: list[int], num_tokens: int, record: Record) -> None:
    """Prefill, which gives the first token, then a frame per token on a stream of its own."""
    message = pb.PrefillInput(input_ids=prompt, logits_policy=_GREEDY, cache=_CACHE)
    prefilled = (await stub.Prefill(pb.PrefillRequest(input=message), timeout=_TIMEOUT_S)).output
    _note(record, 1)
    handle, token = prefilled.kv_cache, prefilled.outputs.tokens[0]
    async with _released(stub, handle):
        call = stub.StreamDecode(metadata=_owner(handle), timeout=_TIMEOUT_S)
        for _ in range(num_tokens - 1):
            step = pb.DecodeInput(input_ids=[token], kv_cache=handle, logits_policy=_GREEDY)
            await call.write(pb.StreamDecodeRequest(items=[pb.StreamItem(decode=step)]))
            reply = await call.read()
            if not isinstance(reply, pb.StreamDecodeResponse):
                raise Refused("STREAM_ENDED", is_rejected=False)
            result = reply.results[0]
            if result.HasField("error"):
                raise error_from_status(result.error)
            _note(record, 1)
            handle, token = result.decode.kv_cache, result.decode.outputs.tokens[0]
        await call.done_writing()


async def _by_generate(stub: _Stub, prompt: list[int], num_tokens: int, record: Record) -> None:
    """One call in which the server draws all tokens."""
    request = pb.GenerateRequest(
        input_ids=prompt, logits_policy=_GREEDY, max_tokens=num_tokens, ignore_eos=True, cache=_CACHE
    )
    async with AsyncExitStack() as stack:
        async for reply in stub.Generate(request, timeout=_TIMEOUT_S):
            if not record.arrivals:
                await stack.enter_async_context(_released(stub, reply.outputs[0].resume_from))
            _note(record, sum(len(output.outputs.tokens) for output in reply.outputs))
            _check_end(reply.outputs[-1])
    if sum(count for _, count in record.arrivals) != num_tokens:
        raise Refused("CUT_SHORT", is_rejected=False)


def _check_end(output: pb.GenerateOutput) -> None:
    """Refuse a branch that ended in another way than it was asked to: it has fewer tokens."""
    ends = (pb.FINISH_REASON_UNSPECIFIED, pb.FINISH_REASON_MAX_TOKENS)
    if output.HasField("error"):
        raise error_from_status(output.error)
    if output.finish_reason not in ends:
        reason = pb.FinishReason.Name(output.finish_reason).removeprefix("FINISH_REASON_")
        raise Refused(reason, is_rejected=reason in _NO_ROOM)


@contextlib.asynccontextmanager
async def _released(stub: _Stub, handle: types_pb2.KvCacheHandle) -> AsyncIterator[None]:
    """Release a sequence behind the body, whatever became of it; should that fail, its lease ends soon."""
    try:
        yield
    finally:
        release = cache_pb2.ReleaseCacheRequest(kv_caches=[handle])
        with contextlib.suppress(grpc.aio.AioRpcError):
            await stub.ReleaseCache(release, metadata=_owner(handle), timeout=_TIMEOUT_S)


def _note(record: Record, count: int) -> None:
    if count:
        record.arrivals.append((time.monotonic(), count))
