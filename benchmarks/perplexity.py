"""What quantised weights cost a trained model: its perplexity on texts of yours, for each kind of weights.

    python benchmarks/perplexity.py FOLDER TEXT... [--windows 2] [--json]

The first windows of 1 024 tokens of each text are scored. A window has no context but the tokens that the tokenizer of
the model puts before a text. The matrices of a GGUF file stay as they are whatever
the kind; to quantise its numbers, save them as a folder first, with transformers.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "server")]

from benchmarks.bench_quantised import SIDES, WINDOW, run_prompt, running  # noqa: E402 - found by the path above


def main() -> None:
    """Measure every kind of weights; print a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the model")
    parser.add_argument("texts", type=Path, nargs="+", help="files in UTF-8")
    parser.add_argument("--windows", type=int, default=2, help="windows of 1 024 tokens of each text")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    args = parser.parse_args()
    begin, windows = read_windows(args.folder, args.texts, args.windows)
    records = [{"side": side, **perplexities(side, args.folder, begin, windows)} for side in SIDES]
    if not args.json:
        print("".join([f"{'':20}", *(f"{path.name:>28}" for path in args.texts)]))
        for record in records:
            print("".join([f"{record['side']:20}", *(_cell(record, records, path) for path in args.texts)]))
    sizes = {path.name: sum(map(len, windows[path.name])) for path in args.texts}
    print(json.dumps({"benchmark": "perplexity", "model": args.folder.name, "tokens": sizes, "records": records}))


def _cell(record: dict[str, Any], records: Sequence[dict[str, Any]], path: Path) -> str:
    found = record[path.name]
    return f"{found:>16.3f} ({100 * found / records[0][path.name] - 100:+8.2f} %)"


def read_windows(folder: Path, paths: Sequence[Path], num_windows: int) -> tuple[list[int], dict[str, list[list[int]]]]:
    """Return the tokens before a text, and by the name of each file the tokens of its windows."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    windows: dict[str, list[list[int]]] = {}
    for path in paths:
        ids: list[int] = tokenizer.encode(path.read_text("utf-8"), add_special_tokens=False).ids
        starts = range(0, min(len(ids), num_windows * WINDOW), WINDOW)
        windows[path.name] = [ids[start : start + WINDOW] for start in starts]
    return tokenizer.encode("").ids, windows


def perplexities(
    side: str, folder: Path, begin: Sequence[int], windows: dict[str, list[list[int]]]
) -> dict[str, float]:
    """Return the perplexity of each text; the first token of a window is scored if there are tokens before it."""
    import numpy as np

    print(f"perplexity of {side}", file=sys.stderr, flush=True)
    found: dict[str, float] = {}
    with running(side, folder, len(begin) + WINDOW) as executor:
        for name, parts in windows.items():
            losses: list[float] = []
            for part in parts:
                tokens = [*begin, *part]
                targets = tokens[max(1, len(begin)) :]
                losses += [-row.target_logprob for row in run_prompt(executor, tokens[:-1], targets)]
            found[name] = float(np.exp(np.mean(losses)))
    return found


if __name__ == "__main__":
    main()
