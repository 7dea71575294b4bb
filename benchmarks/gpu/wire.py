"""The same steps through gRPC: a server process of its own, the sync client here; then what the wire takes of them.

Three ways to the same number of sequences in a step, each apart: one Generate of as many branches (their context is
shared, as are the blocks of the in-process figure it is held against), as many Generate calls (each read by a thread of
this process), and one StreamDecode with a packed frame per step.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu import models
from benchmarks.gpu.decode import decode_row, free, left_out, measured
from benchmarks.gpu.executors import BLOCK_SIZE, device_of, fits, kv_bytes, open_executor
from benchmarks.gpu.ours import Ours
from benchmarks.gpu.timing import Row, ms_per_step
from ferrule import Cache, Client, FerruleError, greedy
from ferrule.types import Append, Prompt, Status
from ferrule_server.executor.cuda.buckets import bucket_for, bucket_sizes
from ferrule_server.executor.cuda.buffers import Limits
from ferrule_server.model.config import ModelConfig

_READY_S = 240.0
_WARM_TOKENS = 12
_STAMP = "random-weights"
_MOST_ROWS = Limits(max_blocks=1).max_rows
"""Of a step on the server's kernels."""
_BRANCHES, _CALLS, _STREAM = "Generate, branches", "Generate, calls", "StreamDecode"


def wire(task: Row) -> Iterator[Row]:
    """Yield each cell in process, then the same cells through a server; ratios are of this part alone."""
    config = models.config_of(task["model"])
    cells = [cell for cell in task["cells"] if fits(config, cell[0], sum(cell[1:]) + BLOCK_SIZE, task)]
    yield from (left_out(cell, "does not fit the memory") for cell in task["cells"] if cell not in cells)
    weights = models.random_weights(task["model"], device_of(task))
    folder = _folder(task, weights)
    in_process: dict[tuple[str, int, int], float] = {}
    for row in _in_process(task, config, weights, cells):
        if "ms" in row:
            in_process[row["arm"], row["batch"], row["context"]] = row["ms"]["median"]
        yield row
    del weights
    free(device_of(task))
    with server(task, folder, _pool_bytes(config, cells), _longest(cells)) as target:
        for row in _through(target, config, cells, task):
            mine = in_process.get((_side(row["arm"], row["batch"]), row["batch"], row["context"]))
            loss = {"loss": round(row["ms"]["median"] / mine - 1, 4)} if mine and "ms" in row else {}
            yield row | loss


def _side(arm: str, batch: int) -> str:
    """Return which in-process figure an arm is held against: that with the same blocks."""
    return "in process, branches" if arm == _BRANCHES and batch > 1 else "in process"


def _in_process(task: Row, config: ModelConfig, weights: Any, cells: Sequence[Sequence[int]]) -> Iterator[Row]:
    executor = open_executor(task, weights, _pool_bytes(config, cells), _longest(cells))
    ours = Ours(executor, is_dry=bool(task["dry"]))
    for cell in cells:
        for ours.shares_prefix, ours.name in ((False, "in process"), (True, "in process, branches")):
            if cell[0] > 1 or not ours.shares_prefix:
                yield from (row | {"kind": "wire"} for row in measured([ours], config, cell, task["rounds"]))
    executor.close()


def _folder(task: Row, weights: Any) -> Path:
    """Return the model's folder for the server, written where it is not there yet."""
    folder = Path(task["models"], task["model"])
    if not (folder / _STAMP).exists():
        models.write_folder(task["model"], weights, folder)
        (folder / _STAMP).write_text("N(0, 0.02), seed 0\n")
    return folder


def _pool_bytes(config: ModelConfig, cells: Sequence[Sequence[int]]) -> int:
    """Return a pool for the largest cell, with the spare blocks that forks and replays need."""
    return max(kv_bytes(config, batch, context + 2 * steps + BLOCK_SIZE) for batch, context, steps in cells)


def _longest(cells: Sequence[Sequence[int]]) -> int:
    return max(context + 2 * steps + BLOCK_SIZE for _, context, steps in cells)


