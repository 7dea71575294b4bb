"""What the store counts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import asdict

import pytest

from ferrule_server.errors import BlocksExhausted
from ferrule_server.kv.metrics import KvMetrics
from ferrule_server.kv.sequence_store import SequenceStore
from tests.kv.conftest import Put


def changed(before: KvMetrics, after: KvMetrics) -> dict[str, int]:
    """Return the figures that differ, and by how much."""
    first, second = asdict(before), asdict(after)
    return {name: second[name] - first[name] for name in first if second[name] != first[name]}


def test_a_store_that_did_nothing_counted_nothing(store: SequenceStore) -> None:
    """All blocks are empty."""
    figures = {name: value for name, value in asdict(store.metrics()).items() if value}
    assert figures == {"block_size": 4, "total_blocks": 15, "empty_blocks": 15}


def test_each_operation_counts_as_what_it_is(store: SequenceStore, put: Put, advance: Callable[[float], None]) -> None:
    """And as nothing else."""

    def since(operation: Callable[[], object]) -> dict[str, int]:
        before = store.metrics()
        operation()
        return changed(before, store.metrics())

    def blocks(used: int, cached: int = 0) -> dict[str, int]:
        moved = {"empty_blocks": -used - cached, "used_blocks": used, "cached_blocks": cached}
        return {name: value for name, value in moved.items() if value}

    sequence = put([1, 2, 3, 4, 5, 6])
    handle = sequence.handle_at()
    forks = store.fork(sequence, 6, 1)
    assert since(lambda: put([1, 2, 3])) == {**blocks(1), "live_sequences": 1, "num_created": 1}
    assert since(lambda: forks.extend(store.fork(sequence, 6, 2))) == {
        "live_sequences": 2,
        "num_created": 2,
        "num_forks": 2,
    }
    assert since(lambda: put([7], forks[0])) == {**blocks(1), "num_block_copies": 1}
    assert since(lambda: store.commit(store.reservations.reserve_branch(sequence, 6, 1), [8])) == {
        **blocks(1),
        "live_sequences": 1,
        "num_created": 1,
        "num_forks": 1,
        "num_block_copies": 1,
    }
    assert since(lambda: store.truncate(sequence, handle, 2)) == {"num_truncates": 1}
    assert since(lambda: store.truncate(sequence, handle, 2)) == {}  # the same once more is not done again
    assert since(lambda: store.commit(store.reservations.reserve_rewind(forks[0], 5, 1), [1])) == {"num_truncates": 1}
    release = forks[0].handle_at()
    assert since(lambda: store.release(release, "alice")) == {**blocks(-1), "live_sequences": -1, "num_released": 1}
    assert since(lambda: store.release(release, "alice")) == {}

    def exhaust() -> None:
        with pytest.raises(BlocksExhausted):
            store.reservations.reserve_new("bob", 48)

    assert since(exhaust) == {"num_exhausted": 1}
    advance(100.0)
    num_live, num_used = len(store.registry), store.pool.num_used
    assert since(store.expire) == {
        **blocks(-num_used, 1),
        "shared_blocks": -2,
        "live_sequences": -num_live,
        "tombstones": num_live,
        "num_expired": num_live,
    }


def test_lookups_count_in_tokens(store: SequenceStore, put: Put) -> None:
    """Of prompts that got their blocks; of these, what was found."""
    put([1, 2, 3, 4, 5, 6])
    store.reservations.abort(store.reservations.reserve_new("alice", 7, prompt=[1, 2, 3, 4, 5, 6, 7]))
    store.reservations.abort(store.reservations.reserve_new("alice", 3, prompt=[9, 9, 9]))
    put([5] * 8)
    with pytest.raises(BlocksExhausted):
        store.reservations.reserve_new("alice", 4, 48, prompt=[0, 0, 0, 0])
    metrics = store.metrics()
    assert (metrics.num_prefix_lookup_tokens, metrics.num_prefix_hit_tokens) == (10, 4)
    for _ in range(2):
        put([9] * 40, principal="bob")
        store.release(store.registry.page("bob")[0].handle_at(), "bob")
    assert store.metrics().num_prefix_evictions > 0


def test_metrics_can_be_asked_for_from_any_thread(store: SequenceStore, put: Put) -> None:
    """While the store changes: the blocks add up and no count goes back."""
    seen: list[KvMetrics] = []
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.is_set():
            seen.append(store.metrics())

    watcher = threading.Thread(target=watch)
    watcher.start()
    for index in range(2000):
        sequence = put([index] * 9)
        store.release(sequence.handle_at(), "alice")
    is_over.set()
    watcher.join()
    seen.append(store.metrics())
    for each in seen:
        assert each.empty_blocks + each.cached_blocks + each.used_blocks == each.total_blocks == 15
        assert min(asdict(each).values()) >= 0
    assert [each.num_created for each in seen] == sorted(each.num_created for each in seen)
    assert (seen[-1].num_created, seen[-1].num_released) == (2000, 2000)
