"""Write a model folder with random weights in the shape of a known model: for speed, not for sense.

    python benchmarks/make_random_model.py OUT [--shape qwen3-0.6b] [--seed 0]

The weights are N(0, 0.02), norms are 1, all bfloat16; the same seed gives the same bytes. There is no tokenizer.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960,
        "rope_theta": 1_000_000.0,
    },
    "qwen3-30b-a3b-12-layers": {
        "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 12,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 40960,
        "rope_theta": 1_000_000.0, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
    },
    "tiny": {
        "vocab_size": 1024, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 2048,
        "rope_theta": 10_000.0,
    },
    "wide-49k": {
        "vocab_size": 49152, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 2048,
        "rope_theta": 10_000.0,
    },
    "wide-262k": {
        "vocab_size": 262144, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 2048,
        "rope_theta": 10_000.0,
    },
    "270m-262k": {
        "vocab_size": 262144, "hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 18,
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "max_position_embeddings": 32768,
        "rope_theta": 1_000_000.0,
    },
    "wide": {
        "vocab_size": 151936, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 2048,
        "rope_theta": 10_000.0,
    },
}  # fmt: skip

NOTE = "Random weights (seed {seed}) in the shape {shape}, for benchmarks. The output is noise.\n"


def main() -> None:
    """Write the folder named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    write_model(args.out, args.shape, args.seed)
    print(f"{args.shape} with random weights is in {args.out}")


def write_model(folder: Path, shape: str, seed: int = 0) -> None:
    """Write config.json, model.safetensors and a note into ``folder``, which is made where it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(_make_tensors(SHAPES[shape], seed), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config_of(SHAPES[shape]), indent=2) + "\n")
    (folder / "NOTE.txt").write_text(NOTE.format(seed=seed, shape=shape))


def config_of(shape: dict[str, Any]) -> dict[str, Any]:
    """Return config.json of a shape."""
    return {
        "architectures": [f"Qwen3{'Moe' if 'num_experts' in shape else ''}ForCausalLM"],
        "model_type": f"qwen3{'_moe' if 'num_experts' in shape else ''}",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        **shape,
    }


def _make_tensors(shape: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: _random(size, generator) for name, size in sorted(tensor_sizes(shape).items())}


def tensor_sizes(shape: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the sizes of all tensors of a shape, by name; one tensor holds a matrix of every expert."""
    hidden, intermediate, head_dim = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    num_q, num_kv = shape["num_attention_heads"] * head_dim, shape["num_key_value_heads"] * head_dim
    sizes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (shape["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    for index in range(shape["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        sizes[f"{layer}.input_layernorm.weight"] = sizes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
        sizes[f"{layer}.self_attn.q_norm.weight"] = sizes[f"{layer}.self_attn.k_norm.weight"] = (head_dim,)
        sizes[f"{layer}.self_attn.q_proj.weight"] = (num_q, hidden)
        sizes[f"{layer}.self_attn.k_proj.weight"] = sizes[f"{layer}.self_attn.v_proj.weight"] = (num_kv, hidden)
        sizes[f"{layer}.self_attn.o_proj.weight"] = (hidden, num_q)
        experts: tuple[int, ...] = ()
        mlp, width = f"{layer}.mlp", intermediate
        if "num_experts" in shape:
            experts, mlp, width = (shape["num_experts"],), f"{layer}.mlp.experts", shape["moe_intermediate_size"]
            sizes[f"{layer}.mlp.gate.weight"] = (*experts, hidden)
        sizes[f"{mlp}.gate_proj.weight"] = sizes[f"{mlp}.up_proj.weight"] = (*experts, width, hidden)
        sizes[f"{mlp}.down_proj.weight"] = (*experts, hidden, width)
    return sizes


def _random(size: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    if len(size) == 1:
        return torch.ones(size, dtype=torch.bfloat16)
    return torch.empty(size, dtype=torch.bfloat16).normal_(std=0.02, generator=generator)


if __name__ == "__main__":
    main()
