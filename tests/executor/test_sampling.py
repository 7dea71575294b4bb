"""Tokens and log-probabilities out of logits, against an independent slow reference and exact distributions."""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ferrule_server.executor.base import Float32Array, OutputSpec, RowOutput, SampleSpec, Shaping
from ferrule_server.executor.sampling import selection as sampling
from ferrule_server.executor.sampling.distributions import Distribution, sampling_distribution
from ferrule_server.executor.sampling.philox import Purpose, uniform
from ferrule_server.executor.sampling.ranking import ranked_largest
from ferrule_server.executor.sampling.selection import select_rows
from tests.executor.slow_distributions import as_row, mask_of, slow_distribution, slow_draw, slow_shape


def select_one(row: Float32Array, spec: OutputSpec, position: int = 0) -> RowOutput:
    """Return the output of a single row."""
    return select_rows(row[None, :], [position], [spec])[0]


def draw(row: Float32Array, spec: SampleSpec, u: float) -> int:
    """Return the token drawn with the random number ``u``."""
    return sampling_distribution(row, spec, float(row.max())).draw(u).token


def exact_probabilities(row: Float32Array, spec: SampleSpec) -> npt.NDArray[np.float64]:
    """Return float64 [vocab_size], the probability of each token under the distribution."""
    distribution = sampling_distribution(row, spec, float(row.max()))
    return distribution.probabilities()


def test_a_choice_of_the_best_needs_no_logits() -> None:
    """Executors that know it need not have the row; what is drawn from a row that is not there is an error."""
    assert sampling.choose(None, 1, OutputSpec(greedy=True), 7, None) == (7, 0.0, None)
    assert sampling.choose(None, 1, OutputSpec(), 7, None) is None
    for spec in (OutputSpec(sample=SampleSpec()), OutputSpec(greedy=True, shaping=Shaping(bias=((1, 1.0),)))):
        with pytest.raises(AssertionError, match="none were passed"):
            sampling.choose(None, 1, spec, 7, None)


LOGITS = st.lists(
    st.one_of(st.sampled_from([-2.0, 0.0, -0.0, 1.5]), st.floats(-30, 30, width=32)), min_size=1, max_size=40
)
SPECS = st.builds(
    SampleSpec,
    temperature=st.one_of(st.sampled_from([0.0, 0.25, 1.0]), st.floats(0.05, 20)),
    top_k=st.integers(0, 45),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 1)),
    min_p=st.one_of(st.just(0.0), st.floats(0, 1)),
    seed=st.integers(0, 2**64 - 1),
)


@settings(max_examples=300)
@given(values=LOGITS, spec=SPECS)
def test_distribution_is_that_of_the_slow_reference(values: list[float], spec: SampleSpec) -> None:
    """Any mix of temperature, top-k, top-p and min-p keeps the same tokens with the same probabilities."""
    row = as_row(values)
    expected = slow_distribution(row.tolist(), spec)
    probabilities = exact_probabilities(row, spec)
    for token_id in range(len(row)):
        assert probabilities[token_id] == pytest.approx(expected.get(token_id, 0.0), rel=1e-12, abs=1e-300)


@settings(max_examples=200)
@given(values=LOGITS, spec=SPECS, position=st.integers(0, 2**20))
def test_sampled_row_is_that_of_the_slow_reference(values: list[float], spec: SampleSpec, position: int) -> None:
    """The drawn token and both log-probabilities agree; the random number is that of the token's own index."""
    row = as_row(values)
    distribution = slow_distribution(row.tolist(), spec)
    u = uniform(spec.seed, position + 1, Purpose.SAMPLE)
    token = slow_draw(distribution, u)
    output = select_one(row, OutputSpec(sample=spec, logprobs=True), position)
    assert (output.position, output.token) == (position + 1, token)
    assert output.sampled_logprob == pytest.approx(math.log(distribution[token]), abs=1e-9)
    model_distribution = slow_distribution(row.tolist(), SampleSpec())
    assert output.model_logprob == pytest.approx(math.log(model_distribution[token]), abs=1e-9)


@pytest.mark.parametrize(
    "spec",
    [
        SampleSpec(),
        SampleSpec(temperature=0.7, top_k=3),
        SampleSpec(top_p=0.8),
        SampleSpec(temperature=1.7, top_p=0.9, min_p=0.2),
    ],
)
def test_draws_over_a_grid_of_numbers_count_out_the_distribution(spec: SampleSpec) -> None:
    """Each token owns exactly its probability of the unit interval: no Monte Carlo, a grid of 2000 cells."""
    row = as_row([0.3, -1.0, 2.0, 0.3, 1.1, -4.0, 2.0])
    counts = np.bincount([draw(row, spec, (i + 0.5) / 2000) for i in range(2000)], minlength=len(row))
    assert np.abs(counts / 2000 - exact_probabilities(row, spec)).max() <= 1 / 2000


