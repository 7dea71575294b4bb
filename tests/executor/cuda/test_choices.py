"""What output rows return through the kernels, in the simulator, against the definition in numpy."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Sequence

import numpy as np
import pytest

from ferrule_server.executor.base import (
    DraftDistribution,
    DraftSpec,
    Int32Array,
    OutputSpec,
    SampleSpec,
    Shaping,
    TokenMask,
)
from ferrule_server.executor.cuda.buffers import DecodeBuffers, Limits
from ferrule_server.executor.cuda.choice_launches import ChoiceSpecs, choice_operations
from ferrule_server.executor.cuda.choices import (
    KNOWN_FIELDS,
    Division,
    OutputKind,
    divide,
)
from ferrule_server.executor.cuda.kernel_set import KernelSet
from ferrule_server.kernels.cuda.catalog import kernels_of
from ferrule_server.kernels.cuda.log_sum_exp import log_sum_exp
from ferrule_server.kernels.cuda.sample import draw, shape_and_select
from ferrule_server.kernels.cuda.spec import MODEL_SHAPES
from ferrule_server.kernels.cuda.top_k import gather_top_k
from tests.executor.cuda.choice_bench import (
    LARGEST_K,
    LIMITS,
    MAX_ROWS,
    SHAPE,
    SMALL,
    VOCAB,
    Bench,
    assert_same,
    expected_rows,
    make_batch,
    make_mask,
    random_logits,
)
from tests.executor.cuda.fake_gpu import CUBIN, FakeGpu, FakeLaunch

MASKS = [make_mask(seed) for seed in range(4)]
PENALTIES = Shaping(repetition_penalty=1.4, frequency_penalty=0.3, presence_penalty=-0.2)
CHOICES = (
    OutputSpec(greedy=True),
    OutputSpec(sample=SampleSpec(temperature=0.0, top_k=3, seed=1)),
    OutputSpec(sample=SampleSpec(temperature=0.8, seed=2)),
    OutputSpec(sample=SampleSpec(temperature=1.5, top_k=12, top_p=0.7, seed=2**64 - 3)),
    OutputSpec(sample=SampleSpec(top_p=0.9, min_p=0.02, seed=4)),
    OutputSpec(),
    OutputSpec(greedy=True, shaping=PENALTIES),
    OutputSpec(greedy=True, shaping=Shaping(mask=MASKS[0])),
    OutputSpec(sample=SampleSpec(temperature=2.0, seed=5), shaping=Shaping(bias=((3, 9.0), (299, 8.5)), mask=MASKS[1])),
    OutputSpec(sample=SampleSpec(top_k=1000, top_p=0.5, seed=6), shaping=Shaping(0.7, bias=((0, -100.0), (7, 4.0)))),
    OutputSpec(sample=SampleSpec(temperature=0.0), draft=DraftSpec(3)),
    OutputSpec(greedy=True, shaping=Shaping(bias=((5, -9.0), (298, 90.0)))),
    OutputSpec(greedy=True, shaping=Shaping()),
)


def histories_of(specs: Sequence[OutputSpec]) -> list[Int32Array | None]:
    """Return a history for each row whose shaping has penalties, tokens that occur twice among them."""
    rng = np.random.default_rng(9)
    return [
        rng.integers(0, 40, 30, dtype=np.int32) if spec.shaping and spec.shaping.has_penalties else None
        for spec in specs
    ]


def test_tokens_are_those_of_the_definition() -> None:
    """Greedy, drawn, penalised, biased, masked, drafted and silent rows in one step, padded; rows without output."""
    bench = Bench()
    logits = random_logits(15, seed=1)
    output_rows = [0, 1, 2, 3, 4, 5, 6, 8, 9, 10, 12, 13, 14]
    forbidden = int(np.unpackbits(MASKS[0].bits, count=VOCAB, bitorder="little").argmin())
    logits[4, 200] = logits[8, forbidden] = np.nan
    batch = make_batch(CHOICES, histories_of(CHOICES), output_rows, num_rows=15)

    found = bench.run(logits, batch, 16)

    assert bench.kind is OutputKind.SAMPLE
    assert_same(found, expected_rows(logits, batch))
    assert [i for i, row in enumerate(found) if not row.is_finite] == [4, 7]
    assert bench.buffers.result["tokens"][:4].tolist() == [row.token for row in found[:4]]


def test_a_mask_alone_is_enough() -> None:
    """No entries: the records of the shaping reach the GPU all the same."""
    bench = Bench()
    logits = random_logits(2, seed=6)
    batch = make_batch([OutputSpec(greedy=True, shaping=Shaping(mask=mask)) for mask in MASKS[2:]])

    assert_same(bench.run(logits, batch, 2), expected_rows(logits, batch))


SCORES = (
    OutputSpec(greedy=True, logprobs=True),
    OutputSpec(sample=SampleSpec(temperature=0.0), logprobs=True, target_id=299),
    OutputSpec(
        sample=SampleSpec(temperature=1.5, top_k=4, seed=8), logprobs=True, logprob_ids=(5, 299, 5), entropy=True
    ),
    OutputSpec(target_id=0),
    OutputSpec(logprobs=True, logprob_ids=(7,)),
    OutputSpec(entropy=True),
    OutputSpec(greedy=True, logprobs=True, target_id=17, shaping=Shaping(bias=((17, 50.0),), mask=MASKS[2])),
    OutputSpec(greedy=True),
)


def test_scores_are_those_of_the_definition_and_again_on_the_same_buffers() -> None:
    """Two steps, the second of fewer rows: nothing of the first is left; rows that are not finite say nothing else."""
    bench = Bench()
    logits = random_logits(8, seed=2)
    logits[0, 3], logits[5, 299] = -np.inf, np.inf
    for specs, num_rows in ((SCORES, 8), (SCORES[2:5], 4)):
        batch = make_batch(specs, (), range(num_rows - len(specs), num_rows), num_rows)
        found = bench.run(logits[:num_rows], batch, num_rows)
        assert bench.kind is OutputKind.SCORE
        assert_same(found, expected_rows(logits, batch))
        assert all(not counter.any() for counter in bench.counters())


def test_top_log_probabilities_are_those_of_the_definition() -> None:
    """Ties at the border go to the lowest ids; rows that do not ask lie between; one row is not finite."""
    bench = Bench()
    specs = (
        OutputSpec(num_top_logprobs=5),
        OutputSpec(greedy=True, num_top_logprobs=LARGEST_K, logprobs=True, entropy=True),
        OutputSpec(sample=SampleSpec(seed=3), logprobs=True),
        OutputSpec(num_top_logprobs=3),
        OutputSpec(num_top_logprobs=1, logprob_ids=(9, 8), shaping=Shaping(mask=MASKS[0]), greedy=True),
    )
    logits = random_logits(5, seed=3)
    logits[3, 0] = np.nan
    batch = make_batch(specs)

    found = bench.run(logits, batch, 8)

    assert bench.kind is OutputKind.TOP
    assert_same(found, expected_rows(logits, batch))
    assert all(not counter.any() for counter in bench.counters())


def random_spec(rng: np.random.Generator) -> OutputSpec:
    """Return what a row may ask the kernels for, any mix of it."""
    draw = SampleSpec(
        temperature=float(rng.choice([0.0, 0.5, 1.0, 3.0])),
        top_k=int(rng.choice([0, 1, 20, 1000])),
        top_p=float(rng.choice([1.0, 0.3, 0.95])),
        min_p=float(rng.choice([0.0, 0.1])),
        seed=int(rng.integers(2**63)),
    )
    shaping = Shaping(
        repetition_penalty=float(rng.choice([1.0, 1.3])),
        frequency_penalty=float(rng.choice([0.0, 0.37])),
        presence_penalty=float(rng.choice([0.0, -0.21])),
        bias=tuple((int(i), float(rng.normal())) for i in np.sort(rng.choice(VOCAB, 3, replace=False))),
        mask=None if rng.random() < 0.5 else MASKS[rng.integers(3)],
    )
    token = rng.integers(3)
    return OutputSpec(
        greedy=token == 0,
        sample=draw if token == 1 else None,
        shaping=shaping if rng.random() < 0.5 else None,
        logprobs=rng.random() < 0.5,
        num_top_logprobs=int(rng.choice([0, 0, 1, 20, LARGEST_K])),
        target_id=int(rng.choice([-1, 0, 299])),
        logprob_ids=tuple(rng.integers(0, VOCAB, rng.integers(3)).tolist()),
        entropy=rng.random() < 0.3,
    )


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 60))])
def test_random_steps_are_those_of_the_definition(seed: int) -> None:
    """Three steps after each other, any mix of specs and of rows with output; counters are zero in between."""
    rng = np.random.default_rng(seed)
    bench = Bench()
    for _ in range(3):
        num_rows = int(rng.integers(1, 9))
        rows = np.flatnonzero(rng.random(num_rows) < 0.8)
        specs = [random_spec(rng) for _ in rows]
        logits = rng.normal(0, 3, (num_rows, VOCAB)).astype(np.float32)
        logits[rng.random(num_rows) < 0.1, rng.integers(VOCAB)] = rng.choice([np.nan, np.inf, -np.inf])
        batch = make_batch(specs, histories_of(specs), rows.tolist(), num_rows)

        found = bench.run(logits, batch, min(2 ** int(rng.integers(4)) * num_rows, MAX_ROWS))

        assert_same(found, expected_rows(logits, batch))
        assert all(not counter.any() for counter in bench.counters())


def test_the_kernels_of_a_model_find_room_in_its_buffers() -> None:
    """With their own slices and digits: top-k, top-p and the largest, more of them than there are tokens."""
    bench = Bench(ChoiceSpecs.of(SHAPE), Limits(max_blocks=4, max_rows=2))
    logits = random_logits(2, seed=7)
    draw_spec = SampleSpec(top_k=20, top_p=0.9, seed=1)
    batch = make_batch(
        [
            OutputSpec(sample=draw_spec, logprobs=True, shaping=Shaping(mask=MASKS[3])),
            OutputSpec(num_top_logprobs=1000),
        ]
    )

    assert_same(bench.run(logits, batch, 2), expected_rows(logits, batch))


def test_greedy_rows_need_no_launch_and_no_upload() -> None:
    """The best token of each row is there already; a draft at temperature 0 is accepted where it is that one."""
    bench = Bench()
    logits = random_logits(5, seed=4)
    logits[1, 7] = np.inf
    best = int(logits[3].argmax())
    greedy = OutputSpec(sample=SampleSpec(temperature=0.0))
    distributions = [DraftDistribution(b"", None, np.full(VOCAB, 1 / VOCAB)), None]
    drafts = [
        OutputSpec(sample=SampleSpec(temperature=0.0), draft=DraftSpec(token, distribution))
        for token, distribution in zip((best, (int(logits[4].argmax()) + 1) % VOCAB), distributions, strict=True)
    ]
    batch = make_batch([greedy, OutputSpec(), *drafts], output_rows=[0, 1, 3, 4], num_rows=5)

    found = bench.run(logits, batch, 8)

    assert bench.kind is OutputKind.GREEDY
    assert_same(found, expected_rows(logits, batch))
    assert [row.is_accepted for row in found] == [None, None, True, False]
    assert [call.kernels for call in bench.gpu.calls("launch")] == [()]
    assert not bench.gpu.calls("upload")


def test_a_launch_is_one_wave_and_no_more_than_finds_work() -> None:
    """A fixed grid for each bucket: two slices a row, one CTA to collect the largest, what the multiprocessors hold."""
    gpu = FakeGpu(num_sms=3)
    buffers = DecodeBuffers(gpu.allocate, SHAPE, LIMITS, 2)
    kernels = KernelSet(gpu, dict.fromkeys(SMALL, CUBIN))

    for bucket, kind, grids in (
        (1, OutputKind.TOP, {1, 2, 3}),
        (4, OutputKind.SAMPLE, {3}),
        (4, OutputKind.GREEDY, set()),
    ):
        operations = choice_operations(kernels, buffers, bucket, kind, SMALL)
        assert {launch.grid for launch in operations if isinstance(launch, FakeLaunch)} == grids
        assert all(isinstance(launch, FakeLaunch) for launch in operations)


@pytest.mark.parametrize("name", MODEL_SHAPES)
def test_every_kernel_is_one_that_is_built_for_the_model(name: str) -> None:
    """The runner asks for nothing else."""
    shape = MODEL_SHAPES[name]
    specs = ChoiceSpecs.of(shape)

    assert set(specs) <= set(kernels_of(shape))
    assert [spec.kernel for spec in specs] == [shape_and_select, draw, log_sum_exp, gather_top_k]
    assert dict(specs.gather.constants)["K"] == Limits(max_blocks=1).largest_k


DRAWN = SampleSpec()


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        (OutputSpec(), OutputKind.GREEDY),
        (OutputSpec(shaping=PENALTIES), OutputKind.GREEDY),
        (OutputSpec(greedy=True, shaping=Shaping()), OutputKind.GREEDY),
        (OutputSpec(greedy=True, shaping=PENALTIES), OutputKind.SAMPLE),
        (OutputSpec(sample=DRAWN), OutputKind.SAMPLE),
        (OutputSpec(sample=DRAWN, entropy=True), OutputKind.SCORE),
        (OutputSpec(target_id=0), OutputKind.SCORE),
        (OutputSpec(num_top_logprobs=LARGEST_K), OutputKind.TOP),
        (OutputSpec(num_top_logprobs=LARGEST_K + 1), OutputKind.TORCH),
        (OutputSpec(full_logits=True), OutputKind.GREEDY),
        (OutputSpec(sample=DRAWN, hidden_state=True), OutputKind.SAMPLE),
        (OutputSpec(sample=DRAWN, draft=DraftSpec(1)), OutputKind.TORCH),
        (OutputSpec(sample=SampleSpec(temperature=0.0), draft=DraftSpec(1)), OutputKind.GREEDY),
    ],
)
def test_the_kind_of_a_step_is_the_largest_of_its_rows(spec: OutputSpec, kind: OutputKind) -> None:
    """Alone, and among rows that ask for less; a row that takes torch does not move its neighbours."""
    history = np.zeros(3, np.int32)
    keeps_rows = spec.full_logits or spec.hidden_state
    for specs in ([spec], [OutputSpec(greedy=True), spec, OutputSpec()]):
        division = divide(specs, [history] * len(specs), LIMITS)
        if kind is OutputKind.TORCH:
            assert division == Division(OutputKind.GREEDY, (specs.index(spec),), keeps_rows=True)
        else:
            assert division == Division(kind, (), keeps_rows)


@pytest.mark.parametrize("record", [OutputSpec, SampleSpec, Shaping, DraftSpec])
def test_every_field_of_a_row_is_known(record: type) -> None:
    """A new field needs a rule in ``choices.py`` first, and then an entry in ``KNOWN_FIELDS``."""
    assert {field.name for field in dataclasses.fields(record)} == KNOWN_FIELDS[record]


def test_the_records_of_a_row_are_all_there_are() -> None:
    """A record that is new would not be looked into."""
    hints = [typing.get_type_hints(record).values() for record in KNOWN_FIELDS]
    parts = {part for types in hints for each in types for part in (each, *typing.get_args(each))}
    records = {part for part in parts if dataclasses.is_dataclass(part)}
    assert records <= {*KNOWN_FIELDS, TokenMask, DraftDistribution}


@pytest.mark.parametrize("record", ["output", "sample", "shaping", "draft"])
def test_a_row_with_a_field_that_is_not_known_goes_to_torch(record: str) -> None:
    """Not ignored, whatever else the row asks for; a field left at its default asks for nothing."""

    def spec_with(value: float) -> OutputSpec:
        cold = {"sample": SampleSpec(temperature=0.0), "shaping": Shaping(bias=((3, 1.0),)), "draft": DraftSpec(3)}
        spec = OutputSpec(**cold)  # type: ignore[arg-type]
        plain = spec if record == "output" else cold[record]
        wider = dataclasses.make_dataclass(
            "Wider", [("top_a", float, dataclasses.field(default=0.0))], bases=(type(plain),), frozen=True
        )
        given = {field.name: getattr(plain, field.name) for field in dataclasses.fields(plain)}  # type: ignore[arg-type]
        more = wider(**given, top_a=value)
        return more if record == "output" else dataclasses.replace(spec, **{record: more})

    assert divide([spec_with(0.0)], [], LIMITS) == Division(OutputKind.SAMPLE)
    assert divide([spec_with(0.5)], [], LIMITS).torch_rows == (0,)
    assert divide([OutputSpec(greedy=True), spec_with(0.5)], [], LIMITS).torch_rows == (1,)


def test_what_does_not_fit_is_left_to_torch() -> None:
    """Exactly what fits does: requests and entries, each counted over all rows that came before."""
    assert divide([], [], LIMITS) == Division()
    request = OutputSpec(greedy=True, logprobs=True, target_id=1, logprob_ids=tuple(range(30)))
    assert divide([request] * 2, [], LIMITS) == Division(OutputKind.SCORE)
    more = divide([request, request, OutputSpec(target_id=1), OutputSpec(entropy=True)], [], LIMITS)
    assert more == Division(OutputKind.SCORE, (2,), keeps_rows=True)
    biased = OutputSpec(greedy=True, shaping=Shaping(bias=tuple((i, 1.0) for i in range(100))))
    penalised = OutputSpec(greedy=True, shaping=Shaping(presence_penalty=1.0))
    for length, torch_rows in ((156, ()), (157, (1,))):
        division = divide([biased, penalised], [None, np.zeros(length, np.int32)], LIMITS)
        assert (division.kind, division.torch_rows) == (OutputKind.SAMPLE, torch_rows)
