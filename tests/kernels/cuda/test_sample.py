"""One token per row, in the simulator, against the distributions of the executor.

The kernels' weights are integers made in float32, the executor's are float64: where a draw, a top-p goal or a min-p
threshold lies within ``NEAR`` of a border the two may differ, and the test says nothing. The simulator computes wider
than float32; what float32 does to a weight is tested apart, by running the kernel's code in numpy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from types import CodeType, FunctionType, SimpleNamespace

import numpy as np
import pytest
from numpy.typing import NDArray

from ferrule_server.executor.base import SampleSpec, Shaping
from ferrule_server.executor.cuda.choice_inputs import pack_draw, pack_entries, pack_shaping
from ferrule_server.executor.sampling.distributions import Distribution, sampling_distribution
from ferrule_server.executor.sampling.philox import Purpose, philox4x32, uniform
from ferrule_server.executor.sampling.selection import shape_row
from ferrule_server.kernels.cuda.intrinsics import (
    Address,
    grid_launch_dependents,
    grid_wait,
    load_u32,
    load_u64,
    store_u32,
    store_u64,
    thread_id,
)
from ferrule_server.kernels.cuda.radix_select import ONE, weight_of
from ferrule_server.kernels.cuda.sample import (
    DRAW_SHARED_BYTES,
    RECORD,
    draw,
    passed_by,
    philox,
    shape_and_select,
)
from ferrule_server.kernels.cuda.specialise import Constant, Specialised
from tests.kernels.cuda.logit_cases import (
    SELECT_CONSTANTS,
    SLICE,
    THREADS,
    WARPS,
    Records,
    Rows,
    awkward_rows,
    num_slices,
    philox_seed,
    place_choices,
    select_launch,
)
from tests.kernels.cuda.mutation import check_mutants
from tests.kernels.cuda.replay import replay, without_wrapping
from tools.cuda_simulator import Launch, Memory, run

NEAR = 2e-6
ONES = 0xFFFFFFFF
DRAW_CONSTANTS: dict[str, Constant] = {"SLICE": SLICE, "WARPS": WARPS}
Specs = Sequence[SampleSpec | None]
OUTPUTS = ("borders", "tokens", "logprobs", "totals")
Mutants = tuple[Specialised | None, Specialised | None]


def records_of(specs: Specs, order: Sequence[int], positions: Sequence[int], vocab_size: int) -> Records:
    """Return how each row is drawn from."""
    records = np.frombuffer(b"".join(pack_draw(spec, vocab_size) for spec in specs), RECORD).copy()
    records["row"] = records["source"] = order
    records["position"] = positions
    return records


def place(
    rows: Rows, specs: Specs, order: Sequence[int], positions: Sequence[int], shaping: Shaping | None = None
) -> Memory:
    """Return memory with rows of logits and what is to be drawn from them; the last row may be shaped by a bias."""
    records, entries = records_of(specs, order, positions, rows.shape[1]), []
    if shaping is not None:
        entries = [pack_entries(np.empty(0, np.int32), shaping.bias)]
        pack_shaping(records[-1:], shaping, -1, (1, 1 + len(entries[0])))
        records["source"][-1] = len(rows) + len(order) - 1
    memory = place_choices(rows, records, entries=entries)
    memory.put("tokens", np.full(len(order), -7, np.int32), mutable=True)
    memory.put("logprobs", np.full(len(order), 7, np.float32), mutable=True)
    memory.put("totals", np.full(len(order), 7, np.uint64), mutable=True)
    return memory


def chain(
    memory: Memory,
    grid: int,
    mutants: Mutants = (None, None),
    *,
    constants: dict[str, Constant] = SELECT_CONSTANTS,
) -> list[Launch]:
    """Return the launches of a draw: one finds what each row keeps, the other draws."""
    names = ("logits", "records", "borders", "partials", "tickets", "tokens", "logprobs", "totals")
    vocab_size = memory.get("logits").shape[1]
    drawing = Launch(
        draw,
        DRAW_CONSTANTS,
        (*map(memory.address, names), len(memory.get("records")), vocab_size, num_slices(vocab_size)),
        grid=grid,
        num_threads=THREADS,
        shared_bytes=DRAW_SHARED_BYTES,
        specialised=mutants[1],
    )
    return [select_launch(memory, grid, mutants[0], constants=constants), drawing]


def is_certain(row: Rows, spec: SampleSpec, distribution: Distribution, u: float) -> bool:
    """Whether float32 cannot have chosen another token: no border of the distribution is near the number compared."""
    sums = np.cumsum(distribution.probabilities())
    if spec.temperature == 0:
        return True
    if np.abs(sums[:-1] - u).min(initial=1.0) < NEAR:
        return False
    before = sampling_distribution(row, replace(spec, top_p=1.0, min_p=0.0), float(row.max()))
    ranked_sums = np.cumsum(np.sort(before.probabilities())[::-1])
    distances = np.abs(ranked_sums - spec.top_p)
    if spec.top_p < 1 and ((distances > 1e-9) & (distances < NEAR)).any():
        return False
    relative = np.abs(before.weights / spec.min_p - 1) if spec.min_p > 0 else np.ones(1)
    return not ((relative > 0) & (relative < NEAR)).any()


def check(memory: Memory, rows: Rows, specs: Specs, order: Sequence[int], positions: Sequence[int]) -> int:
    """Assert that every certain token is that of the executor; return how many were not certain."""
    tokens, logprobs, totals = memory.get("tokens"), memory.get("logprobs"), memory.get("totals")
    num_uncertain = 0
    for slot, (index, asked) in enumerate(zip(order, specs, strict=True)):
        if index < 0:
            assert tokens[slot] == -7
            continue
        row = rows[index]
        if not np.isfinite(row.max()) or np.isnan(row).any():
            assert (tokens[slot], totals[slot]) == (-1, 0)
            assert np.isnan(logprobs[slot])
            continue
        spec = asked or SampleSpec(temperature=0)
        distribution = sampling_distribution(row, spec, float(row.max()))
        u = uniform(spec.seed, positions[slot], Purpose.SAMPLE)
        if not is_certain(row, spec, distribution, u):
            num_uncertain += 1
            continue
        token, logprob, _ = distribution.draw(u)
        assert tokens[slot] == token, (index, spec)
        assert logprobs[slot] == pytest.approx(logprob, abs=1e-5, rel=1e-5)
        assert float(totals[slot]) == pytest.approx(distribution.weights.sum() * 2.0**39, rel=2e-6)
    assert not memory.get("tickets").any()
    return num_uncertain


AWKWARD: Specs = (
    SampleSpec(),
    None,
    SampleSpec(temperature=0.7, top_k=1),
    SampleSpec(temperature=1.3, top_k=5, top_p=0.8),
    SampleSpec(top_p=0.5),
    SampleSpec(top_p=1e-9),
    SampleSpec(temperature=2.0, min_p=1.0),
    SampleSpec(top_k=10_000, min_p=0.05),
    SampleSpec(temperature=1e-3, top_k=20, top_p=0.95, min_p=0.01),
    SampleSpec(temperature=50.0, top_k=33, top_p=0.999, min_p=0.3),
    SampleSpec(temperature=0.0, top_k=3, top_p=0.1),
    SampleSpec(temperature=1e-200, top_p=0.9),
)


@pytest.mark.parametrize("vocab_size", [97, pytest.param(300, marks=pytest.mark.slow), 517])
def test_tokens_are_those_of_the_distribution_on_any_grid_again_and_again(vocab_size: int) -> None:
    """All filters on rows with ties, masks, both zeros; three runs on one state, scratch left as it was."""
    rows = awkward_rows(vocab_size, seed=vocab_size)
    rng = np.random.default_rng(vocab_size)
    order = [*rng.permutation(np.arange(len(AWKWARD)) % len(rows)), -1]
    specs = [replace(spec, seed=philox_seed(i)) if spec else None for i, spec in enumerate(AWKWARD)] + [None]
    positions = rng.integers(0, 1 << 31, len(order)).tolist()
    memory = place(rows, specs, order, positions)
    results = []
    for seed, grid in enumerate((2, 1, 5)):
        replay(memory, chain(memory, grid), outputs=OUTPUTS, counters=("tickets",), seed=seed)
        results.append([memory.get(name).tobytes() for name in OUTPUTS])
        assert check(memory, rows, specs, order, positions) <= 2
    assert results[0] == results[1] == results[2]


def test_rows_without_a_distribution_give_no_token_and_leave_no_trace() -> None:
    """NaN of both signs, infinity, nothing allowed; their neighbour is drawn as ever."""
    rows = np.zeros((5, 300), np.float32)
    rows[0, 7] = np.inf
    rows[1, 299] = np.nan
    rows[2, 0] = -np.float32(np.nan)
    rows[3] = -np.inf
    specs = [SampleSpec(top_k=4, top_p=0.5)] * 5
    memory = place(rows, specs, range(5), [3] * 5)
    for seed in range(3):
        replay(memory, chain(memory, 3), outputs=OUTPUTS, counters=("tickets",), seed=seed)
        check(memory, rows, specs, range(5), [3] * 5)
    assert memory.get("tokens")[:4].tolist() == [-1] * 4


@pytest.mark.parametrize("index", [0, 1])
def test_a_ticket_that_does_not_wrap_is_found(index: int) -> None:
    """In the select and in the draw."""
    rows = awkward_rows(300, seed=1)
    memory = place(rows, [SampleSpec(top_k=9, top_p=0.9)] * 2, [0, 1], [3, 4])
    launch = chain(memory, 2)[index]
    mutant = without_wrapping(launch.kernel, launch.constants)
    launches = chain(memory, 2, (None, mutant) if index else (mutant, None))
    with pytest.raises(AssertionError, match="tickets must be 0 for the next run"):
        replay(memory, launches[: index + 1], outputs=OUTPUTS, counters=("tickets",))


@pytest.mark.parametrize(
    ("top_p", "num_kept"), [(0.1, 1), (0.3, 3), (0.5, 5), (0.7, 7), (0.05, 1), (0.95, 10), (1e-300, 1)]
)
def test_shares_of_equal_tokens_keep_the_lowest_ids(top_p: float, num_kept: int) -> None:
    """Ten tokens of the same weight: p of 0.3 keeps three, as in float64, though no float is 0.3."""
    rows = np.full((1, 300), -np.inf, np.float32)
    rows[0, 7:257:25] = 2.5
    spec = SampleSpec(top_p=top_p)
    assert np.count_nonzero(sampling_distribution(rows[0], spec, 2.5).weights) == num_kept
    memory = place(rows, [spec], [0], [0])
    run(memory, chain(memory, 2))
    assert memory.get("totals")[0] == num_kept << 39
    assert memory.get("tokens")[0] <= 7 + 25 * (num_kept - 1)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 40))])
def test_tokens_are_those_of_the_distribution_for_random_settings(seed: int) -> None:
    """Random logits of few values, random filters, at every temperature."""
    rng = np.random.default_rng(seed)
    num_rows = 12
    rows = (np.round(rng.normal(0, 2, (num_rows, 300)) * 4) / 4).astype(np.float32)
    rows[rng.random(rows.shape) < 0.2] = -np.inf
    rows[:, 11] = 1.0
    drawn = [
        SampleSpec(
            temperature=float(rng.choice([0.1, 0.6, 1.0, 1.7])),
            top_k=int(rng.choice([0, 1, 2, 7, 50, 299, 300])),
            top_p=float(rng.choice([1.0, 0.99, 0.9, 0.6, 0.2])),
            min_p=float(rng.choice([0.0, 0.02, 0.2, 0.9])),
            seed=philox_seed(int(rng.integers(1 << 30))),
        )
        for _ in range(num_rows)
    ]
    positions = rng.integers(0, 4096, num_rows).tolist()
    memory = place(rows, drawn, range(num_rows), positions)
    run(memory, chain(memory, 3), seed=seed)
    assert check(memory, rows, drawn, range(num_rows), positions) <= 1


def test_tokens_with_the_digits_that_are_shipped() -> None:
    """11 bits to a digit, 4096 tokens in the list."""
    rows = awkward_rows(300, seed=4)[:2]
    specs = [SampleSpec(top_k=40, top_p=0.9, seed=5), SampleSpec(top_p=0.7, min_p=0.1, seed=6)]
    memory = place(rows, specs, [0, 1], [8, 9])
    run(memory, chain(memory, 2, constants={**SELECT_CONSTANTS, "BITS": 11, "ROOM": 4096}), seed=5)
    assert check(memory, rows, specs, [0, 1], [8, 9]) == 0


@pytest.mark.parametrize("room", [1, 300])
def test_what_a_row_keeps_does_not_depend_on_the_room_of_the_list(room: int) -> None:
    """With room for one token digits are found over the whole row, with room for all never."""
    rows = awkward_rows(300, seed=6)
    specs = [SampleSpec(top_k=40, top_p=0.8, seed=seed) for seed in range(8)]
    memory = place(rows, specs, range(8), range(8))
    found = []
    for constants in (SELECT_CONSTANTS, {**SELECT_CONSTANTS, "ROOM": room}):
        run(memory, chain(memory, 3, constants=constants), seed=1)
        assert check(memory, rows, specs, range(8), range(8)) <= 1
        found.append(memory.get("borders")[:, :12].tobytes())
    assert found[0] == found[1]


def test_a_goal_that_is_reached_exactly_is_reached() -> None:
    """Weights of exactly 1, 1/2, 1/4, 1/8, 1/8 of the largest: a share of 1/2 keeps one token, of 7/8 three."""
    rows = np.full((1, 97), -np.inf, np.float32)
    rows[0, [90, 3, 40, 41, 2]] = (0, -1, -2, -3, -3)
    shares = {0.5: 8, 0.5 + 1e-9: 12, 0.75: 12, 0.875: 14, 0.9375: 15, 0.99: 16}
    specs = [SampleSpec(temperature=math.log2(math.e), top_p=share) for share in shares]
    memory = place(rows, specs, [0] * len(shares), range(len(shares)))
    run(memory, chain(memory, 2))
    assert (memory.get("totals") / 2**36).tolist() == list(shares.values())


def test_ties_that_are_dropped_do_not_displace_what_follows_them() -> None:
    """Of two equal tokens before a better one, all in one thread's piece, top-k keeps the first."""
    rows = np.full((1, 97), -np.inf, np.float32)
    rows[0, 4:8] = (1.0, 1.0, 1.5, 1.0)
    specs = [SampleSpec(top_k=2, seed=seed) for seed in range(12)]
    memory = place(rows, specs, [0] * 12, [5] * 12)
    run(memory, chain(memory, 2))
    assert check(memory, rows, specs, [0] * 12, [5] * 12) == 0
    assert set(memory.get("tokens").tolist()) == {4, 6}


