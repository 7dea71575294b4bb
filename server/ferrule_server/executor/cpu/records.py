"""The records that the kernels read, and the memory that they name: a model's, and that of a step.

All memory is allocated here, once. A step writes its inputs into it and reads its results from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from ferrule_server.executor.base import Float32Array, Int32Array, StepBatch
from ferrule_server.executor.cpu.tasks import Tasks
from ferrule_server.executor.cpu.weights import HeadUnits, Packed, PackedMatrix, PackedModel
from ferrule_server.kernels.cpu.activations import SCALE_BYTES
from ferrule_server.kernels.cpu.attention import TILE_TOKENS, attention_scratch_bytes, partial_bytes
from ferrule_server.kernels.cpu.compiled import Kernels
from ferrule_server.kernels.cpu.dot import GROUP, TILE_INPUTS
from ferrule_server.kernels.cpu.linear import MOST_BLOCK_ROWS
from ferrule_server.kernels.cpu.plan import Plan
from ferrule_server.kernels.cpu.records import BEST_BYTES, LAYER, MODEL, MOST_TOP, RESULT_FIELDS, STEP
from ferrule_server.kernels.cpu.step import num_stages
from ferrule_server.model.attention import attention_layers
from ferrule_server.model.config import ModelConfig
from ferrule_server.model.memory import new_tensor
from ferrule_server.model.rope import Rope, inverse_frequencies, magnitudes
from ferrule_server.model.tensors import LAYER_PARTS, MODEL_PARTS

__all__ = ["ModelRecord", "StepMemory"]

_PADDING_ROWS: Final = 32
"""Rows behind the last that kernels read, and never use."""
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


def _groups(size: int) -> int:
    return -(-size // GROUP)


class ModelRecord:
    """The record of a model and of its layers.

    Args:
        config: The network.
        packed: Its weights; kept.
        pools: The KV pool of each of ``config.kv_groups``; kept.
        kernels: The machine code; kept.

    Attributes:
        address: Of the record.
        num_stages: The most stages of a step.
    """

    def __init__(self, config: ModelConfig, packed: PackedModel, pools: Sequence[Tensor], kernels: Kernels) -> None:
        tables = torch.stack([_rotation_table(*rope, config.head_dim) for rope in _ropes(config)])
        self._kept = (packed, pools, kernels, tables)
        self._layers = np.zeros(config.num_layers, LAYER)
        self._model = np.zeros(1, MODEL)
        for index, layer in enumerate(packed.layers):
            values = _weights_of(layer) | _sizes_of(config, index) | _places_of(config, index, pools, kernels)
            _fill(self._layers[index : index + 1], values)
        size = config.per_layer_input.size if config.per_layer_input is not None else 0
        sizes = {
            "num_layers": config.num_layers,
            "hidden_size": config.hidden_size,
            "num_heads": config.num_heads,
            "head_dim": config.head_dim,
            "num_rotations": len(tables),
            "vocab_size": config.vocab_size,
            "input_size": size,
            "is_tied": config.is_tied,
            "hidden_tiles": _inputs(config.hidden_size) // TILE_INPUTS,
            "input_tiles": _inputs(size) // TILE_INPUTS,
            "num_hidden_units": _groups(config.hidden_size),
            "num_input_units": _groups(size),
            "num_head_units": _groups(config.vocab_size),
        }
        addresses = {
            **{part.name: _address(packed.parts.get(part.name)) for part in MODEL_PARTS},
            "head": _address(packed.parts["embedding" if config.is_tied else "head"]),
            "layers": self._layers.ctypes.data,
            "rotations": tables.data_ptr(),
            "linear_kernel": kernels.linear,
        }
        _fill(self._model, {**sizes, **addresses, **_features(config, pools[0].dtype)})
        self.address = self._model.ctypes.data
        self.num_stages = num_stages(config.num_layers)


def _address(weight: Tensor | PackedMatrix | None) -> int:
    tensor = weight.data if isinstance(weight, PackedMatrix) else weight
    return 0 if tensor is None else tensor.data_ptr()


def _weights_of(layer: Packed) -> dict[str, Any]:
    """Return the addresses of the weights of a layer, and the number that it multiplies the residual stream by."""
    addresses = {part.name: _address(layer.get(part.name)) for part in LAYER_PARTS}
    del addresses["sinks"]
    addresses["out"], addresses["out_bias"] = addresses.pop("attention_out"), addresses.pop("attention_out_bias")
    scale = layer.get("scale")
    return addresses | {"scale": scale.item() if isinstance(scale, Tensor) else 1.0}


def _sizes_of(config: ModelConfig, index: int) -> dict[str, Any]:
    """Return the fields of a layer's record that follow from its kind."""
    kind = config.layers[index]
    units = HeadUnits.of(config, kind)
    return {
        "head_dim": kind.head_dim,
        "num_kv_heads": kind.num_kv_heads,
        "num_queries_per_kv": config.num_heads // kind.num_kv_heads,
        "is_value_key": kind.is_value_key,
        "num_projected_heads": units.num_heads,
        "heads_at_once": units.heads,
        "groups_at_once": units.groups,
        "head_stride": units.stride,
        "num_qkv_units": units.count,
        "query_tiles": _inputs(config.num_heads * kind.head_dim) // TILE_INPUTS,
        "intermediate_tiles": _inputs(kind.intermediate_size) // TILE_INPUTS,
        "num_activated_units": _groups((2 if config.is_gated else 1) * kind.intermediate_size),
        "rotation_offset": _ropes(config).index((kind.rope, kind.head_dim)) * 4 * config.head_dim,
        "window": kind.window,
        "input_offset": index * config.per_layer_input.size if config.per_layer_input is not None else 0,
        "score_scale": kind.score_scale,
    }


