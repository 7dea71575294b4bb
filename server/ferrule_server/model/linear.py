"""Linear layers of the decoder, with weights repacked for oneDNN if that is faster.

Measured on 2 Zen 5 cores: 1 to 4 rows read packed bfloat16 weights at 30-38 GB/s and plain ones at 21-24 GB/s. In
float32, batches and prefill are twice as fast. The packed weight replaces the plain one, so memory stays the same.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ferrule_server.kernels import reference
from ferrule_server.model.memory import use_huge_pages

_SMALL_BYTES = 32 << 20
_PANEL_ROWS = 64

Embed = Callable[[Tensor], Tensor]
"""Maps token ids int64 [rows] to [rows, hidden_size]."""

Linear = Callable[[Tensor], Tensor]
"""Maps [rows, in_features] to [rows, out_features], the same dtype."""

AddLinear = Callable[[Tensor, Tensor], None]
"""Adds what a linear layer makes of [rows, in_features] to [rows, out_features], its first argument, in place."""

MakeLinear = Callable[[Tensor, Tensor | None], Linear]
"""Makes the layer of a weight [out_features, in_features] and a bias [out_features] or None."""


def plain_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """Return the linear layer of a weight [out_features, in_features] that is not repacked."""
    return lambda x: reference.linear(x, weight, bias)


def adding(linear: Linear, norm: Callable[[Tensor], Tensor] | None = None, scale: float = 1.0) -> AddLinear:
    """Return the addition of what a linear layer returns, normed and multiplied first."""

    def add(total: Tensor, x: Tensor) -> None:
        out = linear(x)
        if norm is not None:
            out = norm(out)
        total += out if scale == 1 else out * scale

    return add


def fused_adding(weight: Tensor, bias: Tensor | None) -> AddLinear:
    """Return the addition of a linear layer in one product, rounded once; a bias is added apart."""

    def add(total: Tensor, x: Tensor) -> None:
        total.addmm_(x, weight.t())
        if bias is not None:
            total += bias

    return add


def packed_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """Return the linear layer over a repacked copy of a weight; the caller then drops ``weight``.

    Args:
        weight: [out_features, in_features] on the CPU, for which :func:`can_pack` is true.
        bias: [out_features], or None.
    """
    return _run_packed(_pack(weight), bias)


def plain_embedding(weight: Tensor) -> Embed:
    """Return the lookup in an embedding [vocab_size, hidden_size]."""
    return lambda token_ids: F.embedding(token_ids, weight)


def tied_ends(weight: Tensor) -> tuple[Embed, Linear]:
    """Return the embedding and the output head of one matrix, the head packed.

    A small matrix is kept twice. A large one is kept packed only, and its rows are looked up in the packed memory if
    oneDNN laid it out as expected, which is checked bit for bit. Otherwise it is kept plain only.

    Args:
        weight: [vocab_size, hidden_size] on the CPU, for which :func:`can_pack` is true; the caller then drops it.
    """
    packed = _pack(weight)
    if weight.nbytes <= _SMALL_BYTES:
        return plain_embedding(weight), _run_packed(packed, None)
    lookup = _packed_lookup(packed, weight)
    if lookup is None:
        return plain_embedding(weight), plain_linear(weight, None)
    return lookup, _run_packed(packed, None)


def _pack(weight: Tensor) -> Tensor:
    """Return an opaque packed copy in huge pages."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, 1)  # noqa: SLF001  (no public name exists)
    use_huge_pages(torch.ops.mkldnn.data_ptr(packed), torch.ops.mkldnn._nbytes(packed))  # noqa: SLF001
    return packed


def _run_packed(packed: Tensor, bias: Tensor | None) -> Linear:
    run = torch.ops.mkldnn._linear_pointwise.default  # noqa: SLF001  (what torch.compile emits for linear layers)

    def apply(x: Tensor) -> Tensor:
        out: Tensor = run(x, packed, bias, "none", [], "")
        return out

    return apply


def _packed_lookup(packed: Tensor, weight: Tensor) -> Embed | None:
    """Return the lookup of rows in packed bfloat16 memory, or None if its layout is not the expected one.

    The expected layout is panels of 64 rows. A panel holds its pairs of columns in order, each 64 times 2 values::

        packed[panel][pair][row][2]  =  weight[64 * panel + row][2 * pair : 2 * pair + 2]
    """
    num_rows, num_columns = weight.shape
    is_expected = weight.dtype == torch.bfloat16 and num_rows % _PANEL_ROWS == 0 and num_columns % 2 == 0
    if not is_expected or torch.ops.mkldnn._nbytes(packed) != weight.nbytes:  # noqa: SLF001
        return None
    memory = (ctypes.c_char * weight.nbytes).from_address(torch.ops.mkldnn.data_ptr(packed))
    panels = torch.frombuffer(memory, dtype=weight.dtype).view(-1, num_columns // 2, _PANEL_ROWS, 2)

    def lookup(token_ids: Tensor) -> Tensor:
        assert packed.is_mkldnn  # keeps the memory behind ``panels`` alive
        return panels[token_ids // _PANEL_ROWS, :, token_ids % _PANEL_ROWS].flatten(1)

    return lookup if _is_same(panels, weight) else None


def _is_same(panels: Tensor, weight: Tensor) -> bool:
    """Return whether the rows of the packed panels equal those of the plain weight bit for bit."""
    for index, panel in enumerate(panels.view(torch.int16)):
        rows = weight[index * _PANEL_ROWS : (index + 1) * _PANEL_ROWS].view(torch.int16)
        if not torch.equal(panel.transpose(0, 1).flatten(1), rows):
            return False
    return True


def can_pack(weight: Tensor) -> bool:
    """Return whether oneDNN packs and multiplies this weight on this machine; a small piece of it is tried."""
    if weight.device.type != "cpu":
        return False
    try:
        packed_linear(weight[:1].contiguous(), None)(torch.zeros(1, weight.shape[1], dtype=weight.dtype))
    except (AttributeError, RuntimeError):
        return False
    return True
