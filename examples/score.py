"""Scoring: how likely is each completion of one prompt? The prompt is run once, each completion once."""

from __future__ import annotations

import argparse

from ferrule_client import Client, Policy, no_output

PROMPT = "def read_file(path):"
COMPLETIONS = (
    "\n    with open(path) as f:\n        return f.read()",
    "\n    return open(path).read()",
    "\n    banana banana banana",
)


def score(client: Client, prompt: str, completions: tuple[str, ...]) -> list[tuple[float, int]]:
    """Return the sum of the log-probabilities and the number of tokens of each completion.

    The prompt's last token is left out of the prefill and sent with each completion: its row is the one that
    predicts the completion's first token. Row i has the log-probability of token i + 1, so the last row has none.
    """
    ids = client.encode(prompt)
    scores = []
    with client.prefill(ids[:-1], policy=no_output()) as cache:
        for completion in completions:
            tokens = client.encode(completion)
            with cache.fork()[0] as branch:
                output = branch.prefill([ids[-1], *tokens], policy=Policy(target_logprobs=True), all_positions=True)
            assert output.target_logprobs is not None
            scores.append((float(output.target_logprobs.sum()), len(tokens)))
    return scores


def main() -> None:
    """Print a line per completion."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="127.0.0.1:50051")
    with Client.connect(parser.parse_args().target) as client:
        for text, (logprob, num_tokens) in zip(COMPLETIONS, score(client, PROMPT, COMPLETIONS), strict=True):
            print(f"{logprob:8.2f} total {logprob / num_tokens:7.3f} per token  {text!r}")


if __name__ == "__main__":
    main()
