"""Correctness, repeatability and time of a case on the GPU."""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tools.gpu.cases import Case, Instance
from tools.gpu.gpu import Gpu

COLD_BYTES = 256 << 20
"""What the instances of a case hold together, several times the L2: each finds its data in memory."""

NUM_REPLAYS = 1000
_SAMPLES = 15
_SAMPLE_US = 3000.0

STOPPED = "stopped at the driver"
"""Status of a dry run."""

Result = dict[str, Any]


def dry_run(gpu: Gpu, case: Case) -> Result:
    """Build the buffers, compile, pack the arguments and stop at the driver."""
    instance = case.build(gpu, 0)
    gpu.launch(gpu.prepare(instance.calls))
    return {"case": case.name, "status": STOPPED}


def check(gpu: Gpu, case: Case) -> Result:
    """Compare a case with its reference, then its replays with one another."""
    instance = case.build(gpu, 0)
    expected = instance.expect()
    instance.restore()
    launches = gpu.prepare(instance.calls)
    gpu.launch(launches)
    gpu.synchronize()
    error = instance.check(expected)
    result = {"case": case.name, "error": error, "status": "ok" if error <= 1 else "WRONG"}
    if instance.outputs:
        result["replays"], result["different"] = _replay(gpu, instance)
        if result["different"]:
            result["status"] = "NOT REPEATABLE"
    return result


def _replay(gpu: Gpu, instance: Instance) -> tuple[int, int]:
    """Return replays of a graph and how many gave other bits than the first launch; compared on the device."""
    first = [_words(output).clone() for output in instance.outputs]
    different = torch.zeros((), dtype=torch.int64, device=gpu.torch_device)
    launches = gpu.prepare(instance.calls)

    def step() -> None:
        instance.restore()
        gpu.launch(launches)
        for output, kept in zip(instance.outputs, first, strict=True):
            different.add_((_words(output) != kept).any())

    graph = captured(step)
    different.zero_()
    for _ in range(NUM_REPLAYS):
        graph.replay()
    gpu.synchronize()
    return NUM_REPLAYS, int(different)


def _words(values: Tensor) -> Tensor:
    return values.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()])


def captured(step: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """Return a graph of what ``step`` launches; it runs once before, so that nothing is loaded or chosen within."""
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    return graph


def time_us(graph: torch.cuda.CUDAGraph) -> list[float]:
    """Return the time of one replay, several times: enough replays per sample for the clock."""
    repeats = max(1, min(1000, math.ceil(_SAMPLE_US / _sample(graph, 2))))
    return [_sample(graph, repeats) for _ in range(_SAMPLES)]


def _sample(graph: torch.cuda.CUDAGraph, repeats: int) -> float:
    event: Any = torch.cuda.Event
    begin, end = event(enable_timing=True), event(enable_timing=True)
    begin.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    end.synchronize()
    elapsed_ms: float = begin.elapsed_time(end)
    return max(0.1, 1000 * elapsed_ms / repeats)


def num_instances(case: Case) -> int:
    """Return how many instances hold more than the cache together."""
    return max(1, min(case.most_instances, -(-COLD_BYTES // case.num_bytes)))


def instances_of(gpu: Gpu, case: Case) -> list[Instance]:
    """Return instances until the cache is exceeded, or the memory gets short."""
    made = [case.build(gpu, 0)]
    for index in range(1, num_instances(case)):
        free, total = torch.cuda.mem_get_info()
        if free < total // 8:
            break
        made.append(case.build(gpu, index))
    return made


def time_case(gpu: Gpu, case: Case, *, with_torch: bool = True, ceiling_gbs: float | None = None) -> Result:
    """Return time and bandwidth of a case, all instances one after another in one graph, and of torch likewise."""
    try:
        return _time(gpu, case, with_torch, ceiling_gbs)
    finally:
        _free(case)


def _time(gpu: Gpu, case: Case, with_torch: bool, ceiling_gbs: float | None) -> Result:
    instances = instances_of(gpu, case)
    launches = [launch for instance in instances for launch in gpu.prepare(instance.calls)]
    result = _summary(case, [us / len(instances) for us in time_us(captured(lambda: gpu.launch(launches)))])
    if ceiling_gbs:
        result["share_of_ceiling"] = round(result["gbs"] / ceiling_gbs, 3)
    if case.bar is not None:
        result["bar"] = case.bar
    if with_torch:
        graph = captured(lambda: [instance.torch_op() for instance in instances])
        result["torch_us"] = round(statistics.median(us / len(instances) for us in time_us(graph)), 2)
        result["times_torch"] = round(result["torch_us"] / result["us"], 2)
    return result


def _free(case: Case) -> None:
    case.state.clear()
    gc.collect()
    torch.cuda.empty_cache()


def _summary(case: Case, samples_us: Sequence[float]) -> Result:
    median = statistics.median(samples_us)
    return {
        "case": case.name,
        "us": round(median, 2),
        "us_min": round(min(samples_us), 2),
        "us_max": round(max(samples_us), 2),
        "mb": round(case.num_bytes / 1e6, 2),
        "gbs": round(case.num_bytes / median / 1e3, 1),
    }
