"""The batched selection of the device against the definition in numpy, on random rows and specs."""

from __future__ import annotations

import gc
import hashlib
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ferrule_server.executor.base import (
    DraftDistribution,
    DraftSpec,
    Float32Array,
    Int32Array,
    OutputSpec,
    RowOutput,
    SampleSpec,
    Shaping,
    TokenMask,
)
from ferrule_server.executor.sampling import device_outputs, ranking
from ferrule_server.executor.sampling.device_outputs import DeviceOutputs, top
from ferrule_server.executor.sampling.device_sampler import ChoiceRow, DeviceSampler
from ferrule_server.executor.sampling.distributions import Choice
from ferrule_server.executor.sampling.selection import select_rows

CPU = torch.device("cpu")
VOCAB_SIZES = (1, 2, 17, 128, 129, 300, 1000)
HIDDEN_SIZE = 5


def random_logits(rng: np.random.Generator, num_rows: int, vocab_size: int) -> Float32Array:
    """Return rows of many kinds: smooth, peaked, full of ties and signed zeros, one in ten with NaN or infinity."""
    logits = rng.standard_normal((num_rows, vocab_size)) * rng.choice([0.1, 2.0, 20.0], (num_rows, 1))
    is_coarse = rng.random(num_rows) < 0.4
    logits[is_coarse] = np.round(logits[is_coarse])
    bad = np.flatnonzero(rng.random(num_rows) < 0.1)
    logits[bad, rng.integers(0, vocab_size, len(bad))] = rng.choice([np.nan, np.inf, -np.inf], len(bad))
    return np.asarray(logits, np.float32)


def random_mask(rng: np.random.Generator, vocab_size: int) -> TokenMask:
    """Return a mask that allows at least one token."""
    is_allowed = rng.random(vocab_size) < rng.choice([0.0, 0.3, 0.9])
    is_allowed[rng.integers(vocab_size)] = True
    bits = np.packbits(is_allowed, bitorder="little")
    return TokenMask(hashlib.blake2b(bits.tobytes(), digest_size=16).digest(), bits)


def random_shaping(rng: np.random.Generator, vocab_size: int) -> Shaping:
    """Return shaping of any mix of parts."""
    biased = np.sort(rng.choice(vocab_size, min(3, vocab_size), replace=False)).tolist()
    return Shaping(
        repetition_penalty=float(rng.choice([1.0, 0.5, 1.3])),
        frequency_penalty=float(rng.choice([0.0, -0.4, 0.7])),
        presence_penalty=float(rng.choice([0.0, 1.1])),
        bias=tuple((token_id, float(rng.normal(0, 5))) for token_id in biased) if rng.random() < 0.5 else (),
        mask=random_mask(rng, vocab_size) if rng.random() < 0.5 else None,
    )


def random_draft(rng: np.random.Generator, vocab_size: int) -> DraftSpec:
    """Return a draft of a dense, a sparse or no distribution; it need not be one that the distribution allows."""
    kind, token_id = rng.integers(3), int(rng.integers(vocab_size))
    if kind == 0:
        return DraftSpec(token_id)
    if kind == 1:
        return DraftSpec(token_id, DraftDistribution(b"dense", None, rng.dirichlet(np.full(vocab_size, 0.5))))
    token_ids = rng.permutation(vocab_size)[: rng.integers(1, vocab_size + 1)].astype(np.int32)
    return DraftSpec(token_id, DraftDistribution(b"sparse", token_ids, rng.dirichlet(np.ones(len(token_ids)))))


def random_sample(rng: np.random.Generator, vocab_size: int) -> SampleSpec:
    """Return any mix of settings."""
    return SampleSpec(
        temperature=float(rng.choice([0.0, 0.3, 1.0, 1.7])),
        top_k=int(rng.choice([0, 1, 3, vocab_size, 2 * vocab_size])),
        top_p=float(rng.choice([1.0, rng.random() + 1e-9])),
        min_p=float(rng.choice([0.0, rng.random()])),
        seed=int(rng.integers(2**63)),
    )


