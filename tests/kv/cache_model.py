"""The naive model of the pool with a prefix cache: owners counted, cached blocks in a list, prefixes whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

NULL_BLOCK = 0

Tokens = tuple[int, ...]


@dataclass
class Known:
    """What a registered block holds: the last tokens of ``prefix``, computed for ``principal`` behind ``previous``."""

    principal: str
    prefix: Tokens
    previous: int


class CacheModel:
    """Follows what the store says that it did with blocks, and objects where another block should have been taken.

    Attributes:
        owners: By block; nobody owns those left out.
        known: The registered blocks.
        cached: Those of them that nobody owns, the one to be handed out next first.
        num_evictions: Cached blocks handed out.
    """

    def __init__(self, num_blocks: int, block_size: int, *, is_on: bool) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.is_on = is_on
        self.owners: Counter[int] = Counter()
        self.known: dict[int, Known] = {}
        self.cached: list[int] = []
        self.num_evictions = 0

    @property
    def num_empty(self) -> int:
        """Blocks that hold nothing and that nobody owns."""
        return self.num_blocks - 1 - len(self.owners) - len(self.cached)

    def take(self, block_ids: Iterable[int]) -> None:
        """Follow an allocation: empty blocks as long as there are any, then cached ones from the front."""
        for block_id in block_ids:
            assert block_id not in self.owners
            if self.num_empty:
                assert block_id not in self.known, f"block {block_id} was cached, and {self.num_empty} were empty"
            else:
                assert block_id == self.cached[0], f"block {block_id} was not the one that was cached for longest"
                del self.cached[0], self.known[block_id]
                self.num_evictions += 1
            self.owners[block_id] = 1

    def share(self, block_ids: Iterable[int], count: int = 1) -> None:
        """Give owned blocks more owners."""
        for block_id in block_ids:
            assert self.owners[block_id] > 0
            self.owners[block_id] += count

    def adopt(self, block_ids: Iterable[int]) -> None:
        """Follow a hit."""
        previous = NULL_BLOCK
        for block_id in block_ids:
            if block_id in self.cached:
                self.cached.remove(block_id)
            self.known[block_id].previous = previous
            self.owners[block_id] += 1
            previous = block_id

    def drop(self, block_ids: SequenceOf[int]) -> None:
        """Take one owner from each block of a table, from its end to its beginning."""
        for block_id in reversed(block_ids):
            self.owners[block_id] -= 1
            assert self.owners[block_id] >= 0
            if not self.owners[block_id]:
                del self.owners[block_id]
                if block_id in self.known:
                    self.cached.append(block_id)

    def register(self, principal: str, tokens: Tokens, table: SequenceOf[int], start: int) -> None:
        """Follow a commit that filled the blocks from number ``start`` on."""
        for index in range(start, len(tokens) // self.block_size):
            known = Known(principal, tokens[: (index + 1) * self.block_size], table[index - 1] if index else NULL_BLOCK)
            twin = self.holder(principal, known.prefix)
            if twin is not None and twin in self.owners:
                continue
            if twin is not None:
                self.withdraw(twin)
            self.known[table[index]] = known

    def withdraw(self, block_id: int) -> None:
        """Forget a block that will be written, or that a newer one replaces."""
        self.known.pop(block_id, None)
        if block_id in self.cached:
            self.cached.remove(block_id)

    def holder(self, principal: str, prefix: Tokens) -> int | None:
        """Return the block registered with the end of this prefix."""
        held = [block for block, each in self.known.items() if (each.principal, each.prefix) == (principal, prefix)]
        assert len(held) <= 1
        return held[0] if held else None

    def find(self, principal: str, prompt: Tokens) -> list[int]:
        """Return the blocks that a prompt must get."""
        found: list[int] = []
        for stop in range(self.block_size, len(prompt) + 1, self.block_size):
            block_id = self.holder(principal, prompt[:stop])
            if block_id is None:
                break
            previous = found[-1] if found else NULL_BLOCK
            if block_id in self.owners and self.known[block_id].previous != previous:
                break
            found.append(block_id)
        return found
