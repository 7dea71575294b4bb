"""Which models the kernels of a processor run, and how they are compiled for one; torch runs all others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ferrule_server.kernels.cpu.plan import Instructions, Plan, WeightKind
from ferrule_server.kernels.cpu.processor import choose_instructions
from ferrule_server.model.config import ModelConfig

__all__ = ["Choice", "WeightKind", "choose", "plan_for", "unsupported"]

_HEAD_STEP: Final = 32
_HIDDEN_STEP: Final = 16


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
        weights: Whether and how linear layers are quantised.
        has_int8_inputs: Whether their inputs are int8 too, with weights of int8.
    """
    instructions, reason = choose_instructions(dtype, weights)
    why_not = unsupported(config)
    if instructions is None or why_not:
        return Choice(None, f"the kernels of the processor cannot run: {why_not or reason}")
    if has_int8_inputs and instructions != "avx512-vnni":
        return Choice(None, "inputs in int8 need a processor with AVX512-VNNI")
    return Choice(plan_for(config, instructions, dtype, weights, has_int8_inputs=has_int8_inputs), reason)


def unsupported(config: ModelConfig) -> str:
    """Return why the kernels cannot run a model, for people; empty if they can."""
    if config.head_dim % _HEAD_STEP:
        return f"head_dim {config.head_dim} is not a multiple of {_HEAD_STEP}"
    if config.hidden_size % _HIDDEN_STEP:
        return f"hidden_size {config.hidden_size} is not a multiple of {_HIDDEN_STEP}"
    return ""


def plan_for(
    config: ModelConfig,
    instructions: Instructions,
    dtype: str,
    weights: WeightKind = "float",
    *,
    has_int8_inputs: bool = False,
) -> Plan:
    """Return how kernels for a model are compiled.

    Args:
        config: The network.
        instructions: What the processor has.
        dtype: As for :func:`choose`.
        weights: As for :func:`choose`.
        has_int8_inputs: As for :func:`choose`.
    """
    return Plan(
        instructions=instructions,
        is_emulated=False,
        is_bfloat16=dtype == "bfloat16",
        head_dim=config.head_dim,
        weights=weights,
        has_int8_inputs=has_int8_inputs,
    )
