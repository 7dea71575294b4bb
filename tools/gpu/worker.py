"""One piece of the run in a process of its own: what hangs or loses the context takes nothing else with it.

    python -m tools.gpu.worker '{"task": "kernels", "op": "gemv", "shape": "Qwen3-8B", ...}'

Every result is one line of JSON on standard output, as soon as there is one.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ferrule_server.executor.cuda.bundle import Bundle, BundleError, architectures_for, kernel_key, source_hash
from ferrule_server.executor.cuda.driver import Device, DriverError
from ferrule_server.kernels.cuda.spec import MODEL_SHAPES, KernelSpec, ModelShape
from tools.gpu import layout, measure
from tools.gpu.cases import cases_of
from tools.gpu.gpu import Call, Gpu
from tools.gpu.probes import CEILINGS, read_blocks_spec
from tools.kernels.compile import ARCHITECTURES

Result = dict[str, Any]
_CEILING_BYTES = 4 << 30


def main() -> None:
    """Do one task; exits with 3 where the context is lost."""
    task = json.loads(sys.argv[1])
    try:
        for result in TASKS[task["task"]](task):
            print(json.dumps(result), flush=True)
    except DriverError as error:
        print(json.dumps({"status": "DRIVER ERROR", "error": str(error)}), flush=True)
        raise SystemExit(3) from error


def every_spec(ops: Sequence[str], shape: ModelShape) -> list[KernelSpec]:
    """Return all kernels that a run launches for some ops, probes included."""
    specs = [*CEILINGS, read_blocks_spec()]
    for op in ops:
        specs += [spec for case in cases_of(op, shape) for spec in case.specs]
    return list(dict.fromkeys(specs))


def _gpu(task: Result) -> Gpu:
    return Gpu(Path(task["bundle"]) if task.get("bundle") else None, task.get("dry"))


def _device(task: Result) -> Iterator[Result]:
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    device = Device.open()
    yield {
        "status": "ok",
        "device": device.name,
        "architecture": next((it for it in architectures_for(device.capability) if it in ARCHITECTURES), None),
        "num_sms": device.num_sms,
        "memory_gib": round(torch.cuda.mem_get_info()[1] / 2**30, 1),
        "cuda_of_torch": torch.version.cuda,
        **versions,
    }


def _bundle(task: Result) -> Iterator[Result]:
    """Yield how many kernels of a run a bundle has."""
    specs = every_spec(task["ops"], MODEL_SHAPES[task["shape"]])
    try:
        bundle = Bundle.open(Path(task["bundle"]))
        if bundle.architecture != task["architecture"]:
            raise BundleError(f"{bundle.path} is for {bundle.architecture}, not for {task['architecture']}")
        if bundle.sources != source_hash():
            raise BundleError(f"{bundle.path} is of other sources")
    except BundleError as error:
        yield {"status": "ERROR", "error": str(error)}
        return
    num_found = sum(kernel_key(spec) in bundle.kernels for spec in specs)
    yield {"status": "ok", "kernels": len(specs), "in_bundle": num_found}


def _kernels(task: Result) -> Iterator[Result]:
    """Yield for each case whether it is right and repeatable, and then how fast."""
    gpu = _gpu(task)
    cases = cases_of(task["op"], MODEL_SHAPES[task["shape"]])
    gpu.load([spec for case in cases for spec in case.specs])
    for case in cases:
        result = measure.dry_run(gpu, case) if gpu.is_dry else measure.check(gpu, case)
        if result["status"] == "ok":
            result |= measure.time_case(gpu, case, ceiling_gbs=task.get("ceiling_gbs"))
        case.state.clear()
        yield result


def _brief(task: Result) -> Iterator[Result]:
    """Yield whether the first case of several ops is right: what a tool that slows everything down can follow."""
    gpu = _gpu(task)
    measure.NUM_REPLAYS = 2
    for op in task["ops"]:
        case = cases_of(op, MODEL_SHAPES[task["shape"]])[0]
        yield measure.dry_run(gpu, case) if gpu.is_dry else measure.check(gpu, case)
        case.state.clear()


def _ceiling(task: Result) -> Iterator[Result]:
    """Yield what each reader reads per second, of more than any cache holds."""
    gpu = _gpu(task)
    num_bytes = 1 << 22 if gpu.is_dry else min(_CEILING_BYTES, torch.cuda.mem_get_info()[0] // 2) >> 22 << 22
    # Not zeros: memory controllers and power limits see what is read.
    words = torch.randint(1 << 62, (num_bytes // 8,), device=gpu.torch_device)
    buffer = words.view(torch.uint8)
    for spec in CEILINGS:
        grid = gpu.num_sms * spec.ctas_per_sm
        out = torch.zeros(grid * spec.num_threads, dtype=torch.int32, device=gpu.torch_device)
        launches = gpu.prepare([Call(spec, {"buffer": buffer, "num_bytes": num_bytes, "out": out}, grid)])
        if gpu.is_dry:
            gpu.launch(launches)
            yield {"reader": spec.name, "status": "stopped at the driver"}
            continue
        samples = measure.time_us(measure.captured(partial(gpu.launch, launches)))
        gbs = num_bytes / statistics.median(samples) / 1e3
        yield {"reader": spec.name, "ctas_per_sm": spec.ctas_per_sm, "gbs": round(gbs, 1), "status": "ok"}


def _layout(task: Result) -> Iterator[Result]:
    yield from layout.compare(_gpu(task), MODEL_SHAPES[task["shape"]])


TASKS: dict[str, Callable[[Result], Iterator[Result]]] = {
    "brief": _brief,
    "bundle": _bundle,
    "ceiling": _ceiling,
    "device": _device,
    "kernels": _kernels,
    "layout": _layout,
}

if __name__ == "__main__":
    main()
