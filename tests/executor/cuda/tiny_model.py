"""Models small enough for the simulator: random weights of every kind that decides which kernels run."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ferrule_server.executor.torch import TorchExecutor, least_kv_bytes
from ferrule_server.model.config import ModelConfig
from ferrule_server.model.config_reader import parse_config
from ferrule_server.model.tensors import LayerWeights, ModelWeights
from ferrule_server.model.weights import LoadedModel

__all__ = ["KINDS", "tiny_config", "tiny_executor", "tiny_model"]

KINDS = {
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "num_attention_heads": 2, "num_key_value_heads": 1},
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "wide group": {
        "architectures": ["LlamaForCausalLM"],
        "num_attention_heads": 6,
        "num_key_value_heads": 1,
        "mlp_bias": True,
    },
}
"""What differs from model to model; two rows of the last are more query rows than one product of attention takes."""


def tiny_config(kind: str = "qwen3", *, num_layers: int = 2) -> ModelConfig:
    """Return the configuration of a model of :data:`KINDS`."""
    raw = {
        "hidden_size": 72,
        "intermediate_size": 104,
        "num_hidden_layers": num_layers,
        "head_dim": 64,
        "vocab_size": 67,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    return parse_config({**raw, **KINDS[kind]}, {})


def tiny_model(kind: str = "qwen3", *, num_layers: int = 2, seed: int = 0) -> LoadedModel:
    """Return a model of :data:`KINDS` in bfloat16."""
    config = tiny_config(kind, num_layers=num_layers)
    generator = torch.Generator().manual_seed(seed)
    hidden, vocab = config.hidden_size, config.vocab_size

    def matrix(rows: int, size: int) -> Tensor:
        return torch.randn(rows, size, generator=generator).mul(size**-0.5).bfloat16()

    def vector(size: int, mean: float) -> Tensor:
        return torch.randn(size, generator=generator).mul(0.2).add(mean).bfloat16()

    layers = [_layer(config, matrix, vector) for _ in range(num_layers)]
    embedding = matrix(vocab, hidden)
    head = {} if config.is_tied else {"head": matrix(vocab, hidden)}
    return LoadedModel(
        config=config,
        model_id=kind,
        dtype="bfloat16",
        fingerprint=bytes(32),
        num_parameters=1,
        weights=ModelWeights({"embedding": embedding, **head, "final_norm": vector(hidden, 1)}, layers),
    )


def tiny_executor(kind: str = "qwen3", *, num_layers: int = 2, num_blocks: int = 24) -> TorchExecutor:
    """Return such a model in torch, its weights plain."""
    model = tiny_model(kind, num_layers=num_layers)
    least = least_kv_bytes(model.config, model.torch_dtype)
    return TorchExecutor(
        model, kv_memory_bytes=least * num_blocks // 8, max_context=model.config.max_positions, is_plain=True
    )


def _layer(
    config: ModelConfig, matrix: Callable[[int, int], Tensor], vector: Callable[[int, float], Tensor]
) -> LayerWeights:
    hidden, intermediate = config.hidden_size, config.intermediate_size
    num_q, num_kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer = LayerWeights(
        attention_norm=vector(hidden, 1),
        qkv=matrix(num_q + 2 * num_kv, hidden),
        attention_out=matrix(hidden, num_q),
        mlp_norm=vector(hidden, 1),
        gate_up=matrix(2 * intermediate, hidden),
        down=matrix(hidden, intermediate),
    )
    if config.qk_norm != "none":
        layer["q_norm"], layer["k_norm"] = vector(config.head_dim, 1), vector(config.head_dim, 1)
    if config.has_qkv_bias:
        layer["qkv_bias"] = vector(num_q + 2 * num_kv, 0)
    if config.has_attention_out_bias:
        layer["attention_out_bias"] = vector(hidden, 0)
    if config.has_mlp_bias:
        layer["gate_up_bias"], layer["down_bias"] = vector(2 * intermediate, 0), vector(hidden, 0)
    return layer
