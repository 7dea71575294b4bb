"""Forking against prefilling again: the time until 16 branches of one prompt have each appended a token of their own.

Three ways to get the same 16 sequences, for prompts of several lengths:

* fork: the prompt is there as a handle; ``fork(16)``, then one frame that appends a token to each branch.
* prefix cache: one frame with 16 prompts, which find the whole blocks of the prompt in the server's prefix cache.
* prefill again: the same frame with the prefix cache off, so that every prompt is run whole.

Each round measures all three one after the other, in another order each time, after one round that warms up.

    python benchmarks/bench_fork.py [--model FOLDER] [--rounds 7] [--picture fork.svg]

Without a folder, the bundled model.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from math import ceil, floor, log10
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from child_server import server  # type: ignore[import-not-found]  # beside this script, not a package
from svg import document  # type: ignore[import-not-found]

from ferrule import Cache, Client, Stream, greedy
from ferrule.types import Append, Prompt

NUM_BRANCHES = 16
LENGTHS = (120, 248, 504, 1016, 1784)
"""Of the prompt, in tokens: none ends with its last block, so that the first append has one to copy."""
WAYS = ("fork", "prefix cache", "prefill again")
_COLOURS = {"fork": "#0f766e", "prefix cache": "#b45309", "prefill again": "#64748b"}
_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT = 620, 270, 70, 74, 130

Times = dict[tuple[str, int], list[float]]


def main() -> None:
    """Measure, print a table and one line of JSON, and draw the picture if one is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--lengths", type=int, nargs="*", default=LENGTHS)
    parser.add_argument("--picture", type=Path, help="draw the figures as an SVG")
    args = parser.parse_args()
    with server("--model", args.model, "--kv-memory", "256MiB") as target, Client(target, max_retries=0) as client:
        times = measure(client, args.lengths, args.rounds)
        info = client.model_info()
        model = f"{info.model_id} ({info.num_parameters / 1e6:.1f} M parameters)"
        report = {**_environment(), "model": model, "figures": figures(times)}
    print_table(report)
    print(json.dumps(report), flush=True)
    if args.picture is not None:
        args.picture.write_text(draw(report), "utf-8")


def measure(client: Client, lengths: Sequence[int], num_rounds: int) -> Times:
    """Return the seconds that each way took in each round, by way and length of the prompt."""
    vocab_size = client.model_info().vocab_size
    random = np.random.default_rng(1)
    times: Times = {(way, length): [] for length in lengths for way in WAYS}
    with client.stream() as stream:
        for round_ in range(num_rounds + 1):
            for length in lengths:
                prompt = random.integers(0, vocab_size, length).tolist()
                firsts = random.choice(vocab_size, NUM_BRANCHES, replace=False).tolist()
                with client.prefill(prompt) as trunk:
                    for place in range(len(WAYS)):
                        way = WAYS[(place + round_) % len(WAYS)]
                        seconds = _timed(client, _way(way, stream, trunk, prompt, firsts))
                        if round_ > 0:
                            times[way, length].append(seconds)
    return times


def _way(way: str, stream: Stream, trunk: Cache, prompt: list[int], firsts: list[int]) -> Callable[[], Sequence[Cache]]:
    """Return what makes the branches in one of the ways."""

    def fork() -> Sequence[Cache]:
        branches = trunk.fork(NUM_BRANCHES)
        stream.run([Append(branch, [first], greedy()) for branch, first in zip(branches, firsts, strict=True)])
        return list(branches)

    def prompts() -> Sequence[Cache]:
        is_cached = way == "prefix cache"
        return stream.run(
            [Prompt([*prompt, first], greedy(), reuse_prefix=is_cached, publish_prefix=False) for first in firsts]
        )

    return fork if way == "fork" else prompts


def _timed(client: Client, make: Callable[[], Sequence[Cache]]) -> float:
    """Return the seconds until the branches are there; they are released after that."""
    started = time.perf_counter()
    branches = make()
    seconds = time.perf_counter() - started
    client.release(branches)
    return seconds


def figures(times: Times) -> list[dict[str, Any]]:
    """Return median, least and most milliseconds of each way and length."""
    return [
        {
            "way": way,
            "tokens": length,
            "ms": 1e3 * statistics.median(seconds),
            "min": 1e3 * min(seconds),
            "max": 1e3 * max(seconds),
        }
        for (way, length), seconds in times.items()
    ]


