"""The choice of tokens in the kernels is that of the definition on the host, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ferrule_server.executor.base import (
    DraftDistribution,
    DraftSpec,
    Float32Array,
    Int32Array,
    OutputSpec,
    SampleSpec,
    Shaping,
    TokenMask,
)
from ferrule_server.executor.sampling.distributions import RUN, sampling_distribution, total_of
from ferrule_server.executor.sampling.philox import Purpose, uniform
from ferrule_server.executor.sampling.selection import choose
from ferrule_server.kernels.cpu import choice
from ferrule_server.kernels.cpu.plan import Plan
from tests.executor.cpu.models import KERNEL_SETS
from tests.executor.test_device_outputs import history_of, random_spec
from tests.kernels.cpu.choices import Rows

PLAN = Plan(*KERNEL_SETS[0], is_bfloat16=False, head_dim=32)
FLAT = (2.5 * np.random.default_rng(1).standard_normal(30011)).astype(np.float32)


@cache
def rows_of(vocab_size: int) -> Rows:
    """Return memory for rows of a vocabulary."""
    return Rows(PLAN, vocab_size, 8)


def check(
    logits: Float32Array,
    specs: Sequence[OutputSpec],
    histories: Sequence[Int32Array | None] = (),
    positions: Sequence[int] = (),
) -> None:
    """Assert that the kernels choose as the definition does: token, draft, and the bits of its log-probability."""
    positions, rows = positions or [3] * len(specs), rows_of(logits.shape[1])
    rows.write(logits)
    rows.ask(positions, specs, histories)
    rows.choose()
    for i, output in enumerate(rows.outputs(positions, specs)):
        best, history = int(logits[i].argmax()), histories[i] if histories else None
        expected = choose(logits[i], positions[i] + 1, specs[i], best, history)
        found = None if output.token is None else (output.token, output.sampled_logprob, output.is_accepted)
        logprob = expected.logprob if expected is not None and specs[i].logprobs else None
        assert found == (expected and (expected.token, logprob, expected.is_accepted)), (i, specs[i])


def random_rows(rng: np.random.Generator, num_rows: int, vocab_size: int) -> Float32Array:
    """Return rows of any height, flat and peaked, with and without equal logits."""
    scale = rng.choice([0.0, 0.01, 1.0, 6.0, 1e30])
    rows: Float32Array = (scale * rng.standard_normal((num_rows, vocab_size))).astype(np.float32)
    return rows.round(1) if rng.random() < 0.4 else rows


@settings(max_examples=300)
@given(seed=st.integers(0, 2**32), vocab_size=st.sampled_from([1, 7, 64, 65, 200, 1003, 4096]))
def test_choices_are_those_of_the_definition(seed: int, vocab_size: int) -> None:
    """Any policy on any row, beside any other."""
    rng = np.random.default_rng(seed)
    logits = random_rows(rng, 5, vocab_size)
    specs = [random_spec(rng, vocab_size) for _ in logits]
    histories = [history_of(rng, spec, vocab_size) for spec in specs]
    check(logits, specs, histories, rng.integers(0, 5000, len(logits)).tolist())


ROWS = {
    "flat": FLAT,
    "peaked": (6 * FLAT).astype(np.float32),
    "equal": np.full_like(FLAT, -3.25),
    "of a few values": FLAT.round(),
    "of bfloat16": (FLAT.view(np.uint32) & 0xFFFF0000).view(np.float32),
    "of signed zeros": np.copysign(np.float32(0), FLAT),
    "of the whole range": np.exp2(128 * (FLAT / 12)).astype(np.float32) * np.sign(FLAT),
    "of neighbours": (np.float32(1).view(np.int32) + np.arange(len(FLAT), dtype=np.int32) % 300).view(np.float32),
}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("temperature", [1e-200, 1e-30, 0.7, 1.0, 3.0, 1e30])
def test_cuts_of_long_rows_are_those_of_a_full_sort(name: str, temperature: float) -> None:
    """Borders in crowds of equal and of nearly equal logits: float32, also under a mask, and, penalised, float64."""
    shaping = Shaping(presence_penalty=0.25, bias=((5, 1.5), (30010, -0.5)))
    masked = Shaping(mask=TokenMask(b"thirds", np.packbits(np.arange(30011) % 3 == 0, bitorder="little")))
    history = np.arange(0, 30000, 7, dtype=np.int32)
    cuts = product([0, 1, 50, 470, 29000], [1e-9, 0.5, 0.95, 1 - 2**-53, 1.0], [0.0, 0.02])
    for i, (top_k, top_p, min_p) in enumerate(cuts):
        sample = SampleSpec(temperature, top_k, top_p, min_p, seed=i)
        specs = [OutputSpec(sample=sample, logprobs=True, shaping=each) for each in (None, masked, shaping)]
        check(np.stack([ROWS[name]] * 3), specs, [None, None, history])


def test_logits_that_only_float64_tells_apart_have_a_rank() -> None:
    """Twelve tokens that a bias makes nearly equal, in no order."""
    order = np.random.default_rng(5).permutation(12)
    shaping = Shaping(bias=tuple((3 * i, 3 + 1e-12 * float(place)) for i, place in enumerate(order)))
    samples = [SampleSpec(top_k=count, seed=count) for count in range(1, 8)] + [SampleSpec(top_p=0.3, seed=8)]
    specs = [OutputSpec(sample=sample, logprobs=True, shaping=shaping) for sample in samples]
    check(np.zeros((8, 64), np.float32), specs, positions=list(range(8)))


def test_sums_are_those_of_the_definition() -> None:
    """Not only the token: what it weighs and what all weigh have the same bits."""
    rows = rows_of(len(FLAT))
    assert RUN == choice.RUN
    for sample in (SampleSpec(), SampleSpec(3.0, top_p=0.95), SampleSpec(0.6, 20, 0.95), SampleSpec(min_p=0.1)):
        rows.write(FLAT[None])
        rows.ask([3], [OutputSpec(sample=sample)], [])
        rows.choose()
        weights = sampling_distribution(FLAT, sample, float(FLAT.max())).weights
        token = choose(FLAT, 4, OutputSpec(sample=sample), int(FLAT.argmax()), None)
        assert token is not None
        assert rows.results()[0].tolist() == [token.token, weights[token.token], total_of(weights), 0]


@pytest.mark.parametrize("count", [1, 7, 8, 63, 64, 65, 30011])
def test_masks_may_end_anywhere(count: int) -> None:
    """A byte of a mask that is only partly of the vocabulary, and one allowed token among thousands."""
    logits = np.resize(FLAT, (2, count))
    last, thirds = (np.arange(count) == count - 1), (np.arange(count) % 3 == 0)
    masks = [TokenMask(bytes([i]), np.packbits(each, bitorder="little")) for i, each in enumerate((last, thirds))]
    samples = (SampleSpec(temperature=0), SampleSpec(top_p=0.9))
    check(logits, [OutputSpec(sample=s, shaping=Shaping(mask=m)) for s, m in zip(samples, masks, strict=True)])


def test_penalties_count_long_histories_and_leave_nothing_behind() -> None:
    """32 000 tokens, many of them equal, then a row that counts none of them, in the memory of the same thread."""
    history = (np.arange(32000) ** 2 % 30011).astype(np.int32)
    penalties = Shaping(repetition_penalty=1.1, frequency_penalty=0.01, presence_penalty=-0.3)
    specs = [OutputSpec(sample=SampleSpec(seed=i), logprobs=True, shaping=penalties) for i in range(3)]
    check(np.stack([FLAT] * 3), specs, [history, history[:1], history[:0]])


@pytest.mark.parametrize("kind", ["certain", "dense", "sparse"])
def test_drafts_of_long_rows_are_decided_alike(kind: str) -> None:
    """Accepted and replaced, with p = q too, which leaves nothing over."""
    rng = np.random.default_rng(3)
    own = sampling_distribution(FLAT, SampleSpec(), float(FLAT.max())).probabilities()
    ids = rng.choice(len(FLAT), 500, replace=False).astype(np.int32)
    kinds: dict[str, list[DraftDistribution | None]] = {
        "certain": [None],
        "dense": [DraftDistribution(bytes([i]), None, q) for i, q in enumerate((own, rng.permutation(own)))],
        "sparse": [DraftDistribution(b"s", ids, rng.dirichlet(np.ones(500)))],
    }
    drafts = [DraftSpec(int(token), q) for token in (*ids[:20], FLAT.argmax(), 7) for q in kinds[kind]]
    plain = OutputSpec(sample=SampleSpec(), logprobs=True)
    specs = [replace(plain, draft=draft, sample=SampleSpec(seed=i)) for i, draft in enumerate(drafts)]
    for begin in range(0, len(specs), 8):
        part = specs[begin : begin + 8]
        check(np.stack([FLAT] * len(part)), part)


def test_draws_are_those_of_another_exp_but_at_borders() -> None:
    """2 000 000 numbers: another token than with the exp of numpy only within 1e-12 of a border between two."""
    rng = np.random.default_rng(4)
    row = FLAT.astype(np.float64)
    own = sampling_distribution(FLAT, SampleSpec(), float(FLAT.max())).probabilities().cumsum()
    other = np.exp(row - row.max())
    borders = np.cumsum(other / other.sum())
    numbers = rng.integers(0, 2**32, 2_000_000) * 2.0**-32 + 2.0**-33
    ours, theirs = (sums.searchsorted(numbers, side="right") for sums in (own, borders))
    differs = np.flatnonzero(ours != theirs)
    assert all(np.abs(borders - number).min() < 1e-12 for number in numbers[differs])
    for position in range(200):
        token = choose(FLAT, position, OutputSpec(sample=SampleSpec()), 0, None)
        assert token is not None
        assert token.token == borders.searchsorted(uniform(0, position, Purpose.SAMPLE), side="right")