def _places_of(config: ModelConfig, index: int, pools: Sequence[Tensor], kernels: Kernels) -> dict[str, Any]:
    """Return the fields of a layer's record that say where its K and V are, and what attends to them."""
    number, place, _ = attention_layers(config)[index]
    pool = pools[number]
    attend, merge = kernels.attention[config.layers[index].head_dim]
    return {
        "pool": pool.data_ptr(),
        "pool_offset": place * pool.stride(1) * pool.itemsize,
        "block_bytes": pool.stride(0) * pool.itemsize,
        "head_bytes": pool.stride(3) * pool.itemsize,
        "attend_kernel": attend,
        "merge_kernel": merge,
    }


def _ropes(config: ModelConfig) -> list[tuple[Rope | None, int]]:
    """Return the different rotations of the layers, with the width of heads."""
    return list(dict.fromkeys((kind.rope, kind.head_dim) for kind in config.layers))


def _rotation_table(rope: Rope | None, head_dim: int, widest: int) -> Tensor:
    """Return frequency and magnitude of each pair, and zeros: float32 [2, widest / 2]."""
    table = torch.stack((inverse_frequencies(rope, head_dim), magnitudes(rope, head_dim)))
    return F.pad(table, (0, (widest - head_dim) // 2))


def _features(config: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Return the fields of a model's record that are not sizes or addresses."""
    inputs = config.per_layer_input
    return {
        "has_layer_norm": config.has_layer_norm,
        "has_norm_after": config.has_norm_after,
        "has_row_norm": config.qk_norm == "row",
        "has_v_norm": config.has_v_norm,
        "is_parallel": config.is_parallel,
        "is_gated": config.is_gated,
        "is_gelu": config.activation == "gelu_tanh",
        "norm_eps": config.norm_eps,
        "embedding_scale": torch.tensor(config.embedding_scale, dtype=dtype).item(),
        "residual_scale": config.residual_scale,
        "score_softcap": config.score_softcap,
        "logit_scale": config.logit_scale,
        "logit_softcap": config.logit_softcap,
        "input_scale": 0.0 if inputs is None else torch.tensor(inputs.size**0.5, dtype=dtype).item(),
        "projection_scale": config.hidden_size**-0.5,
    }


def _fill(record: npt.NDArray[Any], values: dict[str, Any]) -> None:
    """Set every field of a record."""
    assert record.dtype.names is not None
    assert set(values) == set(record.dtype.names), set(values) ^ set(record.dtype.names)
    for name, value in values.items():
        record[name] = value


class StepMemory:
    """The record of a step, and all its memory.

    Args:
        config: The network.
        plan: Of the kernels.
        max_rows: Rows of a step.
        max_context: Longest sequence in tokens.
        num_threads: Threads of a step.

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
        queries: float32 [rows, num_heads * head_dim], what attention reads.
        top_ids: int32 [max_outputs, MOST_TOP].
        top_logits: float32 [max_outputs, MOST_TOP].
    """

    def __init__(self, config: ModelConfig, plan: Plan, *, max_rows: int, max_context: int, num_threads: int) -> None:
        self._kept: list[Tensor] = []
        self._inputs: dict[str, Tensor] = {}
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
        self._make_activations(config, plan)
        self._make_outputs(config, num_threads)
        self._make_scratch(config, max_context, num_threads)
        self._rows = {
            name: self._new(name, (max_rows,), torch.int32).numpy()
            for name in ("token_ids", "positions", "slot_mapping", "begins", "ends", "output_rows")
        }
        if config.query_temperature is not None:
            self._rows["temperatures"] = self._new("temperatures", (max_rows,)).numpy()
        self._step["num_threads"] = num_threads
        self._step["num_stages"] = num_stages(config.num_layers)

    def _new(self, name: str, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Return new memory of zeros, and put its address, a multiple of 64, into the record."""
        num_values = int(np.prod(shape))
        tensor = new_tensor((num_values * dtype.itemsize + _LINE,), torch.uint8)
        self._kept.append(tensor)
        begin = -tensor.data_ptr() % _LINE
        self._step[name] = tensor.data_ptr() + begin
        return tensor[begin : begin + num_values * dtype.itemsize].view(dtype).view(*shape)

    def _make_activations(self, config: ModelConfig, plan: Plan) -> None:
        rows = self._max_rows + _PADDING_ROWS
        query, inputs = config.num_heads * config.head_dim, config.per_layer_input
        size = 0 if inputs is None else inputs.size
        widths = {"normed": config.hidden_size, "attended": query, "activated": max(config.intermediate_size, size)}
        for name, width in widths.items():
            memory = self._new(name, (rows, _row_size(width, self._input_type)), self._input_type)
            self._step[f"{name}_bytes"] = memory.stride(0) * memory.itemsize
            self._inputs[name] = memory
        if plan.is_quantised:
            widest = _inputs(max(widths.values()))
            num_scales = -(-widest // (plan.tiles_at_once * TILE_INPUTS))
            width = widest + SCALE_BYTES // 2 * num_scales
            memory = self._new("quantised", (rows, _row_size(width, torch.int16)), torch.int16)
            self._step["quantised_bytes"] = memory.stride(0) * memory.itemsize
        self._new("hidden", (rows, config.hidden_size))
        self.queries = self._new("queries", (rows, query))
        self._new("rotations", (rows, len(_ropes(config)), config.head_dim))
        if config.has_norm_after or size:
            self._new("added", (rows, config.hidden_size))
        if config.qk_norm == "row":
            self._new("keys", (rows, max(kind.num_kv_heads * kind.head_dim for kind in config.layers)))
        if size:
            self._new("inputs", (rows, config.num_layers * size))

    def _make_outputs(self, config: ModelConfig, num_threads: int) -> None:
        count = self.max_outputs
        self.wants: Int32Array = self._new("wants", (count,), torch.int32).numpy()
        self.targets: Int32Array = self._new("targets", (count,), torch.int32).numpy()
        self.top_counts: Int32Array = self._new("top_counts", (count,), torch.int32).numpy()
        self.results: npt.NDArray[np.float64] = self._new("results", (count, RESULT_FIELDS), torch.float64).numpy()
        top = self._new("top_results", (count, MOST_TOP, 2)).numpy()
        self.top_logits: Float32Array = top[:, :, 0]
        self.top_ids: Int32Array = top.view(np.int32)[:, :, 1]
        self._new("best", (num_threads, count, BEST_BYTES), torch.uint8)
        self._new("tops", (num_threads, count, MOST_TOP, 2))
        self._new("sums", (count, _groups(config.vocab_size), 4))

    def _make_scratch(self, config: ModelConfig, max_context: int, num_threads: int) -> None:
        groups = [(kind.head_dim, config.num_heads // kind.num_kv_heads) for kind in config.layers]
        attention = max(attention_scratch_bytes(*group) for group in groups)
        most = max(HeadUnits.of(config, kind).groups for kind in config.layers)
        sums = (MOST_BLOCK_ROWS + _PADDING_ROWS) * 4 * GROUP * most
        size = -(-max(attention, sums) // 4096) * 4096
        self._new("scratch", (num_threads, size), torch.uint8)
        self._step["scratch_bytes"] = size
        one = max(partial_bytes(*group) for group in groups)
        wanted = 2 * config.num_kv_heads * -(-max_context // TILE_TOKENS)
        self.num_partials = min(wanted, _MOST_PARTIAL_BYTES // one) if num_threads > 1 else 0
        self._new("partials", (self.num_partials, one), torch.uint8)
        self._step["partial_bytes"] = one

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

    def set_outputs(self, output_rows: Int32Array, *, is_head_only: bool) -> None:
        """Write which rows the head computes, at most ``max_outputs``."""
        step = self._step[0]
        self._rows["output_rows"][: len(output_rows)] = output_rows
        step["num_outputs"], step["is_head_only"] = len(output_rows), is_head_only

    def set_threads(self, num_threads: int) -> None:
        """Write how many threads run the next step."""
        self._step["num_threads"] = num_threads

    @property
    def attended(self) -> Tensor:
        """What attention writes: [rows, at least num_heads * head_dim]."""
        return self._inputs["attended"]

    def hidden_state(self, output: int) -> Float32Array:
        """Return a copy of the input of the head for one output: float32 [hidden_size]."""
        state: Float32Array = self._inputs["normed"][output, : self._hidden_size].float().numpy()
        return state.copy()
