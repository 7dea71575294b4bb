"""Speculative sampling loses nothing: the output has the distribution of the model, exactly and by counting."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ferrule_server.executor.base import DraftDistribution, DraftSpec, OutputSpec, RowOutput, SampleSpec, Shaping
from ferrule_server.executor.sampling import drafts
from ferrule_server.executor.sampling import selection as sampling
from ferrule_server.executor.sampling.device_sampler import ChoiceRow, DeviceSampler
from ferrule_server.executor.sampling.distributions import Distribution, sampling_distribution
from ferrule_server.executor.sampling.drafts import accept_probability, decide, residual
from ferrule_server.executor.sampling.philox import Purpose, uniform
from ferrule_server.executor.sampling.ranking import Float64Array
from ferrule_server.executor.sampling.selection import select_rows, shape_row
from tests.executor.slow_distributions import as_row, mask_of, slow_distribution, slow_shape

VOCAB = 7
ROW = as_row([0.3, -1.0, 2.0, 0.3, 1.1, -4.0, 2.0])
HISTORY = np.array([2, 2, 0, 6], np.int32)
SAMPLES = [
    SampleSpec(),
    SampleSpec(temperature=0.6),
    SampleSpec(temperature=1.9, top_k=3),
    SampleSpec(top_p=0.8),
    SampleSpec(min_p=0.2),
    SampleSpec(temperature=0.7, top_k=5, top_p=0.9, min_p=0.05),
    SampleSpec(temperature=0),
]
SHAPINGS = [
    None,
    Shaping(repetition_penalty=1.4, frequency_penalty=0.3, presence_penalty=0.2),
    Shaping(bias=((1, 2.5), (6, -1.0)), mask=mask_of([0, 1, 4, 6], VOCAB)),
    Shaping(presence_penalty=0.9, bias=((5, 4.0),), mask=mask_of([2, 5], VOCAB)),
]
KINDS = ["dense", "sparse", "certain", "own"]


def distribution_of(sample: SampleSpec, shaping: Shaping | None) -> Distribution:
    """Return p, as the executor makes it."""
    values = ROW if shaping is None else shape_row(ROW, shaping, HISTORY)
    return sampling_distribution(values, sample, float(values.max()))


def slow_target(sample: SampleSpec, shaping: Shaping | None) -> Float64Array:
    """Return the probabilities of plain sampling, by the slow reference: float64 [VOCAB]."""
    values = ROW.tolist() if shaping is None else slow_shape(ROW.tolist(), shaping, HISTORY.tolist())
    target = np.zeros(VOCAB)
    for token_id, probability in slow_distribution(values, sample).items():
        target[token_id] = probability
    return target


def draft_distributions(kind: str, distribution: Distribution) -> list[DraftDistribution | None]:
    """Return distributions q of one kind to draw drafts from; ``own`` is p itself, up to the rounding of float32."""
    rng = np.random.default_rng(4)
    if kind == "dense":
        return [
            DraftDistribution(bytes([i]), None, rng.dirichlet(np.full(VOCAB, alpha)))
            for i, alpha in enumerate((0.3, 1, 9))
        ]
    if kind == "sparse":
        ids = [np.array(ids, np.int32) for ids in ([6, 2, 4], [5, 1], [3])]
        return [DraftDistribution(bytes([i]), part, rng.dirichlet(np.ones(len(part)))) for i, part in enumerate(ids)]
    if kind == "own":
        return [DraftDistribution(b"p", None, distribution.probabilities().astype(np.float32).astype(np.float64))]
    return [None]


def proposal(distribution: DraftDistribution | None, token_id: int) -> Float64Array:
    """Return q: float64 [VOCAB]; without a distribution, certainty of one token."""
    probabilities = np.zeros(VOCAB)
    if distribution is None:
        probabilities[token_id] = 1
    elif distribution.token_ids is None:
        probabilities[:] = distribution.probs / distribution.probs.sum()
    else:
        probabilities[distribution.token_ids] = distribution.probs / distribution.probs.sum()
    return probabilities


def emitted(distribution: Distribution, draft_distribution: DraftDistribution | None, token_id: int) -> Float64Array:
    """Return the distribution of what comes out, summed over every draft that q may give: float64 [VOCAB]."""
    out = np.zeros(VOCAB)
    q = proposal(draft_distribution, token_id)
    for drafted in np.flatnonzero(q).tolist():
        draft = DraftSpec(drafted, draft_distribution)
        accepted = accept_probability(distribution, draft)
        out[drafted] += q[drafted] * accepted
        if accepted < 1:
            out += q[drafted] * (1 - accepted) * residual(distribution, draft).probabilities()
    return out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shaping", SHAPINGS)
@pytest.mark.parametrize("sample", SAMPLES)
def test_emitted_distribution_is_plain_sampling(sample: SampleSpec, shaping: Shaping | None, kind: str) -> None:
    """Enumerated exactly: total variation below 1e-6 for every distribution p and every kind of draft."""
    distribution, target = distribution_of(sample, shaping), slow_target(sample, shaping)
    for draft_distribution in draft_distributions(kind, distribution):
        for token_id in range(VOCAB) if draft_distribution is None else [0]:
            assert np.abs(emitted(distribution, draft_distribution, token_id) - target).sum() / 2 < 1e-6


DISTRIBUTIONS = st.lists(st.floats(0, 1), min_size=VOCAB, max_size=VOCAB).filter(lambda weights: sum(weights) > 1e-3)


@settings(max_examples=300)
@given(weights=DISTRIBUTIONS, q=DISTRIBUTIONS, kept=st.sets(st.integers(0, VOCAB - 1), min_size=1))
def test_emitted_distribution_is_any_target_under_any_draft(
    weights: list[float], q: list[float], kept: set[int]
) -> None:
    """Zeros anywhere in p and q, distributions over few tokens, sums that are not 1: what comes out is p."""
    distribution = Distribution(np.where(np.isin(np.arange(VOCAB), list(kept)), np.array(weights) + 1e-3, 0.0))
    draft_distribution = DraftDistribution(b"q", None, np.array(q) / sum(q) * (1 + 5e-4))
    assert np.abs(emitted(distribution, draft_distribution, 0) - distribution.probabilities()).sum() / 2 < 1e-9


@pytest.mark.parametrize("kind", KINDS)
def test_decisions_follow_the_numbers(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Below its probability a draft is accepted, from it on another token is drawn, each by its own number."""
    distribution = distribution_of(SAMPLES[5], SHAPINGS[1])
    numbers: dict[Purpose, float] = {}
    monkeypatch.setattr(drafts, "uniform", lambda seed, position, purpose: numbers[purpose])
    for draft_distribution, token_id in itertools.product(draft_distributions(kind, distribution), range(VOCAB)):
        draft = DraftSpec(token_id, draft_distribution)
        border = accept_probability(distribution, draft)
        if border > 0:
            numbers[Purpose.ACCEPT] = math.nextafter(border, 0)
            accepted = decide(distribution, draft, 0, 0)
            assert (accepted.token, accepted.is_accepted) == (token_id, True)
            assert accepted.logprob == pytest.approx(math.log(distribution.probabilities()[token_id]), abs=1e-12)
        if border < 1:
            numbers[Purpose.ACCEPT] = border
            left = residual(distribution, draft).probabilities()
            cells = 500
            counts = np.zeros(VOCAB)
            for cell in range(cells):
                numbers[Purpose.RESIDUAL] = (cell + 0.5) / cells
                other = decide(distribution, draft, 0, 0)
                assert not other.is_accepted
                assert other.logprob == pytest.approx(math.log(distribution.probabilities()[other.token]), abs=1e-12)
                counts[other.token] += 1
            assert np.abs(counts / cells - left).max() <= 1 / cells


