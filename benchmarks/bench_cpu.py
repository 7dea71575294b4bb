"""Decode and prefill on the processor: the kernels (numba-cpu) and torch in turns, each beside the rate of memory.

    python benchmarks/bench_cpu.py [--model qwen3-0.6b] [--cells REGEX] [--results FILE.jsonl] [--quick] [--json]

Why: a decode step reads every weight and the KV of its sequences once, so the read rate of memory is its limit, and the
share of it that is reached is the figure that means something on other machines. Measured, greedy, bfloat16:

    decode b1 c128 ... c16384    tokens/s in process, one sequence, by the median step; the context is random KV
    decode b4 ... b32 c128       the same, over all sequences
    prefill 512, 2048            tokens/s of one prompt
    neighbour b1 c128            the share of the quiet rate that is left beside one busy process
    stream b1, b16 c128          the same tokens through gRPC: a server of its own, one StreamDecode
    rss                          peak memory of a process that only runs the executor, and its parts

Sides take turns in each round. Every sample stands between two probes of the read rate. A figure is marked with ``*``
if other processes used more than 0.2 cores while it was taken. The default model has random weights in the shape of
Qwen3-0.6B and is written to ``~/.cache/ferrule-bench/models`` (1.2 GB) when it is needed; ``demo`` is the bundled one.
Compare figures of one machine only.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.cpu.cells import Cell, Effort
    from benchmarks.cpu.rounds import Record, ResultsFile

ROOT = Path(__file__).resolve().parents[1]
CACHE = Path.home() / ".cache" / "ferrule-bench"

SIDES = ("numba-cpu", "numba-cpu-int8", "numba-cpu-int8-a8", "numba-cpu-int4", "torch")

Measure = Callable[[], float]
Measures = Callable[["Cell"], Mapping[str, Measure]]
"""Returns what measures a cell, by the name of the side."""


@dataclass(frozen=True, slots=True)
class Run:
    """What all cells of a run share.

    Attributes:
        folder: Of the model.
        sides: Executors to measure.
        effort: How long.
        num_threads: Threads of a step; None: as many as the server would use.
        identity: Fields of every record.
        results: Where records go.
        prints_lines: Records are printed as lines of JSON while they are made.
    """

    folder: Path
    sides: Sequence[str]
    effort: Effort
    num_threads: int | None
    identity: Mapping[str, Any]
    results: ResultsFile
    prints_lines: bool

    def left(self, cells: Sequence[Cell], kinds: Sequence[str]) -> list[Cell]:
        """Return the cells of some kinds that at least one side still lacks."""
        return [cell for cell in cells if cell.kind in kinds and not all(map(partial(self._has, cell), self.sides))]

    def _has(self, cell: Cell, side: str) -> bool:
        return self.results.has((self.identity["model"], side, cell.name, self.identity["is_quick"]))

    def add(self, record: Record) -> None:
        """Keep a record."""
        self.results.add(record)
        if self.prints_lines:
            print(json.dumps(record), flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the cells that are asked for; print a table and one JSON line, or JSON lines."""
    args = _parse_arguments(arguments)
    set_up_process()
    from benchmarks.cpu.cells import CELLS, select

    run = _run_of(args)
    cells = _fitting(select(CELLS, args.cells), run)
    _measure_in_process(run, run.left(cells, ("decode", "prefill", "neighbour")))
    _measure_streams(run, run.left(cells, ("stream",)))
    _measure_memory(run, run.left(cells, ("rss",)))
    if not args.json:
        _print_report(run, cells)


def _parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b", help="demo, a shape of make_random_model.py, or a folder")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=["numba-cpu", "torch"])
    parser.add_argument("--cells", default="", metavar="REGEX", help="only cells whose name matches")
    parser.add_argument("--rounds", type=int, help="samples of each side")
    parser.add_argument("--threads", type=int, help="threads of a step; the default is the server's choice")
    parser.add_argument("--results", type=Path, metavar="FILE.jsonl", help="keep records here, and skip those there")
    parser.add_argument("--retry-disturbed", action="store_true", help="measure cells again that are marked there")
    parser.add_argument("--quick", action="store_true", help="one short round: whether it works, not how fast it is")
    parser.add_argument("--json", action="store_true", help="print records as lines of JSON, and no table")
    return parser.parse_args(arguments)


