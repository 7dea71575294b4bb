"""What output rows return through the kernels, in the simulator, against the definition in numpy.

Raw logits stand for the chain before; everything from a step's specs to its output rows is the runner's own path: kind,
records, one upload, launches, download, rows. What is not meant to be read holds garbage.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from ferrule_server.executor.base import (
    DraftLaw,
    DraftSpec,
    Int32Array,
    OutputSpec,
    RowOutput,
    SampleSpec,
    Shaping,
    StepBatch,
    TokenMask,
)
from ferrule_server.executor.cuda.buffers import DecodeBuffers, Limits
from ferrule_server.executor.cuda.choice_inputs import fill_choices
from ferrule_server.executor.cuda.choice_launches import ChoiceSpecs, choice_operations
from ferrule_server.executor.cuda.choices import (
    ChoiceCounts,
    OutputKind,
    input_span,
    kind_of,
    masks_of,
    read_choices,
    result_spans,
)
from ferrule_server.executor.cuda.kernel_set import KernelSet
from ferrule_server.executor.cuda.masks import DeviceMasks
from ferrule_server.executor.ranking import best_ids
from ferrule_server.executor.sampling import select_rows
from ferrule_server.kernels.cuda.log_sum_exp import log_sum_exp
from ferrule_server.kernels.cuda.log_sum_exp import shared_bytes as score_shared_bytes
from ferrule_server.kernels.cuda.sample import DRAW_SHARED_BYTES, draw
from ferrule_server.kernels.cuda.select_count import count_shared_bytes, select_count
from ferrule_server.kernels.cuda.select_mass import mass_shared_bytes, select_mass
from ferrule_server.kernels.cuda.shape_logits import shape_logits
from ferrule_server.kernels.cuda.spec import MODEL_SHAPES, KernelSpec, ModelShape
from ferrule_server.kernels.cuda.specialise import Constant
from ferrule_server.kernels.cuda.toolchain.catalog import kernels_of
from ferrule_server.kernels.cuda.top_k import gather_shared_bytes, gather_top_k
from tests.executor.cuda.fake_gpu import CUBIN, FakeGpu, FakeLaunch
from tests.kernels.cuda.logit_cases import DIGITS, SLICE, THREADS, WARPS

VOCAB, MAX_ROWS, LARGEST_K = 300, 16, 32
"""Two slices."""
SHAPE = ModelShape(64, 64, 1, 2, 1, 64, VOCAB, False)
LIMITS = Limits(max_blocks=4, max_rows=MAX_ROWS, max_requests=64, max_entries=256, num_masks=3, largest_k=LARGEST_K)
GARBAGE = 0x5B

Rows = npt.NDArray[np.float32]


def _spec(kernel: object, shared_bytes: int, **constants: Constant) -> KernelSpec:
    items = tuple(sorted({"SLICE": SLICE, "WARPS": WARPS, **constants}.items()))
    return KernelSpec(kernel, items, THREADS, shared_bytes)  # type: ignore[arg-type]  # kernels differ in signature


SMALL = ChoiceSpecs(
    shape=_spec(shape_logits, 0),
    counts=tuple(_spec(select_count, count_shared_bytes(bits), SHIFT=shift, BITS=bits) for shift, bits in DIGITS),
    masses=tuple(_spec(select_mass, mass_shared_bytes(bits), SHIFT=shift, BITS=bits) for shift, bits in DIGITS),
    draw=_spec(draw, DRAW_SHARED_BYTES),
    score=_spec(log_sum_exp, score_shared_bytes(2)),
    gather=_spec(gather_top_k, gather_shared_bytes(2, LARGEST_K), K=LARGEST_K),
)
"""The kernels with slices that a simulated CTA is through with soon."""


class Bench:
    """Buffers on a simulated GPU, and what a runner does with them behind the logits."""

    def __init__(self) -> None:
        self.gpu = FakeGpu(simulate=True, seed=5)
        self.kernels = KernelSet(self.gpu, dict.fromkeys(SMALL.all, CUBIN))
        self.buffers = DecodeBuffers(self.gpu, SHAPE, LIMITS, 2)
        self.buffers.choice_partials = self.gpu.allocate("small_partials", (MAX_ROWS, 2, 16), torch.uint8)
        self.masks = DeviceMasks(self.gpu, self.buffers.masks)
        self.inputs = self.gpu.allocate_pinned("staged_inputs", self.buffers.input_layout.num_bytes)
        self.results = self.gpu.allocate_pinned("staged_results", self.buffers.result_layout.num_bytes)
        self.kind = OutputKind.GREEDY

    def run(self, logits: Rows, batch: StepBatch, num_rows_bucket: int) -> list[RowOutput]:
        """Return the output rows of a step with these logits: float32 [num_rows, VOCAB]."""
        self.kind = kind_of(batch.output_specs, batch.histories, LIMITS)
        self._chain_ends(logits)
        counts = self._upload(batch, num_rows_bucket)
        self.gpu.launch(choice_operations(self.kernels, self.buffers, num_rows_bucket, self.kind, SMALL))
        self.results.fill_(GARBAGE)
        for span in result_spans(self.buffers.result_layout, batch.num_rows, self.kind, counts):
            self.gpu.download(self.results[span], self.buffers.results[span])
        self.gpu.synchronize()
        arrays = self.buffers.result_layout.arrays(self.results.numpy())
        rows = read_choices(arrays, batch, self.kind, vocab_size=VOCAB)
        self.results.fill_(GARBAGE)  # what was read does not change with it
        return rows

    def _chain_ends(self, logits: Rows) -> None:
        """Do what the chain does last; everything else in these buffers is garbage."""
        self.buffers.logits.fill_(torch.nan)
        self.buffers.logits[: len(logits)] = torch.from_numpy(logits)
        self.buffers.results.fill_(GARBAGE)
        name = "tokens" if self.kind is OutputKind.GREEDY else "greedy"
        self.buffers.result[name][: len(logits)] = torch.tensor(best_ids(logits), dtype=torch.int32)

    def _upload(self, batch: StepBatch, num_rows_bucket: int) -> ChoiceCounts:
        slots = self.masks.slots_for(masks_of(batch.output_specs))
        self.inputs.fill_(GARBAGE)
        self.buffers.inputs.fill_(GARBAGE)
        views = self.buffers.input_layout.arrays(self.inputs.numpy())
        counts = fill_choices(views, batch, num_rows_bucket, self.kind, slots, vocab_size=VOCAB)
        span = input_span(self.buffers.input_layout, self.kind, counts)
        if span is not None:
            self.gpu.upload(self.buffers.inputs[span], self.inputs[span])
        return counts

    def counters(self) -> list[Tensor]:
        """Return what is zero between steps."""
        names = ("select_counts", "select_masses", "choice_tickets", "top_places")
        return [getattr(self.buffers, name) for name in names]


def make_batch(
    specs: Sequence[OutputSpec],
    histories: Sequence[Int32Array | None] = (),
    output_rows: Sequence[int] | None = None,
    num_rows: int | None = None,
) -> StepBatch:
    """Return a step of single rows, of which some are output rows; nothing but outputs and positions counts."""
    rows = np.arange(len(specs) if num_rows is None else num_rows, dtype=np.int32)
    return StepBatch(
        token_ids=rows,
        positions=7 * rows + 3,
        slot_mapping=rows,
        cu_seqlens_q=np.arange(len(rows) + 1, dtype=np.int32),
        kv_lens=7 * rows + 4,
        block_tables=np.zeros((len(rows), 1), np.int32),
        output_rows=rows[: len(specs)] if output_rows is None else np.array(output_rows, np.int32),
        output_specs=tuple(specs),
        histories=tuple(histories),
    )


def make_mask(seed: int, share: float = 0.3) -> TokenMask:
    """Return a mask that allows about this share of all tokens."""
    is_allowed = np.random.default_rng(seed).random(VOCAB) < share
    is_allowed[seed % VOCAB] = True
    bits = np.packbits(is_allowed, bitorder="little")
    return TokenMask(hashlib.blake2b(bits.tobytes(), digest_size=16).digest(), bits)


def random_logits(num_rows: int, seed: int) -> Rows:
    """Return rows some of which have many ties."""
    logits = np.random.default_rng(seed).normal(0, 3, (num_rows, VOCAB))
    logits[1::2] = np.round(logits[1::2])
    return logits.astype(np.float32)


def expected_rows(logits: Rows, batch: StepBatch) -> list[RowOutput]:
    """Return what the definition says."""
    rows = batch.output_rows
    return select_rows(logits[rows], batch.positions[rows].tolist(), batch.output_specs, batch.histories)


def assert_same(found: Sequence[RowOutput], expected: Sequence[RowOutput]) -> None:
    """Compare rows, log-probabilities up to what float32 sums are good for."""
    assert len(found) == len(expected)
    for row, other in zip(found, expected, strict=True):
        for name in ("position", "token", "is_accepted", "is_finite"):
            assert getattr(row, name) == getattr(other, name), (name, row, other)
        for name in ("model_logprob", "sampled_logprob", "target_logprob", "entropy"):
            value = getattr(other, name)
            assert getattr(row, name) == (None if value is None else pytest.approx(value, rel=1e-6, abs=1e-5)), name
        for name in ("requested_logprobs", "top_logprobs"):
            value = getattr(other, name)
            assert (getattr(row, name) is None) == (value is None), name
            if value is not None:
                np.testing.assert_allclose(getattr(row, name), value, rtol=1e-6, atol=1e-5)
        assert (None if row.top_ids is None else row.top_ids.tolist()) == (
            None if other.top_ids is None else other.top_ids.tolist()
        )


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

        assert bench.kind is not OutputKind.TORCH
        assert_same(found, expected_rows(logits, batch))
        assert all(not counter.any() for counter in bench.counters())


def test_greedy_rows_need_no_launch_and_no_upload() -> None:
    """The best token of each row is there already; a draft at temperature 0 is accepted where it is that one."""
    bench = Bench()
    logits = random_logits(5, seed=4)
    logits[1, 7] = np.inf
    best = int(logits[3].argmax())
    greedy = OutputSpec(sample=SampleSpec(temperature=0.0))
    laws = [DraftLaw(b"", None, np.full(VOCAB, 1 / VOCAB)), None]
    drafts = [
        OutputSpec(sample=SampleSpec(temperature=0.0), draft=DraftSpec(token, law))
        for token, law in zip((best, (int(logits[4].argmax()) + 1) % VOCAB), laws, strict=True)
    ]
    batch = make_batch([greedy, OutputSpec(), *drafts], output_rows=[0, 1, 3, 4], num_rows=5)

    found = bench.run(logits, batch, 8)

    assert bench.kind is OutputKind.GREEDY
    assert_same(found, expected_rows(logits, batch))
    assert [row.is_accepted for row in found] == [None, None, True, False]
    assert [call.kernels for call in bench.gpu.calls("launch")] == [()]
    assert not bench.gpu.calls("upload")


def test_a_launch_is_one_wave_and_no_more_than_finds_work() -> None:
    """A fixed grid for each bucket: two slices a row, or what the multiprocessors hold."""
    gpu = FakeGpu(num_sms=3)
    buffers = DecodeBuffers(gpu, SHAPE, LIMITS, 2)
    kernels = KernelSet(gpu, dict.fromkeys(SMALL.all, CUBIN))

    for bucket, kind, grids in ((1, OutputKind.TOP, {2}), (4, OutputKind.SAMPLE, {3}), (4, OutputKind.TORCH, set())):
        operations = choice_operations(kernels, buffers, bucket, kind, SMALL)
        assert {launch.grid for launch in operations if isinstance(launch, FakeLaunch)} == grids
        assert all(isinstance(launch, FakeLaunch) for launch in operations)


@pytest.mark.parametrize("name", MODEL_SHAPES)
def test_every_kernel_is_one_that_is_built_for_the_model(name: str) -> None:
    """The runner asks for nothing else, and the digits come in order."""
    shape = MODEL_SHAPES[name]
    specs = ChoiceSpecs.of(shape)

    assert set(specs.all) <= set(kernels_of(shape))
    assert [spec.kernel for spec in specs.all] == [
        *(shape_logits, *[select_count] * 3, *[select_mass] * 3, draw, log_sum_exp, gather_top_k)
    ]
    assert [dict(spec.constants)["SHIFT"] for spec in (*specs.counts, *specs.masses)] == 2 * [21, 10, 0]
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
        (OutputSpec(full_logits=True), OutputKind.TORCH),
        (OutputSpec(greedy=True, hidden_state=True), OutputKind.TORCH),
        (OutputSpec(sample=DRAWN, draft=DraftSpec(1)), OutputKind.TORCH),
        (OutputSpec(sample=SampleSpec(temperature=0.0), draft=DraftSpec(1)), OutputKind.GREEDY),
    ],
)
def test_the_kind_of_a_step_is_the_largest_of_its_rows(spec: OutputSpec, kind: OutputKind) -> None:
    """Alone, and among rows that ask for less."""
    history = np.zeros(3, np.int32)
    assert kind_of([spec], [history], LIMITS) is kind
    assert kind_of([OutputSpec(greedy=True), spec, OutputSpec()], [None, history, None], LIMITS) is kind


def test_what_does_not_fit_is_left_to_torch() -> None:
    """Exactly what fits does: requests, entries, masks, each counted over all rows."""
    assert kind_of([], [], LIMITS) is OutputKind.GREEDY
    request = OutputSpec(greedy=True, logprobs=True, target_id=1, logprob_ids=tuple(range(30)))
    assert kind_of([request] * 2, [], LIMITS) is OutputKind.SCORE
    assert kind_of([request, request, OutputSpec(target_id=1)], [], LIMITS) is OutputKind.TORCH
    biased = OutputSpec(greedy=True, shaping=Shaping(bias=tuple((i, 1.0) for i in range(100))))
    penalised = OutputSpec(greedy=True, shaping=Shaping(presence_penalty=1.0))
    for length, kind in ((156, OutputKind.SAMPLE), (157, OutputKind.TORCH)):
        assert kind_of([biased, penalised], [None, np.zeros(length, np.int32)], LIMITS) is kind
    masked = [OutputSpec(greedy=True, shaping=Shaping(mask=mask)) for mask in MASKS]
    silent = OutputSpec(target_id=3, shaping=Shaping(mask=make_mask(9)))
    assert kind_of([*masked[:3], masked[0], silent], [], LIMITS) is OutputKind.SCORE
    assert kind_of(masked, [], LIMITS) is OutputKind.TORCH
