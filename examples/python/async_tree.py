"""A tree of continuations: every branch is a task of its own, and all of them decode at the same time."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from dataclasses import dataclass, field

from ferrule import AsyncClient
from ferrule.types import AsyncCache

PROMPT = "def read_file(path):"
DEPTH = 3
NUM_BRANCHES = 2
NUM_TOKENS = 8


@dataclass(slots=True)
class Node:
    """What one branch said before it split, and what its branches said."""

    tokens: list[int]
    children: list[Node] = field(default_factory=list)


async def grow(cache: AsyncCache, depth: int, seed: int = 1) -> Node:
    """Return the tree that begins at the end of a cache; its branches share their blocks and are released."""
    node = Node([token async for token in cache.generate(NUM_TOKENS, policy=sample(temperature=0.9, seed=seed))])
    if depth > 0:
        async with contextlib.AsyncExitStack() as stack:
            # A fork takes the pending token along, so each branch goes on right behind the newest one.
            branches = [await stack.enter_async_context(branch) for branch in await cache.fork(NUM_BRANCHES)]
            async with asyncio.TaskGroup() as group:  # one fails: the others are cancelled, and all are released
                tasks = [
                    group.create_task(grow(branch, depth - 1, NUM_BRANCHES * seed + number))
                    for number, branch in enumerate(branches)
                ]
        node.children = [task.result() for task in tasks]
    return node


async def show(client: AsyncClient, node: Node, indent: int = 0) -> None:
    """Print a tree, a branch on each line."""
    print(f"{'    ' * indent}{await client.detokenize(node.tokens, skip_special_tokens=True)!r}")
    for child in node.children:
        await show(client, child, indent + 1)


async def main() -> None:
    """Grow a tree behind the prompt and print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="127.0.0.1:50051")
    async with AsyncClient(parser.parse_args().target) as client:
        async with client.prefill(await client.tokenize(PROMPT)) as cache:
            tree = await grow(cache, DEPTH)
        await show(client, tree)


if __name__ == "__main__":
    asyncio.run(main())
