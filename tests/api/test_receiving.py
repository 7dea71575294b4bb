"""Receiving requests: room shared by principal, and probes of strangers a few at a time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest

from ferrule_server.api.receiving import budgets as receiving
from ferrule_server.api.receiving.budgets import ProbeBudget, ReceiveBudget
from ferrule_server.errors import QueueFull, RequestTimeout
from tests.api.loops import on_a_loop

T = TypeVar("T")
MIB = 1 << 20


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run something on a loop of its own, for ten seconds at most."""
    return asyncio.run(asyncio.wait_for(coroutine, 10))


async def _after(delay_s: float, data: bytes = b"x") -> bytes:
    """Read a message that comes later."""
    await asyncio.sleep(delay_s)
    return data


async def _never() -> bytes:
    """Read a message that does not come."""
    await asyncio.sleep(3600)
    raise AssertionError


async def _settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


# ---- calls with credentials -----------------------------------------------------------------------------------------


@on_a_loop
async def test_a_principal_holds_at_most_what_it_leaves_to_others() -> None:
    """Half of the room alone; the next principal still gets some, however many calls of the first one wait."""
    budget = ReceiveBudget(16 * MIB, MIB, 60.0)
    flood = [asyncio.create_task(budget.read("flood", _never)) for _ in range(100)]
    await _settled()
    assert budget._bytes.num_held == 8 * MIB
    assert await budget.read("victim", lambda: _after(0.0)) == b"x"
    for call in flood:
        call.cancel()
    await asyncio.gather(*flood, return_exceptions=True)
    budget.resize("victim", 1, 0)
    assert budget._bytes.num_held == 0


@on_a_loop
async def test_a_principal_that_is_alone_gets_one_request_in_any_case() -> None:
    """Also where the budget is smaller than a request."""
    budget = ReceiveBudget(1, MIB, 60.0)
    assert await budget.read("alice", lambda: _after(0.0, b"abc")) == b"abc"
    assert budget._bytes.num_held == 3


@on_a_loop
async def test_what_was_read_is_held_until_it_is_given_back() -> None:
    """Requests that wait to be parsed count with their own size; what a request turns out to take may overdraw."""
    budget = ReceiveBudget(4 * MIB, MIB, 60.0)
    data = bytes(MIB)
    for _ in range(2):
        await budget.read("alice", lambda: _after(0.0, data))
    waiting = asyncio.create_task(budget.read("alice", lambda: _after(0.0)))
    await _settled()
    assert not waiting.done()
    budget.resize("alice", MIB, 5 * MIB)
    budget.resize("alice", MIB, 0)
    await _settled()
    assert not waiting.done()
    budget.resize("alice", 5 * MIB, 0)
    assert await waiting == b"x"


@on_a_loop
async def test_messages_that_do_not_come_give_way_while_others_wait() -> None:
    """The whole time where nobody waits, a sixth of it where somebody does; the newest call goes first."""
    loop = asyncio.get_running_loop()
    budget = ReceiveBudget(4 * MIB, MIB, 3.0)
    begun_s = loop.time()
    late = [asyncio.create_task(budget.read("alice", _never)) for _ in range(20)]
    await _settled()
    assert await budget.read("alice", lambda: _after(0.0)) == b"x"
    assert 0.25 < loop.time() - begun_s < 2.0
    with pytest.raises(RequestTimeout):
        await late[0]
    for call in late:
        call.cancel()
    await asyncio.gather(*late, return_exceptions=True)
    begun_s = loop.time()
    with pytest.raises(RequestTimeout):
        await budget.read("bob", _never)
    assert loop.time() - begun_s > 2.9


@pytest.mark.parametrize("seed", range(20))
@on_a_loop
async def test_no_room_is_lost_whatever_becomes_of_calls(seed: int) -> None:
    """Calls read, time out, fail and are cancelled in any order: in the end nothing is held and nobody waits."""
    chance = random.Random(seed)
    budget = ReceiveBudget(4 * MIB, MIB, 0.05)

    async def call(principal: str) -> None:
        data = await budget.read(principal, lambda: _after(chance.choice((0.0, 0.01, 0.2)), bytes(100)))
        await asyncio.sleep(chance.choice((0.0, 0.01)))
        budget.resize(principal, len(data or b""), 0)

    calls = [asyncio.create_task(call(chance.choice("abc"))) for _ in range(60)]
    for each in chance.sample(calls, 20):
        await asyncio.sleep(chance.choice((0.0, 0.001)))
        each.cancel()
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert {type(result) for result in results} <= {type(None), RequestTimeout, asyncio.CancelledError}
    held = sum(100 for result, each in zip(results, calls, strict=True) if isinstance(result, asyncio.CancelledError))
    assert budget._bytes.num_held <= held  # of calls that were cancelled behind their read
    assert not budget._waiting.calls
    budget._bytes.check_integrity()


