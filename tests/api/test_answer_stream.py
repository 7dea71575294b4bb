"""Answers piece by piece: merged while a write is in flight, held back by the reader, ended in every way there is."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, cast

import grpc
import pytest
from google.protobuf.message import Message

from ferrule.v1 import executor_pb2
from ferrule_server.api.limits import ApiLimits
from ferrule_server.api.requests.policy import OutputPlan
from ferrule_server.api.rpc.calls import CallEnded
from ferrule_server.api.rpc.refusals import Refusals
from ferrule_server.api.rpc.state import ServerState
from ferrule_server.api.security.principal import Caller, enter
from ferrule_server.api.streams import writer
from ferrule_server.api.streams.answer_stream import AnswerStream
from ferrule_server.api.streams.replies import GenerateReplies
from ferrule_server.engine.jobs import (
    BranchFrame,
    GenerateFrame,
    GenerateJob,
    OutputRequest,
    Sink,
    StepTiming,
    StopRules,
    StreamJob,
    Window,
)
from ferrule_server.errors import BlocksExhausted, Draining, FerruleError, HandleStale, TokenInvalid
from ferrule_server.executor.base import OutputSpec, RowOutput
from ferrule_server.kv.handle import Handle
from tests.api.loops import on_a_loop

_ROW_BYTES = 100
_PLAN = OutputPlan(OutputRequest(OutputSpec(greedy=True)), 1, 40)


class _Engine:
    """Takes one job and says what it is told to."""

    def __init__(self) -> None:
        self.info: Any = None
        self.entries: list[Any] = []
        self.resumed: list[StreamJob[object]] = []

    def submit(self, entries: list[Any]) -> None:
        self.entries.extend(entries)

    def resume(self, job: StreamJob[object]) -> None:
        self.resumed.append(job)

    def snapshot(self) -> Any:
        raise AssertionError("not asked for")

    def own_figures(self, principal: str) -> Any:
        raise AssertionError(f"not asked for: {principal}")

    def num_free_blocks(self) -> int:
        raise AssertionError("not asked for")

    def kv_metrics(self) -> Any:
        raise AssertionError("not asked for")

    @property
    def sink(self) -> Sink:
        return cast("Sink", self.entries[0][1])

    def say(self, *outcomes: GenerateFrame | FerruleError) -> None:
        """Deliver outcomes as of one step each."""
        for outcome in outcomes:
            job = self.entries[0][0]
            if isinstance(outcome, GenerateFrame):
                job.window.sent_bytes += _ROW_BYTES * sum(len(branch.rows) for branch in outcome.branches)
            self.sink.deliver(job, outcome)
            self.sink.flush()


class _Context:
    """A call whose writes wait until they are let through, if it is slow."""

    def __init__(self) -> None:
        self.written: list[executor_pb2.GenerateResponse] = []
        self.has_begun = False
        self.permits = asyncio.Semaphore(1000)
        self.is_writing = False
        self.failure: Exception | None = None

    def holds_writes(self) -> None:
        """Let writes wait from now on."""
        self.permits = asyncio.Semaphore(0)

    def lets_through(self, count: int = 1000) -> None:
        """Let so many writes return."""
        for _ in range(count):
            self.permits.release()

    async def send_initial_metadata(self, _: object) -> None:
        self.has_begun = True

    async def write(self, message: Message) -> None:
        self.is_writing = True
        await self.permits.acquire()
        if self.failure is not None:
            raise self.failure
        self.is_writing = False
        self.written.append(cast("executor_pb2.GenerateResponse", message))


class _Call:
    """One AnswerStream under way between a fake engine and a fake reader."""

    def __init__(self, window_bytes: int = 1000, max_reply_bytes: int = 1 << 20) -> None:
        self.engine, self.context = _Engine(), _Context()
        self.caller = Caller("alice")
        enter(self.caller)
        self.job = GenerateJob(
            "alice", (1,), None, _PLAN.output, StopRules(), Window(window_bytes), row_bytes=_ROW_BYTES
        )
        self.state = ServerState("i", "e", "0", ApiLimits())
        replies = GenerateReplies(_PLAN, "r", max_reply_bytes, Refusals("Generate", "alice"))
        engine, context = cast("Any", self.engine), cast("Any", self.context)
        self.stream = AnswerStream("Generate", self.state, engine, context, job=self.job, replies=replies)
        self.task = asyncio.create_task(self.stream.run())

    async def settles(self) -> None:
        """Let everything happen that needs nobody else."""
        for _ in range(20):
            await asyncio.sleep(0)

    @property
    def tokens(self) -> list[list[int]]:
        """Tokens of each message written."""
        return [[token for each in one.outputs for token in each.outputs.tokens] for one in self.context.written]

    async def reason(self) -> str | None:
        """Wait for the end of the call and return the reason it was refused for; None: OK."""
        try:
            await asyncio.wait_for(self.task, 5)
        except CallEnded as ended:
            return str(next(value for key, value in ended.status.trailing_metadata if key.endswith("-bin")))
        return None


def _frame(*tokens: int, is_last: bool = False, index: int = 0) -> GenerateFrame:
    """Return a frame of one branch that draws tokens."""
    rows = tuple(RowOutput(position, token=token) for position, token in enumerate(tokens, start=5))
    handle = Handle("i.e.x", tokens[-1], bytes(16)) if tokens else None
    return GenerateFrame((BranchFrame(index, handle, rows),), StepTiming(1, 2, 3), is_last)


@on_a_loop
async def test_frames_merge_while_a_write_is_in_flight() -> None:
    """All that came meanwhile is one message."""
    call = _Call()
    call.context.holds_writes()
    await call.settles()
    for token in (1, 2, 3):
        call.engine.say(_frame(token))
        await call.settles()
    call.engine.say(_frame(4, is_last=True))
    await call.settles()
    call.context.lets_through()
    assert await call.reason() is None
    assert call.tokens == [[1], [2, 3, 4]]
    assert call.context.written[1].outputs[0].resume_from.length == 4


@on_a_loop
async def test_the_engine_is_woken_once_the_window_is_open_again() -> None:
    """Not while it is still closed, not when it never was."""
    call = _Call(window_bytes=3 * _ROW_BYTES, max_reply_bytes=600)
    call.context.holds_writes()
    await call.settles()
    call.engine.say(*(_frame(token) for token in range(4)))
    await call.settles()
    assert not call.job.window.is_open
    for num_written, num_resumed in ((1, 0), (2, 1), (3, 1), (4, 1)):
        call.context.lets_through(1)
        await call.settles()
        assert call.tokens == [[token] for token in range(num_written)]
        assert call.engine.resumed == [call.job] * num_resumed  # the second write opens the window
    assert call.job.window.taken_bytes == call.job.window.sent_bytes == 4 * _ROW_BYTES
    call.context.lets_through()
    call.engine.say(_frame(9, is_last=True))
    assert await call.reason() is None
    assert len(call.engine.resumed) == 1


@on_a_loop
async def test_an_error_in_the_place_of_the_first_frame_is_the_status_of_the_call() -> None:
    """The metadata of the call are not sent before it."""
    call = _Call()
    await call.settles()
    call.engine.say(HandleStale("0123", 2, 3))
    assert "HANDLE_STALE" in (await call.reason() or "")
    assert not call.context.has_begun
    assert not call.job.is_cancelled


@on_a_loop
async def test_what_came_before_an_error_is_written_before_it() -> None:
    """Tokens that are committed are not lost to the reader because the engine closes."""
    call = _Call()
    call.context.holds_writes()
    await call.settles()
    call.engine.say(_frame(1), _frame(2), BlocksExhausted(1, 0))
    await call.settles()
    call.context.lets_through()
    assert "KV_BLOCKS_EXHAUSTED" in (await call.reason() or "")
    assert [token for tokens in call.tokens for token in tokens] == [1, 2]


@on_a_loop
async def test_a_call_that_is_ended_has_its_status_and_never_cancels_a_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """The write in flight is waited for a moment and left alone."""
    monkeypatch.setattr(writer, "_LAST_WRITE_S", 0.01)

    call = _Call()
    call.context.holds_writes()
    await call.settles()
    for token in (1, 2):
        call.engine.say(_frame(token))
        await call.settles()
    assert not call.stream.is_quiet(0.0)
    call.state.end_streams(Draining(), 0.0)
    await call.settles()
    assert not call.task.done()
    call.state.end_streams(Draining())
    assert "DRAINING" in (await call.reason() or "")
    assert call.context.is_writing
    assert call.job.is_cancelled
    call.context.lets_through()
    await call.settles()
    assert call.tokens == [[1]]  # nothing is written behind the status


@on_a_loop
async def test_a_withdrawn_caller_gets_nothing_more() -> None:
    """Before the next message, even if nobody looked for streams of it."""
    call = _Call()
    await call.settles()
    call.engine.say(_frame(1))
    await call.settles()
    call.caller.is_withdrawn = True
    call.engine.say(_frame(2))
    assert TokenInvalid.REASON in (await call.reason() or "")
    assert call.tokens == [[1]]
    assert call.job.is_cancelled


@pytest.mark.parametrize("is_gone", [True, False])
@on_a_loop
async def test_a_failed_write_is_a_fault_unless_the_client_hung_up(
    is_gone: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The call of a client that hung up is cancelled a moment after its write has failed."""
    monkeypatch.setattr(writer, "_HANG_UP_S", 0.05)

    call = _Call()
    call.context.failure = grpc.aio.InternalError("the call is gone")
    await call.settles()
    call.engine.say(_frame(1))
    await call.settles()
    if is_gone:
        call.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call.task
        await call.settles()
    else:
        assert "ENGINE_FAULT" in (await call.reason() or "")
    assert call.job.is_cancelled
    assert any(record.levelno >= logging.WARNING for record in caplog.records) is not is_gone


@on_a_loop
async def test_a_frame_that_cannot_be_written_down_ends_the_call_alone(caplog: pytest.LogCaptureFixture) -> None:
    """A bug in a reply is a fault of one call, logged with its traceback."""
    call = _Call()
    await call.settles()
    call.engine.say(cast("Any", object()))
    assert "ENGINE_FAULT" in (await call.reason() or "")
    assert call.job.is_cancelled
    assert any(record.exc_info for record in caplog.records)
