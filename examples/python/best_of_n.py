"""Best of n: one call draws n continuations of a prompt, each with its own seed; the most likely text wins.

The prompt is run once, whatever n is. The program also measures the same draws without handles: n concurrent calls,
each of which runs the whole prompt.
"""

from __future__ import annotations

import argparse
import inspect
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor

from ferrule import Client, sample
from ferrule.errors import UnavailableError

PROMPT = inspect.getsource(textwrap.indent) + "\n\ndef read_file(path):"
NUM_BRANCHES = 8
NUM_TOKENS = 24


def best_of_n(client: Client, prompt: list[int]) -> list[tuple[float, str]]:
    """Return the score and text of each continuation, best first; a score is the log-probability per token.

    The server runs the prompt once, forks it, and draws all branches in the same steps; tokens arrive one by one.
    """
    policy = sample(temperature=0.8, seed=1, logprobs=True)  # branch i draws with seed 1 + i
    loop = client.generate(prompt, NUM_TOKENS, n=NUM_BRANCHES, policy=policy, text=True, reuse_prefix=False)
    totals = [0.0] * NUM_BRANCHES
    for token in loop:
        totals[token.index] += token.logprob
    scored = zip(totals, loop.branches, strict=True)
    return sorted(((total / len(branch.tokens), branch.text) for total, branch in scored), reverse=True)


def without_handles(client: Client, prompt: list[int]) -> None:
    """Draw the same continuations with a call each, as from a server that keeps nothing."""

    def draw(seed: int) -> None:
        policy = sample(temperature=0.8, seed=seed, logprobs=True)
        client.generate(prompt, NUM_TOKENS, policy=policy, text=True, reuse_prefix=False, publish_prefix=False).read()

    with ThreadPoolExecutor(NUM_BRANCHES) as pool:
        list(pool.map(draw, range(1, NUM_BRANCHES + 1)))


def main() -> None:
    """Print the continuations, best first, and what the fork saved."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="127.0.0.1:50051")
    with Client(parser.parse_args().target) as client:
        prompt = client.tokenize(PROMPT, add_special_tokens="begin")
        begun = time.perf_counter()
        candidates = best_of_n(client, prompt)
        forked = time.perf_counter()
        without_handles(client, prompt)
        apart_s, together_s = time.perf_counter() - forked, forked - begun
    for score, text in candidates:
        print(f"{score:7.3f}  {text!r}")
    print(f"one prompt, {NUM_BRANCHES} branches: {len(prompt):5} prompt tokens run, {together_s * 1e3:5.0f} ms")
    print(f"a call for each:         {NUM_BRANCHES * len(prompt):5} prompt tokens run, {apart_s * 1e3:5.0f} ms")
    saved = (NUM_BRANCHES - 1) * len(prompt)
    print(f"saved: {saved} prompt tokens, {(apart_s - together_s) * 1e3:.0f} ms ({apart_s / together_s:.1f}x)")


if __name__ == "__main__":
    try:
        main()
    except UnavailableError as error:  # there is no server, or it went away
        sys.exit(str(error))