def _environment() -> dict[str, Any]:
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    names = [line for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines() if line.startswith("model name")]
    return {
        "commit": git.stdout.strip(),
        "date": datetime.now(UTC).date().isoformat(),
        "device": f"{len(os.sched_getaffinity(0))} x {names[0].partition(':')[2].strip()}",
        "python": platform.python_version(),
        "grpcio": grpc.__version__,
        "load": f"{os.getloadavg()[0]:.1f}",
    }


def print_table(report: Mapping[str, Any]) -> None:
    """Print milliseconds, and how many times faster forking is."""
    print(f"{report['model']}, {report['device']}: ms until {NUM_BRANCHES} branches have a token of their own")
    print(f"  {'prompt':>8} " + " ".join(f"{way:>24}" for way in WAYS) + f" {'again / fork':>14}")
    for length in dict.fromkeys(figure["tokens"] for figure in report["figures"]):
        row = {figure["way"]: figure for figure in report["figures"] if figure["tokens"] == length}
        cells = [f"{row[way]['ms']:.1f} ({row[way]['min']:.1f}-{row[way]['max']:.1f})" for way in WAYS]
        ratio = row["prefill again"]["ms"] / row["fork"]["ms"]
        print(f"  {length:>8} " + " ".join(f"{cell:>24}" for cell in cells) + f" {ratio:>14.0f}")


def draw(report: Mapping[str, Any]) -> str:
    """Return the picture: milliseconds upwards on a logarithmic scale, tokens of the prompt to the right."""
    found: dict[tuple[str, int], float] = {
        (figure["way"], figure["tokens"]): figure["ms"] for figure in report["figures"]
    }
    lengths = sorted({tokens for _, tokens in found})
    low, high = floor(log10(min(found.values()))), ceil(log10(max(found.values())))
    longest = max(lengths)

    def across(tokens: int) -> float:
        return round(_LEFT + _WIDTH * tokens / longest, 1)

    def up(value: float) -> float:
        return round(_TOP + _HEIGHT * (high - log10(value)) / (high - low), 1)

    title = f"Milliseconds until {NUM_BRANCHES} branches of one prompt have each appended a token"
    about = f"model: {report['model']}; {report['device']}, {report['date']}; logarithmic, less is better"
    body = [_text(24, 30, title, size=16, weight="bold"), _text(24, 50, about, size=12, colour="#555")]
    for tick in (10.0**power for power in range(low, high + 1)):
        body.append(f'<path d="M{_LEFT} {up(tick)}h{_WIDTH}" stroke="#e2e2e2"/>')
        body.append(_text(_LEFT - 8, up(tick) + 4, f"{tick:g} ms", size=11, anchor="end", colour="#555"))
    below = _TOP + _HEIGHT
    body += [
        _text(across(tokens), below + 20, f"{tokens}", size=11, anchor="middle", colour="#555") for tokens in lengths
    ]
    middle = _LEFT + _WIDTH / 2
    body.append(_text(middle, below + 40, "tokens in the prompt", size=12, anchor="middle", colour="#555"))
    for way in WAYS:
        points = [(across(length), up(found[way, length])) for length in lengths]
        line = " ".join(f"{x},{y}" for x, y in points)
        body.append(f'<polyline points="{line}" fill="none" stroke="{_COLOURS[way]}" stroke-width="2.5"/>')
        body += [f'<circle cx="{x}" cy="{y}" r="4" fill="{_COLOURS[way]}"/>' for x, y in points]
        x, y = points[-1]
        value = f"{found[way, longest]:,.0f} ms"
        body.append(_text(x + 12, y - 1, way, size=13, weight="bold", colour=_COLOURS[way]))
        body.append(_text(x + 12, y + 14, value, size=12, colour=_COLOURS[way]))
    picture: str = document(_LEFT + _WIDTH + _RIGHT, _TOP + _HEIGHT + 58, body)
    return picture


def _text(
    x: float, y: float, text: str, *, size: int, weight: str = "normal", anchor: str = "start", colour: str = "#222"
) -> str:
    style = f'font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" fill="{colour}"'
    return f'<text x="{x:g}" y="{y:g}" {style}>{escape(text)}</text>'


if __name__ == "__main__":
    main()
