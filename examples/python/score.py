"""RL scoring: log-probabilities of given completions, as a reward model or a policy gradient needs them.

Three ways, the same numbers. ``client.score(text)`` runs a whole text and keeps nothing. If many completions share a
long prompt, ``client.score(prompt, completions)`` runs the prompt once, forks it and runs each completion alone;
``score_forked`` does the same by hand.
"""

from __future__ import annotations

import argparse
import sys

from ferrule import Client, Policy
from ferrule.errors import UnavailableError
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

    The prompt's last token is sent with each completion, because its row predicts the completion's first token. Row i
    has the log-probability of token i + 1, so the last row has none. All completions share one frame.
    """
    policy = Policy(target_logprobs=True)
    with client.prefill(prompt[:-1]) as trunk, trunk.fork(len(completions)) as branches, client.stream() as stream:
        texts = [[prompt[-1], *completion] for completion in completions]
        pairs = zip(branches, texts, strict=True)
        outputs = stream.run([Append(branch, text, policy, all_positions=True) for branch, text in pairs])
        return [output.target_logprobs for output in outputs]


def main() -> None:
    """Print a line per completion."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="127.0.0.1:50051")
    with Client(parser.parse_args().target) as client:
        prompt = client.tokenize(PROMPT, add_special_tokens="begin")
        completions = [client.tokenize(text) for text in COMPLETIONS]
        forked = score_forked(client, prompt, completions)
        scores = client.score(prompt, completions)
        for text, ids, logprobs, score in zip(COMPLETIONS, completions, forked, scores, strict=True):
            whole = score_whole(client, prompt, ids)
            same = f"{logprobs.mean():7.3f} by hand, {whole.mean():7.3f} whole"
            print(f"{score.total:8.2f} total {score.logprobs.mean():7.3f} per token ({same})  {text!r}")


if __name__ == "__main__":
    try:
        main()
    except UnavailableError as error:  # there is no server, or it went away
        sys.exit(str(error))
