"""The names of the tensors of a GGUF file: those that a folder of safetensors would have."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from ferrule_server.errors import ModelError
from ferrule_server.model.gguf.architectures import architecture_of
from ferrule_server.model.gguf.blocks import BLOCKS
from ferrule_server.model.gguf.container import Gguf
from ferrule_server.model.gguf.network import DIVISORS
from ferrule_server.model.parts import BESIDE_EXPERTS, LAYER_PARTS, MODEL_PARTS
from ferrule_server.model.stored import StoredTensor, without_stacks
from ferrule_server.model_files import name_of

_PARTS: Final = {
    "token_embd": ("embedding", 0), "output": ("head", 0), "output_norm": ("final_norm", 0),
    "attn_norm": ("attention_norm", 0), "attn_qkv": ("qkv", 0), "attn_q": ("qkv", 0), "attn_k": ("qkv", 1),
    "attn_v": ("qkv", 2), "attn_q_norm": ("q_norm", 0), "attn_k_norm": ("k_norm", 0),
    "attn_output": ("attention_out", 0), "post_attention_norm": ("attention_out_norm", 0), "ffn_norm": ("mlp_norm", 0),
    "ffn_gate": ("gate_up", 0), "ffn_up": ("gate_up", 1), "ffn_down": ("down", 0), "post_ffw_norm": ("mlp_out_norm", 0),
    "ffn_gate_inp": ("router", 0), "ffn_gate_exps": ("expert_gate_up", 0), "ffn_up_exps": ("expert_gate_up", 1),
    "ffn_down_exps": ("expert_down", 0), "ffn_gate_inp_shexp": ("shared_gate", 0),
    "ffn_gate_shexp": ("shared_gate_up", 0), "ffn_up_shexp": ("shared_gate_up", 1),
    "ffn_down_shexp": ("shared_down", 0),
}  # fmt: skip
"""For each name in llama.cpp, the part of a layer or of the model, and which of the tensors in it (``tensors.py``)."""
_NAME: Final = re.compile(r"(?:blk\.([0-9]+)\.)?(\w+)\.(weight|bias)")


def renamed(gguf: Gguf) -> dict[str, StoredTensor]:
    """Return the tensors by the names that they have in a folder; a tensor without such a name keeps its own.

    Those with divisors of rotary frequencies are left out, because config.json has them.

    Raises:
        ModelError: Two would have one name.
    """
    known = architecture_of(gguf)
    stored = {part.name: part.stored for part in (*LAYER_PARTS, *MODEL_PARTS)}
    stored |= {f"shared_{part}": names for part, names in BESIDE_EXPERTS.items()}
    stored |= {} if known is None else known.parts(gguf)
    found: dict[str, StoredTensor] = {}
    for old, tensor in gguf.tensors.items():
        new = _renamed(old, stored)
        for part in without_stacks([replace(tensor, name=new, shape=_as_matrix(new, tensor))]):
            if old not in DIVISORS and found.setdefault(part.name, part) is not part:
                raise ModelError(f"tensor {name_of(part.name)} is stored twice, once in {name_of(old)}")
    return found


def _as_matrix(name: str, tensor: StoredTensor) -> tuple[int, ...]:
    """Return the shape of a tensor; the matrix of one row has lost it."""
    return (1, *tensor.shape) if name.endswith("shared_expert_gate.weight") and len(tensor.shape) == 1 else tensor.shape


def blocks_of(gguf: Gguf) -> dict[str, str]:
    """Return the types of the tensors that consist of blocks, by the same names."""
    return {name: tensor.dtype for name, tensor in renamed(gguf).items() if tensor.dtype in BLOCKS}


def _renamed(name: str, stored: Mapping[str, tuple[str, ...]]) -> str:
    match = _NAME.fullmatch(name)
    part, index = _PARTS.get(match[2], ("", 0)) if match is not None else ("", 0)
    names = stored.get(part, ())
    if match is None or not names:
        return name
    own = names[min(index, len(names) - 1)].replace(".{}", "")  # one tensor holds those of all experts
    return f"{f'model.layers.{match[1]}.' if match[1] else ''}{own}.{match[3]}"
