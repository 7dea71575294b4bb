"""``ferrule generate``: a prompt in, text out as it is drawn."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass

from ferrule_cli.common import (
    CommandError,
    add_connection_options,
    connect,
    draw_seed,
    ending_in_order,
    number,
    print_json,
    wait_for_model,
)
from ferrule_client._check import token_list
from ferrule_client.errors import TokenOutOfVocabError, UnsupportedError
from ferrule_client.policy import Policy, sample
from ferrule_client.sync.client import Client
from ferrule_client.sync.generation import Branch, Generation
from ferrule_client.types import Token

__all__ = ["EXAMPLES", "add_options", "run"]

_UNSUPPORTED = "FEATURE_UNSUPPORTED"

_CUT = {
    "context_full": "the context of the model is full",
    "kv_blocks_exhausted": "the server has no free blocks left; try again later",
}
"""Ends that nobody has asked for."""

EXAMPLES = """\
examples:
  ferrule generate "def read_file(path):"
  ferrule generate --temperature 0 --max-tokens 40 "import os"
  cat prompt.txt | ferrule generate --seed 7        the same seed, nearly always the same text; the prompt is run whole
  ferrule generate --json "class Queue:" | jq -r .text
  ferrule generate --n 3 --stop "\\n\\n" "def area("    three texts, each up to an empty line
  ferrule generate --top-logprobs 3 "import "       a line per token, with the likeliest in its place
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
    parser.add_argument(
        "--seed",
        type=number(int, 0, 2**64 - 1),
        metavar="S",
        help="seed of the draws (random); with one the prompt is run whole, because KV from the prefix cache differs "
        "by rounding and can change the text",
    )
    parser.add_argument(
        "--n", type=number(int, 1), default=1, metavar="N", help="texts to draw, each by a seed of its own (1)"
    )
    parser.add_argument(
        "--stop",
        type=_stop_text,
        action="append",
        default=[],
        metavar="TEXT",
        help="end at this text (\\n: a new line); may be given several times",
    )
    parser.add_argument(
        "--top-logprobs", type=number(int, 1), default=0, metavar="K", help="show the K likeliest tokens in each place"
    )
    parser.add_argument(
        "--repetition-penalty",
        type=number(float, 0, above_low=True),
        metavar="P",
        help="make tokens that are there already less likely, 1: no change",
    )
    parser.add_argument(
        "--frequency-penalty", type=number(float, -100, 100), metavar="P", help="likewise, per occurrence"
    )
    parser.add_argument("--presence-penalty", type=number(float, -100, 100), metavar="P", help="likewise, once")
    parser.add_argument("--ids", action="store_true", help="PROMPT and output are token ids, separated by spaces")
    add_connection_options(parser)


def run(args: argparse.Namespace) -> int:
    """Stream the continuation of a prompt to standard output and return 0.

    Raises:
        CommandError: There is no prompt, or it is not what ``--ids`` promises.
        FerruleError: A call failed.
    """
    prompt = _read_prompt(args)
    ids = _parse_ids(prompt) if args.ids else []
    with ending_in_order(), connect(args) as client:
        wait_for_model(client, args)
        ids = ids or _encode(client, prompt)
        start = time.perf_counter()
        texts_of = _Texts(None if args.ids else client)
        with _begin(client, ids, args) as loop:
            shown = _show(loop, args, texts_of)
        first_s = (shown.first_at or start) - start
        loop_s = time.perf_counter() - start
    num_tokens = sum(len(branch.tokens) for branch in loop.branches)
    if args.json:
        texts = [_as_dict(branch, as_ids=args.ids) for branch in loop.branches]
        if args.top_logprobs:
            for facts, tokens in zip(texts, shown.tokens, strict=True):
                facts["logprobs"] = [_logprobs(token, texts_of) for token in tokens]
        figures = {
            "num_prompt_tokens": len(ids),
            "num_cached_tokens": loop.cached_tokens,
            "first_token_ms": round(1e3 * first_s, 3),
            "tokens_per_s": round(num_tokens / loop_s, 1),
        }
        print_json({**texts[0], **({"texts": texts} if args.n > 1 else {}), **figures})
        return 0
    for branch in loop.branches:
        if (cause := _CUT.get(str(branch.finish_reason))) is not None:
            which = f"text {branch.index}" if args.n > 1 else "the text"
            print(f"{which} ends after {len(branch.tokens)} of {args.max_tokens} tokens: {cause}", file=sys.stderr)
    if sys.stderr.isatty():
        reasons = ", ".join(str(branch.finish_reason) for branch in loop.branches)
        rate = f"{num_tokens} tokens, {num_tokens / loop_s:.0f} tokens/s"
        print(f"[{reasons}, {rate}, seed {loop.seed}]", file=sys.stderr)
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


