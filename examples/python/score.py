"""RL scoring: log-probabilities of given completions, as a reward model or a policy gradient needs them.

Two ways, the same numbers: ``client.score`` runs a whole text and keeps nothing; where many completions share a long
prompt, fork it and run each completion alone.
"""

from __future__ import annotations

import argparse
import contextlib

import numpy as np

from ferrule import Client, FerruleError, Policy
from ferrule.types import Append, FloatArray

PROMPT = "def read_file(path):"
COMPLETIONS = (
    "\n    with open(path) as f:\n        return f.read()",
    "\n    return open(path).read()",
    "\n    banana banana banana",
)


def score_whole(client: Client, prompt: list[int], completion: list[int]) -> FloatArray:
    """Return the log-probability of each token of a completion; the prompt is run again for each."""
    return client.score([*prompt, *completion])[len(prompt) - 1 :]


def score_forked(client: Client, prompt: list[int], completions: list[list[int]]) -> list[FloatArray]:
    """Return the log-probability of each token of each completion; the prompt is run once.

    Its last token is left out of the prefill and sent with each completion: its row is the one that predicts the
    completion's first token. Row i has the log-probability of token i + 1, so the last row has none. All completions go
    in one frame, so that they share their steps.
    """
    scores = []
    policy = Policy(target_logprobs=True)
    with contextlib.ExitStack() as stack:
        cache = stack.enter_context(client.prefill(prompt[:-1]))
        stream = stack.enter_context(client.stream())
        branches = [stack.enter_context(branch) for branch in cache.fork(len(completions))]
        pairs = zip(branches, completions, strict=True)
        chunks = [Append([prompt[-1], *ids], branch, policy, all_positions=True) for branch, ids in pairs]
        for result in stream.run(chunks):
            if isinstance(result, FerruleError):
                raise result
        for branch in branches:
            assert branch.last is not None
            assert branch.last.target_logprobs is not None
            scores.append(branch.last.target_logprobs)
    return scores


def main() -> None:
    """Print a line per completion."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="127.0.0.1:50051")
    with Client(parser.parse_args().target) as client:
        prompt, completions = client.tokenize(PROMPT), [client.tokenize(text) for text in COMPLETIONS]
        forked = score_forked(client, prompt, completions)
        for text, ids, logprobs in zip(COMPLETIONS, completions, forked, strict=True):
            whole = score_whole(client, prompt, ids)
            assert np.allclose(whole, logprobs, atol=0.2)  # bfloat16 rounds differently in other shapes
            print(f"{logprobs.sum():8.2f} total {logprobs.mean():7.3f} per token  {text!r}")


if __name__ == "__main__":
    main()
