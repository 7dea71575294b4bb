"""The intake: large requests of a principal that must wait do not delay those of others."""

from __future__ import annotations

import asyncio

import pytest

from ferrule.v1 import executor_pb2
from ferrule_server.api.limits import ApiLimits
from ferrule_server.api.receiving.parsing import PIECE_BYTES, PLAIN_BYTES
from ferrule_server.api.rpc.intake import Intake
from ferrule_server.api.rpc.state import ServerState
from ferrule_server.api.security.principal import ANYBODY, REFUSED
from ferrule_server.fairness import turns as turns_module
from ferrule_server.fairness.turns import Shares, TurnTaker, take_turns
from tests.api.loops import on_a_loop

KIND = executor_pb2.BatchPrefillRequest
LARGE = b"\x0a\x00" * (PIECE_BYTES // 2 + 1)
"""Messages that are counted after they are parsed."""
HUGE = KIND(inputs=[{"input_ids": [1 << 20] * (PLAIN_BYTES // 3)}]).SerializeToString() + LARGE
"""Messages that are counted before they are parsed."""


class _Turns(TurnTaker):
    """The flood has its turns when it begins a request, and none after that."""

    def __init__(self) -> None:
        super().__init__(Shares())
        self.num_begun = 0
        self.must_wait = asyncio.Event()

    async def turn(self, principal: str, flow: str = "") -> None:
        if principal == "flood":
            self.num_begun += 1
            if self.num_begun > self.num_requests:
                self.must_wait.set()
                await asyncio.Event().wait()

    num_requests = 1


def _intake() -> tuple[Intake, _Turns]:
    intake = Intake(ServerState("test", "0", "0", ApiLimits()))
    turns = intake.turns = _Turns()
    return intake, turns


async def _parse(intake: Intake, principal: str, data: bytes) -> None:
    take_turns(intake.turns, principal)
    await intake._parse(KIND, data, principal)


@on_a_loop
@pytest.mark.parametrize("data", [LARGE, HUGE], ids=["large", "huge"])
async def test_a_large_request_does_not_wait_for_the_turn_of_another_principal(
    data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One whose sender must wait half-way holds nothing that others need."""
    monkeypatch.setattr(turns_module, "SLICE_NS", 0)
    intake, turns = _intake()
    flood = asyncio.create_task(_parse(intake, "flood", data))
    while not (turns.must_wait.is_set() or flood.done()):
        await asyncio.sleep(0)
    assert flood.done() == (data is LARGE), "what is counted with the lock held is counted without turns"
    await asyncio.wait_for(asyncio.create_task(_parse(intake, "calm", LARGE)), 10)
    flood.cancel()


@on_a_loop
async def test_a_large_request_waits_for_one_of_another_principal_at_most() -> None:
    """However many have come before."""
    intake, turns = _intake()
    turns.num_requests = 100
    order: list[str] = []

    async def note(principal: str) -> None:
        await _parse(intake, principal, LARGE)
        order.append(principal)

    await asyncio.gather(*map(note, ["flood"] * 3), note("calm"))
    assert order.index("calm") <= 1


@on_a_loop
async def test_a_probe_does_not_wait_for_what_refused_calls_have_used() -> None:
    """Health needs no credentials; a flood of calls whose credentials are refused has an account of its own."""
    state = ServerState("test", "0", "0", ApiLimits(), shares=Shares(lambda: 0))
    intake, shares = Intake(state), state.shares
    shares.account("calm")
    shares.account(ANYBODY)
    refused = [asyncio.create_task(intake.refuse_in_turn("ipv4:192.0.2.1:1")) for _ in range(8)]
    await asyncio.sleep(0)
    assert shares.wait_ns(shares.account(REFUSED)) > 0
    assert shares.wait_ns(shares.account(ANYBODY)) <= 0
    for each in refused:
        each.cancel()
