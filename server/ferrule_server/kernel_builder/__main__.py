"""Writes the bundle of one model for one architecture: ``at_start.py`` runs it and reads how far it is."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ferrule_server.kernel_builder.bundles import build_bundles
from ferrule_server.kernel_builder.compile import CompileError
from ferrule_server.kernels.cuda import catalog, litmus
from ferrule_server.kernels.cuda.spec import ModelShape
from ferrule_server.kernels.cuda.specialise import KernelError


def main(sizes: str, architecture: str, path: str) -> None:
    """Build; exits with 1 and a line that says why if that is not possible."""

    def say(done: int, total: int) -> None:
        print(f"{done} of {total}", flush=True)

    try:
        specs = catalog.merged([*catalog.kernels_of(ModelShape(**json.loads(sizes))), *litmus.SPECS])
        build_bundles(specs, {architecture: Path(path)}, on_progress=say)
    except (CompileError, KernelError, OSError) as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main(*sys.argv[1:])
