"""Whole rows of logits and hidden states on their way to the host: one gather and one copy of each for a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ferrule_server.executor.base import Int32Array, RowOutput, StepBatch
from ferrule_server.executor.cuda.buffers import DecodeBuffers
from ferrule_server.executor.cuda.gpu import Gpu
from ferrule_server.executor.cuda.layout import Array

_FLAGS = {"logits": "full_logits", "hidden_state": "hidden_state"}
"""The field of ``OutputSpec`` that asks for each field of ``RowOutput``."""


class RowCopies:
    """Copies the rows that the outputs of a step return as a whole.

    The pinned memory that they arrive in grows to what the largest step has asked for. Rows that do not follow one
    another are gathered in a buffer that nothing else of their step needs any more.

    Args:
        gpu: Whose stream copies.
        buffers: That steps leave their rows in.
    """

    def __init__(self, gpu: Gpu, buffers: DecodeBuffers) -> None:
        self._gpu = gpu
        self._sources = {
            "logits": (buffers.logits[: buffers.limits.max_rows], buffers.shaped),
            "hidden_state": (buffers.normed, buffers.hidden),
        }
        self._memory = {name: torch.empty(0, dtype=torch.uint8) for name in _FLAGS}
        self._inputs = buffers.input
        self._wanted: dict[str, tuple[list[int], Int32Array]] = {}
        self._arriving: dict[str, tuple[list[int], Tensor]] = {}

    def fill(self, arrays: Mapping[str, Array], batch: StepBatch) -> None:
        """Write into the inputs of a step which rows are copied."""
        self._wanted = {}
        for name, flag in _FLAGS.items():
            outputs = [i for i, spec in enumerate(batch.output_specs) if getattr(spec, flag)]
            if outputs:
                places = batch.output_rows[outputs]
                arrays[f"{name}_rows"][: len(places)] = places
                self._wanted[name] = outputs, places

    def put(self) -> None:
        """Put the copies of the step that was filled in last into the stream, after its kernels.

        Raises:
            GpuError: The stream refused one, or memory is short.
        """
        self._arriving = {
            name: (outputs, self._download(name, self._gathered(name, places)))
            for name, (outputs, places) in self._wanted.items()
        }

    def hand_out(self, outputs: Sequence[RowOutput]) -> None:
        """Fill in the rows of the last :meth:`put`, which have arrived, copied, so that nothing overwrites them."""
        for name, (indices, rows) in self._arriving.items():
            for i, row in zip(indices, rows, strict=True):
                if outputs[i].is_finite:
                    setattr(outputs[i], name, row.float().numpy().copy())
        self._arriving = {}

    @torch.inference_mode()
    def _gathered(self, name: str, places: Int32Array) -> Tensor:
        """Return rows one after the other, without a copy where they follow one another."""
        source, scratch = self._sources[name]
        first = int(places[0])
        if int(places[-1]) - first == len(places) - 1:
            return source[first : first + len(places)]
        with self._gpu.current():
            index = self._inputs[f"{name}_rows"][: len(places)]
            return torch.index_select(source, 0, index, out=scratch[: len(places)])

    def _download(self, name: str, rows: Tensor) -> Tensor:
        """Put a copy of contiguous rows into the stream; return where they arrive."""
        if self._memory[name].numel() < rows.nbytes:
            num_bytes = max(rows.nbytes, 2 * self._memory[name].numel())
            self._memory[name] = self._gpu.allocate_pinned(f"copied {name}", num_bytes)
        target = self._memory[name][: rows.nbytes]
        self._gpu.download(target, rows.view(torch.uint8).view(-1))
        return target.view(rows.dtype).view(rows.shape)
