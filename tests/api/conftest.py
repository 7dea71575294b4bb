"""One paged-reference server for all tests that leave nothing behind but sequences."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ferrule.v1 import types_pb2
from ferrule_server.api.security import strangers
from tests.api.harness import RunningServer
from tests.reasons import reasons_are_documented

__all__ = ["reasons_are_documented"]


@pytest.fixture(scope="package")
def shared() -> Iterator[RunningServer]:
    """A server that lives for all tests of the package."""
    with RunningServer() as server:
        yield server


@pytest.fixture
def server(shared: RunningServer) -> Iterator[RunningServer]:
    """The shared server; whatever the test made is released and the pool is whole again."""
    yield shared
    handles = [sequence.cache_id for sequence in list(shared.store.registry.sequences.values())]
    shared.release(*(types_pb2.KvCacheHandle(cache_id=cache_id) for cache_id in handles))
    assert shared.free_blocks == shared.engine.info.num_blocks - 1
    shared.store.check_integrity()


@pytest.fixture
def own() -> Iterator[RunningServer]:
    """A server of the test's own."""
    with RunningServer() as server:
        yield server


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls without valid credentials are refused at once, however many come: for tests of how they are answered."""
    monkeypatch.setattr(strangers, "LONGEST_S", 0.0)
    monkeypatch.setattr(strangers, "MAX_REFUSED", 1 << 20)
