"""What stands in front of attention: q/k norm and RoPE of a head, and the K and V of new tokens.

Every CTA whose splits hold a new token computes its K and V again from the raw output of the projection, keeps them in
shared memory and never reads them back; exactly one CTA writes them to the pool. All in float32, rounded to bf16 once
(``qk_norm_rope`` of :mod:`ferrule_server.kernels.reference`).

A head is held by HEAD_DIM / 16 neighbouring lanes: lane t has values 8t..8t+7 and, HEAD_DIM / 2 further, the partners
that RoPE turns them with (Hugging Face's pairing).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ferrule_server.kernels.cuda.constants import LOG2
from ferrule_server.kernels.cuda.intrinsics import (
    F32,
    I32,
    Address,
    Offset,
    bf16_high,
    bf16_low,
    bits_float,
    device,
    dot_bf16,
    fma,
    load_i32,
    load_v4,
    pack_bf16,
    reciprocal_sqrt,
    shared_store_v4,
    shuffle_xor_f32,
    store_v4,
)
from ferrule_server.kernels.cuda.specialise import i32, registers, unrolled

__all__ = ["Registers", "kv_address", "rope_table", "rotate_head", "stage_new_token"]

Registers = Any
"""What ``registers`` makes: known to the specialiser alone, indexed by one or several constants."""


def rope_table(inverse_frequencies: Tensor, max_context: int) -> Tensor:
    """Return the rotation of every position: default and Llama-3 RoPE differ in the frequencies alone.

    Args:
        inverse_frequencies: float32 [head_dim / 2], radians per position.
        max_context: Positions.

    Returns:
        float32 [max_context, head_dim]: cosines of all pairs, then sines; on the device of the frequencies.
    """
    positions = torch.arange(max_context, dtype=torch.float32, device=inverse_frequencies.device)
    angles = torch.outer(positions, inverse_frequencies)
    return torch.cat((angles.cos(), angles.sin()), dim=1).contiguous()


@device
def kv_address(
    pool: Address,
    block: I32,
    block_stride: Address,
    inside: Address,
    head: I32,
    offset: I32,
    *,
    BLOCK_SIZE: int,
    HEAD_DIM: int,
) -> Address:
    """Return where slot ``offset`` of a block lies.

    ``inside`` is where the layer begins in the block; ``head`` counts K heads, then V heads. Only the index in the
    layer is 32 bits wide.
    """
    return pool + block * block_stride + inside + i32((head * BLOCK_SIZE + offset) * (HEAD_DIM * 2))


@device
def rotate_head(
    source: Address,
    norm_weight: Address,
    rope_row: Address,
    lane: I32,
    eps: F32,
    low: Registers,
    high: Registers,
    *,
    HEAD_DIM: int,
    QK_NORM: bool,
) -> None:
    """Fill ``low`` and ``high``, registers(4), with a head's normalised and rotated values, packed bf16.

    All lanes of the warp take part. ``lane`` counts the lanes of one head; ``low`` are values ``8 * lane`` and
    following, ``high`` their partners. ``rope_row`` is the row of the table of this token's position.
    """
    first = load_v4(source + lane * 16)
    second = load_v4(source + HEAD_DIM + lane * 16)
    scale = 1.0
    if QK_NORM:
        squares = dot_bf16(dot_bf16(0.0, first, first), second, second)
        for s in unrolled(LOG2[HEAD_DIM // 16]):
            squares = squares + shuffle_xor_f32(squares, (HEAD_DIM // 32) >> s)
        scale = reciprocal_sqrt(fma(squares, 1.0 / HEAD_DIM, eps))
        first_weights = load_v4(norm_weight + lane * 16)
        second_weights = load_v4(norm_weight + HEAD_DIM + lane * 16)
    cos = registers(2)
    sin = registers(2)
    for k in unrolled(2):
        cos[k] = load_v4(rope_row + lane * 32 + k * 16)
        sin[k] = load_v4(rope_row + HEAD_DIM * 2 + lane * 32 + k * 16)
    x = registers(2, init=0.0)
    y = registers(2, init=0.0)
    for k in unrolled(4):
        x[0] = bf16_low(first[k]) * scale
        x[1] = bf16_high(first[k]) * scale
        y[0] = bf16_low(second[k]) * scale
        y[1] = bf16_high(second[k]) * scale
        if QK_NORM:
            x[0] = x[0] * bf16_low(first_weights[k])
            x[1] = x[1] * bf16_high(first_weights[k])
            y[0] = y[0] * bf16_low(second_weights[k])
            y[1] = y[1] * bf16_high(second_weights[k])
        turned = registers(2, init=0.0)
        partner = registers(2, init=0.0)
        for j in unrolled(2):
            cosine = bits_float(cos[k // 2][2 * (k % 2) + j])
            sine = bits_float(sin[k // 2][2 * (k % 2) + j])
            turned[j] = fma(x[j], cosine, -(y[j] * sine))
            partner[j] = fma(y[j], cosine, x[j] * sine)
        low[k] = pack_bf16(turned[0], turned[1])
        high[k] = pack_bf16(partner[0], partner[1])


@device
def stage_new_token(
    low: Registers,
    high: Registers,
    value_source: Address,
    slot_address: Address,
    writes: I32,
    pool: Address,
    block_stride: Address,
    inside: Address,
    kv_head: I32,
    num_kv_heads: I32,
    lane: I32,
    key_offset: Offset,
    value_offset: Offset,
    *,
    BLOCK_SIZE: int,
    HEAD_DIM: int,
) -> None:
    """Put a rotated key (as :func:`rotate_head` leaves it) and its value into shared memory and, once, into the pool.

    The offsets are those of the token's rows, bf16 [HEAD_DIM]. ``writes`` says that this item appends; even then a
    slot below 0 is not written.
    """
    key_low, key_high = (low[0], low[1], low[2], low[3]), (high[0], high[1], high[2], high[3])
    value_low = load_v4(value_source + lane * 16)
    value_high = load_v4(value_source + HEAD_DIM + lane * 16)
    shared_store_v4(key_offset + lane * 16, key_low)
    shared_store_v4(key_offset + HEAD_DIM + lane * 16, key_high)
    shared_store_v4(value_offset + lane * 16, value_low)
    shared_store_v4(value_offset + HEAD_DIM + lane * 16, value_high)
    if writes > 0:
        slot = load_i32(slot_address)
        if slot >= 0:
            block, offset = slot >> LOG2[BLOCK_SIZE], slot & (BLOCK_SIZE - 1)
            key = kv_address(
                pool, block, block_stride, inside, kv_head, offset, BLOCK_SIZE=BLOCK_SIZE, HEAD_DIM=HEAD_DIM
            )
            value = key + i32(num_kv_heads * (BLOCK_SIZE * HEAD_DIM * 2))
            store_v4(key + lane * 16, key_low)
            store_v4(key + HEAD_DIM + lane * 16, key_high)
            store_v4(value + lane * 16, value_low)
            store_v4(value + HEAD_DIM + lane * 16, value_high)
