"""Writes the bundle that a run on another machine needs: kernels of a model, their variants, probes, those of tests."""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
from itertools import compress
from pathlib import Path
from typing import Any

from ferrule_server.kernels.cuda.spec import MODEL_SHAPES, KernelSpec
from ferrule_server.kernels.cuda.toolchain.bundle import write_bundle
from ferrule_server.kernels.cuda.toolchain.compile import toolkit
from ferrule_server.kernels.cuda.toolchain.cubin_cache import CubinCache
from ferrule_server.kernels.cuda.toolchain.cubins import load_all
from ferrule_server.kernels.cuda.toolchain.sources import source_key
from tests.gpu.device_memory import spec_of
from tests.gpu.run import OPS, launching_tests
from tests.gpu.worker import every_spec

_TESTS = Path("tests", "kernels", "cuda")


def main() -> None:
    """Note what the tests launch by running them in the simulator, then compile everything."""
    args = _parse_arguments()
    specs = every_spec(args.ops, MODEL_SHAPES[args.shape])
    specs += [] if args.without_tests else _specs_of_tests(args.ops)
    made = load_all(specs, args.architecture, cache=CubinCache(args.cache), progress=_show)
    kernels = {source_key(spec, args.architecture): (spec.name, cubin) for spec, cubin in made.items()}
    write_bundle(args.output, args.architecture, toolkit(), kernels)
    print(f"{args.output}: {len(kernels)} kernels, {args.output.stat().st_size / 1e6:.1f} MB")


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--architecture", required=True)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--shape", required=True)
    parser.add_argument("--ops", nargs="+", required=True)
    parser.add_argument("--without-tests", action="store_true", help="leave out the kernels of the tests of layer 1")
    return parser.parse_args()


def _specs_of_tests(ops: list[str]) -> list[KernelSpec]:
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder, "launches")
        is_wanted = [len(ops) == len(OPS) or name.removeprefix("test_") in ops for name in launching_tests()]
        files = [str(_TESTS / f"{name}.py") for name in compress(launching_tests(), is_wanted)]
        command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.gpu.plugin", "-p", "no:cacheprovider"]
        subprocess.run([*command, "-m", "not slow", "--gpu-record", str(record), *files], check=True)
        lines = record.read_text().splitlines()
    return list(dict.fromkeys(_spec(json.loads(line)) for line in lines))


def _spec(launch: dict[str, Any]) -> KernelSpec:
    kernel = getattr(importlib.import_module(launch["module"]), launch["kernel"])
    return spec_of(kernel, dict(launch["constants"]), launch["num_threads"], 0)


def _show(done: int, total: int, name: str) -> None:
    end = "\n" if done == total else ""
    print(f"\r\033[K{done}/{total} {name[:80]}", end=end, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
