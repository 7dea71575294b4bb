"""What a LogitsReturnPolicy costs on the wire: bytes and time of a BatchDecode for a vocabulary of 152 k.

Each policy appends the same tokens to the same number of sequences of a model that has the vocabulary of Qwen3 and next
to no layers, so that the figures are those of the output: the head, the copy, the encoding and the connection. Policies
take turns. The client is plain grpcio with a raised receive limit.

Usage: python benchmarks/bench_policies.py [--rows 1 16 64] [--rounds 7]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

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


def main() -> None:
    """Print a table, then one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
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
