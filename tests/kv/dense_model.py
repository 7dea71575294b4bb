"""The naive dense model of the store: tokens in rows, owners counted from tables, rules read off the design."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np

from ferrule_server.errors import (
    BlocksExhausted,
    ContextExceeded,
    ExceedsPool,
    FerruleError,
    HandleExpired,
    HandleStale,
    HandleUnknown,
    KvGivenBack,
    QuotaExceeded,
)
from ferrule_server.kv.append_rule import Verdict
from ferrule_server.kv.handle import Handle, StalePolicy
from ferrule_server.kv.registry import TOMBSTONE_S
from ferrule_server.kv.reservation import Reservation
from ferrule_server.kv.sequence import Sequence
from ferrule_server.quotas import MIN_TTL_S, UNLIMITED, QuotaLimits
from tests.kv.cache_model import CacheModel

FINGERPRINT = b"the model"
MAX_TTL_S = 80.0
EMPTY_SLOT = -1

Tokens = tuple[int, ...]


def lineage_of(tokens: SequenceOf[int], fingerprint: bytes = FINGERPRINT) -> bytes:
    """Return the lineage by its definition, sharing no code with the chain."""
    link = hashlib.blake2b(fingerprint, digest_size=16, person=b"ferrule.root").digest()
    for start in range(0, len(tokens), 16):
        chunk = tokens[start : start + 16]
        person = b"ferrule.full" if len(chunk) == 16 else b"ferrule.part"
        data = link + np.array(chunk, dtype="<u4").tobytes()
        link = hashlib.blake2b(data, digest_size=16, person=person).digest()
    return link


def verdict_of(held: Tokens, named: Tokens, tokens: Tokens, policy: StalePolicy) -> Verdict | type[FerruleError]:
    """Return what the append rule says of ``tokens`` behind a handle that names tokens, from the tokens alone."""
    length = len(named)
    if held[:length] != named:
        return HandleStale
    if not tokens:
        return Verdict.QUERY
    if len(held) == length:
        return Verdict.APPEND
    if held[length : length + len(tokens)] == tokens:
        return Verdict.REPLAY
    if policy is StalePolicy.FAIL:
        return HandleStale
    return Verdict.FORK if policy is StalePolicy.FORK else Verdict.REWIND


@dataclass(eq=False)
class DenseSequence:
    """What a sequence should be: its tokens in a row."""

    real: Sequence
    principal: str
    tokens: Tokens
    ttl_s: float
    expires_at: float
    not_before: float = 0.0
    """An overdue sequence seen while pinned is not looked at again before this."""
    reserved_length: int = 0
    is_published: bool = True
    window: int = 0
    num_given_back: int = 0
    died: str = ""
    died_at: float = 0.0
    last_truncate: tuple[Tokens, int, int] | None = None
    last_request: tuple[Tokens, int] | None = None
    """Of the last truncate; kept when the tip moves on."""


@dataclass(eq=False)
class Append:
    """A reservation on its way, and how far its rows have been written."""

    reservation: Reservation
    tokens: Tokens
    before: Tokens
    target: DenseSequence | None = None
    source: DenseSequence | None = None
    reserved_length: int = 0
    is_published: bool = True
    window: int = 0
    num_given_back: int = 0
    num_written: int = 0
    is_copied: bool = False

    @property
    def pinned(self) -> DenseSequence | None:
        """What must not expire."""
        return self.target or self.source

    @property
    def is_void(self) -> bool:
        """Its sequence is gone, so it may only be closed."""
        return self.target is not None and self.target.died != ""


@dataclass(frozen=True)
class Issued:
    """A handle that was given out, with the tokens it names for ever."""

    handle: Handle = field(repr=False)
    owner: DenseSequence
    tokens: Tokens


class DenseModel:
    """What the store should hold and answer, computed the slow and obvious way.

    Attributes:
        clock_s: The time; moved by the machine.
        slots: int64 [num_blocks, block_size], the simulated pool: a token id per slot, or EMPTY_SLOT.
        kv: int64 [num_blocks, block_size], what really lies there: a number for the token, all tokens before it and the
            principal it was computed for; equal only if all of these are.
        cache: The owners and the prefix cache. counts: what metrics must say, by name.
        sequences: All there ever were. appends: those in flight. issued: all handles given out.
        limits: Quotas by principal; who is not there has none.
    """

    def __init__(self, block_size: int, num_blocks: int, max_context: int, *, has_prefix_cache: bool = True) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.max_context = max_context
        self.clock_s = 0.0
        self.slots = np.full((num_blocks, block_size), EMPTY_SLOT, dtype=np.int64)
        self.kv = self.slots.copy()
        self.cache = CacheModel(num_blocks, block_size, is_on=has_prefix_cache)
        self.counts: Counter[str] = Counter()
        self._kv_ids: dict[tuple[int | str, int], int] = {}
        self.sequences: list[DenseSequence] = []
        self.appends: list[Append] = []
        self.issued: list[Issued] = []
        self.limits: dict[str, QuotaLimits] = {}

    @property
    def live(self) -> list[DenseSequence]:
        """Sequences neither released nor expired."""
        return [each for each in self.sequences if not each.died]

    def kv_of(self, principal: str, tokens: SequenceOf[int]) -> list[int]:
        """Return what lies in the slots of these tokens."""
        numbers: list[int] = []
        before: int | str = principal
        for token in tokens:
            before = self._kv_ids.setdefault((before, token), len(self._kv_ids))
            numbers.append(before)
        return numbers

    def owners(self) -> Counter[int]:
        """Count the owners of each block from the tables."""
        owners = Counter(block for each in self.live for block in self.held(each))
        owners.update(block for each in self.appends for block in each.reservation.held_ids)
        return owners

    @property
    def num_free(self) -> int:
        """Blocks that nobody owns."""
        return self.num_blocks - 1 - len(self.owners())

    def held(self, dense: DenseSequence) -> list[int]:
        """Return the blocks of a sequence, those set aside last."""
        return [*dense.real.block_ids[dense.num_given_back :], *dense.real.spare_ids]

    def lowest_length(self, dense: DenseSequence) -> int:
        """Return the length of the shortest prefix whose last row attends to nothing that was given back."""
        return dense.num_given_back * self.block_size + dense.window if dense.num_given_back else 1

    def num_outside(self, window: int, before: int, start: int, stop: int) -> int:
        """Return how many blocks are given back after an append from ``start`` to ``stop``."""
        if not window or start // self.block_size == stop // self.block_size:
            return before
        return max(before, (stop - 2 * window - 1) // self.block_size)

    def usage(self, principal: str) -> tuple[int, int]:
        """Count the principal's sequences (those in creation too) and its blocks."""
        own = [each for each in self.live if each.principal == principal]
        appends = [each for each in self.appends if each.reservation.principal == principal]
        blocks = {block for each in own for block in self.held(each)}
        blocks.update(block for each in appends for block in each.reservation.held_ids)
        return len(own) + sum(each.target is None for each in appends), len(blocks)

    def num_spares(self, dense: DenseSequence, length: int, reserved_length: int, owners: Counter[int]) -> int:
        """Return how many blocks appends from ``length`` to ``reserved_length`` take, the copy of a block included."""
        if reserved_length <= length:
            return 0
        last_block = dense.real.block_ids[(length - 1) // self.block_size]
        is_copied = length % self.block_size > 0 and owners[last_block] > 1
        return self.blocks_for(reserved_length) - self.blocks_for(length) + is_copied

    def num_spares_to_share(self, dense: DenseSequence, length: int) -> int:
        """Return how many blocks are missing before a prefix may be shared."""
        shared = self.owners()
        shared.update(dense.real.block_ids[: self.blocks_for(length)])
        needed = self.num_spares(dense, len(dense.tokens), dense.reserved_length, shared)
        return max(0, needed - len(dense.real.spare_ids))

    def is_busy(self, dense: DenseSequence) -> bool:
        """Return whether an append is in flight on it."""
        return any(each.target is dense for each in self.appends)

    def is_pinned(self, dense: DenseSequence) -> bool:
        """Return whether anything is in flight on it."""
        return any(each.pinned is dense for each in self.appends)

    def is_overdue(self, dense: DenseSequence) -> bool:
        """Return whether its lease has ended and nothing holds it."""
        return dense.expires_at <= self.clock_s and not self.is_pinned(dense)

    def blocks_for(self, num_tokens: int) -> int:
        """Return ceil(num_tokens / block_size)."""
        return (num_tokens + self.block_size - 1) // self.block_size

    def renewed(self, dense: DenseSequence, ttl_s: float | None = None) -> None:
        """Follow a renewal."""
        if ttl_s is not None:
            dense.ttl_s = min(max(ttl_s, MIN_TTL_S), MAX_TTL_S)
        dense.expires_at = self.clock_s + dense.ttl_s
        dense.not_before = 0.0

    def refusal(self, issued: Issued, principal: str) -> type[FerruleError] | None:
        """Return what resolving must raise."""
        dense = issued.owner
        if dense.principal != principal or dense.died == "released":
            return HandleUnknown
        if dense.died == "expired":
            return HandleExpired if self.clock_s < dense.died_at + TOMBSTONE_S else HandleUnknown
        return HandleExpired if self.is_overdue(dense) else None

    def shortage(
        self,
        principal: str,
        dense: DenseSequence | None,
        start: int,
        num_tokens: int,
        kind: Verdict,
        *,
        reserved_length: int = 0,
        found: SequenceOf[int] = (),
    ) -> type[FerruleError] | None:
        """Return what a reservation must raise; ``found`` are the blocks that a prompt gets from the prefix cache."""
        if dense is not None and start < self.lowest_length(dense):
            return KvGivenBack
        owners, num_gone = self.owners(), 0 if dense is None else dense.num_given_back
        stop = max(start + num_tokens, reserved_length)
        is_copied = num_spares = num_own = 0
        if dense is None:
            num_own = sum(block in owners for block in found)
        else:
            last_block = dense.real.block_ids[(start - 1) // self.block_size]
            is_copied = start % self.block_size > 0 and (kind is Verdict.FORK or owners[last_block] > 1)
        if dense is not None and kind is Verdict.FORK:
            num_spares = self.num_spares_to_share(dense, start)
        elif dense is not None:
            num_own = len(dense.real.spare_ids)
        if stop > self.max_context:
            return ContextExceeded
        num_whole = self.blocks_for(stop)
        if num_whole + (is_copied and kind is Verdict.FORK) - num_gone > self.num_blocks - 1:
            return ExceedsPool
        if dense is not None and kind is Verdict.REWIND:
            num_own += sum(owners[block] == 1 for block in dense.real.block_ids[self.blocks_for(start) :])
            num_whole = self.blocks_for(max(stop, dense.reserved_length))
        num_needed = num_whole - self.blocks_for(start) + is_copied + num_spares
        if kind is Verdict.FORK:
            num_whole += is_copied + num_spares
        is_new = dense is None or kind is Verdict.FORK
        return self.refusal_of_more(principal, int(is_new), max(0, num_needed - num_own), num_whole - num_gone)

    def refusal_of_more(
        self, principal: str, num_sequences: int, num_blocks: int, num_whole: int = 0
    ) -> type[FerruleError] | None:
        """Return what wanting so much more must raise."""
        limits = self.limits.get(principal, UNLIMITED)
        used_sequences, used_blocks = self.usage(principal)
        if num_sequences and limits.handles is not None and used_sequences + num_sequences > limits.handles:
            return QuotaExceeded
        num_slots = max(used_blocks + num_blocks, num_whole) * self.block_size
        if num_blocks and limits.kv_tokens is not None and num_slots > limits.kv_tokens:
            return QuotaExceeded
        return BlocksExhausted if num_blocks > self.num_free else None

    def read_kv(self, block_ids: SequenceOf[int], length: int) -> list[int]:
        """Read what lies in the slots of the first tokens of a block table."""
        numbers: list[int] = self.kv[list(block_ids)].reshape(-1)[:length].tolist()
        return numbers

    def follow_drop_tail(self, dense: DenseSequence, length: int, table: list[int], spares: tuple[int, ...]) -> None:
        """Follow the cut of a sequence that had this table and these spares; its room is kept, its blocks go back."""
        real, num_kept = dense.real, self.blocks_for(length)
        self.counts["num_truncates"] += 1
        tail = table[num_kept:]
        self.cache.take(block for block in real.spare_ids if block not in (*tail, *spares))
        for block in real.spare_ids:
            self.cache.withdraw(block)
        self.follow_room(dense, length, table[num_kept - 1])
        self.cache.drop([block for block in (*tail, *spares) if block not in real.spare_ids])

    def follow_room(self, dense: DenseSequence, length: int, last_block: int) -> None:
        """Follow what becomes of a partial last block whose owner has room beyond it."""
        if length % self.block_size and dense.reserved_length and self.cache.owners[last_block] == 1:
            self.cache.withdraw(last_block)

    def follow_open(self, reservation: Reservation) -> None:
        """Follow an append that may be written into its first block from now on."""
        if reservation.start % self.block_size:
            self.cache.withdraw(reservation.block_ids[reservation.start // self.block_size])

    def read(self, block_ids: list[int], length: int) -> Tokens:
        """Read tokens through a block table."""
        return tuple(self.slots[block_ids].reshape(-1)[:length].tolist())
