"""What the GPU kernels cost to compile, and how fast the next start has them; needs no GPU.

Each start is a process of its own; what it imports is not counted, only finding, reading and checking the cubins.

    cold     every kernel of a model compiled into an empty cache, by a pool of processes
    warm     the same from that cache
    bundle   the same from one file, as on a machine without the compiler

    python benchmarks/bench_kernels_build.py [--shape Qwen3-8B ...] [--architecture sm_90a] [--rounds 5] [--workers 2]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ferrule_server.kernels.cuda.spec import MODEL_SHAPES, KernelSpec
from ferrule_server.kernels.cuda.toolchain import catalog
from ferrule_server.kernels.cuda.toolchain.build import load_all
from ferrule_server.kernels.cuda.toolchain.bundle import Bundle, write_bundle
from ferrule_server.kernels.cuda.toolchain.compile import ARCHITECTURES, toolkit
from ferrule_server.kernels.cuda.toolchain.cubin_cache import CubinCache
from ferrule_server.kernels.cuda.toolchain.sources import source_key

_FRESH = "--fresh"


def main() -> None:
    """Measure all models and print a table, then one JSON line."""
    if _FRESH in sys.argv:
        _load_once(json.loads(sys.argv[-1]))
        return
    args = _parse_arguments()
    rows = [_measure(name, args) for name in args.shape]
    print(f"{'model':14} {'kernels':>7} {'MB':>6} {'cold s':>8} {'CPU s':>8} {'warm s (min-max)':>22} {'bundle s':>9}")
    for row in rows:
        warm = f"{row['warm_s']:.3f} ({row['warm_min_s']:.3f}-{row['warm_max_s']:.3f})"
        print(
            f"{row['model']:14} {row['kernels']:7} {row['mb']:6.2f} {row['cold_s']:8.1f} {row['cold_cpu_s']:8.1f} "
            f"{warm:>22} {row['bundle_s']:9.3f}"
        )
    print(json.dumps({**_environment(args), "models": rows}), flush=True)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=list(MODEL_SHAPES), default=["Qwen3-8B"])
    parser.add_argument("--architecture", choices=sorted(ARCHITECTURES), default="sm_90a")
    parser.add_argument("--rounds", type=int, default=5, help="of warm starts")
    parser.add_argument("--workers", type=int, help="processes that compile; one per core unless said otherwise")
    return parser.parse_args()


def _measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    specs = catalog.kernels_of(MODEL_SHAPES[name])
    with tempfile.TemporaryDirectory() as folder:
        cache, bundle = Path(folder, "cache"), Path(folder, "bundle")
        began, cpu = time.perf_counter(), _cpu_s()
        made = load_all(specs, args.architecture, cache=CubinCache(cache), num_workers=args.workers)
        cold_s, cold_cpu_s = time.perf_counter() - began, _cpu_s() - cpu
        keyed = {source_key(spec, args.architecture): (spec.name, cubin) for spec, cubin in made.items()}
        write_bundle(bundle, args.architecture, toolkit(), keyed)
        task = {"model": name, "architecture": args.architecture}
        warm = [_fresh({**task, "cache": str(cache)}) for _ in range(args.rounds)]
        bundled = [_fresh({**task, "bundle": str(bundle)}) for _ in range(args.rounds)]
    return {
        "model": name,
        "kernels": len(specs),
        "mb": round(sum(len(cubin.code) for cubin in made.values()) / 1e6, 3),
        "cold_s": round(cold_s, 2),
        "cold_cpu_s": round(cold_cpu_s, 2),
        "warm_s": round(statistics.median(warm), 4),
        "warm_min_s": round(min(warm), 4),
        "warm_max_s": round(max(warm), 4),
        "bundle_s": round(statistics.median(bundled), 4),
    }


def _cpu_s() -> float:
    """Return the CPU time of this process and of children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _fresh(task: dict[str, str]) -> float:
    """Return the seconds of a load in a new process: nothing is in its memory."""
    command = [sys.executable, __file__, _FRESH, json.dumps(task)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def _load_once(task: dict[str, str]) -> None:
    specs: list[KernelSpec] = catalog.kernels_of(MODEL_SHAPES[task["model"]])
    began = time.perf_counter()
    cache = CubinCache(Path(task["cache"])) if "cache" in task else None
    bundle = Bundle.open(Path(task["bundle"])) if "bundle" in task else None
    load_all(specs, task["architecture"], cache=cache, bundle=bundle)
    print(time.perf_counter() - began)


def _environment(args: argparse.Namespace) -> dict[str, Any]:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    return {
        "benchmark": "kernels_build",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "architecture": args.architecture,
        "workers": args.workers or os.cpu_count(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "toolkit": toolkit(),
    }


if __name__ == "__main__":
    main()
