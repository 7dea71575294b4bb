"""Callers without valid credentials: pauses that grow, connections that end, and connections that must not."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import Mock

import grpc
import psutil
import pytest

from ferrule.v1 import executor_pb2, executor_pb2_grpc
from ferrule_server.addresses import ListenAddress
from ferrule_server.api.rpc import intake
from ferrule_server.api.rpc.refusals import MAX_STRANGER_LINES
from ferrule_server.api.security import strangers
from ferrule_server.api.security.strangers import (
    APART_S,
    FIRST_S,
    HELD_S,
    LONGEST_S,
    MAX_HELD,
    MAX_REFUSED,
    MAX_REMEMBERED,
    MAX_WAITING,
    QUIET_S,
    SHARED_S,
    Strangers,
    hang_up,
)
from tests.api.harness import GREEDY, RunningServer, StreamClient, decode_item, refusal_of, token_access
from tests.api.hostile import http2
from tests.api.loops import on_a_loop

PEER, OTHER = "ipv4:192.0.2.1:4001", "ipv4:192.0.2.1:4002"
PREFILL = "/ferrule.v1.ModelExecutorService/Prefill"
TOKEN = "ferrule_alice"


class World:
    """A clock that moves when somebody sleeps, or sleeps that last until they are ended."""

    def __init__(self, *, is_moving: bool = True) -> None:
        self.now = 1000.0
        self.slept: list[float] = []
        self.ended: list[str] = []
        self.can_hang_up = True
        self.gate = asyncio.Event()
        if is_moving:
            self.gate.set()
        self.strangers = Strangers(self.hang_up, lambda: self.now, self.sleep)

    async def hang_up(self, peer: str) -> bool:
        """Note who was hung up on."""
        self.ended.append(peer)
        await asyncio.sleep(0)
        return self.can_hang_up

    async def sleep(self, seconds: float) -> None:
        """Note how long, and let the time pass."""
        self.slept.append(seconds)
        if seconds:
            await self.gate.wait()
        self.now += seconds

    async def settle(self) -> None:
        """Let everything run that waits for nothing."""
        for _ in range(5):
            await asyncio.sleep(0)

    async def refuse(self, count: int, peer: str = PEER) -> list[asyncio.Task[None]]:
        """Begin calls that are refused."""
        tasks = [asyncio.create_task(self.strangers.pause(peer)) for _ in range(count)]
        await self.settle()
        return tasks


@on_a_loop
async def test_the_pause_doubles_up_to_a_second_and_begins_again_after_quiet() -> None:
    """Each connection has a pause of its own."""
    world = World()
    for _ in range(9):
        await world.strangers.pause(PEER)
    assert world.slept == [FIRST_S * 2**index for index in range(7)] + [LONGEST_S] * 2
    await world.strangers.pause(OTHER)
    assert world.slept[-1] == FIRST_S
    world.now += QUIET_S + LONGEST_S
    await world.strangers.pause(PEER)
    assert world.slept[-1] == FIRST_S
    assert world.ended == []


@on_a_loop
async def test_calls_beyond_those_that_wait_are_refused_at_once() -> None:
    """A client whose token has expired learns this for all of its calls."""
    world = World(is_moving=False)
    tasks = await world.refuse(MAX_REFUSED)
    assert [task.done() for task in tasks] == [False] * MAX_WAITING + [True] * (MAX_REFUSED - MAX_WAITING)
    world.gate.set()
    await asyncio.gather(*tasks)
    assert max(world.slept) == LONGEST_S
    assert world.ended == []


@on_a_loop
async def test_calls_beyond_too_many_refused_are_held_until_the_connection_ends() -> None:
    """It is ended once, and not before its time."""
    world = World(is_moving=False)
    tasks = await world.refuse(MAX_REFUSED + 3)
    assert world.slept[MAX_WAITING:] == [HELD_S]
    assert not any(task.done() for task in tasks[MAX_REFUSED:])
    assert world.ended == []
    world.gate.set()
    await asyncio.gather(*tasks)
    assert world.ended == [PEER]


@on_a_loop
async def test_connections_end_one_after_another() -> None:
    """Clients that connect again begin apart from each other; no connection waits longer than twice the time."""
    world = World(is_moving=False)
    tasks = []
    for index in range(13):
        tasks += await world.refuse(MAX_REFUSED + 1, f"ipv4:192.0.2.1:{index}")
    held = [seconds for seconds in world.slept if seconds >= HELD_S]
    assert held == [min(HELD_S + index * APART_S, 2 * HELD_S) for index in range(13)]
    world.gate.set()
    await asyncio.gather(*tasks)
    assert len(world.ended) == 13


@on_a_loop
async def test_a_connection_with_too_many_refusals_one_after_another_ends() -> None:
    """The last call is not answered: it waits for the end."""
    world = World()
    for _ in range(MAX_REFUSED):
        await world.strangers.pause(PEER)
    assert world.ended == []
    await world.strangers.pause(PEER)
    assert world.slept[-2:] == [HELD_S, LONGEST_S]
    assert world.ended == [PEER]


@pytest.mark.parametrize("can_hang_up", [True, False])
@on_a_loop
async def test_a_connection_from_an_address_that_was_ended_is_a_new_one(can_hang_up: bool) -> None:
    """Its first calls are answered, and it is ended in its turn; so it goes on with one that cannot be ended."""
    world = World()
    world.can_hang_up = can_hang_up
    for number in range(1, 4):
        await asyncio.gather(*await world.refuse(MAX_REFUSED))
        assert world.ended == [PEER] * (number - 1)
        await asyncio.gather(*await world.refuse(3))
        assert world.ended == [PEER] * number


@on_a_loop
async def test_an_ending_spares_the_next_connection_from_its_address() -> None:
    """The connection was ended early, and one that came since has its own time."""
    world = World(is_moving=False)
    tasks = await world.refuse(MAX_REFUSED + MAX_HELD)
    assert world.ended == []
    (last,) = await world.refuse(1)
    world.gate.set()
    await last
    assert world.ended == [PEER]
    tasks += await world.refuse(1)
    await asyncio.gather(*tasks)
    assert world.ended == [PEER]


@on_a_loop
async def test_a_client_that_cancels_what_is_held_and_opens_more_is_ended_at_once() -> None:
    """As many as can be open at a time are held, however they end; further ones do not search again."""
    world = World(is_moving=False)
    tasks = await world.refuse(MAX_REFUSED)
    for _ in range(MAX_HELD):
        (held,) = await world.refuse(1)
        held.cancel()
    assert world.slept[MAX_WAITING:] == [HELD_S]
    more = [asyncio.create_task(world.strangers.pause(PEER)) for _ in range(3)]
    await asyncio.sleep(0)
    for task in more:
        task.cancel()
    await world.settle()
    assert world.slept[MAX_WAITING:] == [HELD_S, 0.0, 0.0, 0.0, LONGEST_S]
    assert world.ended == [PEER]
    world.gate.set()
    await asyncio.gather(*tasks)


@on_a_loop
async def test_a_client_that_cancels_all_that_is_held_is_ended() -> None:
    """No call needs to last until then."""
    world = World(is_moving=False)
    tasks = await world.refuse(MAX_REFUSED)
    (held,) = await world.refuse(1)
    held.cancel()
    world.gate.set()
    await asyncio.gather(*tasks)
    await world.settle()
    assert world.ended == [PEER]


@on_a_loop
async def test_a_connection_with_an_admitted_call_is_never_ended() -> None:
    """Some refusals wait; further ones hold no stream, since a proxy's other clients need it."""
    world = World(is_moving=False)
    with world.strangers.admitted(PEER):
        tasks = await world.refuse(2 * MAX_REFUSED)
        assert len(world.slept) == MAX_WAITING
        world.now += 10 * SHARED_S
        world.gate.set()
        await asyncio.gather(*tasks)
        for _ in range(2 * MAX_REFUSED):
            await world.strangers.pause(PEER)
        assert world.slept[-1] == LONGEST_S
    assert world.ended == []


