"""The server with a watch on its executor: each step's times go to a file, and steps can be made to take longer.

    python -m tests.chaos.timed_server --steps FILE [--step-ms 20] [--row-us 40] ...      the rest as for ferrule_server

A step then takes ``step-ms + row-us * rows`` at least, as on a device that computes while the interpreter is free.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ferrule_server import __main__ as server
from ferrule_server import loading as select
from ferrule_server.config import ServerConfig
from ferrule_server.executor.base import Executor, Int32Array, StepBatch, StepResult
from ferrule_server.host import Host


@dataclass(frozen=True, slots=True)
class Step:
    """One step: when it began on the monotonic clock of the machine, how long it took, and its rows."""

    began_s: float
    elapsed_s: float
    num_rows: int


def read_steps(path: Path) -> list[Step]:
    """Return the steps run so far."""
    steps = []
    for line in path.read_text(encoding="ascii").splitlines():
        began_s, elapsed_s, num_rows = line.split()
        steps.append(Step(float(began_s), float(elapsed_s), int(num_rows)))
    return steps


class TimedExecutor:
    """Runs another executor, slowly if asked to, and writes a line for each step."""

    def __init__(self, inner: Executor, path: Path, step_s: float, row_s: float) -> None:
        self.info = inner.info
        self._inner = inner
        self._file = path.open("w", encoding="ascii", buffering=1)
        self._step_s = step_s
        self._row_s = row_s

    def run(self, batch: StepBatch) -> StepResult:
        """Run the step; it ends no earlier than it should."""
        began_s = time.monotonic()
        result = self._inner.run(batch)
        wait_s = began_s + self._step_s + self._row_s * batch.num_rows - time.monotonic()
        if wait_s > 0.0:
            time.sleep(wait_s)
        self._file.write(f"{began_s:.6f} {time.monotonic() - began_s:.6f} {batch.num_rows}\n")
        return result

    def copy_blocks(self, block_pairs: Int32Array) -> None:
        """Copy whole blocks."""
        self._inner.copy_blocks(block_pairs)

    def copy_slots(self, slot_pairs: Int32Array) -> None:
        """Copy single slots."""
        self._inner.copy_slots(slot_pairs)

    def read_blocks(self, block_ids: Int32Array) -> npt.NDArray[np.uint8]:
        """Return the bytes of blocks."""
        return self._inner.read_blocks(block_ids)

    def write_blocks(self, block_ids: Int32Array, data: npt.NDArray[np.uint8]) -> None:
        """Overwrite blocks."""
        self._inner.write_blocks(block_ids, data)

    def close(self) -> None:
        """Close the executor and the file."""
        self._inner.close()
        self._file.close()


def main() -> int:
    """Run the server with a timed executor."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--steps", type=Path, required=True)
    parser.add_argument("--step-ms", type=float, default=0.0)
    parser.add_argument("--row-us", type=float, default=0.0)
    mine, rest = parser.parse_known_args()
    create = select.create_executor

    def create_timed(
        config: ServerConfig, on_progress: select.OnProgress, host: Host = select._HOST
    ) -> select.LoadedExecutor:
        loaded = create(config, on_progress, host)
        timed = TimedExecutor(loaded.executor, mine.steps, mine.step_ms * 1e-3, mine.row_us * 1e-6)
        return select.LoadedExecutor(timed, loaded.tokenizer)

    select.create_executor = create_timed
    return server.main(rest)


if __name__ == "__main__":
    sys.exit(main())
