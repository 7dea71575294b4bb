"""Random lives of durable sequences that lose their KV again and again, and are computed again in pieces.

The pool is simulated by what each slot holds: the principal and all tokens up to that slot. Whatever happens, a
sequence reads its own KV back, a new prompt finds only what was published, and after a loss of everything equal blocks
of one principal are there once.

``FERRULE_HYPOTHESIS=long`` runs it for minutes on random seeds.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from itertools import count

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ferrule_server.errors import BlocksExhausted, ExceedsPool
from ferrule_server.kv.block_pool import BlockPool
from ferrule_server.kv.lineage import LineageChain
from ferrule_server.kv.new_sequence import NewSequence
from ferrule_server.kv.reservation import Reservation
from ferrule_server.kv.sequence import Sequence
from ferrule_server.kv.sequence_store import SequenceStore
from tests.kv.test_state_machine import machine_profile

Tokens = tuple[int, ...]
Slot = tuple[str, Tokens]

PRINCIPALS = ("alice", "bob")
FINGERPRINT = b"model"

tokens_st = st.lists(st.integers(0, 1), min_size=1, max_size=14).map(tuple)
index_st = st.integers(0, 10_000)
principal_st = st.sampled_from([*PRINCIPALS[:1] * 3, *PRINCIPALS])


class ColdMachine(RuleBasedStateMachine):
    """One store whose sequences are all durable."""

    @initialize(block_size=st.sampled_from([1, 2, 4, 16]), num_blocks=st.sampled_from([20, 60]), is_on=st.booleans())
    def start(self, block_size: int, num_blocks: int, is_on: bool) -> None:
        """Begin with an empty pool."""
        secrets = count()
        self.size = block_size
        self.store = SequenceStore(
            BlockPool(num_blocks, block_size),
            instance="i",
            epoch="e",
            max_context=60,
            max_ttl_s=1000.0,
            clock=lambda: 0.0,
            new_secret=lambda: hashlib.blake2b(next(secrets).to_bytes(8, "little"), digest_size=16).digest(),
            has_prefix_cache=is_on,
            durable_epoch="d",
        )
        self.kv: dict[tuple[int, int], Slot] = {}
        self.published: set[Slot] = set()
        self.warming: dict[Reservation, int] = {}

    # ---- helpers ----------------------------------------------------------------------------------------------------

    def live(self, wanted: Callable[[Sequence], bool]) -> list[Sequence]:
        """Return some sequences, in a fixed order."""
        return [each for each in self.store.registry if not each.is_appending and wanted(each)]

    def write(self, principal: str, tokens: Tokens, table: list[int], start: int, stop: int) -> None:
        """Run rows."""
        for at in range(start, stop):
            self.kv[table[at // self.size], at % self.size] = (principal, tokens[: at + 1])

    def read(self, table: list[int], length: int) -> list[Slot]:
        """Return what the first slots of a table hold."""
        return [self.kv[table[at // self.size], at % self.size] for at in range(length)]

    def expected(self, principal: str, tokens: Tokens) -> list[Slot]:
        """Return what they should hold."""
        return [(principal, tokens[: at + 1]) for at in range(len(tokens))]

    def publish(self, sequence: Sequence) -> None:
        """Note the full blocks that others of the principal may find from now on."""
        if sequence.is_published:
            tokens = tuple(sequence.token_ids)
            stops = range(self.size, len(tokens) + 1, self.size)
            self.published.update((sequence.principal, tokens[:stop]) for stop in stops)

    # ---- lives of warm sequences ------------------------------------------------------------------------------------

    @rule(principal=principal_st, tokens=tokens_st, publish=st.booleans(), room=st.sampled_from([0, 0, 20]))
    def prefill(self, principal: str, tokens: Tokens, publish: bool, room: int) -> None:
        """Make a sequence; what its prompt finds was published and is right."""
        try:
            made = self.store.reservations.reserve_new(
                principal,
                FINGERPRINT,
                len(tokens),
                NewSequence(reserved_length=room, publish_prefix=publish, is_durable=True),
                tokens,
            )
        except (BlocksExhausted, ExceedsPool):
            return
        assert self.read(made.block_ids, made.num_cached) == self.expected(principal, tokens[: made.num_cached])
        stops = range(self.size, made.num_cached + 1, self.size)
        assert {(principal, tokens[:stop]) for stop in stops} <= self.published
        self.write(principal, tokens, made.block_ids, made.num_cached, len(tokens))
        self.publish(self.store.commit(made, tokens))

    @precondition(lambda self: self.live(lambda each: True))
    @rule(index=index_st, cut=st.integers(0, 9), num=st.integers(1, 3))
    def fork(self, index: int, cut: int, num: int) -> None:
        """Fork a warm or a cold sequence."""
        of = self.live(lambda each: True)
        source = of[index % len(of)]
        try:
            self.store.fork(source, max(1, source.length - cut), num)
        except (BlocksExhausted, ExceedsPool):
            assert source.reserved_length

    @precondition(lambda self: self.live(lambda each: not each.is_cold))
    @rule(index=index_st, tokens=tokens_st)
    def append(self, index: int, tokens: Tokens) -> None:
        """Append to a warm sequence."""
        of = self.live(lambda each: not each.is_cold)
        sequence = of[index % len(of)]
        start, whole = sequence.length, (*sequence.token_ids, *tokens)
        if len(whole) > 60:
            return
        try:
            reserved = self.store.reservations.reserve_append(sequence, len(tokens))
        except (BlocksExhausted, ExceedsPool):
            return
        for source, target in reserved.copies:
            self.kv |= {(target, at): self.kv[source, at] for at in range(start % self.size)}
        self.write(sequence.principal, whole, reserved.block_ids, start, len(whole))
        self.publish(self.store.commit(reserved, tokens))

    @precondition(lambda self: self.live(lambda each: True))
    @rule(index=index_st, cut=st.integers(1, 9))
    def truncate(self, index: int, cut: int) -> None:
        """Shorten a warm or a cold sequence."""
        of = self.live(lambda each: each.length > 1 and not (each.is_cold and each.reserved_length))
        if of:
            sequence = of[index % len(of)]
            with contextlib.suppress(BlocksExhausted):  # others share blocks of its room, and too few are free
                self.store.truncate(sequence, sequence.handle_at(), max(1, sequence.length - cut))

    @precondition(lambda self: len(self.store.registry) > 0)
    @rule(index=index_st)
    def release(self, index: int) -> None:
        """End a sequence, perhaps one that is being computed."""
        sequences = list(self.store.registry)
        sequence = sequences[index % len(sequences)]
        for reservation in [each for each in self.warming if each.sequence is sequence]:
            del self.warming[reservation]
            self.store.reservations.abort(reservation)
        self.store.release(sequence.handle_at(), sequence.principal)

    # ---- cold sequences ---------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.store.registry) > 0)
    @rule()
    def lose_all(self) -> None:
        """Lose the KV of everything."""
        self.store.lose_all()
        self.kv.clear()
        self.published.clear()
        self.warming.clear()
        assert all(each.is_cold for each in self.store.registry)

    @precondition(lambda self: self.live(lambda each: each.is_cold))
    @rule(index=index_st)
    def warm(self, index: int) -> None:
        """Begin to compute a cold sequence."""
        of = self.live(lambda each: each.is_cold)
        self.begin_warming(of[index % len(of)])

    def begin_warming(self, sequence: Sequence) -> Reservation | None:
        """Reserve its blocks; those that are found hold its KV."""
        try:
            reserved = self.store.reservations.reserve_cold(sequence)
        except (BlocksExhausted, ExceedsPool):
            return None
        found = tuple(sequence.token_ids[: reserved.num_cached])
        assert self.read(reserved.block_ids, len(found)) == self.expected(sequence.principal, found)
        self.warming[reserved] = reserved.num_cached
        return reserved

    @precondition(lambda self: self.warming)
    @rule(index=index_st, num_rows=st.integers(1, 12))
    def compute(self, index: int, num_rows: int) -> None:
        """Run some rows of a cold sequence."""
        reservations = list(self.warming)
        self.run(reservations[index % len(reservations)], num_rows)

    def run(self, reserved: Reservation, num_rows: int) -> None:
        """Run rows, and commit if these were the last ones."""
        sequence = reserved.sequence
        assert sequence is not None
        start, tokens = self.warming[reserved], tuple(sequence.token_ids)
        stop = min(start + num_rows, len(tokens))
        self.write(sequence.principal, tokens, reserved.block_ids, start, stop)
        self.warming[reserved] = stop
        if sequence.is_published:
            stops = range(self.size, stop + 1, self.size)
            self.published.update((sequence.principal, tokens[:each]) for each in stops)
        if stop < len(tokens):
            self.store.reservations.note_computed(reserved, stop)
        else:
            del self.warming[reserved]
            self.store.commit(reserved, tokens)

    @precondition(lambda self: self.warming)
    @rule(index=index_st)
    def give_up(self, index: int) -> None:
        """Abort a computation; what it has computed is right, if it can be found."""
        reservations = list(self.warming)
        reserved = reservations[index % len(reservations)]
        del self.warming[reserved]
        self.store.reservations.abort(reserved)

    @precondition(lambda self: len(self.store.registry) > 0)
    @rule(order=st.randoms(use_true_random=False))
    def restart(self, order: st.DataObject) -> None:
        """Lose everything and compute each sequence: equal blocks of a principal are there once, but partial ones."""
        self.lose_all()
        sequences = list(self.store.registry)
        order.shuffle(sequences)  # type: ignore[attr-defined]
        for sequence in sequences:
            if (reserved := self.begin_warming(sequence)) is None:
                return
            self.run(reserved, sequence.length)
        blocks: set[Slot] = set()
        num_partial = 0
        for each in sequences:
            tokens = tuple(each.token_ids)
            blocks |= {(each.principal, tokens[:stop]) for stop in range(self.size, len(tokens) + 1, self.size)}
            num_partial += len(tokens) % self.size > 0
        num_spares = sum(len(each.spare_ids) for each in sequences)
        assert self.store.pool.num_used - num_spares == len(blocks) + num_partial

    # ---- what always holds ------------------------------------------------------------------------------------------

    @invariant()
    def everything_is_sound(self) -> None:
        """The sentences of the class docstrings, and the KV of each warm sequence."""
        self.store.check_integrity()
        for each in self.store.registry:
            if not each.is_cold:
                expected = self.expected(each.principal, tuple(each.token_ids))
                assert self.read(each.block_ids, each.length) == expected

    @invariant()
    def only_what_was_published_is_found(self) -> None:
        """By new prompts; and what anything finds is what would be computed."""
        for each in self.store.registry:
            tokens = tuple(each.token_ids)
            for principal in PRINCIPALS:
                chain = LineageChain(FINGERPRINT)
                chain.extend(tokens)
                found = self.store._cache.find(principal, chain)
                assert self.store._cache.is_on or not found
                stops = range(self.size, len(found) * self.size + 1, self.size)
                assert {(principal, tokens[:stop]) for stop in stops} <= self.published
                for is_cold in (False, True):
                    found = self.store._cache.find(principal, chain, is_cold=is_cold)
                    length = len(found) * self.size
                    assert self.read(found, length) == self.expected(principal, tokens[:length])


TestColdMachine = pytest.mark.timeout(3600)(ColdMachine.TestCase)
TestColdMachine.settings = settings(
    **(machine_profile(40) | ({"max_examples": 40} if machine_profile()["derandomize"] else {})),
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