@on_a_loop
async def test_a_connection_is_left_alone_for_a_while_after_its_last_admitted_call() -> None:
    """Then it counts as a stranger's again; of several calls the last to end counts."""
    world = World(is_moving=False)
    with world.strangers.admitted(PEER):
        with world.strangers.admitted(PEER):
            pass
        world.now += SHARED_S
    world.now += 0.9 * SHARED_S
    tasks = await world.refuse(MAX_REFUSED + 1)
    assert tasks[-1].done()
    world.now += 0.2 * SHARED_S
    tasks += await world.refuse(MAX_REFUSED + 1)
    assert not tasks[-1].done()
    world.gate.set()
    await asyncio.gather(*tasks)
    assert world.ended == [PEER]


@on_a_loop
async def test_a_connection_that_comes_to_be_shared_while_calls_are_held_is_not_ended() -> None:
    """These calls are refused instead."""
    world = World(is_moving=False)
    tasks = await world.refuse(MAX_REFUSED + 1)
    with world.strangers.admitted(PEER):
        world.gate.set()
        await asyncio.gather(*tasks)
    assert world.ended == []


@on_a_loop
async def test_strangers_are_remembered_in_bounded_memory_and_displace_no_principal() -> None:
    """However many addresses they come from."""
    world = World()
    with world.strangers.admitted(PEER):
        pass
    for index in range(2 * MAX_REMEMBERED):
        await world.strangers.pause(f"ipv6:[2001:db8::{index:x}]:1")
    assert len(world.strangers._refused) == MAX_REMEMBERED
    assert len(world.strangers._lately) == 1
    assert not world.strangers._open.held


