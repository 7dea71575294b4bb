"""Tree search: grow a few thoughts, keep the best, grow from there; losers are dropped, the winner keeps its KV."""

from __future__ import annotations

import argparse
import contextlib
from dataclasses import dataclass

from ferrule_client import Cache, Client, sample

PROMPT = "def read_json(path):"
DEPTH = 3
WIDTH = 3
NUM_TOKENS = 10


@dataclass(slots=True)
class Thought:
    """A continuation of so many tokens, and what it is worth."""

    cache: Cache
    text: str
    value: float


def grow(trunk: Cache, depth: int) -> list[Thought]:
    """Return thoughts that begin where the trunk ends; one is on the trunk itself, the others on forks of it."""
    policy = sample(temperature=0.9, seed=100 * depth, logprobs=True)
    loop = trunk.generate(NUM_TOKENS, n=WIDTH, text=True, policy=policy)
    logprobs: list[list[float]] = [[] for _ in range(WIDTH)]
    for token in loop:
        logprobs[token.index].append(token.logprob or 0.0)
    # A value function of your own goes here; this one takes what the model finds likely.
    values = [sum(one) / max(1, len(one)) for one in logprobs]
    return [Thought(one.cache, one.text, value) for one, value in zip(loop.branches, values, strict=True)]


def search(client: Client, prompt: str) -> list[Thought]:
    """Return the best thought of each level; all sequences are released."""
    path: list[Thought] = []
    with contextlib.ExitStack() as stack:
        trunk = stack.enter_context(client.prefill(client.encode(prompt)))
        for depth in range(DEPTH):
            thoughts = grow(trunk, depth)
            best = max(thoughts, key=lambda one: one.value)
            client.release([one.cache for one in thoughts if one is not best])
            path.append(best)
            trunk = stack.enter_context(best.cache)  # its newest token is pending, and goes in with the next draw
    return path


def main() -> None:
    """Print the path through the tree."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="127.0.0.1:50051")
    with Client.connect(parser.parse_args().target) as client:
        path = search(client, PROMPT)
        for depth, thought in enumerate(path):
            print(f"{'  ' * depth}{thought.value:7.3f}  {thought.text!r}")
        print(repr(PROMPT + "".join(thought.text for thought in path)))


if __name__ == "__main__":
    main()
