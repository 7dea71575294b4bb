"""Ours against float32, teacher-forced, at full size: KV of every layer, last buffers, logits and chosen tokens.

The buffers are those that a step leaves behind: what its last layer wrote.

What a buffer may be off by is measured, not chosen: torch's own bfloat16 run over the same tokens has some error
against float32; ours may have twice that and 0.001 more. A chosen token must be the reference's wherever the gap
between its two largest logits is more than what bfloat16 moves two logits by in that row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu import models
from benchmarks.gpu.executors import device_of, kv_bytes, open_executor
from benchmarks.gpu.ours import GREEDY, NotReady, Ours
from benchmarks.gpu.reference import Trace, traced
from benchmarks.gpu.timing import Row
from ferrule_server.executor.base import Int32Array, OutputSpec, StepBatch
from ferrule_server.model.tensors import ModelWeights

_TIMES_TORCH = 2.0
_MORE = 1e-3
_FULL = OutputSpec(full_logits=True)


def correct(task: Row) -> Iterator[Row]:
    """Yield one row per cell (sequences, context, steps, rows per sequence and step)."""
    torch.set_float32_matmul_precision("highest")
    config = models.config_of(task["model"])
    weights = models.random_weights(task["model"], device_of(task))
    cells = task["cells"]
    length = max(context + steps * rows for _, context, steps, rows in cells)
    pool_bytes = max(kv_bytes(config, cell[0], length) for cell in cells)
    ours = Ours(open_executor(task, weights, pool_bytes, length), is_dry=bool(task["dry"]))
    for cell in cells:
        try:
            yield _compared(ours, weights, cell)
        except NotReady as error:
            yield {**_named(cell), "status": "NOT READY", "error": str(error)}


def _named(cell: Sequence[int]) -> Row:
    batch, context, steps, rows = cell
    return {"kind": "correct", "batch": batch, "context": context, "steps": steps, "rows": rows}


def _compared(ours: Ours, weights: ModelWeights, cell: Sequence[int]) -> Row:
    """Run the steps of a cell on ours, then the whole sequences in float32 and bfloat16, and compare."""
    batch, context, steps, rows = cell
    config = models.config_of(ours.executor.info.model.model_id)
    length = context + steps * rows
    tokens = np.random.default_rng(11).integers(0, config.vocab_size, (batch, length)).astype(np.int32)
    tables = ours.tables(batch, context, length)
    for one, table in zip(tokens, tables, strict=True):
        _prefill(ours, one[None, :context], table[None])
    batches = [
        _all_rows(ours.step(tokens[:, at : at + rows], at, tables), _FULL) for at in range(context, length, rows)
    ]
    ours.make_ready(batches[0])
    logits, chosen = _run(ours, batches, cell)
    found = {"logits": logits, "kv": _last_kv(ours, tables, length - 1), **_buffers(ours, batch * rows)}
    ids = torch.from_numpy(tokens).long().to(weights.embedding.device)
    exact, plain = (traced(config, weights, ids, steps * rows, dtype) for dtype in (torch.float32, torch.bfloat16))
    errors = _errors(found, exact, plain, rows)
    result = {**_named(cell), "errors": errors, **_argmax(chosen, exact, plain)}
    is_right = all(row["error"] <= row["limit"] for row in errors.values()) and not result["wrong_tokens"]
    return {**result, "status": "ok" if is_right else "WRONG"}


def _prefill(ours: Ours, tokens: Int32Array, table: Int32Array) -> None:
    none = np.empty(0, np.int32)
    ours.executor.run(replace(ours.step(tokens, 0, table), output_rows=none, output_specs=(), histories=()))


def _all_rows(step: StepBatch, spec: OutputSpec) -> StepBatch:
    count = step.num_rows
    rows = np.arange(count, dtype=np.int32)
    return replace(step, output_rows=rows, output_specs=(spec,) * count, histories=(None,) * count)


def _run(ours: Ours, batches: Sequence[StepBatch], cell: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return logits [batch, tokens, vocab_size] and the tokens that greedy steps over the same rows choose."""
    logits, chosen = [], []
    for step in batches:
        greedy = ours.executor.run(_all_rows(step, GREEDY)).rows
        chosen.append([-1 if row.token is None else row.token for row in greedy])
        logits.append(np.stack([_given(row.logits) for row in ours.executor.run(step).rows]))
    batch, _, steps, rows = cell
    values = torch.from_numpy(np.stack(logits)).view(steps, batch, rows, -1).transpose(0, 1).flatten(1, 2)
    tokens = torch.tensor(chosen).view(steps, batch, rows).transpose(0, 1).flatten(1, 2)
    return values, tokens


def _given(logits: Any) -> Any:
    if logits is None:
        raise NotReady("a row was not finite")
    return logits


def _buffers(ours: Ours, num_rows: int) -> dict[str, Tensor]:
    """Return what the last step left in the runner's buffers; nothing where torch serves."""
    runner = getattr(ours.executor, "runner", None)
    if runner is None:
        return {}
    return {name: getattr(runner.buffers, name)[:num_rows] for name in ("qkv", "attended", "gated", "hidden")}


def _last_kv(ours: Ours, tables: Int32Array, position: int) -> Tensor:
    """Return K and V at one position of every sequence: [layers, 2, batch, num_kv_heads, head_dim]."""
    info = ours.executor.info
    model, size = info.model.config, info.block_size
    raw = torch.from_numpy(ours.executor.read_blocks(np.ascontiguousarray(tables[:, position // size])))
    blocks = raw.view(torch.bfloat16).view(len(tables), model.num_layers, 2, model.num_kv_heads, size, model.head_dim)
    return blocks[:, :, :, :, position % size].permute(1, 2, 0, 3, 4)


def _errors(found: dict[str, Tensor], exact: Trace, plain: Trace, rows: int) -> dict[str, Row]:
    """Return by buffer how far ours is from float32, and how far it may be."""
    errors = {}
    for name, ours in found.items():
        pair = [_of(trace, name, rows) for trace in (exact, plain)]
        limit = _TIMES_TORCH * relative(pair[1], pair[0]) + _MORE
        errors[name] = {"error": round(relative(ours, pair[0]), 6), "limit": round(limit, 6)}
    return errors


def _of(trace: Trace, name: str, rows: int) -> Tensor:
    """Return what a trace says of a buffer, of the rows that ours has there: those of the last step."""
    if name == "logits":
        return trace.logits
    if name == "kv":
        return trace.kv[:, :, :, -1]
    return trace.buffers[name][:, -rows:].flatten(0, 1)


def relative(values: Tensor, exact: Tensor) -> float:
    """Return the norm of the difference over the norm; anything that is not finite is infinitely far."""
    wide, exact = values.to("cpu", torch.float64).flatten(), exact.to("cpu", torch.float64).flatten()
    error = float((wide - exact).norm() / exact.norm())
    return error if error == error else float("inf")  # noqa: PLR0124  (NaN)


def _argmax(chosen: Tensor, exact: Trace, plain: Trace) -> Row:
    """Return how many tokens the reference decides beyond bfloat16's error, and how many of ours differ there."""
    best = exact.logits.topk(2, -1)
    moved = (plain.logits - exact.logits).abs().amax(-1)
    is_decided = (best.values[..., 0] - best.values[..., 1] > 2 * moved).cpu()
    differs = best.indices[..., 0].cpu() != chosen
    return {
        "tokens": differs.numel(),
        "decided": int(is_decided.sum()),
        "wrong_tokens": int((is_decided & differs).sum()),
        "other_tokens": int(differs.sum()),
    }
