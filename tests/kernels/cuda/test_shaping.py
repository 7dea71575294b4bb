"""Penalties, bias and mask, in the simulator, against the executor's shaping in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from ferrule_server.executor.base import Int32Array, Shaping, TokenMask
from ferrule_server.executor.cuda.choice_inputs import pack_draw, pack_entries, pack_shaping
from ferrule_server.executor.sampling.ranking import best_ids
from ferrule_server.executor.sampling.selection import shape_row
from ferrule_server.kernels.cuda.sample import RECORD, mask_bytes
from tests.kernels.cuda.logit_cases import VOCABULARIES, Rows, place_choices, select_launch
from tests.kernels.cuda.replay import replay
from tools.cuda_simulator import Memory, run

Case = tuple[int, Shaping, Int32Array | None]


def mask_of(is_allowed: npt.NDArray[np.bool_]) -> TokenMask:
    """Return the mask that allows these tokens."""
    return TokenMask(bytes(16), np.packbits(is_allowed, bitorder="little"))


def cases(vocab_size: int, seed: int) -> list[Case]:
    """Return rows to shape: each part alone, all together, nothing, and a place that is not used."""
    rng = np.random.default_rng(seed)
    history = rng.integers(0, vocab_size, 150, dtype=np.int32)
    history[:40] = history[0]
    some = mask_of(rng.random(vocab_size) < 0.5)
    one = np.zeros(vocab_size, np.bool_)
    one[vocab_size - 1] = True
    ids = np.unique(np.append(rng.integers(0, vocab_size, 30), [0, vocab_size - 1]))
    bias = tuple((int(token), float(rng.normal(0, 5))) for token in ids)
    penalties = Shaping(repetition_penalty=1.3, frequency_penalty=0.37, presence_penalty=-0.2)
    return [
        (0, Shaping(mask=some), None),
        (1, Shaping(bias=bias), None),
        (2, Shaping(repetition_penalty=0.6, penalty_start=3), history),
        (-1, Shaping(), None),
        (3, replace(penalties, bias=bias, mask=some), history),
        (0, Shaping(mask=mask_of(one), bias=((0, 100.0), (vocab_size - 1, -100.0))), None),
        (1, Shaping(bias=((5, 3e38),), presence_penalty=1e38), history),
        (2, Shaping(), None),
    ]


def rows_of(vocab_size: int, seed: int) -> Rows:
    """Return rows of both signs, with zeros of both signs; one so large that a bias leaves float32."""
    rows = np.random.default_rng(seed).normal(0, 6, (4, vocab_size)).astype(np.float32)
    rows[:, 3::17] = -0.0
    rows[1, 5] = 2e38
    return rows


def entries_of(shaping: Shaping, history: Int32Array | None) -> Int32Array:
    """Return the entries of a row."""
    counted = history if history is not None and shaping.has_penalties else np.empty(0, np.int32)
    return pack_entries(counted, shaping.bias)


def place(rows: Rows, shaped: Sequence[Case]) -> Memory:
    """Return memory with rows of logits and what to do with them."""
    vocab_size = rows.shape[1]
    records = np.frombuffer(pack_draw(None, vocab_size) * len(shaped), RECORD).copy()
    entries: list[Int32Array] = []
    masks: list[npt.NDArray[np.uint8]] = []
    for slot, (row, shaping, history) in enumerate(shaped):
        first, mask = 1 + sum(map(len, entries)), -1
        entries.append(entries_of(shaping, history))
        if shaping.mask is not None:
            mask = 1 + sum(map(len, masks)) // 16
            masks.append(np.zeros(mask_bytes(vocab_size), np.uint8))
            masks[-1][: len(shaping.mask.bits)] = shaping.mask.bits
        pack_shaping(records[slot : slot + 1], shaping, mask, (first, first + len(entries[-1])))
        records["row"][slot], records["source"][slot] = row, len(rows) + slot
    return place_choices(rows, records, entries=entries, masks=masks)


def bound(row: Rows, shaping: Shaping, history: Int32Array | None) -> npt.NDArray[np.float64]:
    """Return how far from the definition a logit may be: what ``sample`` says."""
    size = np.zeros(len(row))
    if shaping.has_penalties:
        assert history is not None
        token_ids, counts = np.unique(history, return_counts=True)
        factor = max(shaping.repetition_penalty, 1 / shaping.repetition_penalty)
        penalties = counts * abs(shaping.frequency_penalty) + abs(shaping.presence_penalty)
        size[token_ids] += np.abs(row[token_ids].astype(np.float64)) * factor + penalties
    for token_id, amount in shaping.bias:
        size[token_id] += abs(float(row[token_id])) + abs(amount)
    return 2.0**-22 * size


def check(memory: Memory, rows: Rows, shaped: Sequence[Case]) -> None:
    """Assert that every row is shaped as by the executor, within the bound, and to the bit where nothing changes it."""
    got, best = memory.get("logits")[len(rows) :], memory.get("borders").view(np.int32)[:, 0]
    largest = np.finfo(np.float32).max
    for slot, (index, shaping, history) in enumerate(shaped):
        if index < 0:
            assert np.isnan(got[slot]).all()
            continue
        expected = shape_row(rows[index], shaping, history)
        allowed = np.isfinite(expected)
        assert (np.isneginf(got[slot]) == ~allowed).all()
        error = np.abs(got[slot, allowed].astype(np.float64) - expected[allowed].clip(-largest, largest))
        limits = bound(rows[index], shaping, history)[allowed]
        assert (error <= limits).all()
        assert best[slot] == best_ids(np.where(allowed, got[slot], -largest)[None])[0]
        allowed[entries_of(shaping, history)[:, 0]] = False
        assert got[slot, allowed].tobytes() == rows[index, allowed].tobytes()


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_rows_are_shaped_as_by_the_executor_on_any_grid_again_and_again(vocab_size: int) -> None:
    """Every part alone and all together; bit-identical over grids and schedules."""
    rows, shaped = rows_of(vocab_size, seed=1), cases(vocab_size, seed=vocab_size)
    memory = place(rows, shaped)
    results = []
    for seed, grid in enumerate((1, 4, 2)):
        replay(memory, [select_launch(memory, grid)], outputs=("logits", "borders"), counters=("tickets",), seed=seed)
        check(memory, rows, shaped)
        results.append(memory.get("logits").tobytes())
    assert results[0] == results[1] == results[2]


def test_logits_beyond_float32_become_its_largest() -> None:
    """Infinity would read as a row that is not finite."""
    rows = np.full((1, 97), 3e38, np.float32)
    rows[0, 1] = -3e38
    shaping = Shaping(bias=((0, 3e38), (1, -3e38)))
    memory = place(rows, [(0, shaping, None)])
    run(memory, [select_launch(memory, 1)])
    largest = np.finfo(np.float32).max
    assert memory.get("logits")[1, :2].tolist() == [largest, -largest]


def test_penalties_err_by_no_more_than_is_said() -> None:
    """The kernel's own logits, over many settings, within the bound that it states, in which r' is the factor used.

    Each statement of ``changed`` is one instruction, whose result the simulator rounds to float32 as a GPU does.
    """
    rng = np.random.default_rng(7)
    num_rows, vocab_size = 24, 97
    rows = rng.normal(0, 10, (num_rows, vocab_size)).astype(np.float32)
    counts = rng.integers(1, 500, rows.shape)
    biases = rng.normal(0, 10, rows.shape)
    shaped: list[Case] = []
    for row, (repetition, frequency, presence) in enumerate(rng.uniform((0.2, -2, -2), 2, (num_rows, 3)).tolist()):
        penalties = {"frequency_penalty": frequency, "presence_penalty": presence, "repetition_penalty": repetition}
        history = np.repeat(np.arange(vocab_size, dtype=np.int32), counts[row])
        shaped.append((row, Shaping(bias=tuple(enumerate(biases[row].tolist())), **penalties), history))
    memory = place(rows, shaped)
    run(memory, [select_launch(memory, 4)], seed=1)
    largest = 0.0
    for row, shaping, tokens in shaped:
        wide, repetition = rows[row].astype(np.float64), shaping.repetition_penalty
        scale = np.abs(wide) * np.where(wide > 0, 1 / repetition, repetition)
        lost = counts[row] * abs(shaping.frequency_penalty) + abs(shaping.presence_penalty)
        error = np.abs(memory.get("logits")[num_rows + row].astype(np.float64) - shape_row(rows[row], shaping, tokens))
        largest = max(largest, float((error / (scale + lost + np.abs(biases[row]))).max()))
    assert 2.0**-26 < largest <= 2.0**-22
