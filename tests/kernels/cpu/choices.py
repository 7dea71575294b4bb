"""Rows of logits from which the kernels choose tokens, without a model."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from numba import njit

from ferrule_server.executor.base import Float32Array, Int32Array, OutputSpec, RowOutput
from ferrule_server.executor.cpu.memory import StepMemory
from ferrule_server.executor.cpu.outputs import ask, read_outputs
from ferrule_server.executor.cpu.records import ThreadRecords
from ferrule_server.kernels.cpu.compiled import Wanted
from ferrule_server.kernels.cpu.plan import Plan
from ferrule_server.kernels.cpu.records import MODEL, RESULT_FIELDS, STAGE
from ferrule_server.kernels.cpu.sync import SyncBlock, reset
from tests.configs import uniform_config
from tests.executor.cpu.models import kernels_of

_KERNEL = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)


@njit
def _reset(sync):  # type: ignore[no-untyped-def]
    reset(sync, 1, 1)


class Rows:
    """Memory for up to ``num_rows`` rows of a vocabulary, and the kernel that chooses from them."""

    def __init__(self, plan: Plan, vocab_size: int, num_rows: int) -> None:
        config = uniform_config(architecture="LlamaForCausalLM", vocab_size=vocab_size, hidden_size=64, num_heads=2,
                                num_kv_heads=2, head_dim=32, intermediate_size=64, num_layers=1)  # fmt: skip
        self._memory = StepMemory(config, plan, max_rows=num_rows, max_context=64, num_threads=1)
        model, self._stage = np.zeros(1, MODEL), np.zeros(1, STAGE)
        model["vocab_size"] = vocab_size
        self._sync = SyncBlock(1)
        owner: Any = SimpleNamespace(address=model.ctypes.data, owned=model)
        self._threads = ThreadRecords(owner, self._memory, self._sync, 1)
        self._choose = _KERNEL(kernels_of(plan, Wanted((), (), (), ())).choose)
        self._num_rows = 0

    def write(self, logits: Float32Array) -> None:
        """Write the rows, as the head of a model does: [num_rows, vocab_size]."""
        memory, (self._num_rows, vocab_size) = self._memory, logits.shape
        memory.logits[: len(logits), :vocab_size] = logits
        memory.logits[: len(logits), vocab_size:] = -np.inf
        best = logits.argmax(1)
        memory.results[: len(logits), :2] = np.stack((best, logits[np.arange(len(logits)), best]), 1)

    def ask(
        self, positions: Sequence[int], specs: Sequence[OutputSpec], histories: Sequence[Int32Array | None]
    ) -> None:
        """Write how each token is chosen."""
        num_choices = ask(self._memory, positions, specs, histories)
        self._memory.set_outputs(np.arange(len(specs), dtype=np.int32), num_choices, is_head_only=False)

    def choose(self) -> None:
        """Choose the tokens of all rows."""
        _reset(self._sync.address)
        self._choose(None, self._threads.addresses[0], self._stage.ctypes.data)

    def results(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Return what the kernel has written of each row: token, its weight, that of all, whether it is the draft."""
        return self._memory.results[: self._num_rows, RESULT_FIELDS - 4 :].copy()

    def outputs(self, positions: Sequence[int], specs: Sequence[OutputSpec]) -> list[RowOutput]:
        """Return what an executor returns of each row."""
        return read_outputs(self._memory, positions, specs)
