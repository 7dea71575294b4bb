"""Decode attention alone: our kernel against flashinfer's, over KV of the same size in shuffled blocks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu import models
from benchmarks.gpu.executors import BLOCK_SIZE
from benchmarks.gpu.timing import Row, summary
from ferrule_server.kernels.cuda.spec import KernelSpec, ModelShape
from tools.gpu import measure
from tools.gpu.attention_cases import BATCHES, CONTEXT
from tools.gpu.cases import Case, cases_of
from tools.gpu.gpu import Gpu

_WORKSPACE_BYTES = 128 << 20


def specs(shape: ModelShape) -> list[KernelSpec]:
    """Return our kernels, for a bundle."""
    return [spec for case in _cases(shape) for spec in case.specs]


def _cases(shape: ModelShape) -> list[Case]:
    """Return the decodes, at the context that flashinfer is given."""
    return [case for case in cases_of("attention", shape) if "rows=1 " in case.name and f"={CONTEXT}" in case.name]


def attention(task: Row) -> Iterator[Row]:
    """Yield us of one layer's attention: ours, which also normalises, rotates and appends, then flashinfer's."""
    shape = models.shape_of(task["model"])
    gpu = Gpu(Path(task["bundle"]) if task.get("bundle") else None, task["dry"])
    for case in _cases(shape)[: 1 if gpu.is_dry else None]:
        made = measure.dry_run(gpu, case) if gpu.is_dry else measure.time_case(gpu, case)
        yield {"kind": "attention", "arm": "ferrule", "context": CONTEXT, "status": "ok", **made}
        case.state.clear()
    try:
        import flashinfer  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError as error:
        yield {"kind": "attention", "arm": "flashinfer", "status": "left out", "reason": f"not installed ({error})"}
        return
    for batch in BATCHES:
        for has_mma in (False, True):
            yield _flashinfer(flashinfer, shape, batch, gpu, has_mma=has_mma)


def _flashinfer(flashinfer: Any, shape: ModelShape, batch: int, gpu: Gpu, *, has_mma: bool) -> Row:
    """Return us of flashinfer's batch decode over as many layers as no cache holds, in one graph."""
    num_blocks, device = CONTEXT // BLOCK_SIZE, gpu.torch_device
    order = np.random.default_rng(3).permutation(batch * num_blocks).astype(np.int32)
    layer_bytes = 2 * batch * CONTEXT * shape.num_kv_heads * shape.head_dim * 2
    num_layers = max(1, min(shape.num_layers, -(-measure.COLD_BYTES // layer_bytes)))
    size = (batch * num_blocks, 2, shape.num_kv_heads, BLOCK_SIZE, shape.head_dim)
    pools = [torch.randn(size, device=device).bfloat16() for _ in range(num_layers)]
    query = torch.randn(batch, shape.num_heads, shape.head_dim, device=device).bfloat16()
    workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    starts = torch.arange(0, batch * num_blocks + 1, num_blocks, dtype=torch.int32, device=device)
    lasts = torch.full((batch,), BLOCK_SIZE, dtype=torch.int32, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace,
        "HND",
        use_cuda_graph=True,
        use_tensor_cores=has_mma,
        paged_kv_indptr_buffer=starts.clone(),
        paged_kv_indices_buffer=torch.from_numpy(order).to(device),
        paged_kv_last_page_len_buffer=lasts.clone(),
    )
    heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim, BLOCK_SIZE)
    wrapper.plan(starts, torch.from_numpy(order).to(device), lasts, *heads, q_data_type=torch.bfloat16)
    out = torch.empty_like(query)
    graph = measure.captured(lambda: [wrapper.run(query, pool, out=out) for pool in pools])
    us = summary([one / num_layers for one in measure.time_us(graph)], 2)
    row: Row = {
        "kind": "attention",
        "arm": f"flashinfer{', tensor cores' if has_mma else ''}",
        "case": f"attention rows=1 batch={batch} context={CONTEXT}",
    }
    return {
        **row,
        "context": CONTEXT,
        "us": us["median"],
        "gbs": round(layer_bytes / us["median"] / 1e3, 1),
        "status": "ok",
    }
