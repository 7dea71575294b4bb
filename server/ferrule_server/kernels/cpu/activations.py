"""Activations: how the inputs of linear layers are stored, the norm, the embedding and the rotation of heads."""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from ferrule_server.kernels.cpu import lanes as simd
from ferrule_server.kernels.cpu.calls import call_look_up
from ferrule_server.kernels.cpu.kernel import Lanes, Record, kernel
from ferrule_server.kernels.cpu.plan import Plan
from ferrule_server.kernels.cpu.scalars import (
    read_bfloat16,
    read_float16,
    read_float32,
    read_int8,
    read_int32,
    write_float32,
    write_int32,
)

_ROOT_HALF: Final = np.float32(math.sqrt(0.5))
SUMS_OFFSET: Final = 16
"""Where the sums of groups are in what :func:`quantise_row` writes for some tiles."""
SUMS_BYTES: Final = 16
"""Of each tile: float32 sums of its first 16 inputs, of its last 16, and of all."""
SCALE_BYTES: Final = SUMS_OFFSET + 16 * SUMS_BYTES
"""What :func:`quantise_row` writes for some tiles."""


@kernel
def store_input(plan: Plan, row: int, column: int, x: Lanes) -> None:
    """Write 16 inputs of a linear layer from a column on, rounded to bfloat16 if the weights are bfloat16."""
    if plan.has_wide_inputs:
        simd.store(row + 4 * column, simd.round_to_bfloat16(x) if plan.has_rounded_inputs else x)
    else:
        simd.store_bfloat16(row + 2 * column, x)


@kernel
def load_element(plan: Plan, base: int, index: int) -> Lanes:
    """Return 16 elements of weights or KV, from an index on."""
    if plan.is_bfloat16:
        return simd.load_bfloat16(base + 2 * index)
    return simd.load(base + 4 * index)


@kernel
def copy_values(source: int, size: int, target: int) -> None:
    """Copy float32 values; ``size`` is a multiple of 16."""
    for i in range(0, size, simd.LANES):
        simd.store(target + 4 * i, simd.load(source + 4 * i))


@kernel
def clear_values(place: int, size: int) -> None:
    """Write zeros as float32 values; ``size`` is a multiple of 16."""
    for i in range(0, size, simd.LANES):
        simd.store(place + 4 * i, simd.splat(np.float32(0)))


@kernel
def store_row(plan: Plan, row: int, size: int, out: int) -> None:
    """Write a float32 row as inputs of a linear layer; ``size`` is a multiple of 16."""
    for i in range(0, size, simd.LANES):
        store_input(plan, out, i, simd.load(row + 4 * i))


@kernel
def norm_row(plan: Plan, row: int, weight: int, size: int, eps: float, out: int) -> None:
    """Write an RMSNorm of a float32 row as inputs of a linear layer; ``size`` is a multiple of 16."""
    scale = _inverse_root(_squares(row, size), size, eps)
    for i in range(0, size, simd.LANES):
        store_input(
            plan, out, i, simd.multiply(simd.multiply(simd.load(row + 4 * i), scale), simd.load(weight + 4 * i))
        )


@kernel
def layer_norm_row(plan: Plan, row: int, weight: int, bias: int, size: int, eps: float, out: int) -> None:
    """Write a LayerNorm of a float32 row as inputs of a linear layer; ``bias`` may be 0."""
    total, squares = simd.splat(np.float32(0)), simd.splat(np.float32(0))
    for i in range(0, size, simd.LANES):
        total = simd.add(total, simd.load(row + 4 * i))
    mean = simd.splat(simd.sum_of(total) / np.float32(size))
    for i in range(0, size, simd.LANES):
        x = simd.subtract(simd.load(row + 4 * i), mean)
        squares = simd.fma(x, x, squares)
    scale = _inverse_root(simd.sum_of(squares), size, eps)
    for i in range(0, size, simd.LANES):
        x = simd.multiply(simd.multiply(simd.subtract(simd.load(row + 4 * i), mean), scale), simd.load(weight + 4 * i))
        store_input(plan, out, i, simd.add(x, simd.load(bias + 4 * i)) if bias else x)


@kernel
def add_normed(row: int, source: int, weight: int, size: int, eps: float, factor: np.float32) -> None:
    """Add an RMSNorm of another float32 row, times a number, to a float32 row."""
    scale, factors = _inverse_root(_squares(source, size), size, eps), simd.splat(factor)
    for i in range(0, size, simd.LANES):
        x = simd.multiply(simd.multiply(simd.load(source + 4 * i), scale), simd.load(weight + 4 * i))
        simd.store(row + 4 * i, simd.add(simd.load(row + 4 * i), simd.multiply(x, factors)))


