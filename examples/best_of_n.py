"""Best of n: one prompt, n branches with a seed each, decoded together; the likeliest text wins."""

from __future__ import annotations

import argparse
import contextlib
from dataclasses import dataclass, field

from ferrule_client import Cache, Client, Policy, no_output, sample

PROMPT = "def read_file(path):"
NUM_BRANCHES = 4
NUM_TOKENS = 24


@dataclass(slots=True)
class Branch:
    """One text in the making; its last token is not in ``cache`` yet."""

    cache: Cache
    policy: Policy
    tokens: list[int] = field(default_factory=list)
    logprob: float = 0.0


def best_of_n(client: Client, prompt: str) -> list[Branch]:
    """Return the branches, the one with the highest log-probability per token first; all are released."""
    ends = set(client.model_info().eos_token_ids)
    with contextlib.ExitStack() as stack:
        cache = stack.enter_context(client.prefill(client.encode(prompt), policy=no_output()))
        caches = [cache, *map(stack.enter_context, cache.fork(NUM_BRANCHES - 1))]
        policies = [sample(temperature=0.8, seed=n, logprobs=True) for n in range(NUM_BRANCHES)]
        branches = live = [Branch(*pair) for pair in zip(caches, policies, strict=True)]
        stream = stack.enter_context(client.stream())
        while live and len(live[0].tokens) < NUM_TOKENS:
            tokens = [branch.tokens[-1:] for branch in live]  # none at first: a draw from the prompt's last row
            outputs = stream.decode(
                [branch.cache for branch in live], tokens, policy=[branch.policy for branch in live]
            )
            for branch, output in zip(live, outputs, strict=True):
                branch.tokens += output.tokens
                branch.logprob += sum(output.logprobs)
            live = [branch for branch in live if branch.tokens[-1] not in ends]
    return sorted(branches, key=lambda branch: -branch.logprob / len(branch.tokens))


def main() -> None:
    """Print the branches, best first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="127.0.0.1:50051")
    with Client.connect(parser.parse_args().target) as client:
        for branch in best_of_n(client, PROMPT):
            text = client.decode_tokens(branch.tokens, skip_special_tokens=True)
            print(f"{branch.logprob / len(branch.tokens):7.3f}  {text!r}")


if __name__ == "__main__":
    main()
