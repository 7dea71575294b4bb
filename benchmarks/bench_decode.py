"""Decode and prefill rate of the torch executor beside Hugging Face transformers, same weights, same process.

Why: whoever serves a model through handles must not pay for it in speed. Measured: greedy decode tokens/s at batch 1, 4
and 16 (128 tokens of context, 64 tokens decoded) and prefill tokens/s of 512 tokens, ours through
``TorchExecutor.run``, theirs with a static cache, sdpa and ``logits_to_keep=1``. Rounds are interleaved, the median is
shown with the spread. A child process then loads and runs ours alone: its peak RSS, less weights and pool.

    python benchmarks/bench_decode.py [FOLDER ...] [--rounds 5] [--dtype bfloat16] [--wait-policy PASSIVE]

Without a folder, the model that ships. Compare figures of one machine only; other load shows in the spread.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from ferrule_server.executor.base import StepBatch
    from ferrule_server.executor.torch import TorchExecutor

CONTEXT = 128
NUM_DECODED = 64
NUM_PREFILLED = 512
BATCHES = (1, 4, 16)
BLOCK_SIZE = 16
NUM_BLOCKS = 1 + max(max(BATCHES) * (CONTEXT + NUM_DECODED), NUM_PREFILLED) // BLOCK_SIZE

Measure = Callable[[], float]


def main() -> None:
    """Run the benchmark named on the command line and print a table and one JSON line per model."""
    args = _parse_arguments()
    os.environ["OMP_WAIT_POLICY"] = args.wait_policy  # OpenMP reads it once, when torch is imported
    if args.rss_child:
        _set_threads(args.folders[0])
        print(json.dumps(_measure_rss(args.folders[0], args.dtype)))
        return
    for folder in args.folders:
        _set_threads(folder)
        report = {**_environment(args), "model": folder.name, **_compare(folder, args.dtype, args.rounds)}
        report["memory"] = _spawn_rss_child(folder, args)
        _print_table(report)
        print(json.dumps(report), flush=True)


def _set_threads(folder: Path) -> None:
    """Let both sides use as many threads as the server would for this model."""
    import torch

    from ferrule_server.loading import suggested_threads

    weights_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    torch.set_num_threads(suggested_threads(weights_bytes, os.cpu_count() or 1))


def _parse_arguments() -> argparse.Namespace:
    demo = Path(__file__).parents[1] / "server" / "ferrule_server" / "demo_model"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="*", default=[demo])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--wait-policy", choices=("PASSIVE", "ACTIVE"), default="PASSIVE")
    parser.add_argument("--rss-child", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def _compare(folder: Path, dtype: str, rounds: int) -> dict[str, Any]:
    """Return the rates of every figure for both sides, rounds interleaved, and how far their logits are apart."""
    ours, theirs = Ours(folder, dtype), Theirs(folder, dtype)
    figures: dict[str, tuple[Measure, Measure]] = {
        f"decode b{size}": (lambda n=size: ours.decode(n), lambda n=size: theirs.decode(n))  # type: ignore[misc]
        for size in BATCHES
    }
    figures["prefill 512"] = (ours.prefill, theirs.prefill)
    rates: dict[str, dict[str, list[float]]] = {name: {"ours": [], "transformers": []} for name in figures}
    for round_ in range(rounds + 1):
        for name, (measure_ours, measure_theirs) in figures.items():
            pair = {"ours": measure_ours(), "transformers": measure_theirs()}
            for side, rate in pair.items():
                rates[name][side] += [rate] if round_ else []  # the first round warms up
    return {
        "max_relative_logit_difference": _logit_difference(ours, theirs),
        "figures": {name: {side: _summary(values) for side, values in pair.items()} for name, pair in rates.items()},
    }


def _summary(rates: list[float]) -> dict[str, float]:
    return {"median": statistics.median(rates), "min": min(rates), "max": max(rates)}


def _logit_difference(ours: Ours, theirs: Theirs) -> float:
    mine, other = ours.last_logits(), theirs.last_logits()
    return float(np.abs(mine - other).max() / np.abs(other).max())


def _prompts(num_seqs: int, length: int, vocab_size: int) -> np.ndarray:
    return np.random.default_rng(7).integers(0, vocab_size, (num_seqs, length)).astype(np.int32)


class Ours:
    """The torch executor, driven by StepBatches as the engine drives it."""

    def __init__(self, folder: Path, dtype: str) -> None:
        self.executor = _new_executor(folder, dtype)
        self.vocab_size = self.executor.info.model.config.vocab_size

    def decode(self, num_seqs: int) -> float:
        """Return decoded tokens per second over all sequences."""
        prompts = _prompts(num_seqs, CONTEXT, self.vocab_size)
        tables = _tables(num_seqs, CONTEXT + NUM_DECODED)
        tokens = [
            self.executor.run(_step(p[None], 0, t[None])).rows[0].token for p, t in zip(prompts, tables, strict=True)
        ]
        begin = time.perf_counter()
        for position in range(CONTEXT, CONTEXT + NUM_DECODED):
            rows = self.executor.run(_step(np.array(tokens, np.int32)[:, None], position, tables)).rows
            tokens = [row.token for row in rows]
        return num_seqs * NUM_DECODED / (time.perf_counter() - begin)

    def prefill(self) -> float:
        """Return prefilled tokens per second of one prompt."""
        prompt = _prompts(1, NUM_PREFILLED, self.vocab_size)
        begin = time.perf_counter()
        self.executor.run(_step(prompt, 0, _tables(1, NUM_PREFILLED)))
        return NUM_PREFILLED / (time.perf_counter() - begin)

    def last_logits(self) -> np.ndarray:
        """Return the logits after one prompt."""
        step = _step(_prompts(1, CONTEXT, self.vocab_size), 0, _tables(1, CONTEXT), is_full=True)
        logits = self.executor.run(step).rows[0].logits
        assert logits is not None
        return logits


def _new_executor(folder: Path, dtype: str) -> TorchExecutor:
    from ferrule_server.executor.block_pool import bytes_per_block
    from ferrule_server.executor.torch import TorchExecutor
    from ferrule_server.model.weights import load_model

    model = load_model(folder, dtype="float32" if dtype == "float32" else "bfloat16")
    kv_bytes = NUM_BLOCKS * bytes_per_block(model.config, BLOCK_SIZE, model.torch_dtype)
    return TorchExecutor(model, kv_memory_bytes=kv_bytes, max_context=1024, block_size=BLOCK_SIZE)


def _tables(num_seqs: int, length: int) -> np.ndarray:
    """Return block tables [num_seqs, blocks] in which no two blocks of a sequence lie side by side."""
    num_blocks = -(-length // BLOCK_SIZE)
    return 1 + np.arange(num_blocks)[None, :] * num_seqs + np.arange(num_seqs)[:, None]


def _step(tokens: np.ndarray, position: int, tables: np.ndarray, *, is_full: bool = False) -> StepBatch:
    """Return a step that appends ``tokens`` [num_seqs, count] at ``position``."""
    from ferrule_server.executor.base import OutputSpec, StepBatch

    num_seqs, count = tokens.shape
    positions = np.arange(position, position + count)
    slots = tables[:, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    return StepBatch(
        token_ids=np.ascontiguousarray(tokens.reshape(-1)),
        positions=np.tile(positions, num_seqs).astype(np.int32),
        slot_mapping=slots.reshape(-1).astype(np.int32),
        cu_seqlens_q=np.arange(num_seqs + 1, dtype=np.int32) * count,
        kv_lens=np.full(num_seqs, position + count, np.int32),
        block_tables=tables.astype(np.int32),
        output_rows=(np.arange(num_seqs, dtype=np.int32) + 1) * count - 1,
        output_specs=(OutputSpec(greedy=not is_full, full_logits=is_full),) * num_seqs,
    )


class Theirs:
    """transformers with a static cache, sdpa and only the last position's logits."""

    def __init__(self, folder: Path, dtype: str) -> None:
        import torch
        import transformers

        transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        self.torch, self.transformers = torch, transformers
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), attn_implementation="sdpa"
        )
        self.model.eval()  # type: ignore[no-untyped-call]
        self.vocab_size = self.model.config.vocab_size

    def decode(self, num_seqs: int) -> float:
        """Return decoded tokens per second over all sequences."""
        with self.torch.inference_mode():
            cache = self._new_cache(CONTEXT + NUM_DECODED)
            step = self._forward(_prompts(num_seqs, CONTEXT, self.vocab_size), cache).argmax(-1)
            begin = time.perf_counter()
            for _ in range(NUM_DECODED):
                step = self._forward(step, cache).argmax(-1)
            return num_seqs * NUM_DECODED / (time.perf_counter() - begin)

    def prefill(self) -> float:
        """Return prefilled tokens per second of one prompt."""
        with self.torch.inference_mode():
            cache = self._new_cache(NUM_PREFILLED)
            prompt = _prompts(1, NUM_PREFILLED, self.vocab_size)
            begin = time.perf_counter()
            self._forward(prompt, cache).argmax(-1)
            return NUM_PREFILLED / (time.perf_counter() - begin)

    def last_logits(self) -> np.ndarray:
        """Return the logits after one prompt."""
        with self.torch.inference_mode():
            cache = self._new_cache(CONTEXT)
            logits: np.ndarray = self._forward(_prompts(1, CONTEXT, self.vocab_size), cache)[0, -1].float().numpy()
        return logits

    def _new_cache(self, length: int) -> Any:
        return self.transformers.StaticCache(config=self.model.config, max_cache_len=length)

    def _forward(self, token_ids: Any, cache: Any) -> Any:
        ids = self.torch.as_tensor(token_ids).long()
        return self.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits


