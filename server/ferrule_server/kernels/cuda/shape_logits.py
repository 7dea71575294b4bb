"""Penalties, then bias, then mask: rows of logits become the rows that a token is chosen from.

Maths, of a token with c occurrences: ``l / r`` (l > 0) or ``l * r``, minus ``c * frequency + presence``, where c > 0;
plus the bias; -inf where the mask forbids it. See ``executor.shaping``, which computes in float64. Here all is float32:
with
``1 / r`` rounded by the host, one rounding for the product and what is subtracted, one for the bias, the result is
within ``2^-22 (|l r'| + c |frequency| + |presence| + |bias|)`` of the definition (r' is r or 1 / r), so that two tokens
closer than that may change places. What lies beyond float32 becomes the largest float32, never infinity. Tokens that
no entry names and the mask allows keep their bits.

Order of work: the CTA of a slice copies it through the mask, then the entries of its tokens overwrite theirs.

Bytes moved: 8 per logit, a bit of mask each, and the entries of a row once per slice of it (from L2).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ferrule_server.kernels.cuda.intrinsics import (
    F32,
    I32,
    U32,
    Address,
    Vec4,
    barrier,
    bits_float,
    cta_id,
    device,
    float_of,
    fma,
    grid_launch_dependents,
    grid_wait,
    load_f32,
    load_i32,
    load_u32,
    load_v4,
    max_f32,
    num_ctas,
    store_f32,
    store_u32,
    store_v4,
    thread_id,
)
from ferrule_server.kernels.cuda.logit_rows import DEFAULT_SLICE, DEFAULT_WARPS, NEGATIVE_INFINITY, load_slice
from ferrule_server.kernels.cuda.spec import KernelSpec, ModelShape
from ferrule_server.kernels.cuda.specialise import i32, registers, unrolled

__all__ = [
    "Penalties",
    "RECORD_BYTES",
    "mask_bytes",
    "pack_entries",
    "pack_mask",
    "pack_record",
    "shape_logits",
    "specs",
]

RECORD_BYTES = 32
LARGEST = 3.4028234663852886e38


def shape_logits(
    logits: Address,
    shaped: Address,
    records: Address,
    entries: Address,
    masks: Address,
    num_rows: I32,
    vocab_size: I32,
    num_slices: I32,
    *,
    SLICE: int,
    WARPS: int,
) -> None:
    """Shape rows of logits into another buffer.

    Launch: any grid of at least one CTA (``num_ctas_needed`` at most is of use), 32 * WARPS threads, no shared memory.

    Args:
        logits: float32 [any, vocab_size], raw; not changed.
        shaped: float32 [num_rows, vocab_size], row i is made by record i; apart from ``logits``.
        records: int32 [num_rows, 8]: row of ``logits`` (-1: nothing to do); mask, in units of 16 bytes from ``masks``
            (-1: none); first entry and the one after the last; then float32 repetition penalty, its inverse,
            frequency penalty, presence penalty.
        entries: int32 [any, 4]: token, occurrences, float32 bias, unused; of one row the tokens are distinct.
        masks: Bits, token i at bit ``i % 8`` of byte ``i // 8``, 1 = allowed; each mask begins and ends at 16 bytes.
        num_rows: Records.
        vocab_size: Logits of a row.
        num_slices: Of a row.
        SLICE: Tokens in a slice, a multiple of 128 * WARPS.
        WARPS: Per CTA.
    """
    assert SLICE % (128 * WARPS) == 0
    thread = i32(thread_id())
    grid_launch_dependents()
    grid_wait()
    slot = i32(0)
    part = i32(cta_id())
    while slot < num_rows:
        if part >= num_slices:
            part = i32(part - num_slices)
            slot = i32(slot + 1)
        else:
            record = records + slot * RECORD_BYTES
            row = load_i32(record)
            mask = load_i32(record + 4)
            if row >= 0:
                begin = i32(part * SLICE)
                source = logits + row * (vocab_size * 4)
                target = shaped + slot * (vocab_size * 4)
                words = registers(SLICE // WARPS // 128)
                for g in unrolled(SLICE // WARPS // 128):
                    words[g] = (0, 0, 0, 0)
                load_slice(source, begin, vocab_size, words, THREADS=32 * WARPS, SLICE=SLICE)
                for g in unrolled(SLICE // WARPS // 128):
                    first = i32(begin + (32 * WARPS * g + thread) * 4)
                    if first < vocab_size:
                        bits = 15
                        if mask >= 0:
                            bits = load_u32(masks + mask * 16 + (first >> 5) * 4) >> (first & 31)
                        store_masked(target, first, vocab_size, words[g], bits)
                barrier()
                entry = i32(load_i32(record + 8) + thread)
                end = load_i32(record + 12)
                while entry < end:
                    change = load_v4(entries + entry * 16)
                    if change[0] >= begin and change[0] < begin + SLICE:
                        value = load_f32(source + change[0] * 4)
                        store_f32(target + change[0] * 4, changed(value, change, record, masks, mask))
                    entry = i32(entry + 32 * WARPS)
            part = i32(part + num_ctas())


@device
def store_masked(target: Address, first: I32, vocab_size: I32, words: Vec4, bits: U32) -> None:
    """Store four logits, -inf where the low four bits forbid them."""
    a = words[0] if bits & 1 else NEGATIVE_INFINITY
    b = words[1] if bits & 2 else NEGATIVE_INFINITY
    c = words[2] if bits & 4 else NEGATIVE_INFINITY
    d = words[3] if bits & 8 else NEGATIVE_INFINITY
    if (target & 15) == 0 and first + 4 <= vocab_size:
        store_v4(target + first * 4, (a, b, c, d))
    else:
        store_u32(target + first * 4, a)
        if first + 1 < vocab_size:
            store_u32(target + first * 4 + 4, b)
        if first + 2 < vocab_size:
            store_u32(target + first * 4 + 8, c)
        if first + 3 < vocab_size:
            store_u32(target + first * 4 + 12, d)


@device
def changed(logit: F32, change: Vec4, record: Address, masks: Address, mask: I32) -> F32:
    """Return a logit with its penalties, bias and mask."""
    value = logit
    if change[1] > 0:
        factor = load_f32(record + 16)
        if value > 0.0:
            factor = load_f32(record + 20)
        loss = fma(float_of(change[1]), load_f32(record + 24), load_f32(record + 28))
        value = fma(value, factor, -loss)
    value = fma(value, 1.0, bits_float(change[2]))
    value = max_f32(-max_f32(-value, -LARGEST), -LARGEST)
    if mask >= 0:
        bits = load_u32(masks + mask * 16 + (change[0] >> 5) * 4) >> (change[0] & 31)
        if (bits & 1) == 0:
            value = bits_float(NEGATIVE_INFINITY)
    return value


Int32Array = npt.NDArray[np.int32]


class Penalties(Protocol):
    """What changes a row's logits besides a mask: what ``executor.base.Shaping`` says."""

    @property
    def repetition_penalty(self) -> float:
        """More than 0; 1 changes nothing."""

    @property
    def frequency_penalty(self) -> float:
        """0 changes nothing."""

    @property
    def presence_penalty(self) -> float:
        """0 changes nothing."""

    @property
    def has_penalties(self) -> bool:
        """Whether the tokens before count."""

    @property
    def bias(self) -> tuple[tuple[int, float], ...]:
        """Token id and what is added to its logit; ids ascend and are distinct."""


