"""Activations: how the inputs of linear layers are stored, the norm, the embedding and the rotation of heads."""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from ferrule_server.kernels.cpu.kernel import Lanes, Record, kernel
from ferrule_server.kernels.cpu.lanes import (
    LANES,
    add,
    divide,
    fma,
    load,
    load_bfloat16,
    max_of,
    maximum,
    multiply,
    rint,
    round_to_bfloat16,
    splat,
    store,
    store_bfloat16,
    store_int8_exchanged,
    store_int16,
    subtract,
    sum_of,
    tanh,
)
from ferrule_server.kernels.cpu.plan import Plan
from ferrule_server.kernels.cpu.scalars import (
    read_bfloat16,
    read_float32,
    read_int8,
    read_int32,
    write_float32,
    write_int32,
)

_ROOT_HALF: Final = np.float32(math.sqrt(0.5))
SCALE_BYTES: Final = 8
"""What :func:`quantise_row` writes for some tiles."""


@kernel
def store_input(plan: Plan, row: int, column: int, x: Lanes) -> None:
    """Write 16 inputs of a linear layer from a column on, rounded to bfloat16 if the weights are bfloat16."""
    if plan.has_wide_inputs:
        store(row + 4 * column, round_to_bfloat16(x) if plan.has_rounded_inputs else x)
    else:
        store_bfloat16(row + 2 * column, x)


@kernel
def load_element(plan: Plan, base: int, index: int) -> Lanes:
    """Return 16 elements of weights or KV, from an index on."""
    if plan.is_bfloat16:
        return load_bfloat16(base + 2 * index)
    return load(base + 4 * index)


@kernel
def copy_values(source: int, size: int, target: int) -> None:
    """Copy float32 values; ``size`` is a multiple of 16."""
    for i in range(0, size, LANES):
        store(target + 4 * i, load(source + 4 * i))


@kernel
def clear_values(place: int, size: int) -> None:
    """Write zeros as float32 values; ``size`` is a multiple of 16."""
    for i in range(0, size, LANES):
        store(place + 4 * i, splat(np.float32(0)))


@kernel
def store_row(plan: Plan, row: int, size: int, out: int) -> None:
    """Write a float32 row as inputs of a linear layer; ``size`` is a multiple of 16."""
    for i in range(0, size, LANES):
        store_input(plan, out, i, load(row + 4 * i))


@kernel
def norm_row(plan: Plan, row: int, weight: int, size: int, eps: float, out: int) -> None:
    """Write an RMSNorm of a float32 row as inputs of a linear layer; ``size`` is a multiple of 16."""
    scale = _inverse_root(_squares(row, size), size, eps)
    for i in range(0, size, LANES):
        store_input(plan, out, i, multiply(multiply(load(row + 4 * i), scale), load(weight + 4 * i)))


@kernel
def layer_norm_row(plan: Plan, row: int, weight: int, bias: int, size: int, eps: float, out: int) -> None:
    """Write a LayerNorm of a float32 row as inputs of a linear layer; ``bias`` may be 0."""
    total, squares = splat(np.float32(0)), splat(np.float32(0))
    for i in range(0, size, LANES):
        total = add(total, load(row + 4 * i))
    mean = splat(sum_of(total) / np.float32(size))
    for i in range(0, size, LANES):
        x = subtract(load(row + 4 * i), mean)
        squares = fma(x, x, squares)
    scale = _inverse_root(sum_of(squares), size, eps)
    for i in range(0, size, LANES):
        x = multiply(multiply(subtract(load(row + 4 * i), mean), scale), load(weight + 4 * i))
        store_input(plan, out, i, add(x, load(bias + 4 * i)) if bias else x)


@kernel
def add_normed(row: int, source: int, weight: int, size: int, eps: float, factor: np.float32) -> None:
    """Add an RMSNorm of another float32 row, times a number, to a float32 row."""
    scale, factors = _inverse_root(_squares(source, size), size, eps), splat(factor)
    for i in range(0, size, LANES):
        x = multiply(multiply(load(source + 4 * i), scale), load(weight + 4 * i))
        store(row + 4 * i, add(load(row + 4 * i), multiply(x, factors)))


