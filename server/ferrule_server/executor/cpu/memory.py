"""The record of a step, and the memory that it names.

All memory is allocated here, once. A step writes its inputs into it and reads its results from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ferrule_server.executor.base import Float32Array, Int32Array, StepBatch
from ferrule_server.executor.cpu.tasks import Tasks
from ferrule_server.executor.cpu.units import GROUP, HeadUnits
from ferrule_server.kernels.cpu.activations import SCALE_BYTES
from ferrule_server.kernels.cpu.attention import TILE_TOKENS, attention_scratch_bytes, partial_bytes
from ferrule_server.kernels.cpu.experts import SEGMENT_BYTES
from ferrule_server.kernels.cpu.linear import MOST_BLOCK_ROWS
from ferrule_server.kernels.cpu.plan import Plan
from ferrule_server.kernels.cpu.records import BEST_BYTES, CHOICE, MOST_TOP, RESULT_FIELDS, STEP
from ferrule_server.kernels.matrix_kinds import TILE_INPUTS
from ferrule_server.model.config import Experts, ModelConfig
from ferrule_server.model.memory import new_tensor
from ferrule_server.model.rope import Rope

_PADDING_ROWS: Final = 32
"""Rows after the last one, which kernels read and never use."""
_PIECE_BYTES: Final = 256
_LOGIT_BYTES: Final = 32 << 20
"""Logits that exist at a time: 55 rows of 152 000."""
_MOST_OUTPUTS: Final = 64
_MOST_PARTIAL_BYTES: Final = 64 << 20
_LINE: Final = 64


def _inputs(size: int) -> int:
    return -(-size // TILE_INPUTS) * TILE_INPUTS


def _row_size(size: int, dtype: torch.dtype) -> int:
    """Return the elements from one row of inputs to the next.

    The same inputs of many rows are read together: an odd number of such pieces spreads them over the whole cache.
    """
    piece = _PIECE_BYTES // dtype.itemsize
    return (-(-size // piece) | 1) * piece


def _quantised(plan: Plan, size: int) -> int:
    """Return the width of quantised rows, their scales and sums included, as int16."""
    widest = _inputs(size)
    return widest + SCALE_BYTES // 2 * -(-widest // (plan.tiles_at_once * TILE_INPUTS))


def _groups(size: int) -> int:
    return -(-size // GROUP)


def ropes(config: ModelConfig) -> list[tuple[Rope | None, int]]:
    """Return the different rotations of the layers, with the width of heads."""
    return list(dict.fromkeys((kind.rope, kind.head_dim) for kind in config.layers))


class StepMemory:
    """The record of a step, and all its memory.

    Args:
        config: The network.
        plan: Of the kernels.
        max_rows: Rows of a step.
        max_context: Longest sequence in tokens.
        num_threads: Threads of a step.
        keeps_ups: Some layers need the outputs of ``up`` before those of ``gate``.

    Attributes:
        address: Of the record.
        vocab_size: Logits of a row.
        max_outputs: Outputs that are computed at a time.
        num_partials: Partials of attention that there is memory for.
        wants: int32 [max_outputs], what each output needs.
        targets: int32 [max_outputs], the token whose logit is needed; -1: none.
        top_counts: int32 [max_outputs], how many of the largest logits are needed.
        logits: float32 [max_outputs, at least vocab_size].
        results: float64 [max_outputs, RESULT_FIELDS].
        choices: CHOICE [max_outputs], how each token is chosen from the logits.
        kept: What the choices of this step refer to.
        all_tokens: uint8 [whole 64 of vocab_size], the mask that allows every token.
        queries: float32 [rows, num_heads * head_dim], what attention reads.
        inputs: Of linear layers, by name: ``normed``, ``attended`` and ``activated``, [rows, at least their width].
        top_ids: int32 [max_outputs, MOST_TOP].
        top_logits: float32 [max_outputs, MOST_TOP].
    """

    def __init__(
        self, config: ModelConfig, plan: Plan, *, max_rows: int, max_context: int, num_threads: int,
        keeps_ups: bool = False,
    ) -> None:  # fmt: skip
        self._kept: list[Tensor] = []
        self._made_rows: dict[str, Tensor] = {}
        self.kept: list[npt.NDArray[Any]] = []
        self.all_tokens = np.full(-(-config.vocab_size // 64) * 8, 255, np.uint8)
        self.inputs: dict[str, Tensor] = {}
        self._step = np.zeros(1, STEP)
        self.address = self._step.ctypes.data
        self._max_rows = max_rows
        self._input_type = torch.float32 if plan.has_wide_inputs else torch.bfloat16
        self._hidden_size, self.vocab_size = config.hidden_size, config.vocab_size
        self._temperature = config.query_temperature
        vocab = _groups(config.vocab_size) * GROUP
        self.max_outputs = max(1, min(_MOST_OUTPUTS, max_rows, _LOGIT_BYTES // (4 * vocab)))
        self.logits: Float32Array = self._new("logits", (self.max_outputs, vocab)).numpy()
        self._step["logit_bytes"] = 4 * vocab
        self._make_activations(config, plan, keeps_ups)
        self._make_outputs(config, num_threads)
        self._make_scratch(config, max_context, num_threads)
        self._rows = {
            name: self._new(name, (max_rows,), torch.int32).numpy()
            for name in ("token_ids", "positions", "slot_mapping", "begins", "ends", "output_rows")
        }
        if config.query_temperature is not None:
            self._rows["temperatures"] = self._new("temperatures", (max_rows,)).numpy()
        self._step["num_threads"] = num_threads

    def _new(self, name: str, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Return new memory of zeros, and put its address, a multiple of 64, into the record."""
        num_values = int(np.prod(shape))
        tensor = new_tensor((num_values * dtype.itemsize + _LINE,), torch.uint8)
        self._kept.append(tensor)
        begin = -tensor.data_ptr() % _LINE
        self._step[name] = tensor.data_ptr() + begin
        return tensor[begin : begin + num_values * dtype.itemsize].view(dtype).view(*shape)

    def _make_activations(self, config: ModelConfig, plan: Plan, keeps_ups: bool) -> None:
        rows = self._max_rows + _PADDING_ROWS
        query, inputs = config.num_heads * config.head_dim, config.per_layer_input
        size = 0 if inputs is None else inputs.size
        widths = {"normed": config.hidden_size, "attended": query, "activated": max(config.intermediate_size, size)}
        for name, width in widths.items():
            self.inputs[name] = self._make_inputs(name, rows, width)
        for name in ("normed", "attended"):
            self._step[f"{name}_bytes"] = self.rows_of(name)["input_bytes"]
        if plan.is_quantised:
            self._make_inputs("quantised", rows, _quantised(plan, max(widths.values())), torch.int16)
        if config.experts is not None:
            self._make_pairs(config, config.experts, plan, keeps_ups)
        self._new("hidden", (rows, config.hidden_size))
        if keeps_ups:
            self._keep("ups", (rows, _inputs(config.intermediate_size)))
        self.queries = self._new("queries", (rows, query))
        self._new("rotations", (rows, len(ropes(config)), config.head_dim))
        if config.has_norm_after or size:
            self._keep("added", (rows, config.hidden_size))
        if config.qk_norm == "row":
            self._new("keys", (rows, max(kind.num_kv_heads * kind.head_dim for kind in config.layers)))
        if size:
            self._keep("inputs", (rows, config.num_layers * size))

    def _make_inputs(self, name: str, rows: int, width: int, dtype: torch.dtype | None = None) -> Tensor:
        dtype = dtype or self._input_type
        memory = self._made_rows[name] = self._new(name, (rows, _row_size(width, dtype)), dtype)
        return memory

    def _make_pairs(self, config: ModelConfig, experts: Experts, plan: Plan, keeps_ups: bool) -> None:
        """Allocate what is between the stages of a mixture; inputs are copied whole, with the stride of their rows."""
        num_pairs, hidden = self._max_rows * experts.used, config.hidden_size
        for name in ("expert_ids", "expert_weights", "places", "pair_rows"):
            self._new(name, (num_pairs,), torch.int32)
        self._new("counts", (experts.count,), torch.int32)
        self._new("segments", (1 + experts.count + num_pairs // MOST_BLOCK_ROWS, SEGMENT_BYTES // 4), torch.int32)
        rows = num_pairs + _PADDING_ROWS
        self._make_inputs("pair_normed", rows, hidden)
        self._make_inputs("pair_activated", rows, experts.width)
        if plan.is_quantised:
            own = max(_quantised(plan, width) for width in (hidden, experts.width))
            width = self._made_rows["quantised"].shape[1]
            self._make_inputs("pair_quantised", rows, max(own, width), torch.int16)
        if keeps_ups:
            self._keep("pair_ups", (rows, _inputs(experts.width)))
        self._keep("pair_outs", (rows, hidden))
        self._keep("scores", (self._max_rows + _PADDING_ROWS, _groups(experts.count) * GROUP))

    def _make_outputs(self, config: ModelConfig, num_threads: int) -> None:
        count = self.max_outputs
        self.wants: Int32Array = self._new("wants", (count,), torch.int32).numpy()
        self.targets: Int32Array = self._new("targets", (count,), torch.int32).numpy()
        self.top_counts: Int32Array = self._new("top_counts", (count,), torch.int32).numpy()
        self.results: npt.NDArray[np.float64] = self._new("results", (count, RESULT_FIELDS), torch.float64).numpy()
        self.choices = self._new("choices", (count, CHOICE.itemsize), torch.uint8).numpy().view(CHOICE)[:, 0]
        top = self._new("top_results", (count, MOST_TOP, 2)).numpy()
        self.top_logits: Float32Array = top[:, :, 0]
        self.top_ids: Int32Array = top.view(np.int32)[:, :, 1]
        self._new("best", (num_threads, count, BEST_BYTES), torch.uint8)
        self._new("tops", (num_threads, count, MOST_TOP, 2))
        self._new("sums", (count, _groups(config.vocab_size), 4))

    def _make_scratch(self, config: ModelConfig, max_context: int, num_threads: int) -> None:
        groups = [(kind.head_dim, config.num_heads // kind.num_kv_heads) for kind in config.layers]
        attention = max(attention_scratch_bytes(*group) for group in groups)
        most = max(HeadUnits.of(kind.head_dim).groups for kind in config.layers)
        sums = (MOST_BLOCK_ROWS + _PADDING_ROWS) * 4 * GROUP * most
        size = -(-max(attention, sums) // 4096) * 4096
        self._new("scratch", (num_threads, size), torch.uint8)
        self._step["scratch_bytes"] = size
        one = max(partial_bytes(*group) for group in groups)
        wanted = 2 * config.num_kv_heads * -(-max_context // TILE_TOKENS)
        self.num_partials = min(wanted, _MOST_PARTIAL_BYTES // one) if num_threads > 1 else 0
        self._new("partials", (self.num_partials, one), torch.uint8)
        self._step["partial_bytes"] = one

    def _keep(self, name: str, shape: tuple[int, int]) -> None:
        """Allocate rows for what linear layers keep."""
        self._made_rows[name] = self._new(name, shape)

    def kept_in(self, name: str, first: int = 0, size: int | None = None) -> dict[str, int]:
        """Return where outputs are kept, as fields of a stage: ``size`` values of a row, from one on."""
        rows = self._made_rows[name]
        place = rows.data_ptr() + first * rows.itemsize
        size = rows.shape[1] if size is None else size
        return {"kept": place, "kept_bytes": rows.stride(0) * rows.itemsize, "size": size}

    def rows_of(self, name: str) -> dict[str, int]:
        """Return where the inputs of linear layers are, as fields of a stage: ``inputs`` and ``input_bytes``."""
        rows = self._made_rows[name]
        return {"inputs": rows.data_ptr(), "input_bytes": rows.stride(0) * rows.itemsize}

    def written_in(self, name: str) -> dict[str, int]:
        """Return the same for rows that are written: ``out`` and ``out_bytes``."""
        rows = self._made_rows[name]
        return {"out": rows.data_ptr(), "out_bytes": rows.stride(0) * rows.itemsize}

    def set_rows(self, batch: StepBatch, tasks: Tasks) -> None:
        """Write the rows of a step, at most ``max_rows``; the arrays stay in use until the next call."""
        step = self._step[0]
        tables = np.ascontiguousarray(batch.block_tables)
        self._arrays = (tables, tasks)
        for name in ("token_ids", "positions", "slot_mapping"):
            self._rows[name][: batch.num_rows] = getattr(batch, name)
        self._rows["ends"][: batch.num_rows] = batch.positions + 1
        if self._temperature is not None:
            growth = np.log1p(batch.positions // self._temperature.length)
            self._rows["temperatures"][: batch.num_rows] = 1 + self._temperature.beta * growth
        step["ancestors"] = 0
        step["num_rows"], step["is_head_only"] = batch.num_rows, 0
        step["block_tables"], step["table_width"] = tables.ctypes.data, tables.shape[1]
        step["tasks"], step["num_tasks"] = tasks.tasks.ctypes.data, len(tasks.tasks)
        step["merges"], step["num_merges"] = tasks.merges.ctypes.data, len(tasks.merges)

    def set_ancestors(self, begins: Int32Array, ends: Int32Array, ancestors: npt.NDArray[np.int64]) -> None:
        """Hide tokens from the rows of a step, after :meth:`set_rows`; the masks stay in use until the next call.

        Args:
            begins: int32 [num_rows], the token that bit 0 of a mask stands for: that of the sequence's first row.
            ends: int32 [num_rows], how many tokens of its sequence a row may see.
            ancestors: [num_rows], bit j: the row sees the j-th token from there on.
        """
        self._rows["begins"][: len(begins)], self._rows["ends"][: len(ends)] = begins, ends
        self._ancestors = ancestors
        self._step["ancestors"] = ancestors.ctypes.data

    def set_outputs(self, output_rows: Int32Array, num_choices: int, *, is_head_only: bool) -> None:
        """Write which rows the head computes, at most ``max_outputs``, and how many of ``choices`` choose a token."""
        step = self._step[0]
        self._rows["output_rows"][: len(output_rows)] = output_rows
        step["num_outputs"], step["is_head_only"], step["num_choices"] = len(output_rows), is_head_only, num_choices

    def set_threads(self, num_threads: int) -> None:
        """Write how many threads run the next step."""
        self._step["num_threads"] = num_threads

    def hidden_state(self, output: int) -> Float32Array:
        """Return a copy of the input of the head for one output: float32 [hidden_size]."""
        state: Float32Array = self.inputs["normed"][output, : self._hidden_size].float().numpy()
        return state.copy()