def set_up_process() -> None:
    """Find the sources here and in child processes, and let waiting threads of torch sleep as the server does."""
    paths = [str(ROOT), str(ROOT / "server"), str(ROOT / "client"), str(ROOT / "protos")]
    sys.path[:0] = paths
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # OpenMP reads it once, when torch is imported
    os.environ.setdefault("KMP_BLOCKTIME", "0")


def _run_of(args: argparse.Namespace) -> Run:
    from benchmarks.cpu.cells import QUICK, Effort
    from benchmarks.cpu.rounds import ResultsFile

    folder = model_folder(args.model)
    effort = QUICK if args.quick else Effort()
    if args.rounds:
        effort = replace(effort, num_rounds=args.rounds)
    identity = {"model": args.model.rstrip("/").rpartition("/")[2], "is_quick": args.quick, **versions("cpu")}
    results = ResultsFile(args.results, retries_disturbed=args.retry_disturbed)
    return Run(folder, args.sides, effort, args.threads, identity, results, args.json)


def model_folder(name: str) -> Path:
    """Return the folder of a model by the value of ``--model``; one with random weights is written if it is missing."""
    from benchmarks.make_random_model import SHAPES, write_model

    if name == "demo":
        return ROOT / "server" / "ferrule_server" / "demo_model"
    folder = CACHE / "models" / name if name in SHAPES else Path(name)
    if name in SHAPES and not folder.exists():
        say(f"writing {folder}")
        unfinished = folder.with_name(f"{name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        write_model(unfinished, name)
        unfinished.rename(folder)
    if not (folder / "config.json").is_file():
        raise SystemExit(f"--model {name}: there is no config.json in {folder}")
    return folder


def versions(benchmark: str) -> dict[str, Any]:
    """Return what a benchmark ran on, for its records."""
    import numba
    import torch

    from ferrule_server.host import Host
    from ferrule_server.kernels.cpu.processor import choose_instructions

    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, check=False, capture_output=True)
    return {
        "benchmark": benchmark,
        "commit": commit.stdout.decode().strip(),
        "device": f"{processor_name()}, {Host().num_threads()} cores, {choose_instructions('bfloat16')[0]}",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numba": numba.__version__,
        },
    }