def random_spec(rng: np.random.Generator, vocab_size: int) -> OutputSpec:
    """Return a spec that asks for any mix of things."""
    is_greedy = rng.random() < 0.3
    sample = None if is_greedy or rng.random() < 0.2 else random_sample(rng, vocab_size)
    asked = rng.integers(0, vocab_size, rng.integers(0, 4)).tolist()
    return OutputSpec(
        full_logits=rng.random() < 0.2,
        greedy=is_greedy,
        sample=sample,
        logprobs=rng.random() < 0.5,
        num_top_logprobs=int(rng.choice([0, 0, 1, 3, 20, vocab_size + 1])),
        target_id=int(rng.integers(-1, vocab_size)),
        shaping=random_shaping(rng, vocab_size) if rng.random() < 0.5 else None,
        logprob_ids=tuple(asked),
        entropy=rng.random() < 0.3,
        hidden_state=rng.random() < 0.3,
        draft=random_draft(rng, vocab_size) if sample is not None and rng.random() < 0.5 else None,
    )


def history_of(rng: np.random.Generator, spec: OutputSpec, vocab_size: int) -> Int32Array | None:
    """Return random tokens where the spec's penalties count some, at times none at all."""
    if spec.shaping is None or not spec.shaping.has_penalties:
        return None
    return np.asarray(rng.integers(0, vocab_size, rng.choice([0, 1, 30])), np.int32)


def assert_same(ours: RowOutput, expected: RowOutput) -> None:
    """Everything but log-probabilities and entropies is equal, those within 1e-5."""
    for field in fields(RowOutput):
        mine, theirs = getattr(ours, field.name), getattr(expected, field.name)
        if theirs is None or isinstance(theirs, (bool, int)):
            assert mine == theirs, field.name
            assert type(mine) is type(theirs), field.name
        elif isinstance(theirs, float):
            assert mine == pytest.approx(theirs, abs=1e-5, rel=1e-6), field.name
        else:
            assert mine.dtype == theirs.dtype, field.name
            is_exact = "logprobs" not in field.name
            np.testing.assert_allclose(mine, theirs, atol=0 if is_exact else 1e-5, rtol=0 if is_exact else 1e-6)


@pytest.mark.parametrize("is_exact", [False, True])
@settings(max_examples=150)
@given(seed=st.integers(0, 2**32), vocab_size=st.sampled_from(VOCAB_SIZES), num_rows=st.integers(1, 9))
def test_batched_rows_are_those_of_the_definition(is_exact: bool, seed: int, vocab_size: int, num_rows: int) -> None:
    """Any mix of rows: the same tokens, decisions and ids, log-probabilities within 1e-5, and nothing else."""
    rng = np.random.default_rng(seed)
    logits = random_logits(rng, num_rows, vocab_size)
    hidden = rng.standard_normal((num_rows, HIDDEN_SIZE)).astype(np.float32)
    specs = [random_spec(rng, vocab_size) for _ in range(num_rows)]
    histories = [history_of(rng, spec, vocab_size) for spec in specs]
    positions = rng.integers(0, 5000, num_rows).tolist()
    expected = select_rows(logits, positions, specs, histories, hidden)
    outputs = DeviceOutputs(CPU, is_exact=is_exact)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_outputs, "_SMALL_ELEMENTS", 0)
        ours = outputs.select(torch.from_numpy(logits), torch.from_numpy(hidden), positions, specs, histories)
    for mine, theirs in zip(ours, expected, strict=True):
        assert_same(mine, theirs)
        assert not is_exact or mine.sampled_logprob == theirs.sampled_logprob  # weight and sum have the same bits


