"""GetServerView: what everybody who may look sees, how much of it, and what it costs the server."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from google.protobuf import json_format

from ferrule.v1 import admin_pb2, admin_pb2_grpc, cache_pb2, executor_pb2, info_pb2
from ferrule_server.api.responses import view as server_view
from ferrule_server.api.responses.view import FRESH_S, as_array, block_map
from ferrule_server.api.rpc.observe import current_call
from ferrule_server.engine.host_calls import Host, View
from ferrule_server.engine.jobs import Entry
from tests.api.harness import PROMPT, RunningServer, refused


def _view(server: RunningServer, **bounds: int) -> admin_pb2.ServerView:
    request = admin_pb2.GetServerViewRequest(**bounds)
    return admin_pb2_grpc.AdminServiceStub(server.channel).GetServerView(request, timeout=20).view


def _age(server: RunningServer) -> None:
    """Let every snapshot be too old to be shown again."""
    server.server.views._taken.clear()


def test_a_view_agrees_with_status_and_metrics(own: RunningServer) -> None:
    """The same figures as GetStatus and GetCacheMetrics give, and what they lack: model, rows, refusals."""
    handle = own.prefill().kv_cache
    own.fork(handle, 3)
    own.decode(handle, 7)
    with refused():
        own.decode(handle, 8)
    view = _view(own)
    status = own.stub.GetStatus(executor_pb2.GetStatusRequest(), timeout=10).status
    for message in (view.status, status):
        message.ClearField("memory")
    assert view.status == status
    assert view.cache_metrics == own.stub.GetCacheMetrics(cache_pb2.GetCacheMetricsRequest(), timeout=10).metrics
    assert view.num_step_rows == len(PROMPT) + 1
    assert dict(view.num_refused) == {"HANDLE_STALE": 1}
    assert view.step_ns > 0
    assert 0 < view.uptime.ToNanoseconds() < 60e9
    assert sum(view.step_times.counts) == status.num_steps == 2
    assert len(view.step_times.counts) == len(view.step_times.upper_bounds_ns) + 1
    assert sum(view.first_token_times.counts) == sum(view.decode_times.counts) == 1


def test_sequences_are_told_without_what_makes_a_handle(own: RunningServer) -> None:
    """Loggable ids, lengths, blocks and leases as their owners see them; no cache_id, no lineage, no token."""
    root = own.prefill(range(1, 40)).kv_cache
    branches = own.fork(root, 2)
    view = _view(own)
    listed = {each.summary.handle_id: each for each in view.sequences}
    infos = [own.info(handle) for handle in (root, *branches)]
    assert set(listed) == {info.summary.handle_id for info in infos}
    for info in infos:
        seen = listed[info.summary.handle_id]
        for message in (seen.summary, info.summary):
            assert 0 < message.lease.expires_in.ToNanoseconds() <= message.lease.ttl.ToNanoseconds() == 60e9
            message.ClearField("lease")
            message.ClearField("create_time")
        assert seen.summary == info.summary
        assert (info.summary.length, info.summary.num_shared_blocks) == (39, 3)
    parents = [listed[info.summary.handle_id].parent_handle_id for info in infos]
    assert parents == ["", infos[0].summary.handle_id, infos[0].summary.handle_id]
    text = json_format.MessageToJson(view) + repr(view)
    for handle in (root, *branches):
        assert handle.cache_id not in text
        assert handle.cache_id.rpartition(".")[2] not in text
    own.release(root)
    _age(own)
    orphans = _view(own).sequences
    assert [each.parent_handle_id for each in orphans] == [infos[0].summary.handle_id] * 2


def test_a_view_is_within_its_bounds(own: RunningServer) -> None:
    """As much as was asked for, the server's choice without a word, and a limit on all of it."""
    for index in range(5):
        own.prefill([index + 1, 2, 3])
    usual = _view(own)
    assert (len(usual.sequences), len(usual.principals)) == (5, 1)
    assert 0 < len(usual.block_map.cells) <= 1024
    few = _view(own, max_cells=10, max_sequences=2, max_principals=0)
    assert (len(few.sequences), len(few.principals), few.known_principals) == (2, 0, 1)
    assert len(few.block_map.cells) <= 10
    none = _view(own, max_cells=0, max_sequences=0)
    assert not none.HasField("block_map")
    assert len(none.sequences) == 0
    most = _view(own, max_cells=2**32 - 1, max_sequences=2**32 - 1, max_principals=2**32 - 1)
    assert len(most.block_map.cells) == own.engine.info.num_blocks - 1 <= 16384


def test_there_is_nothing_to_see_before_the_model_is_loaded() -> None:
    """UNAVAILABLE / STARTING; a server that drains is seen as before."""
    with RunningServer(is_loaded=False) as server:
        with refused() as refusals:
            _view(server)
        assert refusals[0].reason == "STARTING"
        server.run(server.make_ready())
        server.prefill()
        admin_pb2_grpc.AdminServiceStub(server.channel).Drain(admin_pb2.DrainRequest(), timeout=10)
        view = _view(server)
        assert view.status.state == info_pb2.EXECUTOR_STATE_DRAINING
        assert len(view.sequences) == 1


