"""What a LogitsReturnPolicy costs: on the wire, or in a step of the engine.

On the wire, for a vocabulary of 152 k: bytes and time of a BatchDecode. Each policy appends the same tokens to the same
number of sequences of a model that has the vocabulary of Qwen3 and next to no layers, so that the figures are those of
the output: the head, the copy, the encoding and the connection. Policies take turns. The client is plain grpcio with a
raised receive limit.

In the engine (``--in-process``): time of a step in which all rows choose their token by the same policy, and the rate
of greedy rows that is left. Policies take turns; rows of random models are flat. A *neighbour* is a step of greedy rows
of which one returns its logits.

Usage: python benchmarks/bench_policies.py [--rows 1 16 64] [--rounds 7]
       python benchmarks/bench_policies.py --in-process demo wide-49k wide wide-262k qwen3-0.6b 270m-262k [--rows 16]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc
from child_server import server  # type: ignore[import-not-found]  # beside this script, not a package
from make_random_model import write_model  # type: ignore[import-not-found]

from ferrule.v1 import cache_pb2, executor_pb2_grpc, policy_pb2, types_pb2
from ferrule.v1 import executor_pb2 as pb

POLICIES = {
    "nothing": policy_pb2.LogitsReturnPolicy(),
    "greedy token": policy_pb2.LogitsReturnPolicy(greedy_argmax=policy_pb2.GreedyArgmax()),
    "top 20 log-probabilities": policy_pb2.LogitsReturnPolicy(top_logprobs=20),
    "logits, bfloat16": policy_pb2.LogitsReturnPolicy(
        full_logits=policy_pb2.FullLogits(dtype=types_pb2.DATA_TYPE_BFLOAT16)
    ),
    "logits, float32": policy_pb2.LogitsReturnPolicy(full_logits=policy_pb2.FullLogits()),
}
ACCEPTS = 256 << 20


@dataclass(frozen=True)
class Cost:
    """A reply of ``rows`` rows under a policy: its bytes, and the client's time of the call with its spread."""

    policy: str
    rows: int
    reply_bytes: int
    median_ms: float
    spread_ms: tuple[float, float]


def measure(stub: executor_pb2_grpc.ModelExecutorServiceStub, num_rows: int, num_rounds: int) -> list[Cost]:
    """Time a BatchDecode of ``num_rows`` sequences under each policy, in turns."""
    prompts = [pb.PrefillInput(input_ids=[row + 1, 2, 3]) for row in range(num_rows)]
    made = stub.BatchPrefill(pb.BatchPrefillRequest(inputs=prompts))
    handles = [result.output.kv_cache for result in made.results]
    samples: dict[str, list[float]] = {name: [] for name in POLICIES}
    sizes: dict[str, int] = {}
    for token in range(num_rounds + 1):
        for name, policy in POLICIES.items():
            inputs = [pb.DecodeInput(input_ids=[token], kv_cache=each, logits_policy=policy) for each in handles]
            metadata = (("ferrule-max-reply-bytes", str(ACCEPTS)),)
            started = time.perf_counter()
            reply = stub.BatchDecode(pb.BatchDecodeRequest(inputs=inputs), metadata=metadata)
            samples[name].append((time.perf_counter() - started) * 1e3)
            sizes[name] = reply.ByteSize()
            handles = [result.output.kv_cache for result in reply.results]
    stub.ReleaseCache(cache_pb2.ReleaseCacheRequest(kv_caches=handles))
    return [
        Cost(name, num_rows, sizes[name], statistics.median(times[1:]), (min(times[1:]), max(times[1:])))
        for name, times in samples.items()
    ]