def mask_bytes(vocab_size: int) -> int:
    """Return the bytes one mask takes among the others: a multiple of 16."""
    return -(-vocab_size // 128) * 16


def pack_mask(bits: npt.NDArray[np.uint8], vocab_size: int) -> npt.NDArray[np.uint8]:
    """Return the bits of a mask, zero up to a multiple of 16 bytes: uint8 [mask_bytes(vocab_size)].

    Args:
        bits: uint8 [ceil(vocab_size / 8)], id i at bit (i mod 8) of byte (i div 8), 1 = allowed.
        vocab_size: Logits of a row.
    """
    packed = np.zeros(mask_bytes(vocab_size), np.uint8)
    packed[: len(bits)] = bits
    return packed


def pack_entries(shaping: Penalties, history: Int32Array | None) -> Int32Array:
    """Return one entry for each token that a penalty or the bias names, ascending: int32 [n, 4].

    Args:
        shaping: Of the row.
        history: int32 [n], the tokens that penalties count.
    """
    counted = history if history is not None and shaping.has_penalties else np.empty(0, np.int32)
    occurred, counts = np.unique(counted, return_counts=True)
    biased = np.array([token_id for token_id, _ in shaping.bias], np.int32)
    token_ids = np.union1d(occurred, biased)
    entries = np.zeros((len(token_ids), 4), np.int32)
    entries[:, 0] = token_ids
    entries[token_ids.searchsorted(occurred), 1] = counts
    amounts = np.array([amount for _, amount in shaping.bias], np.float32)
    entries[token_ids.searchsorted(biased), 2] = amounts.view(np.int32)
    return entries


def pack_record(shaping: Penalties, row: int, mask: int, entries: Sequence[int]) -> Int32Array:
    """Return the record of one row: int32 [8].

    Args:
        shaping: Of the row.
        row: Among the raw logits.
        mask: Place of its mask in units of 16 bytes, -1: it has none.
        entries: Index of its first entry, and of the one after the last.
    """
    record = np.zeros(8, np.int32)
    record[:4] = (row, mask, *entries)
    repetition = shaping.repetition_penalty
    penalties = (repetition, 1 / repetition, shaping.frequency_penalty, shaping.presence_penalty)
    record[4:] = np.array(penalties, np.float64).clip(-LARGEST, LARGEST).astype(np.float32).view(np.int32)
    return record


def specs(shape: ModelShape) -> list[KernelSpec]:
    """Return the kernels a model of this shape needs."""
    return [_spec(DEFAULT_SLICE)] if shape.vocab_size else []


def _spec(slice_size: int) -> KernelSpec:
    constants = (("SLICE", slice_size), ("WARPS", DEFAULT_WARPS))
    return KernelSpec(shape_logits, constants, 32 * DEFAULT_WARPS, shared_bytes=0, ctas_per_sm=2)
