"""Linear layers of the decoder, with weights repacked for oneDNN where that is faster.

Measured on 2 Zen 5 cores: packed bfloat16 weights are read at 30-38 GB/s by 1 to 4 rows, plain ones at 21-24 GB/s; in
float32 batched rows and prefill gain a factor of 2. The packed weight replaces the plain one, so memory stays the same.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ferrule_server.kernels import reference

__all__ = ["Linear", "MakeLinear", "can_pack", "packed_linear", "plain_linear"]

Linear = Callable[[Tensor], Tensor]
"""Maps [rows, in_features] to [rows, out_features], the same dtype."""

MakeLinear = Callable[[Tensor, Tensor | None], Linear]
"""Makes the layer of a weight [out_features, in_features] and a bias [out_features] or None."""


def plain_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """Return the linear layer of a weight [out_features, in_features] as it is."""
    return lambda x: reference.linear(x, weight, bias)


def packed_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """Return the same layer over a repacked copy; the caller drops ``weight`` to free it.

    Args:
        weight: [out_features, in_features] on the CPU, where :func:`can_pack` holds.
        bias: [out_features], or None.
    """
    run = torch.ops.mkldnn._linear_pointwise.default  # noqa: SLF001  (no public name; torch.compile emits it)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 1)  # noqa: SLF001

    def apply(x: Tensor) -> Tensor:
        out: Tensor = run(x, packed, bias, "none", [], "")
        return out

    return apply


def can_pack(weight: Tensor) -> bool:
    """Return whether oneDNN packs and multiplies this weight here, tried on a small piece of it."""
    if weight.device.type != "cpu":
        return False
    try:
        packed_linear(weight[:1].contiguous(), None)(torch.zeros(1, weight.shape[1], dtype=weight.dtype))
    except (AttributeError, RuntimeError):
        return False
    return True