def _stop_text(text: str) -> str:
    """Return a text to end at, with its escapes resolved, for argparse."""
    if not text:
        raise argparse.ArgumentTypeError("a text to end at has at least one character")
    return text.replace("\\n", "\n").replace("\\t", "\t")


def _misuse(text: str, reason: str) -> CommandError:
    return CommandError(text, reason, exit_code=2)


def _encode(client: Client, prompt: str) -> list[int]:
    try:
        ids = client.tokenize(prompt)
    except UnsupportedError:
        raise CommandError("the served model has no tokenizer: give token ids with --ids", _UNSUPPORTED) from None
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


def _begin(client: Client, ids: list[int], args: argparse.Namespace) -> Generation:
    return client.generate(
        ids,
        args.max_tokens,
        n=args.n,
        stop=args.stop,
        text=not args.ids,
        policy=_policy(args),
        reuse_prefix=args.seed is None,
    )


def _policy(args: argparse.Namespace) -> Policy:
    return sample(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        seed=draw_seed(args),
        repetition_penalty=args.repetition_penalty,
        frequency_penalty=args.frequency_penalty,
        presence_penalty=args.presence_penalty,
        logprobs=bool(args.top_logprobs),
        top_logprobs=args.top_logprobs,
    )


@dataclass(slots=True)
class _Shown:
    """What has come: the tokens of each branch, and when the first one did."""

    tokens: list[list[Token]]
    first_at: float | None = None


class _Texts:
    """Texts of single tokens, each asked for once. Without a client there are none."""

    def __init__(self, client: Client | None) -> None:
        self._client = client
        self._known: dict[int, str] = {}

    def of(self, token: int) -> str | None:
        """Return the text of a token."""
        if self._client is None:
            return None
        if token not in self._known:
            self._known[token] = self._client.detokenize([token])
        return self._known[token]


def _show(loop: Generation, args: argparse.Namespace, texts: _Texts) -> _Shown:
    """Print tokens as they come, unless JSON is wanted; several texts one after another, at their end."""
    shown = _Shown([[] for _ in loop.branches])
    streams = args.n == 1 and not args.json
    try:
        for token in loop:
            shown.first_at = shown.first_at or time.perf_counter()
            shown.tokens[token.index].append(token)
            if streams:
                print(_line(token, texts) if args.top_logprobs else _piece(token, as_ids=args.ids), end="", flush=True)
    except TokenOutOfVocabError as error:
        token_id, size = (error.metadata.get(name, "?") for name in ("token_id", "vocab_size"))
        raise _misuse(f"token {token_id} is not in the vocabulary of {size} tokens", "PROMPT_NOT_IDS") from None
    except UnsupportedError:
        if not args.stop:
            raise
        raise CommandError("the served model has no tokenizer, so it cannot --stop at a text", _UNSUPPORTED) from None
    if streams:
        print(flush=True)
    elif not args.json:
        _print_branches(loop, shown, args, texts)
    return shown


def _print_branches(loop: Generation, shown: _Shown, args: argparse.Namespace, texts: _Texts) -> None:
    for branch, tokens in zip(loop.branches, shown.tokens, strict=True):
        print(f"--- {branch.index}, seed {branch.seed}, {branch.finish_reason}", flush=True)
        lines = [_line(token, texts) for token in tokens] if args.top_logprobs else [_said(branch, as_ids=args.ids)]
        print("".join(lines), flush=True)


def _piece(token: Token, *, as_ids: bool) -> str:
    return f"{int(token)} " if as_ids else token.text


def _line(token: Token, texts: _Texts) -> str:
    """Return a line about one token: itself, and the likeliest in its place."""
    others = "  ".join(f"{_name(one.token, texts)} {one.logprob:.3f}" for one in token.top_logprobs)
    return f"{int(token):>7} {token.logprob:8.3f}  {token.text!r:<20} | {others}\n"


def _name(token: int, texts: _Texts) -> str:
    text = texts.of(token)
    return str(token) if text is None else f"{token} {text!r}"


def _logprobs(token: Token, texts: _Texts) -> dict[str, object]:
    """Return what JSON tells of one token and of the likeliest in its place."""
    likeliest = [
        {"token": one.token, "text": texts.of(one.token), "logprob": one.logprob} for one in token.top_logprobs
    ]
    return {"token": int(token), "text": texts.of(int(token)), "logprob": token.logprob, "top": likeliest}


def _said(branch: Branch, *, as_ids: bool) -> str:
    return " ".join(map(str, branch.tokens)) if as_ids else branch.text


def _as_dict(branch: Branch, *, as_ids: bool) -> dict[str, object]:
    facts: dict[str, object] = {
        "text": _said(branch, as_ids=as_ids),
        "tokens": branch.tokens,
        "finish_reason": branch.finish_reason,
        "seed": branch.seed,
    }
    if branch.error is not None:
        facts["error"] = branch.error.reason
    return facts