def passed(numbers: Address, out: Address) -> None:
    """Store how much weight a draw passes: x0 and total in, one thread each."""
    grid_launch_dependents()
    grid_wait()
    pair = numbers + thread_id() * 16
    weight = passed_by(load_u32(pair), load_u64(pair + 8))
    store_u64(out + thread_id() * 8, weight)


def test_what_a_draw_passes_is_exact() -> None:
    """(x0 + 1/2) total / 2^32, rounded down, for any total below 2^59."""
    rng = np.random.default_rng(1)
    numbers = np.stack([rng.integers(0, 1 << 32, 32), rng.integers(1 << 39, 1 << 59, 32)], 1).astype(np.uint64)
    numbers[:6] = [(x0, total) for x0 in (0, 1 << 31, ONES) for total in (1 << 39, (1 << 59) - 1)]
    memory = Memory()
    pairs = memory.put("numbers", numbers, mutable=True)
    out = memory.put("out", np.zeros(32, np.uint64), mutable=True)
    run(memory, [Launch(passed, {}, (pairs, out), grid=1, num_threads=32, shared_bytes=0)])
    expected = [(2 * x0 + 1) * total >> 33 for x0, total in numbers.tolist()]
    assert memory.get("out").tolist() == expected


def first_word(record: Address, out: Address) -> None:
    """Store the first word of Philox."""
    grid_launch_dependents()
    grid_wait()
    word = philox(record)
    if thread_id() == 0:
        store_u32(out, word)