def test_sequences_are_put_into_messages_once(own: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever bounds others ask with. A thousand take milliseconds: the event loop goes on in between."""
    root = own.prefill(range(1, 40)).kv_cache
    for _ in range(5):
        own.fork(root, 64)
    made: list[float] = []
    make = server_view._sequence

    def noting(*args: Any) -> admin_pb2.SequenceView:
        made.append(turns)
        return make(*args)

    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(server_view, "_sequence", noting)
    monkeypatch.setattr(own.server.views, "_clock", lambda: 100.0)
    beside = asyncio.run_coroutine_threadsafe(other(), own.loop)
    views = [_view(own, max_sequences=bound, max_cells=bound) for bound in (300, 310, 320, 400)]
    beside.cancel()
    assert [len(view.sequences) for view in views] == [300, 310, 320, 321]
    assert len(made) == 321
    assert len(set(made)) >= 5
    for bound in range(1, 30):
        assert len(_view(own, max_sequences=300, max_cells=bound).block_map.cells) <= bound
    assert all(len(taken.messages) <= 8 for taken in own.server.views._taken.values())


def test_a_look_belongs_to_no_call(own: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """It serves many: whatever is logged or measured of it is nobody's, and no call is kept for it."""
    calls: list[object] = []
    submit = own.engine.submit

    def noting(entries: list[Entry]) -> None:
        calls.append(current_call())
        submit(entries)

    monkeypatch.setattr(own.engine, "submit", noting)
    _view(own)
    assert calls == [None]


def test_many_watchers_cost_one_snapshot(own: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks within a tenth of a second is shown the same; other bounds do not make it more than four."""
    own.prefill()
    looks: list[tuple[int, int]] = []
    look = Host.look

    def counting(host: Host, max_sequences: int, max_principals: int) -> View:
        looks.append((max_sequences, max_principals))
        return look(host, max_sequences, max_principals)

    monkeypatch.setattr(Host, "look", counting)
    now = [100.0]
    monkeypatch.setattr(own.server.views, "_clock", lambda: now[0])
    with ThreadPoolExecutor(8) as pool:
        views = list(pool.map(lambda _: _view(own), range(40)))
    assert len({view.time.ToNanoseconds() for view in views}) == len(looks) == 1
    for bound in range(0, 1400, 100):
        _view(own, max_sequences=bound, max_principals=bound)
        _view(own, max_principals=bound)
        _view(own, max_sequences=bound, max_cells=bound)
    assert len(looks) == 4
    now[0] += 2 * FRESH_S
    _view(own)
    assert len(looks) == 5


def test_a_watcher_that_leaves_takes_nobody_along(own: RunningServer) -> None:
    """A snapshot on its way goes on for the others when the one that asked for it first is gone."""

    async def look() -> bool:
        views, request = own.server.views, admin_pb2.GetServerViewRequest()
        first = asyncio.create_task(views.view(request))
        await asyncio.sleep(0)
        second = asyncio.create_task(views.view(request))
        await asyncio.sleep(0)
        first.cancel()
        return (await second).status.is_ready and first.cancelled()

    assert own.run(look())


def test_a_closed_engine_ends_the_view_and_is_asked_again(own: RunningServer) -> None:
    """Who looks then hears DRAINING, once per look, and nothing is left behind."""
    own.engine.close()
    for _ in range(2):
        with refused() as refusals:
            _view(own)
        assert refusals[0].reason == "DRAINING"


# ---- the picture ----------------------------------------------------------------------------------------------------


def test_a_picture_tells_the_states_of_blocks_apart() -> None:
    """Empty 0, cached 1, owned 2, shared one more than its owners, at most 255; the null block is not in it."""
    owners = np.array([0, 0, 0, 1, 2, 3, 253, 254, 255, 100_000], np.int32)
    picture = block_map(owners, bytes([0, 0, 1] + [0] * 7), 64)
    assert picture.cell_blocks == 1
    assert list(picture.cells) == [0, 1, 2, 3, 4, 254, 255, 255, 255]
    assert list(picture.fill) == [0, 0, 255, 255, 255, 255, 255, 255, 255]
    assert list(picture.num_shared) == [1, 1, 4]


@pytest.mark.parametrize("num_blocks", [2, 3, 17, 100, 1000])
@pytest.mark.parametrize("max_cells", [1, 2, 7, 64, 4096])
def test_cells_of_several_blocks_show_the_largest_and_how_full_they_are(num_blocks: int, max_cells: int) -> None:
    """Against a walk over the blocks, also where the last cell has fewer."""
    rng = np.random.default_rng(num_blocks * max_cells)
    refcounts = [0, *rng.integers(0, 5, num_blocks - 1).tolist()]
    is_cached = bytes(int(count == 0 and i % 3 == 0 and i > 0) for i, count in enumerate(refcounts))
    picture = block_map(np.array(refcounts, np.int32), is_cached, max_cells)
    size, marks = picture.cell_blocks, [c + 1 if c else k for c, k in zip(refcounts, is_cached, strict=True)][1:]
    parts = [marks[start : start + size] for start in range(0, len(marks), size)]
    assert len(picture.cells) == len(picture.fill) == len(parts) <= max_cells
    assert list(picture.cells) == [max(part) for part in parts]
    shares = [sum(mark > 1 for mark in part) / len(part) for part in parts]
    assert [fill > 0 for fill in picture.fill] == [share > 0 for share in shares]
    assert [fill == 255 for fill in picture.fill] == [share > 254 / 255 for share in shares]
    assert list(picture.fill) == pytest.approx([255 * share for share in shares], abs=1)
    assert list(picture.num_shared) == [refcounts.count(2), refcounts.count(3), sum(c > 3 for c in refcounts)]


def test_a_large_pool_is_read_piece_by_piece() -> None:
    """Others have their turns in between, and no number is lost."""
    refcounts = list(range(100_000))
    turns = 0

    async def read() -> None:
        nonlocal turns

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        beside = asyncio.create_task(other())
        assert (await as_array(refcounts)).tolist() == refcounts
        beside.cancel()

    asyncio.run(read())
    assert turns >= 5
