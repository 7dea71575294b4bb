"""Greedy texts of a GGUF file: how many are those of transformers in float32 on the numbers of the same file.

    python benchmarks/greedy_texts.py FILE.gguf [--prompts 64] [--tokens 64] [--json]

Each prompt is a short request in the chat template of the file. The oracle is transformers, which reads the file with
the package ``gguf`` and runs each prompt alone. Beside it: the kernels of the processor with the matrices packed, and
torch in float32 here. For the first token that differs, the gap between the two best logits of the oracle is shown: a
small one says that the numbers are as good as equal there, a large one that something is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "client"), str(ROOT / "protos"), str(ROOT / "server")]

from benchmarks.child_server import server  # noqa: E402 - found by the paths above

REQUESTS = (
    "Explain {} in two sentences.", "Write a short poem about {}.", "List three facts about {}.",
    "What would a child ask about {}?", "Translate into French: I like {}.", "Write a Python function about {}.",
    "Tell a story that begins with {}.", "Why do people care about {}?",
)  # fmt: skip
THINGS = ("the sea", "volcanoes", "prime numbers", "bread", "the moon", "trains", "bees", "a lost key")
SIDES = {
    "packed": ("--executor", "numba-cpu"),
    "torch float32": ("--executor", "torch", "--dtype", "float32"),
}


@dataclass(frozen=True, slots=True)
class Text:
    """What the oracle wrote: the tokens of the prompt, those behind it, and the gap of the best two logits of each."""

    prompt: list[int]
    tokens: list[int]
    gaps: list[float]


def main() -> None:
    """Compare; print a line for each side, then one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, metavar="FILE.gguf", help="the model, with a chat template")
    parser.add_argument("--prompts", type=int, default=64, help="how many, at most 64")
    parser.add_argument("--tokens", type=int, default=64, help="of each text, fewer if it ends")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    args = parser.parse_args()
    texts = list(oracle_texts(args.file, args.prompts, args.tokens))
    sides = {side: compare(args.file, flags, texts) for side, flags in SIDES.items()}
    if not args.json:
        for side, gaps in sides.items():
            largest = f", the largest gap {max(gaps):.4f}" if gaps else ""
            print(f"{side:16}{len(texts) - len(gaps)} of {len(texts)} texts are equal{largest}")
    print(json.dumps({"benchmark": "greedy_texts", "file": args.file.name, "texts": len(texts), "gaps": sides}))


def oracle_texts(path: Path, num_prompts: int, num_tokens: int) -> Iterator[Text]:
    """Yield what transformers writes behind each prompt, greedy, in float32."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    read: Any = load_gguf_checkpoint  # without types, as what it makes
    make: Any = AutoModelForCausalLM
    model = make.from_config(AutoConfig.for_model(**read(path)["config"]), dtype=torch.float32).eval()
    tensors = read(path, return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise SystemExit(f"transformers reads {path} otherwise: missing {missing}, unexpected {unexpected}")
    for prompt in prompts(path, num_prompts):
        inputs = torch.tensor([prompt])
        options: dict[str, Any] = {"do_sample": False, "max_new_tokens": num_tokens, "repetition_penalty": 1.0}
        out = model.generate(
            inputs, attention_mask=torch.ones_like(inputs), output_logits=True, return_dict_in_generate=True, **options
        )
        best = [row[0].topk(2).values.tolist() for row in out.logits]
        yield Text(prompt, out.sequences[0, len(prompt) :].tolist(), [first - second for first, second in best])
        print(".", end="", file=sys.stderr, flush=True)


def prompts(path: Path, count: int) -> list[list[int]]:
    """Return the tokens of prompts, in the chat template of a file."""
    from ferrule_server.loading import load_texts
    from ferrule_server.text.chat_template import Conversation

    tokenizer, template = load_texts(path)
    if tokenizer is None or template is None:
        raise SystemExit(f"{path} has no tokenizer or no chat template")
    requests = [request.format(thing) for thing, request in product(THINGS, REQUESTS)]
    talks = (Conversation([{"role": "user", "content": text}]) for text in islice(requests, count))
    return [tokenizer.encode_prompt(template.render(talk)) for talk in talks]


def compare(path: Path, flags: Sequence[str], texts: Sequence[Text]) -> list[float]:
    """Return the gap of the oracle where each text first differs, of those that differ."""
    from ferrule import Client, greedy

    gaps = []
    with server("--model", str(path), "--kv-memory", "256MiB", *flags) as target, Client(target) as client:
        for text in texts:
            tokens = client.generate(text.prompt, len(text.tokens), policy=greedy()).read().tokens
            pairs = zip(tokens, text.tokens, strict=False)
            found = next((index for index, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
            if found is not None:
                gaps.append(text.gaps[found])
            print(".", end="", file=sys.stderr, flush=True)
    return sorted(gaps)


if __name__ == "__main__":
    main()
