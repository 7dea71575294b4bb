"""Configurations of networks whose layers are all equal, and changes to all layers of one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ferrule_server.model.config import LayerKind, ModelConfig
from ferrule_server.model.rope import Rope, Scaling

__all__ = ["uniform_config", "with_layers"]


def uniform_config(
    *,
    num_layers: int = 1,
    num_heads: int = 1,
    num_kv_heads: int = 1,
    head_dim: int = 8,
    intermediate_size: int = 64,
    rope_theta: float = 10_000.0,
    scaling: Scaling | None = None,
    **others: Any,
) -> ModelConfig:
    """Return a network of equal layers that rotate whole heads and divide scores by the root of ``head_dim``.

    Args:
        num_layers: Decoder layers.
        num_heads: Query heads.
        num_kv_heads: Key and value heads.
        head_dim: Width of one head, even.
        intermediate_size: Width inside the feed-forward part.
        rope_theta: Base of the rotary frequencies.
        scaling: Of these frequencies.
        others: Further fields of :class:`ModelConfig`.
    """
    kind = LayerKind(
        head_dim=head_dim,
        num_kv_heads=num_kv_heads,
        intermediate_size=intermediate_size,
        score_scale=head_dim**-0.5,
        rope=Rope(rope_theta, head_dim // 2, head_dim, scaling),
    )
    sizes = {"architecture": "none", "vocab_size": 64, "hidden_size": 64, "max_positions": 4096}
    return ModelConfig(**{**sizes, "num_heads": num_heads, "layers": (kind,) * num_layers, **others})


def with_layers(config: ModelConfig, *, num_layers: int | None = None, **changes: Any) -> ModelConfig:
    """Return the network with other fields in all of its layers, and as many layers as ``num_layers`` says.

    If ``head_dim`` changes, whole heads are rotated, and scores are divided by its root.
    """
    kinds = tuple(_changed(kind, changes) for kind in config.layers)
    return replace(config, layers=kinds if num_layers is None else (kinds[0],) * num_layers)


def _changed(kind: LayerKind, changes: dict[str, Any]) -> LayerKind:
    head_dim = changes.get("head_dim")
    if head_dim is not None:
        rope = None if kind.rope is None else replace(kind.rope, num_pairs=head_dim // 2, width=head_dim)
        changes = {"rope": rope, "score_scale": head_dim**-0.5, **changes}
    return replace(kind, **changes)