@kernel
def _squares(row: int, size: int) -> float:
    """Return the sum of the squares of a float32 row."""
    squares = splat(np.float32(0))
    for i in range(0, size, LANES):
        x = load(row + 4 * i)
        squares = fma(x, x, squares)
    return sum_of(squares)


@kernel
def _inverse_root(squares: float, size: int, eps: float) -> Lanes:
    """Return 1 / sqrt(mean square + eps) in all lanes."""
    return splat(np.float32(1) / np.float32(math.sqrt(squares / np.float32(size) + eps)))


@kernel
def head_scale(head: int, size: int, eps: float) -> Lanes:
    """Return what scales a float32 head to a mean square of 1, in all lanes."""
    return _inverse_root(_squares(head, size), size, eps)


@kernel
def scale_row(row: int, size: int, factor: np.float32) -> None:
    """Multiply a float32 row by a number, in place."""
    factors = splat(factor)
    for i in range(0, size, LANES):
        store(row + 4 * i, multiply(load(row + 4 * i), factors))


@kernel
def norm_head(head: int, weight: int, size: int, eps: float) -> None:
    """Normalise a float32 head, or all heads of a row together, in place."""
    scale = head_scale(head, size, eps)
    for i in range(0, size, LANES):
        store(head + 4 * i, multiply(multiply(load(head + 4 * i), scale), load(weight + 4 * i)))


@kernel
def rotate_head(head: int, size: int, cosines: int, sines: int, scale: np.float32) -> None:
    """Rotate a float32 head in place by the angles of a row, and multiply it by a number; ``size`` is even."""
    half = size // 2
    whole = half // LANES * LANES
    factor = splat(scale)
    for i in range(whole, half):
        c, s = read_float32(cosines + 4 * i), read_float32(sines + 4 * i)
        x, y = read_float32(head + 4 * i), read_float32(head + 4 * (half + i))
        write_float32(head + 4 * i, scale * (x * c - y * s))
        write_float32(head + 4 * (half + i), scale * (y * c + x * s))
    for i in range(0, whole, LANES):
        cos, sin = load(cosines + 4 * i), load(sines + 4 * i)
        first, second = load(head + 4 * i), load(head + 4 * (half + i))
        store(head + 4 * i, multiply(factor, subtract(multiply(first, cos), multiply(second, sin))))
        store(head + 4 * (half + i), multiply(factor, add(multiply(second, cos), multiply(first, sin))))


@kernel
def rotation_row(position: int, table: int, size: int, out: int) -> None:
    """Write the cosines, then the sines, of the angles of a position; float64 makes them the same everywhere.

    ``table`` is the address of float32 [2, size / 2]: radians per position, and what multiplies cosine and sine.
    """
    half = size // 2
    for i in range(half):
        angle = np.float64(np.float32(position) * read_float32(table + 4 * i))
        magnitude = read_float32(table + 4 * (half + i))
        write_float32(out + 4 * i, np.float32(math.cos(angle)) * magnitude)
        write_float32(out + 4 * (half + i), np.float32(math.sin(angle)) * magnitude)


@kernel
def softcap(x: Lanes, cap: np.float32) -> Lanes:
    """Return ``cap * tanh(x / cap)``."""
    caps = splat(cap)
    return multiply(caps, tanh(divide(x, caps)))


@kernel
def embed_row(plan: Plan, model: Record, token_id: int, out: int) -> None:
    """Write the embedding of a token as float32, times ``embedding_scale``."""
    _look_up(plan, model, token_id, out)
    factor = splat(model.embedding_scale)
    for i in range(0, model.hidden_size, LANES):
        store(out + 4 * i, multiply(load(out + 4 * i), factor))


