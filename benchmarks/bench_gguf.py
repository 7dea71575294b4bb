"""The speed of one GGUF file, here and with llama.cpp in turns, with as many threads.

    python benchmarks/bench_gguf.py --file FILE.gguf --peer-python VENV/bin/python
    python benchmarks/bench_gguf.py --type Q4_K          random weights in the shape of Qwen3-0.6B; only our figures

Why: both read the same blocks, so that only the kernels differ. Measured, greedy, in tokens per second:

    decode b1, b4, b16 c128      over all sequences, by the median step
    prefill 512                  one prompt

Keys and values are bfloat16 here and float16 in llama.cpp, whose flash attention is off. ``--peer-python`` names an
interpreter with llama-cpp-python, such as that of ``make bench-peers``; each of its samples is a process of its own.
Sides take turns in each round, after one that warms up, and every sample stands between two probes of the read rate of
memory. A figure is marked with ``*`` if other processes used more than 0.2 cores meanwhile. A file with random weights
requires the package ``gguf``; it is kept in ``~/.cache/ferrule-bench/models``. A file in parts cannot be measured.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from benchmarks.bench_cpu import CACHE, say, set_up_process, versions  # noqa: E402  (found by the line above)
from benchmarks.cpu.cells import QUICK, Cell, Effort, num_pool_tokens  # noqa: E402
from benchmarks.make_random_model import SHAPES  # noqa: E402
from benchmarks.peers.environments import peer_variables  # noqa: E402
from benchmarks.peers.worker import Task  # noqa: E402

if TYPE_CHECKING:
    from benchmarks.cpu.rounds import Record

TYPES = ("Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K", "Q5_0")
CELLS = (*(Cell("decode", batch, 128) for batch in (1, 4, 16)), Cell("prefill", context=512))
OURS, PEER = "ferrule", "llama.cpp"
_LIMIT_S = 1800.0

Measure = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Peer:
    """llama.cpp with one file; every sample is taken in a process of its own.

    Attributes:
        python: Its interpreter.
        folder: config.json and a link to the file, which is taken for one that the peer has converted.
        num_threads: Threads that compute.
        effort: How long; one sample each time.
    """

    python: Path
    folder: Path
    num_threads: int
    effort: Effort

    def rate(self, cell: Cell) -> float:
        """Return tokens per second.

        Raises:
            RuntimeError: It failed.
        """
        effort = replace(self.effort, num_rounds=1)
        task = Task(self.folder, self.folder, "file", self.num_threads, (cell,), effort, {"side": PEER})
        command = [str(self.python), "-m", "benchmarks.peers.llama_cpp_peer", task.to_json()]
        variables = peer_variables(ROOT, self.num_threads)
        done = subprocess.run(
            command, env=variables, cwd=self.folder, check=False, capture_output=True, text=True, timeout=_LIMIT_S
        )
        lines = done.stdout.splitlines()
        record = json.loads(lines[-1]) if lines else {"error": done.stderr[-600:]}
        if "error" in record:
            raise RuntimeError(f"{PEER}: {record['error']}")
        return float(record["median"])


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure both sides; print a table, then one line of JSON."""
    args = _parse_arguments(arguments)
    set_up_process()
    path = args.file or random_file(args.shape, args.type)
    effort = QUICK if args.quick else Effort()
    effort = replace(effort, num_rounds=args.rounds) if args.rounds else effort
    report = measure(path, args.peer_python, effort, args.threads)
    from benchmarks.cpu.report import lines_of

    print(
        f"{report['file']} ({', '.join(report['packed_types'])}), {report['num_threads']} threads, {report['device']}"
    )
    print("\n".join(lines_of(report["records"], [OURS, PEER] if args.peer_python else [OURS])))
    print(json.dumps(report))


def _parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, metavar="FILE.gguf", help="the model; default: random weights")
    parser.add_argument("--type", choices=TYPES, default="Q8_0", help="of the blocks of random weights")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-0.6b", help="of random weights")
    parser.add_argument("--peer-python", type=Path, metavar="PYTHON", help="an interpreter with llama-cpp-python")
    parser.add_argument("--threads", type=int, help="of both sides; the default is the server's choice")
    parser.add_argument("--rounds", type=int, help="samples of each side")
    parser.add_argument("--quick", action="store_true", help="one short round: whether it works, not how fast it is")
    return parser.parse_args(arguments)


def random_file(shape: str, name: str) -> Path:
    """Return a file with random blocks of a type; it is written if it is missing."""
    from benchmarks.random_gguf import write_random_gguf

    path = CACHE / "models" / f"{shape}-{name}.gguf"
    if not path.exists():
        say(f"writing {path}")
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".unfinished")
        write_random_gguf(unfinished, shape, name)
        unfinished.rename(path)
    return path


def measure(path: Path, peer_python: Path | None, effort: Effort, num_threads: int | None) -> dict[str, Any]:
    """Return the report: what was measured, and a record for each cell and side."""
    from benchmarks.cpu.machine import ReadRate
    from benchmarks.cpu.rounds import make_record, sample_sides
    from benchmarks.cpu.sides import open_side
    from ferrule_server.executor.base import BLOCK_SIZE

    max_context = max(cell.context for cell in CELLS) + effort.num_steps
    say(f"loading {path}")
    side = open_side("numba-cpu", path, num_pool_tokens(CELLS, effort.num_steps, BLOCK_SIZE), max_context, num_threads)
    model = side.executor.info.model
    identity = {"model": path.stem, "is_quick": effort == QUICK}
    records: list[Record] = []
    probe = ReadRate(num_passes=effort.num_probe_passes)
    with _opened(peer_python, path, model.config.vocab_size, side.num_threads, effort) as peer:
        for cell in CELLS:
            say(cell.name)
            side.fill(max(1, cell.batch), cell.context)
            decode = partial(side.decode, cell.batch, cell.context, effort.num_steps)
            ours = partial(side.prefill, cell.context) if cell.kind == "prefill" else decode
            sides: dict[str, Measure] = {OURS: ours}
            sides |= {} if peer is None else {PEER: partial(peer.rate, cell)}
            for name, samples in sample_sides(sides, effort.num_rounds, probe.gbs).items():
                records.append(make_record(cell, samples, identity | {"side": name}))
    side.close()
    return {
        **versions("gguf"), **identity, "file": path.name, "packed_types": model.packed_types,
        "num_threads": side.num_threads, "num_steps": effort.num_steps, "ratios": ratios(records),
        "date": datetime.now(UTC).isoformat(timespec="seconds"), "records": records,
    }  # fmt: skip


def ratios(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return our median through that of the peer, for each cell that both have."""
    medians = {(record["cell"], record["side"]): record["median"] for record in records}
    both = [cell for cell, side in medians if side == PEER]
    return {cell: medians[cell, OURS] / medians[cell, PEER] for cell in both}


@contextmanager
def _opened(
    python: Path | None, path: Path, vocab_size: int, num_threads: int, effort: Effort
) -> Iterator[Peer | None]:
    """Yield llama.cpp with a file; None: there is no interpreter for it."""
    if python is None:
        yield None
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps({"vocab_size": vocab_size}), encoding="utf-8")
        (folder / f"{folder.name}-file.gguf").symlink_to(path.resolve())
        yield Peer(python.absolute(), folder, num_threads, effort)


if __name__ == "__main__":
    main()
