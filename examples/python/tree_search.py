"""Tree search: grow a few thoughts, keep the best, grow from there; losers are dropped, the winner keeps its KV.

Each token is run once. The program also measures the same search without handles, where each thought is a call that
runs the prompt and the path so far again; of both it shows the best of five runs. The longer the prompt, the more the
handles save.
"""

from __future__ import annotations

import argparse
import inspect
import math
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor

from ferrule import Cache, Client, sample
from ferrule.errors import UnavailableError

SHARED = "".join(inspect.getsource(one) for one in (textwrap.wrap, textwrap.indent, textwrap.dedent))
PROMPT = f"{SHARED}\n\ndef read_json(path):"
NUM_RUNS = 5
DEPTH = 3
WIDTH = 3
NUM_TOKENS = 10


def search(trunk: Cache, depth: int = 0) -> list[tuple[float, str]]:
    """Return value and text of the best thought of each level from here on; the trunk moves or is released."""
    if depth == DEPTH:
        return []
    policy = sample(temperature=0.9, seed=100 * depth, logprobs=True)
    loop = trunk.generate(NUM_TOKENS, n=WIDTH, text=True, policy=policy)  # one thought on the trunk, others on forks
    totals = [0.0] * WIDTH
    for token in loop:
        totals[token.index] += token.logprob
    # Your own value function goes here; this one takes what the model finds likely.
    values = [total / len(branch.tokens) for total, branch in zip(totals, loop.branches, strict=True)]
    best = loop.branches[values.index(max(values))]
    with loop.caches.keep(best.cache) as winner:  # its pending token goes in with the next draws
        return [(max(values), best.text), *search(winner, depth + 1)]


def search_without_handles(client: Client, prompt: list[int]) -> int:
    """Search as wide and as deep with calls that keep nothing; return how many prompt tokens they ran."""
    path: list[int] = list(prompt)
    num_run = 0
    for depth in range(DEPTH):

        def draw(seed: int, prompt: list[int] = path) -> tuple[float, list[int]]:
            policy = sample(temperature=0.9, seed=seed, logprobs=True)
            drawn = list(client.generate(prompt, NUM_TOKENS, policy=policy, reuse_prefix=False, publish_prefix=False))
            return sum(token.logprob for token in drawn) / len(drawn), [int(token) for token in drawn]

        with ThreadPoolExecutor(WIDTH) as pool:
            thoughts: list[tuple[float, list[int]]] = list(pool.map(draw, range(100 * depth, 100 * depth + WIDTH)))
        num_run += WIDTH * len(path)
        path = path + max(thoughts)[1]
    return num_run


def main() -> None:
    """Print the path through the tree, and what the handles saved."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="127.0.0.1:50051")
    with Client(parser.parse_args().target) as client:
        prompt = client.tokenize(PROMPT, add_special_tokens="begin")
        handles_s = apart_s = math.inf
        for _ in range(NUM_RUNS):
            begun = time.perf_counter()
            with client.prefill(prompt, reuse_prefix=False) as trunk:
                path = search(trunk)
            searched = time.perf_counter()
            num_run = search_without_handles(client, prompt)
            handles_s, apart_s = min(handles_s, searched - begun), min(apart_s, time.perf_counter() - searched)
    for depth, (value, text) in enumerate(path):
        print(f"{'  ' * depth}{value:7.3f}  {text!r}")
    print(repr("def read_json(path):" + "".join(text for _, text in path)))
    num_once = len(prompt) + DEPTH - 1  # the pending token of each trunk goes in with the next draws
    print(f"{DEPTH} levels of {WIDTH} forks:   {num_once:5} prompt tokens run, {handles_s * 1e3:5.0f} ms")
    print(f"a call for each thought: {num_run:5} prompt tokens run, {apart_s * 1e3:5.0f} ms")
    saved = f"{num_run - num_once} prompt tokens, {(apart_s - handles_s) * 1e3:.0f} ms ({apart_s / handles_s:.1f}x)"
    print(f"saved: {saved}")


if __name__ == "__main__":
    try:
        main()
    except UnavailableError as error:  # there is no server, or it went away
        sys.exit(str(error))
