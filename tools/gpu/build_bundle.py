"""Writes the bundle that a run on another machine needs: kernels of a model, probes, those of tests."""

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

from ferrule_server.kernel_builder.compile import ARCHITECTURES, CompileError
from ferrule_server.kernels.cuda.spec import MODEL_SHAPES, KernelSpec
from ferrule_server.kernels.cuda.specialise import KernelError
from tools.gpu.device_memory import spec_of
from tools.gpu.run import OPS, launching_tests
from tools.gpu.worker import every_spec
from tools.kernels.build import build_with_progress

_TESTS = Path("tests", "kernels", "cuda")


def main() -> None:
    """Note what the tests launch by running them in the simulator, then compile everything."""
    args = _parse_arguments()
    try:
        _build(args)
    except (CompileError, KernelError, OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(f"error: {error}") from error


def _build(args: argparse.Namespace) -> None:
    specs = every_spec(args.ops, MODEL_SHAPES[args.shape])
    specs += [] if args.without_tests else _specs_of_tests(args.ops)
    build_with_progress(specs, {args.architecture: args.output})


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--architecture", choices=list(ARCHITECTURES), required=True)
    parser.add_argument("--shape", choices=list(MODEL_SHAPES), required=True)
    parser.add_argument("--ops", nargs="+", choices=OPS, required=True, metavar="OP")
    parser.add_argument("--without-tests", action="store_true", help="leave out the kernels of the tests of layer 1")
    return parser.parse_args()


def _specs_of_tests(ops: list[str]) -> list[KernelSpec]:
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder, "launches")
        is_wanted = [len(ops) == len(OPS) or name.removeprefix("test_") in ops for name in launching_tests()]
        files = [str(_TESTS / f"{name}.py") for name in compress(launching_tests(), is_wanted)]
        if not files:
            return []
        command = [sys.executable, "-m", "pytest", "-q", "-p", "tools.gpu.plugin", "-p", "no:cacheprovider"]
        print(f"pytest runs {len(files)} files of tests in the simulator, to note what they launch:", flush=True)
        subprocess.run([*command, "-m", "not slow", "--gpu-record", str(record), *files], check=True)
        lines = record.read_text().splitlines()
    return list(dict.fromkeys(_spec(json.loads(line)) for line in lines))


def _spec(launch: dict[str, Any]) -> KernelSpec:
    kernel = getattr(importlib.import_module(launch["module"]), launch["kernel"])
    return spec_of(kernel, dict(launch["constants"]), launch["num_threads"], 0)


if __name__ == "__main__":
    main()
