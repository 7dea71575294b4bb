"""The executor of processors: every step runs on the kernels of ``kernels.cpu``.

A row's results depend on its own sequence alone: on none of its neighbours, on no chunk, prefix or fork, and on no
number of threads. If a thread of a step fails, that is a DeviceLost, and nothing runs afterwards.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from ferrule_server.executor.base import (
    DeviceLost,
    ExecutorInfo,
    Int32Array,
    ModelDescription,
    RowOutput,
    StepBatch,
    StepResult,
)
from ferrule_server.executor.block_pool import BlockPool, bytes_per_block
from ferrule_server.executor.cpu.crowding import ThreadCount
from ferrule_server.executor.cpu.memory import StepMemory
from ferrule_server.executor.cpu.outputs import ask, read_outputs
from ferrule_server.executor.cpu.records import ModelRecord, ThreadRecords
from ferrule_server.executor.cpu.stages import keeps_ups
from ferrule_server.executor.cpu.tasks import TaskPlanner
from ferrule_server.executor.cpu.weights import Packer, block_types, wanted_kernels
from ferrule_server.executor.cpu.workers import StepAborted, Workers
from ferrule_server.executor.fallback.split import split_step
from ferrule_server.executor.torch import check_settings, describe
from ferrule_server.kernels.cpu.compiled import Kernels, compile_kernels, usable_cache
from ferrule_server.kernels.cpu.plan import Plan
from ferrule_server.kernels.cpu.processor import kernel_set_id
from ferrule_server.kernels.cpu.sync import SyncBlock
from ferrule_server.model.config import ModelConfig
from ferrule_server.model.weights import LoadedModel

_log = logging.getLogger(__name__)

NAME: Final = "numba-cpu"

Progress = Callable[[str, float], None]
"""Called with the stage, for people, and the progress of it from 0 to 1."""


@dataclass(frozen=True, slots=True)
class CpuOptions:
    """How the executor runs.

    Attributes:
        plan: How the kernels are compiled.
        reason: Why with these instructions, for people.
        num_threads: Threads of a step.
        kv_memory_bytes: Size of the pool, rounded down to whole blocks, the null block included.
        max_context: Longest sequence in tokens, at most the model's own.
        max_step_rows: Most rows of a step.
        fallback_reason: Why a faster executor is not in use, although one was requested.
    """

    plan: Plan
    reason: str
    num_threads: int
    kv_memory_bytes: int
    max_context: int
    max_step_rows: int = 512
    fallback_reason: str = ""


@dataclass(frozen=True, slots=True)
class Prepared:
    """What there is before weights are read.

    Attributes:
        kernels: The machine code.
        packer: Packs matrices while they are read (``Encoding``).
    """

    kernels: Kernels
    packer: Packer


def prepare(
    config: ModelConfig, plan: Plan, kernel_cache: Path | None = None, on_progress: Progress = lambda _s, _p: None
) -> Prepared:
    """Compile the kernels, or load them, and allocate the memory of the weights.

    Args:
        config: The network.
        plan: How the kernels are compiled.
        kernel_cache: Folder in which machine code is kept; None: the user's cache.
        on_progress: Called while kernels are compiled or loaded; the stage says how many were compiled, if any were.

    Raises:
        MemoryError, OSError: There is no memory for the weights.
    """

    def on_kernel(num_done: int, num_kernels: int, num_new: int) -> None:
        note = f", {num_new} compiled" if num_new else ""
        on_progress(f"kernels, {num_done} of {num_kernels}{note}", num_done / num_kernels)

    kernels = compile_kernels(plan, usable_cache(kernel_cache), on_kernel, wanted_kernels(config, plan))
    return Prepared(kernels, Packer(config, plan, kernels.pack))


class NumbaCpuExecutor:
    """Implements ``executor.base.Executor``.

    Invariant: every step runs on the kernels. After a step that failed, none runs.

    Args:
        model: The executor takes its weights; the model cannot be used for a second executor.
        options: How to run.
        prepared: Of the same plan; its packer has packed the model's matrices.

    Attributes:
        info: The description of this executor; constant.

    Raises:
        ConfigError: A setting is out of range, or the pool would hold too few blocks.
        ModelError: The weights were taken before.
    """

    def __init__(self, model: LoadedModel, options: CpuOptions, prepared: Prepared) -> None:
        self._max_step_rows = options.max_step_rows
        if options.fallback_reason:
            _log.warning("event=processor_serves reason=%r", options.fallback_reason)
        self.info = _describe(model, options)
        self._packed = prepared.packer.finish(model.take_weights())
        self._pool = BlockPool(self.info, model.torch_dtype)
        self._start(model.config, options, prepared.kernels)

    def _start(self, config: ModelConfig, options: CpuOptions, kernels: Kernels) -> None:
        """Allocate the memory of a step and start the threads."""
        self._memory = StepMemory(
            config, options.plan, max_rows=options.max_step_rows, max_context=options.max_context,
            num_threads=options.num_threads, keeps_ups=keeps_ups(self._packed),
        )  # fmt: skip
        self._planner = TaskPlanner(
            config.num_kv_heads,
            max(config.num_heads // kind.num_kv_heads for kind in config.layers),
            options.num_threads,
            self._memory.num_partials,
        )
        record = ModelRecord(config, self._packed, self._pool.tensors, kernels, self._memory)
        sync = SyncBlock(record.num_claims)
        threads = ThreadRecords(record, self._memory, sync, options.num_threads)

        def run(thread: int) -> int:
            return kernels.work(None, threads.addresses[thread])

        self._workers = Workers(run, options.num_threads, sync)
        self._threads = ThreadCount(options.num_threads)

    @torch.inference_mode()
    def run(self, batch: StepBatch) -> StepResult:
        """Write the KV of the step's rows and return what its output rows request.

        Raises:
            DeviceLost: A thread of this step or of an earlier one failed.
        """
        if not batch.num_rows:
            return StepResult()
        try:
            if batch.num_rows <= self._max_step_rows:
                return StepResult(self._run(batch))
            return StepResult(self._run_in_parts(batch))
        except StepAborted as error:
            raise DeviceLost(f"the kernels of the processor failed: {error}") from error

    def _run(self, batch: StepBatch) -> list[RowOutput]:
        memory = self._memory
        memory.set_rows(batch, self._planner.plan(batch))
        positions = batch.positions[batch.output_rows].tolist()
        rows: list[RowOutput] = []
        for begin in range(0, max(1, len(positions)), memory.max_outputs):
            part = slice(begin, begin + memory.max_outputs)
            num_choices = ask(memory, positions[part], batch.output_specs[part], batch.histories[part])
            memory.set_outputs(batch.output_rows[part], num_choices, is_head_only=begin > 0)
            self._run_step(0 if begin else batch.num_rows)
            rows += read_outputs(memory, positions[part], batch.output_specs[part])
        return rows

    def _run_step(self, num_rows: int) -> None:
        """Run the step that lies in memory, with as many threads as are fastest; 0 rows: only outputs of the last."""
        begin = time.monotonic()
        self._memory.set_threads(self._threads.at(begin))
        waited_share = self._workers.run_step()
        end = time.monotonic()
        self._threads.add(end, num_rows, end - begin, waited_share)

    def _run_in_parts(self, batch: StepBatch) -> list[RowOutput]:
        """Run a step with more rows than there is memory for; the parts of a sequence in order."""
        most = self._max_step_rows
        rows: dict[int, RowOutput] = {}
        for part in split_step(batch, max_rows=most, max_seq_rows=most, small_rows=None):
            rows.update(zip(part.outputs.tolist(), self._run(part.batch), strict=True))
        return [rows[output] for output in range(len(batch.output_rows))]

    def copy_blocks(self, block_pairs: Int32Array) -> None:
        """Copy whole blocks, all layers: int32 [n, 2] of (source, destination), destinations distinct."""
        self._pool.copy_blocks(block_pairs)

    def copy_slots(self, slot_pairs: Int32Array) -> None:
        """Copy single slots, all layers: int32 [n, 2] of (source, destination), read before any is written."""
        self._pool.copy_slots(slot_pairs)

    def read_blocks(self, block_ids: Int32Array) -> npt.NDArray[np.uint8]:
        """Return the raw bytes of blocks: uint8 [n, bytes_per_block], a copy."""
        return self._pool.read_blocks(block_ids)

    def write_blocks(self, block_ids: Int32Array, data: npt.NDArray[np.uint8]) -> None:
        """Overwrite blocks with raw bytes of the same shape as :meth:`read_blocks` returns."""
        self._pool.write_blocks(block_ids, data)

    def close(self) -> None:
        """End the threads and release weights and pool; the executor is not used again."""
        self._workers.close()
        del self._packed, self._pool, self._memory


def _describe(model: LoadedModel, options: CpuOptions) -> ExecutorInfo:
    plan = options.plan
    check_settings(model.config, model.torch_dtype, options.kv_memory_bytes, options.max_context, plan.block_size)
    num_bytes = bytes_per_block(model.config, plan.block_size, model.torch_dtype)
    description = describe(model, options.max_context)
    return ExecutorInfo(
        name=NAME,
        device="cpu",
        kv_dtype=model.dtype,
        block_size=plan.block_size,
        num_blocks=options.kv_memory_bytes // num_bytes,
        bytes_per_block=num_bytes,
        model=_packed(description, plan) if plan.is_quantised else description,
        supported_dtypes=("float32", "bfloat16", "int8", "int4"),
        fallback_reason=options.fallback_reason,
        kernel_set=kernel_set_id(plan),
        kernel_set_reason=options.reason,
    )


def _packed(description: ModelDescription, plan: Plan) -> ModelDescription:
    """Return the description of a model whose matrices are quantised, or packed as they are in the file."""
    if types := block_types(description.config):
        return replace(description, packed_types=types)
    return replace(description, dtype="int8" if plan.kind.bits == 8 else "int4")
