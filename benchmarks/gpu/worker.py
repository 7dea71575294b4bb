"""One part of the run in a process of its own: what hangs or loses the context takes nothing else with it.

    python -m benchmarks.gpu.worker '{"task": "decode", "model": "Qwen3-8B", "cells": [[1, 256, 32]], ...}'

Every result is one line of JSON on standard output, as soon as there is one.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator

import torch

from benchmarks.gpu.timing import Row

TASKS = {
    "attention": "attention",
    "batching": "batching",
    "ceilings": "ceilings",
    "correct": "correct",
    "decode": "decode",
    "against": "decode",
    "profile": "decode",
    "operations": "operations",
    "wire": "wire",
}
"""The module in which the function of each task is: a part imports what it needs, no more."""


def main() -> None:
    """Do one task."""
    task = json.loads(sys.argv[1])
    if task["dry"]:
        torch.set_num_threads(1)
    for row in rows_of(task):
        print(json.dumps(row), flush=True)


def rows_of(task: Row) -> Iterator[Row]:
    """Return the rows of a task."""
    module = importlib.import_module(f"benchmarks.gpu.{TASKS[task['task']]}")
    function: Callable[[Row], Iterator[Row]] = getattr(module, task["task"])
    return function(task)


if __name__ == "__main__":
    main()
