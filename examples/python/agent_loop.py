"""An agent loop: the model writes a line, a tool answers, only the answer is run; an empty line is taken back."""

from __future__ import annotations

import argparse

from ferrule import Cache, Client

PROMPT = "# Ask the tool for names, one per line.\nnames = []\nname ="
NUM_TURNS = 3
NUM_TRIES = 4


def run_tool(line: str) -> str:
    """Return the tool's answer; here how many letters the line has."""
    return str(sum(letter.isalpha() for letter in line))


def write_line(cache: Cache, *, seed: int) -> str:
    """Let the model write to the end of the line and return what it wrote.

    The token that holds the newline was handed out and stays pending; the truncate drops it.
    """
    line = "".join(cache.generate(max_tokens=12, stop="\n", policy=sample(temperature=0.7, seed=seed)).pieces())
    if "\n" in line:
        cache.truncate(cache.length)
    return line.partition("\n")[0].strip()


def turn(cache: Cache, *, seed: int) -> str:
    """Return a line with at least a letter in it; what was wrong is rolled back and drawn again."""
    start = cache.length
    for attempt in range(NUM_TRIES):
        line = write_line(cache, seed=seed + attempt)
        if any(letter.isalpha() for letter in line):
            return line
        cache.truncate(start)
    return ""


def main() -> None:
    """Print each turn, then the whole text as the server has it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="127.0.0.1:50051")
    with (
        Client(parser.parse_args().target) as client,
        # A tool may take its time: the lease is renewed in the background while `with` lasts, and 600 s besides. Should
        # the server be started anew meanwhile, the text so far is run again and the loop goes on.
        client.prefill(client.tokenize(PROMPT), ttl=600, recover=True) as cache,
    ):
        for number in range(NUM_TURNS):
            line = turn(cache, seed=number * NUM_TRIES)
            answer = client.tokenize(f"\n# letters: {run_tool(line)}\nname =")
            cache.append(answer)  # behind what is pending; nothing before it is run again
            print(f"turn {number}: {line!r}, {len(answer)} tokens of answer, {cache.length} in the cache")
        print(client.detokenize(cache.info(token_ids=True).token_ids))


if __name__ == "__main__":
    main()