def drawn_specs(vocab_size: int) -> dict[str, list[Any]]:
    """Return the specs of the first row and of all others by the name of their policy."""
    import numpy as np

    from ferrule_server.executor.base import OutputSpec, SampleSpec, Shaping, TokenMask

    is_allowed = np.random.default_rng(0).random(vocab_size) < 0.5
    mask = TokenMask(b"half of the ids.", np.packbits(is_allowed, bitorder="little"))
    greedy, drawn = OutputSpec(greedy=True), OutputSpec(sample=SampleSpec(seed=1))
    specs = {
        "greedy": greedy,
        "T=1": drawn,
        "T=0.6, min_p .05": OutputSpec(sample=SampleSpec(0.6, min_p=0.05)),
        "T=0.6, top_k 20, top_p .95": OutputSpec(sample=SampleSpec(0.6, 20, 0.95)),
        "T=1, top_p .95": OutputSpec(sample=SampleSpec(top_p=0.95)),
        "T=3, top_p .95": OutputSpec(sample=SampleSpec(3.0, top_p=0.95)),
        "T=1, repetition 1.1": OutputSpec(sample=SampleSpec(), shaping=Shaping(repetition_penalty=1.1)),
        "T=1, mask": OutputSpec(sample=SampleSpec(), shaping=Shaping(mask=mask)),
        "log-probabilities, top 20, entropy": OutputSpec(
            sample=SampleSpec(), logprobs=True, num_top_logprobs=20, entropy=True
        ),
    }
    return {name: [spec, spec] for name, spec in specs.items()} | {
        "neighbour": [OutputSpec(full_logits=True, greedy=True), greedy]
    }


def measure_steps(model: str, counts: Sequence[int], num_rounds: int) -> None:
    """Print the time of a step under each policy, and its rate as a share of that of greedy rows."""
    from benchmarks.bench_cpu import model_folder  # beside this script
    from benchmarks.in_process import append_job, in_process, load_executor

    executor = load_executor(model_folder(model), kv_bytes=1 << 30, max_context=2048)
    specs = drawn_specs(executor.info.model.config.vocab_size)
    with in_process(executor) as engine:
        for num_rows in counts:
            samples: dict[str, list[float]] = {name: [] for name in specs}
            handles = {}
            for name in specs:  # a sequence keeps its policy
                made = engine.append([append_job([row + 1, 2, 3], None, None) for row in range(num_rows)])
                handles[name] = [each.handle for each in made]
            for token in range(num_rounds + 2):
                for name, (first, other) in specs.items():
                    wanted = [first, *[other] * (num_rows - 1)]
                    jobs = [append_job([token], *pair) for pair in zip(handles[name], wanted, strict=True)]
                    results, seconds = engine.timed(jobs)
                    handles[name] = [each.handle for each in results]
                    samples[name].append(seconds * 1e3)
            engine.release([each for own in handles.values() for each in own])
            for name, times in samples.items():
                shares = sorted(a / b for a, b in zip(samples["greedy"][2:], times[2:], strict=True))
                share, median = statistics.median(shares), statistics.median(times[2:])
                low, high = shares[len(shares) // 4], shares[-1 - len(shares) // 4]
                print(f"{model:<12} {num_rows:>4}  {name:<36} {median:>9.2f} ms  {share:.3f}  ({low:.3f}-{high:.3f})")


def main() -> None:
    """Print a table, then one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--in-process", nargs="+", metavar="MODEL", help="demo, or a shape of make_random_model.py")
    arguments = parser.parse_args()
    for model in arguments.in_process or ():
        measure_steps(model, arguments.rows, arguments.rounds)
    if arguments.in_process:
        return
    costs: list[Cost] = []
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), "wide")
        with server("--model", folder) as target:
            options = [("grpc.max_receive_message_length", ACCEPTS)]
            with grpc.insecure_channel(target, options=options) as channel:
                stub = executor_pb2_grpc.ModelExecutorServiceStub(channel)
                for num_rows in arguments.rows:
                    costs += measure(stub, num_rows, arguments.rounds)
    print(f"{'policy':<26} {'rows':>5} {'bytes':>12} {'ms':>9}  spread")
    for cost in costs:
        low, high = cost.spread_ms
        print(f"{cost.policy:<26} {cost.rows:>5} {cost.reply_bytes:>12} {cost.median_ms:>9.2f}  {low:.2f}-{high:.2f}")
    about = {"python": platform.python_version(), "grpcio": grpc.__version__, "cpus": os.cpu_count()}
    print(json.dumps({"policies": [asdict(cost) for cost in costs], **about, "load": round(os.getloadavg()[0], 1)}))


if __name__ == "__main__":
    main()
