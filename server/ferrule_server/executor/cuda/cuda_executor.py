"""The executor on a GPU: small steps on the kernels, the rest in torch, and torch alone once the kernels fail.

Everything goes through the one stream of the :class:`Gpu`, so that what the kernels wrote is there for torch and the
other way round, without anybody waiting::

    no kernels yet        torch runs every step, kernels are compiled meanwhile       state.name torch
    gap behind a decode   the runner is made; what fails here leaves it to torch
    from then on          small sequences on the kernels, long ones in torch          state.name numba-cuda
    a GpuError            the runner is given up, its steps are run again in torch    state.fallback_reason
    any other error       the same, unless torch refuses the step too: then it is the step's
    a GpuLost             DeviceLost, now and for every later call

A step that failed half way has written KV of its own slots only, and torch writes all of them again. Deterministic
mode has no torch: a GpuError, or a capture that fails, is DeviceLost; any other error is its step's alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from ferrule_server.errors import ConfigError
from ferrule_server.executor.base import (
    DeviceLost,
    Executor,
    ExecutorInfo,
    ExecutorState,
    Int32Array,
    MemoryPlan,
    RowOutput,
    StepBatch,
    StepResult,
)
from ferrule_server.executor.cuda.device_memory import device_memory
from ferrule_server.executor.cuda.gpu import Gpu, GpuError, GpuLost
from ferrule_server.executor.cuda.kernel_build import KernelBuild
from ferrule_server.executor.cuda.kernel_path import NAME, KernelPath, MakeRunner, Runner, sentence
from ferrule_server.executor.cuda.split import SMALL_ROWS, Part, split_step
from ferrule_server.executor.cuda.submitted import SubmittedStep, fed_back
from ferrule_server.executor.cuda.torch_gpu import translated

__all__ = ["CudaExecutor"]

_MOST_PENDING = 2


class CudaExecutor:
    """Implements ``executor.base.PipelinedExecutor``.

    Invariant: steps that are pending are the last ones submitted, at most two, in order; only with a runner are there
    any.

    Args:
        torch_executor: On the same device; owned from now on. Its weights and its pool are the runner's too.
        gpu: The device; None where there is none. Owned from now on.
        build: The kernels, started; None: only torch. Owned from now on.
        make_runner: Makes the runner of the kernels.
        reason: Why there is no build although one was wanted, for people.
        is_deterministic: Run everything on the kernels, or nothing at all: they are waited for here.
        memory: What the device's memory is for.

    Raises:
        ConfigError: It cannot be deterministic; the message says why.
    """

    def __init__(
        self,
        torch_executor: Executor,
        gpu: Gpu | None,
        *,
        build: KernelBuild | None = None,
        make_runner: MakeRunner | None = None,
        reason: str = "",
        is_deterministic: bool = False,
        memory: MemoryPlan | None = None,
    ) -> None:
        self._torch = torch_executor
        self._gpu = gpu
        self._is_deterministic = is_deterministic
        self._memory = memory
        self._info = replace(
            torch_executor.info,
            name=NAME if build else torch_executor.info.name,
            device_name=gpu.info.name if gpu else torch_executor.info.device_name,
            fallback_reason=reason,
        )
        self._kernels = KernelPath(gpu, build, make_runner, reason)
        self._has_decoded = False
        self._pending: deque[SubmittedStep] = deque()
        self._last: SubmittedStep | None = None
        self._num_torch_steps = 0
        self._lost = ""
        if is_deterministic:
            self._open_deterministic()

    @property
    def info(self) -> ExecutorInfo:
        """What this executor is; constant."""
        return self._info

    @property
    def runner(self) -> Runner | None:
        """What runs steps on the kernels; None before the gap behind the first decode, and once it was given up."""
        return self._kernels.runner

    @property
    def state(self) -> ExecutorState:
        """What it is doing and how; from any thread."""
        allocated, peak = device_memory(self._info.device)
        state = self._kernels.state(self._memory, self._num_torch_steps)
        return replace(state, device_allocated_bytes=allocated, device_peak_bytes=peak)

    # ---- steps ------------------------------------------------------------------------------------------------------

    def run(self, batch: StepBatch) -> StepResult:
        """Write the KV of the step's rows and return what its output rows asked for.

        Raises:
            DeviceLost: The device is gone for good and no KV can be trusted.
        """
        self._settle()
        self._has_decoded |= _has_small_sequence(batch)
        runner = self._kernels.runner
        if runner is None or not batch.num_rows:
            return StepResult(self._run_in_torch(batch))
        rows: list[RowOutput | None] = [None] * len(batch.output_rows)
        for part in split_step(batch, max_rows=runner.max_rows, is_deterministic=self._is_deterministic):
            for output, row in zip(part.outputs.tolist(), self._run_part(part), strict=True):
                rows[output] = row
        return StepResult([row for row in rows if row is not None])

    def can_submit(self, batch: StepBatch) -> bool:
        """Return whether :meth:`submit` would take this batch without waiting for the device."""
        runner = self._kernels.runner
        return (
            runner is not None
            and len(self._pending) < _MOST_PENDING
            and 0 < batch.num_rows == batch.num_seqs == len(batch.output_rows)
            and batch.num_rows <= runner.max_rows
            and self._would_take(runner, batch)
        )

    def submit(self, batch: StepBatch) -> SubmittedStep:
        """Put a step that :meth:`can_submit` into the device's queue; torch runs it at once where the kernels fail.

        Raises:
            DeviceLost: As :meth:`run`.
            ValueError: The batch takes tokens of the step submitted before, and there was none.
        """
        self._check()
        assert len(self._pending) < _MOST_PENDING, "two steps are pending; read the older one first"
        if batch.feedback is not None and (self._last is None or self._last.is_done):
            batch = fed_back(batch, self._last)
        step = SubmittedStep(batch, self._last, self._read)
        self._pending.append(step)
        if self._kernels.runner is None:
            self._run_pending_again()
        else:
            self._enqueue(self._kernels.runner, step, batch)
        self._last = step
        return step

    def tend(self) -> bool:
        """Make the runner, or capture one graph, where that is wanted; return whether there is more to do.

        Raises:
            DeviceLost: As :meth:`run`.
        """
        self._check()
        if self._pending:
            return False
        runner = self._kernels.runner
        try:
            if runner is not None:
                return runner.capture_next()
        except Exception as error:  # noqa: BLE001 - whatever it is, the stream may still be capturing
            self._give_up(error)
            return False
        if self._has_decoded or self._kernels.is_blocked:
            return self._ready_runner() is not None
        return False

    def _would_take(self, runner: Runner, batch: StepBatch) -> bool:
        try:
            return runner.can_submit(batch)
        except Exception as error:  # noqa: BLE001 - nobody expects this call to fail
            if not self._is_deterministic:
                with suppress(DeviceLost):  # the next call says so
                    self._give_up(error)
            return False

    def _enqueue(self, runner: Runner, step: SubmittedStep, batch: StepBatch) -> None:
        try:
            step.queued = runner.submit(batch)
        except GpuError as error:
            self._give_up(error)
        except Exception as error:  # noqa: BLE001 - whatever it is, torch may do it
            self._pending.pop()
            self._settle()
            step.finish(self._run_instead(step.batch_for_host(), error))

    def _read(self, step: SubmittedStep) -> None:
        """Make a pending step done, and those before it."""
        self._check()
        while not step.is_done:
            self._read_oldest()

    def _settle(self) -> None:
        """Make every pending step done: what follows must not come between a step and its second run."""
        self._check()
        while self._pending:
            self._read_oldest()

    def _read_oldest(self) -> None:
        step = self._pending[0]
        assert step.queued is not None
        try:
            rows = step.queued.result()
        except Exception as error:  # noqa: BLE001 - torch does it, or whoever asks for the step is told
            if not self._is_deterministic or isinstance(error, GpuError):
                self._give_up(error)
                return
            self._check_alive(error)
            step.fail(error)
        else:
            step.finish(rows)
        self._pending.popleft()

    def _run_part(self, part: Part) -> list[RowOutput]:
        runner = self._kernels.runner
        if not part.is_for_kernels or runner is None:
            return self._run_in_torch(part.batch)
        try:
            return runner.run(part.batch)
        except GpuError as error:
            self._give_up(error)
            return self._run_in_torch(part.batch)
        except Exception as error:  # noqa: BLE001 - whatever it is, torch may do it
            return self._run_instead(part.batch, error)

    def _run_instead(self, batch: StepBatch, error: Exception) -> list[RowOutput]:
        """Run in torch what failed on the kernels although the GPU refused nothing; nothing is pending.

        Where torch does it, the fault is ours, and would be there in the next step too: the runner is given up. Only
        memory that was short for a while is nobody's fault.

        Raises:
            DeviceLost: The device is gone: that was why.
            Exception: Torch refuses it as well, or may not do it: the step is to blame.
        """
        self._check_alive(error)
        if self._is_deterministic:
            raise error
        rows = self._run_in_torch(batch)
        if self._kernels.runner is not None and not isinstance(error, torch.OutOfMemoryError):
            self._give_up(error)
        return rows

    def _run_in_torch(self, batch: StepBatch) -> list[RowOutput]:
        with self._on_device():
            rows = self._torch.run(batch).rows
        self._num_torch_steps += batch.num_rows > 0
        return rows

    # ---- copies and transfers ---------------------------------------------------------------------------------------

    def copy_blocks(self, block_pairs: Int32Array) -> None:
        """Copy whole blocks, all layers: int32 [n, 2] of (source, destination), destinations distinct."""
        self._settle()
        runner = self._kernels.runner
        if runner is None or not self._has_copied(runner, block_pairs):
            with self._on_device():
                self._torch.copy_blocks(block_pairs)

    def _has_copied(self, runner: Runner, block_pairs: Int32Array) -> bool:
        """Whether the kernel took the copies; where it did not, torch may make all of them anew.

        Raises:
            DeviceLost: The device is gone, or torch may not go on.
        """
        try:
            runner.copy_blocks(block_pairs)
        except Exception as error:  # noqa: BLE001 - whatever it is, torch copies the same bytes
            self._check_alive(error)
            self._give_up(error)
            return False
        return True

    def copy_slots(self, slot_pairs: Int32Array) -> None:
        """Copy single slots, all layers: int32 [n, 2] of (source, destination), read before any is written."""
        self._settle()
        with self._on_device():
            self._torch.copy_slots(slot_pairs)

    def read_blocks(self, block_ids: Int32Array) -> npt.NDArray[np.uint8]:
        """Return the raw bytes of blocks: uint8 [n, bytes_per_block], a copy."""
        self._settle()
        with self._on_device():
            return self._torch.read_blocks(block_ids)

    def write_blocks(self, block_ids: Int32Array, data: npt.NDArray[np.uint8]) -> None:
        """Overwrite blocks with raw bytes of the same shape as :meth:`read_blocks` returns."""
        self._settle()
        with self._on_device():
            self._torch.write_blocks(block_ids, data)

    def close(self) -> None:
        """Free the device; the executor is not used again. What fails meanwhile does not matter any more."""
        self._pending.clear()
        self._kernels.close()
        self._torch.close()
        if self._gpu is not None:
            with suppress(Exception):
                self._gpu.close()

    # ---- when something fails ---------------------------------------------------------------------------------------

    def _ready_runner(self) -> Runner | None:
        """Return the runner, made now where its kernels have come; None where there is none, yet or for good."""
        if self._kernels.is_opening:
            try:
                with self._on_device():
                    self._kernels.open()
            except DeviceLost:
                raise
            except Exception as error:  # noqa: BLE001 - whatever keeps the kernels away, torch serves
                self._give_up(error)
        return self._kernels.runner

    def _open_deterministic(self) -> None:
        try:
            with self._on_device():
                self._kernels.open()
        except Exception as error:
            raise ConfigError(f"--deterministic needs the GPU kernels: {sentence(error)}") from error

    def _give_up(self, error: Exception) -> None:
        """Leave everything to torch for good, the steps that are pending first.

        Raises:
            DeviceLost: Torch could not go on either, or not with the same bits.
        """
        if isinstance(error, GpuLost) or self._is_deterministic:
            raise self._lose(error) from error
        try:
            self._kernels.give_up(error)
        except GpuLost as lost:
            raise self._lose(lost) from lost
        self._run_pending_again()

    def _run_pending_again(self) -> None:
        """Run the steps that are pending in torch, in order: each writes all the KV that the kernels were to write."""
        while self._pending:
            step = self._pending[0]
            try:
                step.finish(self._run_in_torch(step.batch_for_host()))
            except DeviceLost:
                raise
            except Exception as error:  # noqa: BLE001 - whoever asks for the step is told
                step.fail(error)
            self._pending.popleft()

    def _check(self) -> None:
        """Raise DeviceLost where the device was lost before."""
        if self._lost:
            raise DeviceLost(self._lost)

    def _lose(self, error: Exception) -> DeviceLost:
        """Return what to raise, now and at every later call."""
        self._lost = sentence(error)
        return DeviceLost(self._lost)

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """Put what torch does inside into the stream.

        Raises:
            DeviceLost: The device is gone, for good.
        """
        self._check()
        try:
            with nullcontext() if self._gpu is None else self._gpu.current():
                yield
        except Exception as error:
            self._check_lost_by(error)
            raise

    def _check_lost_by(self, error: Exception) -> None:
        """Raise DeviceLost where that is what an error means: torch's libraries fail first and do not say so."""
        if translated(error) is not None:
            self._check_alive(error)

    def _check_alive(self, error: Exception) -> None:
        """Raise DeviceLost where the device is gone, whatever an error says."""
        meant = translated(error)
        if isinstance(meant, GpuLost):
            raise self._lose(meant) from error
        if self._gpu is None:
            return
        try:
            self._gpu.synchronize()
        except GpuLost as lost:
            raise self._lose(lost) from error
        except Exception:  # noqa: BLE001 - it is not gone; whatever is wrong, the error tells more
            return


def _has_small_sequence(batch: StepBatch) -> bool:
    return batch.num_seqs > 0 and int(np.diff(batch.cu_seqlens_q).min()) <= SMALL_ROWS
