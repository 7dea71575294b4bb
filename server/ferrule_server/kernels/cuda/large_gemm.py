"""Products with more rows than the kernels here take: cuBLAS, through torch, into a buffer that is there already."""

from __future__ import annotations

import torch
from torch import Tensor

from ferrule_server.kernels.cuda.gemm import MAX_TOKENS

__all__ = ["linear_out"]


def linear_out(x: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
    """Put ``x @ weight.T + bias`` into ``out``; no result is allocated.

    For more than ``MAX_TOKENS`` rows. cuBLAS adds in an order of its own, which may change with the number of rows:
    what promises equal bits uses :func:`ferrule_server.kernels.cuda.gemm.gemm` in turns of 64 rows instead.

    Args:
        x: bf16 [rows, in_features].
        weight: bf16 [out_features, in_features].
        out: bf16 [rows, out_features], contiguous, written.
        bias: bf16 [out_features], added before rounding.

    Raises:
        ValueError: Few enough rows for the kernel.
    """
    if len(x) <= MAX_TOKENS:
        raise ValueError(f"{len(x)} rows are work for the kernel, which takes up to {MAX_TOKENS}")
    if bias is None:
        torch.matmul(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)
