"""KV in blocks that hold all layers, against one pool per layer: what reading a layer costs in a large pool.

A layer of a block of all layers is 64 KiB of Qwen3-8B, 2.25 MiB from that of the next block, so that a step touches
every page of the pool for every layer; per-layer pools keep a layer's blocks together. The same kernel reads both, by
other strides, through the same shuffled table.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from ferrule_server.kernels.cuda.spec import ModelShape
from tools.gpu.gpu import Call, Gpu
from tools.gpu.measure import STOPPED, captured, time_us
from tools.gpu.probes import read_blocks_spec

POOL_GIB = (8, 100)
_BLOCK_SIZE = 16
_TABLE_BLOCKS = 32 * 2048 // _BLOCK_SIZE
_MOST_LAYERS = 12


def compare(gpu: Gpu, shape: ModelShape) -> Iterator[dict[str, Any]]:
    """Yield time per layer of both layouts, for each size of the pool that fits."""
    free = 1 << 30 if gpu.is_dry else torch.cuda.mem_get_info()[0]
    for wanted_gib in POOL_GIB:
        num_bytes = min(wanted_gib << 30, int(free * 0.92))
        yield _compare(gpu, shape, num_bytes, wanted_gib)


def _compare(gpu: Gpu, shape: ModelShape, num_bytes: int, wanted_gib: int) -> dict[str, Any]:
    layer_bytes = 2 * shape.num_kv_heads * _BLOCK_SIZE * shape.head_dim * 2
    num_blocks = num_bytes // (layer_bytes * shape.num_layers)
    pool = torch.empty(num_blocks * shape.num_layers * layer_bytes, dtype=torch.uint8, device=gpu.torch_device)
    if not gpu.is_dry:
        pool.zero_()  # pages that nobody wrote may not exist
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(1))[:_TABLE_BLOCKS]
    table = order.to(gpu.torch_device, torch.int32)
    spec = read_blocks_spec()
    grid = gpu.num_sms * spec.ctas_per_sm
    out = torch.zeros(grid * spec.num_threads, dtype=torch.int32, device=gpu.torch_device)
    layouts = {"block_major": (shape.num_layers * layer_bytes, layer_bytes)}
    layouts["per_layer"] = (layer_bytes, num_blocks * layer_bytes)
    layers = range(min(shape.num_layers, _MOST_LAYERS))
    medians: dict[str, float] = {}
    spreads: dict[str, list[float]] = {name: [] for name in layouts}
    launches = {
        name: gpu.prepare(
            [
                Call(
                    spec,
                    {
                        "pool": pool,
                        "block_stride": block_stride,
                        "layer_stride": layer_stride,
                        "block_ids": table,
                        "out": out,
                        "num_blocks": len(table),
                        "layer": layer,
                        "layer_bytes": layer_bytes,
                    },
                    grid,
                )
                for layer in layers
            ]
        )
        for name, (block_stride, layer_stride) in layouts.items()
    }
    result: dict[str, Any] = {"pool_gib": round(num_bytes / 2**30, 1), "wanted_gib": wanted_gib, "blocks": len(table)}
    if gpu.is_dry:
        for chain in launches.values():
            gpu.launch(chain)
        return {**result, "status": STOPPED}
    graphs = {name: captured(partial(gpu.launch, chain)) for name, chain in launches.items()}
    for _ in range(2):  # sides alternate
        for name, graph in graphs.items():
            spreads[name] += [us / len(layers) for us in time_us(graph)]
    for name, samples in spreads.items():
        medians[name] = statistics.median(samples)
        result[f"{name}_us"] = round(medians[name], 2)
        result[f"{name}_gbs"] = round(len(table) * layer_bytes / medians[name] / 1e3, 1)
    result["block_major_over_per_layer"] = round(medians["block_major"] / medians["per_layer"], 3)
    return {**result, "status": "ok"}
