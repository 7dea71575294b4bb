"""An agent loop: the model writes a line, a tool answers, and only the answer is run; an empty line is rolled back."""

from __future__ import annotations

import argparse
import sys

from ferrule import Cache, Client, sample
from ferrule.errors import UnavailableError

PROMPT = "# Ask the tool for names, one per line.\nnames = []\nname ="
NUM_TURNS = 3
NUM_TRIES = 4


def run_tool(line: str) -> str:
    """Return the tool's answer; here, the number of letters in the line."""
    return str(sum(map(str.isalpha, line)))


def write_line(cache: Cache, seed: int) -> str:
    """Return a line that the model writes; one without a letter is rolled back and drawn again."""
    start = cache.length
    for attempt in range(NUM_TRIES):
        loop = cache.generate(12, stop="\n", policy=sample(temperature=0.7, seed=seed + attempt))
        line = "".join(loop.pieces())  # the text ends before its stop
        if loop.finish_reason == "stop_sequence":
            cache.truncate(cache.length)  # drops the pending token, which holds the newline
        if any(map(str.isalpha, line)):
            return line.strip()
        cache.truncate(start)
    return ""


def take_turn(cache: Cache, turn: int) -> None:
    """Have the model write a line, and append the tool's answer to it."""
    line = write_line(cache, seed=turn * NUM_TRIES)
    before = cache.length
    # `append` takes text as plain text, so a tool can write no control token. Here a line end begins the next turn, so
    # its answer must be one line.
    answer = " ".join(run_tool(line).split())
    cache.append(f"\n# letters: {answer}\nname =")  # runs these tokens, and none before them
    print(f"turn {turn}: {line!r}, {cache.length - before} tokens appended, {cache.length} in the cache")


def main() -> None:
    """Print each turn, then the whole text as the server holds it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="127.0.0.1:50051")
    with Client(parser.parse_args().target) as client:
        client.status()  # fails at once without a server; a cache that recovers waits for one
        # A tool may take minutes: the lease is renewed in the background, and lasts 600 s beyond that. If the server
        # restarts meanwhile, the cache prefills the text so far and the loop continues.
        with client.prefill(PROMPT, ttl=600, recover=True) as cache:
            for turn in range(NUM_TURNS):
                take_turn(cache, turn)
            print(client.detokenize(cache.info(token_ids=True).token_ids))


if __name__ == "__main__":
    try:
        main()
    except UnavailableError as error:  # there is no server, or it went away
        sys.exit(str(error))
