"""What operations on the KV cost: verifying drafts, forks, prompts found again, blocks moved to the host and back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from benchmarks.gpu import models
from benchmarks.gpu.executors import BLOCK_SIZE, device_of, kv_bytes, open_executor
from benchmarks.gpu.ours import Ours, check
from benchmarks.gpu.timing import Row, summary
from benchmarks.in_process import PRINCIPAL, InProcess, append_job, in_process
from ferrule_server.engine.jobs import ForkJob, ForkResult
from ferrule_server.executor.base import Executor, OutputSpec

_VERIFY_ROWS = (1, 2, 4, 8, 16)
_NUM_RUNS = 20
_FORKS = (1, 64)
_GREEDY = OutputSpec(greedy=True)


def operations(task: Row) -> Iterator[Row]:
    """Yield verify at every number of rows, transfers of blocks, forks, and a prompt again."""
    context: int = task["context"]
    config = models.config_of(task["model"])
    weights = models.random_weights(task["model"], device_of(task))
    length = context + 64
    open_one = partial(open_executor, task, weights, kv_bytes(config, 4, length), length)
    executor = open_one()
    ours = Ours(executor, is_dry=bool(task["dry"]))
    for at in task["verify_contexts"]:
        yield from _verifies(ours, at)
    yield from _transfers(executor, task["transfer_blocks"])
    executor.close()
    with in_process(open_one()) as engine:  # another one: an executor belongs to the thread that runs its steps
        prompt = tuple(np.random.default_rng(1).integers(0, config.vocab_size, context - 5).tolist())
        yield from _prompt_again(engine, prompt, task["rounds"])
        yield from _forks(engine, prompt, task["rounds"])


def _verifies(ours: Ours, context: int) -> Iterator[Row]:
    """Yield ms of one step of several rows of one sequence, and over that of one row."""
    tables = ours.tables(1, context, context + max(_VERIFY_ROWS))
    ours.fill(tables, context)
    tokens = np.arange(max(_VERIFY_ROWS), dtype=np.int32)[None]
    steps = {rows: ours.step(tokens[:, :rows], context, tables) for rows in _VERIFY_ROWS}
    for step in steps.values():
        ours.make_ready(step)
    found: dict[int, list[float]] = {rows: [] for rows in steps}
    for _ in range(_NUM_RUNS):
        for rows, step in steps.items():
            found[rows].append(_ms(lambda step=step: check(ours.executor.run(step))))  # type: ignore[misc]
    for rows, samples in found.items():
        ratios = [many / one for many, one in zip(samples, found[1], strict=True)]
        named = {"kind": "verify", "rows": rows, "context": context}
        yield {**named, "ms": summary(samples), "over_one_row": summary(ratios, 3), "status": "ok"}


def _transfers(executor: Executor, num_blocks: int) -> Iterator[Row]:
    """Yield GB/s of whole blocks read to the host and written back; what comes back must be what went."""
    count = min(num_blocks, executor.info.num_blocks - 1)
    ids = np.random.default_rng(2).permutation(executor.info.num_blocks - 1)[:count].astype(np.int32) + 1
    data = executor.read_blocks(ids)
    reads = [_ms(lambda: executor.read_blocks(ids)) for _ in range(_NUM_RUNS // 4)]
    writes = [_ms(lambda: executor.write_blocks(ids, data)) for _ in range(_NUM_RUNS // 4)]
    status = "ok" if np.array_equal(data, executor.read_blocks(ids)) else "WRONG"
    for name, samples in (("export", reads), ("import", writes)):
        rates = summary([data.nbytes / ms / 1e6 for ms in samples], 2)
        yield {"kind": "transfer", "transfer": name, "blocks": count, "gbs": rates, "status": status}


def _prompt_again(engine: InProcess, prompt: tuple[int, ...], num_rounds: int) -> Iterator[Row]:
    """Yield ms to the first token of a prompt for the first time, and again."""
    cold: list[float] = []
    again: list[float] = []
    for round_ in range(num_rounds + 1):
        fresh = ((prompt[0] + round_ + 1) % 512, *prompt[1:])
        found = []
        for times in (cold, again):
            (result,), taken_s = engine.timed([append_job(fresh, None, _GREEDY)])
            times.extend([1000 * taken_s] if round_ else [])
            engine.release([result.handle])
            found.append(result.cached_tokens)
        if found[0] or not found[1]:
            raise RuntimeError(f"{found} tokens were found, at first and again")
    ratio = summary([a / b for a, b in zip(cold, again, strict=True)], 2)
    row = {"kind": "prefix hit", "context": len(prompt), "cold_ms": summary(cold), "hit_ms": summary(again)}
    yield {**row, "cold_over_hit": ratio, "status": "ok"}


def _forks(engine: InProcess, prompt: tuple[int, ...], num_rounds: int) -> Iterator[Row]:
    """Yield ms of one and of many branches of a long sequence, all at once."""
    (source,) = engine.append([append_job(prompt, None, None)])
    for count in _FORKS:
        samples = []
        for _ in range(5 * num_rounds):
            job = ForkJob(PRINCIPAL, source.handle, source.handle.length, count)
            began = time.perf_counter()
            (made,) = engine.run([job])
            samples.append(1000 * (time.perf_counter() - began))
            assert isinstance(made, ForkResult)
            engine.release(list(made.handles))
        row = {"kind": "fork", "branches": count, "context": len(prompt), "blocks": -(-len(prompt) // BLOCK_SIZE)}
        yield {**row, "ms": summary(samples), "status": "ok"}
    engine.release([source.handle])


def _ms(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return 1000 * (time.perf_counter() - began)
