"""What this GPU can do at most: reading, copying, starting kernels; what all other figures are compared with."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.timing import Row, summary, synchronize
from ferrule_server.executor.cuda.driver import Launch
from ferrule_server.kernels.cuda.intrinsics import (
    Address,
    cta_id,
    grid_launch_dependents,
    grid_wait,
    store_u32,
    thread_id,
)
from ferrule_server.kernels.cuda.spec import KernelSpec
from tools.gpu import measure, worker
from tools.gpu.gpu import Call, Gpu
from tools.gpu.probes import CEILINGS

_NODES = (64, 256)
_LAUNCHES = 1000
_THREADS = 128
_SAMPLES = 9
_COPY_BYTES = 1 << 30


def tiny_kernel(out: Address, *, THREADS: int) -> None:  # noqa: N803
    """Store one word per thread: as little as a kernel can do behind the one before it.

    Args:
        out: uint32 [grid * THREADS].
        THREADS: Per CTA.
    """
    grid_launch_dependents()
    grid_wait()
    store_u32(out + (cta_id() * THREADS + thread_id()) * 4, 1)


TINY_KERNEL = KernelSpec(tiny_kernel, (("THREADS", _THREADS),), _THREADS, 0, min_vector_loads=0)


def specs() -> list[KernelSpec]:
    """Return the kernels of this stage, for a bundle."""
    return [*CEILINGS, TINY_KERNEL]


def ceilings(task: Row) -> Iterator[Row]:
    """Yield the rate of every reader, then copies, then what a launch and a node of a graph cost."""
    yield from ({"kind": "read", **row} for row in worker.TASKS["ceiling"](task))
    gpu = Gpu(Path(task["bundle"]) if task.get("bundle") else None, task["dry"])
    yield from _copies(gpu)
    for starts_early in (False, True):
        yield _node_cost(gpu, starts_early=starts_early)
    yield _launch_cost(gpu)


def _copies(gpu: Gpu) -> Iterator[Row]:
    """Yield copies on the device (bytes read plus bytes written) and between it and pinned memory (bytes moved)."""
    num_bytes = 1 << 20 if gpu.is_dry else _COPY_BYTES
    device = [torch.empty(num_bytes, dtype=torch.uint8, device=gpu.torch_device).random_() for _ in range(2)]
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=not gpu.is_dry)
    for name, target, source, factor in (
        ("copy on the device", device[0], device[1], 2),
        ("pinned host to device", device[0], host, 1),
        ("device to pinned host", host, device[1], 1),
    ):
        taken_s = samples_s(partial(_copy, target, source), gpu.torch_device)
        rates = [factor * num_bytes / one / 1e9 for one in taken_s]
        yield {"kind": "copy", "copy": name, "gbs": summary(rates, 2), "status": "ok"}


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source, non_blocking=True)


def samples_s(work: Callable[[], object], device: torch.device, num_samples: int = _SAMPLES) -> list[float]:
    """Return the seconds of several runs of device work, each waited for; two before are not counted."""
    taken = []
    for index in range(num_samples + 2):
        synchronize(device)
        began = time.perf_counter()
        work()
        synchronize(device)
        taken += [time.perf_counter() - began] if index >= 2 else []
    return taken


def _launches(gpu: Gpu, count: int, *, starts_early: bool) -> list[Launch]:
    out = torch.zeros(gpu.num_sms * _THREADS, dtype=torch.int32, device=gpu.torch_device)
    made = gpu.prepare([Call(TINY_KERNEL, {"out": out}, gpu.num_sms)], starts_early=starts_early)
    return made * count


def _node_cost(gpu: Gpu, *, starts_early: bool) -> Row:
    """Return us that one more node adds to a graph of a chain, and what a whole replay costs the host."""
    row: Row = {"kind": "node", "starts_early": starts_early, "nodes": list(_NODES)}
    chains = [_launches(gpu, count, starts_early=starts_early) for count in _NODES]
    if gpu.is_dry:
        gpu.launch(chains[0][:2])
        return {**row, "status": "stopped at the driver"}
    graphs = [measure.captured(partial(gpu.launch, chain)) for chain in chains]
    pairs = zip(*(measure.time_us(graph) for graph in graphs), strict=True)
    slopes = [(many - few) / (_NODES[1] - _NODES[0]) for few, many in pairs]
    return {**row, "us": summary(slopes, 3), "replay_host_us": _host_us(graphs[1].replay, 50), "status": "ok"}


def _launch_cost(gpu: Gpu) -> Row:
    """Return us of the host that one launch through the driver takes, arguments packed before."""
    launches = _launches(gpu, 1, starts_early=False)
    if gpu.is_dry:
        gpu.launch(launches)
        return {"kind": "launch", "status": "stopped at the driver"}
    return {"kind": "launch", "host_us": _host_us(partial(gpu.launch, launches), _LAUNCHES), "status": "ok"}


def _host_us(call: Callable[[], Any], count: int) -> Row:
    """Return what one call takes the host while the device has room for more."""
    samples = []
    for _ in range(_SAMPLES):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(count):
            call()
        samples.append(1e6 * (time.perf_counter() - began) / count)
    torch.cuda.synchronize()
    return summary(samples, 3)
