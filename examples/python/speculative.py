"""Speculative decoding without a draft model: guess from the text itself, and check a whole guess in one call.

The handle makes a wrong guess cheap: the server drops it, and the KV before it stays. The program also measures a loop
that decodes token by token, and the same guesses checked without handles, the whole text run again each time.
"""

from __future__ import annotations

import argparse
import sys
import time

from ferrule import Client, greedy
from ferrule.errors import UnavailableError

PROMPT = """class Point:
    def __init__(self, x, y):
        self.x = x
        self.y = y

class Size:
    def __init__(self, x, y):"""
NUM_TOKENS = 48
NUM_DRAFTS = 6


def guess(text: list[int]) -> list[int]:
    """Return what followed the newest earlier place that ends in the same three, two or one tokens."""
    for size in (3, 2, 1):
        for start in range(len(text) - size - 1, -1, -1):
            if text[start : start + size] == text[-size:]:
                return text[start + size : start + size + NUM_DRAFTS]
    return []


def speculate(client: Client, prompt: list[int]) -> tuple[list[int], int]:
    """Return the greedy continuation and the number of calls it took."""
    with client.prefill(prompt, policy=greedy(), reuse_prefix=False) as cache:
        tokens, num_calls = list(cache.last.tokens), 1
        while len(tokens) < NUM_TOKENS:
            # The server keeps the drafts that it would have chosen, drops the others, and chooses the next token.
            tokens += cache.verify(guess(prompt + tokens)).output.tokens
            num_calls += 1
    return tokens[:NUM_TOKENS], num_calls


def decode_one_by_one(client: Client, prompt: list[int]) -> list[int]:
    """Return the same continuation from a loop with one call per token."""
    with client.prefill(prompt, policy=greedy(), reuse_prefix=False) as cache:
        return [*cache.last.tokens, *(cache.step().token for _ in range(NUM_TOKENS - 1))]


def check_without_handles(client: Client, prompt: list[int]) -> int:
    """Draw the same continuation from guesses that are checked by running the whole text; return the rows it took."""
    tokens: list[int] = []
    num_rows = 0
    while len(tokens) < NUM_TOKENS:
        text = prompt + tokens
        drafts = guess(text) if tokens else []
        chosen = [token for chunk in client.forward(text + drafts, policy=greedy()) for token in chunk.tokens]
        chosen = chosen[len(text) - 1 :]
        num_held = next((n for n, draft in enumerate(drafts) if draft != chosen[n]), len(drafts))
        tokens += chosen[: num_held + 1]
        num_rows += len(text) + len(drafts)
    return num_rows


def main() -> None:
    """Print the text, whether plain greedy decoding gives the same one, and what handles and guesses saved."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="127.0.0.1:50051")
    with Client(parser.parse_args().target) as client:
        prompt = client.tokenize(PROMPT, add_special_tokens="begin")
        begun = time.perf_counter()
        tokens, num_calls = speculate(client, prompt)
        guessed = time.perf_counter()
        plain = decode_one_by_one(client, prompt)
        decoded = time.perf_counter()
        num_rows = check_without_handles(client, prompt)
        again_s, plain_s, guessed_s = time.perf_counter() - decoded, decoded - guessed, guessed - begun
        print(client.detokenize(tokens))
    rate = f"{NUM_TOKENS / num_calls:.1f} tokens per call"
    print(f"same as plain greedy: {tokens == plain}; {NUM_TOKENS} tokens in {num_calls} calls, {rate}")
    print(f"guesses on a handle:      {num_calls:3} calls, {guessed_s * 1e3:5.0f} ms")
    print(f"token by token:           {NUM_TOKENS:3} calls, {plain_s * 1e3:5.0f} ms")
    print(f"guesses without handles: {num_rows:4} rows run, {again_s * 1e3:5.0f} ms")
    saved = f"{(plain_s - guessed_s) * 1e3:.0f} ms ({plain_s / guessed_s:.1f}x)"
    print(f"saved: {NUM_TOKENS - num_calls} calls, {saved}")


if __name__ == "__main__":
    try:
        main()
    except UnavailableError as error:  # there is no server, or it went away
        sys.exit(str(error))
