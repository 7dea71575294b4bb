"""The models that are measured: known shapes, random weights, the bytes that one step must read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ferrule_server.kernels.cuda.spec import MODEL_SHAPES, ModelShape
from ferrule_server.model.config import ModelConfig
from ferrule_server.model.config_reader import parse_config
from ferrule_server.model.tensors import LayerWeights, ModelWeights
from ferrule_server.model.weights import LoadedModel

STD = 0.02
"""Of all matrices. Never zeros: a product with zeros draws less power and runs faster than any real one."""

TINY = "tiny"
"""For a dry run: small enough for a CPU, and still of the sizes that the kernels take."""

_TINY_SHAPE = ModelShape(128, 256, 2, 4, 2, 64, 512, True)
_UNTIED = ("Qwen3-8B",)
_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "attention_bias": False,
}
_LLAMA3: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}


def shape_of(name: str) -> ModelShape:
    """Return the sizes of a model."""
    return _TINY_SHAPE if name == TINY else MODEL_SHAPES[name]


def raw_config(name: str) -> dict[str, Any]:
    """Return the config.json of a model."""
    shape = shape_of(name)
    family = _QWEN3 if shape.has_qk_norm else _LLAMA3
    return {
        **family,
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "tie_word_embeddings": name not in _UNTIED,
        "torch_dtype": "bfloat16",
    }


def config_of(name: str) -> ModelConfig:
    """Return the configuration of a model."""
    return parse_config(raw_config(name), {})


def kv_bytes_per_token(config: ModelConfig) -> int:
    """Return the bytes of K and V of one token, all layers, bfloat16."""
    return 2 * 2 * config.num_layers * config.num_kv_heads * config.head_dim


def read_bytes(config: ModelConfig, batch: int, context: float, weight_bytes: float = 2) -> float:
    """Return the fewest bytes that a decode step must read: every weight once, and the KV of every sequence.

    Args:
        config: Of the model; its KV is bfloat16.
        batch: Sequences, which share no block.
        context: Tokens of each, the mean over the steps measured.
        weight_bytes: Of a weight, its share of scales included.
    """
    return weight_bytes * num_read_weights(config) + batch * context * kv_bytes_per_token(config)


def num_read_weights(config: ModelConfig) -> int:
    """Return how many weights one step reads: all but the embedding, of which a step reads single rows."""
    hidden, heads = config.hidden_size, config.num_heads + 2 * config.num_kv_heads
    attention = hidden * heads * config.head_dim + hidden * config.num_heads * config.head_dim
    norms = 2 * hidden + (2 * config.head_dim if config.qk_norm == "head" else 0)
    layer = attention + 3 * hidden * config.intermediate_size + norms
    return config.num_layers * layer + hidden + config.vocab_size * hidden


def random_weights(name: str, device: torch.device, seed: int = 0) -> ModelWeights:
    """Return bfloat16 weights of a model, the same ones for one seed and kind of device: N(0, 0.02), norms around 1."""
    config, generator = config_of(name), torch.Generator(device).manual_seed(seed)

    def matrix(*size: int) -> Tensor:
        return torch.empty(size, dtype=torch.bfloat16, device=device).normal_(std=STD, generator=generator)

    def norm(size: int) -> Tensor:
        return torch.empty(size, device=device).normal_(1.0, 0.1, generator=generator).bfloat16()

    embedding = matrix(config.vocab_size, config.hidden_size)
    head = {} if config.is_tied else {"head": matrix(config.vocab_size, config.hidden_size)}
    layers = [_random_layer(config, matrix, norm) for _ in range(config.num_layers)]
    return ModelWeights({"embedding": embedding, **head, "final_norm": norm(config.hidden_size)}, layers)


def _random_layer(config: ModelConfig, matrix: Any, norm: Any) -> LayerWeights:
    hidden, intermediate = config.hidden_size, config.intermediate_size
    num_q, num_kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer = LayerWeights(
        attention_norm=norm(hidden),
        qkv=matrix(num_q + 2 * num_kv, hidden),
        attention_out=matrix(hidden, num_q),
        mlp_norm=norm(hidden),
        gate_up=matrix(2 * intermediate, hidden),
        down=matrix(hidden, intermediate),
    )
    return layer | {name: norm(config.head_dim) for name in ("q_norm", "k_norm") if config.qk_norm == "head"}


def loaded(name: str, weights: ModelWeights) -> LoadedModel:
    """Return a model as an executor takes it; the tensors are shared with ``weights``, which stays whole.

    An executor clears the fields of the objects that it is given, so it gets others.
    """
    kept = ModelWeights(dict(weights.parts), [dict(layer) for layer in weights.layers])
    config = config_of(name)
    tensors = dict(checkpoint_tensors(config, weights))
    return LoadedModel(
        config=config,
        model_id=name,
        dtype="bfloat16",
        fingerprint=hashlib.sha256(f"random {name}".encode()).digest(),
        num_parameters=sum(tensor.numel() for tensor in tensors.values()),
        weights=kept,
    )


def checkpoint_tensors(config: ModelConfig, weights: ModelWeights) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors by their names in a checkpoint: views of ``weights``, nothing is copied."""
    yield "model.embed_tokens.weight", weights.embedding
    yield "model.norm.weight", weights.final_norm
    if not config.is_tied:
        yield "lm_head.weight", weights.head
    for index, layer in enumerate(weights.layers):
        for name, tensor in _layer_tensors(config, layer):
            yield f"model.layers.{index}.{name}", tensor


def _layer_tensors(config: ModelConfig, layer: LayerWeights) -> Iterator[tuple[str, Tensor]]:
    num_q, num_kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    yield "input_layernorm.weight", layer["attention_norm"]
    yield "post_attention_layernorm.weight", layer["mlp_norm"]
    for name, part in zip("qkv", torch.split(layer["qkv"], [num_q, num_kv, num_kv]), strict=True):
        yield f"self_attn.{name}_proj.weight", part
    yield "self_attn.o_proj.weight", layer["attention_out"]
    for name, half in zip(("gate", "up"), torch.split(layer["gate_up"], config.intermediate_size), strict=True):
        yield f"mlp.{name}_proj.weight", half
    yield "mlp.down_proj.weight", layer["down"]
    for name in layer.keys() & {"q_norm", "k_norm"}:
        yield f"self_attn.{name}.weight", layer[name]


def write_folder(name: str, weights: ModelWeights, folder: Path) -> int:
    """Write a model as a checkpoint in one file per layer, for a server to load, and return its bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, dict[str, Tensor]] = {}
    for tensor_name, tensor in checkpoint_tensors(config_of(name), weights):
        part = f"layer-{tensor_name.split('.')[2]}" if ".layers." in tensor_name else tensor_name.split(".")[-2]
        files.setdefault(f"model-{part}.safetensors", {})[tensor_name] = tensor
    for file, tensors in files.items():
        save_file({key: tensor.cpu().contiguous() for key, tensor in tensors.items()}, folder / file)
    where = {key: file for file, tensors in files.items() for key in tensors}
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(raw_config(name), indent=2) + "\n")
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))
