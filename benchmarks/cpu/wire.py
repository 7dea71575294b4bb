"""Decode through gRPC: a server in a process of its own, and one StreamDecode with some handles in a frame."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.child_server import server
from benchmarks.decode_stream import Stream

__all__ = ["serving", "stream_rate"]

_NUM_WARM_FRAMES = 4


@contextmanager
def serving(side: str, model: str, num_threads: int | None) -> Iterator[str]:
    """Run a server on one of the processor's executors; yields its address.

    Args:
        side: As of ``sides.SIDES``.
        model: ``demo`` or a folder.
        num_threads: Threads of a step; None: as many as the server chooses.
    """
    threads = [] if num_threads is None else ["--threads", str(num_threads)]
    executor, _, weights = side.partition("-int")
    quantised = ["--weights", "int" + weights[0]] if weights else []
    quantised += ["--activations", "int8"] if side.endswith("-a8") else []
    flags = ["--model", model, "--executor", executor, "--device", "cpu", "--dtype", "bfloat16", *threads, *quantised]
    with server(*flags, "--kv-memory", "1GiB") as target:
        yield target


def stream_rate(target: str, num_handles: int, num_frames: int) -> float:
    """Return greedy tokens per second over all handles, by the median frame, after a prompt of 128 tokens each."""
    return asyncio.run(_stream_rate(target, num_handles, num_frames))


async def _stream_rate(target: str, num_handles: int, num_frames: int) -> float:
    stream = Stream(target)
    handles = [await stream.prefill(seed) for seed in range(num_handles)]
    first = list(handles)
    seconds = []
    for frame in range(_NUM_WARM_FRAMES + num_frames):
        handles, elapsed_ns, _ = await stream.decode(handles, frame % 250)
        seconds.append(elapsed_ns * 1e-9)
    await stream.release(first)
    await stream.close()
    return num_handles / statistics.median(seconds[_NUM_WARM_FRAMES:])