def test_rejected_draft_of_certainty_is_never_drawn_again() -> None:
    """What is left of p has everything but the draft; tokens that p drops stay dropped."""
    distribution = distribution_of(SampleSpec(top_k=4), None)
    for token_id in range(VOCAB):
        left = residual(distribution, DraftSpec(token_id)).weights
        assert left[token_id] == 0
        assert set(np.flatnonzero(left)) == set(np.flatnonzero(distribution.probabilities())) - {token_id}


def test_draft_that_leaves_nothing_falls_back_to_the_target() -> None:
    """Where q is p, nothing is left over: the draft is accepted, and if rounding says otherwise p is drawn from."""
    distribution = distribution_of(SampleSpec(), None)
    draft = DraftSpec(2, DraftDistribution(b"p", None, distribution.probabilities()))
    assert accept_probability(distribution, draft) == 1
    assert residual(distribution, draft) is distribution
    certain = Distribution(np.eye(VOCAB)[3])
    assert accept_probability(certain, DraftSpec(3)) == 1
    assert residual(certain, DraftSpec(3)) is certain


def test_draft_that_its_own_distribution_excludes_is_judged_by_the_target() -> None:
    """q(x) = 0 cannot have been drawn: no division by it, accepted where p allows x and refused where not."""
    distribution = distribution_of(SampleSpec(top_k=2), None)
    for draft_distribution in (
        DraftDistribution(b"d", None, np.eye(VOCAB)[0]),
        DraftDistribution(b"s", np.array([0], np.int32), np.ones(1)),
    ):
        assert accept_probability(distribution, DraftSpec(2, draft_distribution)) == 1
        assert accept_probability(distribution, DraftSpec(5, draft_distribution)) == 0


@cache
def next_row(token_id: int) -> np.ndarray:
    """Return the logits after a token, of a model that looks at one token."""
    return np.random.default_rng(token_id).standard_normal(4).astype(np.float32)