@pytest.mark.parametrize(
    ("position", "purpose", "seed"),
    [(0, 0, 0), (ONES, 3, 2**64 - 1), (12345, 2, 0x299F31D0A4093822), (1 << 31, 1, 1 << 63), (7, 0, ONES)],
)
def test_philox_gives_the_words_of_the_executor(position: int, purpose: int, seed: int) -> None:
    """The first of them is a known answer of Random123; the executor's own function is checked against all three."""
    memory, packed = Memory(), records_of([SampleSpec(seed=seed)], [0], [position], 300)
    packed["purpose"] = Purpose(purpose)
    record = memory.put("record", packed, mutable=True)
    out = memory.put("out", np.zeros(1, np.uint32), mutable=True)
    run(memory, [Launch(first_word, {}, (record, out), grid=1, num_threads=32, shared_bytes=0)])
    expected = philox4x32((position, purpose, 0, 0), (seed & ONES, seed >> 32))[0]
    assert memory.get("out")[0] == expected
    assert position or expected == 0x6627E8D5


def weights_in_float32(logits: Rows, peak: np.float32, scale: np.float32, ulps: int) -> NDArray[np.float64]:
    """Return what the code of ``weight_of`` gives where every instruction rounds, as on a GPU and unlike the simulator.

    Its exponential lies up to ``ulps`` units in the last place above the true one, or below if they are negative.
    """

    def fma(a: Rows, b: Rows, c: Rows) -> Rows:
        return (a.astype(np.float64) * b + c).astype(np.float32)

    def exp2(values: Rows) -> Rows:
        exact = np.exp2(values.astype(np.float64))
        unit = np.spacing(exact.astype(np.float32)).astype(np.float64)
        return ((np.floor if ulps > 0 else np.ceil)(exact / unit + ulps) * unit).astype(np.float32)

    def bits_float(bits: NDArray[np.uint32]) -> Rows:
        return bits.view(np.float32)

    def round_u64(values: Rows) -> NDArray[np.float64]:
        return np.rint(values.astype(np.float64))

    ptx = SimpleNamespace(fma=fma, exp2=exp2, bits_float=bits_float, round_u64=round_u64)
    code: CodeType = weight_of.__code__
    weights: NDArray[np.float64] = FunctionType(code, {"ptx": ptx, "ONE": ONE})(logits.view(np.uint32), peak, scale)
    return weights


