"""What the page is told: the view of the contract, and where the server is in its life."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest
from google.protobuf import json_format

from ferrule import Client
from ferrule.v1 import admin_pb2
from ferrule_server.api.web import events as web_events
from ferrule_server.api.web.events import Events, TooManyWatchers
from ferrule_server.api.web.listener import WebListener
from tests.api.harness import RunningServer
from tests.api.loops import on_a_loop
from tests.api.web.plain_http import get
from tests.api.web.serving import messages, serving_web


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[RunningServer, WebListener]]:
    """A server and its HTTP side."""
    with RunningServer() as server, serving_web(server) as listener:
        yield server, listener


def test_a_message_is_the_view_of_the_contract(running: tuple[RunningServer, WebListener]) -> None:
    """With the fork tree by handle_id, and nothing that a handle or a text could be made of."""
    server, listener = running
    with Client(server.address.target) as client, client.prefill(list(range(1, 50))) as root:
        branches = root.fork(2)
        branches[0].decode([7])
        told = next(messages(listener.address))
        assert (told["phase"], told["instance"], told["run"]) == ("ready", "test", str(server.state.start_ns))
        assert (told["view"].pop("model_id"), told["view"].pop("block_size")) == ("paged-reference", 16)
        view = json_format.ParseDict(told["view"], admin_pb2.ServerView())
        listed = {each.summary.handle_id: each for each in view.sequences}
        assert set(listed) == {each.handle.handle_id for each in (root, *branches)}
        assert {listed[each.handle.handle_id].parent_handle_id for each in branches} == {root.handle.handle_id}
        assert listed[branches[0].handle.handle_id].summary.length == 50
        assert view.cache_metrics.used_blocks == server.store.metrics().used_blocks
        assert len(view.block_map.cells) == server.engine.info.num_blocks - 1
        for each in (root, *branches):
            secret = each.handle.cache_id.rpartition(".")[2]
            assert secret not in str(told)
        client.release(branches)


def test_messages_come_each_second_and_say_how_far_loading_is() -> None:
    """From before there is a model on; the same stream goes on when it is loaded, and while the server drains."""
    with RunningServer(is_loaded=False) as server, serving_web(server) as listener:
        server.state.load_stage, server.state.load_progress = "reading weights", 0.25
        assert b'ferrule_state{state="starting"} 1.0' in get(listener.address, "/metrics").body
        stream = messages(listener.address)
        told = next(stream)
        began = time.monotonic()
        assert (told["phase"], told["load"]) == ("starting", {"stage": "reading weights", "share": 0.25})
        server.run(server.make_ready())
        told = next(stream)
        assert 0.7 < time.monotonic() - began < 3
        assert told["phase"] == "ready"
        assert "view" in told
        server.loop.call_soon_threadsafe(server.server.begin_drain, 30.0)
        assert next(told["phase"] for told in stream if told["phase"] != "ready") == "draining"
        stream.close()


def test_a_server_that_has_ended_is_told_as_a_problem(running: tuple[RunningServer, WebListener]) -> None:
    """The page says why there is no view; the stream and the metrics go on."""
    with RunningServer() as server, serving_web(server, interval_s=0.1) as listener:
        stream = messages(listener.address)
        assert "view" in next(stream)
        server.engine.close()
        assert "going down" in next(told["problem"] for told in stream if "view" not in told)
        assert get(listener.address, "/metrics").status == 200
        stream.close()


@on_a_loop
async def test_nothing_is_made_while_nobody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first who comes gets a message at once, one who comes soon after shares it."""
    made: list[float] = []

    async def make() -> bytes:
        made.append(time.monotonic())
        return b"%d" % len(made)

    monkeypatch.setattr(web_events, "MAX_WATCHERS", 2)
    events = Events(make)
    running = asyncio.create_task(events.run())
    await asyncio.sleep(1.2)
    assert made == []
    began = time.monotonic()
    with events.watch() as first:
        assert await anext(first) == b"1"
        assert time.monotonic() - began < 0.9
        with events.watch() as second:
            assert await anext(second) == b"1"
            with pytest.raises(TooManyWatchers), events.watch():
                pass
        assert await anext(first) == b"2"
    await asyncio.sleep(1.5)
    assert len(made) <= 3
    running.cancel()


@on_a_loop
async def test_who_falls_behind_gets_the_newest_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is queued for a slow reader, and closing ends what it watches."""
    numbers = iter(range(1000))

    async def make() -> bytes:
        return b"%d" % next(numbers)

    monkeypatch.setattr(web_events, "INTERVAL_S", 0.02)
    events = Events(make)
    running = asyncio.create_task(events.run())
    with events.watch() as slow:
        assert await anext(slow) == b"0"
        await asyncio.sleep(0.3)
        assert int(await anext(slow)) > 5
        asyncio.get_running_loop().call_later(0.05, running.cancel)
        assert [message async for message in slow] != [], "what was made meanwhile"
