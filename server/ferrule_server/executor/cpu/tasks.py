"""How the attention of a step is cut into tasks: a few rows of a sequence each, and long contexts among threads.

The cut decides how fast a step is, never its bits (``kernels.cpu.attention``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ferrule_server.executor.base import Int32Array, StepBatch
from ferrule_server.kernels.cpu.attention import TASK_FIELDS, TILE_TOKENS, rows_per_task

_ITEMS_PER_THREAD = 4
"""Items that a step should have for each thread, so that a thread that loses its core delays the others little."""


@dataclass(frozen=True, slots=True)
class Tasks:
    """The tasks of a step, both int32 [n, TASK_FIELDS].

    Attributes:
        tasks: What :func:`attend` runs.
        merges: Rows whose tiles are shared out to several tasks, and merged when all have run.
    """

    tasks: Int32Array
    merges: Int32Array


class TaskPlanner:
    """Cuts steps into tasks.

    Args:
        num_kv_heads: KV heads; every task is run once for each. If it differs between layers, the largest.
        num_queries_per_kv: Query heads of a KV head; likewise.
        num_threads: Threads of a step.
        num_partials: Partials that there is memory for.
    """

    def __init__(self, num_kv_heads: int, num_queries_per_kv: int, num_threads: int, num_partials: int) -> None:
        self._num_kv_heads = num_kv_heads
        self._rows = rows_per_task(num_queries_per_kv)
        self._wanted_tasks = -(-_ITEMS_PER_THREAD * num_threads // num_kv_heads) if num_threads > 1 else 1
        self._num_partials = num_partials
        self._no_merges = np.empty((0, TASK_FIELDS), np.int32)

    def plan(self, batch: StepBatch, ends: Int32Array | None = None) -> Tasks:
        """Return the tasks of a step.

        Args:
            batch: The step.
            ends: int32 [num_rows], how many tokens of its sequence each row may see; None: all up to its own.
        """
        ends = batch.positions + 1 if ends is None else ends
        tasks = self._decodes(ends) if batch.num_rows == batch.num_seqs else self._chunks(batch, ends)
        pieces = self._wanted_tasks // len(tasks)
        if pieces < 2 or int(tasks[:, 4].max()) < 2:
            return Tasks(tasks, self._no_merges)
        return self._split(tasks, pieces)

    def _decodes(self, ends: Int32Array) -> Int32Array:
        tasks = np.empty((len(ends), TASK_FIELDS), np.int32)
        tasks[:, 0] = tasks[:, 1] = np.arange(len(ends))
        tasks[:, 2], tasks[:, 3], tasks[:, 6] = 1, 0, -1
        tasks[:, 4] = tasks[:, 5] = -(-ends // TILE_TOKENS)
        return tasks

    def _chunks(self, batch: StepBatch, ends: Int32Array) -> Int32Array:
        return np.array(list(self._pieces(batch.cu_seqlens_q.tolist(), ends.tolist())), np.int32)

    def _pieces(self, bounds: list[int], ends: list[int]) -> Iterator[tuple[int, ...]]:
        """Yield tasks with as many rows as one has at most."""
        for seq, (begin, end) in enumerate(pairwise(bounds)):
            for row in range(begin, end, self._rows):
                count = min(self._rows, end - row)
                num_tiles = -(-ends[row + count - 1] // TILE_TOKENS)
                yield seq, row, count, 0, num_tiles, num_tiles, -1

    def _split(self, tasks: Int32Array, pieces: int) -> Tasks:
        """Return tasks of which each runs some tiles of a long context, as far as there is memory for partials."""
        parts, merges, partial = [], [], 0
        for seq, row, count, _, num_tiles, _, _ in tasks.tolist():
            needed = self._num_kv_heads * num_tiles
            if num_tiles < 2 or partial + needed > self._num_partials:
                parts.append((seq, row, count, 0, num_tiles, num_tiles, -1))
                continue
            size = -(-num_tiles // pieces)
            parts += [
                (seq, row, count, first, min(first + size, num_tiles), num_tiles, partial)
                for first in range(0, num_tiles, size)
            ]
            merges.append((seq, row, count, 0, num_tiles, num_tiles, partial))
            partial += needed
        return Tasks(np.array(parts, np.int32), np.array(merges, np.int32).reshape(-1, TASK_FIELDS))
