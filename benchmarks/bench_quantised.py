"""What quantised weights cost in accuracy: perplexity of the bundled model, and logits of a large random one.

    python benchmarks/bench_quantised.py [--model qwen3-0.6b] [--windows 48] [--json]

Perplexity is of the text that the bundled model was not trained on (the held-out files of the standard library of this
interpreter; the split is that of the training), in windows of 1 024 tokens, each without context before it. The large
model has random weights, so its text means nothing, but its logits are sums as long as those of a real model: shown are
the error of a logit, as a share of their standard deviation, and how often the best token is the same. Everything is
beside float32 in torch.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "server")]
SIDES = ("torch-float32", "numba-cpu", "numba-cpu-int8", "numba-cpu-int8-a8", "numba-cpu-int4")
WINDOW = 1024
_NUM_POSITIONS = 256


def main() -> None:
    """Measure all sides; print two tables and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default="qwen3-0.6b", help="the large model: a shape of make_random_model.py, or a folder"
    )
    parser.add_argument("--windows", type=int, default=48, help="windows of 1 024 tokens of held-out text")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    args = parser.parse_args()
    from benchmarks.bench_cpu import model_folder

    folder = model_folder("demo")
    losses = {side: held_out_losses(side, folder, args.windows) for side in SIDES}
    logits = {side: random_logits(side, model_folder(args.model)) for side in SIDES}
    records = list(compare(losses, logits))
    if not args.json:
        print(f"{'':20}{'perplexity':>12}{'beside bf16':>14}{'logit error':>14}{'same best':>12}")
        for record in records:
            share = f"{100 * record['perplexity_ratio'] - 100:+.2f} %"
            error = f"{100 * record['logit_error']:.2f} %"
            same = f"{100 * record['same_best']:.0f} %"
            print(f"{record['side']:20}{record['perplexity']:12.3f}{share:>14}{error:>14}{same:>12}")
        print(f"{args.windows} windows of {WINDOW} tokens; logits of {args.model}, {_NUM_POSITIONS} positions")
    print(json.dumps({"benchmark": "quantised", "windows": args.windows, "model": args.model, "records": records}))


def compare(losses: dict[str, float], logits: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a record for each side."""
    import numpy as np

    exact = logits[SIDES[0]]
    for side in SIDES:
        yield {
            "side": side,
            "perplexity": float(np.exp(losses[side])),
            "perplexity_ratio": float(np.exp(losses[side] - losses["numba-cpu"])),
            "logit_error": float((logits[side] - exact).std() / exact.std()),
            "same_best": float((logits[side].argmax(1) == exact.argmax(1)).mean()),
        }


@contextmanager
def running(side: str, folder: Path, num_tokens: int) -> Iterator[Any]:
    """Yield an executor with room for one sequence of ``num_tokens``."""
    from benchmarks.cpu.sides import open_side
    from ferrule_server.executor.base import BLOCK_SIZE
    from ferrule_server.executor.block_pool import bytes_per_block
    from ferrule_server.executor.torch import TorchExecutor
    from ferrule_server.model.weights import load_model

    if side == "torch-float32":
        model = load_model(folder, dtype="float32")
        num_bytes = (2 + num_tokens // BLOCK_SIZE) * bytes_per_block(model.config, BLOCK_SIZE, model.torch_dtype)
        executor: Any = TorchExecutor(model, kv_memory_bytes=num_bytes, max_context=num_tokens)
    else:
        executor = open_side(side, folder, num_tokens, num_tokens, None).executor
    try:
        yield executor
    finally:
        executor.close()


def run_prompt(executor: Any, tokens: Sequence[int], targets: Sequence[int], *, has_logits: bool = False) -> list[Any]:
    """Return the output rows of the last tokens, those with a target: its log-probability, or the logits too."""
    from dataclasses import replace

    import numpy as np

    from benchmarks.cpu.sides import prompt_step
    from ferrule_server.executor.base import OutputSpec

    rows: list[Any] = []
    silent = len(tokens) - len(targets)
    for begin in range(0, len(tokens), 256):
        end = min(begin + 256, len(tokens))
        batch = prompt_step(np.array([tokens[begin:end]], np.int32), begin, len(tokens))
        wanted = range(max(begin, silent), end)
        specs = tuple(OutputSpec(full_logits=has_logits, target_id=targets[i - silent]) for i in wanted)
        output_rows = np.array([i - begin for i in wanted], np.int32)
        rows += executor.run(replace(batch, output_rows=output_rows, output_specs=specs)).rows
    return rows


def held_out_losses(side: str, folder: Path, num_windows: int) -> float:
    """Return the mean loss of the bundled model over held-out text, in nats per token."""
    import numpy as np
    from tokenizers import Tokenizer

    from tools.training.corpus import collect
    from tools.training.tokenizer import encode_documents

    print(f"perplexity of {side}", file=sys.stderr, flush=True)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokens = encode_documents(tokenizer, [document.text for document in collect().held_out]).astype(int)
    starts = np.linspace(0, len(tokens) - WINDOW - 1, num_windows).astype(int)
    losses: list[float] = []
    with running(side, folder, WINDOW) as executor:
        for start in starts:
            part = tokens[start : start + WINDOW + 1].tolist()
            losses += [-row.target_logprob for row in run_prompt(executor, part[:-1], part[1:])]
    return float(np.mean(losses))


def random_logits(side: str, folder: Path) -> Any:
    """Return the logits of the last positions of a random prompt."""
    import numpy as np

    from ferrule_server.model.config_reader import read_config

    print(f"logits of {side}", file=sys.stderr, flush=True)
    vocab = read_config(folder).vocab_size
    tokens = np.random.default_rng(3).integers(0, vocab, 2 * _NUM_POSITIONS).tolist()
    with running(side, folder, len(tokens)) as executor:
        rows = run_prompt(executor, tokens, tokens[_NUM_POSITIONS:], has_logits=True)
        return np.stack([row.logits for row in rows])


if __name__ == "__main__":
    main()
