"""The launches behind the logits: shaping, drawing, scoring, the largest.

All of them look at one record per slot of the bucket and skip those that have nothing to do; scratch is shared, since
each launch waits for the one before it and leaves counters at zero.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ferrule_server.executor.cuda.buffers import DecodeBuffers
from ferrule_server.executor.cuda.choices import OutputKind
from ferrule_server.executor.cuda.gpu import Launch, Operation
from ferrule_server.executor.cuda.kernel_set import Arguments, KernelSet
from ferrule_server.kernels.cuda import log_sum_exp, sample, shape_logits, top_k
from ferrule_server.kernels.cuda.spec import KernelSpec, ModelShape
from ferrule_server.kernels.cuda.toolchain.sources import parameters

__all__ = ["ChoiceSpecs", "choice_operations"]


@dataclass(frozen=True, slots=True)
class ChoiceSpecs:
    """The kernels behind the logits, all with slices of one size.

    Attributes:
        shape: Penalties, bias, masks.
        counts: One for each digit of the k-th largest key.
        masses: One for each digit of the key that top-p ends at.
        draw: Of tokens.
        score: Normalises and looks up.
        gather: Collects the k largest.
    """

    shape: KernelSpec
    counts: tuple[KernelSpec, ...]
    masses: tuple[KernelSpec, ...]
    draw: KernelSpec
    score: KernelSpec
    gather: KernelSpec

    @classmethod
    def of(cls, shape: ModelShape) -> ChoiceSpecs:
        """Return those a model of this shape is served with."""
        *counts, gather = top_k.specs(shape)
        *selects, draw = sample.specs(shape)
        (shaping,), (score,) = shape_logits.specs(shape), log_sum_exp.specs(shape)
        return cls(shaping, tuple(counts), tuple(selects[len(counts) :]), draw, score, gather)

    @property
    def all(self) -> tuple[KernelSpec, ...]:
        """Every kernel once."""
        return (self.shape, *self.counts, *self.masses, self.draw, self.score, self.gather)

    @property
    def slice_size(self) -> int:
        """Logits that a CTA looks at at a time."""
        size = dict(self.draw.constants)["SLICE"]
        assert isinstance(size, int)
        return size


def choice_operations(
    kernels: KernelSet,
    buffers: DecodeBuffers,
    num_rows_bucket: int,
    kind: OutputKind,
    specs: ChoiceSpecs,
) -> list[Operation]:
    """Return the launches behind the logits.

    Args:
        kernels: Prepares them.
        buffers: What they read and write.
        num_rows_bucket: Records that each looks at.
        kind: Of the step; nothing is launched for GREEDY and TORCH.
        specs: The kernels.
    """
    if kind in (OutputKind.GREEDY, OutputKind.TORCH):
        return []
    vocab_size = buffers.logits.shape[1]
    num_slices = -(-vocab_size // specs.slice_size)
    sizes = {"num_rows": num_rows_bucket, "vocab_size": vocab_size, "num_slices": num_slices}
    calls = _sample_calls(buffers, specs)
    if kind >= OutputKind.SCORE:
        calls.append((specs.score, _score_arguments(buffers)))
    if kind >= OutputKind.TOP:
        calls += _top_calls(buffers, specs)
    most = num_rows_bucket * num_slices
    return [_prepare(kernels, spec, {**_scratch(buffers), **sizes, **given}, most) for spec, given in calls]


def _prepare(kernels: KernelSet, spec: KernelSpec, given: Arguments, most_ctas: int) -> Launch:
    """Return the launch of a kernel with those of the arguments that it takes, in one wave at most."""
    arguments = {name: given[name] for name, _ in parameters(spec.kernel)}
    grid = min(most_ctas, kernels.gpu.info.num_sms * spec.ctas_per_sm)
    return kernels.prepare(spec, arguments, grid)


Calls = list[tuple[KernelSpec, Arguments]]


def _scratch(buffers: DecodeBuffers) -> dict[str, int | float | Tensor]:
    """Return what these kernels share."""
    return {
        "logits": buffers.logits,
        "state": buffers.select_state,
        "counts": buffers.select_counts,
        "masses": buffers.select_masses,
        "partials": buffers.choice_partials,
        "tickets": buffers.choice_tickets,
    }


def _sample_calls(buffers: DecodeBuffers, specs: ChoiceSpecs) -> Calls:
    """Return what chooses tokens: shaping, top-k, top-p, the draw."""
    shape: Arguments = {
        "shaped": buffers.shaped,
        "records": buffers.input["shape_records"],
        "entries": buffers.input["entries"],
        "masks": buffers.masks,
    }
    select: Arguments = {
        "records": buffers.input["draw_records"],
        "record_bytes": sample.RECORD_BYTES,
        "tokens": buffers.result["tokens"],
        "logprobs": buffers.result["chosen_logprobs"],
        "totals": buffers.choice_totals,
    }
    return [(specs.shape, shape), *((spec, select) for spec in (*specs.counts, *specs.masses, specs.draw))]


def _score_arguments(buffers: DecodeBuffers) -> Arguments:
    """Return what normalises rows and looks up log-probabilities."""
    return {
        "records": buffers.input["score_records"],
        "request_ids": buffers.input["request_ids"],
        "tokens": buffers.result["tokens"],
        "figures": buffers.result["figures"],
        "logprobs": buffers.result["requested"],
    }


def _top_calls(buffers: DecodeBuffers, specs: ChoiceSpecs) -> Calls:
    """Return what finds the largest raw logits."""
    select: Arguments = {
        "records": buffers.input["top_records"],
        "record_bytes": top_k.RECORD_BYTES,
        "candidates": buffers.top_candidates,
        "places": buffers.top_places,
        "top_ids": buffers.result["top_ids"],
        "top_logits": buffers.result["top_logits"],
    }
    return [(spec, select) for spec in (*specs.counts, specs.gather)]
