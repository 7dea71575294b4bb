"""The k largest logits of rows in rank order: what ``shape_and_select`` has found to be kept, collected and ordered.

Bytes moved: 4 per logit.
"""

from __future__ import annotations

from ferrule_server.kernels.cuda import intrinsics as ptx
from ferrule_server.kernels.cuda import logit_rows
from ferrule_server.kernels.cuda.intrinsics import I32, Address
from ferrule_server.kernels.cuda.logit_rows import DEFAULT_SLICE, DEFAULT_WARPS, ID_BITS
from ferrule_server.kernels.cuda.sample import AT, BORDER_BYTES, RECORD_BYTES
from ferrule_server.kernels.cuda.spec import KernelSpec, ModelShape
from ferrule_server.kernels.cuda.specialise import i32, registers, unrolled

__all__ = ["LARGEST_K", "gather_top_k", "shared_bytes", "specs"]

LARGEST_K = 1024

COUNTER = 0
FOUND = 16


def shared_bytes(largest_k: int = LARGEST_K) -> int:
    """Return the dynamic shared memory of a CTA."""
    return FOUND + 8 * largest_k


def gather_top_k(
    logits: Address,
    records: Address,
    borders: Address,
    top_ids: Address,
    top_logits: Address,
    num_rows: I32,
    vocab_size: I32,
    *,
    K: int,
    SLICE: int,
    WARPS: int,
) -> None:
    """Collect what each row keeps, largest first, the lowest id first among equals.

    Launch: any grid of at least one CTA (one per row at most is of use), 32 * WARPS threads, ``shared_bytes``.

    Args:
        logits: float32 [any, vocab_size].
        records: RECORD [num_rows].
        borders: [num_rows, BORDER_BYTES], what ``shape_and_select`` found; no row keeps more than K.
        top_ids: int32 [num_rows, K]; as many of a row are written as it keeps; those of a row with NaN or
            infinity mean nothing.
        top_logits: float32 [num_rows, K], likewise.
        num_rows: Records.
        vocab_size: Logits of a row, below 2^20.
        K: Room for one row.
        SLICE: Tokens loaded at a time, a multiple of 128 * WARPS.
        WARPS: Per CTA.
    """
    thread = i32(ptx.thread_id())
    ptx.grid_launch_dependents()
    ptx.grid_wait()
    slot = i32(ptx.cta_id())
    while slot < num_rows:
        row = ptx.load_i32(records + slot * RECORD_BYTES + AT["row"])
        if row >= 0:
            source = logits + row * (vocab_size * 4)
            border = ptx.load_f32(borders + slot * BORDER_BYTES + 4)
            last = ptx.load_i32(borders + slot * BORDER_BYTES + 8)
            if thread == 0:
                ptx.shared_store_u32(COUNTER, 0)
            ptx.barrier()
            begin = i32(0)
            while begin < vocab_size:
                words = registers(SLICE // (128 * WARPS))
                logit_rows.load_slice(source, begin, vocab_size, words, STRONG=False, SLICE=SLICE, WARPS=WARPS)
                for g in unrolled(SLICE // (128 * WARPS)):
                    for i in unrolled(4):
                        token = i32(begin + (32 * WARPS * g + thread) * 4 + i)
                        if logit_rows.is_kept(words[g][i], token, border, last):
                            place = ptx.shared_fetch_add_u32(COUNTER, 1)
                            if place < K:
                                ptx.shared_store_u64(FOUND + place * 8, logit_rows.rank_of(words[g][i], token))
                begin = i32(begin + SLICE)
            ptx.barrier()
            count = i32(ptx.shared_load_u32(COUNTER))
            count = i32(count if count < K else K)
            index = i32(thread)
            while index < count:
                mine = ptx.shared_load_u64(FOUND + index * 8)
                place = i32(0)
                other = i32(0)
                while other < count:
                    place = i32(place + i32(ptx.shared_load_u64(FOUND + other * 8) < mine))
                    other = i32(other + 1)
                token = i32(mine & ((1 << ID_BITS) - 1))
                ptx.store_i32(top_ids + (slot * K + place) * 4, token)
                ptx.store_f32(top_logits + (slot * K + place) * 4, ptx.load_f32(source + token * 4))
                index = i32(index + 32 * WARPS)
            ptx.barrier()
        slot = i32(slot + ptx.num_ctas())


def specs(shape: ModelShape) -> list[KernelSpec]:
    """Return the kernels a model of this shape needs."""
    logit_rows.num_slices(shape.vocab_size)
    items = (("K", LARGEST_K), ("SLICE", DEFAULT_SLICE), ("WARPS", DEFAULT_WARPS))
    return [KernelSpec(gather_top_k, items, 32 * DEFAULT_WARPS, shared_bytes(), min_vector_loads=4)]
