"""Best of n: one call draws n continuations of one prompt, each by a seed of its own; the likeliest text wins."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from ferrule_client import Client, sample

PROMPT = "def read_file(path):"
NUM_BRANCHES = 4
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


def best_of_n(client: Client, prompt: str) -> list[Candidate]:
    """Return the candidates, the one with the highest score first.

    The server runs the prompt once, forks it, and draws all branches in the same steps; tokens come as they are drawn.
    """
    policy = sample(temperature=0.8, seed=1, logprobs=True)  # branch i draws by seed 1 + i
    candidates = [Candidate() for _ in range(NUM_BRANCHES)]
    for token in client.generate(prompt, NUM_TOKENS, n=NUM_BRANCHES, policy=policy):
        one = candidates[token.index]
        one.text += token.text
        one.num_tokens += 1
        one.logprob += token.logprob or 0.0
    return sorted(candidates, key=lambda one: -one.score)


def main() -> None:
    """Print the candidates, best first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="127.0.0.1:50051")
    with Client.connect(parser.parse_args().target) as client:
        for one in best_of_n(client, PROMPT):
            print(f"{one.score:7.3f}  {one.text!r}")


if __name__ == "__main__":
    main()