@pytest.mark.parametrize("is_exact", [False, True])
def test_rows_of_extreme_logits_are_those_of_the_definition(is_exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits further apart than float32 reaches give finite values, entropies and draws too."""
    monkeypatch.setattr(device_outputs, "_SMALL_ELEMENTS", 0)
    logits = np.array([[3e38, -3e38, 3e38, 0.0], [-3e38, -3e38, -3e38, 3e38], [1e-40, 0.0, -1e-40, -3e38]], np.float32)
    spec = OutputSpec(sample=SampleSpec(temperature=1e-3), logprobs=True, entropy=True, target_id=1, num_top_logprobs=4)
    shaping = Shaping(repetition_penalty=1e-38, frequency_penalty=3e38)
    histories = [np.array([2, 2], np.int32)] * 3
    for specs in ([spec] * 3, [replace(spec, shaping=shaping)] * 3):
        ours = DeviceOutputs(CPU, is_exact=is_exact).select(
            torch.from_numpy(logits), torch.zeros(3, 1), [5, 6, 7], specs, histories
        )
        for mine, theirs in zip(ours, select_rows(logits, [5, 6, 7], specs, histories), strict=True):
            assert_same(mine, theirs)
            assert mine.entropy is not None
            assert np.isfinite(mine.entropy)


@pytest.mark.parametrize("top_p", [0.125, 0.25, 0.5, 0.75])
def test_top_p_that_is_reached_exactly_keeps_no_token_more(top_p: float) -> None:
    """Of eight equals a quarter is the two lowest ids, batched as in the definition."""
    logits = np.zeros((64, 8), np.float32)
    specs = [OutputSpec(sample=SampleSpec(top_p=top_p, seed=seed)) for seed in range(64)]
    rows = DeviceOutputs(CPU, is_exact=False).select(torch.from_numpy(logits), torch.zeros(64, 1), [0] * 64, specs)
    assert {row.token for row in rows} == set(range(int(8 * top_p)))
    assert [row.token for row in rows] == [row.token for row in select_rows(logits, [0] * 64, specs)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("vocab_size", [17, 1000, 151936])
def test_rows_on_an_accelerator_are_those_of_the_definition(vocab_size: int) -> None:
    """The same on a CUDA device, where nothing is left to numpy."""
    rng = np.random.default_rng(vocab_size)
    logits = random_logits(rng, 40, vocab_size)
    hidden = rng.standard_normal((40, HIDDEN_SIZE)).astype(np.float32)
    specs = [random_spec(rng, vocab_size) for _ in range(40)]
    histories = [history_of(rng, spec, vocab_size) for spec in specs]
    device = torch.device("cuda:0")
    rows, states = (torch.from_numpy(part).to(device) for part in (logits, hidden))
    ours = DeviceOutputs(device).select(rows, states, range(40), specs, histories)
    for mine, theirs in zip(ours, select_rows(logits, range(40), specs, histories, hidden), strict=True):
        assert_same(mine, theirs)


@pytest.mark.parametrize("is_exact", [False, True])
def test_full_rows_are_their_receivers_and_their_neighbours_have_none(is_exact: bool) -> None:
    """Logits and hidden states are copies of one row each, on the host, in float32; nobody else gets any."""
    logits, hidden = torch.randn(3, 20000), torch.randn(3, HIDDEN_SIZE, dtype=torch.bfloat16)
    specs = [OutputSpec(greedy=True), OutputSpec(full_logits=True, hidden_state=True), OutputSpec(greedy=True)]
    rows = DeviceOutputs(CPU, is_exact=is_exact).select(logits, hidden, [0, 1, 2], specs)
    copied = rows[1].logits
    assert copied is not None
    assert copied.base is None or copied.base.nbytes == copied.nbytes
    assert not np.shares_memory(copied, logits.numpy())
    assert np.array_equal(copied, logits[1].numpy())
    assert rows[1].hidden_state is not None
    assert rows[1].hidden_state.dtype == np.float32
    assert np.array_equal(rows[1].hidden_state, hidden[1].float().numpy())
    for row in (rows[0], rows[2]):
        assert (row.logits, row.hidden_state) == (None, None)
        assert row.token is not None


def test_masks_are_kept_on_the_device_as_long_as_somebody_refers_to_them() -> None:
    """Packed, one copy for equal masks; gone with the last reference."""
    distributions, logits = DeviceSampler(CPU), torch.zeros(1, 50)
    bits = np.packbits(np.arange(50) == 33, bitorder="little")
    one, equal = TokenMask(b"one", bits), TokenMask(b"one", bits)
    for mask in (one, equal):
        (choice,) = distributions.choose(
            logits, [ChoiceRow(1, OutputSpec(greedy=True, shaping=Shaping(mask=mask)), None)]
        )
        assert choice.token == 33
    assert [len(kept) for kept in distributions._masks.values()] == [7]
    del one, equal, mask
    gc.collect()
    assert len(distributions._masks) == 0


def test_token_of_no_weight_that_a_parallel_sum_points_at_is_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Should sums differ in their last bits, the definition decides, and no forbidden token comes out."""
    logits = torch.tensor([[0.0, 1.0, 2.0, 0.5]])
    bits = np.array([0b0101], np.uint8)
    spec = OutputSpec(sample=SampleSpec(seed=4), shaping=Shaping(mask=TokenMask(b"m", bits)), logprobs=True)
    row = ChoiceRow(3, spec, None)
    (expected,) = DeviceSampler(CPU).choose(logits, [row])
    monkeypatch.setattr(DeviceSampler, "_draw", lambda self, weights, rows: torch.tensor([1]))
    (choice,) = DeviceSampler(CPU).choose(logits, [row])
    assert choice.token == expected.token
    assert choice.logprob == pytest.approx(expected.logprob, abs=1e-12)


def test_rows_go_through_in_bounded_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Float64 copies never hold more rows than fit a group, and every row gets its own results."""
    monkeypatch.setattr(device_outputs, "_GROUP_ELEMENTS", 3 * 97)
    monkeypatch.setattr(device_outputs, "_SMALL_ELEMENTS", 0)
    seen: list[int] = []
    original = DeviceSampler.choose

    def choose(self: DeviceSampler, logits: torch.Tensor, rows: list[ChoiceRow]) -> list[Choice]:
        seen.append(len(logits))
        return original(self, logits, rows)

    monkeypatch.setattr(DeviceSampler, "choose", choose)
    logits = np.random.default_rng(0).standard_normal((10, 97)).astype(np.float32)
    specs = [OutputSpec(sample=SampleSpec(seed=i), logprobs=True, entropy=True) for i in range(10)]
    ours = DeviceOutputs(CPU, is_exact=False).select(
        torch.from_numpy(logits), torch.zeros(10, 1), list(range(10)), specs
    )
    assert seen == [3, 3, 3, 1]
    for mine, theirs in zip(ours, select_rows(logits, range(10), specs), strict=True):
        assert_same(mine, theirs)


@pytest.mark.parametrize("vocab_size", [1, 127, 128, 129, 5000])
@pytest.mark.parametrize("k", [1, 3, 50, 200])
def test_top_of_many_rows_are_those_of_a_full_sort(vocab_size: int, k: int) -> None:
    """Ids best first, ties to the lowest, signed zeros equal, whatever part of the vocabulary is asked for."""
    k = min(k, vocab_size)
    rng = np.random.default_rng(k)
    smooth = rng.standard_normal(vocab_size)
    logits = np.stack([smooth, np.round(smooth), -np.round(smooth) * 0, np.round(smooth * 3)]).astype(np.float32)
    ids, values = top(torch.from_numpy(logits), k)
    for row, row_ids, row_values in zip(logits, ids.numpy(), values.numpy(), strict=True):
        assert row_ids.tolist() == np.argsort(-row, kind="stable")[:k].tolist()
        assert np.array_equal(row_values, row[row_ids])


def test_best_ids_are_those_of_numpy() -> None:
    """Lowest id among equals; -1 for rows with NaN or infinity anywhere."""
    logits = np.random.default_rng(1).integers(-2, 3, (50, 300)).astype(np.float32)
    logits[3, 7], logits[4, 0], logits[5, 299] = np.nan, -np.inf, np.inf
    expected = ranking.best_ids(logits)
    assert expected[3:6] == [-1, -1, -1]
    assert device_outputs.best_ids(torch.from_numpy(logits)) == expected
