"""The k largest logits of rows in rank order: a radix select by several CTAs per row, then a small sort.

``select_count`` finds the key of the k-th largest logit and how many of the logits equal to it ("ties") are wanted.
``gather_top_k`` collects the ids of larger keys in any order; the CTA of a row that arrives last adds the ties, reading
again the slices that hold them, and sorts.

Chain of launches: ``select_count`` once per digit (11, 11 and 10 bits), ``gather_top_k``. ``sample`` begins alike.

Bytes moved: 4 per logit and launch, from L2 after the first.

Source: bitonic sort after Batcher, "Sorting networks and their applications", 1968.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from ferrule_server.kernels.cuda.intrinsics import (
    I32,
    Address,
    atomic_fetch_add_u32,
    barrier,
    count_ones,
    cta_id,
    device,
    grid_launch_dependents,
    grid_wait,
    load_f32,
    load_i32,
    load_relaxed_u32,
    load_relaxed_u64,
    load_u32,
    num_ctas,
    order_key,
    shared_load_u32,
    shared_load_u64,
    shared_store_u32,
    shared_store_u64,
    store_f32,
    store_i32,
    store_u32,
    store_u64,
    thread_id,
)
from ferrule_server.kernels.cuda.logit_rows import (
    DEFAULT_SLICE,
    DEFAULT_WARPS,
    compare,
    exclusive_sum,
    load_four,
    load_slice,
)
from ferrule_server.kernels.cuda.select_count import COUNT, KEY, STATE_BYTES, select_specs
from ferrule_server.kernels.cuda.spec import KernelSpec, ModelShape
from ferrule_server.kernels.cuda.specialise import Constant, i32, registers, unrolled
from ferrule_server.kernels.cuda.ticket import arrive

__all__ = [
    "LARGEST_K",
    "RECORD_BYTES",
    "STATE_BYTES",
    "gather_shared_bytes",
    "gather_top_k",
    "pack_records",
    "specs",
]

LARGEST_K = 1024
RECORD_BYTES = 16

FLAG = 0
SCRATCH = 16
CANDIDATES = SCRATCH + 8 * 32


def gather_shared_bytes(num_slices: int, largest_k: int = LARGEST_K) -> int:
    """Return the dynamic shared memory of a CTA of ``gather_top_k``."""
    return CANDIDATES + 8 * largest_k + 8 * num_slices


def gather_top_k(
    logits: Address,
    records: Address,
    state: Address,
    candidates: Address,
    partials: Address,
    tickets: Address,
    places: Address,
    top_ids: Address,
    top_logits: Address,
    num_rows: I32,
    vocab_size: I32,
    num_slices: I32,
    *,
    K: int,
    SLICE: int,
    WARPS: int,
) -> None:
    """Collect the k largest logits of each row, largest first, the lowest id first among equals.

    Launch: any grid of at least one CTA (``num_ctas_needed`` at most is of use), 32 * WARPS threads,
    ``gather_shared_bytes``.

    Args:
        logits: float32 [any, vocab_size].
        records: int32 [num_rows, 4]: row of ``logits`` (-1: nothing to do), k, 0, 0; ``min(k, vocab_size) <= K``.
        state: What ``select_count`` found, of all digits.
        candidates: u64 [num_rows, K], scratch.
        partials: [num_rows, num_slices, 16 bytes], scratch.
        tickets: int32 [num_rows], zero before the first launch, left zero.
        places: u32 [num_rows], likewise: how many candidates have come.
        top_ids: int32 [num_rows, K]; the first ``min(k, vocab_size)`` of a row are written.
        top_logits: float32 [num_rows, K], likewise.
        num_rows: Records.
        vocab_size: Logits of a row, below 2^20.
        num_slices: Of a row, at most 32 * WARPS.
        K: Room for one row, a power of two.
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
            row = load_i32(records + slot * RECORD_BYTES)
            k = load_i32(records + slot * RECORD_BYTES + 4)
            if row >= 0 and k > 0:
                source = logits + row * (vocab_size * 4)
                border = load_u32(state + slot * STATE_BYTES + KEY)
                num_ties = load_u32(state + slot * STATE_BYTES + COUNT)
                if k >= vocab_size:
                    k = vocab_size + 0
                    border = -1
                    num_ties = 0
                words = registers(SLICE // WARPS // 128)
                for g in unrolled(SLICE // WARPS // 128):
                    words[g] = (0, 0, 0, 0)
                load_slice(source, i32(part * SLICE), vocab_size, words, THREADS=32 * WARPS, SLICE=SLICE)
                above, equal = compare(words, border, COUNT=SLICE // WARPS // 128)
                _before, ties = exclusive_sum(count_ones(equal), SCRATCH, WARPS=WARPS)
                if thread == 0:
                    store_u32(partials + (slot * num_slices + part) * 16, ties)
                while above > 0:
                    bit = count_ones((above & -above) - 1)
                    above = above & (above - 1)
                    token = i32(part * SLICE + (32 * WARPS * (bit >> 2) + thread) * 4 + (bit & 3))
                    if token < vocab_size:
                        key = order_key(load_u32(source + token * 4))
                        place = atomic_fetch_add_u32(places + slot * 4, 1)
                        store_u64(candidates + (slot * K + place) * 8, rank_of(key, token))
                is_last = arrive(tickets + slot * 4, num_slices, FLAG, ALL_STORE=True)
                if is_last == 1:
                    if thread == 0:
                        store_u32(places + slot * 4, 0)
                    place = i32(thread)
                    while place < k - num_ties:
                        found = load_relaxed_u64(candidates + (slot * K + place) * 8)
                        shared_store_u64(CANDIDATES + place * 8, found)
                        place = i32(place + 32 * WARPS)
                    if num_ties > 0:
                        add_ties(
                            source,
                            partials + slot * (num_slices * 16),
                            vocab_size,
                            num_slices,
                            border,
                            i32(k - num_ties),
                            num_ties,
                            K=K,
                            SLICE=SLICE,
                            WARPS=WARPS,
                        )
                    sort(i32(k), WARPS=WARPS)
                    place = i32(thread)
                    while place < k:
                        token = i32(shared_load_u64(CANDIDATES + place * 8) & 0xFFFFF)
                        store_i32(top_ids + (slot * K + place) * 4, token)
                        store_f32(top_logits + (slot * K + place) * 4, load_f32(source + token * 4))
                        place = i32(place + 32 * WARPS)
            part = i32(part + num_ctas())


@device
def rank_of(key: int, token: int) -> int:
    """Return a number that rises with the rank: by falling key, then by rising id."""
    return ((key ^ 0xFFFFFFFF) << 20) | token


@device
def add_ties(
    source: Address,
    partials: Address,
    vocab_size: I32,
    num_slices: I32,
    border: int,
    num_above: I32,
    num_ties: int,
    *,
    K: int,
    SLICE: int,
    WARPS: int,
) -> None:
    """Put the lowest ids whose key is ``border`` behind the ``num_above`` candidates in shared memory."""
    thread = i32(thread_id())
    ties = 0
    if thread < num_slices:
        ties = load_relaxed_u32(partials + thread * 16)
    before, _total = exclusive_sum(ties, SCRATCH, WARPS=WARPS)
    if thread < num_slices:
        shared_store_u32(CANDIDATES + 8 * K + thread * 8, ties)
        shared_store_u32(CANDIDATES + 8 * K + thread * 8 + 4, before)
    barrier()
    part = i32(0)
    while part < num_slices:
        if (
            shared_load_u32(CANDIDATES + 8 * K + part * 8) > 0
            and shared_load_u32(CANDIDATES + 8 * K + part * 8 + 4) < num_ties
        ):
            equal = 0
            group = i32(0)
            while group < SLICE // WARPS // 128:
                first = i32(part * SLICE + thread * (SLICE // WARPS // 32) + group * 4)
                words = load_four(source, first, vocab_size)
                for i in unrolled(4):
                    equal = equal | (i32(order_key(words[i]) == border) << (group * 4 + i))
                group = i32(group + 1)
            barrier()
            place, _sum = exclusive_sum(count_ones(equal), SCRATCH, WARPS=WARPS)
            place = place + shared_load_u32(CANDIDATES + 8 * K + part * 8 + 4)
            while equal > 0 and place < num_ties:
                token = i32(part * SLICE + thread * (SLICE // WARPS // 32) + count_ones((equal & -equal) - 1))
                shared_store_u64(CANDIDATES + (num_above + place) * 8, rank_of(border, token))
                equal = equal & (equal - 1)
                place = place + 1
        part = i32(part + 1)


@device
def sort(count: I32, *, WARPS: int) -> None:
    """Sort ``count`` numbers in shared memory, ascending; a bitonic network over the next power of two."""
    thread = i32(thread_id())
    size = i32(1)
    while size < count:
        size = i32(size << 1)
    place = i32(count + thread)
    while place < size:
        shared_store_u64(CANDIDATES + place * 8, 1 << 62)
        place = i32(place + 32 * WARPS)
    barrier()
    width = i32(2)
    while width <= size:
        stride = i32(width >> 1)
        while stride > 0:
            pair = i32(thread)
            while pair < size >> 1:
                low = i32(((pair & -stride) << 1) | (pair & (stride - 1)))
                a = shared_load_u64(CANDIDATES + low * 8)
                b = shared_load_u64(CANDIDATES + (low + stride) * 8)
                is_rising = 1 if (low & width) == 0 else 0
                is_over = 1 if a > b else 0
                if is_rising == is_over:
                    shared_store_u64(CANDIDATES + low * 8, b)
                    shared_store_u64(CANDIDATES + (low + stride) * 8, a)
                pair = i32(pair + 32 * WARPS)
            barrier()
            stride = i32(stride >> 1)
        width = i32(width << 1)


def pack_records(rows: Sequence[int], ks: Sequence[int]) -> npt.NDArray[np.int32]:
    """Return the records of rows: int32 [num_rows, 4].

    Args:
        rows: Among the logits; -1: nothing to do.
        ks: How many of each row; 0: nothing.

    Raises:
        ValueError: More than ``LARGEST_K`` are asked for.
    """
    if max(ks, default=0) > LARGEST_K:
        raise ValueError(f"the {max(ks)} largest logits are asked for, there is room for {LARGEST_K}")
    records = np.zeros((len(rows), RECORD_BYTES // 4), np.int32)
    records[:, 0], records[:, 1] = rows, ks
    return records


def specs(shape: ModelShape) -> list[KernelSpec]:
    """Return the kernels a model of this shape needs, in the order of their launches."""
    return _specs(shape, DEFAULT_SLICE)


def _specs(shape: ModelShape, slice_size: int) -> list[KernelSpec]:
    constants: dict[str, Constant] = {"K": LARGEST_K, "SLICE": slice_size, "WARPS": DEFAULT_WARPS}
    gather = _spec(gather_top_k, constants, gather_shared_bytes(-(-shape.vocab_size // slice_size)))
    return [*select_specs(slice_size), gather]


def _spec(kernel: Callable[..., None], constants: dict[str, Constant], shared: int) -> KernelSpec:
    items = tuple(sorted(constants.items()))
    return KernelSpec(kernel, items, 32 * DEFAULT_WARPS, shared, ctas_per_sm=2, has_ticket=True)
