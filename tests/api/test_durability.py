"""Durable handles as clients see them: the level of a new sequence, what describes it, and what it is refused for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import grpc
import pytest

from ferrule.v1 import admin_pb2, admin_pb2_grpc, cache_pb2, executor_pb2, info_pb2, types_pb2
from ferrule_cli import app
from ferrule_server.durability.writer import SYNC_BOUNDS_S, JournalCounters
from ferrule_server.engine.engine import Engine
from ferrule_server.engine.host_calls import Host
from ferrule_server.engine.jobs import AppendJob, CacheInfo, GenerateJob
from ferrule_server.engine.metrics.durability import DurabilityFigures
from ferrule_server.errors import FeatureUnsupported, InvalidRequest
from ferrule_server.kv.handle import Handle
from tests.api.harness import RunningServer, read_status, refused
from tests.api.reading import make_reader

CacheOptions = executor_pb2.CacheOptions
NONE, JOURNALED = types_pb2.DURABILITY_NONE, types_pb2.DURABILITY_JOURNALED
HANDLE = types_pb2.KvCacheHandle(cache_id="a.b.c", length=3, lineage=bytes(16))
Read = Callable[[CacheOptions, bool, types_pb2.KvCacheHandle | None], AppendJob | GenerateJob]


def figures(*, is_healthy: bool = True) -> DurabilityFigures:
    """Return the figures of a journal in which every number is another one."""
    counts = tuple(range(len(SYNC_BOUNDS_S) + 1))
    counters = JournalCounters(
        num_groups=7, num_syncs=6, num_bytes=5_000, sum_sync_ns=1_500_000_000, sync_counts=[*counts], num_failures=3
    )
    return DurabilityFigures(is_healthy, 12, 11, 10_000, 9, 8, 4_000, 2, counters)


def _prefill(options: CacheOptions, is_durable: bool, handle: types_pb2.KvCacheHandle | None) -> AppendJob:
    message = executor_pb2.PrefillInput(input_ids=[1, 2], cache=options, kv_cache=handle)
    return make_reader(is_durable=is_durable).prefill(message, "input.", "p").job


def _unified(options: CacheOptions, is_durable: bool, handle: types_pb2.KvCacheHandle | None) -> AppendJob:
    message = executor_pb2.UnifiedBatchItem(q_tokens=[1, 2], cache=options, kv_cache=handle)
    return make_reader(is_durable=is_durable).unified(message, "items[0].", "p").job


def _generate(options: CacheOptions, is_durable: bool, handle: types_pb2.KvCacheHandle | None) -> GenerateJob:
    request = executor_pb2.GenerateRequest(input_ids=[1, 2], cache=options, kv_cache=handle)
    return make_reader(is_durable=is_durable).streams.generate(request, "p")[0]


each_call = pytest.mark.parametrize("read", [_prefill, _unified, _generate])


@each_call
def test_a_new_sequence_has_the_level_that_was_asked_for(read: Read) -> None:
    """Unset is the server's default, with and without other options."""
    for options in (None, CacheOptions(reserve_length=9)):
        assert read(options or CacheOptions(), True, None).new.is_durable
        assert not read(options or CacheOptions(), False, None).new.is_durable
    assert read(CacheOptions(durability=JOURNALED), True, None).new.is_durable
    assert not read(CacheOptions(durability=NONE), True, None).new.is_durable
    assert not read(CacheOptions(durability=NONE), False, None).new.is_durable


@each_call
def test_a_durable_sequence_needs_a_journal(read: Read) -> None:
    """Refused by the name of the feature; on an existing sequence the level has no effect, so nothing is refused."""
    with pytest.raises(FeatureUnsupported, match="--durable") as caught:
        read(CacheOptions(durability=JOURNALED), False, None)
    assert caught.value.metadata == {"feature": "durability"}
    assert read(CacheOptions(durability=JOURNALED), False, HANDLE).handle == Handle(*_of(HANDLE))


@each_call
def test_a_level_that_is_none_is_refused(read: Read) -> None:
    """By the path of its field, and not ignored."""
    options = CacheOptions()
    options.MergeFromString(b"\x30\x63")  # field 6, 99
    with pytest.raises(InvalidRequest) as caught:
        read(options, True, None)
    assert caught.value.field.endswith("cache.durability")


def _of(handle: types_pb2.KvCacheHandle) -> tuple[str, int, bytes]:
    return handle.cache_id, handle.length, handle.lineage


@pytest.fixture
def server() -> Iterator[RunningServer]:
    """One without a journal."""
    with RunningServer() as running:
        yield running


