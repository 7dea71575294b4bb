"""The kernels of one model for one GPU, where no bundle that is installed has them: built once, by the compiler.

A process of its own compiles, so that what the compiler needs (memory, numba with its patches) ends with it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Final

from ferrule_server.executor.cuda.bundle import architectures_for, source_hash
from ferrule_server.executor.cuda.gpu import GpuError
from ferrule_server.executor.cuda.litmus import default_folder
from ferrule_server.kernel_builder.compile import ARCHITECTURES, CompileError, tool, versions
from ferrule_server.kernels.cuda.spec import ModelShape

_PROGRAM: Final = "ferrule_server.kernel_builder"
_log = logging.getLogger(__name__)


def built_bundle(
    shape: ModelShape, capability: tuple[int, int], cache: Path | None, on_progress: Callable[[float], None]
) -> Path:
    """Return a bundle with the kernels of a model, built now or by an earlier start; a line in the log says which.

    Args:
        shape: Of the model.
        capability: Compute capability of the GPU.
        cache: Folder in which bundles are kept, by the sources of the kernels, the shape and the architecture; None:
            the user's cache folder.
        on_progress: Called with the share that is done.

    Raises:
        GpuError: The compiler is not installed, or there are no kernels for this GPU, or it fails.
    """
    try:
        return _built_bundle(shape, capability, cache or default_folder(), on_progress)
    except (CompileError, OSError) as error:
        raise GpuError(str(error)) from error


def _built_bundle(
    shape: ModelShape, capability: tuple[int, int], cache: Path, on_progress: Callable[[float], None]
) -> Path:
    sizes = json.dumps(asdict(shape), sort_keys=True)
    architecture = next((name for name in architectures_for(capability) if name in ARCHITECTURES), None)
    if architecture is None:
        raise CompileError(f"there are no kernels for compute capability {'.'.join(map(str, capability))}")
    key = hashlib.sha256(sizes.encode()).hexdigest()[:12]
    path = cache / "gpu-kernels" / f"{source_hash()}-{key}-{architecture}.bundle"
    if path.exists():
        return path
    versions()  # or there is no compiler
    tool("ptxas")
    path.parent.mkdir(parents=True, exist_ok=True)
    _log.info("event=kernels_compiling architecture=%s bundle=%s", architecture, path)
    command = [sys.executable, "-P", "-m", _PROGRAM, sizes, architecture, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        said = ""
        for line in process.stdout:
            done, _, total = line.strip().partition(" of ")
            if done.isdecimal() and total.isdecimal():
                on_progress(int(done) / int(total))
            else:
                said = line.strip() or said
    if process.returncode or not path.exists():
        raise CompileError(f"compiling the kernels ended with exit code {process.returncode}: {said}")
    return path