def processor_name() -> str:
    """Return the name that the processor gives itself."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _fitting(cells: Sequence[Cell], run: Run) -> list[Cell]:
    from benchmarks.cpu.cells import fitting
    from ferrule_server.model.config_reader import read_config

    max_context = read_config(run.folder).max_positions
    found = fitting(cells, max_context, run.effort.num_steps)
    for cell in cells:
        if cell not in found:
            say(f"{cell.name}: left out, the model has {max_context} positions")
    return found


def _measure_in_process(run: Run, cells: Sequence[Cell]) -> None:
    if not cells:
        return
    from benchmarks.cpu.cells import num_pool_tokens
    from benchmarks.cpu.sides import InProcessSide, open_side
    from ferrule_server.executor.base import BLOCK_SIZE
    from ferrule_server.model.config_reader import read_config

    steps = run.effort.num_steps
    num_tokens = num_pool_tokens(cells, steps, BLOCK_SIZE)
    sides: dict[str, InProcessSide] = {}
    for name in run.sides:
        say(f"loading {name}")
        max_context = read_config(run.folder).max_positions
        sides[name] = open_side(name, run.folder, num_tokens, max_context, run.num_threads)

    def measures(cell: Cell) -> Mapping[str, Measure]:
        if cell.kind == "prefill":
            return {name: partial(side.prefill, cell.context) for name, side in sides.items()}
        for side in sides.values():
            side.fill(cell.batch, cell.context)
        if cell.kind == "neighbour":
            work = (cell.batch, cell.context, steps, run.effort.neighbour_s)
            return {name: partial(kept_rate, partial(side.sustain, *work)) for name, side in sides.items()}
        return {name: partial(side.decode, cell.batch, cell.context, steps) for name, side in sides.items()}

    _measure(run, cells, measures, threads={name: side.num_threads for name, side in sides.items()})
    for side in sides.values():
        side.close()


def kept_rate(rate: Measure) -> float:
    """Return the share of a quiet rate that is left beside a busy process."""
    from benchmarks.cpu.machine import busy_neighbour

    quiet = rate()
    with busy_neighbour():
        return rate() / quiet


def _measure_streams(run: Run, cells: Sequence[Cell]) -> None:
    if not cells:
        return
    from benchmarks.cpu.wire import serving, stream_rate

    with ExitStack() as stack:
        say("starting servers")
        targets = {name: stack.enter_context(serving(name, str(run.folder), run.num_threads)) for name in run.sides}

        def measures(cell: Cell) -> Mapping[str, Measure]:
            steps = run.effort.num_steps
            return {name: partial(stream_rate, target, cell.batch, steps) for name, target in targets.items()}

        _measure(run, cells, measures)


def _measure(run: Run, cells: Sequence[Cell], measures: Measures, threads: Mapping[str, int] | None = None) -> None:
    """Measure cells and keep a record of each side."""
    from benchmarks.cpu.probe import compiled_probe
    from benchmarks.cpu.rounds import make_record, sample_sides
    from benchmarks.cpu.sides import WEIGHT_BYTES, weights_of
    from benchmarks.gpu.models import read_bytes
    from ferrule_server.model.config_reader import read_config

    config, effort = read_config(run.folder), run.effort
    probe = compiled_probe(effort.num_probe_passes)
    for number, cell in enumerate(cells):
        say(f"{cell.name} ({number + 1} of {len(cells)})")
        is_read = cell.kind in ("decode", "stream")
        context = cell.context + effort.num_steps / 2
        for name, samples in sample_sides(measures(cell), effort.num_rounds, probe.gbs).items():
            more = {"num_steps": effort.num_steps, "num_threads": (threads or {}).get(name)}
            step_bytes = read_bytes(config, cell.batch, context, WEIGHT_BYTES[weights_of(name)]) if is_read else None
            run.add(make_record(cell, samples, {**run.identity, "side": name}, step_bytes, **more))


def _measure_memory(run: Run, cells: Sequence[Cell]) -> None:
    """Measure each side in a child of its own, one after the other."""
    from benchmarks.cpu.memory import measure_memory
    from benchmarks.cpu.rounds import Samples, make_record

    for cell in cells:
        for name in run.sides:
            say(f"{cell.name} of {name}")
            samples = Samples()
            with samples.others.counting():
                sizes = measure_memory(name, run.folder, run.num_threads)
            samples.values.append(sizes["peak_mib"])
            overhead = sizes["peak_mib"] - sizes["weights_mib"] - sizes["pool_mib"]
            more = {**sizes, "overhead_mib": overhead}
            run.add(make_record(cell, samples, {**run.identity, "side": name}, None, **more))


def _print_report(run: Run, cells: Sequence[Cell]) -> None:
    from benchmarks.cpu.report import lines_of, memory_lines

    names = [cell.name for cell in cells]
    mine = [record for record in run.results.records if record["side"] in run.sides and record["cell"] in names]
    mine = [record for record in mine if all(record[key] == run.identity[key] for key in ("model", "is_quick"))]
    mine.sort(key=lambda record: names.index(record["cell"]))
    commits = ", ".join(sorted({record["commit"] for record in mine}))  # more than one, if a run was resumed
    print(f"\n{run.identity['model']}, bfloat16, {run.identity['device']}, commit {commits}")
    print("\n".join([*lines_of(mine, run.sides), *memory_lines(mine)]))
    print(json.dumps({**run.identity, "date": datetime.now(UTC).isoformat(timespec="seconds"), "records": mine}))


@contextmanager
def _interruptible() -> Iterator[None]:
    """End quietly if a person stops the run: what is finished is in the file of results."""
    try:
        yield
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def say(text: str) -> None:
    """Show progress."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    with _interruptible():
        main()