def test_draw_takes_the_first_id_whose_cdf_exceeds_the_number() -> None:
    """At a border of the CDF itself the next token is drawn; the ends belong to the first and last token."""
    row = as_row([0.0, 0.0, 0.0, 0.0])
    numbers = [0.0, math.nextafter(0.25, 0), 0.25, 0.5, 0.75, 1 - 2.0**-33]
    assert [draw(row, SampleSpec(), u) for u in numbers] == [0, 0, 1, 2, 3, 3]


def test_tokens_of_zero_weight_are_never_drawn() -> None:
    """Weights that underflow to nothing own no part of the interval, at either end or in between."""
    row = as_row([-2000.0, 0.0, -2000.0, 0.0, -2000.0])
    assert {draw(row, SampleSpec(), u) for u in (0.0, 0.25, 0.5, 0.75, 1 - 2.0**-33)} == {1, 3}


@pytest.mark.parametrize("vocab_size", [1, 2, 17, 97])
def test_greedy_takes_the_lowest_id_among_equals(vocab_size: int) -> None:
    """Ties of the largest logit go to the lowest id, also as temperature 0 and at top-k 1."""
    row = np.zeros(vocab_size, np.float32)
    row[vocab_size // 2 :] = 1
    for spec in (
        OutputSpec(greedy=True),
        OutputSpec(sample=SampleSpec(temperature=0, top_k=5, top_p=0.5)),
        OutputSpec(sample=SampleSpec(top_k=1)),
    ):
        assert select_one(row, spec).token == vocab_size // 2


def test_greedy_row_reports_a_sampled_logprob_of_zero() -> None:
    """A greedy token is drawn from a distribution with a single token."""
    output = select_one(as_row([0, math.log(3)]), OutputSpec(greedy=True, logprobs=True))
    assert (output.token, output.sampled_logprob) == (1, 0.0)
    assert output.model_logprob == pytest.approx(math.log(0.75), abs=1e-7)


def kept(row: Float32Array, spec: SampleSpec) -> list[int]:
    """Return the ids of the distribution's tokens."""
    return np.flatnonzero(exact_probabilities(row, spec)).tolist()


def test_top_k_ties_at_the_border_keep_the_lowest_ids() -> None:
    """Equal logits at the border of top-k enter by ascending id, signed zeros being equal."""
    row = as_row([0.0, 5.0, -0.0, 0.0, 5.0, -1.0])
    assert [kept(row, SampleSpec(top_k=k)) for k in range(1, 6)] == [
        [1],
        [1, 4],
        [0, 1, 4],
        [0, 1, 2, 4],
        [0, 1, 2, 3, 4],
    ]


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    """Uniform over ten: p = 0.3 keeps three, the lowest ids; anything above keeps four; the least keeps one."""
    row = np.ones(10, np.float32)
    lengths = [len(kept(row, SampleSpec(top_p=p))) for p in (1e-12, 0.1, 0.3, 0.300001, 0.95, 1.0)]
    assert lengths == [1, 1, 3, 4, 10, 10]
    assert kept(row, SampleSpec(top_p=0.3)) == [0, 1, 2]


def test_top_p_keeps_everything_when_rounding_never_reaches_it() -> None:
    """The largest number below 1 must not fall off the end of the ranking."""
    row = np.random.default_rng(5).standard_normal(4097).astype(np.float32)
    assert len(kept(row, SampleSpec(top_p=math.nextafter(1.0, 0.0)))) > 4000


def test_top_p_ranks_a_flat_and_a_peaked_large_vocabulary_like_a_full_sort() -> None:
    """The short cut over candidates keeps exactly the set of a full stable sort."""
    rng = np.random.default_rng(6)
    for scale in (0.01, 1.0, 6.0):
        row = (scale * rng.standard_normal(30011)).astype(np.float32)
        weights = np.exp(row.astype(np.float64) - float(row.max()))
        order = np.argsort(-row, kind="stable")
        count = int(np.searchsorted(np.cumsum(weights[order]), 0.9 * weights.sum())) + 1
        assert kept(row, SampleSpec(top_p=0.9)) == sorted(order[:count].tolist())


def test_min_p_of_one_keeps_the_equals_of_the_largest() -> None:
    """Only tokens as likely as the likeliest stay."""
    assert kept(as_row([2, 1, 2, 0]), SampleSpec(min_p=1.0)) == [0, 2]
    assert kept(as_row([2, 1, 2, 0]), SampleSpec(min_p=0.3)) == [0, 1, 2]


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-6])
def test_tiny_temperatures_draw_the_largest_logit(temperature: float) -> None:
    """No overflow, no NaN: the distribution narrows to the largest logits."""
    row = as_row([-3e38, 1.0, 3e38, 3e38])
    assert exact_probabilities(row, SampleSpec(temperature=temperature)).tolist() == [0, 0, 0.5, 0.5]


