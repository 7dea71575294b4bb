"""The k largest logits, in the simulator, against the executor's own ranking."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from ferrule_server.executor.sampling.ranking import ranked_largest
from ferrule_server.kernels.cuda.logit_rows import num_slices as checked_num_slices
from ferrule_server.kernels.cuda.select_count import count_shared_bytes, select_count
from ferrule_server.kernels.cuda.spec import MODEL_SHAPES
from ferrule_server.kernels.cuda.specialise import Constant, Specialised
from ferrule_server.kernels.cuda.top_k import (
    LARGEST_K,
    RECORD_BYTES,
    STATE_BYTES,
    gather_shared_bytes,
    gather_top_k,
    pack_records,
    specs,
)
from tests.kernels.cuda.logit_cases import DIGITS, SLICE, THREADS, VOCABULARIES, WARPS, Rows, awkward_rows, num_slices
from tests.kernels.cuda.mutation import check_mutants
from tests.kernels.cuda.replay import replay, without_wrapping
from tools.cuda_simulator import Launch, Memory, run

K = 64
OUTPUTS = ("top_ids", "top_logits")
COUNTERS = ("counts", "tickets", "places")
COUNT_CONSTANTS: dict[str, Constant] = {"SLICE": SLICE, "WARPS": WARPS}
GATHER_CONSTANTS: dict[str, Constant] = {"K": K, "SLICE": SLICE, "WARPS": WARPS}


def place(rows: Rows, ks: Sequence[int], order: Sequence[int], digits: Sequence[tuple[int, int]] = DIGITS) -> Memory:
    """Return memory with rows of logits, of which those in ``order`` are asked for."""
    memory, num_rows, slices = Memory(), len(order), num_slices(rows.shape[1])
    memory.put("logits", rows, mutable=True)
    memory.put("records", pack_records(order, ks), mutable=True)
    memory.put("state", np.zeros(num_rows * STATE_BYTES, np.uint8), mutable=True)
    memory.put("counts", np.zeros((num_rows, 1 << max(bits for _, bits in digits)), np.uint32), mutable=True)
    memory.empty("partials", (num_rows, slices, 16), np.uint8)
    memory.put("tickets", np.zeros(num_rows, np.int32), mutable=True)
    memory.put("places", np.zeros(num_rows, np.uint32), mutable=True)
    memory.empty("candidates", (num_rows, K), np.uint64)
    memory.put("top_ids", np.full((num_rows, K), -7, np.int32), mutable=True)
    memory.put("top_logits", np.full((num_rows, K), np.nan, np.float32), mutable=True)
    return memory


def chain(
    memory: Memory,
    grid: int,
    digits: Sequence[tuple[int, int]] = DIGITS,
    mutants: Callable[[int], Specialised | None] = lambda _: None,
) -> list[Launch]:
    """Return the launches of a top-k; ``mutants`` may replace one by its number."""
    num_rows, vocab_size = len(memory.get("records")), memory.get("logits").shape[1]
    sizes = (num_rows, vocab_size, num_slices(vocab_size))
    at = memory.address
    arguments = (at("logits"), at("records"), at("state"), at("counts"), at("partials"), at("tickets"), *sizes)
    launches = [
        Launch(
            select_count,
            {**COUNT_CONSTANTS, "SHIFT": shift, "BITS": bits},
            (*arguments, RECORD_BYTES),
            grid=grid,
            num_threads=THREADS,
            shared_bytes=count_shared_bytes(bits),
            specialised=mutants(index),
        )
        for index, (shift, bits) in enumerate(digits)
    ]
    scratch = (at("candidates"), at("partials"), at("tickets"), at("places"))
    launches.append(
        Launch(
            gather_top_k,
            GATHER_CONSTANTS,
            (at("logits"), at("records"), at("state"), *scratch, at("top_ids"), at("top_logits"), *sizes),
            grid=grid,
            num_threads=THREADS,
            shared_bytes=gather_shared_bytes(num_slices(vocab_size), K),
            specialised=mutants(len(digits)),
        )
    )
    return launches


def check(memory: Memory, rows: Rows, ks: Sequence[int], order: Sequence[int]) -> None:
    """Assert that what was found is what the executor ranks first, to the bit, and that all scratch is as it was."""
    ids, values = memory.get("top_ids"), memory.get("top_logits")
    for slot, (row, k) in enumerate(zip(order, ks, strict=True)):
        expected = ranked_largest(rows[row], k) if row >= 0 and k > 0 else np.empty(0, np.intp)
        assert ids[slot, : len(expected)].tolist() == expected.tolist(), (row, k)
        assert (ids[slot, len(expected) :] == -7).all()
        assert values[slot, : len(expected)].tobytes() == rows[row, expected].tobytes()
    for name in COUNTERS:
        assert not memory.get(name).any(), name


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_top_k_is_the_rank_of_the_executor_on_any_grid_again_and_again(vocab_size: int) -> None:
    """Ties to the lowest ids, -0 equal to 0, bits of logits kept; three runs on one state, scratch left as it was."""
    rows = awkward_rows(vocab_size, seed=vocab_size)
    order = [3, 0, -1, 1, 2, 4, 5, 6, 1, 7]
    ks = [7, 64, 3, 1, 40, 33, 5, 2, 0, 16]
    memory = place(rows, ks, order)
    for seed, grid in enumerate((1, 4, 2)):
        replay(memory, chain(memory, grid), outputs=OUTPUTS, counters=COUNTERS, seed=seed)
        check(memory, rows, ks, order)


def test_top_k_of_a_small_vocabulary_is_all_of_it() -> None:
    """K >= the vocabulary, equal to it and above, also where a logit is no number: counters come back to zero."""
    rows = awkward_rows(50, seed=1)
    rows[0, 3:5] = np.array([0xFFFFFFFF, 0x7FFFFFFF], np.uint32).view(np.float32)
    order, ks = [1, 2, 4], [50, 64, 51]
    memory = place(rows, [*ks, 64], [*order, 0])
    for seed in range(3):
        replay(memory, chain(memory, 2), outputs=OUTPUTS, counters=COUNTERS, seed=seed)
        ids = memory.get("top_ids")
        for slot, (row, _k) in enumerate(zip(order, ks, strict=True)):
            assert ids[slot, :50].tolist() == ranked_largest(rows[row], 50).tolist()
        assert sorted(ids[3, :50]) == list(range(50))


@pytest.mark.parametrize("index", range(len(DIGITS) + 1))
def test_a_ticket_that_does_not_wrap_is_found(index: int) -> None:
    """In each launch of the chain, where it ends."""
    rows = awkward_rows(300, seed=1)
    memory = place(rows, [5, 9], [0, 1])
    launch = chain(memory, 2)[index]
    mutant = without_wrapping(launch.kernel, launch.constants)
    mutated = chain(memory, 2, mutants=lambda i: mutant if i == index else None)[: index + 1]
    with pytest.raises(AssertionError, match="tickets must be 0 for the next run"):
        replay(memory, mutated, outputs=OUTPUTS, counters=COUNTERS)


def test_top_k_with_the_digits_that_are_shipped() -> None:
    """11, 11 and 10 bits; rows of 300."""
    digits = ((21, 11), (10, 11), (0, 10))
    rows = awkward_rows(300, seed=9)
    order, ks = [0, 3], [17, 6]
    memory = place(rows, ks, order, digits)
    run(memory, chain(memory, 3, digits), seed=5)
    check(memory, rows, ks, order)


@pytest.mark.parametrize("index", [0, 1, len(DIGITS)])
def test_top_k_needs_all_of_its_synchronisation(index: int) -> None:
    """Any barrier, fence or wait less is found out, in a first digit, a later one, and the collection."""
    rows = awkward_rows(600, seed=3)
    order, ks = [4, 7, 2], [40, 15, 20]

    def simulate(mutant: Specialised) -> None:
        memory = place(rows, ks, order)
        launches = chain(memory, 2, mutants=lambda i: mutant if i == index else None)
        run(memory, launches, seed=index)
        check(memory, rows, ks, order)

    shift, bits = DIGITS[min(index, len(DIGITS) - 1)]
    if index == len(DIGITS):
        check_mutants(gather_top_k, GATHER_CONSTANTS, simulate)
    else:
        check_mutants(select_count, {**COUNT_CONSTANTS, "SHIFT": shift, "BITS": bits}, simulate)


def test_specs_cover_every_digit_once() -> None:
    """The digits of a key are 32 bits together, and the collection comes last."""
    chained = specs(MODEL_SHAPES["Qwen3-0.6B"])
    digits = [dict(spec.constants) for spec in chained[:-1]]
    assert sum(int(str(constants["BITS"])) for constants in digits) == 32
    assert [spec.kernel for spec in chained] == [select_count] * 3 + [gather_top_k]


def test_a_vocabulary_beyond_the_last_cta_is_refused() -> None:
    """One thread of the last CTA holds one slice, and an id has 20 bits."""
    assert checked_num_slices(151936) == 38
    with pytest.raises(ValueError, match="slices"):
        checked_num_slices(1 << 20)


def test_more_than_there_is_room_for_is_refused() -> None:
    """The message names both numbers."""
    with pytest.raises(ValueError, match=r"1025.*1024"):
        pack_records([0], [LARGEST_K + 1])
