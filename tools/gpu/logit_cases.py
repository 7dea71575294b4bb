"""Cases of the ops on rows of logits: shaping, normalising, the largest, a draw."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ferrule_server.executor.base import SampleSpec, Shaping, TokenMask
from ferrule_server.kernels.cuda import log_sum_exp, sample, shape_logits, top_k
from ferrule_server.kernels.cuda.spec import KernelSpec, ModelShape
from tools.gpu.cases import Case, Instance, unequal, zeros
from tools.gpu.gpu import Call, Gpu

NUM_ROWS = 8
TOP_K = 50


def cases_of(op: str, shape: ModelShape, specs: Sequence[KernelSpec] | None) -> list[Case]:
    """Return the cases of one op; a chain of kernels is one case per size of slices."""
    module = {"shape_logits": shape_logits, "log_sum_exp": log_sum_exp, "top_k": top_k, "sample": sample}[op]
    found: dict[object, list[KernelSpec]] = {}
    for spec in specs or module.specs(shape):
        found.setdefault(dict(spec.constants)["SLICE"], []).append(spec)
    build = {"shape_logits": _shape, "log_sum_exp": _normalise, "top_k": _top_k, "sample": _sample}[op]
    return [build(shape, chain) for chain in found.values()]


def _logits(gpu: Gpu, shape: ModelShape, seed: int) -> Tensor:
    if gpu.is_dry:
        return torch.zeros(NUM_ROWS, shape.vocab_size)
    generator = torch.Generator(gpu.torch_device).manual_seed(seed)
    return torch.randn(NUM_ROWS, shape.vocab_size, device=gpu.torch_device, generator=generator) * 3


def _slices(shape: ModelShape, spec: KernelSpec) -> int:
    size = dict(spec.constants)["SLICE"]
    assert isinstance(size, int)
    return -(-shape.vocab_size // size)


def _given(gpu: Gpu, shape: ModelShape, spec: KernelSpec, logits: Tensor, records: Any) -> dict[str, Any]:
    """Return what all these kernels take, scratch included: none of it needs more than zeros at first."""
    num_slices = _slices(shape, spec)
    return {
        "logits": logits,
        "records": torch.from_numpy(records).to(gpu.torch_device),
        "partials": zeros(gpu, (NUM_ROWS, num_slices, 16), torch.uint8),
        "record_bytes": 4 * records.shape[1],
        "tickets": zeros(gpu, (NUM_ROWS,), torch.int32),
        "num_rows": NUM_ROWS,
        "vocab_size": shape.vocab_size,
        "num_slices": num_slices,
        "state": zeros(gpu, (NUM_ROWS, top_k.STATE_BYTES), torch.uint8),
        "counts": zeros(gpu, (NUM_ROWS, 2048), torch.int32),
        "masses": zeros(gpu, (NUM_ROWS, 2048), torch.int64),
    }


def _calls(gpu: Gpu, shape: ModelShape, chain: Sequence[KernelSpec], given: dict[str, Any]) -> list[Call]:
    return [Call(spec, given, min(NUM_ROWS * _slices(shape, spec), gpu.num_sms * spec.ctas_per_sm)) for spec in chain]


def _name(op: str, chain: Sequence[KernelSpec]) -> str:
    return f"{op} rows={NUM_ROWS} slice={dict(chain[0].constants)['SLICE']}"


def _shape(shape: ModelShape, chain: Sequence[KernelSpec]) -> Case:
    mask = np.arange(shape.vocab_size) % 3 > 0
    allowed = np.packbits(mask, bitorder="little")
    shaping = Shaping(mask=TokenMask(b"", allowed))

    def build(gpu: Gpu, index: int) -> Instance:
        logits = _logits(gpu, shape, index)
        records = np.stack([shape_logits.pack_record(shaping, row, 0, (0, 0)) for row in range(NUM_ROWS)])
        shaped = torch.zeros_like(logits)
        bits = torch.from_numpy(shape_logits.pack_mask(allowed, shape.vocab_size)).to(gpu.torch_device)
        given = {**_given(gpu, shape, chain[0], logits, records), "shaped": shaped, "masks": bits}
        given["entries"] = zeros(gpu, (1, 4), torch.int32)
        forbidden = torch.from_numpy(~mask).to(gpu.torch_device)
        return Instance(
            _calls(gpu, shape, chain, given),
            [shaped],
            lambda: logits.masked_fill(forbidden, -torch.inf),
            lambda expected: unequal(shaped, expected),
            lambda: logits.masked_fill(forbidden, -torch.inf),
        )

    return Case(_name("shape_logits", chain), list(chain), 8 * NUM_ROWS * shape.vocab_size, build)


def _normalise(shape: ModelShape, chain: Sequence[KernelSpec]) -> Case:
    def build(gpu: Gpu, index: int) -> Instance:
        logits = _logits(gpu, shape, index)
        records = np.array([[row, row, row + 1, 0] for row in range(NUM_ROWS)], np.int32)
        figures, logprobs = zeros(gpu, (NUM_ROWS, 4), torch.float32), zeros(gpu, (NUM_ROWS,), torch.float32)
        ids = zeros(gpu, (NUM_ROWS,), torch.int32)
        given = {**_given(gpu, shape, chain[0], logits, records), "request_ids": ids, "tokens": ids}
        given |= {"figures": figures, "logprobs": logprobs}

        def check(expected: Tensor) -> float:
            return float((logprobs - expected).abs().max() / 1e-4)

        return Instance(
            _calls(gpu, shape, chain, given),
            [figures, logprobs],
            lambda: torch.log_softmax(logits, -1)[:, 0],
            check,
            lambda: torch.logsumexp(logits, -1),
        )

    return Case(_name("log_sum_exp", chain), list(chain), 4 * NUM_ROWS * shape.vocab_size, build)


def _top_k(shape: ModelShape, chain: Sequence[KernelSpec]) -> Case:
    def build(gpu: Gpu, index: int) -> Instance:
        logits = _logits(gpu, shape, index)
        records = np.array([[row, TOP_K, 0, 0] for row in range(NUM_ROWS)], np.int32)
        room = (NUM_ROWS, top_k.LARGEST_K)
        ids, values = zeros(gpu, room, torch.int32), zeros(gpu, room, torch.float32)
        given = {**_given(gpu, shape, chain[0], logits, records), "top_ids": ids, "top_logits": values}
        given |= {"candidates": zeros(gpu, room, torch.int64), "places": zeros(gpu, (NUM_ROWS,), torch.int32)}
        return Instance(
            _calls(gpu, shape, chain, given),
            [ids, values],
            lambda: logits.topk(TOP_K).values,
            lambda expected: unequal(values[:, :TOP_K], expected),
            lambda: logits.topk(TOP_K),
        )

    return Case(_name(f"top_k k={TOP_K}", chain), list(chain), 4 * NUM_ROWS * shape.vocab_size, build)


def _sample(shape: ModelShape, chain: Sequence[KernelSpec]) -> Case:
    def build(gpu: Gpu, index: int) -> Instance:
        logits = _logits(gpu, shape, index)
        distributions = [SampleSpec(temperature=0.8, top_k=TOP_K, top_p=0.9, seed=row) for row in range(NUM_ROWS)]
        records = sample.pack_records(distributions, range(NUM_ROWS), [index] * NUM_ROWS, shape.vocab_size)
        tokens, logprobs = zeros(gpu, (NUM_ROWS,), torch.int32), zeros(gpu, (NUM_ROWS,), torch.float32)
        given = {**_given(gpu, shape, chain[0], logits, records), "tokens": tokens, "logprobs": logprobs}
        given["totals"] = zeros(gpu, (NUM_ROWS,), torch.int64)

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

    return Case(_name(f"sample k={TOP_K} p=0.9", chain), list(chain), 4 * NUM_ROWS * shape.vocab_size, build)
