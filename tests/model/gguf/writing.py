"""Writes models of transformers as GGUF files, with the package ``gguf`` and as the converter of llama.cpp does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import numpy.typing as npt
import torch

_Matrix = npt.NDArray[np.float32]
Keys = Mapping[str, Any]

NEIGHBOURS: Final = {"llama", "granite", "smollm3", "mistral3"}
"""Architectures whose converter moves the rows of queries and keys."""
WHOLE_NORMS: Final = {"gemma2", "gemma3"}
"""Architectures whose converter adds 1 to the weights of norms."""


def write_gguf(path: Path, arch: str, oracle: Any, more: Keys, *, dtype: str = "F32", split: int = 0) -> None:
    """Write a model.

    Args:
        path: The file; with ``split``, what the names of its parts begin with.
        arch: Name of the architecture in llama.cpp.
        oracle: The model in transformers.
        more: Other keys than those of all architectures, without the prefix.
        dtype: Of the matrices; vectors are always F32.
        split: The most tensors of a part; 0: there are no parts.
    """
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=split)
    for key, value in (_keys(oracle.config) | dict(more)).items():
        add_key(writer, f"{arch}.{key}" if "tokenizer" not in key else key, value)
    for name, values in tensors_of(arch, oracle):
        kind = gguf.GGMLQuantizationType[dtype if values.ndim > 1 else "F32"]
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    close(writer)


def close(writer: Any) -> None:
    """Write the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_key(writer: Any, key: str, value: Any) -> None:
    """Add a key whose type is that of the value."""
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    adders.get(type(value), writer.add_array)(key, value)


def _keys(config: Any) -> dict[str, Any]:
    """Return the keys that the converter writes for every architecture."""
    settings = config.to_dict()
    rope = settings["rope_parameters"]
    rope = rope.get("full_attention", rope)
    head_dim = settings.get("head_dim") or config.hidden_size // config.num_attention_heads
    keys = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0)),
        "vocab_size": config.vocab_size,
    }
    for name, key in (("rms_norm_eps", "rms_"), ("layer_norm_eps", ""), ("norm_epsilon", "")):
        if settings.get(name) is not None:
            keys[f"attention.layer_norm_{key}epsilon"] = float(settings[name])
    if rope["rope_type"] in ("linear", "yarn"):
        keys |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
    if rope["rope_type"] == "yarn":
        keys["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    return keys


def tensors_of(arch: str, oracle: Any) -> Iterator[tuple[str, _Matrix]]:
    """Yield the tensors of a model by the names and with the values that the converter gives them."""
    config = oracle.config
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    for stored, parameter in oracle.named_parameters():
        values = parameter.detach().float().numpy()
        if arch in NEIGHBOURS and ".q_proj." in stored:
            values = _neighbours(values, config.num_attention_heads)
        if arch in NEIGHBOURS and ".k_proj." in stored:
            values = _neighbours(values, config.num_key_value_heads)
        if arch in WHOLE_NORMS and stored.endswith("norm.weight"):
            values = values + 1
        for part, matrix in _parts(stored, values):
            name = names.get_name(part, try_suffixes=(".weight", ".bias"))
            assert name is not None, stored
            yield name, np.ascontiguousarray(matrix)
    yield from _divisors(config)


def _parts(stored: str, values: _Matrix) -> Iterator[tuple[str, _Matrix]]:
    """Yield a tensor, or its parts: gate and up of experts are stored apart, each with those of all experts."""
    if ".experts." in stored:
        stored += ".weight"
    if not stored.endswith(".experts.gate_up_proj.weight"):
        yield stored, values[0] if stored.endswith("shared_expert_gate.weight") else values
        return
    for name, half in zip(("gate", "up"), np.split(values, 2, axis=1), strict=True):
        yield stored.replace("gate_up", name), half


def _neighbours(values: _Matrix, num_heads: int) -> _Matrix:
    """Return the rows of heads with those of a rotated pair beside each other."""
    halves = values.reshape(num_heads, 2, -1, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def _divisors(config: Any) -> Iterator[tuple[str, _Matrix]]:
    """Yield the vectors by which rotary frequencies are divided."""
    rope = config.rope_parameters
    if rope.get("rope_type") == "llama3":
        head_dim = config.hidden_size // config.num_attention_heads
        plain = 1.0 / (rope["rope_theta"] ** (torch.arange(0, head_dim, 2) / head_dim))
        scaled, _ = transformers_frequencies(config)
        yield "rope_freqs.weight", (plain / scaled).numpy()
    for name in ("long", "short"):
        if rope.get("rope_type") == "longrope":
            yield f"rope_factors_{name}.weight", np.array(rope[f"{name}_factor"], np.float32)


def transformers_frequencies(config: Any) -> tuple[torch.Tensor, float]:
    """Return the scaled rotary frequencies of transformers, and what multiplies cosine and sine."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    frequencies, scale = ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]](config, "cpu")
    return frequencies, scale
