"""A scheduler of your own: chunks of long prompts and decodes of others share batches that you put together."""

from __future__ import annotations

import argparse
from collections import deque
from dataclasses import dataclass, field

from ferrule import Cache, Client, FerruleError, Policy, greedy
from ferrule.types import Append

PROMPTS = (
    "def area(width, height):\n    return",
    "import os\n\n\ndef list_files(path):\n",
    "class Queue:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n" * 4,
)
NUM_TOKENS = 12
MAX_ROWS = 24
"""Rows of one batch: a decode is one row, and the rest is for prompts, so that none of these holds up the decodes."""


@dataclass(slots=True)
class Request:
    """One prompt on its way, then one text in the making."""

    prompt: list[int]
    cache: Cache | None = None
    num_run: int = 0
    tokens: list[int] = field(default_factory=list)

    @property
    def is_prefilled(self) -> bool:
        """True: its prompt has been run."""
        return self.num_run == len(self.prompt)


def next_chunk(request: Request, room: int, policy: Policy) -> Append[Cache]:
    """Return what a request runs next in so many rows: its newest token, or a piece of its prompt."""
    if request.is_prefilled:
        return Append(request.tokens[-1], request.cache, policy)
    piece = request.prompt[request.num_run : request.num_run + room]
    is_final = request.num_run + len(piece) == len(request.prompt)
    return Append(piece, request.cache, policy, is_final=is_final, pos_offset=request.num_run)


def plan(requests: list[Request], policy: Policy) -> list[tuple[Request, Append[Cache]]]:
    """Return the next batch: every decode, then prompts in the order of their arrival, as far as there is room."""
    batch, room = [], MAX_ROWS
    for request in sorted(requests, key=lambda one: not one.is_prefilled):
        if room > 0:
            chunk = next_chunk(request, room, policy)
            batch.append((request, chunk))
            room -= 1 if request.is_prefilled else len(chunk.tokens)  # type: ignore[arg-type] # a prompt is a list
    return batch


def take(request: Request, chunk: Append[Cache], cache: Cache | FerruleError) -> None:
    """Note what came of one piece of a batch."""
    if isinstance(cache, FerruleError):
        raise cache
    request.cache = cache
    if not request.is_prefilled:
        request.num_run = cache.length
    if chunk.is_final and cache.last is not None:
        request.tokens += cache.last.tokens


def serve(client: Client, prompts: list[list[int]]) -> tuple[list[list[int]], int]:
    """Return the greedy continuation of every prompt, and the number of batches; a new one arrives with each batch."""
    arriving = deque(Request(prompt) for prompt in prompts)
    done: list[Request] = []
    live: list[Request] = []
    num_batches = 0
    try:
        while arriving or live:
            if arriving:
                live.append(arriving.popleft())
                done.append(live[-1])
            batch = plan(live, greedy())
            results = client.unified([chunk for _, chunk in batch])
            num_batches += 1
            for (request, chunk), cache in zip(batch, results, strict=True):
                take(request, chunk, cache)
            live = [request for request in live if len(request.tokens) < NUM_TOKENS]
    finally:
        client.release([request.cache for request in done if request.cache is not None])
    return [request.tokens for request in done], num_batches


def main() -> None:
    """Print the continuations."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="127.0.0.1:50051")
    with Client(parser.parse_args().target) as client:
        prompts = [client.tokenize(text) for text in PROMPTS]
        texts, num_batches = serve(client, prompts)
        for prompt, tokens in zip(prompts, texts, strict=True):
            print(f"{len(prompt):4} tokens of prompt  ->  {client.detokenize(tokens)!r}")
        print(f"{num_batches} batches for {sum(map(len, prompts)) + sum(map(len, texts))} tokens")


if __name__ == "__main__":
    main()
