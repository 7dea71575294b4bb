"""What the wire takes from Generate: tokens/s through gRPC over those of the same engine in process.

Sequences of 128 tokens are prefilled first, then tokens are drawn greedily after each: as one Generate per sequence,
all at once, and with one Generate of as many branches. The rate is that of the time in which all sequences are being
continued: from the first token of the last one to the last token of the first that ends. In each round both sides are
started, measured and ended one after the other, in another order each time, so that each has the machine alone; the
ratio is taken by round. The median step of each side, as its frames report it, shows what part of a difference is not
the wire: weights lie elsewhere in memory after each start, and the read rate of memory changes within minutes.

    python benchmarks/bench_generate.py [FOLDER ...] [--rounds 6] [--tokens 256]

Without a folder, the bundled model: its step is so short that it shows what all else costs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from child_server import server  # type: ignore[import-not-found]  # beside this script, not a package
from in_process import PRINCIPAL, Inbox, InProcess, append_job, in_process, load_executor  # type: ignore[import-not-found]

from ferrule.v1 import cache_pb2, executor_pb2, executor_pb2_grpc, policy_pb2, types_pb2
from ferrule_server.model.config_reader import read_config

PROMPT_TOKENS = 128
SIZES = (1, 16)
KV_BYTES = 1 << 30
Pair = dict[str, list[float]]


class Arrivals:
    """When tokens of several sequences came.

    Args:
        size: Sequences. num_tokens: of each.
    """

    def __init__(self, size: int, num_tokens: int) -> None:
        self._size = size
        self._num_tokens = num_tokens
        self._times: dict[tuple[int, int], list[float]] = {}
        self._run_ns: list[float] = []

    def add(self, sequence: tuple[int, int], count: int, run_ns: int) -> None:
        """Take ``count`` tokens of a sequence that have just come, drawn in steps of ``run_ns`` in all."""
        self._times.setdefault(sequence, []).extend([time.perf_counter()] * count)
        self._run_ns += [run_ns / count] * count if count else []

    def rate(self) -> float:
        """Return tokens/s while all sequences are being continued."""
        counts = {len(times) for times in self._times.values()}
        if len(self._times) != self._size or counts != {self._num_tokens}:
            raise RuntimeError(f"{len(self._times)} sequences of {counts} tokens came")
        begin = max(times[0] for times in self._times.values())
        end = min(times[-1] for times in self._times.values())
        count = sum(begin < at <= end for times in self._times.values() for at in times)
        return count / (end - begin)

    def step_ms(self) -> float:
        """Return the median of what a token's step took."""
        return statistics.median(self._run_ns) * 1e-6


def main() -> None:
    """Compare on each model, print a table and one JSON line per model."""
    args = _parse_arguments()
    for folder in args.folders:
        rates: dict[str, Pair] = {}
        sides = [_measure_in_process, _measure_grpc]
        for round_ in range(args.rounds):
            for measure in sides if round_ % 2 == 0 else reversed(sides):
                measure(folder, round_, args.tokens, rates)
        report = {**_environment(args), "model": folder.name, "figures": _figures(rates)}
        _print_table(report)
        print(json.dumps(report), flush=True)


def _parse_arguments() -> argparse.Namespace:
    demo = Path(__file__).parents[1] / "server" / "ferrule_server" / "demo_model"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="*", default=[demo])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=256)
    return parser.parse_args()


def _measure_in_process(folder: Path, round_: int, num_tokens: int, rates: dict[str, Pair]) -> None:
    """Add the rate and the step of each figure on an engine of this process."""
    vocab_size = read_config(folder).vocab_size
    with in_process(load_executor(folder, kv_bytes=KV_BYTES, max_context=2048)) as engine:
        for name, size, prompts, is_warm in _samples(vocab_size, round_):
            rate, step_ms = _run_in_process(engine, prompts, size, num_tokens)
            if is_warm:
                _add(rates, name, {"in process": rate, "step": step_ms})


def _measure_grpc(folder: Path, round_: int, num_tokens: int, rates: dict[str, Pair]) -> None:
    """Add the rate and the step of each figure on a server."""
    vocab_size = read_config(folder).vocab_size

    async def measure(target: str) -> None:
        async with grpc.aio.insecure_channel(target) as channel:
            stub = executor_pb2_grpc.ModelExecutorServiceStub(channel)
            for name, size, prompts, is_warm in _samples(vocab_size, round_):
                rate, step_ms = await _run_grpc(stub, prompts, size, num_tokens)
                if is_warm:
                    _add(rates, name, {"gRPC": rate, "gRPC step": step_ms})

    with server("--model", str(folder), "--kv-memory", f"{KV_BYTES >> 30}GiB") as target:
        asyncio.run(measure(target))


def _add(rates: dict[str, Pair], name: str, values: dict[str, float]) -> None:
    for side, value in values.items():
        rates.setdefault(name, {}).setdefault(side, []).append(value)


def _samples(vocab_size: int, round_: int) -> Iterator[tuple[str, int, list[list[int]], bool]]:
    """Yield name, sequences and prompts of each figure, twice: the first sample warms up."""
    for is_warm in (False, True):
        for size in SIZES:
            for is_branching in (False, True) if size > 1 else (False,):
                name = f"{size} {'branches' if is_branching else 'sequences'}"
                random = np.random.default_rng((round_, size, is_branching, is_warm))
                num_prompts = 1 if is_branching else size
                yield name, size, random.integers(0, vocab_size, (num_prompts, PROMPT_TOKENS)).tolist(), is_warm


