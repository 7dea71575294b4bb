"""Normalisers, entropies and log-probabilities, in the simulator, against the executor's in float64."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import pytest

from ferrule_server.executor.base import OutputSpec
from ferrule_server.executor.sampling.selection import select_rows
from ferrule_server.kernels.cuda.log_sum_exp import RECORD_BYTES, log_sum_exp, shared_bytes
from ferrule_server.kernels.cuda.specialise import Constant, Specialised
from tests.kernels.cuda.logit_cases import SLICE, THREADS, VOCABULARIES, WARPS, Rows, awkward_rows, num_slices
from tests.kernels.cuda.mutation import check_mutants
from tests.kernels.cuda.replay import replay
from tools.cuda_simulator import Launch, Memory, run

CONSTANTS: dict[str, Constant] = {"SLICE": SLICE, "WARPS": WARPS}
CHOSEN = -1
"""A request for the token that the first place of ``tokens`` holds."""


def finite_rows(vocab_size: int, seed: int) -> Rows:
    """Return the awkward rows with a low number for what is masked, and one as low as float32 goes."""
    rows = awkward_rows(vocab_size, seed)
    rows[np.isneginf(rows)] = -50.0
    rows[0, vocab_size // 2] = np.finfo(np.float32).min
    return rows


def place(rows: Rows, order: Sequence[int], requests: Sequence[Sequence[int]], tokens: Sequence[int] = (3,)) -> Memory:
    """Return memory with rows of logits and the tokens asked for of each."""
    memory, ends = Memory(), np.cumsum([len(asked) for asked in requests])
    records = np.zeros((len(order), RECORD_BYTES // 4), np.int32)
    records[:, 0], records[:, 1], records[:, 2] = order, [0, *ends[:-1]], ends
    memory.put("logits", rows, mutable=True)
    memory.put("records", records, mutable=True)
    memory.put("request_ids", np.array([*chain.from_iterable(requests), 0], np.int32), mutable=True)
    memory.put("tokens", np.array(tokens, np.int32), mutable=True)
    memory.put("figures", np.full((len(order), 4), np.nan, np.float32), mutable=True)
    memory.put("logprobs", np.full(ends[-1] + 1, np.nan, np.float32), mutable=True)
    memory.empty("partials", (len(order), num_slices(rows.shape[1]), 4), np.float32)
    memory.put("tickets", np.zeros(len(order), np.int32), mutable=True)
    return memory


def launch(memory: Memory, grid: int, mutant: Specialised | None = None) -> Launch:
    """Return the launch over everything placed."""
    names = ("logits", "records", "request_ids", "tokens", "figures", "logprobs", "partials", "tickets")
    vocab_size = memory.get("logits").shape[1]
    slices = num_slices(vocab_size)
    return Launch(
        log_sum_exp,
        CONSTANTS,
        (*map(memory.address, names), len(memory.get("records")), vocab_size, slices),
        grid=grid,
        num_threads=THREADS,
        shared_bytes=shared_bytes(slices),
        specialised=mutant,
    )


def check(memory: Memory, rows: Rows, order: Sequence[int], requests: Sequence[Sequence[int]]) -> None:
    """Assert that figures and log-probabilities are those of ``select_rows``."""
    figures, logprobs, start = memory.get("figures"), memory.get("logprobs"), 0
    for slot, (index, asked) in enumerate(zip(order, requests, strict=True)):
        answers, start = logprobs[start : start + len(asked)], start + len(asked)
        if index < 0:
            assert np.isnan(figures[slot]).all()
            continue
        row = rows[index]
        ids = tuple(3 if token == CHOSEN else token for token in asked)
        (expected,) = select_rows(row[None], [0], [OutputSpec(logprob_ids=ids, target_id=0, entropy=True)])
        assert figures[slot, 0] == row.max()
        assert expected.target_logprob is not None
        normaliser = float(row[0]) - expected.target_logprob
        assert float(figures[slot, 0]) + float(figures[slot, 1]) == pytest.approx(normaliser, rel=1e-6, abs=1e-6)
        assert figures[slot, 2] == pytest.approx(expected.entropy, rel=1e-5, abs=2e-6)
        if expected.requested_logprobs is not None:
            np.testing.assert_allclose(answers, expected.requested_logprobs, rtol=1e-6, atol=2e-6)
    assert not memory.get("tickets").any()


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_figures_are_those_of_the_executor_on_any_grid_again_and_again(vocab_size: int) -> None:
    """Rows of all kinds, tokens asked for by id and by what was chosen; bit-identical over grids and schedules."""
    rows = finite_rows(vocab_size, seed=vocab_size)
    order = [0, 1, -1, 2, 3, 4, 5, 6]
    requests = [[0, 5, vocab_size // 2], [CHOSEN], [1], [], range(70), [vocab_size - 1], [2, CHOSEN], [6]]
    memory = place(rows, order, requests)
    results = []
    for seed, grid in enumerate((1, 3, 20)):
        replay(memory, [launch(memory, grid)], outputs=("figures", "logprobs"), counters=("tickets",), seed=seed)
        check(memory, rows, order, requests)
        results.append((memory.get("figures").tobytes(), memory.get("logprobs").tobytes()))
    assert results[0] == results[1] == results[2]


def test_figures_do_not_depend_on_where_a_row_lies() -> None:
    """The same row at four alignments, alone or among others, gives the same bits."""
    row = finite_rows(517, seed=2)[0]
    memory = place(np.stack([row] * 4), range(4), [[9, 500]] * 4)
    run(memory, [launch(memory, 3)])
    assert len({figures.tobytes() for figures in memory.get("figures")}) == 1
    assert len({pair.tobytes() for pair in memory.get("logprobs")[:8].reshape(4, 2)}) == 1


def test_a_request_for_no_token_is_answered_by_the_lowest_number() -> None:
    """Where a row gave no token (-1), or the id is beyond the vocabulary."""
    memory = place(np.zeros((1, 97), np.float32), [0], [[CHOSEN, 97, 96]], tokens=[-1])
    run(memory, [launch(memory, 1)])
    lowest = np.finfo(np.float32).min
    assert memory.get("logprobs")[:2].tolist() == [lowest, lowest]
    assert memory.get("logprobs")[2] == pytest.approx(-np.log(97), rel=1e-6)


def test_log_sum_exp_needs_all_of_its_synchronisation() -> None:
    """Any barrier, fence or wait less is found out."""
    rows = finite_rows(600, seed=3)
    order, requests = [0, 1, 3], [[1, 2], [400], [3]]

    def simulate(mutant: Specialised) -> None:
        memory = place(rows, order, requests)
        run(memory, [launch(memory, 2, mutant)], seed=4)
        check(memory, rows, order, requests)

    check_mutants(log_sum_exp, CONSTANTS, simulate)
