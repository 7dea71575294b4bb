"""The sequence: the state of the server for the handles of one cache_id."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, field

from ferrule_server.errors import HandleUnknown, KvGivenBack
from ferrule_server.kv.handle import Handle
from ferrule_server.kv.lineage import LineageChain


@dataclass(frozen=True, slots=True)
class Truncation:
    """The last truncate of a sequence, remembered so that an equal request succeeds again.

    Attributes:
        handle: The handle of the request.
        new_length: Tokens kept.
        freed_blocks: The answer.
    """

    handle: Handle
    new_length: int
    freed_blocks: int


@dataclass(eq=False, slots=True)
class Sequence:
    """One sequence: its tokens, its blocks, its lease. The one owner of length.

    Only :class:`~ferrule_server.kv.sequence_store.SequenceStore` and its parts change it, except that the engine counts
    ``num_pins`` too.

    Attributes:
        cache_id: The secret name, never logged. handle_id: the loggable one.
        principal: The owner.
        chain: Tokens and lineage; ``token_ids`` and ``length`` read it.
        block_ids: The block table: block i holds the tokens from i * block_size on. Replaced as a whole, never
            changed in place, so a reader may keep it. The first ``num_given_back`` entries are NULL_BLOCK.
        ttl_s: Length of the lease. expires_at: its end on the store's clock. created_at: on the same clock.
        parent_handle_id: The sequence it was branched from; empty when it was prefilled.
        reserved_length: Length up to which appends are sure to find blocks; 0: nothing is reserved.
        spare_ids: Blocks set aside for that, in no table yet (see ``kv/reserved_slots.py``). Replaced as a whole.
        num_pins: Pieces of work in flight; above 0 the sequence does not expire.
        is_appending: An append is reserved on it and neither committed nor aborted.
        last_truncate: Set by a truncate, cleared when the tip moves.
        is_released: Released or expired: it owns no blocks.
        is_published: Its full blocks are registered in the prefix cache as they are committed.
        is_durable: It survives the process: the engine writes what happens to it to the journal.
        is_cold: It was restored and has its tokens, but no blocks: its KV must be computed before an append or a fork
            of it can run. Its forks are cold too.
        window: How many tokens a row attends to, if blocks outside the window are given back; 0: all blocks are kept.
        num_given_back: Blocks that were given back, the first ones of its tokens.
        lowest_length: The lowest length at which the sequence can be continued, forked, truncated or computed again.
        scheduled_at: When the lease heap checks it next.
    """

    cache_id: str = field(repr=False)
    handle_id: str
    principal: str
    chain: LineageChain = field(repr=False)
    block_ids: list[int]
    ttl_s: float
    expires_at: float
    created_at: float
    parent_handle_id: str = ""
    reserved_length: int = 0
    spare_ids: tuple[int, ...] = ()
    num_pins: int = 0
    is_appending: bool = False
    last_truncate: Truncation | None = None
    is_released: bool = False
    is_published: bool = False
    is_durable: bool = False
    is_cold: bool = False
    window: int = 0
    num_given_back: int = 0
    lowest_length: int = 1
    scheduled_at: float = math.inf

    @property
    def token_ids(self) -> array[int]:
        """array("I"), index = position; read only (slices are copies). Keep no buffer of it."""
        return self.chain.token_ids

    @property
    def length(self) -> int:
        """The tip: number of committed tokens."""
        return len(self.chain.token_ids)

    @property
    def num_blocks(self) -> int:
        """Blocks that it holds, shared blocks and spares included."""
        return len(self.block_ids) - self.num_given_back + len(self.spare_ids)

    @property
    def held_ids(self) -> list[int]:
        """The blocks of its table that it holds, as a new list."""
        return self.block_ids[self.num_given_back :]

    @property
    def first_position(self) -> int:
        """The first token whose KV it still holds."""
        return self.lowest_length - self.window if self.num_given_back else 0

    def require_kv(self, length: int) -> None:
        """Return if the KV that a row after the first ``length`` tokens, or the last of them, attends to is held.

        Raises:
            KvGivenBack: Some of it was given back.
        """
        if length < self.lowest_length:
            raise KvGivenBack(self.handle_id, length, self.lowest_length)

    def handle_at(self, length: int | None = None) -> Handle:
        """Return the handle of the first ``length`` tokens; None means all of them."""
        at = len(self.chain.token_ids) if length is None else length
        return Handle(self.cache_id, at, self.chain.at(at))


def require_idle(sequence: Sequence) -> None:
    """Return if the sequence is alive and no append is in flight on it.

    Raises:
        HandleUnknown: It is released.
        RuntimeError: An append is in flight (a bug in the caller).
    """
    if sequence.is_released:
        raise HandleUnknown(sequence.handle_id)
    if sequence.is_appending:
        raise RuntimeError(f"an append is in flight on {sequence.handle_id}; queue after it")