# ---- finding the connection -----------------------------------------------------------------------------------------


def _is_open(connection: socket.socket) -> bool:
    connection.settimeout(0.05)
    try:
        return connection.recv(1) != b""
    except TimeoutError:
        return True


@pytest.mark.parametrize(("host", "name"), [("127.0.0.1", "ipv4:127.0.0.1:{}"), ("::1", "ipv6:[::1]:{}")])
def test_the_connection_from_an_address_is_found_and_no_other(host: str, name: str) -> None:
    """On a socket for both families; nothing else is touched, nor leaks a file descriptor."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True))
        port = listener.getsockname()[1]
        clients = [stack.enter_context(socket.create_connection((host, port))) for _ in range(3)]
        for _ in clients:
            stack.enter_context(listener.accept()[0])
        peer = name.format(clients[1].getsockname()[1])
        assert not hang_up(peer, port + 1)
        assert not hang_up(f"{peer}9", port)
        assert not hang_up("unix:", port)
        assert [_is_open(client) for client in clients] == [True, True, True]
        before = psutil.Process().num_fds()
        for _ in range(20):
            assert not hang_up(f"{peer}9", port)
        assert psutil.Process().num_fds() < before + 10
        assert hang_up(peer, port)
        assert [_is_open(client) for client in clients] == [True, False, True]


def test_of_two_connections_with_one_name_neither_is_ended() -> None:
    """A client has reached two addresses from one port: one of them may be that of somebody else."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("0.0.0.0", 0)))
        port = listener.getsockname()[1]
        clients: list[socket.socket] = []
        for host in ("127.0.0.1", "127.0.0.2"):
            client = stack.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            client.bind(("127.0.0.1", clients[0].getsockname()[1] if clients else 0))
            client.connect((host, port))
            stack.enter_context(listener.accept()[0])
            clients.append(client)
        assert not hang_up(f"ipv4:127.0.0.1:{clients[0].getsockname()[1]}", port)
        assert [_is_open(client) for client in clients] == [True, True]


def test_without_a_free_descriptor_nothing_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is an error raised into a task that nobody waits for."""
    monkeypatch.setattr(os, "listdir", Mock(side_effect=OSError(errno.EMFILE, "too many open files")))
    assert not hang_up("ipv4:127.0.0.1:1", 2)


# ---- a server -------------------------------------------------------------------------------------------------------


@pytest.fixture
def secured(tmp_path: Path) -> Iterator[RunningServer]:
    """A server with one token."""
    with RunningServer(access=token_access(tmp_path, {TOKEN: "alice"})) as server:
        yield server


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections are ended after half a second."""
    monkeypatch.setattr(strangers, "HELD_S", 0.5)


def _bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


@contextmanager
def _decoding(server: RunningServer) -> Iterator[None]:
    """Decode before and after, over one stream of a principal."""
    message = executor_pb2.PrefillInput(input_ids=[1, 2, 3], logits_policy=GREEDY)
    request = executor_pb2.PrefillRequest(input=message)
    handle = server.stub.Prefill(request, metadata=_bearer(TOKEN), timeout=20).output.kv_cache
    stream = StreamClient(server.stub, metadata=_bearer(TOKEN))
    stream.send(decode_item(handle, 5))
    handle = stream.read().results[0].decode.kv_cache
    yield
    stream.send(decode_item(handle, 5))
    assert stream.read().results[0].decode.kv_cache.length == 5
    stream.half_close()


