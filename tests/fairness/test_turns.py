"""Turns on the event loop: nobody waits for the whole of a large request, nor for all requests of somebody else."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from ferrule_server.fairness import turns
from ferrule_server.fairness.turns import SLICE_NS, Shares, Turns, TurnTaker, metered, spawn, take_turns, turn
from tests.api.loops import on_a_loop

MS = 1_000_000


class _Clock:
    """A time that passes only where a test says so: a busy machine would charge what it takes itself."""

    def __init__(self) -> None:
        self.now_ns = 0

    def monotonic_ns(self) -> int:
        """Return the time."""
        return self.now_ns


CLOCK = _Clock()


@pytest.fixture(autouse=True)
def own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The turns go by :data:`CLOCK`."""
    monkeypatch.setattr(turns, "time", CLOCK)


def _busy(duration_s: float) -> None:
    """Hold the event loop."""
    CLOCK.now_ns += round(duration_s * 1e9)


def _contended() -> TurnTaker:
    """Two principals are about: alice and bob."""
    taker = TurnTaker(Shares())
    taker.shares.account("alice")
    taker.shares.account("bob")
    return taker


async def _work(taker: TurnTaker, principal: str, slices: list[str], duration_s: float, flow: str = "") -> None:
    """Wait for a turn, hold the loop and note who did."""

    async def work() -> None:
        take_turns(taker, principal)
        await taker.turn(principal, flow)
        slices.append(flow or principal)
        _busy(duration_s)

    await metered(work(), taker.shares)


def test_others_have_their_turn_while_a_large_request_is_worked_on() -> None:
    """After each slice of time, however small or large its pieces are."""

    async def count(duration_s: float, num_pieces: int) -> int:
        pauses, num_turns, is_over = Turns(), 0, False

        async def other() -> None:
            nonlocal num_turns
            while not is_over:
                num_turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        for _ in range(num_pieces):
            _busy(duration_s)
            await pauses.pause()
        is_over = True
        await task
        return num_turns

    assert asyncio.run(count(0.0, 10)) <= 1
    assert asyncio.run(count(2 * SLICE_NS * 1e-9, 4)) >= 4
    assert asyncio.run(count(SLICE_NS * 1e-9 / 5, 40)) >= 4


@on_a_loop
async def test_who_is_alone_never_waits() -> None:
    """However much it has worked, its turn comes without giving up the loop."""
    taker = TurnTaker(Shares())
    taker.shares.account("alice")
    taker.shares.charge("alice", 1000 * MS)
    coroutine: Coroutine[Any, Any, None] = taker.turn("alice")
    with pytest.raises(StopIteration):
        coroutine.send(None)


def test_a_flood_waits_and_others_do_not() -> None:
    """50 calls of alice take 2 ms each; one of bob that comes in the middle goes on at once."""

    async def run() -> int:
        taker, slices = _contended(), []  # type: ignore[var-annotated]
        calls = [asyncio.create_task(_work(taker, "alice", slices, 0.002)) for _ in range(50)]
        while len(slices) < 8:
            await asyncio.sleep(0)
        begun_ns = CLOCK.now_ns
        await _work(taker, "bob", slices, 0.0)
        waited_ns = CLOCK.now_ns - begun_ns
        assert slices.index("bob") < 45
        await asyncio.gather(*calls)
        assert slices.count("alice") == 50
        assert taker.num_waiting("alice") == 0
        return waited_ns

    assert asyncio.run(run()) < 20 * MS


def test_work_is_charged_to_whoever_does_it() -> None:
    """Only the time in which the call held the loop, in tasks of its own too; waiting costs nothing."""

    async def run() -> tuple[int, int]:
        taker = _contended()

        async def call() -> None:
            take_turns(taker, "alice")
            _busy(0.01)
            await asyncio.sleep(0.03)
            await spawn(part())

        async def part() -> None:
            _busy(0.01)

        await metered(call(), taker.shares)
        return taker.shares.account("alice").loop_ns, taker.shares.account("bob").loop_ns

    alice_ns, bob_ns = asyncio.run(run())
    assert (alice_ns, bob_ns) == (20 * MS, 0)


def test_flows_of_one_principal_take_turns() -> None:
    """A call on another connection does not wait for all calls of a flood on one."""

    async def run() -> list[str]:
        taker, slices = _contended(), []  # type: ignore[var-annotated]
        taker.shares.charge("alice", 50 * MS)
        calls = [asyncio.create_task(_work(taker, "alice", slices, 0.0, "flood")) for _ in range(20)]
        await asyncio.sleep(0)
        calls.append(asyncio.create_task(_work(taker, "alice", slices, 0.0, "other")))
        await asyncio.gather(*calls)
        return slices

    assert "other" in asyncio.run(run())[:3]


@on_a_loop
async def test_a_call_that_is_cancelled_while_it_waits_holds_up_nobody() -> None:
    """Those after it have their turn; nothing is left behind."""
    taker, slices = _contended(), []  # type: ignore[var-annotated]
    taker.shares.charge("alice", 20 * MS)
    calls = [asyncio.create_task(_work(taker, "alice", slices, 0.0, f"call{index}")) for index in range(6)]
    await asyncio.sleep(0)
    for call in calls[::2]:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    assert slices == ["call1", "call3", "call5"]
    assert taker.num_waiting("alice") == 0


@on_a_loop
async def test_a_metered_call_returns_raises_and_is_cancelled_as_it_would_be_without() -> None:
    """Values and exceptions pass in both directions."""
    shares = _contended().shares
    seen: list[str] = []

    async def call(how: str) -> str:
        try:
            await asyncio.sleep(0)
            await asyncio.wait_for(asyncio.sleep(0), 1)
            if how == "raise":
                raise KeyError(how)
            if how == "wait":
                await asyncio.sleep(60)
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise
        return how

    assert await metered(call("return"), shares) == "return"
    with pytest.raises(KeyError):
        await metered(call("raise"), shares)
    task = spawn(call("wait"))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen == ["cancelled"]
    await turn()  # no call: no turns
