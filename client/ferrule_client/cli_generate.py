"""``ferrule generate``: a prompt in, text out as it is drawn."""

from __future__ import annotations

import argparse
import sys
import time

from ferrule_client._check import token_list
from ferrule_client.cache import Cache
from ferrule_client.cli_common import (
    CommandError,
    add_connection_options,
    connect,
    ending_in_order,
    number,
    print_json,
    wait_for_model,
)
from ferrule_client.client import Client
from ferrule_client.errors import TokenOutOfVocabError
from ferrule_client.generation import Generation, TextGeneration
from ferrule_client.policy import no_output

__all__ = ["EXAMPLES", "add_options", "run"]

EXAMPLES = """\
examples:
  ferrule generate "def read_file(path):"
  ferrule generate --temperature 0 --max-tokens 40 "import os"
  cat prompt.txt | ferrule generate --seed 7        the same seed draws the same text
  ferrule generate --json "class Queue:" | jq -r .text
  ferrule generate --ids "1 2 3"                    token ids, for a model without a tokenizer
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="the text to go on from (default: standard input)")
    parser.add_argument("--max-tokens", type=number(int, 1), default=64, metavar="N", help="most tokens to draw (64)")
    parser.add_argument(
        "--temperature", type=number(float, 0), default=0.7, metavar="T", help="0 is greedy, 1 as the model is (0.7)"
    )
    parser.add_argument("--top-k", type=number(int, 0), metavar="K", help="draw from the K most likely tokens")
    parser.add_argument(
        "--top-p", type=number(float, 0, 1, above_low=True), metavar="P", help="draw from the tokens that make up P"
    )
    parser.add_argument(
        "--min-p", type=number(float, 0, 1), metavar="P", help="draw from tokens at least P times the most likely one"
    )
    parser.add_argument("--seed", type=number(int, 0, 2**64 - 1), metavar="S", help="seed of the draws (random)")
    parser.add_argument("--ids", action="store_true", help="PROMPT and output are token ids, separated by spaces")
    add_connection_options(parser)


def run(args: argparse.Namespace) -> int:
    """Stream the continuation of a prompt to standard output and return 0.

    Raises:
        CommandError: There is no prompt, or it is not what ``--ids`` promises.
        ExecutorError: A call failed.
    """
    prompt = _read_prompt(args)
    ids = _parse_ids(prompt) if args.ids else []
    with ending_in_order(), connect(args) as client:
        wait_for_model(client, args)
        ids = ids or _encode(client, prompt)
        start = time.perf_counter()
        with _prefill(client, ids) as cache:
            prefill_s = time.perf_counter() - start
            loop, text, loop_s = _stream(cache, args)
    if args.json:
        print_json(
            {
                "text": text,
                "tokens": loop.tokens,
                "finish_reason": loop.finish_reason,
                "seed": _seed(loop),
                "num_prompt_tokens": len(ids),
                "prefill_ms": round(1e3 * prefill_s, 3),
                "tokens_per_s": round(len(loop.tokens) / loop_s, 1),
            }
        )
    else:
        _print_footer(loop, loop_s)
    return 0


def _read_prompt(args: argparse.Namespace) -> str:
    if args.prompt is not None and args.prompt != "-":
        prompt = str(args.prompt)
    elif sys.stdin.isatty():
        raise _misuse("give a PROMPT, or pipe one in", "PROMPT_MISSING")
    else:
        prompt = _read_stdin()
    if not prompt or (args.ids and not prompt.replace(",", " ").split()):
        raise _misuse("the prompt is empty", "PROMPT_EMPTY")
    if any("\ud800" <= character <= "\udfff" for character in prompt):  # so Python keeps bytes that are no text
        raise _misuse("the prompt is no text in UTF-8", "PROMPT_NOT_TEXT")
    return prompt


def _read_stdin() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise _misuse(f"the prompt is no text in {error.encoding.upper()}", "PROMPT_NOT_TEXT") from None


def _misuse(text: str, reason: str) -> CommandError:
    return CommandError(text, reason, exit_code=2)


def _prefill(client: Client, ids: list[int]) -> Cache:
    try:
        return client.prefill(ids, policy=no_output())
    except TokenOutOfVocabError as error:
        token, size = (error.metadata.get(name, "?") for name in ("token_id", "vocab_size"))
        raise _misuse(f"token {token} is not in the vocabulary of {size} tokens", "PROMPT_NOT_IDS") from None


def _encode(client: Client, prompt: str) -> list[int]:
    ids = client.encode(prompt)
    if not ids:
        raise _misuse("the prompt has no tokens", "PROMPT_EMPTY")
    return ids


def _parse_ids(text: str) -> list[int]:
    words = text.replace(",", " ").split()
    if not all(word.isdecimal() for word in words):
        raise _misuse("with --ids the prompt is token ids, such as '1 2 3'", "PROMPT_NOT_IDS")
    try:
        return token_list([int(word) for word in words])
    except ValueError as error:
        raise _misuse(str(error), "PROMPT_NOT_IDS") from None


def _stream(cache: Cache, args: argparse.Namespace) -> tuple[Generation | TextGeneration, str, float]:
    """Draw the tokens, print them as they come unless JSON is wanted, and return the loop, its text and seconds."""
    start = time.perf_counter()
    loop = (cache.generate if args.ids else cache.generate_text)(
        args.max_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        seed=args.seed,
    )
    pieces = []
    for piece in loop:
        pieces.append(f"{piece} " if args.ids else str(piece))
        if not args.json:
            print(pieces[-1], end="", flush=True)
    return loop, "".join(pieces), time.perf_counter() - start


def _seed(loop: Generation | TextGeneration) -> int | None:
    return None if loop.output is None else loop.output.seed


def _print_footer(loop: Generation | TextGeneration, loop_s: float) -> None:
    print(flush=True)
    if sys.stderr.isatty():
        rate = f"{len(loop.tokens)} tokens, {len(loop.tokens) / loop_s:.0f} tokens/s"
        print(f"[{loop.finish_reason}, {rate}, seed {_seed(loop)}]", file=sys.stderr)
