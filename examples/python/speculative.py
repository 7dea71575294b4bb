"""Speculative decoding without a draft model: guess from the text itself, have a whole guess checked in one call.

The handle is what makes a wrong guess cheap: the server drops it and the KV before it stays. Measured beside it: a loop
that decodes token by token, and the same guesses checked without handles, the whole text run again each time.
"""

from __future__ import annotations

import argparse
import time

from ferrule import Client, greedy

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
        assert cache.last is not None
        tokens, num_calls = list(cache.last.tokens), 1
        certain = tokens[-1:]  # not in the sequence yet; after a verify the cache keeps the next one in `pending`
        while len(tokens) < NUM_TOKENS:
            # The server keeps the drafts that are what it would have chosen, drops the others, and says what is next.
            check = cache.verify(guess(prompt + tokens), tokens=certain, acceptance="greedy")
            tokens += check.output.tokens  # the drafts that held, then the next token
            certain = []
            num_calls += 1
    return tokens[:NUM_TOKENS], num_calls


def decode_one_by_one(client: Client, prompt: list[int]) -> tuple[list[int], int]:
    """Return the same continuation from a loop that sends each token back, and the number of calls."""
    with client.prefill(prompt, policy=greedy(), reuse_prefix=False) as cache:
        assert cache.last is not None
        tokens = list(cache.last.tokens)
        while len(tokens) < NUM_TOKENS:
            tokens += cache.decode(tokens[-1], policy=greedy()).tokens
    return tokens, len(tokens)


def check_without_handles(client: Client, prompt: list[int]) -> tuple[list[int], int]:
    """Return the same continuation from guesses that are checked by running the whole text, and the rows it ran."""
    tokens: list[int] = []
    num_run = 0
    while len(tokens) < NUM_TOKENS:
        text = prompt + tokens
        drafts = guess(text) if tokens else []
        with client.prefill(
            text + drafts, policy=greedy(), all_positions=True, reuse_prefix=False, publish_prefix=False
        ) as cache:
            assert cache.last is not None
            chosen = list(cache.last.tokens)[len(text) - 1 :]
        num_held = next((n for n, draft in enumerate(drafts) if draft != chosen[n]), len(drafts))
        tokens += chosen[: num_held + 1]
        num_run += len(text) + len(drafts)
    return tokens[:NUM_TOKENS], num_run


def main() -> None:
    """Compare with plain greedy decoding; print the tokens of each call, and what handle and guesses have saved."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="127.0.0.1:50051")
    with Client(parser.parse_args().target) as client:
        prompt = client.tokenize(PROMPT)
        begun = time.perf_counter()
        tokens, num_calls = speculate(client, prompt)
        guessed = time.perf_counter()
        plain, num_plain = decode_one_by_one(client, prompt)
        decoded = time.perf_counter()
        _, num_run = check_without_handles(client, prompt)
        again_s, plain_s, guessed_s = time.perf_counter() - decoded, decoded - guessed, guessed - begun
        print(client.detokenize(tokens))
        print(f"same as plain greedy: {tokens == plain}; {len(tokens)} tokens in {num_calls} calls,", end=" ")
        print(f"{len(tokens) / num_calls:.1f} tokens per call")
        print(f"guesses on a handle:      {num_calls:3} calls, {guessed_s * 1e3:5.0f} ms")
        print(f"token by token:           {num_plain:3} calls, {plain_s * 1e3:5.0f} ms")
        print(f"guesses without handles: {num_run:4} rows run, {again_s * 1e3:5.0f} ms")
        print(
            f"saved: {num_plain - num_calls} calls, {(plain_s - guessed_s) * 1e3:.0f} ms ({plain_s / guessed_s:.1f}x)"
        )


if __name__ == "__main__":
    main()
