"""How soon a start on a GPU has its kernels; needs no GPU: the driver is a double, and numba may be missing.

Each start is a process of its own that imports torch first, which is not counted. Then it does what a server does for
its kernels: import the executor, find the bundle, check its sources, read every kernel of the model and load it.

    python benchmarks/bench_kernels_start.py [--shape Qwen3-0.6B ...] [--bundle FILE-OR-FOLDER] [--rounds 5]

Without ``--bundle`` it takes those that ``make kernels`` writes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

_CAPABILITY = (9, 0)
_FRESH = "--fresh"


def main() -> None:
    """Measure all models and print a table, then one JSON line."""
    if _FRESH in sys.argv:
        print(json.dumps(_start(*json.loads(sys.argv[-1]))))
        return
    args = _parse_arguments()
    rows = []
    print(f"{'model':14} {'kernels':>7} {'torch s':>8} {'kernels s (min-max)':>22}")
    for shape in args.shape:
        starts = [_fresh(shape, args.bundle) for _ in range(args.rounds)]
        seconds = [start["kernels_s"] for start in starts]
        torch_s, kernels_s = statistics.median(start["torch_s"] for start in starts), statistics.median(seconds)
        rows.append({"model": shape, "kernels": starts[0]["num"], "torch_s": torch_s, "kernels_s": kernels_s})
        spread = f"{kernels_s:.3f} ({min(seconds):.3f}-{max(seconds):.3f})"
        print(f"{shape:14} {starts[0]['num']:7} {torch_s:8.2f} {spread:>22}", flush=True)
    print(json.dumps({**_environment(), "models": rows}), flush=True)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", default=["Qwen3-0.6B"], metavar="MODEL", help="models of MODEL_SHAPES")
    parser.add_argument("--bundle", type=Path, help="a bundle or a folder of bundles")
    parser.add_argument("--rounds", type=int, default=5, help="starts of each model")
    return parser.parse_args()


def _fresh(shape: str, bundle: Path | None) -> dict[str, Any]:
    """Return the figures of a start in a new process: nothing is in its memory."""
    task = json.dumps([shape, str(bundle.resolve()) if bundle else None])
    done = subprocess.run([sys.executable, __file__, _FRESH, task], stdout=subprocess.PIPE, text=True, check=True)
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def _start(name: str, bundle: str | None) -> dict[str, Any]:
    began = time.perf_counter()
    import torch  # noqa: F401  (it is the time that counts)

    imported = time.perf_counter()
    from ferrule_server.executor.cuda import compose  # noqa: F401  (all that a server imports for its kernels)
    from ferrule_server.executor.cuda.bundle import find_bundle
    from ferrule_server.executor.cuda.driver import Device
    from ferrule_server.executor.cuda.kernel_choice import specs_needed
    from ferrule_server.kernels.cuda.spec import MODEL_SHAPES
    from tools.gpu.recorded_driver import RecordedDriver

    device = Device.open(0, RecordedDriver(capability=_CAPABILITY))
    specs = specs_needed(MODEL_SHAPES[name], is_deterministic=False)
    found = find_bundle(Path(bundle) if bundle else None, device.info.capability, device.info.cuda_version)
    cubins = found.read(specs)
    assert len(cubins) == len(specs), "the bundle lacks kernels"
    for spec, cubin in cubins.items():
        device.load(spec, cubin)
    kernels_s = time.perf_counter() - imported
    assert not any(module.startswith(("numba", "llvmlite")) for module in sys.modules), "a compiler was imported"
    return {"torch_s": imported - began, "kernels_s": kernels_s, "num": len(cubins)}


def _environment() -> dict[str, Any]:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    return {
        "benchmark": "kernels_start",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
    }


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    main()