@kernel
def _squares(row: int, size: int) -> float:
    """Return the sum of the squares of a float32 row."""
    squares = simd.splat(np.float32(0))
    for i in range(0, size, simd.LANES):
        x = simd.load(row + 4 * i)
        squares = simd.fma(x, x, squares)
    return simd.sum_of(squares)


@kernel
def _inverse_root(squares: float, size: int, eps: float) -> Lanes:
    """Return 1 / sqrt(mean square + eps) in all lanes."""
    return simd.splat(np.float32(1) / np.float32(math.sqrt(squares / np.float32(size) + eps)))


@kernel
def head_scale(head: int, size: int, eps: float) -> Lanes:
    """Return what scales a float32 head to a mean square of 1, in all lanes."""
    return _inverse_root(_squares(head, size), size, eps)


@kernel
def scale_row(row: int, size: int, factor: np.float32) -> None:
    """Multiply a float32 row by a number, in place."""
    factors = simd.splat(factor)
    for i in range(0, size, simd.LANES):
        simd.store(row + 4 * i, simd.multiply(simd.load(row + 4 * i), factors))


@kernel
def norm_head(head: int, weight: int, size: int, eps: float) -> None:
    """Normalise a float32 head, or all heads of a row together, in place."""
    scale = head_scale(head, size, eps)
    for i in range(0, size, simd.LANES):
        simd.store(
            head + 4 * i, simd.multiply(simd.multiply(simd.load(head + 4 * i), scale), simd.load(weight + 4 * i))
        )


@kernel
def rotate_head(head: int, size: int, cosines: int, sines: int, scale: np.float32) -> None:
    """Rotate a float32 head in place by the angles of a row, and multiply it by a number; ``size`` is even."""
    half = size // 2
    whole = half // simd.LANES * simd.LANES
    factor = simd.splat(scale)
    for i in range(whole, half):
        c, s = read_float32(cosines + 4 * i), read_float32(sines + 4 * i)
        x, y = read_float32(head + 4 * i), read_float32(head + 4 * (half + i))
        write_float32(head + 4 * i, scale * (x * c - y * s))
        write_float32(head + 4 * (half + i), scale * (y * c + x * s))
    for i in range(0, whole, simd.LANES):
        cos, sin = simd.load(cosines + 4 * i), simd.load(sines + 4 * i)
        first, second = simd.load(head + 4 * i), simd.load(head + 4 * (half + i))
        simd.store(
            head + 4 * i, simd.multiply(factor, simd.subtract(simd.multiply(first, cos), simd.multiply(second, sin)))
        )
        simd.store(
            head + 4 * (half + i),
            simd.multiply(factor, simd.add(simd.multiply(second, cos), simd.multiply(first, sin))),
        )


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
    caps = simd.splat(cap)
    return simd.multiply(caps, simd.tanh(simd.divide(x, caps)))


@kernel
def embed_row(plan: Plan, model: Record, token_id: int, out: int) -> None:
    """Write the embedding of a token as float32, times ``embedding_scale``."""
    if model.look_up:
        call_look_up(model.look_up, model.embedding, token_id, out, model.hidden_size)
    else:
        for i in range(0, model.hidden_size, simd.LANES):
            simd.store(out + 4 * i, load_element(plan, model.embedding, token_id * model.hidden_size + i))
    factor = simd.splat(model.embedding_scale)
    for i in range(0, model.hidden_size, simd.LANES):
        simd.store(out + 4 * i, simd.multiply(simd.load(out + 4 * i), factor))


@kernel
def mix_inputs(plan: Plan, model: Record, step: Record, stage: Record, row: int) -> None:
    """Norm what each layer reads of the embedding of a row, float32 [input_size], and add the second embedding."""
    size, half, factor = model.input_size, simd.splat(_ROOT_HALF), simd.splat(model.input_scale)
    token_id = read_int32(step.token_ids + 4 * row)
    for layer in range(model.num_layers):
        out = step.inputs + 4 * (row * model.num_layers + layer) * size
        scale_row(out, size, stage.factor)
        norm_head(out, stage.weight, size, model.norm_eps)
        begin = (token_id * model.num_layers + layer) * size
        for i in range(0, size, simd.LANES):
            own = simd.multiply(load_element(plan, model.input_embedding, begin + i), factor)
            simd.store(out + 4 * i, simd.multiply(simd.add(simd.load(out + 4 * i), own), half))


