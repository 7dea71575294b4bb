"""What stop strings and stop sequences cost the engine thread for each token, and the event loop for each request.

The text of ordinary cases is a page of Python, encoded with the bundled tokenizer. The worst cases are the largest sets
that a request may bring, over the text that makes the search work hardest: one space after another, which a token mask
can enforce. All is the thread's own processor time. Turning tokens into text is included: the row without strings.

Usage: python benchmarks/bench_stops.py [--rounds 9] [--tokens 2000]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from time import thread_time

from ferrule_server.engine.generation.stops import StopCheck
from ferrule_server.engine.jobs import StopRules
from ferrule_server.text.drawn_text import prepare_search
from ferrule_server.text.tokenizer import Tokenizer

SHIPPED = Path(__file__).resolve().parents[1] / "server" / "ferrule_server" / "demo_model"
ORDINARY = ["\n\nUser:", "\nHuman:", "<|im_end|>", "</s>", "```\n", "###", "Observation:", "\n\n\n"]
Rules = Callable[[], StopRules]


def ordinary(count: int) -> list[str]:
    """Return stop strings as people write them; none comes in the text."""
    return [f"{ORDINARY[index % len(ORDINARY)]}{index}" for index in range(count)]


def cases(tokenizer: Tokenizer, num_tokens: int) -> dict[str, tuple[Rules, list[int]]]:
    """Return by name what makes the rules of a request, and the tokens drawn."""
    page = tokenizer.encode("def area(width: float, height: float) -> float:\n    return width * height\n" * num_tokens)
    (space,) = tokenizer.encode(" ")
    texts: dict[str, tuple[list[str], list[int]]] = {
        f"{count} ordinary strings": (ordinary(count), page[:num_tokens]) for count in (0, 1, 16, 64)
    }
    hostile = [" " * (128 + 2 * i) + "b" + " " * (383 - 2 * i) for i in range(63)] + ["x" * 1024]
    beginnings = [chr(33 + i) + " " * 1023 for i in range(64)]
    texts["worst for a plain search"] = (hostile, [space] * num_tokens)
    texts["equal but for the first letter"] = (beginnings, [space] * num_tokens)
    rules = {name: (_with_strings(tokenizer, strings), drawn) for name, (strings, drawn) in texts.items()}
    runs = tuple((index + 1, *[0] * 1023) for index in range(64))
    rules["64 sequences of 1 024 tokens"] = (lambda: StopRules(sequences=runs)), [0] * num_tokens
    return rules


def _with_strings(tokenizer: Tokenizer, strings: list[str]) -> Rules:
    return lambda: StopRules(new_text_stop=prepare_search(tokenizer, strings))


def measure(rules: Rules, drawn: list[int]) -> tuple[float, float]:
    """Return microseconds to prepare a request's rules, and for a token."""
    begun = thread_time()
    made = rules()
    prepared = thread_time()
    stops = StopCheck(made)
    begun_drawing = thread_time()
    assert not any(stops.after(token_id) for token_id in drawn)
    return (prepared - begun) * 1e6, (thread_time() - begun_drawing) / len(drawn) * 1e6


def main() -> None:
    """Measure; print a table, then one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=2000)
    arguments = parser.parse_args()
    tokenizer = Tokenizer.load(SHIPPED)
    assert tokenizer is not None
    named = cases(tokenizer, arguments.tokens)
    figures = {name: [measure(*case) for _ in range(arguments.rounds)] for name, case in named.items()}
    print(f"{'us':32} {'a request':>10} {'a token, lowest':>16} {'median':>8}")
    medians: dict[str, list[float]] = {}
    for name, values in figures.items():
        prepared, fed = zip(*values, strict=True)
        medians[name] = [round(statistics.median(prepared), 1), round(statistics.median(fed), 2)]
        print(f"{name:32} {medians[name][0]:10.1f} {min(fed):16.2f} {medians[name][1]:8.2f}")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    machine = {"commit": commit.stdout.strip(), "cpus": os.cpu_count(), "python": platform.python_version()}
    print(json.dumps({**machine, "date": datetime.now(UTC).date().isoformat(), "median_us": medians}))


if __name__ == "__main__":
    main()