def _run_in_process(engine: InProcess, prompts: list[list[int]], size: int, num_tokens: int) -> tuple[float, float]:
    """Draw on the engine of this process; tokens/s and mean step in ms."""
    from ferrule_server.engine.jobs import (
        BranchFrame,
        GenerateFrame,
        GenerateJob,
        Job,
        OutputRequest,
        StopRules,
        Window,
    )
    from ferrule_server.executor.base import OutputSpec

    inbox = Inbox()
    jobs: list[Job[object]] = [
        GenerateJob(
            PRINCIPAL,
            tuple(prompt),
            None,
            OutputRequest(OutputSpec(greedy=True)),
            StopRules(max_tokens=num_tokens),
            Window(1 << 30),
            num_branches=size // len(prompts),
        )
        for prompt in prompts
    ]
    prefills = engine.append([append_job(prompt, None, None) for prompt in prompts])
    engine.release([prefill.handle for prefill in prefills])  # their blocks are found again, so that all begin at once
    arrivals = Arrivals(size, num_tokens)
    engine.engine.submit([(job, inbox) for job in jobs])
    num_left = len(jobs)
    newest: dict[tuple[int, int], BranchFrame] = {}
    while num_left:
        job, outcome = inbox.outcomes.get()
        if not isinstance(outcome, GenerateFrame):
            raise TypeError(f"{outcome!r}")
        for branch in outcome.branches:
            arrivals.add((id(job), branch.index), len(branch.rows), outcome.timing.run_ns)
            newest[id(job), branch.index] = branch
        num_left -= outcome.is_last
    handles = tuple(branch.handle for branch in newest.values() if branch.handle is not None)
    engine.release(handles)
    return arrivals.rate(), arrivals.step_ms()


async def _run_grpc(
    stub: executor_pb2_grpc.ModelExecutorServiceAsyncStub, prompts: list[list[int]], size: int, num_tokens: int
) -> tuple[float, float]:
    """Draw through the service; tokens/s and mean step in ms."""
    handles: dict[tuple[int, int], types_pb2.KvCacheHandle] = {}
    policy = policy_pb2.LogitsReturnPolicy(greedy_argmax=policy_pb2.GreedyArgmax())

    none = policy_pb2.LogitsReturnPolicy()
    inputs = [executor_pb2.PrefillInput(input_ids=prompt, logits_policy=none) for prompt in prompts]
    prefilled = await stub.BatchPrefill(executor_pb2.BatchPrefillRequest(inputs=inputs))
    made = [result.output.kv_cache for result in prefilled.results]
    await stub.ReleaseCache(cache_pb2.ReleaseCacheRequest(kv_caches=made))
    arrivals = Arrivals(size, num_tokens)

    async def draw(index: int, prompt: list[int]) -> None:
        request = executor_pb2.GenerateRequest(
            input_ids=prompt,
            logits_policy=policy,
            max_tokens=num_tokens,
            n=size // len(prompts),
            ignore_eos=True,
        )
        async for reply in stub.Generate(request):
            for output in reply.outputs:
                arrivals.add((index, output.index), len(output.outputs.tokens), reply.timing.run_ns)
                handles[index, output.index] = output.resume_from

    await asyncio.gather(*(draw(index, prompt) for index, prompt in enumerate(prompts)))
    await stub.ReleaseCache(cache_pb2.ReleaseCacheRequest(kv_caches=handles.values()))
    return arrivals.rate(), arrivals.step_ms()


def _figures(rates: dict[str, Pair]) -> dict[str, dict[str, Any]]:
    return {
        name: {
            **{side: _summary(values) for side, values in pair.items()},
            "ratio": _summary([b / a for a, b in zip(pair["in process"], pair["gRPC"], strict=True)]),
        }
        for name, pair in rates.items()
    }


def _summary(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def _environment(args: argparse.Namespace) -> dict[str, Any]:
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "commit": git.stdout.strip(),
        "date": datetime.now(UTC).date().isoformat(),
        "tokens": args.tokens,
        "python": platform.python_version(),
        "grpcio": grpc.__version__,
        "load": f"{os.getloadavg()[0]:.1f}",
    }


def _print_table(report: dict[str, Any]) -> None:
    print(f"{report['model']}, commit {report['commit']}: tokens/s after {PROMPT_TOKENS} tokens of context")
    print(f"  {'':<14} {'in process':>22} {'gRPC':>22} {'ratio':>20} {'steps, ms':>14}")
    for name, row in report["figures"].items():
        cells = [
            f"{row[key]['median']:{form}} ({row[key]['min']:{form}}-{row[key]['max']:{form}})"
            for key, form in (("in process", ".1f"), ("gRPC", ".1f"), ("ratio", ".3f"))
        ]
        steps = f"{row['step']['median']:.1f} / {row['gRPC step']['median']:.1f}"
        print(f"  {name:<14} {cells[0]:>22} {cells[1]:>22} {cells[2]:>20} {steps:>14}")


if __name__ == "__main__":
    main()
