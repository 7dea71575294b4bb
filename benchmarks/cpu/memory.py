"""The peak memory of an executor that is alone in a process: loaded, decoded with and prefilled once.

    python -m benchmarks.cpu.memory numba-cpu FOLDER [THREADS]

It prints one line of JSON, in MiB. :func:`measure_memory` runs it as a child.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from benchmarks.cpu.cells import Cell, num_pool_tokens
from benchmarks.cpu.machine import peak_rss_bytes

__all__ = ["measure_memory"]

_NUM_STEPS = 4
_DECODE = Cell("decode", 16, 128)
_PREFILL = Cell("prefill", context=512)


def main() -> None:
    """Load, run and print what the process needed."""
    from benchmarks.cpu.sides import open_side
    from ferrule_server.executor.base import BLOCK_SIZE

    name, folder, *threads = sys.argv[1:]
    num_tokens = num_pool_tokens([_DECODE, _PREFILL], _NUM_STEPS, BLOCK_SIZE)
    side = open_side(name, Path(folder), num_tokens, 1024, int(threads[0]) if threads else None)
    side.decode(_DECODE.batch, _DECODE.context, _NUM_STEPS)
    side.prefill(_PREFILL.context)
    print(json.dumps({"peak_mib": peak_rss_bytes() / 2**20, **side.sizes}))


def measure_memory(name: str, folder: Path, num_threads: int | None) -> Mapping[str, float]:
    """Return MiB of a child's peak, of its weights and of its pool.

    Raises:
        subprocess.CalledProcessError: The child failed; its errors are on the standard error of this process.
    """
    threads = [] if num_threads is None else [str(num_threads)]
    command = [sys.executable, "-m", "benchmarks.cpu.memory", name, str(folder), *threads]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    result: Mapping[str, float] = json.loads(done.stdout)
    return result


if __name__ == "__main__":
    main()
