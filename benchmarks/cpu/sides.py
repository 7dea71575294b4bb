"""The executors of the processor in this process, driven by step batches as the engine drives them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from ferrule_server.executor.base import BLOCK_SIZE, Executor, ExecutorInfo, Int32Array, OutputSpec, StepBatch
from ferrule_server.executor.block_pool import bytes_per_block
from ferrule_server.executor.cpu.executor import CpuOptions, NumbaCpuExecutor, prepare
from ferrule_server.executor.cpu.support import choose
from ferrule_server.executor.torch import TorchExecutor
from ferrule_server.host import Host
from ferrule_server.kernels.cpu.plan import WeightKind
from ferrule_server.loading import suggested_threads
from ferrule_server.model.config_reader import read_config
from ferrule_server.model.weights import load_model

__all__ = ["SIDES", "WEIGHT_BYTES", "InProcessSide", "open_side", "prompt_step", "weights_of"]

SIDES = ("numba-cpu", "numba-cpu-int8", "numba-cpu-int8-a8", "numba-cpu-int4", "torch")
"""Executors, by the names that the server gives them, and how their weights are quantised."""

WEIGHT_BYTES: Mapping[WeightKind, float] = {"float": 2, "int8": 1, "int4": 0.5625}
"""Bytes of a weight in memory; those of bfloat16, and of int4 with its scales."""

_MAX_STEP_ROWS = 512
"""The server's own limit: it runs a longer prompt in chunks of this many rows."""

_LONG_SAMPLE_S = 10.0
_LEAST_STEPS = 8
"""A sample ends before its last step if it has this many and takes longer: torch reads a long context slowly."""

_NUM_DISTINCT_BLOCKS = 4
_NUM_BLOCKS_AT_ONCE = 64