@kernel
def mix_inputs(plan: Plan, model: Record, step: Record, stage: Record, row: int) -> None:
    """Norm what each layer reads of the embedding of a row, float32 [input_size], and add the second embedding."""
    size, half, factor = model.input_size, splat(_ROOT_HALF), splat(model.input_scale)
    token_id = read_int32(step.token_ids + 4 * row)
    for layer in range(model.num_layers):
        out = step.inputs + 4 * (row * model.num_layers + layer) * size
        scale_row(out, size, stage.factor)
        norm_head(out, stage.weight, size, model.norm_eps)
        begin = (token_id * model.num_layers + layer) * size
        for i in range(0, size, LANES):
            own = multiply(load_element(plan, model.input_embedding, begin + i), factor)
            store(out + 4 * i, multiply(add(load(out + 4 * i), own), half))


@kernel
def _look_up(plan: Plan, model: Record, token_id: int, out: int) -> None:
    """Write the embedding of a token as float32. A tied one is read out of the packed output head."""
    size = model.hidden_size
    if not model.is_tied:
        for i in range(0, size, LANES):
            store(out + 4 * i, load_element(plan, model.embedding, token_id * size + i))
        return
    group = model.embedding + token_id // 64 * (model.hidden_tiles * plan.tile_bytes + plan.group_end_bytes)
    row = token_id % 64
    for k in range(size):
        if plan.is_quantised:
            write_float32(out + 4 * k, read_quantised(plan, group, row, k, model.hidden_tiles))
        elif plan.is_bfloat16:
            write_float32(out + 4 * k, read_bfloat16(group + k // 2 * 256 + 4 * row + k % 2 * 2))
        else:
            write_float32(out + 4 * k, read_float32(group + 256 * k + 4 * row))


@kernel
def read_quantised(plan: Plan, group: int, row: int, k: int, num_tiles: int) -> np.float32:
    """Return the weight of one of 64 outputs and of one input (``dot_quantised`` says where it is)."""
    tile, i = group + k // 32 * plan.tile_bytes, k % 32
    if plan.group_end_bytes:
        value = read_int8(tile + i // 4 * 256 + 4 * row + i % 2 * 2 + i % 4 // 2)
        return np.float32(value) * read_float32(group + num_tiles * plan.tile_bytes + 4 * row)
    byte = read_int8(tile + i // 8 * 256 + 4 * row + i % 2 * 2 + i % 8 // 4)
    value = byte >> 4 if i % 4 // 2 else (byte & 15 ^ 8) - 8
    return np.float32(value) * read_bfloat16(tile + 1024 + 2 * row)


@kernel
def quantise_row(plan: Plan, row: int, num_tiles: int, out: int) -> None:
    """Write a float32 row as integers, then the data of every ``plan.tiles_at_once`` tiles of inputs.

    That is a float32 scale, NaN if an input is not finite, so that the outputs are not either; and for int8 what all
    sums begin with, because the products are with weights that are 128 larger: int32, -128 times the sum of the inputs.
    """
    zero, most = splat(np.float32(0)), np.float32(127 if plan.has_int8_inputs else 32767)
    for first in range(0, num_tiles, plan.tiles_at_once):
        begin, end = first * 32, min(num_tiles, first + plan.tiles_at_once) * 32
        top, invalid = zero, zero
        for i in range(begin, end, LANES):
            x = load(row + 4 * i)
            top = maximum(maximum(x, subtract(zero, x)), top)
            invalid = fma(x, zero, invalid)
        largest = max_of(top)
        factor = splat(most / largest if largest > np.float32(1e-30) else np.float32(0))
        total = zero
        for i in range(begin, end, LANES):
            x = rint(multiply(load(row + 4 * i), factor))
            if plan.has_int8_inputs:
                total = add(total, x)
                store_int8_exchanged(out + i, x)
            else:
                store_int16(out + 2 * i, x)
        place = out + plan.input_tile_bytes * num_tiles + SCALE_BYTES * (first // plan.tiles_at_once)
        write_float32(place, largest / most + sum_of(invalid))
        if plan.has_int8_inputs:
            write_int32(place + 4, -128 * np.int64(sum_of(total)))
