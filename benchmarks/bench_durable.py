"""What durable handles cost: latency and throughput of appends, bytes on the disk, and a restart.

One server with a journal serves NONE and JOURNALED sequences in turns, so both meet the same machine:

* ``append``: one client, one Decode after the other; the time of each call.
* ``throughput``: one StreamDecode with 16 sequences; tokens per second.
* ``bytes``: what the journal wrote for each token, for a greedy policy and for a draw with its log-probability.
* ``restart``: kill -9 with one sequence of 1 000 tokens, then the time until the next server is ready, and from then
  until the handle answers an append; the same start without a journal beside it.
* ``replay``: 100 000 sequences of 500 tokens, read from a journal of their own (``--replay``).

Usage: python benchmarks/bench_durable.py [--model demo|FOLDER] [--rounds 10] [--calls 100] [--replay 100000]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import secrets
import statistics
import tempfile
import time
from array import array
from pathlib import Path

from benchmarks.child_server import server_process
from ferrule import Client, Policy, greedy, sample
from ferrule.types import Append, Durability, Prompt
from ferrule_server.durability.directory import DurableDirectory, Wanted
from ferrule_server.durability.files import Files
from ferrule_server.durability.reader import read_directory
from ferrule_server.durability.records import Encoder, SequenceState
from ferrule_server.durability.writer import JournalWriter

LEVELS: tuple[Durability, ...] = ("none", "journaled")
WIDTH = 16


def bench_append(clients: dict[Durability, Client], rounds: int, calls: int) -> dict[Durability, list[float]]:
    """Return the milliseconds of each Decode, by level; the levels take turns."""
    took: dict[Durability, list[float]] = {level: [] for level in LEVELS}
    for _ in range(rounds):
        for level, client in clients.items():
            with client.prefill([1, 2, 3, 4, 5, 6, 7], policy=greedy()) as cache:
                for _ in range(calls):
                    begun = time.perf_counter()
                    cache.step()
                    took[level].append((time.perf_counter() - begun) * 1e3)
    return took


def bench_throughput(clients: dict[Durability, Client], rounds: int, calls: int) -> dict[Durability, list[float]]:
    """Return tokens per second of one stream with many sequences, by level and round."""
    rates: dict[Durability, list[float]] = {level: [] for level in LEVELS}
    for _ in range(rounds):
        for level, client in clients.items():
            with client.stream() as stream:
                caches = stream.run([Prompt([index + 1, 2, 3], policy=greedy()) for index in range(WIDTH)])
                begun = time.perf_counter()
                for _ in range(calls):
                    stream.run([Append(cache, policy=greedy()) for cache in caches])
                rates[level].append(WIDTH * calls / (time.perf_counter() - begun))
                client.release(caches)
    return rates


def bench_bytes(client: Client, journal: Path, policy: Policy, calls: int, width: int) -> float:
    """Return the bytes that a decoded token takes in the journal."""
    with client.stream() as stream:
        caches = stream.run([Prompt([index + 1, 2, 3], policy=policy) for index in range(width)])
        stream.run([Append(cache, policy=policy) for cache in caches])
        before = used_bytes(journal)
        for _ in range(calls):
            stream.run([Append(cache, policy=policy) for cache in caches])
        after = used_bytes(journal)
        client.release(caches)
    return (after - before) / (calls * width)


def used_bytes(journal: Path) -> int:
    """Return the bytes of all frames."""
    return sum(segment.used_bytes for segment in read_directory(journal, Files()).segments)


def bench_restart(model: str, folder: Path, num_tokens: int) -> dict[str, float]:
    """Return the seconds of a start without and with a journal, and until the first durable handle answers."""
    flags = ("--model", model, "--kv-memory", "256MiB")
    with server_process(*flags):
        pass  # compiled kernels and files are warm
    begun = time.perf_counter()
    with server_process(*flags):
        plain_s = time.perf_counter() - begun
    durable = (*flags, "--durable", str(folder))
    prompt = [1 + index % 200 for index in range(num_tokens)]
    with server_process(*durable) as (target, process):
        cache = Client(target).prefill(prompt, ttl=600)
        handle = cache.handle
        process.kill()
        process.wait()
    begun = time.perf_counter()
    with server_process(*durable) as (target, process):
        ready_s = time.perf_counter() - begun
        with Client(target) as client:
            resumed = client.adopt(handle)
            begun = time.perf_counter()
            resumed.append([3], policy=greedy())
            answer_s = time.perf_counter() - begun
            resumed.release()
    return {"ready_plain_s": plain_s, "ready_durable_s": ready_s, "first_answer_s": answer_s}


def bench_replay(folder: Path, num_sequences: int) -> dict[str, float]:
    """Return the seconds that reading a journal of many sequences takes, and its bytes."""
    directory = DurableDirectory.open(folder, Wanted("bench", b"f" * 16, "float32", 16))
    writer = JournalWriter(directory, on_synced=lambda _: None, on_failed=print)
    encoder = Encoder()
    writer.start_segment()
    writer.append(encoder.snapshot_begin())
    for number in range(num_sequences):
        tokens = array("I", [(number + place) % 50_000 for place in range(500)])
        state = SequenceState(number + 1, secrets.token_bytes(16), "me", 60.0, True, token_ids=tokens)
        writer.append(encoder.sequence(state))
        if number % 1000 == 0:
            writer.close_group()
    writer.append(encoder.snapshot_end())
    writer.close_group()
    writer.close()
    directory.close()
    begun = time.perf_counter()
    found = read_directory(folder, Files())
    took_s = time.perf_counter() - begun
    assert len(found.state.sequences) == num_sequences
    return {"read_s": took_s, "bytes": float(sum(segment.used_bytes for segment in found.segments))}


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--replay", type=int, default=100_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        journal = Path(root) / "journal"
        flags = ("--model", options.model, "--kv-memory", "512MiB", "--durable", str(journal))
        with server_process(*flags) as (target, _):
            clients = {level: Client(target, durability=level) for level in LEVELS}
            bench_append(clients, 1, 20)
            took = bench_append(clients, options.rounds, options.calls)
            rates = bench_throughput(clients, options.rounds, max(10, options.calls // 4))
            drawn = sample(seed=7, logprobs=True)
            sizes = {
                "greedy, 1 sequence": bench_bytes(clients["journaled"], journal, greedy(), 64, 1),
                "greedy, 16 sequences": bench_bytes(clients["journaled"], journal, greedy(), 64, WIDTH),
                "drawn with log-probability, 1 sequence": bench_bytes(clients["journaled"], journal, drawn, 64, 1),
                "drawn with log-probability, 16 sequences": bench_bytes(
                    clients["journaled"], journal, drawn, 64, WIDTH
                ),
            }
            for client in clients.values():
                client.close()
        restart = bench_restart(options.model, Path(root) / "restart", 1000)
        replay = bench_replay(Path(root) / "replay", options.replay)
    medians = {level: statistics.median(values) for level, values in took.items()}
    speeds = {level: statistics.median(values) for level, values in rates.items()}
    print(
        f"append      none {medians['none']:.2f} ms, journaled {medians['journaled']:.2f} ms, "
        f"ratio {medians['journaled'] / medians['none']:.3f}"
    )
    print(
        f"throughput  none {speeds['none']:.0f} tok/s, journaled {speeds['journaled']:.0f} tok/s, "
        f"ratio {speeds['journaled'] / speeds['none']:.3f}"
    )
    for what, size in sizes.items():
        print(f"bytes       {what}: {size:.1f} for each token")
    print(
        f"restart     ready {restart['ready_plain_s']:.2f} s without a journal, "
        f"{restart['ready_durable_s']:.2f} s with one; "
        f"first answer of a handle of 1 000 tokens {restart['first_answer_s']:.2f} s later"
    )
    print(
        f"replay      {options.replay} sequences of 500 tokens: {replay['read_s']:.2f} s, "
        f"{replay['bytes'] / 1e6:.0f} MB"
    )
    figures = {
        "append_ms": medians,
        "tokens_per_s": speeds,
        "bytes_per_token": sizes,
        **restart,
        **replay,
        "model": options.model,
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
