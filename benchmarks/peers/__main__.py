"""Measure the peers of the processor's executor on the same random weights, each in an environment of its own.

    make bench-peers                                             everything but peers that are built from source
    make bench-peers PEERS="--only openvino-genai --cells b1"    some of it; numba-cpu: ours in bf16, int8 and int4
    make bench-peers PEERS="--build"                             llama.cpp too
    make bench-peers PEERS="--table --picture peers.svg"         only the table of what has been measured, and a picture

Cells: greedy decode of 1 sequence at 128, 1024, 4096 and 16384 tokens of context, of 4, 8, 16 and 32 sequences at 128,
prefill of 512 and 2048 tokens, and peak memory; ours (``bench_cpu.py``) and every peer at the settings of
``catalog.py``. Every sample stands between two probes of the read rate; ``*`` marks figures that other processes
disturbed.

Environments, converted models and results are in ``~/.cache/ferrule-bench/peers``: 10 GB with the default model. A run
that was stopped goes on at the first cell that has no result. A peer that cannot be installed or run is skipped with
its reason, and the rest goes on. No peer is a dependency of the project.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.bench_cpu import CACHE, ROOT, model_folder, processor_name, say
from benchmarks.cpu.cells import PEER_CELLS, QUICK, Cell, Effort, fitting, select
from benchmarks.cpu.rounds import Record, ResultsFile
from benchmarks.peers.catalog import PEERS, PeerSpec, Variant
from benchmarks.peers.environments import Environment, NotInstalled, last_line
from benchmarks.peers.picture import draw
from benchmarks.peers.table import OURS, OURS_BY_BITS, lines_of, side_of
from benchmarks.peers.worker import Task

_LIMIT_S = 5400.0
"""The longest that one variant of a peer may take, its conversion of the model included."""


class CannotRun(Exception):
    """A variant of a peer ended without measuring everything; the message says why."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a call measures.

    Attributes:
        model: Name of the model in results.
        folder: Of the model.
        base: Folder of environments.
        path: File of results.
        cells: What to measure.
        effort: How long.
        num_threads: Threads that compute.
        is_quick: Whether this is a short run, whose results stand apart.
        retries_disturbed: Whether disturbed cells are measured again.
    """

    model: str
    folder: Path
    base: Path
    path: Path
    cells: tuple[Cell, ...]
    effort: Effort
    num_threads: int
    is_quick: bool
    retries_disturbed: bool

    def results(self) -> ResultsFile:
        """Read the file of results, which child processes write too."""
        return ResultsFile(self.path, retries_disturbed=self.retries_disturbed)

    def left(self, side: str) -> list[Cell]:
        """Return the cells that a side lacks."""
        results = self.results()
        return [cell for cell in self.cells if not results.has((self.model, side, cell.name, self.is_quick))]

    def records(self) -> list[Record]:
        """Return the results of this model and kind of run."""
        return [one for one in self.results().records if (one["model"], one["is_quick"]) == (self.model, self.is_quick)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is asked for and print the table."""
    args = _parse_arguments(arguments)
    plan = _plan_of(args)
    skipped = {} if args.table else _measure_all(plan, args)
    print(f"\n{plan.model}, {processor_name()}, {plan.num_threads} threads for peers; results: {plan.path}")
    print("\n".join(lines_of(plan.records(), plan.cells)))
    if args.picture is not None:
        title = f"{plan.model} on {plan.num_threads} x {processor_name()}"
        args.picture.write_text(draw(plan.records(), plan.cells, title), encoding="utf-8")
    for name, reason in skipped.items():
        print(f"skipped: {name}: {reason}")
    for peer in PEERS:
        if peer.note:
            print(f"{peer.name}: {peer.note}")


def _parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    names = [peer.name for peer in PEERS]
    parser = argparse.ArgumentParser(
        prog="make bench-peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="qwen3-0.6b", help="a shape of make_random_model.py, or a Qwen3 folder")
    parser.add_argument("--only", nargs="+", choices=[OURS, *names], default=[OURS, *names], help="sides to measure")
    parser.add_argument("--build", action="store_true", help="also install peers that are built from source")
    parser.add_argument("--cells", default="", metavar="REGEX", help="only cells whose name matches")
    parser.add_argument("--rounds", type=int, help="samples of each cell")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="threads of peers")
    parser.add_argument("--folder", type=Path, default=CACHE / "peers", help="where environments and results are kept")
    parser.add_argument("--results", type=Path, metavar="FILE.jsonl", help="default: results.jsonl in that folder")
    parser.add_argument("--retry-disturbed", action="store_true", help="measure cells again that are marked there")
    parser.add_argument("--quick", action="store_true", help="one short round: whether it works, not how fast it is")
    parser.add_argument("--install-only", action="store_true", help="make the environments and measure nothing")
    parser.add_argument("--picture", type=Path, metavar="FILE.svg", help="draw the table too")
    parser.add_argument("--table", action="store_true", help="measure nothing")
    return parser.parse_args(arguments)


def _plan_of(args: argparse.Namespace) -> Plan:
    folder = model_folder(args.model)
    effort = QUICK if args.quick else Effort()
    effort = replace(effort, num_rounds=args.rounds) if args.rounds else effort
    positions = json.loads((folder / "config.json").read_text(encoding="utf-8"))["max_position_embeddings"]
    cells = tuple(fitting(select(PEER_CELLS, args.cells), positions - 8, effort.num_steps))
    return Plan(
        model=args.model.rstrip("/").rpartition("/")[2],
        folder=folder,
        base=args.folder,
        path=args.results or args.folder / "results.jsonl",
        cells=cells,
        effort=effort,
        num_threads=args.threads,
        is_quick=args.quick,
        retries_disturbed=args.retry_disturbed,
    )


