"""A bare gRPC server: ``python -m tests.hostile.bare --listen HOST:PORT --step-ms MS``, a stand-in for ours.

It answers the calls that the victims make, with the messages of the contract, and has neither model nor state: a decode
burns as much processor time as a step of ours takes, in a thread beside the event loop. It is ``grpc.aio`` with the
options that it has unless set, so what a flood of frames takes from it is what gRPC and the machine take.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from ferrule.v1 import cache_pb2, executor_pb2, executor_pb2_grpc, types_pb2

_CALIBRATION_ROUNDS = 20_000
_NUM_CALIBRATIONS = 5


def rounds_of(step_ms: float) -> int:
    """Return how many rounds of a hash take so long; they are computed without the interpreter's lock."""
    took = []
    for _ in range(_NUM_CALIBRATIONS):
        began_s = time.thread_time()
        _burn(_CALIBRATION_ROUNDS)
        took.append(time.thread_time() - began_s)
    return max(1, round(_CALIBRATION_ROUNDS * step_ms * 1e-3 / min(took)))


def _burn(rounds: int) -> None:
    hashlib.pbkdf2_hmac("sha256", b"bare", b"step", rounds)


class BareServicer(executor_pb2_grpc.ModelExecutorServiceServicer):
    """Answers with handles that are one token longer. The contract names the methods.

    Args:
        rounds: Of the hash, for each decode.
    """

    def __init__(self, rounds: int) -> None:
        self._rounds = rounds
        self._engine = ThreadPoolExecutor(1)

    async def Prefill(self, request: executor_pb2.PrefillRequest, context: object) -> executor_pb2.PrefillResponse:  # noqa: N802
        """Make a handle."""
        handle = types_pb2.KvCacheHandle(cache_id="bare.1.handle", length=len(request.input.input_ids))
        return executor_pb2.PrefillResponse(output=executor_pb2.PrefillOutput(kv_cache=handle))

    async def Decode(self, request: executor_pb2.DecodeRequest, context: object) -> executor_pb2.DecodeResponse:  # noqa: N802
        """Burn, and answer."""
        return executor_pb2.DecodeResponse(output=await self._decoded(request.input))

    async def StreamDecode(  # noqa: N802
        self, request_iterator: AsyncIterator[executor_pb2.StreamDecodeRequest], context: object
    ) -> AsyncIterator[executor_pb2.StreamDecodeResponse]:
        """Burn for each item, and answer."""
        async for frame in request_iterator:
            for item in frame.items:
                result = executor_pb2.StreamResult(seq=item.seq, decode=await self._decoded(item.decode))
                yield executor_pb2.StreamDecodeResponse(results=[result])

    async def TruncateKv(self, request: cache_pb2.TruncateKvRequest, context: object) -> cache_pb2.TruncateKvResponse:  # noqa: N802
        """Shorten a handle."""
        handle = types_pb2.KvCacheHandle(cache_id=request.kv_cache.cache_id, length=request.new_length)
        return cache_pb2.TruncateKvResponse(kv_cache=handle)

    async def ReleaseCache(  # noqa: N802
        self, request: cache_pb2.ReleaseCacheRequest, context: object
    ) -> cache_pb2.ReleaseCacheResponse:
        """Do nothing."""
        return cache_pb2.ReleaseCacheResponse()

    async def _decoded(self, item: executor_pb2.DecodeInput) -> executor_pb2.DecodeOutput:
        began_ns = time.monotonic_ns()
        await asyncio.get_running_loop().run_in_executor(self._engine, _burn, self._rounds)
        handle = types_pb2.KvCacheHandle(cache_id=item.kv_cache.cache_id, length=item.kv_cache.length + 1)
        timing = types_pb2.Timing(run_ns=time.monotonic_ns() - began_ns)
        return executor_pb2.DecodeOutput(kv_cache=handle, timing=timing)


async def serve(target: str, step_ms: float) -> None:
    """Serve until the process is killed, and say where."""
    server = grpc.aio.server()
    executor_pb2_grpc.add_ModelExecutorServiceServicer_to_server(BareServicer(rounds_of(step_ms)), server)
    servicer = health.aio.HealthServicer()
    await servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port(target)
    await server.start()
    print(f"ready listen=127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


def main() -> None:
    """Serve as the command line says."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--listen", required=True)
    parser.add_argument("--step-ms", type=float, required=True)
    args = parser.parse_args()
    asyncio.run(serve(args.listen, args.step_ms))


if __name__ == "__main__":
    main()
