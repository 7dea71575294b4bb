"""Cases of the ops on rows of logits: shaping and drawing, normalising, the largest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ferrule_server.executor.base import SampleSpec, Shaping
from ferrule_server.executor.cuda.choice_inputs import pack_draw, pack_shaping
from ferrule_server.kernels.cuda import log_sum_exp, sample, top_k
from ferrule_server.kernels.cuda.spec import KernelSpec, ModelShape
from tools.gpu.cases import Case, Instance, unequal, zeros
from tools.gpu.gpu import Call, Gpu

NUM_ROWS = 8
TOP_K = 50


def cases_of(op: str, shape: ModelShape, specs: Sequence[KernelSpec] | None) -> list[Case]:
    """Return the cases of one op: a chain of kernels each."""
    module = {"log_sum_exp": log_sum_exp, "top_k": top_k, "sample": sample}[op]
    chain = list(specs or module.specs(shape))
    build = {"log_sum_exp": [_normalise], "top_k": [_top_k], "sample": [_shape, _sample]}[op]
    return [each(shape, chain) for each in build]


def _logits(gpu: Gpu, shape: ModelShape, seed: int, num_rows: int = NUM_ROWS) -> Tensor:
    if gpu.is_dry:
        return torch.zeros(num_rows, shape.vocab_size)
    generator = torch.Generator(gpu.torch_device).manual_seed(seed)
    return torch.randn(num_rows, shape.vocab_size, device=gpu.torch_device, generator=generator) * 3


def _slices(shape: ModelShape, spec: KernelSpec) -> int:
    size = dict(spec.constants)["SLICE"]
    assert isinstance(size, int)
    return -(-shape.vocab_size // size)


def _given(gpu: Gpu, shape: ModelShape, spec: KernelSpec, logits: Tensor, records: Any) -> dict[str, Any]:
    """Return what all these kernels take, scratch included: none of it needs more than zeros at first."""
    num_slices = _slices(shape, spec)
    return {
        "logits": logits,
        "rows": logits,
        "records": torch.from_numpy(records.view(np.int32)).to(gpu.torch_device),
        "borders": zeros(gpu, (NUM_ROWS, sample.BORDER_BYTES), torch.uint8),
        "entries": zeros(gpu, (1, 4), torch.int32),
        "masks": zeros(gpu, (sample.mask_bytes(shape.vocab_size),), torch.uint8),
        "partials": zeros(gpu, (NUM_ROWS, num_slices, 16), torch.uint8),
        "tickets": zeros(gpu, (NUM_ROWS,), torch.int32),
        "tokens": zeros(gpu, (NUM_ROWS,), torch.int32),
        "logprobs": zeros(gpu, (NUM_ROWS,), torch.float32),
        "totals": zeros(gpu, (NUM_ROWS,), torch.int64),
        "num_rows": NUM_ROWS,
        "vocab_size": shape.vocab_size,
        "num_slices": num_slices,
    }


def _calls(gpu: Gpu, shape: ModelShape, chain: Sequence[KernelSpec], given: dict[str, Any]) -> list[Call]:
    return [Call(spec, given, min(NUM_ROWS * _slices(shape, spec), gpu.num_sms * spec.ctas_per_sm)) for spec in chain]


def _records(shape: ModelShape, **settings: float) -> Any:
    """Return how each row is drawn, with a seed of its own."""
    draws = [SampleSpec(seed=row, **settings) for row in range(NUM_ROWS)]  # type: ignore[arg-type]
    records = np.frombuffer(b"".join(pack_draw(spec, shape.vocab_size) for spec in draws), sample.RECORD).copy()
    records["row"] = records["source"] = range(NUM_ROWS)
    return records


def _shape(shape: ModelShape, chain: Sequence[KernelSpec]) -> Case:
    mask = np.arange(shape.vocab_size) % 3 > 0

    def build(gpu: Gpu, index: int) -> Instance:
        logits, records = _logits(gpu, shape, index, 2 * NUM_ROWS), _records(shape)
        raw, shaped = logits[:NUM_ROWS], logits[NUM_ROWS:]
        records["source"] += NUM_ROWS
        for row in range(NUM_ROWS):
            pack_shaping(records[row : row + 1], Shaping(), 0, (0, 0))
        given = _given(gpu, shape, chain[0], logits, records)
        bits = torch.from_numpy(np.packbits(mask, bitorder="little"))
        given["masks"][: len(bits)] = bits.to(gpu.torch_device)
        forbidden = torch.from_numpy(~mask).to(gpu.torch_device)
        return Instance(
            _calls(gpu, shape, chain, given),
            [shaped],
            lambda: raw.masked_fill(forbidden, -torch.inf),
            lambda expected: unequal(shaped, expected),
            lambda: raw.masked_fill(forbidden, -torch.inf),
        )

    return Case(f"sample shaped rows={NUM_ROWS}", list(chain), 16 * NUM_ROWS * shape.vocab_size, build)


def _normalise(shape: ModelShape, chain: Sequence[KernelSpec]) -> Case:
    def build(gpu: Gpu, index: int) -> Instance:
        logits = _logits(gpu, shape, index)
        records = np.array([[row, row, row + 1, 0] for row in range(NUM_ROWS)], np.int32)
        figures, ids = zeros(gpu, (NUM_ROWS, 4), torch.float32), zeros(gpu, (NUM_ROWS,), torch.int32)
        given = {**_given(gpu, shape, chain[0], logits, records), "request_ids": ids, "figures": figures}
        logprobs = given["logprobs"]

        def check(expected: Tensor) -> float:
            return float((logprobs - expected).abs().max() / 1e-4)

        return Instance(
            _calls(gpu, shape, chain, given),
            [figures, logprobs],
            lambda: torch.log_softmax(logits, -1)[:, 0],
            check,
            lambda: torch.logsumexp(logits, -1),
        )

    return Case(f"log_sum_exp rows={NUM_ROWS}", list(chain), 4 * NUM_ROWS * shape.vocab_size, build)


def _top_k(shape: ModelShape, chain: Sequence[KernelSpec]) -> Case:
    whole = [sample.specs(shape)[0], *chain]

    def build(gpu: Gpu, index: int) -> Instance:
        logits, room = _logits(gpu, shape, index), (NUM_ROWS, top_k.LARGEST_K)
        ids, values = zeros(gpu, room, torch.int32), zeros(gpu, room, torch.float32)
        given = _given(gpu, shape, whole[0], logits, _records(shape, top_k=TOP_K))
        return Instance(
            _calls(gpu, shape, whole, {**given, "top_ids": ids, "top_logits": values}),
            [ids, values],
            lambda: logits.topk(TOP_K).values,
            lambda expected: unequal(values[:, :TOP_K], expected),
            lambda: logits.topk(TOP_K),
        )

    return Case(f"top_k k={TOP_K} rows={NUM_ROWS}", whole, 8 * NUM_ROWS * shape.vocab_size, build)


def _sample(shape: ModelShape, chain: Sequence[KernelSpec]) -> Case:
    def build(gpu: Gpu, index: int) -> Instance:
        logits = _logits(gpu, shape, index)
        given = _given(gpu, shape, chain[0], logits, _records(shape, temperature=0.8, top_k=TOP_K, top_p=0.9))
        tokens, logprobs = given["tokens"], given["logprobs"]

        def check(border: Tensor) -> float:
            chosen = logits.gather(1, tokens.long().unsqueeze(1)).squeeze(1)
            is_kept = (chosen >= border) & logprobs.isfinite() & (logprobs <= 0)
            return 0.0 if bool(is_kept.all()) else torch.inf

        def torch_op() -> Tensor:
            best = (logits / 0.8).topk(TOP_K)
            weights = best.values.softmax(-1)
            kept = weights * (weights.cumsum(-1) - weights < 0.9)
            return best.indices.gather(1, torch.multinomial(kept, 1))

        return Instance(
            _calls(gpu, shape, chain, given),
            [tokens, logprobs],
            lambda: logits.topk(TOP_K).values[:, -1],
            check,
            torch_op,
        )

    return Case(f"sample k={TOP_K} p=0.9 rows={NUM_ROWS}", list(chain), 8 * NUM_ROWS * shape.vocab_size, build)