def test_huge_temperatures_flatten_the_distribution() -> None:
    """At 1e300 the whole float32 range weighs the same."""
    row = as_row([-3e38, 1.0, 3e38, 0.0])
    assert exact_probabilities(row, SampleSpec(temperature=1e300)) == pytest.approx([0.25] * 4)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 5, 16])
def test_bad_row_is_marked_and_its_neighbours_are_served(bad: float, place: int) -> None:
    """A row with NaN or infinity returns nothing but its position; other rows are as ever."""
    logits = np.random.default_rng(1).standard_normal((3, 17)).astype(np.float32)
    specs = [OutputSpec(full_logits=True, greedy=True, logprobs=True, num_top_logprobs=3, target_id=2)] * 3
    good = select_rows(logits, [4, 5, 6], specs)
    logits[1, place] = bad
    rows = select_rows(logits, [4, 5, 6], specs)
    assert rows[1] == RowOutput(6, is_finite=False)
    for i in (0, 2):
        assert rows[i].is_finite
        assert (rows[i].token, rows[i].model_logprob) == (good[i].token, good[i].model_logprob)


def test_top_logprobs_are_ranked_with_ties_by_lowest_id() -> None:
    """Largest first, equal ones by id, float32, at most the vocabulary."""
    row = as_row([1.0, 3.0, 1.0, 3.0, 0.0])
    normaliser = math.log(sum(math.exp(x) for x in row.tolist()))
    output = select_one(row, OutputSpec(num_top_logprobs=3))
    assert output.top_ids is not None
    assert output.top_logprobs is not None
    assert output.top_ids.tolist() == [1, 3, 0]
    assert (output.top_ids.dtype.name, output.top_logprobs.dtype.name) == ("int32", "float32")
    assert output.top_logprobs == pytest.approx([3 - normaliser, 3 - normaliser, 1 - normaliser], abs=1e-6)
    everything = select_one(row, OutputSpec(num_top_logprobs=9)).top_ids
    assert everything is not None
    assert everything.tolist() == [1, 3, 0, 2, 4]


def test_target_logprob_is_that_of_the_raw_distribution() -> None:
    """Scoring a known token needs no choice; id 0 is a target, -1 is none."""
    row = as_row([0.0, math.log(3)])
    assert select_one(row, OutputSpec(target_id=0)).target_logprob == pytest.approx(math.log(0.25), abs=1e-7)
    assert select_one(row, OutputSpec(target_id=-1)) == RowOutput(1)


def test_logprobs_of_no_token_are_unset() -> None:
    """Log-probabilities belong to a chosen token; without one there are none."""
    assert select_one(as_row([1, 2]), OutputSpec(logprobs=True)) == RowOutput(1)


def test_logprobs_stay_exact_far_from_the_peak() -> None:
    """Neither overflow at large logits nor loss below: shifts change nothing."""
    row = as_row([1000.0, 0.0, -1000.0])
    for target_id, expected in enumerate([0.0, -1000.0, -2000.0]):
        assert select_one(row, OutputSpec(target_id=target_id)).target_logprob == pytest.approx(expected)


def test_full_logits_are_the_receivers_own_copy() -> None:
    """The row outlives the step's buffer; a row without it holds no logits."""
    logits = np.arange(34, dtype=np.float32).reshape(2, 17)
    first, second = select_rows(logits, [0, 1], [OutputSpec(full_logits=True), OutputSpec(greedy=True)])
    assert first.logits is not None
    assert not np.shares_memory(first.logits, logits)
    assert first.logits.tolist() == list(range(17))
    assert second.logits is None


