"""Granite 3, dense: as Llama, with multipliers of embedding, scores, residual stream and logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from ferrule_server.model.config import ModelConfig
from ferrule_server.model.families.family import Family
from ferrule_server.model.families.values import ConfigValues


def _refine(config: ModelConfig, values: ConfigValues) -> ModelConfig:
    scale = values.number("attention_multiplier")
    return replace(
        config,
        layers=tuple(replace(kind, score_scale=scale) for kind in config.layers),
        embedding_scale=values.number("embedding_multiplier"),
        residual_scale=values.number("residual_multiplier"),
        logit_scale=1 / values.number("logits_scaling"),
    )


GRANITE: Final = Family(
    architecture="GraniteForCausalLM",
    model_type="granite",
    defaults={
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_multiplier": 1.0,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "logits_scaling": 1.0,
    },
    refine=_refine,
    models="Granite 3, dense",
    differs="multipliers of embedding, scores, residual stream and logits",
    example="ibm-granite/granite-3.3-2b-instruct",
)
