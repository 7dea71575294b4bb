"""Sequences over a real executor, for tests: allocates blocks, forks copy-on-write, builds StepBatches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ferrule_server.executor.base import Executor, Float32Array, OutputSpec, RowOutput, StepBatch

FULL = OutputSpec(full_logits=True)


@dataclass
class PooledSequence:
    """One sequence: its tokens in the pool and its blocks, the last of which may be shared with a fork."""

    length: int = 0
    blocks: list[int] = field(default_factory=list)


@dataclass
class Piece:
    """What one step does to one sequence.

    Attributes:
        seq: Which sequence.
        tokens: Fed to it, at ``start``.
        is_query: Run rows that are in the pool already again, without writing.
        num_outputs: The last so many rows go through the output head.
    """

    seq: PooledSequence
    tokens: Sequence[int]
    is_query: bool = False
    num_outputs: int = 1
    spec: OutputSpec = FULL


class Stepper:
    """Drives one executor; block ids are handed out in a scattered order so that nothing lies side by side."""

    def __init__(self, executor: Executor, seed: int = 0) -> None:
        self.executor = executor
        self.block_size = executor.info.block_size
        ids = np.random.default_rng(seed).permutation(np.arange(1, executor.info.num_blocks))
        self.free = [int(block) for block in ids]
        self.refcounts: dict[int, int] = {}

    def fork(self, seq: PooledSequence) -> PooledSequence:
        """Return a second sequence that shares every block."""
        for block in seq.blocks:
            self.refcounts[block] += 1
        return PooledSequence(seq.length, list(seq.blocks))

    def run(self, *pieces: Piece) -> list[RowOutput]:
        """Run one step over the pieces and move the sequences on."""
        return self.executor.run(self.batch(*pieces)).rows

    def logits(self, *pieces: Piece) -> Float32Array:
        """Run one step and return the logits of its output rows, float32 [num_outputs, vocab_size]."""
        rows = self.run(*pieces)
        assert all(row.logits is not None for row in rows)
        return np.stack([row.logits for row in rows if row.logits is not None])

    def batch(self, *pieces: Piece) -> StepBatch:
        """Return the StepBatch of the pieces, blocks allocated and shared ones copied."""
        parts = [self._place(piece) for piece in pieces]
        num_rows = [len(piece.tokens) for piece in pieces]
        cu_seqlens = np.concatenate(([0], np.cumsum(num_rows)))
        tables = np.zeros((len(pieces), max(len(piece.seq.blocks) for piece in pieces) + 1), np.int32)
        for table, piece in zip(tables, pieces, strict=True):
            table[: len(piece.seq.blocks)] = piece.seq.blocks
        outputs = [
            row
            for piece, end in zip(pieces, cu_seqlens[1:], strict=True)
            for row in range(int(end) - piece.num_outputs, int(end))
        ]
        return StepBatch(
            token_ids=np.concatenate([np.asarray(piece.tokens) for piece in pieces]).astype(np.int32),
            positions=np.concatenate([positions for positions, _ in parts]).astype(np.int32),
            slot_mapping=np.concatenate([slots for _, slots in parts]).astype(np.int32),
            cu_seqlens_q=cu_seqlens.astype(np.int32),
            kv_lens=np.array([positions[-1] + 1 for positions, _ in parts], np.int32),
            block_tables=tables,
            output_rows=np.array(outputs, np.int32),
            output_specs=tuple(piece.spec for piece in pieces for _ in range(piece.num_outputs)),
        )

    def _place(self, piece: Piece) -> tuple[np.ndarray, np.ndarray]:
        """Return positions and slots of a piece's rows; appends allocate, and copy a shared block first."""
        seq, count = piece.seq, len(piece.tokens)
        if piece.is_query:
            return np.arange(seq.length - count, seq.length), np.full(count, -1)
        positions = np.arange(seq.length, seq.length + count)
        for index in range(seq.length // self.block_size, int(positions[-1]) // self.block_size + 1):
            self._own_block(seq, index)
        seq.length += count
        blocks = np.array(seq.blocks)[positions // self.block_size]
        return positions, blocks * self.block_size + positions % self.block_size

    def _own_block(self, seq: PooledSequence, index: int) -> None:
        if index == len(seq.blocks):
            seq.blocks.append(self._allocate())
        elif self.refcounts[seq.blocks[index]] > 1:
            source, destination = seq.blocks[index], self._allocate()
            self.executor.copy_blocks(np.array([[source, destination]], np.int32))
            self.refcounts[source] -= 1
            seq.blocks[index] = destination

    def _allocate(self) -> int:
        block = self.free.pop()
        self.refcounts[block] = 1
        return block
