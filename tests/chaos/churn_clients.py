"""Clients that come to a bad end, many to a process: ``python -m tests.chaos.churn_clients``.

Each has a connection of its own, makes sequences with the shortest lease, works on them by every kind of call, and
leaves some of them behind. It prints ``up`` once every client has its first sequence. What ends it is its parent's
affair (SIGKILL, SIGSTOP, a partition), or its own: calls cancelled under way, or given too little time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import sys

import grpc
from google.protobuf.duration_pb2 import Duration

from ferrule.v1 import cache_pb2, executor_pb2, executor_pb2_grpc, policy_pb2, types_pb2

TTL_S = 5
SELF_ENDING = ("cancel", "timeout")
STAYS = "stay"
REWIND = types_pb2.STALE_POLICY_REWIND
GREEDY = policy_pb2.LogitsReturnPolicy(greedy_argmax=policy_pb2.GreedyArgmax())
_OPTIONS = [("grpc.use_local_subchannel_pool", 1), ("grpc.initial_reconnect_backoff_ms", 50)]
_CALL_S = 20.0
_PREFILL_S = 5.0


class Client:
    """One client.

    Args:
        target: Where to connect to.
        fate: ``cancel`` and ``timeout`` spoil its own calls; ``stay`` hears every call to its end; with any other it
            leaves long answers when it has had enough.
        seed: Of all it does.
    """

    def __init__(self, target: str, fate: str, seed: str) -> None:
        self._channel = grpc.aio.insecure_channel(target, options=_OPTIONS)
        self._stub = executor_pb2_grpc.ModelExecutorServiceStub(self._channel)
        self._fate = fate
        self._chance = random.Random(seed)
        self._is_up = False

    async def run(self, up: asyncio.Semaphore) -> None:
        """Work for ever."""
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
                await self._live(up)
            await asyncio.sleep(0.001)

    async def _live(self, up: asyncio.Semaphore) -> None:
        """One sequence: prefill, work, and release it or not."""
        prompt = [self._chance.randrange(256) for _ in range(self._chance.randint(1, 60))]
        options = executor_pb2.CacheOptions(ttl=Duration(seconds=TTL_S))
        message = executor_pb2.PrefillInput(input_ids=prompt, logits_policy=GREEDY, cache=options)
        reply = await self._stub.Prefill(executor_pb2.PrefillRequest(input=message), timeout=_PREFILL_S)
        if not self._is_up:
            self._is_up = True
            up.release()
        handle = reply.output.kv_cache
        works = (self._decode, self._stream, self._fork, self._verify, self._batch, self._generate, self._forward)
        for _ in range(self._chance.randint(1, 12)):
            handle = await self._chance.choice(works)(handle)
        if self._chance.random() < 0.8:
            await self._stub.ReleaseCache(cache_pb2.ReleaseCacheRequest(kv_caches=[handle]), timeout=_CALL_S)

    async def _decode(self, handle: types_pb2.KvCacheHandle) -> types_pb2.KvCacheHandle:
        request = executor_pb2.DecodeRequest(input=self._item(handle))
        call = self._stub.Decode(request, timeout=self._patience())
        self._spoil(call)
        return (await call).output.kv_cache

    async def _stream(self, handle: types_pb2.KvCacheHandle) -> types_pb2.KvCacheHandle:
        call = self._stub.StreamDecode(timeout=self._patience())
        self._spoil(call)
        for seq in range(self._chance.randint(1, 8)):
            item = executor_pb2.StreamItem(seq=seq, decode=self._item(handle))
            await call.write(executor_pb2.StreamDecodeRequest(items=[item]))
            frame = await call.read()
            if not isinstance(frame, executor_pb2.StreamDecodeResponse) or frame.results[0].HasField("error"):
                break
            handle = frame.results[0].decode.kv_cache
        await call.done_writing()
        await call.read()
        return handle

    async def _verify(self, handle: types_pb2.KvCacheHandle) -> types_pb2.KvCacheHandle:
        """Drafts that are known not to hold, by a call of their own."""
        message = executor_pb2.VerifyInput(
            input_ids=[self._chance.randrange(256)],
            draft_ids=[self._chance.randrange(256) for _ in range(self._chance.randint(0, 8))],
            kv_cache=handle,
            logits_policy=GREEDY,
            acceptance=executor_pb2.ACCEPTANCE_RULE_EXACT,
            on_stale=REWIND,
        )
        call = self._stub.ForwardVerify(executor_pb2.ForwardVerifyRequest(input=message), timeout=self._patience())
        self._spoil(call)
        return (await call).output.kv_cache

    async def _batch(self, handle: types_pb2.KvCacheHandle) -> types_pb2.KvCacheHandle:
        """A decode beside new prompts, which nobody gives back."""
        options = executor_pb2.CacheOptions(ttl=Duration(seconds=TTL_S))
        new = [
            executor_pb2.UnifiedBatchItem(
                q_tokens=[each] * self._chance.randint(1, 40), logits_policy=GREEDY, cache=options
            )
            for each in range(2)
        ]
        token = self._chance.randrange(256)
        item = executor_pb2.UnifiedBatchItem(q_tokens=[token], kv_cache=handle, logits_policy=GREEDY, on_stale=REWIND)
        items = [item, *new]
        request = executor_pb2.UnifiedDecodeRequest(batch=executor_pb2.UnifiedBatch(items=items))
        call = self._stub.UnifiedDecode(request, timeout=self._patience())
        self._spoil(call)
        result = (await call).results[0]
        return result.output.kv_cache if result.HasField("output") else handle

    async def _generate(self, handle: types_pb2.KvCacheHandle) -> types_pb2.KvCacheHandle:
        """A loop in one or two branches; now and then nobody reads its end."""
        request = executor_pb2.GenerateRequest(
            input_ids=[self._chance.randrange(256)],
            kv_cache=handle,
            logits_policy=GREEDY,
            on_stale=REWIND,
            max_tokens=self._chance.randint(1, 60),
            n=self._chance.choice((1, 1, 2)),
        )
        call = self._stub.Generate(request, timeout=self._patience())
        self._spoil(call)
        num_wanted = self._chance.randint(1, 60)
        async for frame in call:
            for output in frame.outputs:
                handle = output.resume_from if output.index == 0 and output.HasField("resume_from") else handle
            num_wanted -= 1
            if not num_wanted and self._fate != STAYS:
                call.cancel()
                break
        return handle

    async def _forward(self, handle: types_pb2.KvCacheHandle) -> types_pb2.KvCacheHandle:
        """Full logits of every position, perhaps left after the first of them."""
        tokens = [self._chance.randrange(256) for _ in range(self._chance.randint(1, 300))]
        policy = policy_pb2.LogitsReturnPolicy(full_logits=policy_pb2.FullLogits())
        request = executor_pb2.ForwardRequest(input_ids=tokens, logits_policy=policy)
        call = self._stub.Forward(request, timeout=self._patience())
        self._spoil(call)
        async for _ in call:
            if self._chance.random() < 0.3 and self._fate != STAYS:
                call.cancel()
                break
        return handle

    async def _fork(self, handle: types_pb2.KvCacheHandle) -> types_pb2.KvCacheHandle:
        request = cache_pb2.ForkCacheRequest(kv_cache=handle, count=1)
        branch = (await self._stub.ForkCache(request, timeout=_CALL_S)).kv_caches[0]
        if self._chance.random() < 0.8:
            await self._stub.ReleaseCache(cache_pb2.ReleaseCacheRequest(kv_caches=[handle]), timeout=_CALL_S)
        return branch

    def _item(self, handle: types_pb2.KvCacheHandle) -> executor_pb2.DecodeInput:
        token = self._chance.randrange(256)
        return executor_pb2.DecodeInput(input_ids=[token], kv_cache=handle, logits_policy=GREEDY, on_stale=REWIND)

    def _patience(self) -> float:
        return self._chance.uniform(0.0005, 0.01) if self._fate == "timeout" else _CALL_S

    def _spoil(self, call: grpc.aio.Call) -> None:
        """Cancel the call in a moment, if that is this client's fate."""
        if self._fate == "cancel":
            asyncio.get_running_loop().call_later(self._chance.uniform(0, 0.008), call.cancel)


async def _main(target: str, fate: str, num_clients: int, seed: str, seconds: float) -> None:
    up = asyncio.Semaphore(0)
    clients = [Client(target, fate, f"{seed}:{index}") for index in range(num_clients)]
    tasks = [asyncio.create_task(client.run(up)) for client in clients]
    for _ in clients:
        await up.acquire()
    sys.stdout.write("up\n")
    sys.stdout.flush()
    await asyncio.wait(tasks, timeout=seconds)
    os._exit(0)  # as a crash does: nothing is released, no connection closed in order


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("target")
    parser.add_argument("fate")
    parser.add_argument("num_clients", type=int)
    parser.add_argument("seed")
    parser.add_argument("seconds", type=float)
    asyncio.run(_main(**vars(parser.parse_args())))
