"""Receives requests: room, time, size, the turn of the principal, and parsing, between the metadata and the method.

metadata --> admitted? --> room --> one message --> size --> turn --> parse --> the method
(handlers)    '------ receiving ----'  bounds   turns    parsing
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from typing import Any, Final
from weakref import WeakValueDictionary

import grpc
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.message import DecodeError, Message

from ferrule_server.api.receiving.bounds import SLACK_BYTES, ModelSizes, request_bound
from ferrule_server.api.receiving.budgets import PROBE_TIMEOUT_S, ProbeBudget, ReceiveBudget
from ferrule_server.api.receiving.parsing import MESSAGE_BYTES, PIECE_BYTES, parse
from ferrule_server.api.rpc.refusals import StrangerLog
from ferrule_server.api.rpc.state import ServerState
from ferrule_server.api.security.principal import ANYBODY, REFUSED, Caller, Context
from ferrule_server.api.security.strangers import Strangers, hang_up
from ferrule_server.errors import InvalidRequest, RequestTooLarge
from ferrule_server.fairness.bucket import Meter
from ferrule_server.fairness.turns import TurnTaker
from ferrule_server.quotas import LimitsOf

CALL_NS: Final = 200_000
"""The cost of a call to the event loop outside of our code: gRPC begins it, sends its reply and ends it."""
_GONE_S: Final = 0.2
"""If a message is too large, gRPC ends the read as if there were none, and cancels the method within this time."""
_CANCEL_S: Final = 0.002
"""The same time for a stream: if a client disconnects, the read ends first, and then the method is cancelled: within
0.4 ms in 370 cases of 370 on two cores, idle and busy. A client that has half-closed waits this long for its status."""
_FEW_MESSAGES: Final = 4096
"""A request that holds fewer messages takes little more memory than its bytes."""
_MAX_PARKED_STRANGERS: Final = 256
"""Limit of waiting calls whose credentials will be refused for their turn; each may hold a flow-control window."""


def request_class(method: str) -> type[Message]:
    """Return the type of the requests of a method, by its full name: ``ferrule.v1.ModelExecutorService.Prefill``."""
    return message_factory.GetMessageClass(descriptor_pool.Default().FindMethodByName(method).input_type)


class CallRates:
    """Limits how many calls, and how many bytes of requests, each principal may send per second.

    Call :meth:`admit` once for each call, after its credentials are accepted and before its request is read or parsed.
    Call :meth:`charge_bytes` for each message that arrives: the one request of a unary call, every frame of a stream.
    The quota of bytes may be overdrawn, since the size of a message is only known when it has arrived; the next calls
    are then refused. A frame cannot be refused without ending its stream, so let a stream sleep as long
    as :meth:`charge_bytes` says before its next frame is read: HTTP/2 flow control then slows the sender.

    Principals that have sent nothing lately are forgotten; nothing is kept for principals without these quotas.

    Args:
        limits_of: The quotas of a principal.
        clock: Monotonic seconds.
    """

    def __init__(self, limits_of: LimitsOf, clock: Callable[[], float] = time.monotonic) -> None:
        self._calls = Meter("CALL_RATE", lambda principal: limits_of(principal).calls_per_s, clock)
        self._bytes = Meter("REQUEST_BYTES", lambda principal: limits_of(principal).request_bytes_per_s, clock)

    def admit(self, principal: str, *, is_always: bool = False) -> None:
        """Count one call, or refuse it; a refused call is not counted.

        Args:
            principal: The caller.
            is_always: Count the call whatever the caller has spent.

        Raises:
            QuotaExceeded: ``CALL_RATE`` or ``REQUEST_BYTES``, with the time after which a call would be admitted.
        """
        if not is_always:
            self._calls.check(principal)
            self._bytes.check(principal)
        self._calls.charge(principal, 1)

    def charge_bytes(self, principal: str, num_bytes: int) -> float:
        """Count the bytes of a request or frame that has arrived; never refuses.

        Returns:
            How long a stream of the principal should wait before it reads another frame, in seconds; often 0.
        """
        return self._bytes.charge(principal, num_bytes)


class Intake:
    """Receives the requests of all methods. All methods run on the event loop.

    Args:
        state: The server: its limits, its quotas, and its model once it is loaded.

    Attributes:
        turns: The turns of the principals.
        rates: Their quotas of calls and bytes.
        port: The port that the server listens at.
        strangers: Slows and ends the connections of calls whose credentials are refused.
        stranger_log: Logs these calls.
    """

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self.turns = TurnTaker(state.shares)
        self.rates = CallRates(state.limits_of)
        limits = state.limits
        self._budget = ReceiveBudget(limits.max_receiving_bytes, limits.max_request_bytes, limits.message_timeout_s)
        self._large = asyncio.Lock()
        self._large_of = WeakValueDictionary[str, asyncio.Lock]()  # one of each principal may wait for the other lock
        self._probes = ProbeBudget(min(PROBE_TIMEOUT_S, limits.message_timeout_s))
        self.port = 0
        self.strangers = Strangers(lambda peer: asyncio.to_thread(hang_up, peer, self.port))
        self.stranger_log = StrangerLog()

    async def refuse_in_turn(self, peer: str) -> None:
        """Wait until a stranger may be refused: after its pause, floods of strangers take turns with all principals."""
        self.turns.shares.account(REFUSED)
        self.turns.shares.charge(REFUSED, CALL_NS)
        await self.strangers.pause(peer)
        if self.turns.num_waiting(REFUSED) < _MAX_PARKED_STRANGERS:
            await self.turns.turn(REFUSED, peer)

    async def one(self, kind: type[Message], context: Context, caller: Caller) -> tuple[Message, int]:
        """Return the one request of a call, and the bytes to give back when the call has ended.

        Raises:
            InvalidRequest: There is no request, or it is malformed.
            RequestTooLarge: The request is larger than any useful one of its kind.
            RequestTimeout: The request did not arrive in time.
            QueueFull: Too many strangers wait.
        """
        if caller.principal == ANYBODY:
            return await self._probe(kind, context)
        principal = caller.principal
        data = await _present(await self._budget.read(principal, partial(_read, context)))
        self.rates.charge_bytes(principal, len(data))
        return await self._parse_held(kind, data, principal, len(data))

    def give_back(self, caller: Caller, held_bytes: int) -> None:
        """Give back the bytes that the request of a call has held."""
        self._budget.resize(caller.principal, held_bytes, 0)

    async def frames(self, kind: type[Message], context: Context, caller: Caller) -> AsyncIterator[Message]:
        """Yield the requests of a stream, as long as its credentials are valid.

        A principal that sends more bytes than its quota allows is read more slowly.

        Raises:
            InvalidRequest, RequestTooLarge: As :meth:`one`, for the next request.
            TokenInvalid: The credentials have been withdrawn.
        """
        while (data := await context.read()) is not grpc.aio.EOF:
            if caller.is_withdrawn:
                caller.check()
            if (delay_s := self.rates.charge_bytes(caller.principal, len(data))) > 0.0:
                await asyncio.sleep(delay_s)
            if len(data) <= PIECE_BYTES:
                yield (await self._parse(kind, data, caller.principal))[0]
                continue
            async for request in self._large_frame(kind, data, caller.principal):
                yield request
        await asyncio.sleep(_CANCEL_S)

    async def _large_frame(self, kind: type[Message], data: bytes, principal: str) -> AsyncIterator[Message]:
        """Yield one large request of a stream, which holds room until the next one is read."""
        await self._budget.acquire(principal)
        most_bytes = self._state.limits.max_request_bytes
        request, held_bytes = await self._parse_held(kind, data, principal, most_bytes)
        try:
            yield request
        finally:
            self._budget.resize(principal, held_bytes, 0)

    async def _parse_held(
        self, kind: type[Message], data: bytes, principal: str, held_bytes: int
    ) -> tuple[Message, int]:
        """Return a request, and what it keeps of the room that its bytes held."""
        kept_bytes = 0
        try:
            request, kept_bytes = await self._parse(kind, data, principal)
        finally:
            self._budget.resize(principal, held_bytes, kept_bytes)
        return request, kept_bytes

    async def _probe(self, kind: type[Message], context: Context) -> tuple[Message, int]:
        peer = context.peer()
        data = await _present(await self._probes.read(peer, partial(_read, context)))
        return await self._parse(kind, data, ANYBODY, peer)

    async def _parse(self, kind: type[Message], data: bytes, principal: str, flow: str = "") -> tuple[Message, int]:
        """Return a request, and the memory that it takes beyond its bytes, or 0 if that is little."""
        if len(data) > SLACK_BYTES and len(data) > (limit := self._bound(kind)):
            raise RequestTooLarge(len(data), limit)
        request, is_large = kind(), len(data) > PIECE_BYTES
        async with self._large_of.setdefault(principal, asyncio.Lock()) if is_large else nullcontext():
            await self.turns.turn(principal, flow)
            try:
                num_messages = await parse(request, data, self._alone() if is_large else nullcontext())
            except DecodeError:
                raise InvalidRequest("request", f"is not a valid {kind.DESCRIPTOR.full_name} message") from None
        return request, MESSAGE_BYTES * num_messages if num_messages > _FEW_MESSAGES else 0

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """Let one large request at a time be parsed: the memory beyond its bytes is known only afterwards."""
        async with self._large:
            await self._budget.settled()
            yield

    def _bound(self, kind: type[Message]) -> int:
        """Return the largest request of a kind; while the model is loading only gRPC's own limit is known."""
        serving = self._state.serving
        if serving is None:
            return self._state.limits.max_request_bytes
        model = serving.engine.info.model
        sizes = ModelSizes(model.config.vocab_size, model.max_context, serving.inputs.max_step_rows)
        descriptor: Any = kind.DESCRIPTOR  # there are two descriptor classes
        return request_bound(descriptor, self._state.limits, sizes)


async def _read(context: Context) -> bytes | None:
    """Return the next message of a call; None: the stream has ended."""
    data: Any = await context.read()  # gRPC's EOF is an object of its own
    return None if data is grpc.aio.EOF else data


async def _present(data: bytes | None) -> bytes:
    """Return a message, which must be there.

    Raises:
        InvalidRequest: The client has sent no message.
    """
    if data is None:
        await asyncio.sleep(_GONE_S)
        raise InvalidRequest("request", "no message was sent")
    return data
