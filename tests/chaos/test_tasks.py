"""Calls that end badly leave no asyncio task on the server."""

from __future__ import annotations

import asyncio
import queue

from ferrule.v1 import executor_pb2, executor_pb2_grpc, types_pb2
from tests.api.harness import PROMPT, RunningServer, decode_item, wait_until
from tests.chaos.cutting_proxy import CuttingProxy
from tests.chaos.raw_clients import open_channel

NUM_ROUNDS = 10


async def _num_tasks() -> int:
    return len(asyncio.all_tasks())


def end_badly(target: str, handle: types_pb2.KvCacheHandle, proxy: CuttingProxy) -> None:
    """Cancel calls and streams, give calls no time, and cut the connection under others."""
    with open_channel(target) as channel:
        stub = executor_pb2_grpc.ModelExecutorServiceStub(channel)
        request = executor_pb2.DecodeRequest(input=decode_item(handle, 1))
        frame = executor_pb2.StreamDecodeRequest(items=[executor_pb2.StreamItem(decode=decode_item(handle))])
        endless: queue.SimpleQueue[executor_pb2.StreamDecodeRequest | None] = queue.SimpleQueue()
        endless.put(frame)
        streams = [stub.StreamDecode(iter(endless.get, None), timeout=20) for _ in range(2)]
        next(streams[0])
        streams[0].cancel()
        generate = executor_pb2.GenerateRequest(kv_cache=handle, max_tokens=200, n=2)
        forward = executor_pb2.ForwardRequest(input_ids=[1] * 100, logits_policy={"full_logits": {}})
        for answers in (stub.Generate(generate, timeout=20), stub.Forward(forward, timeout=20)):
            next(answers)
            answers.cancel()
        cut = [stub.Generate(generate, timeout=20), stub.Forward(forward, timeout=0.002)]
        calls = [stub.Decode.future(request, timeout=20) for _ in range(8)]
        calls += [stub.Decode.future(request, timeout=0.0005) for _ in range(8)]
        for call in calls[:4]:
            call.cancel()
        proxy.cut_all()
        for _ in streams:
            endless.put(None)
        assert len(cut) == 2  # kept so long: a call that nobody refers to is cancelled


def test_no_task_is_left_of_calls_that_were_cancelled_timed_out_or_cut() -> None:
    """As many as before, once the last of them has ended."""
    with RunningServer() as server, CuttingProxy(server.address.port) as proxy:
        handle = server.prefill(PROMPT).kv_cache
        end_badly(proxy.target, handle, proxy)  # what gRPC keeps for later calls is there from the first ones on
        wait_until(lambda: server.state.num_active == 0 and not server.state.streams)
        before = server.run(_num_tasks())
        for _ in range(NUM_ROUNDS):
            end_badly(proxy.target, handle, proxy)
        wait_until(lambda: server.state.num_active == 0 and not server.state.streams)
        wait_until(lambda: server.run(_num_tasks()) <= before)
        server.release(handle)
