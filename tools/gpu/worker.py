"""Tasks that use the GPU, one after the other in one process.

    python -m tools.gpu.worker '{"shape": "Qwen3-8B", "bundle": null, "dry": null, "tasks": [{"task": "litmus"}, ...]}'

Each task begins with its number, a line of JSON, ``{"begin": 3}``; each result is a line, as soon as there is one.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from ferrule_server.executor.cuda.bundle import Bundle, BundleError, architectures_for, kernel_key, source_hash
from ferrule_server.executor.cuda.driver import Device, DriverError
from ferrule_server.executor.cuda.litmus import run_litmus
from ferrule_server.executor.cuda.torch_gpu import TorchGpu
from ferrule_server.kernel_builder.compile import ARCHITECTURES
from ferrule_server.kernels.cuda import litmus
from ferrule_server.kernels.cuda.spec import MODEL_SHAPES, KernelSpec, ModelShape
from tools.gpu import layout, measure
from tools.gpu.cases import cases_of
from tools.gpu.gpu import Call, Gpu
from tools.gpu.probes import CEILINGS, read_blocks_spec

Result = dict[str, Any]
_CEILING_BYTES = 4 << 30
_TRIGGERS = ("early", "late", "off")
_reads_gbs: list[float] = []
"""What readers have read per second in this process."""


def main() -> None:
    """Do the tasks; exits with 3 behind one that failed, because the context may be lost."""
    given = json.loads(sys.argv[1])
    for number, task in enumerate(given.pop("tasks")):
        print(json.dumps({"begin": number}), flush=True)
        try:
            for result in TASKS[task["task"]]({**given, **task}):
                print(json.dumps(result), flush=True)
        except Exception as error:
            print(json.dumps({"status": "ERROR", "error": f"{type(error).__name__}: {error}"}), flush=True)
            raise SystemExit(3) from error


def every_spec(ops: Sequence[str], shape: ModelShape) -> list[KernelSpec]:
    """Return all kernels that a run launches for some ops, the litmus and the probes included."""
    cases = (case for op in ops for case in cases_of(op, shape))
    specs = [*litmus.SPECS, *CEILINGS, read_blocks_spec(), *(spec for case in cases for spec in case.specs)]
    return list(dict.fromkeys(specs))


@cache
def _gpu(bundle: str | None, dry: str | None, is_late: bool = False) -> Gpu:
    return Gpu(Path(bundle) if bundle else None, dry, is_late=is_late)


def _gpu_of(task: Result) -> Gpu:
    return _gpu(task["bundle"], task["dry"])


def _device(task: Result) -> Iterator[Result]:
    versions = {"python": platform.python_version(), "torch": torch.__version__, "cuda_of_torch": torch.version.cuda}
    try:
        device = Device.open()
    except DriverError as error:
        yield {"error": str(error)}
        return
    architecture = next((it for it in architectures_for(device.info.capability) if it in ARCHITECTURES), "")
    if not architecture:
        capability = ".".join(map(str, device.info.capability))
        yield {"error": f"{device.info.name} has compute capability {capability}, there are no kernels for it"}
        return
    memory_gib = round(torch.cuda.mem_get_info()[1] / 2**30, 1)
    sizes = {"architecture": architecture, "num_sms": device.info.num_sms, "memory_gib": memory_gib}
    yield {"device": device.info.name, **sizes, **versions}


def _bundle(task: Result) -> Iterator[Result]:
    """Yield how many kernels of a run its bundle has."""
    bundle = Bundle.open(Path(task["bundle"]))
    if bundle.architecture != task["architecture"]:
        raise BundleError(f"{bundle.path} is for {bundle.architecture}, not for {task['architecture']}")
    if bundle.sources != source_hash():
        raise BundleError(f"{bundle.path} is of other sources")
    specs = every_spec(task["ops"], MODEL_SHAPES[task["shape"]])
    yield {"kernels": len(specs), "in_bundle": sum(kernel_key(spec) in bundle.kernels for spec in specs)}


def _litmus(task: Result) -> Iterator[Result]:
    """Yield the verdict. Any but ``passed`` is a failure of the run: kernels that start early may read stale data."""
    gpu = _gpu_of(task)
    if gpu.is_dry:
        gpu.load(litmus.SPECS)
        yield {"status": measure.STOPPED}
        return
    verdict = run_litmus(TorchGpu.open(torch.cuda.current_device()), gpu.cubins(litmus.SPECS))
    status = {"passed": "ok", "failed": "FAILED"}.get(verdict.outcome, "INCONCLUSIVE")
    yield {"verdict": verdict.outcome, **asdict(verdict), "status": status}


def _op(task: Result) -> Iterator[Result]:
    """Yield for each case of an op whether it is right and repeatable, and then how fast."""
    gpu = _gpu_of(task)
    cases = cases_of(task["op"], MODEL_SHAPES[task["shape"]])
    gpu.load([spec for case in cases for spec in case.specs])
    for case in cases:
        result = measure.dry_run(gpu, case) if gpu.is_dry else measure.check(gpu, case)
        if result["status"] == "ok":
            ceiling_gbs = max([*_reads_gbs, task.get("ceiling_gbs") or 0.0]) or None
            result |= measure.time_case(gpu, case, ceiling_gbs=ceiling_gbs)
        case.state.clear()
        yield result


def _trigger(task: Result) -> Iterator[Result]:
    """Yield how fast a layer is whose kernels start early, late, or behind one another."""
    for trigger in _TRIGGERS:
        gpu = _gpu(task["bundle"], task["dry"], trigger == "late")
        case = cases_of("layer", MODEL_SHAPES[task["shape"]])[0]
        case.name += f" trigger={trigger}"
        gpu.starts_early = trigger != "off"
        if gpu.is_dry:
            yield measure.dry_run(gpu, case)
        else:
            checked = measure.check(gpu, case)
            timed = measure.time_case(gpu, case, with_torch=False) if checked["status"] == "ok" else {}
            yield checked | timed
        gpu.starts_early = True


def _brief(task: Result) -> Iterator[Result]:
    """Yield whether the first case of an op is right: what a tool that slows everything down can follow."""
    gpu = _gpu_of(task)
    measure.NUM_REPLAYS = 2
    case = cases_of(task["op"], MODEL_SHAPES[task["shape"]])[0]
    yield measure.dry_run(gpu, case) if gpu.is_dry else measure.check(gpu, case)
    case.state.clear()


def _ceiling(task: Result) -> Iterator[Result]:
    """Yield what each reader reads per second, of more than any cache holds."""
    gpu = _gpu_of(task)
    num_bytes = 1 << 22 if gpu.is_dry else min(_CEILING_BYTES, torch.cuda.mem_get_info()[0] // 2)
    # Not zeros: memory controllers and power limits see what is read.
    words = torch.randint(1 << 62, (num_bytes // 8,), device=gpu.torch_device)
    for spec in CEILINGS:
        constants: dict[str, Any] = dict(spec.constants)
        whole = num_bytes // (16 * constants["U"] * constants["THREADS"]) * (16 * constants["U"] * constants["THREADS"])
        grid = gpu.num_sms * spec.ctas_per_sm
        out = torch.zeros(grid * spec.num_threads, dtype=torch.int32, device=gpu.torch_device)
        launches = gpu.prepare([Call(spec, {"buffer": words, "num_bytes": whole, "out": out}, grid)])
        if gpu.is_dry:
            gpu.launch(launches)
            yield {"reader": spec.name, "status": measure.STOPPED}
            continue
        samples = measure.time_us(measure.captured(partial(gpu.launch, launches)))
        gbs = whole / statistics.median(samples) / 1e3
        _reads_gbs.append(gbs)
        yield {"reader": spec.name, "ctas_per_sm": spec.ctas_per_sm, "gbs": round(gbs, 1), "status": "ok"}


def _layout(task: Result) -> Iterator[Result]:
    yield from layout.compare(_gpu_of(task), MODEL_SHAPES[task["shape"]])


TASKS: dict[str, Callable[[Result], Iterator[Result]]] = {
    "brief": _brief,
    "bundle": _bundle,
    "ceiling": _ceiling,
    "device": _device,
    "layout": _layout,
    "litmus": _litmus,
    "op": _op,
    "trigger": _trigger,
}

if __name__ == "__main__":
    main()
