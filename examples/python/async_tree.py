"""A tree of continuations: each branch is a task, and all of them decode at the same time."""

from __future__ import annotations

import argparse
import asyncio
import sys

from ferrule import AsyncClient, sample
from ferrule.errors import UnavailableError
from ferrule.types import AsyncCache

PROMPT = "def read_file(path):"
DEPTH = 3
NUM_BRANCHES = 2
NUM_TOKENS = 8


async def grow(cache: AsyncCache, depth: int = DEPTH, seed: int = 1) -> list[str]:
    """Return the tree that grows at the end of a cache, one line per node; its branches are released."""
    root = await cache.generate(NUM_TOKENS, policy=sample(temperature=0.9, seed=seed), text=True).read()
    lines = [repr(root.text)]
    if depth > 0:
        # Each branch takes the pending token along. If one task fails, the group cancels the others.
        async with cache.fork(NUM_BRANCHES) as branches, asyncio.TaskGroup() as group:
            seeds = range(NUM_BRANCHES * seed, NUM_BRANCHES * (seed + 1))
            pairs = zip(branches, seeds, strict=True)
            tasks = [group.create_task(grow(branch, depth - 1, its_seed)) for branch, its_seed in pairs]
        lines += [f"    {line}" for task in tasks for line in task.result()]
    return lines


async def main() -> None:
    """Grow a tree after the prompt and print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="127.0.0.1:50051")
    async with AsyncClient(parser.parse_args().target) as client, client.prefill(PROMPT) as cache:
        print("\n".join(await grow(cache)))


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except UnavailableError as error:  # there is no server, or it went away
        sys.exit(str(error))