def _measure_all(plan: Plan, args: argparse.Namespace) -> dict[str, str]:
    """Measure every side that is asked for, and return why some were skipped, by their names."""
    skipped = {}
    for side in OURS_BY_BITS.values() if OURS in args.only and not args.install_only else ():
        if plan.left(side):
            say(f"== {side}")
            if reason := _measure_ours(plan, side):
                skipped[side] = reason
    for peer in PEERS:
        if peer.name in args.only:
            try:
                _measure_peer(plan, peer, builds=args.build, installs_only=args.install_only)
            except (NotInstalled, CannotRun) as error:
                skipped[peer.name] = str(error)
                say(f"skipped: {error}")
    return skipped


def _measure_ours(plan: Plan, side: str) -> str:
    """Run ``bench_cpu.py`` on the cells that are left; returns what went wrong, or nothing."""
    pattern = "|".join(f"^{cell.name}$" for cell in plan.left(side))
    command = [sys.executable, str(ROOT / "benchmarks" / "bench_cpu.py"), "--json", "--sides", side]
    command += ["--model", str(plan.folder), "--cells", pattern, "--results", str(plan.path)]
    command += ["--rounds", str(plan.effort.num_rounds), *(["--quick"] if plan.is_quick else [])]
    command += ["--retry-disturbed"] if plan.retries_disturbed else []
    status = subprocess.run(command, check=False, stdout=subprocess.DEVNULL).returncode
    return f"exit status {status}" if status else ""


def _measure_peer(plan: Plan, peer: PeerSpec, *, builds: bool, installs_only: bool) -> None:
    """Install a peer if it is not there, and measure what is left of every variant.

    Raises:
        NotInstalled: It cannot be installed, or it is built from source and nobody asked for that.
        CannotRun: A variant ended with cells left; the other variants were measured.
    """
    environment = Environment(peer, plan.base / peer.name)
    variants = [variant for variant in peer.variants if plan.left(side_of(peer.name, variant.name))]
    if not variants and not installs_only:
        return
    if peer.is_optional and not builds and not environment.is_ready:
        raise NotInstalled(f"{peer.note}; --build installs it")
    say(f"== {peer.name} {f'({peer.note})' if peer.note else ''}; log: {environment.log}")
    environment.make()
    reasons = []
    for variant in [] if installs_only else variants:
        try:
            _measure_variant(plan, environment, variant)
        except CannotRun as error:
            reasons.append(f"{variant.name}: {error}")
    if reasons:
        raise CannotRun("; ".join(reasons))


def _measure_variant(plan: Plan, environment: Environment, variant: Variant) -> None:
    """Measure rates in one process and memory in another, which runs nothing else.

    Raises:
        CannotRun: A process failed, or a cell did.
    """
    side = side_of(environment.spec.name, variant.name)
    left = plan.left(side)
    rates, memory = [cell for cell in left if cell.kind != "rss"], [cell for cell in left if cell.kind == "rss"]
    errors = []
    for cells in filter(None, (rates, memory)):
        task = Task(
            folder=plan.folder,
            work_folder=environment.folder / "models",
            variant=variant.name,
            num_threads=plan.num_threads,
            cells=tuple(cells),
            effort=plan.effort,
            identity={"model": plan.model, "side": side, "is_quick": plan.is_quick, "note": variant.note},
        )
        errors += _run_worker(plan, environment, task)
    if errors:
        raise CannotRun("; ".join(errors))


def _run_worker(plan: Plan, environment: Environment, task: Task) -> list[str]:
    """Run a worker, keep its records and return the cells that failed, with their reasons."""
    results, errors, num_lines = plan.results(), [], 0
    command = [str(environment.python), "-m", f"benchmarks.peers.{environment.spec.module}", task.to_json()]
    with _running(command, environment, task.num_threads) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if not line.endswith("\n"):  # cut off by the end of the process
                continue
            num_lines += 1
            record = json.loads(line)
            if "error" in record:
                errors.append(f"{record['cell']}: {record['error']}")
                say(errors[-1])
            else:
                results.add(record)
                say(f"{record['side']}: {record['cell']}: {record['median']:.1f} {record['unit']}")
        status = process.wait()
    if num_lines < len(task.cells):
        errors.append(
            f"it ended with status {status} after {num_lines} of {len(task.cells)} cells; {last_line(environment.log)}"
        )
    return errors


@contextmanager
def _running(command: Sequence[str], environment: Environment, num_threads: int) -> Iterator[subprocess.Popen[str]]:
    """Run a process that is killed with its children at the limit, and at the end of the body."""
    with (
        environment.log.open("a", encoding="utf-8") as log,
        subprocess.Popen(
            command,
            cwd=environment.folder,
            env=environment.variables(ROOT, num_threads),
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        ) as process,
    ):
        timer = threading.Timer(_LIMIT_S, _kill, [process])
        timer.start()
        try:
            yield process
        finally:
            timer.cancel()
            _kill(process)


def _kill(process: subprocess.Popen[str]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