def test_rows_of_one_batch_equal_rows_run_alone() -> None:
    """Bit for bit, for every kind of row, whatever shares the batch."""
    kinds = [
        OutputSpec(greedy=True, logprobs=True),
        OutputSpec(sample=SampleSpec(temperature=0.8, top_k=5, seed=3), logprobs=True),
        OutputSpec(sample=SampleSpec(top_p=0.7, seed=4), num_top_logprobs=4),
        OutputSpec(target_id=7),
    ]
    specs = [kinds[i % len(kinds)] for i in range(13)]
    logits = np.random.default_rng(2).standard_normal((13, 97)).astype(np.float32)
    alone = [select_one(logits[i], specs[i], i) for i in range(13)]
    for one, other in zip(alone, select_rows(logits, list(range(13)), specs), strict=True):
        assert repr(one) == repr(other)


def test_selection_changes_nothing_and_needs_no_rows() -> None:
    """The logits are read only; an empty step returns an empty list."""
    logits = np.random.default_rng(3).standard_normal((2, 17)).astype(np.float32)
    logits.flags.writeable = False
    select_rows(logits, [0, 1], [OutputSpec(sample=SampleSpec(top_k=3, top_p=0.5, min_p=0.1), logprobs=True)] * 2)
    assert select_rows(np.empty((0, 17), np.float32), [], []) == []


def test_seeds_and_positions_decide_the_draw() -> None:
    """The same seed and position draw the same token; neighbours draw afresh."""
    row = np.zeros(997, np.float32)

    def token(seed: int, position: int) -> int | None:
        return select_one(row, OutputSpec(sample=SampleSpec(seed=seed)), position).token

    assert token(1, 4) == token(1, 4) == int(997 * uniform(1, 5, Purpose.SAMPLE))
    assert all(a != b for a, b in pairwise(token(1, position) for position in range(20)))
    assert token(1, 4) != token(2, 4)


@pytest.mark.parametrize("u", [0.0, 0.001, 0.004, 0.007, 0.03, 0.1, 0.5, 0.9, 1 - 2.0**-33])
@pytest.mark.parametrize("share", [0.01, 1.0])
def test_draws_of_long_rows_are_those_of_one_long_sum(u: float, share: float) -> None:
    """Summing by runs finds the token that summing up finds, never one of no weight, at any length."""
    rng = np.random.default_rng(8)
    for length in (4096, 4097, 5000, 30011):
        weights = rng.random(length) * (rng.random(length) < share)
        weights[rng.integers(length)] = 1.0
        token, logprob, _ = Distribution(weights).draw(u)
        sums = np.cumsum(weights)
        assert token == int(sums.searchsorted(u * sums[-1], side="right"))
        assert logprob == pytest.approx(math.log(weights[token] / weights.sum()), abs=1e-12)


def test_draw_between_two_sums_of_one_run_takes_its_last_token() -> None:
    """Where the sum of a run and its summing up differ in the last bit, a number in between takes a token of weight."""
    rng = np.random.default_rng(11)
    weights = np.zeros(8192)
    for _ in range(200):
        weights[:128] = rng.random(128)
        weights[127], weights[5000] = 0.0, 1e-9
        token = Distribution(weights).draw(math.nextafter(1 - 1e-9 / weights.sum(), 0)).token
        assert weights[token] > 0


@pytest.mark.parametrize("k", [1, 2, 7, 20, 300])
def test_largest_of_long_rows_are_those_of_a_full_sort(k: int) -> None:
    """Whatever the ties and wherever they lie, with most of the row forbidden too."""
    rng = np.random.default_rng(k)
    smooth = rng.standard_normal(30011)
    for row in (smooth, np.round(smooth), np.round(smooth) * 0, np.where(rng.random(30011) < 0.999, -np.inf, smooth)):
        expected = np.argsort(-row, kind="stable")[:k]
        assert ranked_largest(row.astype(np.float64), k).tolist() == expected.tolist()
        assert ranked_largest(row, k).tolist() == expected.tolist()


SHAPINGS = st.builds(
    Shaping,
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.3]),
    frequency_penalty=st.sampled_from([0.0, -0.7, 0.4]),
    presence_penalty=st.sampled_from([0.0, 1.1, -0.2]),
    bias=st.dictionaries(st.integers(0, 6), st.floats(-9, 9), max_size=3).map(lambda bias: tuple(sorted(bias.items()))),
    mask=st.none() | st.sets(st.integers(0, 6), min_size=1).map(lambda ids: mask_of(sorted(ids), 7)),
)


