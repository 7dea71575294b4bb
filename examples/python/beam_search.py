"""Beam search: one frame per step moves every beam, branches share their blocks, losers go with the next frame."""

from __future__ import annotations

import argparse
import contextlib
from dataclasses import dataclass, replace

from ferrule import Cache, Client, Policy

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
    """Return the beams, best first; all are released."""
    with contextlib.ExitStack() as stack, client.stream() as stream:
        root = stack.enter_context(client.prefill(client.tokenize(prompt), policy=POLICY))
        beams = _grow([Beam(root)])
        losers: list[Cache] = []
        for _ in range(NUM_TOKENS - 1):
            # A cache that several beams share moves with the first of them; the others get branches of it.
            parents, tokens = [beam.cache for beam in beams], [beam.tokens[-1] for beam in beams]
            children = stream.branch(parents, tokens, policy=POLICY, release=losers)
            for child in children:
                stack.enter_context(child)
            beams = _grow([replace(beam, cache=child) for beam, child in zip(beams, children, strict=True)])
            losers = [child for child in children if all(beam.cache is not child for beam in beams)]
    return beams


def _grow(beams: list[Beam]) -> list[Beam]:
    """Return the likeliest beams that are one token longer."""
    grown: list[Beam] = []
    for beam in beams:
        assert beam.cache.last is not None
        candidates = beam.cache.last.top_logprobs[0]
        grown += [Beam(beam.cache, (*beam.tokens, one.token), beam.logprob + one.logprob) for one in candidates]
    return sorted(grown, key=lambda beam: -beam.logprob)[:WIDTH]


def main() -> None:
    """Print the beams, best first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="127.0.0.1:50051")
    with Client(parser.parse_args().target) as client:
        for beam in beam_search(client, PROMPT):
            print(f"{beam.logprob:8.3f}  {client.detokenize(beam.tokens)!r}")


if __name__ == "__main__":
    main()
