"""Llama 4 and GPT-OSS without experts, to compare their attention and activation with transformers.

The published models have experts and are refused by name. The models here have other names, which only tests know.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from ferrule_server.model import config_reader
from ferrule_server.model.config import ClampedSwiglu, ModelConfig
from ferrule_server.model.families import FAMILIES
from ferrule_server.model.families.family import Family
from ferrule_server.model.families.values import ConfigValues
from ferrule_server.model.families.windows import layer_types, with_windows

__all__ = ["DENSE", "DENSE_CASES", "dense_families_known", "make_dense"]

_SIZES: Final[dict[str, Any]] = {
    "vocab_size": 103, "hidden_size": 48, "intermediate_size": 60, "num_attention_heads": 6, "num_key_value_heads": 2,
    "head_dim": 12, "max_position_embeddings": 1024, "eos_token_id": 5, "pad_token_id": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}  # fmt: skip
_CHUNKED: Final[dict[str, Any]] = {
    **_SIZES, "family": "DenseLlama4", "intermediate_size_mlp": 60, "attention_chunk_size": 10, "moe_layers": [],
    "use_qk_norm": False, "attn_temperature_tuning": False,
}  # fmt: skip
DENSE_CASES: Final[dict[str, dict[str, Any]]] = {
    "llama4-chunks-and-full-layers": {**_CHUNKED, "num_hidden_layers": 4, "no_rope_layer_interval": 2},
    "llama4-chunks-everywhere": {**_CHUNKED, "num_hidden_layers": 2, "no_rope_layer_interval": 3},
    "gpt-oss-sinks-clamped-swiglu": {
        **_SIZES, "family": "DenseGptOss", "num_hidden_layers": 3, "sliding_window": 9, "swiglu_limit": 1.5,
        "swiglu_alpha": 1.3, "num_local_experts": 2, "num_experts_per_tok": 1,
    },
}  # fmt: skip
"""Like ``CASES`` of conftest.py."""


def _with_chunks(config: ModelConfig, values: ConfigValues) -> ModelConfig:
    """Return the network of Llama 4: every n-th layer attends to all tokens, without a rotation."""
    size, every = values.count("attention_chunk_size"), values.count("no_rope_layer_interval")
    layers = [
        replace(kind, rope=None)
        if kind.rope is None or (index + 1) % every == 0
        else replace(kind, chunk=size, rope=replace(kind.rope, is_interleaved=True))
        for index, kind in enumerate(config.layers)
    ]
    return replace(config, layers=tuple(layers))


def _with_sinks(config: ModelConfig, values: ConfigValues) -> ModelConfig:
    """Return the network of GPT-OSS: every other layer has a window, and all have sinks."""
    windows = with_windows(config, values, layer_types(values, every=2))
    return replace(
        windows,
        layers=tuple(replace(kind, has_sinks=True) for kind in windows.layers),
        clamped_swiglu=ClampedSwiglu(values.number("swiglu_limit"), values.number("swiglu_alpha")),
    )


DENSE: Final = {
    "DenseLlama4": Family(
        architecture="DenseLlama4ForCausalLM",
        model_type="llama4_text",
        defaults={
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "attention_chunk_size": 8192,
            "no_rope_layer_interval": 4,
        },
        refine=_with_chunks,
        only={"moe_layers": [], "use_qk_norm": False, "attn_temperature_tuning": False},
        tensors={
            "gate_up": ("feed_forward.gate_proj", "feed_forward.up_proj"),
            "down": ("feed_forward.down_proj",),
        },
        without_effect=frozenset({"intermediate_size_mlp"}),
    ),
    "DenseGptOss": Family(
        architecture="DenseGptOssForCausalLM",
        model_type="gpt_oss",
        defaults={
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150_000.0,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
            "sliding_window": 128,
            "layer_types": None,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
        },
        refine=_with_sinks,
        without_effect=frozenset({"num_local_experts", "num_experts_per_tok"}),
    ),
}
"""The families, by ``family`` of their cases."""


@contextmanager
def dense_families_known() -> Iterator[None]:
    """Have the loader know these families inside the block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config_reader, "FAMILIES", (*FAMILIES, *DENSE.values()))
        yield


class _DenseMlp(nn.Module):
    """One expert of GPT-OSS, with the gate of transformers."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size)
        self.alpha, self.limit = config.swiglu_alpha, config.swiglu_limit

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        """Return what the expert adds, and no scores of a router."""
        neighbours = torch.stack((self.gate_proj(hidden), self.up_proj(hidden)), -1).flatten(-2)
        return self.down_proj(GptOssExperts._apply_gate(self, neighbours)), None  # type: ignore[arg-type]


def make_dense(case: dict[str, Any], folder: Path, randomise: Callable[[Any], None]) -> Any:
    """Save a random model, whose values ``randomise`` makes, and return it in transformers.

    Args:
        case: One of :data:`DENSE_CASES`, or one with other sizes.
        folder: Gets config.json and model.safetensors.
        randomise: Changes the weights of a model.
    """
    settings = dict(case)
    dense = DENSE[settings.pop("family")]
    family = dense.architecture.removeprefix("Dense").removesuffix("ForCausalLM")
    make_config = getattr(transformers, f"{family}TextConfig", None) or getattr(transformers, f"{family}Config")
    torch.manual_seed(20)
    oracle = getattr(transformers, f"{family}ForCausalLM")(make_config(**settings, attn_implementation="eager"))
    if family == "GptOss":
        for layer in oracle.model.layers:
            layer.mlp = _DenseMlp(oracle.config)
    oracle.eval()
    randomise(oracle)
    config = {**settings, "architectures": [dense.architecture], "model_type": dense.model_type}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.clone() for name, tensor in oracle.state_dict().items()}, folder / "model.safetensors")
    return oracle