@settings(max_examples=300)
@given(
    values=st.lists(st.floats(-30, 30, width=32), min_size=7, max_size=7),
    shaping=SHAPINGS,
    history=st.lists(st.integers(0, 6), max_size=12),
    spec=SPECS,
    position=st.integers(0, 1000),
)
def test_shaped_rows_are_those_of_the_slow_reference(
    values: list[float], shaping: Shaping, history: list[int], spec: SampleSpec, position: int
) -> None:
    """Penalties, then bias, then mask change the choice; every other value stays that of the raw row."""
    row, counted = as_row(values), np.array(history, np.int32)
    wanted = OutputSpec(sample=spec, logprobs=True, target_id=3, entropy=True, num_top_logprobs=2, full_logits=True)
    shaped = replace(wanted, shaping=shaping)
    (output,) = select_rows(row[None], [position], [shaped], [counted if shaping.has_penalties else None])
    (plain,) = select_rows(row[None], [position], [wanted])
    distribution = slow_distribution(slow_shape(row.tolist(), shaping, history), spec)
    token = (
        slow_draw(distribution, uniform(spec.seed, position + 1, Purpose.SAMPLE))
        if spec.temperature
        else min(distribution)
    )
    assert output.token == token
    assert output.sampled_logprob == pytest.approx(math.log(distribution[token]), abs=1e-9)
    assert output.model_logprob == pytest.approx(
        math.log(slow_distribution(row.tolist(), SampleSpec())[token]), abs=1e-9
    )
    assert (output.target_logprob, output.entropy) == (plain.target_logprob, plain.entropy)
    assert np.array_equal(np.asarray(output.top_ids), np.asarray(plain.top_ids))
    assert np.array_equal(np.asarray(output.logits), row)


def test_greedy_is_the_largest_shaped_logit() -> None:
    """As `greedy` and as temperature 0, lowest id among equals, with a log-probability of 0 under its distribution."""
    row = as_row([1.0, 5.0, 4.0, 5.0])
    shaping = Shaping(bias=((1, -9.0),), mask=mask_of([0, 2, 3], 4), frequency_penalty=0.5)
    for spec in (OutputSpec(greedy=True), OutputSpec(sample=SampleSpec(temperature=0))):
        asked = replace(spec, shaping=shaping, logprobs=True)
        (output,) = select_rows(row[None], [0], [asked], [np.array([3, 3], np.int32)])
        assert (output.token, output.sampled_logprob) == (2, 0.0)
        assert output.model_logprob == pytest.approx(4 - math.log(sum(math.exp(x) for x in row.tolist())), abs=1e-6)


def test_penalties_with_an_empty_history_change_nothing() -> None:
    """Before `penalty_start` no token counts."""
    row = as_row([1.0, 2.0])
    spec = OutputSpec(greedy=True, shaping=Shaping(presence_penalty=9.0))
    assert select_rows(row[None], [0], [spec], [np.array([], np.int32)])[0].token == 1
    assert select_rows(row[None], [0], [spec], [np.array([1], np.int32)])[0].token == 0


def test_entropy_is_that_of_the_raw_distribution_in_nats() -> None:
    """Uniform over eight: log 8; one token that takes all: 0, never below."""
    rows = np.stack([np.zeros(8), [0, -3e38, -2000, -800, -900, -1000, -3e38, -3e38]]).astype(np.float32)
    outputs = select_rows(rows, [0, 1], [OutputSpec(entropy=True)] * 2)
    assert outputs[0].entropy == pytest.approx(math.log(8), abs=1e-12)
    assert outputs[1].entropy == 0.0


def test_requested_logprobs_come_in_the_order_asked() -> None:
    """Any ids, repeated ones too, of the raw distribution; float32."""
    row = as_row([0.0, math.log(3), math.log(4)])
    output = select_one(row, OutputSpec(logprob_ids=(2, 0, 2)))
    assert output.requested_logprobs is not None
    assert output.requested_logprobs.dtype == np.float32
    assert output.requested_logprobs.tolist() == pytest.approx([math.log(0.5), math.log(0.125), math.log(0.5)])


def test_hidden_states_are_the_receivers_own_copy() -> None:
    """Rows that ask get theirs, a row that is not finite gets nothing."""
    logits = np.zeros((3, 4), np.float32)
    logits[2, 1] = np.nan
    hidden = np.arange(6, dtype=np.float32).reshape(3, 2)
    wanted = OutputSpec(hidden_state=True)
    rows = select_rows(logits, [0, 1, 2], [wanted, OutputSpec(greedy=True), wanted], hidden=hidden)
    assert rows[0].hidden_state is not None
    assert rows[0].hidden_state.tolist() == [0, 1]
    assert not np.shares_memory(rows[0].hidden_state, hidden)
    assert (rows[1].hidden_state, rows[2].hidden_state) == (None, None)
