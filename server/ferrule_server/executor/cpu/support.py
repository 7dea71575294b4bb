"""Which models the kernels of a processor run, and how they are compiled for one; torch runs all others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from ferrule_server.executor.cpu.units import GROUP
from ferrule_server.executor.cpu.weights import forms_of, packed_kind
from ferrule_server.kernels.cpu.plan import Plan, WeightKind
from ferrule_server.kernels.cpu.processor import choose_instructions
from ferrule_server.kernels.matrix_kinds import TILE_INPUTS
from ferrule_server.model.config import LayerKind, ModelConfig, other_fields
from ferrule_server.model.parts import specs

_HEAD_STEP: Final = 16
_HIDDEN_STEP: Final = 16
_KNOWN_FIELDS: Final = frozenset(
    {
        "architecture", "vocab_size", "hidden_size", "num_heads", "max_positions", "layers", "norm_eps", "norm_offset",
        "has_layer_norm", "has_norm_bias", "has_norm_before", "has_norm_after", "is_parallel", "qk_norm", "has_v_norm",
        "activation", "is_gated", "score_softcap", "query_temperature", "embedding_scale", "residual_scale",
        "logit_scale", "logit_softcap", "has_layer_scale", "per_layer_input", "is_tied", "has_qkv_bias",
        "has_attention_out_bias", "has_mlp_bias", "eos_ids",
        "head_dim", "num_kv_heads", "intermediate_size", "score_scale", "rope", "window", "kv_layer", "is_value_key",
        "experts",
    }
)  # fmt: skip
"""The fields of a network and of its layers that the kernels compute; any other must have its default."""
_FEATURES: Final = {
    "clamped_swiglu": "a clamped SwiGLU",
    "chunk": "attention in chunks",
    "has_sinks": "attention sinks",
}
"""What fields that they do not compute stand for, for people."""


@dataclass(frozen=True, slots=True)
class Choice:
    """How a model runs on this processor.

    Attributes:
        plan: How the kernels are compiled; None: they cannot run, and torch runs the model.
        reason: Why so, for people.
    """

    plan: Plan | None
    reason: str


def choose(config: ModelConfig, dtype: str, weights: WeightKind = "float", *, has_int8_inputs: bool = False) -> Choice:
    """Return how a model runs on this processor.

    Args:
        config: The network.
        dtype: Of KV, and of weights that are not quantised: ``bfloat16`` or ``float32``.
        weights: Whether and how linear layers are quantised that are floats in the file.
        has_int8_inputs: Whether their inputs are int8 too, with weights of int8.
    """
    instructions, reason = choose_instructions(dtype, forms_of(config, weights))
    why_not = unsupported(config, dtype)
    if instructions is None or why_not:
        return Choice(None, f"the kernels of the processor cannot run: {why_not or reason}")
    if has_int8_inputs and instructions != "avx512-vnni":
        return Choice(None, "inputs in int8 need a processor with AVX512-VNNI")
    plan = Plan(
        instructions=instructions,
        is_emulated=False,
        is_bfloat16=dtype == "bfloat16",
        head_dim=config.head_dim,
        packed=packed_kind(config, weights),
        has_int8_inputs=has_int8_inputs,
    )
    return Choice(plan, reason)


def unsupported(config: ModelConfig, dtype: str = "bfloat16") -> str:
    """Return why the kernels cannot run a model, for people; empty if they can."""
    if dtype not in ("bfloat16", "float32"):
        return f"they compute with bfloat16 or float32, not with {dtype}"
    if width := next((kind.head_dim for kind in config.layers if kind.head_dim % _HEAD_STEP), 0):
        return f"head_dim {width} is not a multiple of {_HEAD_STEP}"
    if config.hidden_size % _HIDDEN_STEP:
        return f"hidden_size {config.hidden_size} is not a multiple of {_HIDDEN_STEP}"
    reasons = [*_unknown_fields(config), *_unlike_layers(config)]
    return f"they do not compute {', '.join(reasons)}" if reasons else ""


def _unknown_fields(config: ModelConfig) -> Iterator[str]:
    records: tuple[ModelConfig | LayerKind, ...] = (config, *config.layers)
    found = dict.fromkeys(name for record in records for name in other_fields(record, _KNOWN_FIELDS))
    yield from (_FEATURES.get(name, name) for name in found)
    if config.has_norm_after and (config.has_layer_norm or config.is_parallel):
        yield "has_norm_after"


def _unlike_layers(config: ModelConfig) -> Iterator[str]:
    """Yield what layers have that the kernels do not compute, for people."""
    kinds, inputs = config.layers, config.per_layer_input
    if inputs is not None and (inputs.size % TILE_INPUTS or inputs.vocab_size < config.vocab_size):
        yield f"a second embedding of {inputs.vocab_size} tokens and {inputs.size} values"
    widths = {config.num_heads * kind.head_dim for kind in kinds}
    if len(widths) > 1 and any(width % TILE_INPUTS for width in widths):
        yield f"heads of several widths that are together no multiple of {TILE_INPUTS}"
    if any(_heads(kind) != _heads(kinds[kind.kv_layer]) for kind in kinds if kind.kv_layer is not None):
        yield "K and V of another layer with other heads"
    experts = [kind.experts for kind in kinds if kind.experts is not None]
    if any(other != config.experts for other in experts):
        yield "experts of several sorts"
    if experts and (config.hidden_size % GROUP or experts[0].width % TILE_INPUTS):
        sizes = f"{experts[0].width} values between rows of {config.hidden_size}"
        yield f"experts of {sizes}, which are not multiples of {TILE_INPUTS} and {GROUP}"
    if experts and (config.has_norm_after or config.is_parallel):
        yield "experts with norms after them, or beside attention"
    if experts and not _are_alike(config):
        yield "experts of one layer in different types"
    if config.qk_norm == "row" and any(kind.kv_layer is not None or kind.is_value_key for kind in kinds):
        yield "norms of all heads of a row where K and V are shared"


def _are_alike(config: ModelConfig) -> bool:
    """Return whether the experts of each layer are packed alike: the kernels go from one to the next by its size."""
    types: dict[tuple[int, str], set[tuple[str | None, ...]]] = defaultdict(set)
    for spec in specs(config):
        if spec.expert >= 0 and spec.inputs is not None:
            types[spec.layer, spec.part.name].add(tuple(config.blocks.get(name) for name in spec.names))
    return all(len(found) == 1 and (len(set(*found)) == 1 or not config.has_mlp_bias) for found in types.values())


def _heads(kind: LayerKind) -> tuple[int, int]:
    return kind.num_kv_heads, kind.head_dim
