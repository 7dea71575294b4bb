"""The smallest model folder that loads: for tests that spoil one thing in it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

SHIPPED = Path(__file__).parents[2] / "server" / "ferrule_server" / "demo_model"
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 64,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": True,
    "hidden_act": "silu", "attention_bias": False, "eos_token_id": 1, "use_sliding_window": False,
    "max_window_layers": 1, "sliding_window": None,
}  # fmt: skip
LAYER = "model.layers.0."
SHAPES = {
    "model.embed_tokens.weight": (64, 32), "model.norm.weight": (32,),
    f"{LAYER}input_layernorm.weight": (32,), f"{LAYER}post_attention_layernorm.weight": (32,),
    f"{LAYER}self_attn.q_proj.weight": (32, 32), f"{LAYER}self_attn.k_proj.weight": (16, 32),
    f"{LAYER}self_attn.v_proj.weight": (16, 32), f"{LAYER}self_attn.o_proj.weight": (32, 32),
    f"{LAYER}self_attn.q_norm.weight": (16,), f"{LAYER}self_attn.k_norm.weight": (16,),
    f"{LAYER}mlp.gate_proj.weight": (64, 32), f"{LAYER}mlp.up_proj.weight": (64, 32),
    f"{LAYER}mlp.down_proj.weight": (32, 64),
}  # fmt: skip


def write_small_model(folder: Path) -> Path:
    """Fill a folder, which is made if need be, with a model, a tokenizer and a chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    write_config(folder, CONFIG)
    save_file({name: torch.zeros(*shape) for name, shape in SHAPES.items()}, folder / "model.safetensors")
    shutil.copy(SHIPPED / "tokenizer.json", folder)
    template = {"chat_template": "{{ messages[0].content }}", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(template))
    return folder


def write_windowed_model(folder: Path, window: int) -> Path:
    """Fill a folder, which is made if need be, with a Mistral whose layers have a window, and no tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    others = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
    write_config(folder, {key: CONFIG[key] for key in CONFIG if "window" not in key and "bias" not in key} | others)
    shapes = {name: shape for name, shape in SHAPES.items() if not name.endswith(("q_norm.weight", "k_norm.weight"))}
    save_file({name: torch.zeros(*shape) for name, shape in shapes.items()}, folder / "model.safetensors")
    return folder


def write_config(folder: Path, config: object) -> None:
    """Write config.json."""
    (folder / "config.json").write_text(json.dumps(config))


def header_of(folder: Path) -> dict[str, Any]:
    """Return the header of model.safetensors."""
    content = (folder / "model.safetensors").read_bytes()
    header: dict[str, Any] = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return header


def write_header(folder: Path, header: str) -> None:
    """Replace the header of model.safetensors, whatever the text is; the data stays."""
    content = (folder / "model.safetensors").read_bytes()
    data = content[8 + int.from_bytes(content[:8], "little") :]
    text = header.encode("utf-8", "surrogatepass")
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
