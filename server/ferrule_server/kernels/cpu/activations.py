"""Activations: how the inputs of linear layers are stored, the norm, the embedding and the rotation of heads."""

from __future__ import annotations

import math

import numpy as np

from ferrule_server.kernels.cpu.kernel import Lanes, Record, kernel
from ferrule_server.kernels.cpu.lanes import (
    LANES,
    add,
    fma,
    load,
    load_bfloat16,
    multiply,
    round_to_bfloat16,
    splat,
    store,
    store_bfloat16,
    subtract,
    sum_of,
)
from ferrule_server.kernels.cpu.plan import Plan
from ferrule_server.kernels.cpu.scalars import read_bfloat16, read_float32, write_float32

__all__ = ["embed_row", "load_element", "norm_head", "norm_row", "rotate_head", "rotation_row", "store_input"]


@kernel
def store_input(plan: Plan, row: int, column: int, x: Lanes) -> None:
    """Write 16 inputs of a linear layer from a column on, rounded to bfloat16 if the weights are bfloat16."""
    if plan.has_wide_inputs:
        store(row + 4 * column, round_to_bfloat16(x) if plan.is_bfloat16 else x)
    else:
        store_bfloat16(row + 2 * column, x)


@kernel
def load_element(plan: Plan, base: int, index: int) -> Lanes:
    """Return 16 elements of weights or KV, from an index on."""
    if plan.is_bfloat16:
        return load_bfloat16(base + 2 * index)
    return load(base + 4 * index)


@kernel
def norm_row(plan: Plan, row: int, weight: int, size: int, eps: float, out: int) -> None:
    """Write an RMSNorm of a float32 row as inputs of a linear layer; ``size`` is a multiple of 16."""
    squares = splat(np.float32(0))
    for i in range(0, size, LANES):
        x = load(row + 4 * i)
        squares = fma(x, x, squares)
    scale = _inverse_root(sum_of(squares), size, eps)
    for i in range(0, size, LANES):
        store_input(plan, out, i, multiply(multiply(load(row + 4 * i), scale), load(weight + 4 * i)))


@kernel
def _inverse_root(squares: float, size: int, eps: float) -> Lanes:
    """Return 1 / sqrt(mean square + eps) in all lanes."""
    return splat(np.float32(1) / np.float32(math.sqrt(squares / np.float32(size) + eps)))


@kernel
def norm_head(head: int, weight: int, size: int, eps: float) -> None:
    """Normalise a float32 head in place."""
    squares = splat(np.float32(0))
    for i in range(0, size, LANES):
        x = load(head + 4 * i)
        squares = fma(x, x, squares)
    scale = _inverse_root(sum_of(squares), size, eps)
    for i in range(0, size, LANES):
        store(head + 4 * i, multiply(multiply(load(head + 4 * i), scale), load(weight + 4 * i)))


@kernel
def rotate_head(head: int, size: int, rotation: int, scale: np.float32) -> None:
    """Rotate a float32 head in place by the angles of a row, and multiply it by a number."""
    half = size // 2
    factor = splat(scale)
    for i in range(0, half, LANES):
        cos, sin = load(rotation + 4 * i), load(rotation + 4 * (half + i))
        first, second = load(head + 4 * i), load(head + 4 * (half + i))
        store(head + 4 * i, multiply(factor, subtract(multiply(first, cos), multiply(second, sin))))
        store(head + 4 * (half + i), multiply(factor, add(multiply(second, cos), multiply(first, sin))))


@kernel
def rotation_row(position: int, frequencies: int, size: int, out: int) -> None:
    """Write the cosines, then the sines, of the angles of a position; float64 makes them the same everywhere."""
    half = size // 2
    for i in range(half):
        angle = np.float64(np.float32(position) * read_float32(frequencies + 4 * i))
        write_float32(out + 4 * i, np.float32(math.cos(angle)))
        write_float32(out + 4 * (half + i), np.float32(math.sin(angle)))


@kernel
def embed_row(plan: Plan, model: Record, token_id: int, out: int) -> None:
    """Write the embedding of a token as float32. A tied one is read out of the packed output head."""
    size = model.hidden_size
    if not model.is_tied:
        for i in range(0, size, LANES):
            store(out + 4 * i, load_element(plan, model.embedding, token_id * size + i))
        return
    group, row = token_id // 64, token_id % 64
    rows = model.embedding + group * model.hidden_tiles * (2048 * (2 if plan.is_bfloat16 else 4))
    for k in range(size):
        if plan.is_bfloat16:
            write_float32(out + 4 * k, read_bfloat16(rows + k // 2 * 256 + 4 * row + k % 2 * 2))
        else:
            write_float32(out + 4 * k, read_float32(rows + 256 * k + 4 * row))