def _refused_on(peer: http2.Peer, count: int, **fields: str) -> list[int]:
    """Open calls all at once; returns those that were answered before the server hung up."""
    block = http2.call_headers(PREFILL, **fields)
    peer.send(*(http2.frame(http2.HEADERS, http2.END_HEADERS, 2 * index + 1, block) for index in range(count)))
    return [stream for kind, flags, stream, _ in peer.frames() if kind == http2.HEADERS and flags & http2.END_STREAM]


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(
    ("listen", "host", "fields"),
    [("127.0.0.1", "127.0.0.1", {}), ("::", "127.0.0.1", {"authorization": "Bearer wrong"}), ("::", "::1", {})],
)
def test_a_stranger_that_opens_again_is_paused_and_then_ended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, listen: str, host: str, fields: dict[str, str]
) -> None:
    """A principal decodes on over a connection that was open before, and the log stays short."""
    caplog.set_level(logging.WARNING)
    access, began_s = token_access(tmp_path, {TOKEN: "alice"}), time.monotonic()
    with RunningServer(access=access, listen=ListenAddress(listen, 0)) as server, _decoding(server):
        with http2.peer(host, server.address.port) as peer:
            answered = _refused_on(peer, 200, **fields)
        assert 0.4 < time.monotonic() - began_s < 10.0
        assert MAX_REFUSED - MAX_WAITING <= len(answered) <= MAX_REFUSED
    lines = [record.getMessage() for record in caplog.records]
    assert sum(line.startswith("ended peer=ip") for line in lines) == 1
    assert len(lines) <= 2 * MAX_STRANGER_LINES


def test_a_principal_that_tries_again_with_the_right_token_is_served(secured: RunningServer) -> None:
    """On the same connection, and at once; each refusal before has said why."""
    request = executor_pb2.GetStatusRequest()
    for _ in range(4):
        with pytest.raises(grpc.RpcError) as caught:
            secured.stub.GetStatus(request, metadata=_bearer("ferrule_old"), timeout=20)
        assert refusal_of(caught.value).reason == "TOKEN_INVALID"
    began_s = time.monotonic()
    assert secured.stub.GetStatus(request, metadata=_bearer(TOKEN), timeout=20).status.is_ready
    assert time.monotonic() - began_s < 5.0


def test_a_principal_with_an_expired_token_reads_why_soon(secured: RunningServer) -> None:
    """For each of many calls at a time."""
    request, began_s = executor_pb2.GetStatusRequest(), time.monotonic()
    calls = [secured.stub.GetStatus.future(request, metadata=_bearer("ferrule_old"), timeout=20) for _ in range(40)]
    assert {call.code() for call in calls} == {grpc.StatusCode.UNAUTHENTICATED}
    assert time.monotonic() - began_s < 5.0


@pytest.mark.usefixtures("short")
def test_a_connection_is_looked_for_on_another_thread(secured: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """With many connections this takes tens of milliseconds, in which the event loop goes on."""
    searching: list[threading.Thread] = []

    def seen(peer: str, port: int) -> bool:
        searching.append(threading.current_thread())
        return hang_up(peer, port)

    monkeypatch.setattr(intake, "hang_up", seen)
    loop_thread = secured.run(_current_thread())
    with http2.peer("127.0.0.1", secured.address.port) as peer:
        _refused_on(peer, 200)
    assert len(searching) == 1
    assert searching[0] is not loop_thread


async def _current_thread() -> threading.Thread:
    return threading.current_thread()


@pytest.mark.usefixtures("short")
def test_the_connection_of_a_proxy_is_not_ended(secured: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """All strangers on it are answered, and calls with a token that are under way go on."""
    monkeypatch.setattr(strangers, "LONGEST_S", 0.1)
    with grpc.insecure_channel(secured.address.target, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        stub = executor_pb2_grpc.ModelExecutorServiceStub(channel)
        request = executor_pb2.GetStatusRequest()
        assert stub.GetStatus(request, metadata=_bearer(TOKEN), timeout=20).status.is_ready
        calls = [stub.GetStatus.future(request, timeout=20) for _ in range(200)]
        assert {call.code() for call in calls} == {grpc.StatusCode.UNAUTHENTICATED}
        stream = StreamClient(stub, metadata=_bearer(TOKEN))
        calls = [stub.GetStatus.future(request, timeout=20) for _ in range(200)]
        assert {call.code() for call in calls} == {grpc.StatusCode.UNAUTHENTICATED}
        stream.half_close()
        assert stream.call.code() is grpc.StatusCode.OK