def test_nothing_runs_before_the_refusal(server: RunningServer) -> None:
    """UNIMPLEMENTED, alone and for an item of a batch beside one that runs."""
    options = CacheOptions(durability=JOURNALED)
    with refused() as refusals:
        server.prefill(cache=options)
    assert (refusals[0].code, refusals[0].reason) == (grpc.StatusCode.UNIMPLEMENTED, "FEATURE_UNSUPPORTED")
    assert server.engine.snapshot().counters.steps == 0
    inputs = [executor_pb2.PrefillInput(input_ids=[1, 2], cache=each) for each in (options, CacheOptions())]
    first, second = server.stub.BatchPrefill(executor_pb2.BatchPrefillRequest(inputs=inputs), timeout=20).results
    assert read_status(first.error).metadata == {"feature": "durability"}
    assert second.HasField("output")


def test_a_server_without_a_journal_says_so(server: RunningServer) -> None:
    """In its features, and of each sequence; the view has no journal."""
    capabilities = server.stub.GetCapabilities(executor_pb2.GetCapabilitiesRequest(), timeout=20).capabilities
    assert info_pb2.FEATURE_DURABLE_HANDLES not in capabilities.features
    handle = server.prefill().kv_cache
    assert server.info(handle).summary.durability == NONE
    (listed,) = server.stub.ListCaches(cache_pb2.ListCachesRequest(), timeout=20).caches
    assert (listed.durability, listed.tokens_to_recompute) == (NONE, 0)
    view = _view(server)
    assert (view.journal_state, view.HasField("sync_times")) == (admin_pb2.JOURNAL_STATE_UNSPECIFIED, False)
    assert view.sequences[0].summary.durability == NONE


def test_a_cold_sequence_tells_what_it_costs(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its level and the tokens to run, in GetCacheInfo and in lists."""
    handle = server.prefill().kv_cache
    cold = CacheInfo("ab", "me", 9, 0, 0, 1.0, 60.0, 9.0, is_durable=True, tokens_to_recompute=9)
    monkeypatch.setattr(Host, "_describe", lambda *_: cold)
    summary = server.info(handle).summary
    assert (summary.durability, summary.tokens_to_recompute) == (JOURNALED, 9)
    (listed,) = server.stub.ListCaches(cache_pb2.ListCachesRequest(), timeout=20).caches
    assert (listed.durability, listed.tokens_to_recompute) == (JOURNALED, 9)


@pytest.mark.parametrize("is_healthy", [True, False])
def test_the_view_shows_the_journal(server: RunningServer, monkeypatch: pytest.MonkeyPatch, is_healthy: bool) -> None:
    """Its state, what is cold, and how long syncs take."""
    seen = figures(is_healthy=is_healthy)
    monkeypatch.setattr(server.engine, "durability", lambda: seen)
    view = _view(server)
    state = admin_pb2.JOURNAL_STATE_HEALTHY if is_healthy else admin_pb2.JOURNAL_STATE_LOST
    assert (view.journal_state, view.durable_sequences, view.cold_sequences) == (state, 12, 11)
    assert view.tokens_to_recompute == 10_000
    assert (tuple(view.sync_times.counts), view.sync_times.sum_ns) == (seen.sync_times.counts, 1_500_000_000)


@pytest.mark.parametrize(("is_lost", "num_ending"), [(None, 1), (False, 1), (True, 3)])
def test_a_drain_waits_for_what_only_this_process_has(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, is_lost: bool | None, num_ending: int
) -> None:
    """Of three sequences two are durable; with a lost journal a restart would not have all of their tokens."""
    snapshot = replace(server.engine.snapshot(), num_sequences=3, num_durable=2)
    monkeypatch.setattr(server.engine, "snapshot", lambda: snapshot)
    monkeypatch.setattr(Engine, "is_journal_lost", is_lost)
    assert server.state.num_ending == num_ending


@pytest.mark.parametrize(("is_lost", "told"), [(None, ""), (False, "healthy"), (True, "lost")])
def test_the_status_says_whether_the_journal_is_lost(
    server: RunningServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    is_lost: bool | None,
    told: str,
) -> None:
    """To every caller, and in ``ferrule health``."""
    monkeypatch.setattr(Engine, "is_journal_lost", property(lambda _: is_lost))
    status = server.stub.GetStatus(executor_pb2.GetStatusRequest(), timeout=20).status
    assert status.debug.get("journal", "") == told
    assert app.main(["health", "--target", server.address.target]) == 0
    assert ("DURABILITY_LOST" in capsys.readouterr().out) == bool(is_lost)


def _view(server: RunningServer) -> admin_pb2.ServerView:
    request = admin_pb2.GetServerViewRequest()
    return admin_pb2_grpc.AdminServiceStub(server.channel).GetServerView(request, timeout=20).view