def open_side(name: str, folder: Path, num_tokens: int, max_context: int, num_threads: int | None) -> InProcessSide:
    """Load a model and start an executor as the server would.

    Args:
        name: One of :data:`SIDES`.
        folder: Of the model.
        num_tokens: KV slots that steps use.
        max_context: Longest sequence, in tokens.
        num_threads: Threads of a step; None: as many as the server would use.

    Raises:
        RuntimeError: The kernels cannot run the model on this processor.
    """
    config = read_config(folder)
    num_blocks = 1 + -(-num_tokens // BLOCK_SIZE)
    kv_bytes = num_blocks * bytes_per_block(config, BLOCK_SIZE, torch.bfloat16)
    if name == "torch":
        model = load_model(folder, dtype="bfloat16")
        threads = num_threads or suggested_threads(model.weights_bytes, Host().num_threads())
        torch.set_num_threads(threads)
        return InProcessSide(TorchExecutor(model, kv_memory_bytes=kv_bytes, max_context=max_context), threads)
    choice = choose(config, "bfloat16", weights_of(name), has_int8_inputs=name.endswith("-a8"))
    if choice.plan is None:
        raise RuntimeError(choice.reason)
    threads = num_threads or Host().num_threads()
    options = CpuOptions(choice.plan, choice.reason, threads, kv_bytes, max_context, max_step_rows=_MAX_STEP_ROWS)
    prepared = prepare(config, choice.plan)
    model = load_model(folder, dtype="bfloat16", encoding=prepared.packer)
    return InProcessSide(NumbaCpuExecutor(model, options, prepared), threads)


def weights_of(side: str) -> WeightKind:
    """Return how the weights of a side are quantised."""
    if "int8" in side:
        return "int8"
    return "int4" if "int4" in side else "float"


class InProcessSide:
    """An executor, and the figures that it can be asked for.

    Args:
        executor: Its pool holds what the cells need.
        num_threads: Threads of a step.
    """

    def __init__(self, executor: Executor, num_threads: int) -> None:
        self.executor = executor
        self.num_threads = num_threads

    @property
    def sizes(self) -> Mapping[str, float]:
        """MiB of the weights and of the pool."""
        info = self.executor.info
        pool = info.num_blocks * info.bytes_per_block
        return {"weights_mib": info.model.weights_bytes / 2**20, "pool_mib": pool / 2**20}

    def fill(self, num_seqs: int, context: int) -> None:
        """Write random KV for the first ``context`` tokens of some sequences, which takes no prefill."""
        blocks = _tables(num_seqs, context).reshape(-1)
        data = _random_blocks(self.executor.info)
        for begin in range(0, len(blocks), _NUM_BLOCKS_AT_ONCE):
            part = blocks[begin : begin + _NUM_BLOCKS_AT_ONCE]
            self.executor.write_blocks(part, data[np.arange(len(part)) % len(data)])

    def decode(self, num_seqs: int, context: int, num_steps: int) -> float:
        """Return greedy tokens per second over all sequences, by the median step, from a filled context on."""
        return num_seqs / statistics.median(self._step_seconds(num_seqs, context, num_steps))

    def sustain(self, num_seqs: int, context: int, num_steps: int, least_s: float) -> float:
        """Return the same by the mean step: from the context on again and again, for some seconds at least."""
        seconds: list[float] = []
        while sum(seconds) < least_s:
            seconds += self._step_seconds(num_seqs, context, num_steps)
        return num_seqs / statistics.fmean(seconds)

    def _step_seconds(self, num_seqs: int, context: int, num_steps: int) -> list[float]:
        tables = _tables(num_seqs, context + num_steps)
        tokens = _random_tokens(num_seqs, 1, self.executor.info.model.config.vocab_size)
        seconds: list[float] = []
        for position in range(context, context + num_steps):
            if len(seconds) >= _LEAST_STEPS and sum(seconds) > _LONG_SAMPLE_S:
                break
            batch = _step(tokens, position, tables)
            begin = time.perf_counter()
            rows = self.executor.run(batch).rows
            seconds.append(time.perf_counter() - begin)
            tokens = np.array([[row.token] for row in rows], np.int32)
        return seconds

    def prefill(self, num_tokens: int) -> float:
        """Return prefilled tokens per second of one prompt, in chunks as the server runs it."""
        prompt = _random_tokens(1, num_tokens, self.executor.info.model.config.vocab_size)
        tables = _tables(1, num_tokens)
        begin = time.perf_counter()
        for position in range(0, num_tokens, _MAX_STEP_ROWS):
            self.executor.run(_step(prompt[:, position : position + _MAX_STEP_ROWS], position, tables))
        return num_tokens / (time.perf_counter() - begin)

    def close(self) -> None:
        """Give the memory back."""
        self.executor.close()


def prompt_step(tokens: Int32Array, position: int, length: int) -> StepBatch:
    """Return a step that appends ``tokens`` [1, count] at ``position`` of a sequence that is to have a length."""
    return _step(tokens, position, _tables(1, length))


def _random_tokens(num_seqs: int, length: int, vocab_size: int) -> Int32Array:
    return np.random.default_rng(7).integers(0, vocab_size, (num_seqs, length)).astype(np.int32)


def _random_blocks(info: ExecutorInfo) -> npt.NDArray[np.uint8]:
    """Return uint8 [n, bytes_per_block]: a few blocks of bfloat16 numbers from N(0, 0.1), none of them denormal."""
    size = (_NUM_DISTINCT_BLOCKS, info.bytes_per_block // 2)
    values = np.random.default_rng(11).standard_normal(size, np.float32) * np.float32(0.1)
    return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)


def _tables(num_seqs: int, length: int) -> Int32Array:
    """Return block tables [num_seqs, blocks] in which no two blocks of a sequence lie side by side, if there are two.

    The first blocks of a longer table are those of a shorter one.
    """
    num_blocks = -(-length // BLOCK_SIZE)
    return (1 + np.arange(num_blocks)[None, :] * num_seqs + np.arange(num_seqs)[:, None]).astype(np.int32)


def _step(tokens: Int32Array, position: int, tables: Int32Array) -> StepBatch:
    """Return a step that appends ``tokens`` [num_seqs, count] at ``position`` and chooses one token per sequence."""
    num_seqs, count = tokens.shape
    positions = np.arange(position, position + count)
    slots = tables[:, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    return StepBatch(
        token_ids=np.ascontiguousarray(tokens.reshape(-1)),
        positions=np.tile(positions, num_seqs).astype(np.int32),
        slot_mapping=slots.reshape(-1).astype(np.int32),
        cu_seqlens_q=np.arange(num_seqs + 1, dtype=np.int32) * count,
        kv_lens=np.full(num_seqs, position + count, np.int32),
        block_tables=tables,
        output_rows=(np.arange(num_seqs, dtype=np.int32) + 1) * count - 1,
        output_specs=(OutputSpec(greedy=True),) * num_seqs,
    )