@contextmanager
def server(task: Row, folder: Path, pool_bytes: int, max_context: int) -> Iterator[str]:
    """Run a server of a model folder as a child; yields its address.

    Raises:
        RuntimeError: It does not become ready; with the end of its log.
    """
    log = Path(task["models"]) / "server.log"
    place = tempfile.TemporaryDirectory()  # the path of a socket must be short
    address = f"unix:{place.name}/ferrule.sock"
    command = [sys.executable, "-m", "ferrule_server", "--model", str(folder), "--listen", address]
    command += ["--kv-memory", f"{-(-pool_bytes // (1 << 20))}MiB", "--max-context", str(max_context)]
    command += ["--executor", "numba-cuda", "--dtype", "bfloat16", "--drain-grace", "0s"]
    command += ["--kernel-bundle", task["bundle"]] if task.get("bundle") else []
    with log.open("w") as lines:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=lines, text=True, env=dict(os.environ))
    watchdog = threading.Timer(_READY_S, process.kill)
    watchdog.start()
    try:
        assert process.stdout is not None
        if not process.stdout.readline().startswith("ready"):
            raise RuntimeError(f"the server did not start: {log.read_text()[-2000:]}")
        watchdog.cancel()
        yield address
    finally:
        watchdog.cancel()
        process.terminate()
        process.communicate(timeout=30)
        place.cleanup()


def _through(target: str, config: ModelConfig, cells: Sequence[Sequence[int]], task: Row) -> Iterator[Row]:
    """Yield the three ways for each cell."""
    with Client(target, timeout=300.0) as client:
        for cell in cells:
            prompts = _prompts(config, cell)
            yield from _one_way(_Branches(client, prompts[0], cell), _BRANCHES, cell, task, client)
            caches = _prefilled(client, prompts)
            yield from _one_way(_Calls(caches, cell), _CALLS, cell, task, client)
            yield from _one_way(_Frames(client, caches, cell), _STREAM, cell, task, client)
            client.release(caches)


def _one_way(way: _Way, arm: str, cell: Sequence[int], task: Row, client: Client) -> Iterator[Row]:
    """Yield ms per step of one way, its graphs captured before."""
    ready = _make_ready(client, way, cell[0], is_dry=bool(task["dry"]))
    if ready:
        yield left_out(cell, ready, arm)
        return
    before = client.status()
    samples = [ms_per_step(way(cell[2])) for _ in range(task["rounds"])]
    ran = _steps_between(before, client.status())
    row = {**decode_row(models.config_of(task["model"]), cell, arm, samples), "kind": "wire", **ran}
    num_prompt_steps = _prompt_steps(cell[1], client) if arm == _BRANCHES else 0
    if not task["dry"] and not _are_on_graphs(ran, task["rounds"] * cell[2], task["rounds"] * num_prompt_steps):
        row["status"] = "NOT ALL ON GRAPHS"
    yield row


def _steps_between(before: Status, after: Status) -> Row:
    """Return how steps ran between two looks."""
    names = ("graph_steps", "launched_steps", "torch_steps", "queued_steps")
    return {name: int(after.debug.get(name, 0)) - int(before.debug.get(name, 0)) for name in names}


