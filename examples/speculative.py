"""Speculative decoding without a draft model: guess from the text itself, have a whole guess checked in one call."""

from __future__ import annotations

import argparse

from ferrule_client import Client, greedy

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
    with client.prefill(prompt, policy=greedy()) as cache:
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


def main() -> None:
    """Compare with plain greedy decoding and print how many tokens each call brought."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="127.0.0.1:50051")
    with Client.connect(parser.parse_args().target) as client:
        prompt = client.encode(PROMPT)
        tokens, num_calls = speculate(client, prompt)
        plain = client.generate(prompt, NUM_TOKENS, temperature=0, ignore_eos=True).read().tokens
        print(client.decode_tokens(tokens))
        print(f"same as plain greedy: {tokens == plain}; {len(tokens)} tokens in {num_calls} calls,", end=" ")
        print(f"{len(tokens) / num_calls:.1f} tokens per call")


if __name__ == "__main__":
    main()
