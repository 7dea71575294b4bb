"""Random operations around the prefix cache: the machine of ``test_state_machine``, turned to prompts that come again.

Sequences end soon after they began, others begin with the same tokens, the pool is tiny, so that cached blocks are
handed out all the time. What is checked after each operation is what the other machine checks.
"""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import initialize, precondition, rule

from ferrule_server.kv.append_rule import Verdict
from tests.kv.dense_model import DenseSequence, Issued, Tokens
from tests.kv.test_state_machine import (
    MAX_APPENDS,
    PRINCIPALS,
    KvMachine,
    at_once_st,
    index_st,
    machine_profile,
    tokens_st,
    window_st,
)

# block_size, num_blocks, max_context
SHAPES = [(4, 12, 40), (2, 12, 24), (1, 14, 16), (4, 8, 28), (16, 6, 70), (4, 24, 40), (2, 30, 30)]

few_tokens_st = st.lists(st.integers(0, 1), max_size=5).map(tuple)
often_st = st.sampled_from([True] * 7 + [False])
drop_st = st.one_of(st.integers(1, 9), st.integers(1, 30))
room_st = st.sampled_from([0, 0, 0, 3, 6, 12])


class PrefixMachine(KvMachine):
    """Few principals, few prompts, short lives."""

    # What has no bearing on blocks is left to the other machine.
    look_up: Any = None
    resend: Any = None
    truncate_again: Any = None
    renew: Any = None
    outlive_tombstones: Any = None
    prefill_again: Any = None

    @initialize(
        shape=st.sampled_from(SHAPES),
        prompt=st.lists(st.integers(0, 1), min_size=9, max_size=40).map(tuple),
        window=window_st,
    )
    def start(self, shape: tuple[int, int, int], prompt: Tokens, window: int) -> None:
        """Begin with one sequence in an otherwise empty pool."""
        block_size, num_blocks, max_context = shape
        fitting = prompt[: min(max_context, (num_blocks - 1) * block_size)]
        super().start(shape, [fitting], 0, has_prefix_cache=True, window=window)

    def some(self, index: int) -> Issued:
        """Return a handle that was given out, as a rule one of the last, whether its sequence lives or not."""
        among = self.model.issued[-6:] if index % 3 else self.model.issued
        return among[index // 3 % len(among)]

    def live(self, index: int) -> DenseSequence | None:
        """Return a live sequence with nothing in flight, if there is one."""
        idle = [each for each in self.model.live if not self.model.is_pinned(each) and not self.model.is_overdue(each)]
        return idle[index % len(idle)] if idle else None

    @precondition(lambda self: len(self.model.appends) < MAX_APPENDS)
    @rule(
        index=index_st,
        keep=st.integers(1, 40),
        extra=few_tokens_st,
        reserved_length=room_st,
        is_own=often_st,
        is_looked_up=often_st,
        is_published=often_st,
        at_once=at_once_st,
    )
    def come_back(
        self,
        *,
        index: int,
        keep: int,
        extra: Tokens,
        reserved_length: int,
        is_own: bool,
        is_looked_up: bool,
        is_published: bool,
        at_once: bool,
    ) -> None:
        """Begin a sequence as another one began, of the same principal or not."""
        issued = self.some(index)
        principal = issued.owner.principal if is_own else PRINCIPALS[1]
        tokens = issued.tokens[:keep] + extra
        self.create(
            principal,
            tokens,
            reserved_length,
            is_looked_up=is_looked_up,
            is_published=is_published,
            at_once=at_once,
        )

    @rule(index=index_st, keep=st.integers(1, 40), extra=few_tokens_st, tokens=few_tokens_st)
    def visit(self, index: int, keep: int, extra: Tokens, tokens: Tokens) -> None:
        """Begin as another one began, append a little, and leave."""
        issued, num_sequences = self.some(index), len(self.model.sequences)
        self.create(issued.owner.principal, issued.tokens[:keep] + extra, 0, at_once=True)
        for dense in self.model.sequences[num_sequences:]:
            if tokens:
                self.reserve(dense, len(dense.tokens), tokens, Verdict.APPEND, at_once=True)
            self.ended(dense, self.handle_of(dense))

    @precondition(lambda self: len(self.model.appends) + 2 <= MAX_APPENDS)
    @rule(index=index_st, keep=st.integers(1, 40), first=few_tokens_st, second=few_tokens_st)
    def twins(self, index: int, keep: int, first: Tokens, second: Tokens) -> None:
        """Begin two sequences at once with equal tokens that neither finds of the other."""
        issued = self.some(index)
        num_appends = len(self.model.appends)
        for extra in (first, second):
            self.create(issued.owner.principal, issued.tokens[:keep] + extra, 0, is_looked_up=False, at_once=False)
        for append in self.model.appends[num_appends:]:
            self.write(append, len(append.tokens))
            self.finish(append)
        del self.model.appends[num_appends:]

    @precondition(lambda self: len(self.model.appends) < MAX_APPENDS and self.pool.num_empty > 0)
    @rule(num_left=st.sampled_from([0, 0, 1, 2]))
    def crowd(self, num_left: int) -> None:
        """Take the empty blocks, so that only cached ones are free."""
        num_tokens = min((self.pool.num_empty - num_left) * self.pool.block_size, self.model.max_context)
        if num_tokens > 0:
            self.create(PRINCIPALS[1], (0,) * num_tokens, 0, is_looked_up=False, is_published=False, at_once=True)

    @rule(index=index_st, is_expired=st.booleans())
    def leave(self, index: int, is_expired: bool) -> None:
        """End a sequence, by release or by time (then others may go with it)."""
        dense = self.live(index)
        if dense is None:
            return
        if is_expired:
            self.model.clock_s = max(self.model.clock_s, dense.expires_at)
            self.expire()
        else:
            self.ended(dense, self.handle_of(dense))

    @rule()
    def all_leave(self) -> None:
        """End every sequence with nothing in flight, in the order of their making."""
        for dense in self.model.live:
            if not self.model.is_pinned(dense):
                self.ended(dense, self.handle_of(dense))

    @rule(index=index_st, drop=drop_st, room=st.sampled_from([0, 0, 1, 5, 9]))
    def cut_back(self, index: int, drop: int, room: int) -> None:
        """Take the last tokens of a sequence back, sometimes to have room reserved from there."""
        dense = self.live(index)
        if dense is None or len(dense.tokens) <= drop:
            return
        self.issue(dense)
        self.check_truncate(dense, self.model.issued[-1], len(dense.tokens) - drop)
        if room:
            self.check_reserve_slots([(dense, len(dense.tokens) + room, 0)])

    @precondition(lambda self: len(self.model.appends) < MAX_APPENDS)
    @rule(index=index_st, tokens=tokens_st, at_once=at_once_st)
    def go_on(self, index: int, tokens: Tokens, at_once: bool) -> None:
        """Append to a live sequence."""
        dense = self.live(index)
        if dense is not None:
            self.reserve(dense, len(dense.tokens), tokens, Verdict.APPEND, at_once=at_once)

    @precondition(lambda self: len(self.model.appends) < MAX_APPENDS)
    @rule(index=index_st, drop=drop_st, tokens=tokens_st, at_once=at_once_st)
    def go_back_and_on(self, index: int, drop: int, tokens: Tokens, at_once: bool) -> None:
        """Append to a live sequence in place of its last tokens."""
        dense = self.live(index)
        if dense is not None and len(dense.tokens) > drop:
            self.reserve(dense, len(dense.tokens) - drop, tokens, Verdict.REWIND, at_once=at_once)


TestPrefixMachine = pytest.mark.timeout(3600)(PrefixMachine.TestCase)
TestPrefixMachine.settings = settings(
    **machine_profile(num_steps=80),
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