def _prompt_steps(context: int, client: Client) -> int:
    """Return the most steps of a prompt that are no decodes: its pieces, what cached blocks leave of it, the fork."""
    return -(-context // client.capabilities().max_step_rows) + 2


def _are_on_graphs(ran: Row, num_decodes: int, most_others: int) -> bool:
    """Whether every decode was a replay: so many at least, and no more of other steps than prompts account for."""
    return bool(ran["graph_steps"] >= num_decodes and ran["launched_steps"] + ran["torch_steps"] <= most_others)


_Way = Callable[[int], list[list[float]]]
"""Decodes so many steps behind the context and returns when each token of each sequence came."""


def _make_ready(client: Client, way: _Way, batch: int, *, is_dry: bool) -> str:
    """Warm up and decode until the server has a graph for the batch; returns why it will not.

    Smaller steps are warmed up too: sequences that begin one after the other are in some.
    """
    if is_dry:
        way(_WARM_TOKENS)
        return ""
    deadline, wanted = time.monotonic() + _READY_S, bucket_for(batch, _MOST_ROWS)
    try:
        client.admin.warmup([size for size in bucket_sizes(_MOST_ROWS) if size <= wanted], timeout=_READY_S)
    except FerruleError as error:
        return str(error)
    while True:
        way(_WARM_TOKENS)
        status = client.status()
        if _has_graph(status, wanted):
            return ""
        if status.fallback_reason or time.monotonic() > deadline:
            preparation = status.debug.get("preparation")
            return status.fallback_reason or f"no graph for {batch} rows: {preparation or status}"
        time.sleep(0.2)


def _has_graph(status: Status, num_rows: int) -> bool:
    """Whether a bucket has its graph, and none is to be captured any more."""
    captured = status.debug.get("captured_batch_sizes", "").split(",")
    return str(num_rows) in captured and "preparation" not in status.debug


class _Branches:
    """One Generate with as many branches as the batch has sequences."""

    def __init__(self, client: Client, prompt: list[int], cell: Sequence[int]) -> None:
        self._client, self._prompt, self._batch = client, prompt, cell[0]

    def __call__(self, num_steps: int) -> list[list[float]]:
        times: list[list[float]] = [[] for _ in range(self._batch)]
        made = self._client.generate(
            self._prompt, num_steps + 1, n=self._batch, ignore_eos=True, policy=greedy(), text=False
        )
        for token in made:
            times[token.index].append(time.perf_counter())
        return times


class _Calls:
    """One Generate per sequence, each read by a thread."""

    def __init__(self, caches: Sequence[Cache], cell: Sequence[int]) -> None:
        self._caches, self._context = caches, cell[1]

    def __call__(self, num_steps: int) -> list[list[float]]:
        times: list[list[float]] = [[] for _ in self._caches]
        readers = [
            threading.Thread(target=self._read, args=(cache, num_steps + 1, one))
            for cache, one in zip(self._caches, times, strict=True)
        ]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        for cache in self._caches:
            cache.truncate(self._context)
        return times

    def _read(self, cache: Cache, num_tokens: int, times: list[float]) -> None:
        for _ in cache.generate(num_tokens, tokens=[7], ignore_eos=True, policy=greedy()):
            times.append(time.perf_counter())  # noqa: PERF401  (the time of each is what is wanted)


class _Frames:
    """One stream, all sequences in each frame; the token that one frame chooses is pending and goes into the next."""

    def __init__(self, client: Client, caches: Sequence[Cache], cell: Sequence[int]) -> None:
        self._client, self._caches, self._context = client, caches, cell[1]

    def __call__(self, num_steps: int) -> list[list[float]]:
        arrivals = []
        tokens: Sequence[int] = [7]
        with self._client.stream() as stream:
            for _ in range(num_steps + 1):
                stream.run([Append(cache, tokens, greedy()) for cache in self._caches])
                arrivals.append(time.perf_counter())
                tokens = ()
        for cache in self._caches:
            cache.truncate(self._context)
        return [arrivals] * len(self._caches)


def _prompts(config: ModelConfig, cell: Sequence[int]) -> list[list[int]]:
    batch, context, _ = cell
    prompts: list[list[int]] = np.random.default_rng(9).integers(0, config.vocab_size, (batch, context)).tolist()
    return prompts


def _prefilled(client: Client, prompts: Sequence[list[int]]) -> list[Cache]:
    """Return a cache for every prompt, a frame for as many at a time as one step may hold."""
    most = client.capabilities().max_batch_size
    caches: list[Cache] = []
    with client.stream() as stream:
        for begin in range(0, len(prompts), most):
            caches += stream.run([Prompt(prompt, ttl=3600.0) for prompt in prompts[begin : begin + most]])
    return caches
