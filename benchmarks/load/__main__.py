"""Load tests: what many sequences at once do to throughput and latency, direct and through Envoy.

    make load                                            two servers of its own with the bundled model
    python -m benchmarks.load --model paged-reference --seconds 2 --rounds 1
    python -m benchmarks.load --target 127.0.0.1:50051   a server that runs already

Each run is a closed loop of 1, 32 and 256 users: a prompt of its own (16 to 1 024 tokens, spread over the logarithm),
then tokens, again and again; by ``stream`` (the client's loop: Prefill, then a frame per token on StreamDecode) and by
``generate`` (the server's loop). Behind them an open loop at 70 % of the requests/s that the closed ones reached, whose
latencies count from when a request was to begin: why both, says loops.py. ``direct`` spreads users over the same two
servers that Envoy has behind it, so that the difference is Envoy. Each cell is the median round by throughput.

It stops by itself: each run is bounded in time and in requests. It prints a table and one JSON line, and says where the
figures are the generator's own: it is one Python process on the machine of the servers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc

from benchmarks.load.calls import MODES, Model, Target
from benchmarks.load.interrupts import Interrupts
from benchmarks.load.loops import Bounds, Work, arrival_times, prompt_lengths, run_closed, run_open
from benchmarks.load.plot import plot
from benchmarks.load.records import UNFINISHED, Quantiles, Record, Summary, median_of, summarize
from benchmarks.load.servers import is_local, own_servers
from benchmarks.load.watch import Watch, watching

_OPEN_SHARE = 0.7
_WARM_UP_SHARE = 0.2
_SHORTEST_PROMPT = 16
_MAX_REQUESTS = 100_000
_PATIENCE_S = 10.0
_MAX_IN_FLIGHT = 512


@dataclass(frozen=True, slots=True)
class Cell:
    """Figures of one mode, path and level; ``level`` is a number of users, or of an open loop its requests/s."""

    mode: str
    path: str
    loop: str
    level: float
    figures: Summary
    watch: Watch
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        plain = {"mode": self.mode, "path": self.path, "loop": self.loop, "level": self.level}
        return {**plain, "figures": self.figures.as_json(), "generator": asdict(self.watch), "limit": self.watch.limit}


def main() -> None:
    """Do as the arguments say; ended by Ctrl-C or SIGTERM, end the servers and exit with 130."""
    args = _parse_arguments()
    interrupts = Interrupts()
    try:
        _run(args, interrupts)
    except KeyboardInterrupt:
        sys.exit(130)


def _run(args: argparse.Namespace, interrupts: Interrupts) -> None:
    """Load what the arguments name, print a table and one JSON line, write the plot."""
    num_runs = len(args.levels) * len(args.modes) * args.rounds + len(args.modes)
    with _targets(args) as paths:
        most_s = len(paths) * num_runs * (args.seconds + _PATIENCE_S)
        print(f"{len(paths) * num_runs} runs of {args.seconds:g} s, at most {most_s / 60:.0f} minutes", file=sys.stderr)
        cells = interrupts.run(lambda: _load(args, paths))
    report = {**_environment(args), "cells": [cell.as_json() for cell in cells]}
    _print_table(cells)
    print(json.dumps(report), flush=True)
    if args.plot is not None:
        closed = [cell for cell in report["cells"] if cell["loop"] == "closed"]
        title = f"{args.title}{args.model if not args.target else 'target'}, {report['date']}"
        args.plot.write_text(plot(closed, title))


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.load", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", help="HOST:PORT of a server that runs (plain text), or several with commas")
    parser.add_argument("--allow-remote", action="store_true", help="load a target on another machine")
    parser.add_argument("--model", default="demo", help="of the servers it starts: demo, a folder or paged-reference")
    parser.add_argument("--kv-memory", default="512MiB", help="of each of them")
    parser.add_argument("--paths", type=_words("direct", "envoy"), default=["direct", "envoy"])
    parser.add_argument("--modes", type=_words(*MODES), default=list(MODES))
    parser.add_argument("--levels", type=_levels, default=[1, 32, 256], help="users of the closed loops")
    parser.add_argument("--seconds", type=float, default=8.0, help="of one run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=32, help="drawn behind each prompt")
    parser.add_argument("--longest-prompt", type=int, default=1024)
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plot", type=Path, help="SVG to write")
    parser.add_argument("--title", default="", help="of the plot, such as the machine")
    args = parser.parse_args()
    for address in (args.target or "").split(",") if args.target else ():
        if not is_local(address) and not args.allow_remote:
            parser.error(f"{address} is not on this machine; add --allow-remote if it is yours to load")
    return args


def _words(*known: str) -> Any:
    """Return what reads a list with commas of known words."""

    def read(text: str) -> list[str]:
        words = text.split(",")
        if not set(words) <= set(known):
            raise argparse.ArgumentTypeError(f"one or more of {', '.join(known)}")
        return words

    return read


def _levels(text: str) -> list[int]:
    levels = [int(word) for word in text.split(",")]
    if not all(1 <= level <= 4096 for level in levels):
        raise argparse.ArgumentTypeError("from 1 to 4096")
    return levels


@contextmanager
def _targets(args: argparse.Namespace) -> Iterator[dict[str, list[str]]]:
    if args.target:
        yield {"target": args.target.split(",")}
        return
    with own_servers(args.model, args.kv_memory, has_envoy="envoy" in args.paths) as paths:
        yield {path: paths[path] for path in args.paths}


async def _load(args: argparse.Namespace, targets: dict[str, list[str]]) -> list[Cell]:
    """Run everything, the paths in turns within each round, so that all of them meet the same machine."""
    cells: list[Cell] = []
    async with AsyncExitStack() as stack:
        paths = []
        for name, addresses in targets.items():
            target = await stack.enter_async_context(Target(addresses, args.connections))
            paths.append(_Path(args, name, target, await target.model()))
        for mode in args.modes:
            most = dict.fromkeys(targets, 0.1)
            for level in args.levels:
                rounds = [[await path.closed(mode, level, number) for path in paths] for number in range(args.rounds)]
                for path, of_path in zip(paths, zip(*rounds, strict=True), strict=True):
                    cells.append(_median_cell(mode, path.name, level, of_path, args.seconds))
                    most[path.name] = max(most[path.name], cells[-1].figures.requests_per_s)
            cells += [await path.open(mode, round(_OPEN_SHARE * most[path.name], 1)) for path in paths]
    return cells


def _median_cell(mode: str, path: str, level: int, rounds: Sequence[tuple[Summary, Watch]], seconds: float) -> Cell:
    """Return the median round by throughput, and what the generator took in it."""
    median = median_of([figures for figures, _ in rounds])
    watch = next(watch for figures, watch in rounds if figures is median)
    print(f"{path} {mode} {level}: {median.tokens_per_s:.0f} tokens/s", file=sys.stderr)
    return Cell(mode, path, "closed", level, median, watch, seconds)


@dataclass(frozen=True, slots=True)
class _Path:
    """One way to the servers, and the runs on it."""

    args: argparse.Namespace
    name: str
    target: Target
    model: Model

    async def closed(self, mode: str, level: int, number: int) -> tuple[Summary, Watch]:
        """Return one round of a loop of users."""
        work, lengths, _ = self._requests(f"{mode}-{level}-{number}", mode)
        return await _measured(run_closed(work, level, lengths, self._bounds), self.args.seconds)

    async def open(self, mode: str, rate: float) -> Cell:
        """Return a loop of arrivals."""
        work, lengths, seed = self._requests(f"{mode}-open", mode)
        times = arrival_times(max(0.1, rate), self.args.seconds, seed)
        running = run_open(work, times, lengths, self._bounds, max_in_flight=_MAX_IN_FLIGHT)
        return Cell(mode, self.name, "open", rate, *await _measured(running, self.args.seconds), self.args.seconds)

    @property
    def _bounds(self) -> Bounds:
        return Bounds(self.args.seconds, _MAX_REQUESTS, _PATIENCE_S)

    def _requests(self, which: str, mode: str) -> tuple[Work, Iterator[int], str]:
        """Return what makes the requests of a run, the lengths of their prompts, and its seed: the same every time."""
        args, seed = self.args, f"{self.args.seed}-{self.name}-{which}"
        longest = min(args.longest_prompt, self.model.max_context - args.tokens - 1)
        lengths = prompt_lengths(_SHORTEST_PROMPT, longest, seed)
        return self.target.work(mode, args.tokens, self.model.vocab_size, seed), lengths, seed


async def _measured(running: Any, seconds: float) -> tuple[Summary, Watch]:
    """Run it; return its figures behind the warm-up, and what the generator took."""
    begin_s = asyncio.get_running_loop().time()
    async with watching() as watch:
        records: list[Record] = await running
    return summarize(records, begin_s + _WARM_UP_SHARE * seconds, begin_s + seconds), watch


def _environment(args: argparse.Namespace) -> dict[str, Any]:
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "commit": git.stdout.strip(),
        "date": datetime.now(UTC).date().isoformat(),
        "model": args.model if not args.target else "of the target",
        "seconds": args.seconds, "rounds": args.rounds, "tokens": args.tokens,
        "python": platform.python_version(), "grpcio": grpc.__version__,
        "cores": os.cpu_count(), "load": f"{os.getloadavg()[0]:.1f}",
    }  # fmt: skip


def _print_table(cells: list[Cell]) -> None:
    heads = ("mode", "path", "load", "tokens/s", "requests/s", "first token p50 / p90 / p99 ms",
             "between tokens p50 / p99 ms", "rejected", "errors", "generator")  # fmt: skip
    print(f"| {' | '.join(heads)} |\n|{' --- |' * len(heads)}")
    for cell in cells:
        print(f"| {' | '.join(_row(cell))} |")
    if any(_is_short(cell) for cell in cells):
        print("+ some waited longer than the run lasted: the figures are too good; take more --seconds or fewer users")
    limited = [cell for cell in cells if cell.watch.limit]
    if limited:
        print(f"* {len(limited)} of {len(cells)}: the limit was the generator, or a machine that is busy otherwise")


def _row(cell: Cell) -> Iterator[str]:
    """Yield the fields of a line of the table."""
    figures, watch = cell.figures, cell.watch
    yield from (cell.mode, cell.path)
    yield f"{cell.level:g} users" if cell.loop == "closed" else f"open, {cell.level:g}/s"
    yield from (f"{figures.tokens_per_s:.0f}", f"{figures.requests_per_s:.1f}")
    yield from (_slashed(figures.first_token, "p50", "p90", "p99"), _slashed(figures.inter_token, "p50", "p99"))
    yield from (_counts(figures.rejected), _counts(figures.errors))
    marks = (" *" if watch.limit else "") + (" +" if _is_short(cell) else "")
    yield f"{watch.cpu_share:.0%}, {watch.lag_p99_ms:.0f} ms late{marks}"


def _is_short(cell: Cell) -> bool:
    """Whether requests waited as long as the run lasted, so that those that would have waited longer are missing."""
    return UNFINISHED in cell.figures.errors or cell.figures.first_token.p99 > 1e3 * cell.seconds


def _slashed(quantiles: Quantiles, *names: str) -> str:
    return " / ".join(f"{getattr(quantiles, name):.1f}" for name in names)


def _counts(reasons: dict[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items())) or "0"


if __name__ == "__main__":
    main()
