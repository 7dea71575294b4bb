"""Best of n: one call draws n continuations of one prompt, each by a seed of its own; the likeliest text wins.

The prompt is run once, whatever n is. What that saves is measured beside the same draws without handles: n calls at the
same time, each of which runs the whole prompt.
"""

from __future__ import annotations

import argparse
import inspect
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ferrule import Client, sample

PROMPT = inspect.getsource(textwrap.indent) + "\n\ndef read_file(path):"
NUM_BRANCHES = 8
NUM_TOKENS = 24


@dataclass(slots=True)
class Candidate:
    """One text and the sum of its tokens' log-probabilities."""

    text: str = ""
    num_tokens: int = 0
    logprob: float = 0.0

    @property
    def score(self) -> float:
        """Log-probability per token."""
        return self.logprob / max(1, self.num_tokens)


def best_of_n(client: Client, prompt: list[int]) -> list[Candidate]:
    """Return the candidates, the one with the highest score first.

    The server runs the prompt once, forks it, and draws all branches in the same steps; tokens come as they are drawn.
    """
    policy = sample(temperature=0.8, seed=1, logprobs=True)  # branch i draws by seed 1 + i
    candidates = [Candidate() for _ in range(NUM_BRANCHES)]
    for token in client.generate(prompt, NUM_TOKENS, n=NUM_BRANCHES, policy=policy, text=True, reuse_prefix=False):
        one = candidates[token.index]
        one.text += token.text
        one.num_tokens += 1
        one.logprob += token.logprob or 0.0
    return sorted(candidates, key=lambda one: -one.score)


def without_handles(client: Client, prompt: list[int]) -> None:
    """Draw the same candidates in a call each, as from a server that keeps nothing."""

    def draw(seed: int) -> None:
        policy = sample(temperature=0.8, seed=seed, logprobs=True)
        client.generate(prompt, NUM_TOKENS, policy=policy, text=True, reuse_prefix=False, publish_prefix=False).read()

    with ThreadPoolExecutor(NUM_BRANCHES) as pool:
        list(pool.map(draw, range(1, NUM_BRANCHES + 1)))


def main() -> None:
    """Print the candidates, best first, and what the fork has saved."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="127.0.0.1:50051")
    with Client(parser.parse_args().target) as client:
        prompt = client.tokenize(PROMPT)
        begun = time.perf_counter()
        candidates = best_of_n(client, prompt)
        forked = time.perf_counter()
        without_handles(client, prompt)
        apart_s, together_s = time.perf_counter() - forked, forked - begun
        for one in candidates:
            print(f"{one.score:7.3f}  {one.text!r}")
        print(f"one prompt, {NUM_BRANCHES} branches: {len(prompt):5} prompt tokens run, {together_s * 1e3:5.0f} ms")
        print(f"a call for each:         {NUM_BRANCHES * len(prompt):5} prompt tokens run, {apart_s * 1e3:5.0f} ms")
        saved = (NUM_BRANCHES - 1) * len(prompt)
        print(f"saved: {saved} prompt tokens, {(apart_s - together_s) * 1e3:.0f} ms ({apart_s / together_s:.1f}x)")


if __name__ == "__main__":
    main()