@pytest.mark.parametrize("temperature", [0.2, 1.0, 3.0])
@pytest.mark.parametrize("ulps", [-2, 2])
def test_weights_in_float32_err_by_no_more_than_the_tests_allow(temperature: float, ulps: int) -> None:
    """The kernel's own code in float32, its exponential off by 2 ulp: within 1.3e-7 |e| + 2.5e-7, and half a unit.

    Their sum then moves by less than half of NEAR.
    That the GPU's ``ex2.approx`` is off by no more than 2 ulp is NVIDIA's word, not proved here.
    """
    rng = np.random.default_rng(1)
    peak = np.float32(17.3)
    logits = (peak - rng.exponential(4 * temperature, 20000)).astype(np.float32)
    scale = np.float32(math.log2(math.e) / temperature)
    exponent = (logits.astype(np.float64) - float(peak)) * math.log2(math.e) / temperature
    exact = np.exp2(exponent) * ONE
    weights = weights_in_float32(logits, peak, scale, ulps)
    assert (np.abs(weights - exact) <= (1.3e-7 * np.abs(exponent) + 2.5e-7) * exact + 0.5).all()
    assert 1e-8 < abs(weights.sum() / exact.sum() - 1) < NEAR / 2


def test_the_draw_needs_all_of_its_synchronisation() -> None:
    """Any barrier, fence or wait less is found out."""
    rows = awkward_rows(600, seed=3)
    order, positions = [0, 4, 1], [1, 2, 3]
    specs = [SampleSpec(top_k=50, top_p=0.9, seed=1), SampleSpec(top_p=0.5, seed=2), SampleSpec(top_p=0.8, seed=3)]

    def simulate(mutant: Specialised) -> None:
        memory = place(rows, specs, order, positions)
        run(memory, chain(memory, 2, (None, mutant)), seed=1)
        assert check(memory, rows, specs, order, positions) == 0

    check_mutants(draw, DRAW_CONSTANTS, simulate)


def test_the_select_needs_all_of_its_synchronisation() -> None:
    """Rows that are listed and not, shaped and not, of top-k and top-p, the same CTAs finishing them one by one."""
    rows = awkward_rows(600, seed=3)
    order, positions = [0, 4, 1, 2, 0], [1, 2, 3, 4, 5]
    specs = [SampleSpec(top_k=9, top_p=0.9, seed=1), SampleSpec(top_p=0.5, seed=2), None, SampleSpec(seed=3)]
    specs.append(SampleSpec(top_k=20, seed=4))
    biased = Shaping(bias=tuple((token, 1.0) for token in range(250, 262)))

    def simulate(mutant: Specialised) -> None:
        memory = place(rows, specs, order, positions, biased)
        run(memory, chain(memory, 2, (mutant, None)), seed=1)
        shaped = shape_row(rows[0], biased, None).astype(np.float32)
        assert check(memory, np.stack([*rows, shaped]), specs, [*order[:-1], len(rows)], positions) == 0

    check_mutants(shape_and_select, SELECT_CONSTANTS, simulate)
