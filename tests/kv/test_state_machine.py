"""Random operations on the sequence store against a naive dense model in which the pool is simulated.

The pool is an array of slots [num_blocks, block_size] that holds token ids, and beside each a number that stands for
all tokens up to it: what KV is made of. Appends run as an executor would run them: the copies of their reservation
first, then their rows through its block table, in any number of pieces, with other operations in between. After each
operation every live sequence must read its own KV back, and every block that the prefix cache knows must hold the KV
that a prompt would expect to find.

``FERRULE_HYPOTHESIS=long`` runs it for minutes on random seeds.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import asdict
from itertools import count, islice
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ferrule_server.errors import (
    BlocksExhausted,
    ContextExceeded,
    ExceedsPool,
    HandleStale,
    HandleUnknown,
    KvGivenBack,
    TruncateBeyond,
)
from ferrule_server.kv.append_rule import Verdict, judge
from ferrule_server.kv.block_pool import NULL_BLOCK, BlockPool
from ferrule_server.kv.handle import Handle, StalePolicy
from ferrule_server.kv.leases import PIN_RECHECK_S
from ferrule_server.kv.new_sequence import NewSequence
from ferrule_server.kv.registry import TOMBSTONE_S
from ferrule_server.kv.reservation import Reservation
from ferrule_server.kv.reserved_slots import SlotRequest
from ferrule_server.kv.sequence import Sequence
from ferrule_server.kv.sequence_store import DEFAULT_TTL_S, SequenceStore
from ferrule_server.kv.usage import Holding
from ferrule_server.quotas import UNLIMITED, QuotaLimits
from tests.kv.dense_model import (
    FINGERPRINT,
    MAX_TTL_S,
    Append,
    DenseModel,
    DenseSequence,
    Issued,
    Tokens,
    lineage_of,
    verdict_of,
)

PRINCIPALS = ("alice", "bob")
MAX_APPENDS = 4
MAX_LIVE = 20

# block_size, num_blocks, max_context: some where the pool is short, some where the context is.
SHAPES = [(4, 16, 50), (4, 16, 50), (2, 24, 40), (1, 40, 30), (16, 10, 70), (4, 7, 40), (16, 30, 100), (4, 40, 22)]

# Few different tokens, so that equal continuations (replays, ABA) come up by themselves.
tokens_st = st.one_of(
    st.lists(st.integers(0, 1), min_size=1, max_size=3), st.lists(st.integers(0, 1), min_size=1, max_size=24)
).map(tuple)
prompt_st = st.lists(st.integers(0, 1), min_size=8, max_size=20).map(tuple)
index_st = st.integers(0, 10_000)
flag_st = st.sampled_from([True, True, True, False])
window_st = st.sampled_from([0, 1, 3, 6])
cut_st = st.one_of(st.just(0), st.integers(0, 12))
at_once_st = st.sampled_from([True, True, False])
ttl_st = st.sampled_from([None, None, 0.5, 7.0, 30.0, 1000.0])
principal_st = st.sampled_from(PRINCIPALS)
reserve_st = st.one_of(st.just(0), st.just(0), st.integers(1, 60))
limits_st = st.one_of(
    st.just(UNLIMITED),
    st.just(UNLIMITED),
    st.builds(QuotaLimits, handles=st.integers(0, 8), kv_tokens=st.one_of(st.none(), st.integers(0, 60))),
)


class KvMachine(RuleBasedStateMachine):
    """One store, one model of it, and every operation the engine has."""

    @initialize(
        shape=st.sampled_from(SHAPES),
        prompts=st.lists(prompt_st, min_size=1, max_size=3),
        num_reserved=st.sampled_from([-30, -2, 0, 3, 9]),
        has_prefix_cache=flag_st,
        window=window_st,
    )
    def start(
        self,
        shape: tuple[int, int, int],
        prompts: list[Tokens],
        num_reserved: int,
        has_prefix_cache: bool,
        window: int = 0,
    ) -> None:
        """Begin with a pool of some shape and a few sequences in it, as a rule with room to grow or to come back."""
        block_size, num_blocks, max_context = shape
        self.window = window
        self.model = DenseModel(block_size, num_blocks, max_context, has_prefix_cache=has_prefix_cache)
        self.pool = BlockPool(num_blocks, block_size)
        secrets = count()
        self.store = SequenceStore(
            self.pool,
            instance="i",
            epoch="e",
            max_context=max_context,
            max_ttl_s=MAX_TTL_S,
            clock=lambda: self.model.clock_s,
            new_secret=lambda: hashlib.blake2b(next(secrets).to_bytes(8, "little"), digest_size=16).digest(),
            limits_of=lambda principal: self.model.limits.get(principal, UNLIMITED),
            has_prefix_cache=has_prefix_cache,
        )
        for prompt in prompts:
            fitting = min(len(prompt) + num_reserved, max_context, (num_blocks - 1) * block_size)
            self.prefill(PRINCIPALS[0], prompt, max(0, fitting))

    def issue(self, dense: DenseSequence, length: int | None = None) -> None:
        """Take a handle and check it."""
        tokens = dense.tokens[:length]
        handle = dense.real.handle_at(length)
        assert (handle.length, handle.lineage) == (len(tokens), lineage_of(tokens))
        self.model.issued.append(Issued(handle, dense, tokens))

    def born(
        self,
        real: Sequence,
        tokens: Tokens,
        parent: DenseSequence | None,
        ttl_s: float | None,
        append: Append | None = None,
    ) -> None:
        """Follow a creation, by a fork or by the commit of an append."""
        principal = real.principal
        dense = DenseSequence(real, principal, tokens, DEFAULT_TTL_S if parent is None else parent.ttl_s, 0.0)
        assert parent is None or (principal, real.parent_handle_id) == (parent.principal, parent.real.handle_id)
        self.model.counts["num_created"] += 1
        if parent is not None:
            self.model.counts["num_forks"] += 1
            dense.is_published = parent.is_published
        made = append or parent
        assert made is not None
        dense.window, dense.num_given_back = made.window, made.num_given_back
        if append is not None:
            dense.reserved_length = append.reserved_length
        self.model.renewed(dense, ttl_s)
        self.model.sequences.append(dense)
        self.issue(dense)

    def pick(self, index: int, cut: int = 0) -> Issued:
        """Return one of the handles given out, or one of fewer tokens; as a rule of a live sequence."""
        spread = index * 2_654_435_761 >> 9
        of_live = [each for each in self.model.issued if not each.owner.died]
        choice = of_live if of_live and spread % 8 else self.model.issued
        issued = choice[spread // 8 % len(choice)]
        tokens = issued.tokens[: max(1, len(issued.tokens) - cut)]
        return Issued(Handle(issued.handle.cache_id, len(tokens), lineage_of(tokens)), issued.owner, tokens)

    def resolved(self, issued: Issued, principal: str) -> DenseSequence | None:
        """Resolve a handle as the engine would; None if that was rightly refused."""
        refusal = self.model.refusal(issued, principal)
        if refusal is None:
            assert self.store.resolve(issued.handle, principal) is issued.owner.real
            return issued.owner
        with pytest.raises(HandleUnknown) as caught:
            self.store.resolve(issued.handle, principal)
        assert caught.type is refusal
        return None

    @precondition(lambda self: len(self.model.appends) < MAX_APPENDS)
    @rule(principal=principal_st, tokens=tokens_st, reserved_length=reserve_st, at_once=at_once_st, drops=flag_st)
    def prefill(
        self, principal: str, tokens: Tokens, reserved_length: int = 0, at_once: bool = True, drops: bool = True
    ) -> None:
        """Start a new sequence, sometimes with room to grow, sometimes finishing it at once."""
        self.create(principal, tokens, reserved_length, at_once=at_once, drops=drops)

    @precondition(lambda self: len(self.model.appends) < MAX_APPENDS)
    @rule(
        index=index_st,
        cut=cut_st,
        extra=st.one_of(st.just(()), tokens_st),
        principal=principal_st,
        reserved_length=reserve_st,
        is_looked_up=flag_st,
        is_published=flag_st,
        at_once=at_once_st,
        drops=flag_st,
    )
    def prefill_again(
        self,
        *,
        index: int,
        cut: int,
        extra: Tokens,
        principal: str,
        reserved_length: int,
        is_looked_up: bool,
        is_published: bool,
        at_once: bool,
        drops: bool,
    ) -> None:
        """Start a new sequence with tokens that another has or had, as a rule looking for them in the cache."""
        tokens = self.pick(index, cut).tokens + extra
        self.create(
            principal,
            tokens,
            reserved_length,
            is_looked_up=is_looked_up,
            is_published=is_published,
            at_once=at_once,
            drops=drops,
        )

    def create(
        self,
        principal: str,
        tokens: Tokens,
        reserved_length: int,
        *,
        is_looked_up: bool = True,
        is_published: bool = True,
        at_once: bool,
        drops: bool = True,
    ) -> None:
        """Reserve a new sequence, or be refused and find nothing changed."""
        window = self.window if drops else 0
        found = self.model.cache.find(principal, tokens) if is_looked_up else []
        shortage = self.model.shortage(
            principal, None, 0, len(tokens), Verdict.APPEND, reserved_length=reserved_length, found=found
        )

        def ask() -> Reservation:
            prompt = list(tokens) if is_looked_up else None
            return self.store.reservations.reserve_new(
                principal,
                FINGERPRINT,
                len(tokens),
                NewSequence(reserved_length=reserved_length, publish_prefix=is_published, attention_window=window),
                prompt,
            )

        if shortage is not None:
            self.refused(shortage, ask)
            return
        reservation, num_cached = ask(), len(found) * self.pool.block_size
        assert (reservation.block_ids[: len(found)], reservation.num_cached) == (found, num_cached)
        assert self.model.read_kv(found, num_cached) == self.model.kv_of(principal, tokens[:num_cached])
        self.model.cache.adopt(found)
        self.model.cache.take(reservation.held_ids[len(found) :])
        if is_looked_up and self.model.cache.is_on:
            self.model.counts["num_prefix_lookup_tokens"] += len(tokens)
            self.model.counts["num_prefix_hit_tokens"] += num_cached
        append = Append(reservation, tokens, (), reserved_length=reserved_length, is_published=is_published)
        append.num_written, append.window = num_cached, window
        self.model.appends.append(append)
        if at_once:
            self.write(self.model.appends[-1], len(tokens))
            self.finish(self.model.appends.pop())

    def refused(self, error: type[Exception], ask: Callable[[], object]) -> None:
        """Be refused."""
        with pytest.raises(error):
            ask()
        self.model.counts["num_exhausted"] += error is BlocksExhausted

    @precondition(lambda self: len(self.model.appends) < MAX_APPENDS)
    @rule(
        index=index_st,
        cut=cut_st,
        tokens=tokens_st,
        policy=st.sampled_from(StalePolicy),
        at_once=at_once_st,
    )
    def append(self, index: int, cut: int, tokens: Tokens, policy: StalePolicy, at_once: bool) -> None:
        """Send tokens behind any handle there ever was."""
        issued = self.pick(index, cut)
        dense = self.resolved(issued, issued.owner.principal)
        if dense is None:
            return
        verdict = self.judged(issued, tokens, policy)
        if verdict in {Verdict.APPEND, Verdict.FORK, Verdict.REWIND}:
            self.reserve(dense, len(issued.tokens), tokens, verdict, at_once=at_once)

    @rule(index=index_st, cut=cut_st, count=st.integers(0, 24), extra=st.sampled_from([(), (), (0,)]))
    def resend(self, index: int, cut: int, count: int, extra: Tokens) -> None:
        """Send what is committed behind a handle once more, or nothing, or one token too many."""
        issued = self.pick(index, cut)
        dense = self.resolved(issued, issued.owner.principal)
        if dense is not None:
            start = len(issued.tokens)
            for policy in StalePolicy:
                self.judged(issued, dense.tokens[start : start + count] + extra, policy)

    @rule(index=index_st, principal=principal_st)
    def look_up(self, index: int, principal: str) -> None:
        """Resolve any handle as anybody."""
        self.resolved(self.pick(index), principal)

    def judged(self, issued: Issued, tokens: Tokens, policy: StalePolicy) -> Verdict | None:
        """Judge as the append rule says; None if that was rightly refused."""
        expected = verdict_of(issued.owner.tokens, issued.tokens, tokens, policy)
        if isinstance(expected, Verdict):
            assert judge(issued.owner.real, issued.handle, tokens, policy) is expected
            return expected
        with pytest.raises(expected):
            judge(issued.owner.real, issued.handle, tokens, policy)
        return None

    def reserve(self, dense: DenseSequence, length: int, tokens: Tokens, kind: Verdict, *, at_once: bool) -> None:
        """Reserve as the verdict says, or be refused and find nothing changed."""

        def ask() -> Reservation:
            if kind is Verdict.APPEND:
                return self.store.reservations.reserve_append(dense.real, len(tokens))
            if kind is Verdict.FORK:
                return self.store.reservations.reserve_branch(dense.real, length, len(tokens))
            return self.store.reservations.reserve_rewind(dense.real, length, len(tokens))

        refusal: type[Exception] | None = RuntimeError
        if not self.model.is_busy(dense):
            refusal = self.model.shortage(dense.principal, dense, length, len(tokens), kind)
        if refusal is not None:
            self.refused(refusal, ask)
            return
        table, spares = dense.real.block_ids, dense.real.spare_ids
        append = Append(ask(), tokens, dense.tokens[:length])
        reservation, cache = append.reservation, self.model.cache
        if kind is Verdict.FORK:
            append.source = dense
            append.window, append.num_given_back = dense.window, dense.num_given_back
            prefix = table[dense.num_given_back : self.model.blocks_for(length)]
            cache.take(dense.real.spare_ids[len(spares) :])
            cache.take(reservation.held_ids[len(prefix) :])
            cache.share(prefix)
        else:
            append.target = dense
        if kind is Verdict.REWIND:
            self.model.follow_drop_tail(dense, length, table, spares)
            dense.tokens = dense.tokens[:length]
            dense.last_truncate = None
        if kind is not Verdict.FORK:
            cache.take(reservation.held_ids)
        self.model.follow_open(reservation)
        self.model.appends.append(append)
        if at_once:
            self.write(self.model.appends[-1], len(tokens))
            self.finish(self.model.appends.pop())

    @precondition(lambda self: self.model.appends)
    @rule(index=index_st, count=st.integers(1, 24))
    def run(self, index: int, count: int) -> None:
        """Write the next rows of an append, as a step would: first the copies, then slot by slot."""
        append = self.model.appends[index % len(self.model.appends)]
        if not append.is_void:
            self.write(append, count)

    def write(self, append: Append, count: int) -> None:
        """Write rows into slots that belong to nobody else."""
        reservation, owners = append.reservation, self.model.owners()
        if not append.is_copied:
            append.is_copied = True
            for source, destination in reservation.copies:
                assert owners[source] >= 1
                assert owners[destination] == 1
                self.model.slots[destination] = self.model.slots[source]
                self.model.kv[destination] = self.model.kv[source]
        kv = self.model.kv_of(reservation.principal, append.before + append.tokens)
        for token in append.tokens[append.num_written : append.num_written + count]:
            position = len(append.before) + append.num_written
            block = reservation.block_ids[position // self.pool.block_size]
            assert self.pool.refcount(block) == owners[block] == 1
            assert block not in self.model.cache.known
            self.model.slots[block, position % self.pool.block_size] = token
            self.model.kv[block, position % self.pool.block_size] = kv[position]
            append.num_written += 1

    @precondition(lambda self: self.model.appends)
    @rule(index=index_st, ttl_s=ttl_st, num_dropped=st.sampled_from([0, 0, 0, 1, 2, 5, 13]))
    def commit(self, index: int, ttl_s: float | None, num_dropped: int) -> None:
        """Finish an append, sometimes of all its rows but the last ones; of a released sequence it is refused."""
        append = self.model.appends[index % len(self.model.appends)]
        if not append.is_void:
            self.write(append, len(append.tokens))
            self.model.appends.remove(append)
            self.finish(append, ttl_s, num_dropped)
            return
        self.model.appends.remove(append)
        with pytest.raises(HandleUnknown):
            self.store.commit(append.reservation, append.tokens, ttl_s)
        self.model.cache.drop(append.reservation.held_ids)

    def finish(self, append: Append, ttl_s: float | None = None, num_dropped: int = 0) -> None:
        """Commit; the rows become tokens of the sequence, but for those dropped from the end."""
        reservation = append.reservation
        append.tokens = append.tokens[: max(1, reservation.num_cached, len(append.tokens) - num_dropped)]
        held = {*reservation.held_ids, *(append.target.real.spare_ids if append.target is not None else ())}
        real = self.store.commit(reservation, append.tokens, ttl_s)
        table = reservation.block_ids
        kept = {*table, *real.spare_ids, *(source for source, _ in reservation.copies)}
        self.model.cache.drop(sorted(held - kept))
        of = append.target or append.source or append
        if of.is_published and self.model.cache.is_on:
            start = (reservation.start + reservation.num_cached) // self.pool.block_size
            self.model.cache.register(real.principal, append.before + append.tokens, table, start)
        self.give_back(append.target or append, reservation.start, len(append.before + append.tokens), table)
        self.model.cache.drop([source for source, _ in reservation.copies])
        self.model.counts["num_block_copies"] += len(reservation.copies)
        if append.source is not None and not append.source.died:
            self.model.renewed(append.source)
        if append.target is None:
            self.born(real, append.before + append.tokens, append.source, ttl_s, append)
            self.model.sequences[-1].is_published = of.is_published
            return
        assert real is append.target.real
        append.target.tokens += append.tokens
        append.target.last_truncate = None
        self.model.renewed(append.target, ttl_s)
        self.issue(append.target)

    def give_back(self, made: DenseSequence | Append, start: int, stop: int, table: list[int]) -> None:
        """Follow what a commit gives back outside the window."""
        before, made.num_given_back = (
            made.num_given_back,
            self.model.num_outside(made.window, made.num_given_back, start, stop),
        )
        self.model.cache.drop(table[before : made.num_given_back])
        self.model.counts["num_given_back"] += made.num_given_back - before

    @precondition(lambda self: self.model.appends)
    @rule(index=index_st)
    def abort(self, index: int) -> None:
        """Give up on an append, however far it came; twice is as good as once."""
        append = self.model.appends.pop(index % len(self.model.appends))
        self.store.reservations.abort(append.reservation)
        self.store.reservations.abort(append.reservation)
        self.model.cache.drop(append.reservation.held_ids)
        with pytest.raises(RuntimeError):
            self.store.commit(append.reservation, append.tokens)

    @precondition(lambda self: len(self.model.live) < MAX_LIVE)
    @rule(index=index_st, count=st.integers(1, 3), cut=cut_st, ttl_s=ttl_st)
    def fork(self, index: int, count: int, cut: int, ttl_s: float | None) -> None:
        """Branch some handle of a live sequence."""
        issued = self.pick(index, cut)
        dense, length = self.resolved(issued, issued.owner.principal), len(issued.tokens)
        if dense is None or dense.tokens[:length] != issued.tokens:
            return
        if self.model.is_busy(dense):
            with pytest.raises(RuntimeError):
                self.store.fork(dense.real, length, count, ttl_s)
            return
        if length < self.model.lowest_length(dense):
            self.refused(KvGivenBack, lambda: self.store.fork(dense.real, length, count, ttl_s))
            return
        num_free, num_spares = self.pool.num_free, self.model.num_spares_to_share(dense, length)
        refusal = self.model.refusal_of_more(dense.principal, count, num_spares)
        if refusal is not None:
            self.refused(refusal, lambda: self.store.fork(dense.real, length, count, ttl_s))
            return
        branches = self.store.fork(dense.real, length, count, ttl_s)
        self.model.cache.take(dense.real.spare_ids[len(dense.real.spare_ids) - num_spares :])
        self.model.cache.share(dense.real.block_ids[dense.num_given_back : self.model.blocks_for(length)], count)
        assert self.pool.num_free == num_free - num_spares
        assert len(branches) == count
        self.model.renewed(dense)
        for branch in branches:
            self.born(branch, issued.tokens, dense, ttl_s)

    @rule(index=index_st, cut=cut_st, drop=st.integers(-1, 20))
    def truncate(self, index: int, cut: int, drop: int) -> None:
        """Shorten a sequence by any of its handles; a drop too far leads to a length below 1."""
        issued = self.pick(index, cut)
        dense = self.resolved(issued, issued.owner.principal)
        if dense is not None:
            self.check_truncate(dense, issued, len(issued.tokens) - drop)

    @rule(index=index_st)
    def truncate_again(self, index: int) -> None:
        """Send the request once more that shortened a sequence last."""
        issued = self.pick(index)
        dense = self.resolved(issued, issued.owner.principal)
        if dense is not None and dense.last_request is not None:
            tokens, new_length = dense.last_request
            again = Handle(issued.handle.cache_id, len(tokens), lineage_of(tokens))
            self.check_truncate(dense, Issued(again, dense, tokens), new_length)

    def check_truncate(self, dense: DenseSequence, issued: Issued, new_length: int) -> None:
        """Truncate and compare with the tokens."""
        owners, last = self.model.owners(), dense.last_truncate
        expected: type[Exception] | int
        if self.model.is_busy(dense):
            expected = RuntimeError
        elif not 1 <= new_length <= len(issued.tokens):
            expected = TruncateBeyond
        elif last is not None and last[:2] == (issued.tokens, new_length):
            expected = last[2]
        elif dense.tokens[: len(issued.tokens)] != issued.tokens:
            expected = HandleStale
        elif new_length < self.model.lowest_length(dense):
            expected = KvGivenBack
        elif new_length == len(dense.tokens):
            expected = 0
        else:
            tail = self.model.held(dense)[self.model.blocks_for(new_length) - dense.num_given_back :]
            num_own = sum(owners[block] == 1 for block in tail)
            num_spares = self.model.num_spares(dense, new_length, dense.reserved_length, owners)
            refusal = self.model.refusal_of_more(dense.principal, 0, max(0, num_spares - num_own))
            expected = refusal or max(0, num_own - num_spares)
        if not isinstance(expected, int):
            self.refused(expected, lambda: self.store.truncate(dense.real, issued.handle, new_length))
            return
        table, spares = dense.real.block_ids, dense.real.spare_ids
        assert self.store.truncate(dense.real, issued.handle, new_length) == expected
        if new_length < len(dense.tokens):
            self.model.follow_drop_tail(dense, new_length, table, spares)
        dense.tokens = dense.tokens[:new_length]
        dense.last_truncate = (issued.tokens, new_length, expected)
        dense.last_request = (issued.tokens, new_length)
        self.model.renewed(dense)
        self.issue(dense)

    @rule(index=index_st, principal=principal_st)
    def release(self, index: int, principal: str) -> None:
        """End a sequence by any handle of it, in flight or not; others' and dead ones are left alone."""
        issued = self.pick(index)
        dense = issued.owner
        if dense.died or principal != dense.principal:
            assert self.store.release(issued.handle, principal) is None
            return
        owners = self.model.owners()
        expected = sum(owners[block] == 1 for block in self.model.held(dense))
        assert self.ended(dense, issued.handle) == expected

    def ended(self, dense: DenseSequence, handle: Handle) -> int | None:
        """Release a live sequence."""
        held = self.model.held(dense)
        freed_blocks = self.store.release(handle, dense.principal)
        self.model.cache.drop(held)
        self.model.counts["num_released"] += 1
        dense.died = "released"
        return freed_blocks

    @rule(
        principal=principal_st,
        wanted=st.lists(st.tuples(index_st, reserve_st, reserve_st), min_size=1, max_size=3),
    )
    def reserve_slots(self, principal: str, wanted: list[tuple[int, int, int]]) -> None:
        """Set blocks aside for some sequences at once, sometimes for one of them twice."""
        own = [each for each in self.model.live if each.principal == principal and not self.model.is_overdue(each)]
        if not own:
            return
        self.check_reserve_slots([(own[index % len(own)], target, admission) for index, target, admission in wanted])

    def check_reserve_slots(self, pairs: list[tuple[DenseSequence, int, int]]) -> None:
        """Reserve slots and compare with what should be missing; a second time nothing is."""
        requests = [SlotRequest(dense.real, target, admission) for dense, target, admission in pairs]
        refusal = self.refusal_of_slots(pairs)
        if refusal is not None:
            self.refused(refusal, lambda: self.store.reserve_slots(requests))
            return
        spares = {dense: dense.real.spare_ids for dense, _, _ in pairs}
        num_free, before = self.model.num_free, [len(self.model.held(dense)) for dense, _, _ in pairs]
        evidence = self.store.reserve_slots(requests)
        assert (evidence.free_blocks_before, evidence.free_blocks_after) == (num_free, self.model.num_free)
        assert sum(each.new_blocks for each in evidence.allocations) == num_free - self.model.num_free
        assert evidence.allocations[0].blocks_before == before[0]
        taken = {dense: iter(dense.real.spare_ids[len(spares[dense]) :]) for dense, _, _ in pairs}
        for (dense, target, _), allocation in zip(pairs, evidence.allocations, strict=True):
            dense.reserved_length = max(dense.reserved_length, target)
            self.model.follow_room(dense, len(dense.tokens), dense.real.block_ids[-1])
            self.model.cache.take(islice(taken[dense], allocation.new_blocks))
            self.model.renewed(dense)
        num_free = self.model.num_free
        assert not any(
            each.new_blocks
            for each in self.store.reserve_slots(
                [SlotRequest(each.sequence, each.target_length) for each in requests]
            ).allocations
        )
        assert self.model.num_free == num_free

    def refusal_of_slots(self, pairs: list[tuple[DenseSequence, int, int]]) -> type[Exception] | None:
        """Return what a reservation of slots must raise."""
        owners = self.model.owners()
        lengths = {dense: dense.reserved_length for dense, _, _ in pairs}
        for dense, target, admission in pairs:
            if max(target, admission) > self.model.max_context:
                return ContextExceeded
            lengths[dense] = max(lengths[dense], target, admission)
        num_missing, num_whole = 0, len({block for dense in lengths for block in self.model.held(dense)})
        for dense, length in lengths.items():
            num_held = len(self.model.held(dense)) + dense.num_given_back
            needed = self.model.num_spares(dense, len(dense.tokens), length, owners)
            num_missing += max(0, needed - len(dense.real.spare_ids))
            num_whole += max(0, self.model.blocks_for(length) - num_held)
        if num_missing and num_whole > self.model.num_blocks - 1:
            return ExceedsPool
        return self.model.refusal_of_more(pairs[0][0].principal, 0, num_missing, num_whole)

    @rule(principal=principal_st, limits=limits_st)
    def set_limits(self, principal: str, limits: QuotaLimits) -> None:
        """Change the quotas of a principal, also to less than it uses."""
        self.model.limits[principal] = limits

    @rule(index=index_st, ttl_s=ttl_st)
    def renew(self, index: int, ttl_s: float | None) -> None:
        """Keep a sequence alive."""
        issued = self.pick(index)
        dense = self.resolved(issued, issued.owner.principal)
        if dense is not None:
            granted = self.store.renew(dense.real, ttl_s)
            self.model.renewed(dense, ttl_s)
            assert granted == dense.ttl_s

    @rule(seconds=st.sampled_from([0.5, 0.5, 2.0, 4.0, 8.0, 30.0]), collect=st.booleans())
    def wait(self, seconds: float, collect: bool) -> None:
        """Let time pass, and sometimes collect what expired."""
        self.model.clock_s += seconds
        if collect:
            self.expire()

    @precondition(lambda self: any(each.pinned for each in self.model.appends))
    @rule(index=index_st, is_released=st.booleans())
    def disturb(self, index: int, is_released: bool) -> None:
        """Release a sequence with something in flight on it, or let its lease end under way."""
        pinned = [each.pinned for each in self.model.appends if each.pinned is not None]
        dense = pinned[index % len(pinned)]
        if not is_released:
            self.model.clock_s = max(self.model.clock_s, dense.expires_at)
            self.expire()
        elif not dense.died:
            self.ended(dense, self.handle_of(dense))

    @precondition(lambda self: any(each.died == "expired" for each in self.model.sequences))
    @rule(seconds=st.sampled_from([TOMBSTONE_S - 5.0, TOMBSTONE_S]))
    def outlive_tombstones(self, seconds: float) -> None:
        """Let so much time pass that who expired long ago is forgotten."""
        self.model.clock_s += seconds
        self.expire()

    def expire(self) -> None:
        """Collect exactly the sequences whose lease ended, but for pinned ones."""
        ended = [each for each in self.model.live if max(each.expires_at, each.not_before) <= self.model.clock_s]
        expected = [each for each in ended if not self.model.is_pinned(each)]
        by_name = {each.real.handle_id: (each, self.model.held(each)) for each in expected}
        names = self.store.expire()
        assert sorted(names) == sorted(by_name)
        for each, held in map(by_name.__getitem__, names):
            each.died, each.died_at = "expired", self.model.clock_s
            self.model.cache.drop(held)
            self.model.counts["num_expired"] += 1
        for each in ended:
            if not each.died:
                each.not_before = self.model.clock_s + PIN_RECHECK_S

    @invariant()
    def the_store_is_sound(self) -> None:
        """Test the sentences of the class docstrings."""
        self.store.check_integrity()
        assert self.pool.num_used == len(self.model.owners())
        for principal in PRINCIPALS:
            assert self.store.usage.of(principal) == Holding(*self.model.usage(principal))

    @invariant()
    def reserved_room_is_there(self) -> None:
        """Appends up to the reserved length succeed at any moment and take nothing from the pool."""
        self.what_can_be_found_is_what_would_be_computed()  # before these appends withdraw anything
        num_free = self.pool.num_free
        for dense in self.model.live:
            assert dense.real.reserved_length == dense.reserved_length
            num_tokens = dense.reserved_length - len(dense.tokens)
            if num_tokens > 0 and not self.model.is_busy(dense):
                reservation = self.store.reservations.reserve_append(dense.real, num_tokens)
                assert self.pool.num_free == num_free
                self.store.reservations.abort(reservation)
                self.model.follow_open(reservation)

    @invariant()
    def sequences_read_their_own_tokens_back(self) -> None:
        """Nothing was written that a sequence still reads."""
        for dense in self.model.live:
            assert tuple(dense.real.token_ids) == dense.tokens
            assert dense.real.length == len(dense.tokens)
            assert dense.real.chain.at(len(dense.tokens)) == lineage_of(dense.tokens)
            first, num_given_back = dense.num_given_back * self.model.block_size, dense.num_given_back
            assert (dense.real.first_position, dense.real.lowest_length) == (first, self.model.lowest_length(dense))
            assert dense.real.block_ids[:num_given_back] == [NULL_BLOCK] * num_given_back
            assert self.model.read(dense.real.block_ids, len(dense.tokens))[first:] == dense.tokens[first:]
            kv = self.model.kv_of(dense.principal, dense.tokens)
            assert self.model.read_kv(dense.real.block_ids, len(dense.tokens))[first:] == kv[first:]

    @invariant()
    def what_the_next_row_attends_to_is_there(self) -> None:
        """At the tip, and at any length down to a window before it; and no more is held than two windows need."""
        for dense in self.model.live:
            if dense.window:
                assert self.model.lowest_length(dense) <= max(1, len(dense.tokens))
                most = 2 * dense.window + 1 + 2 * self.model.block_size
                assert len(dense.tokens) - dense.real.first_position <= most

    @invariant()
    def what_can_be_found_is_what_would_be_computed(self) -> None:
        """Each registered block holds the KV of its tokens behind all those before them, for its principal."""
        entries = self.store._cache._entries
        for block, known in self.model.cache.known.items():
            kv = self.model.kv_of(known.principal, known.prefix)
            assert self.model.kv[block].tolist() == kv[-self.pool.block_size :]
            assert entries[block].key == (known.principal, False, lineage_of(known.prefix))
        assert entries.keys() == self.model.cache.known.keys()
        assert self.model.cache.is_on or not entries

    @invariant()
    def blocks_are_where_the_model_has_them(self) -> None:
        """Owners, cached blocks in the order in which they will be handed out, empty ones."""
        assert self.model.cache.owners == self.model.owners()
        assert self.pool.cached_ids() == self.model.cache.cached
        assert (self.pool.num_empty, self.pool.num_cached) == (self.model.cache.num_empty, len(self.model.cache.cached))

    @invariant()
    def metrics_tell_how_it_is(self) -> None:
        """Each figure of the store, counted here once more."""
        owners = self.model.owners()
        metrics = asdict(self.store.metrics())
        expected = dict.fromkeys((name for name in metrics if name.startswith("num_")), 0)
        expected |= self.model.counts
        expected |= {
            "block_size": self.model.block_size,
            "total_blocks": self.model.num_blocks - 1,
            "empty_blocks": self.model.cache.num_empty,
            "cached_blocks": len(self.model.cache.cached),
            "used_blocks": len(owners),
            "shared_blocks": sum(count > 1 for count in owners.values()),
            "live_sequences": len(self.model.live),
            "tombstones": self.store.registry.num_tombstones,
            "num_prefix_evictions": self.model.cache.num_evictions,
        }
        assert metrics == expected

    @invariant()
    def appends_read_what_they_wrote(self) -> None:
        """Rows of an append under way stay as written, behind the tokens they follow."""
        for append in self.model.appends:
            if append.is_copied and not append.is_void:
                length = len(append.before) + append.num_written
                expected = append.before + append.tokens[: append.num_written]
                first = append.reservation.block_ids.count(NULL_BLOCK) * self.model.block_size
                assert self.model.read(append.reservation.block_ids, length)[first:] == expected[first:]

    @invariant()
    def lists_and_clocks_agree(self) -> None:
        """Each principal sees its own; the next expiry is told exactly."""
        assert len(self.store.registry) == len(self.model.live)
        for principal in PRINCIPALS:
            own = sorted(each.real.handle_id for each in self.model.live if each.principal == principal)
            assert [each.handle_id for each in self.store.registry.page(principal, limit=1000)] == own
            assert self.store.registry.count(principal) == len(own)
        ends = [max(each.expires_at, each.not_before) for each in self.model.live]
        assert self.store.next_expiry() == (max(0.0, min(ends) - self.model.clock_s) if ends else None)

    def teardown(self) -> None:
        """Whatever happened, ending everything leaves the pool empty: by release, or by a lost device."""
        if not hasattr(self, "store"):
            return
        if len(self.model.issued) % 2:
            self.store.lose_all()
            assert (self.pool.num_cached, self.pool.num_empty) == (0, self.pool.capacity)
            for dense in self.model.live:
                with pytest.raises(HandleUnknown):
                    self.store.resolve(self.handle_of(dense), dense.principal)
        else:
            for dense in self.model.live:
                self.ended(dense, self.handle_of(dense))
        for append in self.model.appends:
            self.store.reservations.abort(append.reservation)
        assert self.pool.num_used == 0
        assert len(self.store.registry) == 0
        self.store.check_integrity()

    def handle_of(self, dense: DenseSequence) -> Handle:
        """Return some handle of the sequence."""
        return next(each.handle for each in self.model.issued if each.owner is dense)


def machine_profile(num_steps: int = 50) -> dict[str, Any]:
    """Return the settings: the same runs each time, or many new and longer ones where asked for."""
    if os.environ.get("FERRULE_HYPOTHESIS") == "long":
        return {"max_examples": 3000, "stateful_step_count": 100, "derandomize": False}
    return {"max_examples": 250, "stateful_step_count": num_steps, "derandomize": True}


TestKvMachine = pytest.mark.timeout(3600)(KvMachine.TestCase)
TestKvMachine.settings = settings(
    **machine_profile(),
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
