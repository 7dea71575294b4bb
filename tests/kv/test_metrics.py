"""What the store counts."""

from __future__ import annotations

import threading
from dataclasses import asdict

from ferrule_server.kv.metrics import KvMetrics
from ferrule_server.kv.sequence_store import SequenceStore
from tests.kv.conftest import Put


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