# ---- strangers ------------------------------------------------------------------------------------------------------


def test_a_probe_that_comes_now_is_served_before_a_flood_that_waits() -> None:
    """1 000 probes without a message on 100 connections: an honest one takes milliseconds, not seconds."""

    async def check() -> float:
        probes = ProbeBudget()
        flood = [asyncio.create_task(probes.read(f"peer{index % 100}", _never)) for index in range(1000)]
        await asyncio.sleep(0.05)
        begun_s = asyncio.get_running_loop().time()
        assert await probes.read("honest", lambda: _after(0.0)) == b"x"
        waited_s = asyncio.get_running_loop().time() - begun_s
        for call in flood:
            call.cancel()
        await asyncio.gather(*flood, return_exceptions=True)
        assert await probes.read("honest", lambda: _after(0.0)) == b"x"
        return waited_s

    assert run(check()) < 0.1


@on_a_loop
async def test_a_probe_has_its_whole_time_while_nobody_else_wants_any() -> None:
    """A slow link is no reason to refuse; a message that never comes is."""
    probes = ProbeBudget(0.3)
    assert await probes.read("slow", lambda: _after(0.2)) == b"x"
    with pytest.raises(RequestTimeout):
        await probes.read("slow", _never)


@on_a_loop
async def test_connections_that_were_late_are_served_last() -> None:
    """Also where their probe came later."""
    probes, order = ProbeBudget(0.05), list[str]()
    with pytest.raises(RequestTimeout):
        await probes.read("late", _never)
    holders = [asyncio.create_task(probes.read(f"holder{index}", lambda: _after(0.04))) for index in range(3)]
    await _settled()

    async def probe(peer: str) -> None:
        await probes.read(peer, lambda: _after(0.0))
        order.append(peer)

    calls = [asyncio.create_task(probe(peer)) for peer in ("new1", "new2", "late")]
    await asyncio.gather(*calls, *holders, return_exceptions=True)
    assert order[-1] == "late"


@on_a_loop
async def test_what_waits_is_bounded_in_all_and_by_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """QUEUE_FULL: for more of one connection, and for the oldest of all, so that a flood keeps no newcomer out."""
    monkeypatch.setattr(receiving, "_MAX_PROBES", 40)

    probes = ProbeBudget()
    calls = [asyncio.create_task(probes.read("one", _never)) for _ in range(3 + 32)]
    await _settled()
    with pytest.raises(QueueFull) as refusal:
        await probes.read("one", _never)
    assert refusal.value.retry_after_s
    calls += [asyncio.create_task(probes.read(f"peer{index}", _never)) for index in range(8)]
    await _settled()
    newcomer = asyncio.create_task(probes.read("another", lambda: _after(0.0)))
    with pytest.raises(QueueFull):
        await calls[3]
    assert await newcomer == b"x"
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    assert await probes.read("one", lambda: _after(0.0)) == b"x"


@pytest.mark.parametrize("seed", range(20))
@on_a_loop
async def test_no_permit_is_lost_whatever_becomes_of_probes(seed: int) -> None:
    """Probes that read, fail, time out and are cancelled: in the end three can read at once again."""
    chance = random.Random(seed)
    probes = ProbeBudget(0.05)

    async def read() -> bytes:
        await asyncio.sleep(chance.choice((0.0, 0.005, 0.2)))
        if chance.random() < 0.2:
            raise ConnectionError
        return b"x"

    calls = [asyncio.create_task(probes.read(f"peer{chance.randrange(9)}", read)) for _ in range(60)]
    for each in chance.sample(calls, 20):
        await asyncio.sleep(chance.choice((0.0, 0.001)))
        each.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    ready = asyncio.Barrier(3)

    async def together() -> bytes:
        await ready.wait()
        return b"y"

    assert await asyncio.gather(*(probes.read("peer", together) for _ in range(3))) == [b"y"] * 3
