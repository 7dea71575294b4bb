"""Output rows through the kernels behind the logits, on a simulated GPU: all that a runner does there.

Raw logits stand for the chain before; everything from a step's specs to its output rows is the runner's own path: kind,
masks, records, one upload, launches, download, rows. What is not meant to be read holds garbage.
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
    Int32Array,
    OutputSpec,
    RowOutput,
    StepBatch,
    TokenMask,
)
from ferrule_server.executor.cuda.buffers import DecodeBuffers, Limits
from ferrule_server.executor.cuda.choice_inputs import fill_choices
from ferrule_server.executor.cuda.choice_launches import ChoiceSpecs, choice_operations
from ferrule_server.executor.cuda.choices import (
    OutputKind,
    divide,
    read_choices,
)
from ferrule_server.executor.cuda.graphs import GraphKey
from ferrule_server.executor.cuda.kernel_set import KernelSet
from ferrule_server.executor.sampling.ranking import best_ids
from ferrule_server.executor.sampling.selection import select_rows
from ferrule_server.kernels.cuda.log_sum_exp import log_sum_exp
from ferrule_server.kernels.cuda.log_sum_exp import shared_bytes as score_shared_bytes
from ferrule_server.kernels.cuda.radix_select import select_shared_bytes
from ferrule_server.kernels.cuda.sample import DRAW_SHARED_BYTES, draw, shape_and_select
from ferrule_server.kernels.cuda.spec import KernelSpec, ModelShape
from ferrule_server.kernels.cuda.specialise import Constant
from ferrule_server.kernels.cuda.top_k import gather_top_k
from ferrule_server.kernels.cuda.top_k import shared_bytes as gather_shared_bytes
from tests.executor.cuda.fake_gpu import CUBIN, FakeGpu
from tests.kernels.cuda.logit_cases import SELECT_CONSTANTS, SLICE, THREADS, WARPS

__all__ = [
    "GARBAGE",
    "LARGEST_K",
    "LIMITS",
    "MAX_ROWS",
    "SHAPE",
    "SMALL",
    "VOCAB",
    "Bench",
    "Rows",
    "assert_same",
    "expected_rows",
    "make_batch",
    "make_mask",
    "random_logits",
]

VOCAB, MAX_ROWS, LARGEST_K = 300, 16, 32
"""Two slices."""
SHAPE = ModelShape(64, 64, 1, 2, 1, 64, VOCAB, False)
LIMITS = Limits(max_blocks=4, max_rows=MAX_ROWS, max_requests=64, max_entries=256, largest_k=LARGEST_K)
GARBAGE = 0x5B

Rows = npt.NDArray[np.float32]


def _spec(kernel: object, shared_bytes: int, **constants: Constant) -> KernelSpec:
    items = tuple(sorted({"SLICE": SLICE, "WARPS": WARPS, **constants}.items()))
    return KernelSpec(kernel, items, THREADS, shared_bytes)  # type: ignore[arg-type]  # kernels differ in signature


SMALL = ChoiceSpecs(
    select=_spec(shape_and_select, select_shared_bytes(8, 64), **SELECT_CONSTANTS),
    draw=_spec(draw, DRAW_SHARED_BYTES),
    score=_spec(log_sum_exp, score_shared_bytes(2)),
    gather=_spec(gather_top_k, gather_shared_bytes(LARGEST_K), K=LARGEST_K),
)
"""The kernels with slices that a simulated CTA is through with soon."""


class Bench:
    """Buffers on a simulated GPU, and what a runner does with them behind the logits.

    Args:
        specs: The kernels; those of the model take seconds.
        limits: Of a step.

    Attributes:
        kind: Of the last step.
    """

    def __init__(self, specs: ChoiceSpecs = SMALL, limits: Limits = LIMITS) -> None:
        self.gpu = FakeGpu(simulate=True, seed=5)
        self.specs, self.limits = specs, limits
        self.kernels = KernelSet(self.gpu, dict.fromkeys(specs, CUBIN))
        self.buffers = DecodeBuffers(self.gpu.allocate, SHAPE, limits, 2)
        if specs is SMALL:
            self.buffers.choice_partials = self.gpu.allocate("small_partials", (2 * MAX_ROWS, 2, 16), torch.uint8)
        self.inputs = self.gpu.allocate_pinned("staged_inputs", self.buffers.input_layout.num_bytes)
        self.results = self.gpu.allocate_pinned("staged_results", self.buffers.result_layout.num_bytes)
        self.kind = OutputKind.GREEDY

    def run(self, logits: Rows, batch: StepBatch, num_rows_bucket: int) -> list[RowOutput]:
        """Return the output rows of a step with these logits: float32 [num_rows, VOCAB]."""
        division = divide(batch.output_specs, batch.histories, self.limits)
        assert not division.torch_rows
        self.kind = division.kind
        self._chain_ends(logits)
        used = self._upload(batch, num_rows_bucket)
        self.gpu.launch(choice_operations(self.kernels, self.buffers, num_rows_bucket, self.kind, self.specs))
        self.results.fill_(GARBAGE)
        for span in self.buffers.result_layout.spans(used):
            self.gpu.download(self.results[span], self.buffers.results[span])
        self.gpu.synchronize()
        arrays = self.buffers.result_layout.arrays(self.results)
        rows = read_choices(arrays, batch, self.kind, vocab_size=VOCAB, stores_logits=self.kind > OutputKind.GREEDY)
        self.results.fill_(GARBAGE)  # what was read does not change with it
        return rows

    def _chain_ends(self, logits: Rows) -> None:
        """Do what the chain does last; everything else in these buffers is garbage."""
        self.buffers.logits.fill_(torch.nan)
        self.buffers.logits[: len(logits)] = torch.from_numpy(logits)
        self.buffers.results.fill_(GARBAGE)
        name = "tokens" if self.kind is OutputKind.GREEDY else "greedy"
        self.buffers.result[name][: len(logits)] = torch.tensor(best_ids(logits), dtype=torch.int32)

    def _upload(self, batch: StepBatch, num_rows_bucket: int) -> dict[str, int]:
        self.inputs.fill_(GARBAGE)
        self.buffers.inputs.fill_(GARBAGE)
        views = self.buffers.input_layout.arrays(self.inputs)
        used = fill_choices(views, batch, GraphKey(num_rows_bucket, self.kind), vocab_size=VOCAB)
        for span in self.buffers.input_layout.spans(used):
            self.gpu.upload(self.buffers.inputs[span], self.inputs[span])
        return used

    def counters(self) -> list[Tensor]:
        """Return what is zero between steps."""
        return [self.buffers.choice_tickets]


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
