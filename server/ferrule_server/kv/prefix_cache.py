"""The prefix cache: full blocks that new sequences of the same principal can share instead of computing them again.

A block is *registered* when a sequence has committed the last of its tokens. From then on a prompt that begins with the
same tokens finds it. If the sequence is still alive, both share the block, as forks do; if not, the block had no owner
and was one of the pool's cached blocks. It stays registered until it is handed out again, or is about to be written.

The KV of a block depends on its tokens and on all tokens before them, so the key is the lineage at the block's end,
which depends on all of these. It is not feasible to choose tokens with a given lineage, yet the block's own tokens and
the lineage before them are compared as well. A principal never finds the blocks of another one: the speed of a prompt
would reveal what the other has sent.

Cold sequences, which lost their KV by a restart or a fault, also share blocks that are *private*: each registers what
it computes again, even if its blocks are not published, and only other cold sequences find that. So forks share again
what they shared before. A private block that loses its last owner is empty.
"""

from __future__ import annotations

from array import array
from collections.abc import Container, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from ferrule_server.kv.block_pool import NULL_BLOCK, BlockPool
from ferrule_server.kv.lineage import LineageChain
from ferrule_server.kv.sequence import Sequence

_Key = tuple[str, bool, bytes]


@dataclass(slots=True)
class _Entry:
    """The contents of a registered block.

    Attributes:
        key: The principal, whether the block is private, and the lineage at its end.
        parent: The lineage at its start.
        token_ids: Its own tokens.
        previous: The block before it in the tables of its owners; NULL_BLOCK: it is the first. Without meaning while
            the block has no owner.
    """

    key: _Key = field(repr=False)
    parent: bytes = field(repr=False)
    token_ids: array[int] = field(repr=False)
    previous: int