def _spawn_rss_child(folder: Path, args: argparse.Namespace) -> dict[str, float]:
    command = [sys.executable, __file__, str(folder), "--dtype", args.dtype, "--wait-policy", args.wait_policy]
    done = subprocess.run([*command, "--rss-child"], check=True, capture_output=True, text=True)
    result: dict[str, float] = json.loads(done.stdout)
    return result


def _measure_rss(folder: Path, dtype: str) -> dict[str, float]:
    """Return MiB of this process's peak RSS after loading, decoding and prefilling, and of its parts."""
    begin = time.perf_counter()
    ours = Ours(folder, dtype)
    load_s = time.perf_counter() - begin
    for size in BATCHES:
        ours.decode(size)
    ours.prefill()
    info = ours.executor.info
    peak = _peak_rss_bytes()
    weights, pool = info.model.weights_bytes, info.num_blocks * info.bytes_per_block
    parts = {"peak_rss": peak, "weights": weights, "pool": pool, "overhead": peak - weights - pool}
    return {**{f"{name}_mib": value / 2**20 for name, value in parts.items()}, "load_s": load_s}


def _peak_rss_bytes() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))


def _environment(args: argparse.Namespace) -> dict[str, Any]:
    import torch
    import transformers

    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], check=False, capture_output=True, text=True)
    return {
        "benchmark": "decode",
        "commit": commit.stdout.strip(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "load_average": os.getloadavg()[0],
        "dtype": args.dtype,
        "rounds": args.rounds,
        "omp_wait_policy": args.wait_policy,
        "num_threads": torch.get_num_threads(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }


def _print_table(report: dict[str, Any]) -> None:
    print(f"\n{report['model']}, {report['dtype']}, {report['num_threads']} threads, load {report['load_average']:.1f}")
    print(f"{'tokens/s':<14}{'ours':>24}{'transformers':>24}{'ratio':>8}")
    for name, pair in report["figures"].items():
        cells = [f"{side['median']:.1f} ({side['min']:.1f}-{side['max']:.1f})" for side in pair.values()]
        ratio = pair["ours"]["median"] / pair["transformers"]["median"]
        print(f"{name:<14}{cells[0]:>24}{cells[1]:>24}{ratio:>8.2f}")
    decode = {size: report["figures"][f"decode b{size}"]["ours"]["median"] for size in BATCHES}
    memory = report["memory"]
    print(f"batch 16 is {decode[16] / decode[1]:.1f} times batch 1 in aggregate")
    print(
        f"peak RSS {memory['peak_rss_mib']:.0f} MiB = weights {memory['weights_mib']:.0f} + pool "
        f"{memory['pool_mib']:.0f} + {memory['overhead_mib']:.0f}; loaded in {memory['load_s']:.1f} s"
    )


if __name__ == "__main__":
    main()