def run_chain(
    seed: int, first: int, spec: SampleSpec, draft_distribution: DraftDistribution | None, *, is_batched: bool
) -> list[int]:
    """Verify two drafts after ``first`` and return the tokens that come out, filled up to three by plain draws.

    Drafts are drawn from the distribution with the numbers of purpose DRAFT, as a client may, or are always token 1.
    """
    drafted = [1, 1]
    if draft_distribution is not None:
        drafted = [
            Distribution(draft_distribution.probs).draw(uniform(seed, 1 + i, Purpose.DRAFT)).token for i in range(2)
        ]
    rows = np.stack([next_row(token_id) for token_id in (first, *drafted)])
    sample = SampleSpec(spec.temperature, spec.top_k, spec.top_p, spec.min_p, seed)
    specs = [OutputSpec(sample=sample, draft=DraftSpec(token_id, draft_distribution)) for token_id in drafted]
    outputs = choose_rows(rows, [*specs, OutputSpec(sample=sample)], is_batched=is_batched)
    tokens: list[int] = []
    for output in outputs:
        assert output.token is not None
        tokens.append(output.token)
        if not output.is_accepted:
            break
    while len(tokens) < 3:
        (plain,) = select_rows(next_row(tokens[-1])[None], [len(tokens)], [OutputSpec(sample=sample)])
        assert plain.token is not None
        tokens.append(plain.token)
    return tokens


def choose_rows(rows: np.ndarray, specs: Sequence[OutputSpec], *, is_batched: bool) -> list[RowOutput]:
    """Choose at positions 0, 1, ... in numpy or batched in torch."""
    if not is_batched:
        return select_rows(rows, range(len(rows)), specs)
    wanted = [ChoiceRow(i + 1, spec, None) for i, spec in enumerate(specs)]
    choices = DeviceSampler(torch.device("cpu")).choose(torch.from_numpy(rows), wanted)
    return [RowOutput(i + 1, choice.token, is_accepted=choice.is_accepted) for i, choice in enumerate(choices)]


CRITICAL_63 = 144.0
"""Chi-square of 63 degrees of freedom exceeds this once in about 10^8."""


@pytest.mark.parametrize("is_batched", [False, True])
@pytest.mark.parametrize("draft_distribution", [None, DraftDistribution(b"q", None, np.array([0.1, 0.5, 0.1, 0.3]))])
def test_three_tokens_of_verified_chains_have_the_joint_distribution_of_plain_sampling(
    draft_distribution: DraftDistribution | None, is_batched: bool
) -> None:
    """Counted over many seeds with the real numbers: all 64 runs of three tokens as often as the model says."""
    spec, first, count = SampleSpec(temperature=0.8), 3, 6000
    distributions = [dict(slow_distribution(next_row(token_id).tolist(), spec)) for token_id in range(4)]
    counts = np.zeros((4, 4, 4))
    for seed in range(count):
        counts[tuple(run_chain(seed * 7919 + 5, first, spec, draft_distribution, is_batched=is_batched))] += 1
    expected = np.zeros((4, 4, 4))
    for a, b, c in itertools.product(range(4), repeat=3):
        expected[a, b, c] = count * distributions[first][a] * distributions[a][b] * distributions[b][c]
    assert ((counts - expected) ** 2 / expected).sum() < CRITICAL_63


@pytest.mark.parametrize("is_batched", [False, True])
def test_one_number_never_serves_two_draws(is_batched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A verify uses ACCEPT and, where a draft falls, RESIDUAL at each position, SAMPLE at the last; nothing twice."""
    used: list[tuple[int, int, Purpose]] = []

    def spy(seed: int, position: int, purpose: Purpose) -> float:
        used.append((seed, position, purpose))
        return uniform(seed, position, purpose)

    for module in ("drafts", "selection", "device_sampler"):
        monkeypatch.setattr(f"ferrule_server.executor.sampling.{module}.uniform", spy)
    sample = SampleSpec(seed=11)
    specs = [OutputSpec(sample=sample, draft=DraftSpec(i % VOCAB)) for i in range(20)]
    outputs = choose_rows(np.stack([ROW] * 21), [*specs, OutputSpec(sample=sample)], is_batched=is_batched)
    assert len(set(used)) == len(used)
    for output in outputs[:-1]:
        purposes = {purpose for _, position, purpose in used if position == output.position}
        assert Purpose.ACCEPT in purposes
        assert output.is_accepted or Purpose.RESIDUAL in purposes
        assert Purpose.SAMPLE not in purposes
    assert used[-1] == (11, 21, Purpose.SAMPLE) or (11, 21, Purpose.SAMPLE) in used
    assert {output.is_accepted for output in outputs} == {True, False, None}


def test_drafts_go_through_shaping_and_values_stay_raw() -> None:
    """A masked draft is refused; the token has log-probabilities under the raw row and the shaped distribution."""
    shaping = Shaping(mask=mask_of([0, 4], VOCAB))
    spec = OutputSpec(sample=SampleSpec(seed=5), shaping=shaping, draft=DraftSpec(2), logprobs=True, full_logits=True)
    (output,) = select_rows(ROW[None], [8], [spec])
    target = slow_target(SampleSpec(), shaping)
    assert output.is_accepted is False
    assert output.token in (0, 4)
    assert output.sampled_logprob == pytest.approx(math.log(target[output.token]), abs=1e-12)
    assert output.model_logprob == pytest.approx(math.log(slow_target(SampleSpec(), None)[output.token]), abs=1e-6)
    assert np.array_equal(np.asarray(output.logits), ROW)
    choice = sampling.choose(ROW, 9, spec, 2, None)
    assert choice is not None
    assert choice.token == output.token
