"""Our arm: an executor driven by step batches, two steps in flight where it takes them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from benchmarks.gpu.timing import Row
from ferrule_server.executor.base import (
    Executor,
    Float32Array,
    Int32Array,
    OutputSpec,
    PendingStep,
    PipelinedExecutor,
    StepBatch,
    StepResult,
)

GREEDY = OutputSpec(greedy=True)
_PREFILL_ROWS = 1024
_BLOCKS_PER_COPY = 128
_READY_S = 300.0


class NotReady(Exception):
    """The kernels did not come: what torch serves instead is not what is to be measured."""


@dataclass
class Ours:
    """Sequences in the pool of an executor, decoded as the engine would, without the engine.

    Attributes:
        executor: Whose pool this object has to itself.
        is_dry: Torch may serve; nothing is waited for.
        shares_prefix: All sequences read the same blocks of the context, like branches of one prompt.
        is_pipelined: Submit each step before the last one's result is read.
    """

    executor: Executor
    is_dry: bool = False
    shares_prefix: bool = False
    is_pipelined: bool = True
    name: str = "ferrule"
    _steps: list[StepBatch] = field(default_factory=list)

    def prepare(self, batch: int, context: int, num_steps: int) -> None:
        """Fill the pool and wait until every step is one replay of a graph.

        Raises:
            NotReady: The kernels do not come, or the pool is too small.
        """
        tables = self.tables(batch, context, context + num_steps)
        self.fill(tables, context)
        random = np.random.default_rng(5)
        tokens = random.integers(0, self.executor.info.model.config.vocab_size, batch).astype(np.int32)
        first = self.step(tokens[:, None], context, tables)
        self._steps = [first, *(self._fed_step(tables, context + n) for n in range(1, num_steps))]
        self.make_ready(first)

    def decode(self, num_steps: int) -> None:
        """Run the first of the prepared steps, each with the tokens that the one before it chose."""
        steps = self._steps[:num_steps]
        if self.is_pipelined and isinstance(self.executor, PipelinedExecutor) and self.executor.can_submit(steps[0]):
            self._decode_ahead(self.executor, steps)
        else:
            self._decode_in_turns(steps)

    def decoded(self, num_steps: int) -> list[list[int]]:
        """Return the tokens chosen by step and sequence, steps one after the other."""
        return self._decode_in_turns(self._steps[:num_steps])

    def first_logits(self) -> Float32Array:
        """Return the logits behind the context of the first sequence: what the arms are compared by."""
        first = self._steps[0]
        specs = (OutputSpec(full_logits=True), *first.output_specs[1:])
        logits = self.executor.run(replace(first, output_specs=specs)).rows[0].logits
        assert logits is not None
        return logits

    def counts(self) -> Row:
        """Return how many steps ran as what so far; empty for an executor that does not say."""
        if not isinstance(self.executor, PipelinedExecutor):
            return {}
        state = self.executor.state
        return {
            "graph_steps": state.num_graph_steps,
            "launched_steps": state.num_launched_steps,
            "torch_steps": state.num_torch_steps,
        }

    def tables(self, batch: int, context: int, length: int) -> Int32Array:
        """Return block tables: int32 [batch, blocks]; no two blocks of a sequence lie side by side.

        Raises:
            NotReady: The pool has too few blocks.
        """
        size, num_blocks = self.executor.info.block_size, self.executor.info.num_blocks
        num_shared = context // size if self.shares_prefix else 0
        num_own = -(-length // size) - num_shared
        if 1 + num_shared + batch * num_own > num_blocks:
            raise NotReady(f"{batch} sequences of {length} tokens do not fit into {num_blocks} blocks")
        own = 1 + num_shared + np.arange(num_own)[None, :] * batch + np.arange(batch)[:, None]
        shared = np.tile(1 + np.arange(num_shared), (batch, 1))
        return np.concatenate((shared, own), 1).astype(np.int32)

    def fill(self, tables: Int32Array, context: int) -> None:
        """Prefill the first sequence with random tokens; the others get copies of its blocks."""
        random = np.random.default_rng(3)
        tokens = random.integers(0, self.executor.info.model.config.vocab_size, context).astype(np.int32)
        for begin in range(0, context, _PREFILL_ROWS):
            chunk = tokens[None, begin : begin + _PREFILL_ROWS]
            self.executor.run(replace(self.step(chunk, begin, tables[:1]), output_rows=_NONE, output_specs=()))
        num_used = -(-context // self.executor.info.block_size)
        pairs = [pair for row in tables[1:, :num_used] for pair in zip(tables[0], row, strict=False)]
        copies = np.array([pair for pair in pairs if pair[0] != pair[1]], np.int32).reshape(-1, 2)
        for begin in range(0, len(copies), _BLOCKS_PER_COPY):
            self.executor.copy_blocks(np.ascontiguousarray(copies[begin : begin + _BLOCKS_PER_COPY]))

    def step(self, tokens: Int32Array, position: int, tables: Int32Array, spec: OutputSpec = GREEDY) -> StepBatch:
        """Return a step that appends ``tokens`` [sequences, count] at ``position``, with an output behind each."""
        size = self.executor.info.block_size
        num_seqs, count = tokens.shape
        positions = np.arange(position, position + count)
        slots = tables[:, positions // size] * size + positions % size
        return StepBatch(
            token_ids=np.ascontiguousarray(tokens.reshape(-1), np.int32),
            positions=np.tile(positions, num_seqs).astype(np.int32),
            slot_mapping=slots.reshape(-1).astype(np.int32),
            cu_seqlens_q=np.arange(num_seqs + 1, dtype=np.int32) * count,
            kv_lens=np.full(num_seqs, position + count, np.int32),
            block_tables=tables,
            output_rows=(np.arange(num_seqs, dtype=np.int32) + 1) * count - 1,
            output_specs=(spec,) * num_seqs,
            histories=(None,) * num_seqs,
        )

    def make_ready(self, step: StepBatch) -> None:
        """Run a step until its graph exists.

        Raises:
            NotReady: Torch serves for good, or the kernels take too long.
        """
        self.executor.run(step)
        if self.is_dry or not isinstance(self.executor, PipelinedExecutor):
            return
        deadline = time.monotonic() + _READY_S
        while not self._is_on_graph(self.executor, step):
            while self.executor.tend():
                pass
            self.executor.run(step)
            state = self.executor.state
            if state.fallback_reason or time.monotonic() > deadline:
                raise NotReady(state.fallback_reason or f"after {_READY_S:.0f} s: {state.preparation or state}")
            time.sleep(0.02 if state.preparation else 0)

    def _is_on_graph(self, executor: PipelinedExecutor, step: StepBatch) -> bool:
        before = executor.state.num_graph_steps
        executor.run(step)
        return executor.state.num_graph_steps > before and not executor.state.preparation

    def _fed_step(self, tables: Int32Array, position: int) -> StepBatch:
        """Return a step whose tokens come from the one before it."""
        step = self.step(np.zeros((len(tables), 1), np.int32), position, tables)
        return replace(step, feedback=np.arange(len(tables), dtype=np.int32))

    def _decode_ahead(self, executor: PipelinedExecutor, steps: Sequence[StepBatch]) -> None:
        waiting: PendingStep | None = None
        for step in steps:
            submitted = executor.submit(step)
            if waiting is not None:
                check(waiting.result())
            waiting = submitted
        if waiting is not None:
            check(waiting.result())

    def _decode_in_turns(self, steps: Sequence[StepBatch]) -> list[list[int]]:
        chosen: list[list[int]] = []
        for step in steps:
            if step.feedback is not None:
                step = replace(step, token_ids=np.array(chosen[-1], np.int32), feedback=None)  # noqa: PLW2901
            chosen.append(check(self.executor.run(step)))
        return chosen


_NONE: npt.NDArray[np.int32] = np.empty(0, np.int32)


def check(result: StepResult) -> list[int]:
    """Return the tokens of a step.

    Raises:
        ValueError: A row has none: its logits were not finite.
    """
    tokens = [row.token for row in result.rows]
    if any(token is None for token in tokens):
        raise ValueError("a row was not finite")
    return [token for token in tokens if token is not None]
