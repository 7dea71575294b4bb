"""What every peer does in its own environment: open, measure the cells of a task, print a line of JSON for each.

    python -m benchmarks.peers.MODULE TASK

``TASK`` is JSON: the fields of :class:`Task`. Standard library and numpy only.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from benchmarks.cpu.cells import Cell, Effort
from benchmarks.cpu.machine import ReadRate, tree_peak_rss_bytes
from benchmarks.cpu.rounds import Record, Samples, make_record, sample_sides

__all__ = ["Peer", "Task", "random_prompts", "work"]

_RSS_BATCH, _RSS_CONTEXT, _RSS_PROMPT = 16, 128, 512


@dataclass(frozen=True, slots=True)
class Task:
    """What a worker measures.

    Attributes:
        folder: Of the model: config.json and model.safetensors, no tokenizer.
        work_folder: Where the peer may keep the model in a format of its own.
        variant: Name of a variant of the peer.
        num_threads: Threads that compute.
        cells: What to measure.
        effort: How long.
        identity: Fields of every record.
    """

    folder: Path
    work_folder: Path
    variant: str
    num_threads: int
    cells: tuple[Cell, ...]
    effort: Effort
    identity: Mapping[str, Any]

    @property
    def config(self) -> Mapping[str, Any]:
        """The model's config.json."""
        result: Mapping[str, Any] = json.loads((self.folder / "config.json").read_text(encoding="utf-8"))
        return result

    @property
    def max_length(self) -> int:
        """The longest sequence of all cells, in tokens."""
        return max(_RSS_PROMPT, *(cell.context for cell in self.cells)) + self.effort.num_steps + 8

    @property
    def max_tokens(self) -> int:
        """The most tokens of all sequences of a cell together."""
        lengths = [max(1, cell.batch) * (cell.context + self.effort.num_steps + 8) for cell in self.cells]
        return max(_RSS_BATCH * (_RSS_CONTEXT + self.effort.num_steps + 8), self.max_length, *lengths)

    @property
    def max_batch(self) -> int:
        """The most sequences of a cell."""
        return max(_RSS_BATCH, *(cell.batch for cell in self.cells))

    def to_json(self) -> str:
        """Return the task as text."""
        return json.dumps(asdict(self) | {"folder": str(self.folder), "work_folder": str(self.work_folder)})

    @classmethod
    def from_json(cls, text: str) -> Task:
        """Return the task that :meth:`to_json` made a text of."""
        fields = json.loads(text)
        paths = {name: Path(fields[name]) for name in ("folder", "work_folder")}
        cells, effort = tuple(Cell(**cell) for cell in fields["cells"]), Effort(**fields["effort"])
        return cls(**fields | paths | {"cells": cells, "effort": effort})


class Peer(Protocol):
    """A peer with the model loaded."""

    def decode(self, batch: int, context: int, num_steps: int) -> float:
        """Prefill ``batch`` sequences of ``context`` tokens, then return greedy tokens/s by the median step."""
        ...

    def prefill(self, num_tokens: int) -> float:
        """Return prefilled tokens per second of one prompt."""
        ...

    def versions(self) -> Mapping[str, str]:
        """Return the versions of what computes."""
        ...


def work(open_peer: Callable[[Task], Peer]) -> None:
    """Measure the task on the command line; a cell that fails gets a line with its error."""
    task = Task.from_json(sys.argv[1])
    out = _own_output()
    probe = (
        None if all(cell.kind == "rss" for cell in task.cells) else ReadRate(num_passes=task.effort.num_probe_passes)
    )
    peer = open_peer(task)  # it may bind this thread to a core, but not those of the probe
    for cell in task.cells:
        print(f"{task.identity['side']}: {cell.name}", file=sys.stderr, flush=True)
        try:
            line = _measure(peer, cell, task, probe)
        except Exception as error:  # noqa: BLE001 - whatever a peer raises, the other cells are measured
            traceback.print_exc()
            line = {**task.identity, "cell": cell.name, "error": f"{error.__class__.__name__}: {error}"[:300]}
        print(json.dumps(line), file=out, flush=True)
    out.flush()
    os._exit(0)  # some peers hang, or fail, when their threads are joined


def _own_output() -> Any:
    """Return a file on the standard output, which from now on goes to the standard error: peers print to it."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return out


def _measure(peer: Peer, cell: Cell, task: Task, probe: ReadRate | None) -> Record:
    more = {"num_threads": task.num_threads, "num_steps": task.effort.num_steps, "versions": dict(peer.versions())}
    if probe is None:  # its buffer would count
        samples = Samples()
        with samples.others.counting():
            peer.decode(_RSS_BATCH, _RSS_CONTEXT, 4)
            peer.prefill(_RSS_PROMPT)
        samples.values.append(tree_peak_rss_bytes() / 2**20)
    else:
        measure = (
            partial(peer.prefill, cell.context)
            if cell.kind == "prefill"
            else partial(peer.decode, cell.batch, cell.context, task.effort.num_steps)
        )
        samples = sample_sides({"peer": measure}, task.effort.num_rounds, probe.gbs)["peer"]
    return make_record(cell, samples, task.identity, None, **more)


def random_prompts(task: Task, num_seqs: int, length: int) -> npt.NDArray[np.int64]:
    """Return int64 [num_seqs, length] of random tokens, the same ones each time."""
    return np.random.default_rng(7).integers(0, task.config["vocab_size"], (num_seqs, length))
