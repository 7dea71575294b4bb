"""Write your own scheduler: pieces of long prompts and decodes of other sequences share frames that you compose."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field

from ferrule import Cache, Client, greedy
from ferrule.errors import UnavailableError
from ferrule.types import Append, Prompt

PROMPTS = (
    "def area(width, height):\n    return",
    "import os\n\n\ndef list_files(path):\n",
    "class Queue:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n" * 4,
)
NUM_TOKENS = 12
MAX_ROWS = 24
"""Rows of one frame. A decode takes one row; prompts get the rest, so that none of them holds up the decodes."""


@dataclass(slots=True)
class Request:
    """A prompt that is being run, then a text that is being drawn."""

    rest: list[int]
    cache: Cache | None = None
    tokens: list[int] = field(default_factory=list[int])

    def next_item(self, room: int) -> Prompt | Append[Cache]:
        """Return the next piece of the prompt, or after that nothing but the pending token: a decode."""
        piece, self.rest = self.rest[:room], self.rest[room:]
        if self.cache is None:
            return Prompt(piece, greedy(), is_final=not self.rest)
        return Append(self.cache, piece, greedy(), is_final=not self.rest)


def plan(requests: list[Request]) -> list[Request]:
    """Return the requests in the order in which they get rows: decodes first, then prompts in order of arrival."""
    return sorted(requests, key=lambda one: bool(one.rest))


def serve(client: Client, requests: list[Request]) -> int:
    """Draw a text for every request and return the number of frames; one more request arrives with each frame."""
    num_frames = 0
    try:
        with client.stream() as stream:
            while live := [one for one in requests[: num_frames + 1] if len(one.tokens) < NUM_TOKENS]:
                batch: list[Request] = []
                items: list[Prompt | Append[Cache]] = []
                room = MAX_ROWS
                for request in plan(live):
                    if room > 0:
                        num_rows = min(room, len(request.rest)) or 1
                        batch.append(request)
                        items.append(request.next_item(room))
                        room -= num_rows
                for request, result in zip(batch, stream.run(items), strict=True):
                    cache: Cache = request.cache or result  # the result of a Prompt is its cache
                    request.cache = cache
                    request.tokens += cache.last.tokens
                num_frames += 1
    finally:
        client.release(one.cache for one in requests if one.cache is not None)
    return num_frames


def main() -> None:
    """Print the texts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="127.0.0.1:50051")
    with Client(parser.parse_args().target) as client:
        prompts = [client.tokenize(text, add_special_tokens="begin") for text in PROMPTS]
        requests = list(map(Request, prompts))
        num_frames = serve(client, requests)
        for prompt, request in zip(prompts, requests, strict=True):
            print(f"{len(prompt):4} prompt tokens  ->  {client.detokenize(request.tokens)!r}")
        print(f"{num_frames} frames for {sum(map(len, prompts)) + NUM_TOKENS * len(requests)} tokens")


if __name__ == "__main__":
    try:
        main()
    except UnavailableError as error:  # there is no server, or it went away
        sys.exit(str(error))
