"""Frequencies of the rotary positions, plain or scaled as in Llama 3.1."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ferrule_server.model.config import Llama3Scaling, ModelConfig

__all__ = ["inverse_frequencies"]


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """Return the radians per position of each pair of values: float32 [head_dim / 2], on the CPU."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    return frequencies if config.rope_scaling is None else _scale(frequencies, config.rope_scaling)


def _scale(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Divide low frequencies by the factor, keep high ones, and interpolate between them."""
    wavelengths = 2 * math.pi / frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = ((scaling.original_max_positions / wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
