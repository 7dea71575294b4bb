"""A small store on a clock that stands still, and two helpers to move both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf

import pytest

from ferrule_server.kv.block_pool import BlockPool
from ferrule_server.kv.sequence import Sequence
from ferrule_server.kv.sequence_store import SequenceStore

Put = Callable[..., Sequence]


class _Clock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock() -> _Clock:
    """The clock of ``store``."""
    return _Clock()


@pytest.fixture
def advance(clock: _Clock) -> Callable[[float], None]:
    """Let seconds pass."""
    return clock.advance


@pytest.fixture
def store(clock: _Clock) -> Iterator[SequenceStore]:
    """Fifteen blocks of four slots, a context of 50 tokens, leases up to 100 s; sound when the test is over."""
    store = SequenceStore(
        BlockPool(16, 4),
        instance="here",
        epoch="e1",
        max_context=50,
        max_ttl_s=100.0,
        clock=clock,
    )
    yield store
    store.check_integrity()


@pytest.fixture
def put(store: SequenceStore) -> Put:
    """Append tokens to a sequence, or to a new one of ``principal``, and return it."""

    def append(
        token_ids: SequenceOf[int],
        sequence: Sequence | None = None,
        principal: str = "alice",
        ttl_s: float | None = None,
    ) -> Sequence:
        num_tokens = len(token_ids)
        if sequence is None:
            reservation = store.reservations.reserve_new(principal, b"model", num_tokens)
        else:
            reservation = store.reservations.reserve_append(sequence, num_tokens)
        return store.commit(reservation, token_ids, ttl_s)

    return append
