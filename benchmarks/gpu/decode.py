"""Decode steps: ours over the whole grid of batches and contexts, and beside a peer on the same tensors."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.gpu import models
from benchmarks.gpu.executors import device_of, fits, kv_bytes, open_executor
from benchmarks.gpu.ours import NotReady, Ours
from benchmarks.gpu.peers import CompiledPeer, GraphPeer, Peer, PeerLeftOut, PlainPeer, StaticPeer
from benchmarks.gpu.timing import Arm, Row, alternate, summary
from ferrule_server.executor.base import Float32Array
from ferrule_server.model.config import ModelConfig
from ferrule_server.model.tensors import ModelWeights

LIMIT_OF_DIFFERENCE = 0.05
"""Largest difference of two arms' logits over the largest logit: bfloat16 makes about 0.01 of it."""


def decode(task: Row) -> Iterator[Row]:
    """Yield ms per step of ours for every cell of the grid that fits the memory."""
    config = models.config_of(task["model"])
    weights = models.random_weights(task["model"], device_of(task))
    cells = [cell for cell in task["cells"] if fits(config, cell[0], sum(cell[1:]), task)]
    yield from (left_out(cell, "does not fit the memory") for cell in task["cells"] if cell not in cells)
    pool_bytes = max(kv_bytes(config, batch, context + steps) for batch, context, steps in cells)
    ours = Ours(open_executor(task, weights, pool_bytes, _longest(cells)), is_dry=bool(task["dry"]))
    yield {"status": "ok", "executor": ours.executor.info.name, "pool_bytes": pool_bytes}
    for cell in cells:
        yield from _one_cell(ours, config, cell, task["rounds"])


def _one_cell(ours: Ours, config: ModelConfig, cell: Sequence[int], num_rounds: int) -> Iterator[Row]:
    """Yield a cell with steps in flight, with branches that share the context, and step by step."""
    for extra, shares_prefix, is_pipelined in (
        ({}, False, True),
        ({"kind": "decode of branches"}, True, True),
        ({"kind": "decode in turns"}, False, False),
    ):
        if shares_prefix and cell[0] == 1:
            continue
        ours.shares_prefix, ours.is_pipelined = shares_prefix, is_pipelined
        yield from (row | extra for row in measured([ours], config, cell, num_rounds))


def against(task: Row) -> Iterator[Row]:
    """Yield ours and a peer in turns, cell by cell, and how far their logits are apart; stops while there is time."""
    config, device = models.config_of(task["model"]), device_of(task)
    weights = models.random_weights(task["model"], device)
    peer = _peer(task, weights)
    if isinstance(peer, str):
        yield {"arm": task["peer"], "status": "left out", "reason": peer}
        return
    longest_s, deadline = 0.0, time.monotonic() + task["limit_s"] - 10
    for cell in task["cells"]:
        if time.monotonic() + longest_s > deadline:
            yield left_out(cell, "the time of the part is over", peer.name)
            continue
        began = time.monotonic()
        yield from _pair(task, config, weights, peer, cell)
        longest_s = max(longest_s, time.monotonic() - began)


def _pair(task: Row, config: ModelConfig, weights: ModelWeights, peer: Peer, cell: Sequence[int]) -> Iterator[Row]:
    batch, context, steps = cell
    if not fits(config, batch, context + steps, task, copies=2):
        yield left_out(cell, "does not fit the memory", peer.name)
        return
    executor = open_executor(task, weights, kv_bytes(config, batch, context + steps), context + steps)
    ours = Ours(executor, is_dry=bool(task["dry"]))
    try:
        yield from measured([ours, peer], config, cell, task["rounds"])
    finally:
        peer.close()
        executor.close()
        del ours, executor
        free(weights.embedding.device)


def measured(arms: Sequence[Any], config: ModelConfig, cell: Sequence[int], num_rounds: int) -> Iterator[Row]:
    """Yield a row per arm of one cell: ready first, alike then, timed last."""
    batch, context, steps = cell
    ready: list[Any] = []
    for arm in arms:
        try:
            arm.prepare(batch, context, steps)
            ready.append(arm)
        except (PeerLeftOut, torch.OutOfMemoryError) as error:
            yield left_out(cell, f"{type(error).__name__}: {error}", arm.name)
        except (NotReady, RuntimeError) as error:  # a compiler of a peer may fail in many ways; the others go on
            yield {**left_out(cell, f"{type(error).__name__}: {error}", arm.name), "status": "NOT READY"}
    if not ready:
        return
    first = ready[0].first_logits()
    before = [arm.counts() if isinstance(arm, Ours) else {} for arm in ready]
    found = alternate(list[Arm](ready), steps, num_rounds)
    for arm, counted in zip(ready, before, strict=True):
        row = decode_row(config, cell, arm.name, found[arm.name])
        row |= _likeness(arm.first_logits(), first) if len(ready) > 1 else {}
        row |= _steps_of(arm, counted, steps * (num_rounds + 1))
        yield row


