"""One open StreamDecode, driven frame by frame: what the benchmarks of the wire have in common."""

from __future__ import annotations

import time

import grpc

from ferrule.v1 import cache_pb2, executor_pb2_grpc, policy_pb2, types_pb2
from ferrule.v1 import executor_pb2 as pb

GREEDY = policy_pb2.LogitsReturnPolicy(greedy_argmax=policy_pb2.GreedyArgmax())
PROMPT_TOKENS = 128
OPTIONS = [("grpc.use_local_subchannel_pool", 1)]

Handle = types_pb2.KvCacheHandle


class Stream:
    """One open StreamDecode on a connection of its own."""

    def __init__(self, target: str) -> None:
        self._channel = grpc.aio.insecure_channel(target, options=OPTIONS)
        self._stub = executor_pb2_grpc.ModelExecutorServiceStub(self._channel)
        self._call = self._stub.StreamDecode()
        self._frame = pb.StreamDecodeRequest()

    async def prefill(self, seed: int) -> Handle:
        """Make a sequence of PROMPT_TOKENS tokens."""
        ids = [(seed * 7 + i) % 250 for i in range(PROMPT_TOKENS)]
        none = policy_pb2.LogitsReturnPolicy()
        reply = await self._stub.Prefill(pb.PrefillRequest(input=pb.PrefillInput(input_ids=ids, logits_policy=none)))
        return reply.output.kv_cache

    async def decode(self, handles: list[Handle], token: int) -> tuple[list[Handle], int, int]:
        """Append ``token`` to each handle in one frame.

        Returns:
            The new handles; the time in ns from the first field written into the request until the last reply is read
            and parsed; and the part of it in ns that the step ran.
        """
        started_ns = time.perf_counter_ns()
        self._fill(handles, token)
        await self._call.write(self._frame)
        results: list[pb.StreamResult] = []
        while len(results) < len(handles):
            reply = await self._call.read()
            if not isinstance(reply, pb.StreamDecodeResponse):
                raise TypeError("the stream ended")
            results += reply.results
        elapsed_ns = time.perf_counter_ns() - started_ns
        for result in results:
            if result.HasField("error"):
                raise RuntimeError(result.error.message)
        results.sort(key=lambda result: result.seq)
        run_ns = max(result.decode.timing.run_ns for result in results)
        return [result.decode.kv_cache for result in results], elapsed_ns, run_ns

    def _fill(self, handles: list[Handle], token: int) -> None:
        """Write the next frame, over the last one where it has as many items."""
        if len(self._frame.items) != len(handles):
            self._frame = pb.StreamDecodeRequest(
                items=[
                    pb.StreamItem(seq=seq, decode=pb.DecodeInput(input_ids=[token], logits_policy=GREEDY))
                    for seq in range(len(handles))
                ]
            )
        for item, handle in zip(self._frame.items, handles, strict=True):
            item.decode.input_ids[0] = token
            item.decode.kv_cache.CopyFrom(handle)

    async def release(self, handles: list[Handle]) -> None:
        """Give the sequences back."""
        await self._stub.ReleaseCache(cache_pb2.ReleaseCacheRequest(kv_caches=handles))

    async def close(self) -> None:
        """End the stream and the connection."""
        await self._call.done_writing()
        await self._channel.close()
