"""What running rows together brings, and what it costs the neighbours: batches, verify, policies, prefix hits, forks.

In process, through the engine as the service drives it (judged, reserved, batched, committed), so that every figure is
what a client gets but for the wire. Sides of a ratio alternate within each round; medians over rounds with the spread.

    prefill     8 prompts of 8 tokens in one BatchPrefill, and one after the other
    verify      4 and 8 drafts behind one certain token in one ForwardVerify (5 and 9 rows), and one decode
    policies    16 decodes, all argmax, and one of them with full logits
    prefix hit  a prompt of 1024 tokens for the first time, and again
    fork        64 branches of a sequence of 8192 tokens, 16 at a time: time on the host, blocks copied by the device

    python benchmarks/bench_batch.py [FOLDER] [--rounds 7] [--dtype bfloat16] [--wait-policy PASSIVE]

Without a folder, the bundled model. ``benchmarks/make_random_model.py`` writes one in the shape of Qwen3-0.6B.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from in_process import (  # type: ignore[import-not-found]  # beside this script, not a package
    PRINCIPAL,
    InProcess,
    append_job,
    in_process,
    load_executor,
)

if TYPE_CHECKING:
    from ferrule_server.kv.handle import Handle

CONTEXT = 128
HIT_TOKENS = 1024
FORK_TOKENS = 8192
NUM_BRANCHES = 64
FORKS_AT_ONCE = 16
Sample = dict[str, float]


def main() -> None:
    """Run every part and print a table, then one JSON line."""
    args = _parse_arguments()
    os.environ["OMP_WAIT_POLICY"] = args.wait_policy  # OpenMP reads it once, when torch is imported
    executor = load_executor(args.folder, kv_bytes=1 << 30, max_context=4096, dtype=args.dtype)
    parts: list[Callable[[InProcess, np.random.Generator], Sample]] = [_prefills, _verifies, _policies, _hits]
    seconds: dict[str, list[float]] = {}
    with in_process(executor) as engine:
        for round_ in range(args.rounds + 1):
            for index, part in enumerate(parts):
                for name, value in part(engine, np.random.default_rng((round_, index))).items():
                    seconds.setdefault(name, [])
                    seconds[name] += [value] if round_ else []  # the first round warms up
    figures = {**{name: _summary(values) for name, values in seconds.items()}, **_forks(args.rounds)}
    report = {**_environment(args), "seconds": figures, "ratios": _ratios(seconds)}
    _print_table(report)
    print(json.dumps(report), flush=True)


def _parse_arguments() -> argparse.Namespace:
    demo = Path(__file__).parents[1] / "server" / "ferrule_server" / "demo_model"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=demo)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--wait-policy", choices=("PASSIVE", "ACTIVE"), default="PASSIVE")
    return parser.parse_args()


def _prompt(random: np.random.Generator, engine: InProcess, length: int) -> tuple[int, ...]:
    vocab_size = engine.engine.info.model.config.vocab_size
    return tuple(random.integers(0, vocab_size, length).tolist())


def _prefills(engine: InProcess, random: np.random.Generator) -> Sample:
    """8 prompts of 8 tokens together, then 8 others one after the other."""
    from ferrule_server.executor.base import OutputSpec

    greedy = OutputSpec(greedy=True)
    together, each = ([_prompt(random, engine, 8) for _ in range(8)] for _ in range(2))
    results, batch_s = engine.timed([append_job(prompt, None, greedy) for prompt in together])
    serial_s = 0.0
    for prompt in each:
        (result,), elapsed_s = engine.timed([append_job(prompt, None, greedy)])
        results.append(result)
        serial_s += elapsed_s
    engine.release([result.handle for result in results])
    return {"batch prefill 8 x 8": batch_s, "8 serial prefills": serial_s}


def _verifies(engine: InProcess, random: np.random.Generator) -> Sample:
    """One decode, a verify of 4 drafts, one of 8, all at the same length of branches of one sequence."""
    from ferrule_server.engine.jobs import Acceptance, Drafts
    from ferrule_server.executor.base import OutputSpec

    greedy = OutputSpec(greedy=True)
    (first,) = engine.append([append_job(_prompt(random, engine, CONTEXT), None, None)])
    sample: Sample = {}
    handle = first.handle
    for num_drafts in (0, 4, 8):
        tokens = _prompt(random, engine, 1 + num_drafts)
        drafts = Drafts(num_drafts, Acceptance.EXACT) if num_drafts else None
        (result,), elapsed_s = engine.timed([append_job(tokens, handle, greedy, drafts=drafts)])
        sample[f"verify {num_drafts}" if num_drafts else "decode 1"] = elapsed_s
        handle = result.handle
    engine.release([first.handle])
    return sample


def _policies(engine: InProcess, random: np.random.Generator) -> Sample:
    """16 decodes with argmax, and the same with full logits for one of them."""
    from ferrule_server.executor.base import OutputSpec

    greedy, full = OutputSpec(greedy=True), OutputSpec(full_logits=True)
    prompts = [_prompt(random, engine, CONTEXT) for _ in range(16)]
    handles = [each.handle for each in engine.append([append_job(prompt, None, None) for prompt in prompts])]
    first = list(handles)
    sample = {"16 argmax": 0.0, "15 argmax and full logits": 0.0}
    for _ in range(3):
        for name, odd_one in (("16 argmax", greedy), ("15 argmax and full logits", full)):
            specs = [odd_one, *[greedy] * 15]
            jobs = [append_job([7], handle, spec) for handle, spec in zip(handles, specs, strict=True)]
            results, elapsed_s = engine.timed(jobs)
            sample[name] += elapsed_s / 3
            handles = [each.handle for each in results]
    engine.release(first)
    return sample


def _hits(engine: InProcess, random: np.random.Generator) -> Sample:
    """A long prompt for the first time, and again."""
    from ferrule_server.executor.base import OutputSpec

    length = min(HIT_TOKENS, engine.engine.info.model.max_context)
    prompt, greedy = _prompt(random, engine, length), OutputSpec(greedy=True)
    (cold,), cold_s = engine.timed([append_job(prompt, None, greedy)])
    engine.release([cold.handle])
    (hit,), hit_s = engine.timed([append_job(prompt, None, greedy)])
    engine.release([hit.handle])
    if cold.cached_tokens or not hit.cached_tokens:
        raise RuntimeError(f"{cold.cached_tokens} tokens were found at first, {hit.cached_tokens} again")
    return {f"prefill {length} cold": cold_s, f"prefill {length} again": hit_s}


def _forks(rounds: int) -> dict[str, dict[str, float]]:
    """Seconds of the engine for 16 branches, and blocks the device was asked to copy for all 64."""
    from ferrule_server.engine.jobs import ForkJob, ForkResult
    from ferrule_server.executor.base import Int32Array
    from ferrule_server.executor.reference import PagedReferenceExecutor

    num_copied: list[int] = []

    class Counting(PagedReferenceExecutor):
        """Counts the blocks it copies."""

        def copy_blocks(self, block_pairs: Int32Array) -> None:
            """Copy whole blocks."""
            num_copied.append(len(block_pairs))
            super().copy_blocks(block_pairs)

    seconds: list[float] = []
    with in_process(Counting(max_context=FORK_TOKENS + 64)) as engine:
        prompt = _prompt(np.random.default_rng(0), engine, FORK_TOKENS - 5)  # the last block is not full
        (source,) = engine.append([append_job(prompt, None, None)])
        for _ in range(rounds):
            branches: list[Handle] = []
            for _ in range(NUM_BRANCHES // FORKS_AT_ONCE):
                job = ForkJob(PRINCIPAL, source.handle, source.handle.length, FORKS_AT_ONCE)
                started = time.perf_counter()
                (result,) = engine.run([job])
                seconds.append(time.perf_counter() - started)
                assert isinstance(result, ForkResult)
                branches += result.handles
            engine.release(branches)
    return {"16 forks of 8187 tokens": _summary(seconds), "blocks copied": _summary([float(sum(num_copied))])}


def _summary(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def _ratios(seconds: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Each ratio by round, so that a slow phase of the machine is on both sides."""
    cold = next(name for name in seconds if name.endswith("cold"))
    pairs = {
        "serial / batch prefill": ("8 serial prefills", "batch prefill 8 x 8"),
        "verify 4 / decode": ("verify 4", "decode 1"),
        "verify 8 / decode": ("verify 8", "decode 1"),
        "argmax only / one full row": ("16 argmax", "15 argmax and full logits"),
        "cold / hit": (cold, cold.replace("cold", "again")),
    }
    return {
        name: _summary([a / b for a, b in zip(seconds[over], seconds[under], strict=True)])
        for name, (over, under) in pairs.items()
    }


def _environment(args: argparse.Namespace) -> dict[str, Any]:
    import torch

    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "commit": git.stdout.strip(),
        "date": datetime.now(UTC).date().isoformat(),
        "model": args.folder.name,
        "dtype": args.dtype,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "load": f"{os.getloadavg()[0]:.1f}",
    }


def _print_table(report: dict[str, Any]) -> None:
    print(f"{report['model']} {report['dtype']}, {report['threads']} threads, commit {report['commit']}")
    for name, row in report["seconds"].items():
        unit, scale = ("", 1.0) if name == "blocks copied" else ("ms", 1e3)
        low, median, high = (row[key] * scale for key in ("min", "median", "max"))
        print(f"  {name:<28} {median:10.3f} {unit:<2}   ({low:.3f}-{high:.3f})")
    for name, row in report["ratios"].items():
        print(f"  {name:<28} {row['median']:10.2f} x    ({row['min']:.2f}-{row['max']:.2f})")


if __name__ == "__main__":
    main()
