"""The k largest logits, in the simulator, against the executor's own ranking."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from ferrule_server.executor.base import SampleSpec
from ferrule_server.executor.cuda.choice_inputs import pack_draw
from ferrule_server.executor.sampling.ranking import ranked_largest
from ferrule_server.kernels.cuda.logit_rows import num_slices as checked_num_slices
from ferrule_server.kernels.cuda.sample import RECORD
from ferrule_server.kernels.cuda.specialise import Constant, Specialised
from ferrule_server.kernels.cuda.top_k import gather_top_k, shared_bytes
from tests.kernels.cuda.logit_cases import (
    SELECT_CONSTANTS,
    SLICE,
    THREADS,
    VOCABULARIES,
    WARPS,
    Rows,
    awkward_rows,
    place_choices,
    select_launch,
)
from tests.kernels.cuda.mutation import check_mutants
from tests.kernels.cuda.replay import replay
from tools.cuda_simulator import Launch, Memory, run

K = 64
OUTPUTS = ("borders", "top_ids", "top_logits")
CONSTANTS: dict[str, Constant] = {"K": K, "SLICE": SLICE, "WARPS": WARPS}


def finite_rows(vocab_size: int, seed: int) -> Rows:
    """Return the awkward rows, of which those with an infinity are given to no step, with low numbers instead."""
    rows = awkward_rows(vocab_size, seed)
    rows[np.isneginf(rows)] = -1e4
    return rows


def place(rows: Rows, ks: Sequence[int], order: Sequence[int]) -> Memory:
    """Return memory with rows of logits, of which those in ``order`` are asked for."""
    records = np.frombuffer(b"".join(pack_draw(SampleSpec(top_k=k), rows.shape[1]) for k in ks), RECORD).copy()
    records["row"] = records["source"] = order
    memory = place_choices(rows, records)
    memory.put("top_ids", np.full((len(order), K), -7, np.int32), mutable=True)
    memory.put("top_logits", np.full((len(order), K), np.nan, np.float32), mutable=True)
    return memory


def chain(
    memory: Memory,
    grid: int,
    mutant: Specialised | None = None,
    *,
    constants: dict[str, Constant] = SELECT_CONSTANTS,
) -> list[Launch]:
    """Return the launches of a top-k: one finds what each row keeps, the other collects it."""
    names = ("logits", "records", "borders", "top_ids", "top_logits")
    gather = Launch(
        gather_top_k,
        CONSTANTS,
        (*map(memory.address, names), len(memory.get("records")), memory.get("logits").shape[1]),
        grid=grid,
        num_threads=THREADS,
        shared_bytes=shared_bytes(K),
        specialised=mutant,
    )
    return [select_launch(memory, grid, constants=constants), gather]


def check(memory: Memory, rows: Rows, ks: Sequence[int], order: Sequence[int]) -> None:
    """Assert that what was found is what the executor ranks first, to the bit, and that all scratch is as it was."""
    ids, values = memory.get("top_ids"), memory.get("top_logits")
    for slot, (row, k) in enumerate(zip(order, ks, strict=True)):
        expected = ranked_largest(rows[row], k) if row >= 0 and k > 0 else np.empty(0, np.intp)
        assert ids[slot, : len(expected)].tolist() == expected.tolist(), (row, k)
        assert (ids[slot, len(expected) :] == -7).all()
        assert values[slot, : len(expected)].tobytes() == rows[row, expected].tobytes()
    assert not memory.get("tickets").any()


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_top_k_is_the_rank_of_the_executor_on_any_grid_again_and_again(vocab_size: int) -> None:
    """Ties to the lowest ids, -0 equal to 0, bits of logits kept; three runs on one state, scratch left as it was."""
    rows = finite_rows(vocab_size, seed=vocab_size)
    order = [3, 0, -1, 1, 2, 4, 5, 6, 7]
    ks = [7, 64, 3, 1, 40, 33, 5, 2, 16]
    memory = place(rows, ks, order)
    for seed, grid in enumerate((1, 4, 2)):
        replay(memory, chain(memory, grid), outputs=OUTPUTS, counters=("tickets",), seed=seed)
        check(memory, rows, ks, order)


def test_top_k_of_a_small_vocabulary_is_all_of_it() -> None:
    """K >= the vocabulary, equal to it and above, also beside a row with logits that are no numbers."""
    rows = finite_rows(50, seed=1)
    rows[0, 3:5] = np.array([0xFFFFFFFF, 0x7FFFFFFF], np.uint32).view(np.float32)
    order, ks = [1, 2, 4], [50, 64, 51]
    memory = place(rows, [*ks, 64, 9], [*order, 0, 0])
    for seed in range(3):
        replay(memory, chain(memory, 2), outputs=OUTPUTS, counters=("tickets",), seed=seed)
        ids = memory.get("top_ids")
        for slot, (row, _k) in enumerate(zip(order, ks, strict=True)):
            assert ids[slot, :50].tolist() == ranked_largest(rows[row], 50).tolist()


def test_top_k_with_the_digits_that_are_shipped() -> None:
    """11 bits to a digit, 4096 tokens in the list; rows of 300."""
    rows = finite_rows(300, seed=9)
    order, ks = [0, 3], [17, 6]
    memory = place(rows, ks, order)
    run(memory, chain(memory, 3, constants={**SELECT_CONSTANTS, "BITS": 11, "ROOM": 4096}), seed=5)
    check(memory, rows, ks, order)


def test_top_k_needs_all_of_its_synchronisation() -> None:
    """Any barrier or wait less is found out."""
    rows = finite_rows(600, seed=3)
    order, ks = [4, 7, 2], [40, 15, 20]

    def simulate(mutant: Specialised) -> None:
        memory = place(rows, ks, order)
        run(memory, chain(memory, 1, mutant), seed=1)
        check(memory, rows, ks, order)

    check_mutants(gather_top_k, CONSTANTS, simulate)


def test_a_vocabulary_beyond_the_last_cta_is_refused() -> None:
    """One thread of the last CTA holds one slice, and an id has 20 bits."""
    assert checked_num_slices(151936) == 19
    with pytest.raises(ValueError, match="slices"):
        checked_num_slices(1 << 20)
