"""Tree search: grow a few thoughts, keep the best, grow from there; losers are dropped, the winner keeps its KV.

Each token is run once. What that saves is measured beside the same search without handles, where each thought is a call
that runs the prompt and the path so far once more.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ferrule import Cache, Client, sample

PROMPT = inspect.getsource(textwrap.indent) + "\n\ndef read_json(path):"
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


def search(client: Client, prompt: list[int]) -> list[Thought]:
    """Return the best thought of each level; all sequences are released."""
    path: list[Thought] = []
    with contextlib.ExitStack() as stack:
        trunk = stack.enter_context(client.prefill(prompt, reuse_prefix=False))
        for depth in range(DEPTH):
            thoughts = grow(trunk, depth)
            best = max(thoughts, key=lambda one: one.value)
            client.release([one.cache for one in thoughts if one is not best])
            path.append(best)
            trunk = stack.enter_context(best.cache)  # its newest token is pending, and goes in with the next draw
    return path


def search_without_handles(client: Client, prompt: list[int]) -> int:
    """Search as wide and as deep with calls that keep nothing; return how many prompt tokens they ran."""
    path, num_run = list(prompt), 0
    for depth in range(DEPTH):

        def draw(seed: int, prompt: list[int] = path) -> tuple[float, list[int]]:
            policy = sample(temperature=0.9, seed=seed, logprobs=True)
            loop = client.generate(prompt, NUM_TOKENS, policy=policy, reuse_prefix=False, publish_prefix=False)
            drawn = [(token.logprob or 0.0, int(token)) for token in loop]
            return sum(logprob for logprob, _ in drawn) / max(1, len(drawn)), [token_id for _, token_id in drawn]

        with ThreadPoolExecutor(WIDTH) as pool:
            thoughts = list(pool.map(draw, range(100 * depth, 100 * depth + WIDTH)))
        num_run += WIDTH * len(path)
        path = path + max(thoughts)[1]
    return num_run


def main() -> None:
    """Print the path through the tree, and what the handles have saved."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="127.0.0.1:50051")
    with Client(parser.parse_args().target) as client:
        prompt = client.tokenize(PROMPT)
        begun = time.perf_counter()
        path = search(client, prompt)
        searched = time.perf_counter()
        num_run = search_without_handles(client, prompt)
        apart_s, handles_s = time.perf_counter() - searched, searched - begun
        for depth, thought in enumerate(path):
            print(f"{'  ' * depth}{thought.value:7.3f}  {thought.text!r}")
        print(repr("def read_json(path):" + "".join(thought.text for thought in path)))
        num_once = len(prompt) + DEPTH - 1  # the newest token of each trunk goes in with the next draws
        print(f"{DEPTH} levels of {WIDTH} forks:   {num_once:5} prompt tokens run, {handles_s * 1e3:5.0f} ms")
        print(f"a call for each thought: {num_run:5} prompt tokens run, {apart_s * 1e3:5.0f} ms")
        saved = f"{num_run - num_once} prompt tokens, {(apart_s - handles_s) * 1e3:.0f} ms ({apart_s / handles_s:.1f}x)"
        print(f"saved: {saved}")


if __name__ == "__main__":
    main()