class PrefixCache:
    """Finds full blocks by the tokens that they hold and that come before them.

    Invariant: a registered block holds the KV of ``token_ids`` after the tokens that have the lineage ``parent``,
    computed for the principal of its key; the pool keeps exactly the registered blocks, and watches the private ones;
    each key names one block.
    All owners of a block have the same block before it in their tables, or have given that one back.

    Because of the last sentence, a block with an owner is found only after the same block that precedes it there. Two
    sequences that compute equal tokens at the same time have each their own blocks, and those committed first are
    registered. Blocks that the other one appends are registered too, and are found after the first one's blocks once
    the other sequence is gone. So refcounts never rise along a table, but for owners that gave back blocks before.

    Args:
        pool: The blocks; it calls back when it evicts a cached one.
        is_on: False: no block is registered but private ones.

    Attributes:
        registered: The registered blocks, a view that is read for each token decoded.
    """

    def __init__(self, pool: BlockPool, *, is_on: bool = True) -> None:
        self._pool = pool
        self.is_on = is_on
        self._entries: dict[int, _Entry] = {}
        self._blocks: dict[_Key, int] = {}
        self.registered: Container[int] = self._entries
        pool.on_evict = self._unlist

    def register(self, sequence: Sequence, table: SequenceOf[int], blocks: range, *, was_cold: bool = False) -> None:
        """Register full blocks of the sequence.

        If a block with the same tokens is registered already, it stays if it has an owner. If not, the newer block
        replaces it, since that one will be needed for longer.

        Args:
            sequence: The sequence; unless its blocks are published, nothing is registered, or all as private.
            table: Its block table.
            blocks: Which blocks of the table.
            was_cold: They have been computed again.
        """
        is_private = not (sequence.is_published and self.is_on)
        if is_private and not was_cold:
            return
        chain, size = sequence.chain, self._pool.block_size
        parent = chain.at(blocks.start * size)
        for index in blocks:
            stop = (index + 1) * size
            lineage = chain.at(stop)
            key = (sequence.principal, is_private, lineage)
            previous = table[index - 1] if index else NULL_BLOCK
            self._list(table[index], _Entry(key, parent, chain.token_ids[stop - size : stop], previous))
            parent = lineage

    def find(self, principal: str, chain: LineageChain, *, is_cold: bool = False) -> list[int]:
        """Return the registered blocks that hold the first tokens of the chain; change nothing.

        Args:
            principal: The owner of the chain.
            chain: The tokens.
            is_cold: They are those of a cold sequence, which finds private blocks too.
        """
        found: list[int] = []
        size, parent, previous = self._pool.block_size, chain.at(0), NULL_BLOCK
        for stop in range(size, len(chain) + 1, size):
            lineage = chain.at(stop)
            held = parent, chain.token_ids[stop - size : stop], previous
            for is_private in (False, True)[: 1 + is_cold]:
                block_id = self._blocks.get((principal, is_private, lineage))
                if block_id is not None and self._holds(block_id, *held):
                    break
            else:
                break
            found.append(block_id)
            parent, previous = lineage, block_id
        return found

    def link(self, block_ids: Iterable[int]) -> None:
        """Note that these blocks, just found, follow each other in a table from now on."""
        previous = NULL_BLOCK
        for block_id in block_ids:
            self._entries[block_id].previous = previous
            previous = block_id

    def withdraw(self, block_id: int) -> None:
        """Make the block impossible to find, since its one owner will write into it, or may at any time."""
        if block_id in self._entries:
            self._unlist(block_id)
            self._pool.forget(block_id)

    def clear(self) -> None:
        """Forget every block."""
        for block_id in list(self._entries):
            self.withdraw(block_id)

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raise AssertionError unless the invariant of the class holds in the tables of these sequences."""
        private = {block_id for block_id, entry in self._entries.items() if entry.key[1]}
        assert self.is_on or private == set(self._entries), "something is registered in a cache that is off"
        keys = {entry.key: block_id for block_id, entry in self._entries.items()}
        assert keys == self._blocks, "blocks and keys do not name each other"
        owned = {block_id for block_id in self._entries if self._pool.refcount(block_id)}
        assert {*owned, *self._pool.cached_ids()} == set(self._entries), "other blocks are kept than are registered"
        assert private <= owned, "a private block without owner is registered"
        for sequence in sequences:
            self._check_table(sequence)
            assert not owned.intersection(sequence.spare_ids), f"a spare of {sequence.handle_id} is registered"

    def check_unlisted(self, block_ids: Iterable[int]) -> None:
        """Raise AssertionError if one of these blocks, about to be written, is registered."""
        for block_id in block_ids:
            assert block_id not in self._entries, f"block {block_id} would be written and is registered"

    def _check_table(self, sequence: Sequence) -> None:
        """Check the registered blocks of one table; the last block may hold more tokens than the sequence."""
        chain, size, name = sequence.chain, self._pool.block_size, sequence.handle_id
        for index, block_id in enumerate(sequence.held_ids, sequence.num_given_back):
            entry = self._entries.get(block_id)
            if entry is None:
                continue
            start, stop = index * size, min((index + 1) * size, len(chain))
            assert entry.key[0] == sequence.principal, f"a block of {name} is registered for another principal"
            assert entry.parent == chain.at(start), f"block {index} of {name} is registered after other tokens"
            assert entry.token_ids[: stop - start] == chain.token_ids[start:stop], f"block {index} of {name} has others"
            assert stop < start + size or entry.key[2] == chain.at(stop), f"block {index} of {name} has another key"
            previous = sequence.block_ids[index - 1] if index else NULL_BLOCK
            is_known = index == 0 or previous != NULL_BLOCK
            assert not is_known or entry.previous == previous, f"block {index} of {name} is registered after another"

    def _list(self, block_id: int, entry: _Entry) -> None:
        """Register an owned block, unless another owned block holds the same."""
        other = self._blocks.get(entry.key)
        if other is not None:
            if self._pool.refcount(other):
                return
            self.withdraw(other)
        self._entries[block_id] = entry
        self._blocks[entry.key] = block_id
        self._pool.keep(block_id, outlives_owners=not entry.key[1])

    def _holds(self, block_id: int, parent: bytes, token_ids: array[int], previous: int) -> bool:
        """Return whether a registered block holds these tokens after ``parent``, and may follow ``previous``."""
        entry = self._entries[block_id]
        may_follow = entry.previous == previous or not self._pool.refcount(block_id)
        return may_follow and entry.parent == parent and entry.token_ids == token_ids

    def _unlist(self, block_id: int) -> None:
        """Forget the contents of the block."""
        del self._blocks[self._entries.pop(block_id).key]
