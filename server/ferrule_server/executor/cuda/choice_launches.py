"""The launches behind the logits: shaping and selecting, drawing, scoring, the largest.

All of them look at one record per slot of the bucket and skip those that have nothing to do; scratch is shared, since
each launch waits for the one before it and leaves tickets at zero.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ferrule_server.executor.cuda.buffers import DecodeBuffers
from ferrule_server.executor.cuda.choices import OutputKind
from ferrule_server.executor.cuda.gpu import Launch, Operation
from ferrule_server.executor.cuda.kernel_set import Arguments, KernelSet
from ferrule_server.kernels.cuda import log_sum_exp, sample, top_k
from ferrule_server.kernels.cuda.spec import KernelSpec, ModelShape, parameters


class ChoiceSpecs(NamedTuple):
    """The kernels behind the logits, all with slices of one size.

    Attributes:
        select: Penalties, bias, masks; top-k, top-p.
        draw: Of tokens.
        score: Normalises and looks up.
        gather: Collects the k largest.
    """

    select: KernelSpec
    draw: KernelSpec
    score: KernelSpec
    gather: KernelSpec

    @classmethod
    def of(cls, shape: ModelShape) -> ChoiceSpecs:
        """Return those a model of this shape is served with."""
        return cls(*sample.specs(shape), *log_sum_exp.specs(shape), *top_k.specs(shape))


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
        num_rows_bucket: Records that each looks at; the first one looks at twice as many for TOP.
        kind: Of the step; nothing is launched for GREEDY.
        specs: The kernels.
    """
    if kind is OutputKind.GREEDY:
        return []
    records, result = buffers.input["choice_records"], buffers.result
    vocab_size, slice_size = buffers.logits.shape[1], dict(specs.draw.constants)["SLICE"]
    assert isinstance(slice_size, int)
    num_slices = -(-vocab_size // slice_size)
    common: dict[str, int | float | Tensor] = {
        "logits": buffers.logits,
        "rows": buffers.logits,
        "records": records,
        "borders": buffers.choice_borders,
        "partials": buffers.choice_partials,
        "tickets": buffers.choice_tickets,
        "tokens": result["tokens"],
        "entries": buffers.input["entries"],
        "masks": buffers.input["masks"],
        "totals": buffers.choice_totals,
        "vocab_size": vocab_size,
        "num_slices": num_slices,
    }

    def launch(spec: KernelSpec, num_rows: int, ctas_of_row: int, **own: Tensor) -> Launch:
        given: Arguments = {**common, "num_rows": num_rows, **own}
        grid = min(num_rows * ctas_of_row, kernels.gpu.info.wave(spec))
        return kernels.prepare(spec, {name: given[name] for name, _ in parameters(spec.kernel)}, grid)

    num_selects = num_rows_bucket * (2 if kind >= OutputKind.TOP else 1)
    made: list[Operation] = [
        launch(specs.select, num_selects, num_slices),
        launch(specs.draw, num_rows_bucket, num_slices, logprobs=result["chosen_logprobs"]),
    ]
    if kind >= OutputKind.SCORE:
        scored = {"records": buffers.input["score_records"], "request_ids": buffers.input["request_ids"]}
        scored |= {"figures": result["figures"], "logprobs": result["requested"]}
        made.append(launch(specs.score, num_rows_bucket, num_slices, **scored))
    if kind >= OutputKind.TOP:
        tops = {"records": records[num_rows_bucket:], "borders": buffers.choice_borders[num_rows_bucket:]}
        tops |= {"top_ids": result["top_ids"], "top_logits": result["top_logits"]}
        made.append(launch(specs.gather, num_rows_bucket, 1, **tops))
    return made