@kernel
def look_up(plan: Plan, embedding: int, token_id: int, out: int, size: int) -> int:
    """Write a row of a packed embedding as float32, exactly (``dot_quantised`` says where its numbers are)."""
    num_tiles = (size + 31) // 32
    group, row = (
        embedding + token_id // 64 * (num_tiles * plan.kind.tile_bytes + plan.kind.group_end_bytes),
        token_id % 64,
    )
    for k in range(size):
        if plan.kind.bits == 32:
            write_float32(out + 4 * k, read_float32(group + 256 * k + 4 * row))
        elif plan.kind.bits == 16:
            write_float32(out + 4 * k, read_bfloat16(group + k // 2 * 256 + 4 * row + k % 2 * 2))
        else:
            write_float32(out + 4 * k, read_quantised(plan, group, row, k, num_tiles))
    return 0


@kernel
def read_quantised(plan: Plan, group: int, row: int, k: int, num_tiles: int) -> np.float32:
    """Return the weight of one of 64 outputs and of one input."""
    shared = plan.kind.super_tiles * plan.kind.own_bytes + plan.kind.super_bytes
    first = group + k // (32 * plan.kind.super_tiles) * shared
    tile, i = first + k // 32 % plan.kind.super_tiles * plan.kind.own_bytes, k % 32
    if plan.kind.bits == 8:
        value = np.float32(read_int8(tile + i // 4 * 256 + 4 * row + i % 2 * 2 + i % 4 // 2))
    else:
        byte = read_int8(tile + i // 8 * 256 + 4 * row + i % 2 * 2 + i % 8 // 4)
        code = byte >> 4 & 15 if i % 4 // 2 else byte & 15
        value = np.float32(plan.kind.all_levels[code ^ plan.kind.code_mask])
    if plan.kind.group_end_bytes:
        return value * read_float32(group + num_tiles * plan.kind.tile_bytes + 4 * row)
    place = tile + plan.kind.code_bytes + i // plan.kind.group * plan.kind.scale_bytes
    shared_place = first + plan.kind.super_tiles * plan.kind.own_bytes + 2 * row
    value *= _read_scale(plan, place, row, shared_place)
    if plan.kind.has_offset:
        value += _read_scale(plan, place + 32 // plan.kind.group * plan.kind.scale_bytes, row, shared_place + 128)
    return value


@kernel
def _read_scale(plan: Plan, place: int, row: int, shared: int) -> np.float32:
    """Return one of 64 scales or offsets, times the number that it may share."""
    if plan.kind.scale_bytes == 128:
        return read_float16(place + 2 * row)
    if plan.kind.super_bytes:
        return np.float32(read_int8(place + row)) * read_float16(shared)
    return np.float32(math.ldexp(1.0, (read_int8(place + row) & 255) - 128))


@kernel
def quantise_row(plan: Plan, row: int, num_tiles: int, is_int8: int, out: int) -> None:
    """Write a float32 row as integers, then the data of every ``plan.tiles_at_once`` tiles of inputs.

    That is a float32 scale, NaN if an input is not finite, so that the outputs are not either; what all sums of scales
    of rows begin with if inputs are int8, because the products are with weights that are 128 larger: int32, -128 times
    the sum of the inputs; and the sums of groups of inputs, which offsets are multiplied with.
    """
    zero, most = simd.splat(np.float32(0)), np.float32(127 if is_int8 else 32767)
    for first in range(0, num_tiles, plan.tiles_at_once):
        begin, end = first * 32, min(num_tiles, first + plan.tiles_at_once) * 32
        top, invalid = zero, zero
        for i in range(begin, end, simd.LANES):
            x = simd.load(row + 4 * i)
            top = simd.maximum(simd.maximum(x, simd.subtract(zero, x)), top)
            invalid = simd.fma(x, zero, invalid)
        largest = simd.max_of(top)
        factor = simd.splat(most / largest if largest > np.float32(1e-30) else np.float32(0))
        place = out + (32 if is_int8 else 64) * num_tiles + SCALE_BYTES * (first // plan.tiles_at_once)
        total = np.float32(0)
        for i in range(begin, end, 2 * simd.LANES):
            low = _store_integers(row, i, factor, is_int8, out)
            high = _store_integers(row, i + simd.LANES, factor, is_int8, out)
            sums = place + SUMS_OFFSET + (i - begin) // 32 * SUMS_BYTES
            write_float32(sums, low)
            write_float32(sums + 4, high)
            write_float32(sums + 8, low + high)
            total += low + high
        write_float32(place, largest / most + simd.sum_of(invalid))
        if is_int8:
            write_int32(place + 4, -128 * np.int64(total))


@kernel
def _store_integers(row: int, i: int, factor: Lanes, is_int8: int, out: int) -> np.float32:
    """Write 16 inputs as integers and return their sum, which is exact."""
    x = simd.rint(simd.multiply(simd.load(row + 4 * i), factor))
    if is_int8:
        simd.store_int8_exchanged(out + i, x)
    else:
        simd.store_int16(out + 2 * i, x)
    return np.float32(simd.sum_of(x))
