"""Small GGUF files whose matrices are random blocks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np

from benchmarks.random_gguf import random_matrix
from ferrule_server.model.gguf.blocks import BLOCKS, dequantise
from ferrule_server.model.packed import Array
from tests.model.gguf.writing import add_key, close

VOCAB: Final = 300
_SIZE: Final = 0.05
_HIDDEN, _INNER, _KV, _NUM_LAYERS = 256, 512, 128, 2
_KEYS: Final[Mapping[str, Any]] = {
    "block_count": _NUM_LAYERS, "context_length": 1024, "embedding_length": _HIDDEN, "feed_forward_length": _INNER,
    "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 64, "attention.value_length": 64,
    "rope.freq_base": 10000.0, "rope.dimension_count": 64, "vocab_size": VOCAB,
    "attention.layer_norm_rms_epsilon": 1e-5,
}  # fmt: skip
_SHAPES: Final = {
    "attn_q": (_HIDDEN, _HIDDEN), "attn_k": (_KV, _HIDDEN), "attn_v": (_KV, _HIDDEN), "attn_output": (_HIDDEN, _HIDDEN),
    "ffn_gate": (_INNER, _HIDDEN), "ffn_up": (_INNER, _HIDDEN), "ffn_down": (_HIDDEN, _INNER),
}  # fmt: skip
EXPERTS: Final = 10
_EXPERT_SHAPES: Final = {
    "ffn_gate_exps": (EXPERTS, 256, _HIDDEN), "ffn_up_exps": (EXPERTS, 256, _HIDDEN),
    "ffn_down_exps": (EXPERTS, _HIDDEN, 256),
}  # fmt: skip
_EXPERT_KEYS: Final = {"expert_count": EXPERTS, "expert_used_count": 3, "expert_feed_forward_length": 256}
_MODEL_SHAPES: Final = dict.fromkeys(("token_embd", "output"), (VOCAB, _HIDDEN))

ALL_TYPES: Final = {
    "blk.0.attn_q": "Q4_K", "blk.0.attn_k": "Q6_K", "blk.0.attn_v": "Q5_0", "blk.0.attn_output": "Q8_0",
    "blk.0.ffn_gate": "IQ4_NL", "blk.0.ffn_up": "IQ4_NL", "blk.0.ffn_down": "Q5_1",
    "blk.1.attn_q": "F16", "blk.1.attn_k": "IQ4_XS", "blk.1.attn_v": "Q3_K", "blk.1.attn_output": "Q5_K",
    "blk.1.ffn_gate": "MXFP4", "blk.1.ffn_up": "Q4_1", "blk.1.ffn_down": "Q2_K",
    "token_embd": "Q4_0", "output": "IQ4_NL",
}  # fmt: skip
"""A matrix of every type, and one of float16: each of q, k and v is another one, and so are gate and up of a layer."""


MIXTURE: Final = {
    "blk.0.ffn_gate_exps": "Q4_K", "blk.0.ffn_up_exps": "Q4_K", "blk.0.ffn_down_exps": "Q6_K",
    "blk.1.ffn_gate_exps": "MXFP4", "blk.1.ffn_up_exps": "Q8_0", "blk.1.ffn_down_exps": "Q5_0",
}  # fmt: skip
"""Gate and up of a layer are packed alike, and differently in the other."""


def write_packed(
    path: Path, types: Mapping[str, str], usual: str = "F16", *, is_unpacked: bool = False, is_mixture: bool = False
) -> Path:
    """Write a Llama of two layers, or a Qwen3 with experts.

    Args:
        path: The file.
        types: Of matrices, by their names without ``.weight``.
        usual: That of all others.
        is_unpacked: Write the same numbers as F32.
        is_mixture: Whether it has experts.
    """
    arch = "qwen3moe" if is_mixture else "llama"
    writer = gguf.GGUFWriter(path, arch)
    for key, value in {**_KEYS, **(_EXPERT_KEYS if is_mixture else {})}.items():
        add_key(writer, f"{arch}.{key}", value)
    shapes: dict[str, tuple[int, ...]] = dict(_SHAPES)
    if is_mixture:
        shapes = {name: shape for name, shape in shapes.items() if "ffn" not in name} | _EXPERT_SHAPES
    layers = {f"blk.{i}.{name}": shape for i in range(_NUM_LAYERS) for name, shape in shapes.items()}
    for seed, (name, shape) in enumerate((layers | _MODEL_SHAPES).items()):
        kind = types.get(name, usual)
        values = _matrix(kind, shape, seed)
        if is_unpacked:
            kind, values = "F32", _unpacked(kind, values) if kind in BLOCKS else values.astype(np.float32)
        writer.add_tensor(f"{name}.weight", values, raw_dtype=gguf.GGMLQuantizationType[kind])
    norms = [f"blk.{i}.{name}" for i in range(_NUM_LAYERS) for name in ("attn_norm", "ffn_norm")]
    heads = [f"blk.{i}.attn_{name}_norm" for i in range(_NUM_LAYERS) for name in ("q", "k") if is_mixture]
    generator = np.random.default_rng(99)
    for name in [*norms, "output_norm", *heads]:
        size = 64 if name in heads else _HIDDEN
        writer.add_tensor(f"{name}.weight", generator.normal(1, 0.1, size).astype(np.float32))
    for i in range(_NUM_LAYERS if is_mixture else 0):
        router = generator.normal(0, _SIZE, (EXPERTS, _HIDDEN)).astype(np.float32)
        writer.add_tensor(f"blk.{i}.ffn_gate_inp.weight", router)
    close(writer)
    return path


def _matrix(kind: str, shape: tuple[int, ...], seed: int) -> Array:
    """Return a random matrix, or one of each expert, as its type stores it."""
    if kind in BLOCKS:
        return random_matrix(kind, math.prod(shape[:-1]), shape[-1], seed, _SIZE).reshape(*shape[:-1], -1)
    return np.random.default_rng(seed).normal(0, _SIZE, shape).astype(np.float16)


def _unpacked(kind: str, values: Array) -> Array:
    return dequantise(kind, values.reshape(-1, values.shape[-1])).reshape(*values.shape[:-1], -1)
