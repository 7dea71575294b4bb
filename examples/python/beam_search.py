"""Beam search: one frame per step moves every beam, branches share their blocks, losers end with the next frame."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ferrule import Cache, Client, Policy
from ferrule.errors import UnavailableError

PROMPT = "def read_file(path):"
WIDTH = 3
NUM_TOKENS = 12
POLICY = Policy(top_logprobs=2 * WIDTH)  # candidates only: no logits cross the wire


@dataclass(frozen=True, slots=True)
class Beam:
    """One text and its log-probability; its last token is not in ``cache`` yet."""

    cache: Cache
    tokens: tuple[int, ...] = ()
    logprob: float = 0.0


def beam_search(client: Client, prompt: str) -> list[Beam]:
    """Return the beams, best first; their sequences are released."""
    with client.prefill(prompt, policy=POLICY) as root, client.stream() as stream:
        beams = grow([Beam(root)])
        children: Sequence[Cache] = [root]
        losers: list[Cache] = []
        try:
            for _ in range(NUM_TOKENS - 1):
                # A cache that several beams share moves with the first of them; each other beam gets a branch of it.
                parents, newest = [beam.cache for beam in beams], [beam.tokens[-1] for beam in beams]
                children = stream.branch(parents, newest, policy=POLICY, release=losers)
                beams = grow([replace(beam, cache=child) for beam, child in zip(beams, children, strict=True)])
                losers = list(set(children) - {beam.cache for beam in beams})
        finally:
            client.release(children)
    return beams


def grow(beams: list[Beam]) -> list[Beam]:
    """Return the most likely beams that are one token longer."""
    grown = [
        Beam(beam.cache, (*beam.tokens, one.token), beam.logprob + one.logprob)
        for beam in beams
        for one in beam.cache.last.top_logprobs[-1]
    ]
    return sorted(grown, key=lambda beam: -beam.logprob)[:WIDTH]


def main() -> None:
    """Print the beams, best first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="127.0.0.1:50051")
    with Client(parser.parse_args().target) as client:
        for beam in beam_search(client, PROMPT):
            print(f"{beam.logprob:8.3f}  {client.detokenize(beam.tokens)!r}")


if __name__ == "__main__":
    try:
        main()
    except UnavailableError as error:  # there is no server, or it went away
        sys.exit(str(error))
