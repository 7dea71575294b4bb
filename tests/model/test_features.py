"""Every feature of a random model matters: without it the logits differ by far more than the parity tests tolerate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import pytest

from ferrule_server.executor.base import Float32Array
from ferrule_server.executor.torch import TorchExecutor
from ferrule_server.model.config import LayerKind, ModelConfig
from ferrule_server.model.rope import Rope
from ferrule_server.model.tensors import ModelWeights
from ferrule_server.model.weights import load_model
from tests.model.conftest import CASES, Example, make_example
from tests.model.dense_families import DENSE_CASES
from tests.model.stepping import Piece, PooledSequence, Stepper
from tests.model.test_decoder import PROMPT, RELATIVE_TOLERANCE

LEAST_SHARE = 100 * RELATIVE_TOLERANCE
"""Of the largest logit: how much some logit moves at least if a feature is switched off."""

WHOLE_MODEL: dict[str, Any] = {
    "clamped_swiglu": None,
    "norm_offset": 0.0,
    "has_layer_norm": False,
    "has_v_norm": False,
    "score_softcap": 0.0,
    "query_temperature": None,
    "embedding_scale": 1.0,
    "residual_scale": 1.0,
    "logit_scale": 1.0,
    "logit_softcap": 0.0,
}
"""Fields that can be switched off, with the value that does so."""

TENSORS = (
    "q_norm", "attention_out_norm", "mlp_out_norm", "qkv_bias", "attention_out_bias", "gate_up_bias", "down_bias",
    "attention_norm_bias", "mlp_norm_bias", "input_norm", "scale", "sinks", "shared_gate",
)  # fmt: skip
"""Tensors of a layer that exist only for a feature, and without which it still runs."""


@dataclass(frozen=True)
class Switch:
    """One feature, and the model without it."""

    name: str
    config: ModelConfig
    drop: tuple[str, ...] = ()


def switches(config: ModelConfig) -> Iterator[Switch]:
    """Yield every feature of a network that can be switched off."""
    for name, off in WHOLE_MODEL.items():
        if getattr(config, name) != off and not (name == "has_layer_norm" and config.has_norm_bias):
            yield Switch(name, replace(config, **{name: off}))
    if (clamped := config.clamped_swiglu) is not None:
        yield Switch("limit of SwiGLU", replace(config, clamped_swiglu=replace(clamped, limit=1e30)))
        yield Switch("alpha of SwiGLU", replace(config, clamped_swiglu=replace(clamped, alpha=1.0)))
    if config.activation != "silu":
        yield Switch("activation", replace(config, activation="silu"))
    for name, change in LAYERS.items():
        layers = tuple(change(kind) for kind in config.layers)
        if layers != config.layers:
            yield Switch(name, replace(config, layers=layers))


def _with_rope(change: Callable[[Rope], Rope]) -> Callable[[LayerKind], LayerKind]:
    return lambda kind: kind if kind.rope is None else replace(kind, rope=change(kind.rope))


def _with_experts(**changes: Any) -> Callable[[LayerKind], LayerKind]:
    return lambda kind: replace(kind, experts=kind.experts and replace(kind.experts, **changes))


LAYERS: dict[str, Callable[[LayerKind], LayerKind]] = {
    "window": lambda kind: replace(kind, window=0),
    "chunk": lambda kind: replace(kind, chunk=0),
    "chunk as a window": lambda kind: replace(kind, chunk=0, window=kind.chunk or kind.window),
    "rope": lambda kind: replace(kind, rope=None),
    "no rope": lambda kind: replace(kind, rope=kind.rope or Rope(1e4, kind.head_dim // 2, kind.head_dim)),
    "scaling": _with_rope(lambda rope: replace(rope, scaling=None)),
    "interleaved": _with_rope(lambda rope: replace(rope, is_interleaved=False)),
    "score scale": lambda kind: replace(kind, score_scale=kind.head_dim**-0.5),
    "partial": lambda kind: replace(
        kind, rope=kind.rope and replace(kind.rope, num_pairs=kind.head_dim // 2, width=kind.head_dim, scaling=None)
    ),
    "experts": _with_experts(used=1),
    "weights of experts": _with_experts(gate="sigmoid"),
    "sum of weights": lambda kind: replace(
        kind, experts=kind.experts and replace(kind.experts, is_normalised=not kind.experts.is_normalised)
    ),
    "two ropes": lambda kind: replace(kind, rope=kind.rope and Rope(1e4, kind.head_dim // 2, kind.head_dim)),
}
"""What one layer computes, changed to what it does not."""


def dropped(weights: ModelWeights, config: ModelConfig) -> Iterator[Switch]:
    """Yield the features that are tensors."""
    for name in TENSORS:
        if name in weights.layers[0]:
            pair = (name, "k_norm") if name == "q_norm" else (name,)
            yield Switch(name, config, pair)


@pytest.fixture(scope="module", params=[*CASES, *DENSE_CASES])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Example:
    """One of the awkward shapes."""
    return make_example({**CASES, **DENSE_CASES}[request.param], tmp_path_factory.mktemp("features"))


def logits_of(example: Example, switch: Switch | None) -> Float32Array:
    """Return the logits of the prompt, with a feature switched off."""
    model = load_model(example.folder, dtype="float32", config=None if switch is None else switch.config)
    assert model.weights is not None
    for layer in model.weights.layers:
        for name in switch.drop if switch is not None else ():
            layer.pop(name, None)
    executor = TorchExecutor(model, kv_memory_bytes=4 << 20, max_context=512)
    logits = Stepper(executor).logits(Piece(PooledSequence(), PROMPT, num_outputs=len(PROMPT)))
    executor.close()
    return logits


def test_every_feature_moves_the_logits(model: Example) -> None:
    """Switched off one by one, each moves some logit by more than a hundred times the tolerance."""
    loaded = load_model(model.folder, dtype="float32")
    assert loaded.weights is not None
    whole = logits_of(model, None)
    found = [*switches(loaded.config), *dropped(loaded.weights, loaded.config)]
    assert any(switch.name == "rope" for switch in found)
    for switch in found:
        moved = np.abs(logits_of(model, switch) - whole).max() / np.abs(whole).max()
        assert moved > LEAST_SHARE, f"{switch.name} moves the logits by {moved:.1e} only"


def test_every_field_of_a_network_is_covered() -> None:
    """A new field is switched off here, or is one of those that decide shapes."""
    shapes = {
        "architecture", "vocab_size", "hidden_size", "num_heads", "max_positions", "layers", "norm_eps", "is_tied",
        "eos_ids", "names", "blocks", "has_norm_before", "is_gated", "is_parallel", "activation", "has_norm_bias",
        "has_mlp_bias",
    }  # fmt: skip
    by_tensor = {
        "qk_norm", "has_norm_after", "has_qkv_bias", "has_attention_out_bias", "has_layer_scale", "per_layer_input",
    }  # fmt: skip
    assert {field.name for field in fields(ModelConfig)} == {*WHOLE_MODEL, *shapes, *by_tensor}


def test_every_field_of_a_layer_is_covered() -> None:
    """A new field is switched off by a function or as a tensor, or is one of those that decide shapes."""
    shapes = {"head_dim", "num_kv_heads", "intermediate_size", "kv_layer", "is_value_key"}
    by_tensor = {"has_sinks"}
    switched = {"window", "chunk", "rope", "score_scale", "experts"}
    assert {field.name for field in fields(LayerKind)} == {*shapes, *by_tensor, *switched}
