"""``ferrule generate``: a prompt in, text out as it is drawn."""

from __future__ import annotations

import argparse
import functools
import secrets
import sys
import time
from collections.abc import Callable, Sequence

from ferrule_cli import common
from ferrule_cli.connection import add_connection_options, connect, wait_for_model
from ferrule_cli.waiting import Waiting
from ferrule_client._check import token_list
from ferrule_client.errors import TokenOutOfVocabError, UnsupportedError
from ferrule_client.policy import sample
from ferrule_client.sync.client import Client
from ferrule_client.sync.generation import Branch, Generation
from ferrule_client.types import Token, WithText

__all__ = ["EXAMPLES", "add_options", "run"]

_TextOf = Callable[[int], str | None]  # returns the text of a token, None where tokens are shown as ids

_CUT = {  # ends that nobody has asked for
    "context_full": "the context of the model is full",
    "kv_blocks_exhausted": "the server has no free blocks left; try again later",
}

EXAMPLES = """\
examples:
  ferrule generate "def read_file(path):"
  ferrule generate --temperature 0 --max-tokens 40 "import os"
  cat prompt.txt | ferrule generate --seed 7        the same seed, nearly always the same text; the prompt is run whole
  ferrule generate --json "class Queue:" | jq -r .text
  ferrule generate --n 3 --stop "\\n\\n" "def area("    three texts, each up to an empty line
  ferrule generate --top-logprobs 3 "import "       a line per token, with the likeliest in its place
  ferrule generate --ids "1 2 3"                    token ids, for a model without a tokenizer
  ferrule generate --special-tokens "<|fim_prefix|>def f(<|fim_suffix|>): pass<|fim_middle|>"
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="the text to continue (default: standard input)")
    common.add_numbers(parser, ("--max-tokens", common.number(int, 1), 64, "N", "most tokens to draw (64)"))
    rounding = "because KV from the prefix cache differs by rounding and can change the text"
    common.add_sampling_options(parser, about_seed=f"; with one the prompt is run whole, {rounding}")
    common.add_numbers(parser, ("--n", common.number(int, 1), 1, "N", "texts to draw, each by a seed of its own (1)"))
    about = "end at this text (\\n: a new line); may be given several times"
    parser.add_argument("--stop", type=_stop_text, action="append", default=[], metavar="TEXT", help=about)
    about, penalty = "make tokens that are there already less likely, 1: no change", common.number(float, -100, 100)
    common.add_numbers(
        parser,
        ("--top-logprobs", common.number(int, 1), 0, "K", "show the K likeliest tokens in each place"),
        ("--repetition-penalty", common.number(float, 0, above_low=True), None, "P", about),
        ("--frequency-penalty", penalty, None, "P", "likewise, per occurrence"),
        ("--presence-penalty", penalty, None, "P", "likewise, once"),
    )
    parser.add_argument("--ids", action="store_true", help="PROMPT and output are token ids, separated by spaces")
    about = "text such as <|fim_middle|> in PROMPT becomes that token; else it stays ordinary text"
    parser.add_argument("--special-tokens", action="store_true", help=about)
    about = "leave out what the model's tokenizer puts before a text, such as a begin token"
    parser.add_argument("--no-begin-tokens", action="store_true", help=about)
    add_connection_options(parser)


def run(args: argparse.Namespace) -> int:
    """Stream the continuation of a prompt to standard output and return 0."""
    prompt = _read_prompt(args)
    ids = _parse_ids(prompt) if args.ids else []
    with common.ending_in_order(), connect(args) as client:
        wait_for_model(client, args)
        ids = ids or _encode(client, prompt, args)
        text_of = functools.cache(lambda token: None if args.ids else client.detokenize([token]))
        start = time.perf_counter()
        with _begin(client, ids, args) as loop:
            tokens, first_at = _show(loop, args, text_of)
        seconds = time.perf_counter() - start
        texts = [_as_dict(branch, each, args, text_of) for branch, each in zip(loop.branches, tokens, strict=True)]
    num_tokens = sum(len(branch.tokens) for branch in loop.branches)
    if args.json:
        figures = {
            "num_prompt_tokens": len(ids),
            "num_cached_tokens": loop.cached_tokens,
            "first_token_ms": round(1e3 * ((first_at or start) - start), 3),
            "tokens_per_s": round(num_tokens / seconds, 1),
        }
        common.print_json({**texts[0], **({"texts": texts} if args.n > 1 else {}), **figures})
        return 0
    for branch in loop.branches:
        if (cause := _CUT.get(str(branch.finish_reason))) is not None:
            which = f"text {branch.index}" if args.n > 1 else "the text"
            print(f"{which} ends after {len(branch.tokens)} of {args.max_tokens} tokens: {cause}", file=sys.stderr)
    if sys.stderr.isatty():
        reasons = ", ".join(str(branch.finish_reason) for branch in loop.branches)
        rate = f"{num_tokens} tokens, {num_tokens / seconds:.0f} tokens/s"
        print(f"[{reasons}, {rate}, seed {loop.seed}]", file=sys.stderr)
    return 0


def _read_prompt(args: argparse.Namespace) -> str:
    if args.prompt is not None and args.prompt != "-":
        prompt = str(args.prompt)
    elif sys.stdin.isatty():
        raise common.misuse("give a PROMPT, or pipe one in", "PROMPT_MISSING")
    else:
        try:
            prompt = sys.stdin.read()
        except UnicodeDecodeError as error:
            raise common.misuse(f"the prompt is no text in {error.encoding.upper()}", "PROMPT_NOT_TEXT") from None
    if not prompt or (args.ids and not prompt.replace(",", " ").split()):
        raise common.misuse("the prompt is empty", "PROMPT_EMPTY")
    if any("\ud800" <= character <= "\udfff" for character in prompt):  # so Python keeps bytes that are no text
        raise common.misuse("the prompt is no text in UTF-8", "PROMPT_NOT_TEXT")
    return prompt


def _stop_text(text: str) -> str:
    """Return a text to end at, with its escapes resolved, for argparse."""
    if not text:
        raise argparse.ArgumentTypeError("a text to end at has at least one character")
    return text.replace("\\n", "\n").replace("\\t", "\t")


def _no_tokenizer(advice: str) -> common.CommandError:
    return common.CommandError(f"the served model has no tokenizer{advice}", "FEATURE_UNSUPPORTED")


def _encode(client: Client, prompt: str, args: argparse.Namespace) -> list[int]:
    begins, parses = not args.no_begin_tokens, args.special_tokens
    try:
        ids = client.tokenize(prompt, add_special_tokens=begins and "begin", parse_special_tokens=parses)
    except UnsupportedError:
        raise _no_tokenizer(": give token ids with --ids") from None
    if not ids:
        raise common.misuse("the prompt has no tokens", "PROMPT_EMPTY")
    return ids


def _parse_ids(text: str) -> list[int]:
    words = text.replace(",", " ").split()
    if not all(word.isdecimal() for word in words):
        raise common.misuse("with --ids the prompt is token ids, such as '1 2 3'", "PROMPT_NOT_IDS")
    try:
        return token_list([int(word) for word in words])
    except ValueError as error:
        raise common.misuse(str(error), "PROMPT_NOT_IDS") from None


def _begin(client: Client, ids: list[int], args: argparse.Namespace) -> Generation:
    seed = args.seed
    if seed is None and args.temperature != 0:
        seed = secrets.randbits(52)  # every reader of JSON keeps such a number, and those after it
    policy = sample(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        seed=seed,
        repetition_penalty=args.repetition_penalty,
        frequency_penalty=args.frequency_penalty,
        presence_penalty=args.presence_penalty,
        logprobs=bool(args.top_logprobs),
        top_logprobs=args.top_logprobs,
    )
    is_listed = args.top_logprobs and not args.json  # each token with its own text
    text: WithText = not args.ids and ("as_drawn" if is_listed else True)
    return client.generate(
        ids, args.max_tokens, n=args.n, stop=args.stop, text=text, policy=policy, reuse_prefix=args.seed is None
    )


def _show(loop: Generation, args: argparse.Namespace, text_of: _TextOf) -> tuple[list[list[Token]], float | None]:
    """Print tokens as they come, several texts at their end, unless JSON is wanted.

    Return the tokens of each branch, and when the first one came.
    """
    shown: list[list[Token]] = [[] for _ in loop.branches]
    first_at = None
    streams = args.n == 1 and not args.json
    try:
        with Waiting("the first token") as waiting:
            for token in loop:
                first_at = first_at or time.perf_counter()
                shown[token.index].append(token)
                if streams:
                    waiting.end()
                    plain = f"{int(token)} " if args.ids else token.text
                    print(_line(token, text_of) if args.top_logprobs else plain, end="", flush=True)
                else:
                    waiting.show("tokens", sum(map(len, shown)) / (args.n * args.max_tokens))
    except TokenOutOfVocabError as error:
        token_id, size = (error.metadata.get(name, "?") for name in ("token_id", "vocab_size"))
        raise common.misuse(f"token {token_id} is not in the vocabulary of {size} tokens", "PROMPT_NOT_IDS") from None
    except UnsupportedError:
        if not args.stop:
            raise
        raise _no_tokenizer(", so it cannot --stop at a text") from None
    if streams:
        print(flush=True)
    elif not args.json:
        for branch, tokens in zip(loop.branches, shown, strict=True):
            print(f"--- {branch.index}, seed {branch.seed}, {branch.finish_reason}", flush=True)
            lines = [_line(token, text_of) for token in tokens] if args.top_logprobs else [_said(branch, args)]
            print("".join(lines), flush=True)
    return shown, first_at


def _line(token: Token, text_of: _TextOf) -> str:
    """Return a line about one token: itself, and the likeliest in its place."""

    def name(token: int) -> str:
        text = text_of(token)
        return str(token) if text is None else f"{token} {text!r}"

    others = "  ".join(f"{name(one.token)} {one.logprob:.3f}" for one in token.top_logprobs)
    return f"{int(token):>7} {token.logprob:8.3f}  {token.text!r:<20} | {others}\n"


def _said(branch: Branch, args: argparse.Namespace) -> str:
    return " ".join(map(str, branch.tokens)) if args.ids else branch.text


def _as_dict(branch: Branch, tokens: Sequence[Token], args: argparse.Namespace, text_of: _TextOf) -> dict[str, object]:
    facts: dict[str, object] = {
        "text": _said(branch, args),
        "tokens": branch.tokens,
        "finish_reason": branch.finish_reason,
        "seed": branch.seed,
    }
    if branch.error is not None:
        facts["error"] = branch.error.reason
    if args.json and args.top_logprobs:
        facts["logprobs"] = [_logprobs(token, text_of) for token in tokens]
    return facts


def _logprobs(token: Token, text_of: _TextOf) -> dict[str, object]:
    """Return what JSON tells of one token and of the likeliest in its place."""
    top = [{"token": one.token, "text": text_of(one.token), "logprob": one.logprob} for one in token.top_logprobs]
    return {"token": int(token), "text": text_of(int(token)), "logprob": token.logprob, "top": top}
