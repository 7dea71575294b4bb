"""The records that the kernels read: of a model, its layers and stages, and of the threads that run it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from ferrule_server.executor.cpu.memory import StepMemory, ropes
from ferrule_server.executor.cpu.stages import address_of, list_stages
from ferrule_server.executor.cpu.units import HeadUnits
from ferrule_server.executor.cpu.weights import Packed, PackedModel
from ferrule_server.kernels.cpu.choice import NUM_BINS, RUN
from ferrule_server.kernels.cpu.compiled import Kernels
from ferrule_server.kernels.cpu.records import LAYER, MODEL, THREAD
from ferrule_server.kernels.cpu.sync import SyncBlock
from ferrule_server.model.attention import attention_layers
from ferrule_server.model.config import Experts, LayerKind, ModelConfig
from ferrule_server.model.memory import new_tensor
from ferrule_server.model.rope import Rope, rotation_table


class ModelRecord:
    """The record of a model, of its layers and of its stages.

    Args:
        config: The network.
        packed: Its weights; kept.
        pools: The KV pool of each of ``config.kv_groups``; kept.
        kernels: The machine code; kept.
        memory: Of the steps; kept.

    Attributes:
        address: Of the record.
        num_claims: Stages of a step in which work is claimed.
    """

    def __init__(
        self, config: ModelConfig, packed: PackedModel, pools: Sequence[Tensor], kernels: Kernels, memory: StepMemory
    ) -> None:
        tables = torch.stack([_rotation_table(*rope, config.head_dim) for rope in ropes(config)])
        layers = np.zeros(config.num_layers, LAYER)
        for index, layer in enumerate(packed.layers):
            _fill(layers[index : index + 1], _layer_of(config, index, layer, pools))
        stages, first_of_head = list_stages(config, packed, layers, kernels, memory)
        self.num_claims = int(np.count_nonzero(stages["kernel"]))
        self._model, embedding = np.zeros(1, MODEL), packed.parts["embedding"]
        self._kept = (packed, pools, kernels, memory, tables, layers, stages)
        addresses = {
            "stages": stages.ctypes.data,
            "embedding": address_of(embedding),
            "look_up": kernels.look_up[embedding[0].kind] if isinstance(embedding, list) else 0,
            "input_embedding": address_of(packed.parts.get("input_embedding")),
            "rotations": tables.data_ptr(),
        }
        sizes = {
            "num_stages": len(stages),
            "first_of_head": first_of_head,
            "num_claims": self.num_claims,
            "num_rotations": len(tables),
        }
        _fill(self._model, {**addresses, **sizes, **_features(config, pools[0].dtype)})
        self.address = self._model.ctypes.data


def _layer_of(config: ModelConfig, index: int, layer: Packed, pools: Sequence[Tensor]) -> dict[str, Any]:
    """Return the fields of a layer's record."""
    kind = config.layers[index]
    units = HeadUnits.of(kind.head_dim)
    number, place, _ = attention_layers(config)[index]
    pool = pools[number]
    return _fields_of(kind, LAYER) | {
        "q_norm": address_of(layer.get("q_norm")),
        "k_norm": address_of(layer.get("k_norm")),
        "num_queries_per_kv": config.num_heads // kind.num_kv_heads,
        "heads_at_once": units.heads,
        "head_stride": units.stride,
        "pool": pool.data_ptr(),
        "pool_offset": place * pool.stride(1) * pool.itemsize,
        "block_bytes": pool.stride(0) * pool.itemsize,
        "head_bytes": pool.stride(3) * pool.itemsize,
        "rotation_offset": ropes(config).index((kind.rope, kind.head_dim)) * 4 * config.head_dim,
    }


def _rotation_table(rope: Rope | None, head_dim: int, widest: int) -> Tensor:
    """Return frequency and magnitude of each pair, and zeros: float32 [2, widest / 2]."""
    return F.pad(rotation_table(rope, head_dim), (0, (widest - head_dim) // 2))


def _features(config: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Return the fields of a model's record that the network says."""
    inputs = config.per_layer_input
    dtype = torch.float32 if config.blocks else dtype  # rows of packed embeddings are not rounded to it either
    return _fields_of(config, MODEL) | {
        "input_size": inputs.size if inputs is not None else 0,
        "is_gelu": config.activation == "gelu_tanh",
        **_experts(config.experts),
        "embedding_scale": torch.tensor(config.embedding_scale, dtype=dtype).item(),
        "input_scale": 0.0 if inputs is None else torch.tensor(inputs.size**0.5, dtype=dtype).item(),
    }


def _experts(experts: Experts | None) -> dict[str, Any]:
    if experts is None:
        return dict.fromkeys(("num_experts", "num_used", "is_sigmoid", "is_normalised", "expert_scale"), 0)
    return {
        "num_experts": experts.count,
        "num_used": experts.used,
        "is_sigmoid": experts.gate == "sigmoid",
        "is_normalised": experts.is_normalised or experts.gate == "softmax_of_used",
        "expert_scale": experts.scale,
    }


def _fields_of(described: ModelConfig | LayerKind, record: np.dtype[Any]) -> dict[str, Any]:
    """Return the fields of a record that a network or a layer has by the same name."""
    return {name: getattr(described, name) for name in record.names or () if hasattr(described, name)}


def _fill(record: npt.NDArray[Any], values: dict[str, Any]) -> None:
    """Set every field of a record."""
    assert record.dtype.names is not None
    assert set(values) == set(record.dtype.names), set(values) ^ set(record.dtype.names)
    for name, value in values.items():
        record[name] = value


class ThreadRecords:
    """The records of the threads that run the steps of a model.

    Args:
        model: Kept.
        memory: Kept.
        sync: Kept.
        num_threads: The most threads of a step.

    Attributes:
        addresses: Of the record of each thread.
    """

    def __init__(self, model: ModelRecord, memory: StepMemory, sync: SyncBlock, num_threads: int) -> None:
        self._kept = (model, memory, sync)
        self._records = np.zeros(num_threads, THREAD)
        self._records["model"], self._records["step"] = model.address, memory.address
        self._records["sync"], self._records["number"] = sync.address, range(num_threads)
        num_runs = -(-memory.vocab_size // RUN)
        doubles = {"shaped": RUN * num_runs, "weights": RUN * num_runs, "sums": num_runs + RUN}
        sizes = {name: 8 * count for name, count in {**doubles, "bins": max(2 * NUM_BINS, num_runs)}.items()}
        self._memory = {}
        for name, size in {**sizes, "digits": 2 * RUN * num_runs, "tokens": 4 * RUN * num_runs}.items():
            own = self._memory[name] = new_tensor((num_threads, size), torch.uint8)
            self._records[name] = own.data_ptr() + size * np.arange(num_threads)
        self.addresses = [self._records.ctypes.data + number * THREAD.itemsize for number in range(num_threads)]