def decode_row(config: ModelConfig, cell: Sequence[int], arm: str, samples_ms: Sequence[float]) -> Row:
    """Return the figures of one arm: ms per step, tokens/s, bytes per second of what had to be read."""
    batch, context, steps = cell
    ms = summary(samples_ms)
    num_bytes = models.read_bytes(config, batch, context + (steps + 1) / 2)
    return {
        "kind": "decode",
        "arm": arm,
        "batch": batch,
        "context": context,
        "steps": steps,
        "ms": ms,
        "tok_s": round(1000 * batch / ms["median"], 1),
        "read_gb": round(num_bytes / 1e9, 4),
        "gbs": round(num_bytes / ms["median"] / 1e6, 2),
        "status": "ok",
    }


def left_out(cell: Sequence[int], reason: str, arm: str = "ferrule") -> Row:
    """Return the row of a cell that was not measured."""
    batch, context, _ = cell
    return {"arm": arm, "batch": batch, "context": context, "status": "left out", "reason": reason}


def _likeness(logits: Float32Array, first: Float32Array) -> Row:
    difference = float(np.abs(logits - first).max() / np.abs(first).max())
    return {"difference": round(difference, 5), "status": "ok" if difference < LIMIT_OF_DIFFERENCE else "WRONG"}


def _steps_of(arm: object, before: Row, num_steps: int) -> Row:
    """Return how our steps ran; any that was no replay of a graph is said in the status."""
    if not isinstance(arm, Ours) or not before:
        return {}
    ran = {name: count - before[name] for name, count in arm.counts().items()}
    return ran if ran["graph_steps"] >= num_steps else {**ran, "status": "NOT ALL ON GRAPHS"}


def _peer(task: Row, weights: ModelWeights) -> Peer | str:
    """Return the peer, or why there is none."""
    name, is_dry = task["peer"], bool(task["dry"])
    try:
        if name == "static":
            return StaticPeer(task["model"], weights, None if is_dry else "reduce-overhead")
        if name == "compiled":
            return CompiledPeer(task["model"], weights, None if is_dry else "max-autotune")
    except PeerLeftOut as error:
        return str(error)
    return {"graph": GraphPeer, "plain": PlainPeer}[name](task["model"], weights)


def profile(task: Row) -> Iterator[Row]:
    """Yield where the time of our steps goes on the device: kernels by name, and the gaps between them."""
    from torch.profiler import ProfilerActivity

    config, device = models.config_of(task["model"]), device_of(task)
    weights = models.random_weights(task["model"], device)
    for cell in task["cells"]:
        batch, context, steps = cell
        executor = open_executor(task, weights, kv_bytes(config, batch, context + steps), context + steps)
        ours = Ours(executor, is_dry=bool(task["dry"]))
        ours.prepare(batch, context, steps)
        activity = ProfilerActivity.CPU if task["dry"] else ProfilerActivity.CUDA
        with torch.profiler.profile(activities=[activity]) as found:
            began = time.perf_counter()
            ours.decode(steps)
            taken_s = time.perf_counter() - began
        yield {"batch": batch, "context": context, **_kernels(found, steps, taken_s), "status": "ok"}
        executor.close()
        del ours, executor
        free(device)


def _kernels(found: Any, num_steps: int, taken_s: float) -> Row:
    """Return us per step by kernel, the longest first, and what of the wall time no kernel explains."""
    times = [
        (event.key, event.count, event.self_device_time_total or event.self_cpu_time_total)
        for event in found.key_averages()
    ]
    times.sort(key=lambda one: -one[2])
    busy_us = sum(one[2] for one in times) / num_steps
    return {
        "us_per_step": round(1e6 * taken_s / num_steps, 1),
        "busy_us_per_step": round(busy_us, 1),
        "kernels": [
            {"kernel": name[:120], "per_step": round(count / num_steps, 2), "us_per_step": round(us / num_steps, 2)}
            for name, count, us in times[:30]
        ],
    }


def _longest(cells: Sequence[Sequence[int]]) -> int:
    return max(context + steps for _, context, steps in cells)


def free(device: torch.device) -> None:
    """Give memory that nothing holds any more back to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
