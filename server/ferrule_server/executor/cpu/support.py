"""Which models the kernels of a processor run. What is not listed here runs in torch, with the reason."""

from __future__ import annotations

from typing import Final

from ferrule_server.model.config import ModelConfig

__all__ = ["unsupported"]

_HEAD_STEP: Final = 32
_HIDDEN_STEP: Final = 16


def unsupported(config: ModelConfig) -> str:
    """Return why the kernels cannot run a model, for people; empty if they can."""
    if config.head_dim % _HEAD_STEP:
        return f"head_dim {config.head_dim} is not a multiple of {_HEAD_STEP}"
    if config.hidden_size % _HIDDEN_STEP:
        return f"hidden_size {config.hidden_size} is not a multiple of {_HIDDEN_STEP}"
    return ""
