"""An executor with a fast path: small sequences on the fast path, the rest in torch.

Torch and the fast path share the one queue of the :class:`Device`, so each sees what the other has written::

    no runner yet          torch runs every step
    gap after a decode     the runner is made; if that fails, torch runs every step    state.name torch
    from then on           small sequences on the fast path, long ones in torch        state.name that of the path
    a DeviceError          the runner is given up, its steps are run again in torch    state.fallback_reason
    any other error        the same, unless torch refuses the step too: then the step is at fault
    a DeviceGone           DeviceLost, now and at every later call

A step that failed halfway has written KV only to its own slots, and the second run writes all of them again.
Deterministic mode never uses torch: a DeviceError, or a capture that fails, becomes DeviceLost. Any other error ends
only its own step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from ferrule_server.errors import ConfigError
from ferrule_server.executor.base import (
    DeviceLost,
    Executor,
    ExecutorState,
    Int32Array,
    MemoryPlan,
    RowOutput,
    StepBatch,
    StepResult,
)
from ferrule_server.executor.fallback.device import Device, DeviceError, DeviceGone
from ferrule_server.executor.fallback.fast_path import FastPath, MakeRunner, Runner, sentence
from ferrule_server.executor.fallback.split import SMALL_ROWS, split_step
from ferrule_server.executor.fallback.submitted import SubmittedStep, fed_back

_MOST_PENDING = 2


class FallbackExecutor:
    """Implements ``executor.base.PipelinedExecutor``.

    Invariant: the pending steps are the last ones submitted, at most two, in order. Without a runner none is pending.

    Args:
        torch_executor: Uses the same device; owned from now on. The runner shares its weights and its pool.
        device: The device of both; owned from now on.
        name: Name of the executor while the fast path serves.
        make_runner: Makes the runner of the fast path; None: torch runs every step.
        reason: Why there is none although one was requested, for people.
        is_deterministic: Run everything on the fast path, which the constructor opens.
        memory: The uses of the device's memory.

    Attributes:
        info: The description of this executor; constant.

    Raises:
        ConfigError: The fast path cannot be opened in deterministic mode; the message says why.
    """

    def __init__(
        self,
        torch_executor: Executor,
        device: Device,
        *,
        name: str = "",
        make_runner: MakeRunner | None = None,
        reason: str = "",
        is_deterministic: bool = False,
        memory: MemoryPlan | None = None,
    ) -> None:
        self._torch = torch_executor
        self._device = device
        self._is_deterministic = is_deterministic
        self._memory = memory
        info = torch_executor.info
        self.info = replace(
            info,
            name=name if make_runner else info.name,
            device_name=self._device.name or info.device_name,
            fallback_reason=reason,
        )
        self._path = FastPath(name, self._device, make_runner, reason)
        self._has_decoded = False
        self._pending: deque[SubmittedStep] = deque()
        self._last: SubmittedStep | None = None
        self._num_torch_steps = 0
        self._lost = ""
        if is_deterministic:
            self._open_deterministic()

    @property
    def runner(self) -> Runner | None:
        """Runs steps on the fast path; None before the gap after the first decode, and after it was given up."""
        return self._path.runner

    @property
    def state(self) -> ExecutorState:
        """The current state; read from any thread."""
        allocated, peak = self._device.memory
        state = self._path.state(self._memory, self._num_torch_steps)
        return replace(state, device_allocated_bytes=allocated, device_peak_bytes=peak)

    # ---- steps ------------------------------------------------------------------------------------------------------

    def run(self, batch: StepBatch) -> StepResult:
        """Write the KV of the step's rows and return what its output rows request.

        Raises:
            DeviceLost: The device is gone permanently and no KV can be trusted.
        """
        self._settle()
        self._has_decoded |= batch.num_seqs > 0 and int(np.diff(batch.cu_seqlens_q).min()) <= SMALL_ROWS
        runner = self._path.runner
        if runner is None or not batch.num_rows:
            return self._run_in_torch(batch)
        small_rows = None if self._is_deterministic else SMALL_ROWS
        parts = split_step(batch, max_rows=runner.max_rows, max_seq_rows=runner.max_seq_rows, small_rows=small_rows)
        results = [self._run_fast(part.batch) if part.is_fast else self._run_in_torch(part.batch) for part in parts]
        if len(parts) == 1:
            return results[0]
        rows: dict[int, tuple[RowOutput, str]] = {}
        for part, result in zip(parts, results, strict=True):
            rows.update(zip(part.outputs.tolist(), zip(result.rows, result.paths, strict=True), strict=True))
        merged = [rows[output] for output in range(len(batch.output_rows))]
        return StepResult([row for row, _ in merged], [path for _, path in merged])

    def can_submit(self, batch: StepBatch) -> bool:
        """Return whether :meth:`submit` would accept this batch without waiting for the device."""
        runner = self._path.runner
        return (
            runner is not None
            and len(self._pending) < _MOST_PENDING
            and 0 < batch.num_rows == batch.num_seqs == len(batch.output_rows)
            and batch.num_rows <= runner.max_rows
            and self._would_accept(runner, batch)
        )

    def submit(self, batch: StepBatch) -> SubmittedStep:
        """Put a step that :meth:`can_submit` accepts into the device's queue; if that fails, torch runs it at once.

        Raises:
            DeviceLost: As :meth:`run`.
            ValueError: The batch uses tokens of the step submitted before, and there was none.
        """
        self._check()
        assert len(self._pending) < _MOST_PENDING, "two steps are pending; read the older one first"
        if batch.feedback is not None and (self._last is None or self._last.is_done):
            batch = fed_back(batch, self._last)
        step = SubmittedStep(batch, self._last, self._settle)
        self._pending.append(step)
        if self._path.runner is None:
            self._run_pending_again()
        else:
            self._enqueue(self._path.runner, step, batch)
        self._last = step
        return step

    def tend(self) -> bool:
        """Make the runner, or capture one graph, if one is due; return whether there is more to do.

        Raises:
            DeviceLost: As :meth:`run`.
        """
        self._check()
        if self._pending:
            return False
        try:
            if self._path.runner is not None:
                return self._path.runner.capture_next()
            if self._path.can_open and self._has_decoded:
                with self._on_device():
                    self._path.open()
        except DeviceLost:
            raise
        except Exception as error:  # noqa: BLE001 - torch serves instead; the device may still be capturing
            self._give_up(error)
        return self._path.runner is not None

    def _would_accept(self, runner: Runner, batch: StepBatch) -> bool:
        try:
            return runner.can_submit(batch)
        except Exception as error:  # noqa: BLE001 - a question must not fail
            if not self._is_deterministic:
                with suppress(DeviceLost):  # the next call raises it
                    self._give_up(error)
            return False

    def _enqueue(self, runner: Runner, step: SubmittedStep, batch: StepBatch) -> None:
        try:
            step.queued = runner.submit(batch)
        except Exception as error:  # noqa: BLE001 - after any error the step may run another way
            if isinstance(error, DeviceError):
                self._give_up(error)
                return
            self._pending.pop()
            self._settle()
            step.finish(self._run_instead(step.batch_for_host(), error))

    def _settle(self, step: SubmittedStep | None = None) -> None:
        """Complete a pending step and those before it; None: all, as nothing may come before a step runs again."""
        self._check()
        while self._pending if step is None else not step.is_done:
            self._read_oldest()

    def _read_oldest(self) -> None:
        step = self._pending[0]
        assert step.queued is not None
        try:
            result = step.queued.result()
        except Exception as error:  # noqa: BLE001 - torch runs it, or ``result`` raises the error
            if not self._is_deterministic or isinstance(error, DeviceError):
                self._give_up(error)
                return
            self._check_alive(error)
            step.fail(error)
        else:
            step.finish(result)
        self._pending.popleft()

    def _run_fast(self, batch: StepBatch) -> StepResult:
        """Run a step on the fast path if it is still there, else in torch; nothing is pending."""
        runner = self._path.runner
        try:
            if runner is not None:
                return runner.run(batch)
        except Exception as error:  # noqa: BLE001 - after any error the step may run another way
            if not isinstance(error, DeviceError):
                return self._run_instead(batch, error)
            self._give_up(error)
        return self._run_in_torch(batch)

    def _run_instead(self, batch: StepBatch, error: Exception) -> StepResult:
        """Run a step in torch after an error on the fast path that the device did not report; nothing is pending.

        If torch succeeds, the fault is in the fast path and would occur again, so the runner is given up. A temporary
        lack of memory is not a fault.

        Raises:
            DeviceLost: The device is gone, which caused the error.
            Exception: Torch refuses the step too, or must not run it: the step is the cause.
        """
        self._check_alive(error)
        if self._is_deterministic:
            raise error
        result = self._run_in_torch(batch)
        if self._path.runner is not None and not isinstance(error, torch.OutOfMemoryError):
            self._give_up(error)
        return result

    def _run_in_torch(self, batch: StepBatch) -> StepResult:
        with self._on_device():
            rows = self._torch.run(batch).rows
        self._num_torch_steps += batch.num_rows > 0
        return StepResult(rows, ("torch",) * len(rows))

    # ---- copies and transfers ---------------------------------------------------------------------------------------

    def copy_blocks(self, block_pairs: Int32Array) -> None:
        """Copy whole blocks, all layers: int32 [n, 2] of (source, destination), destinations distinct."""
        self._settle()
        with self._on_device():
            self._torch.copy_blocks(block_pairs)

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
        """Free the device; the executor is not used again. Errors are ignored."""
        self._pending.clear()
        self._path.close()
        self._torch.close()
        with suppress(Exception):
            self._device.close()

    # ---- when something fails ---------------------------------------------------------------------------------------

    def _open_deterministic(self) -> None:
        try:
            with self._on_device():
                self._path.open()
        except Exception as error:
            raise ConfigError(f"--deterministic needs the kernels: {sentence(error)}") from error

    def _give_up(self, error: Exception) -> None:
        """Give the fast path up permanently; torch runs the pending steps and all later ones.

        Raises:
            DeviceLost: Torch cannot continue either, or not with the same bits.
        """
        if isinstance(error, DeviceGone) or self._is_deterministic:
            raise self._lose(error) from error
        try:
            self._path.give_up(error)
        except DeviceGone as gone:
            raise self._lose(gone) from gone
        self._run_pending_again()

    def _run_pending_again(self) -> None:
        """Run the pending steps in torch, in order; each writes all KV that the fast path should have written."""
        while self._pending:
            step = self._pending[0]
            try:
                step.finish(self._run_in_torch(step.batch_for_host()))
            except DeviceLost:
                raise
            except Exception as error:  # noqa: BLE001 - ``result`` of the step raises the error
                step.fail(error)
            self._pending.popleft()

    def _check(self) -> None:
        """Raise DeviceLost if the device was lost before."""
        if self._lost:
            raise DeviceLost(self._lost)

    def _lose(self, error: Exception) -> DeviceLost:
        """Return the error to raise, now and at every later call."""
        self._lost = sentence(error)
        return DeviceLost(self._lost)

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """Order the work of torch in the body after the work of the fast path.

        Raises:
            DeviceLost: The device is gone permanently.
        """
        self._check()
        try:
            with self._device.current():
                yield
        except Exception as error:
            if self._device.translated(error) is not None:  # torch's libraries fail first, without the cause
                self._check_alive(error)
            raise

    def _check_alive(self, error: Exception) -> None:
        """Raise DeviceLost if the device is gone, even if the given error does not say so."""
        meant = self._device.translated(error)
        if isinstance(meant, DeviceGone):
            raise self._lose(meant) from error
        try:
            self._device.synchronize()
        except DeviceGone as gone:
            raise self._lose(gone) from error
        except Exception:  # noqa: BLE001 - the device is not gone, and the given error says more
            return
