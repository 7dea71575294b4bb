"""Observers: every call is begun and ended once, with the code its client sees, however it ends."""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ferrule.v1 import admin_pb2, admin_pb2_grpc, cache_pb2, executor_pb2, policy_pb2
from ferrule_server.api.limits import ApiLimits
from ferrule_server.api.rpc.intake import Intake, request_class
from ferrule_server.api.rpc.observe import Call, current_call
from ferrule_server.api.rpc.state import ServerState
from ferrule_server.api.security.principal import Caller
from tests.api.harness import GREEDY, PROMPT, RunningServer, decode_item, token_access, wait_until

_TOKEN = "a" * 43


@dataclass
class Recorder:
    """Keeps every call; the ones that have ended in the order of their ends."""

    begun: list[Call] = field(default_factory=list)
    ended: list[Call] = field(default_factory=list)
    seen: list[tuple[str, str]] = field(default_factory=list)

    def begin(self, call: Call) -> None:
        """Keep it, and what is known of it so early."""
        assert current_call() is call
        assert call.caller is None
        assert call.code is None
        self.begun.append(call)
        self.seen.append((call.peer, dict(call.metadata).get("x-test", "")))  # type: ignore[arg-type]

    def end(self, call: Call) -> None:
        """Keep it."""
        assert call.code is not None
        self.ended.append(call)

    def last(self, rpc: str) -> Call:
        """Return the newest call of a method, once all that began have ended, each once."""
        wait_until(lambda: len(self.ended) == len(self.begun) and any(call.rpc == rpc for call in self.ended))
        assert len(set(map(id, self.ended))) == len(self.ended)
        return next(call for call in reversed(self.ended) if call.rpc == rpc)


class Broken:
    """Raises whenever it is told something."""

    def begin(self, call: Call) -> None:
        """Raise."""
        raise RuntimeError("begin")

    def end(self, call: Call) -> None:
        """Raise."""
        raise RuntimeError("end")


@pytest.fixture(scope="module")
def watched() -> Iterator[tuple[RunningServer, Recorder]]:
    """A server, and who watches its calls."""
    recorder = Recorder()
    with RunningServer(observers=(Broken(), recorder), has_reflection=True) as server:
        yield server, recorder


def test_a_call_that_succeeds_is_seen_with_its_caller_and_time(watched: tuple[RunningServer, Recorder]) -> None:
    """Service, method, metadata and peer at its begin; OK, no reason, the principal and a duration at its end."""
    server, recorder = watched
    server.stub.GetStatus(executor_pb2.GetStatusRequest(), metadata=(("x-test", "7"),), timeout=10)
    call = recorder.last("GetStatus")
    assert (call.service, call.code, call.reason) == ("ferrule.v1.ModelExecutorService", grpc.StatusCode.OK, "")
    assert call.principal == "local"
    assert 0 < call.duration_ns < 10e9
    peer, metadata = recorder.seen[recorder.begun.index(call)]
    assert peer.startswith("ipv4:127.0.0.1:")
    assert metadata == "7"


def test_an_observer_that_raises_changes_nothing_and_is_logged(
    watched: tuple[RunningServer, Recorder], caplog: pytest.LogCaptureFixture
) -> None:
    """The call is served, the next observer is told, and the log has a line for each."""
    server, recorder = watched
    server.stub.GetModelInfo(executor_pb2.GetModelInfoRequest(), timeout=10)
    assert recorder.last("GetModelInfo").code is grpc.StatusCode.OK
    lines = [record.getMessage() for record in caplog.records]
    assert lines.count("observer failed rpc=GetModelInfo") == 2


def test_a_refused_call_ends_with_its_code_and_reason(watched: tuple[RunningServer, Recorder]) -> None:
    """The ErrorInfo's reason, and the handle that the error is about."""
    server, recorder = watched
    first = server.prefill()
    server.decode(first.kv_cache, 5)
    with pytest.raises(grpc.RpcError):
        server.decode(first.kv_cache, 6)
    call = recorder.last("Decode")
    assert (call.code, call.reason) == (grpc.StatusCode.ABORTED, "HANDLE_STALE")
    assert call.handle_id == hashlib.sha256(first.kv_cache.cache_id.encode()).hexdigest()[:16]
    server.release(first.kv_cache)


def test_bytes_that_are_no_message_end_with_invalid_request(watched: tuple[RunningServer, Recorder]) -> None:
    """Also what is refused before a method sees it is seen."""
    server, recorder = watched
    with pytest.raises(grpc.RpcError):
        server.raw_unary("ModelExecutorService/Prefill", b"\xff\xff\xff")
    call = recorder.last("Prefill")
    assert (call.code, call.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")


def test_streams_are_seen_to_their_ends(watched: tuple[RunningServer, Recorder]) -> None:
    """StreamDecode that half-closes is OK, and CANCELLED where its client goes away; Generate and Forward are OK."""
    server, recorder = watched
    handle = server.prefill().kv_cache
    stream = server.open_stream()
    stream.send(decode_item(handle, 5))
    assert stream.rest()[0].results[0].decode.kv_cache.length == len(PROMPT) + 1
    assert recorder.last("StreamDecode").code is grpc.StatusCode.OK

    stream = server.open_stream()
    stream.send()
    stream.read()
    stream.call.cancel()
    assert recorder.last("StreamDecode").code is grpc.StatusCode.CANCELLED
    stream.half_close()

    assert list(server.stub.Generate(_generate(4), timeout=20))
    assert recorder.last("Generate").code is grpc.StatusCode.OK

    request = executor_pb2.ForwardRequest(input_ids=PROMPT, logits_policy=GREEDY)
    assert list(server.stub.Forward(request, timeout=10))
    assert recorder.last("Forward").code is grpc.StatusCode.OK
    server.release(handle)


class _HungUp:
    """A call whose client has gone: gRPC ends the read first, and cancels the method a moment later."""

    def __init__(self, method: asyncio.Task[None] | None) -> None:
        self._method = method

    async def read(self) -> object:
        """Return that there is no further message."""
        assert self._method is not None
        asyncio.get_running_loop().call_later(0.0005, self._method.cancel)  # measured: at most 0.4 ms
        return grpc.aio.EOF


def test_a_stream_whose_read_ends_before_its_cancellation_is_cancelled() -> None:
    """It has not half-closed, and must not end as if it had."""
    state = ServerState("test", "0", "0", ApiLimits())
    intake = Intake(state)
    method = request_class("ferrule.v1.ModelExecutorService.StreamDecode")

    async def read_all() -> None:
        context: Any = _HungUp(asyncio.current_task())
        async for _ in intake.frames(method, context, Caller("alice")):
            pytest.fail("no message was sent")

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(read_all())


def test_a_deadline_that_passes_is_no_cancel(watched: tuple[RunningServer, Recorder]) -> None:
    """The client gave a time and it is over: DEADLINE_EXCEEDED."""
    server, recorder = watched
    health = health_pb2_grpc.HealthStub(server.channel)
    with pytest.raises(grpc.RpcError):
        list(health.Watch(health_pb2.HealthCheckRequest(), timeout=0.3))
    assert recorder.last("Watch").code is grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.parametrize(
    ("left_s", "code"),
    [(None, "CANCELLED"), (0.0, "DEADLINE_EXCEEDED"), (0.9, "DEADLINE_EXCEEDED"), (2.0, "CANCELLED")],
)
def test_a_deadline_that_was_rounded_up_is_one(left_s: float | None, code: str) -> None:
    """100 seconds into a call: gRPC writes timeouts with two or three digits, so up to 1 % may seem to be left."""

    class Context:
        """gRPC's side of a call."""

        def time_remaining(self) -> float | None:
            """Return what its deadline leaves."""
            return left_s

    call = Call("s", "r", Context())  # type: ignore[arg-type]
    call.begin_ns -= 100 * 10**9
    contextvars.copy_context().run(_cancel, call)
    assert call.code is not None
    assert call.code.name == code


def test_what_aborts_by_itself_ends_with_its_code(watched: tuple[RunningServer, Recorder]) -> None:
    """Health answers NOT_FOUND without an error of ours: the code without a reason, and nobody as principal."""
    server, recorder = watched
    with pytest.raises(grpc.RpcError):
        health_pb2_grpc.HealthStub(server.channel).Check(health_pb2.HealthCheckRequest(service="none"), timeout=10)
    call = recorder.last("Check")
    assert (call.code, call.reason, call.principal) == (grpc.StatusCode.NOT_FOUND, "", "-")


def test_a_method_that_yields_its_replies_is_seen_too(watched: tuple[RunningServer, Recorder]) -> None:
    """Reflection is such a service."""
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    server, recorder = watched
    stub = reflection_pb2_grpc.ServerReflectionStub(server.channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    assert list(stub.ServerReflectionInfo(iter((request,)), timeout=10))
    assert recorder.last("ServerReflectionInfo").code is grpc.StatusCode.OK


def test_an_exception_nobody_expected_ends_with_internal(
    watched: tuple[RunningServer, Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the client is told is what observers are told."""
    server, recorder = watched
    monkeypatch.setattr(server.engine, "submit", None)
    with pytest.raises(grpc.RpcError):
        server.stub.ListCaches(cache_pb2.ListCachesRequest(), timeout=10)
    call = recorder.last("ListCaches")
    assert (call.code, call.reason) == (grpc.StatusCode.INTERNAL, "ENGINE_FAULT")


def test_calls_that_admission_refuses_are_seen(tmp_path: Path) -> None:
    """Without a token: no principal. With one that lacks the role: its principal."""
    recorder = Recorder()
    with RunningServer(observers=(recorder,), access=token_access(tmp_path, {_TOKEN: "alice"})) as server:
        with pytest.raises(grpc.RpcError):
            server.stub.GetStatus(executor_pb2.GetStatusRequest(), timeout=10)
        call = recorder.last("GetStatus")
        assert (call.code, call.reason, call.principal) == (grpc.StatusCode.UNAUTHENTICATED, "TOKEN_MISSING", "")
        with pytest.raises(grpc.RpcError):
            admin_pb2_grpc.AdminServiceStub(server.channel).Drain(
                admin_pb2.DrainRequest(), timeout=10, metadata=(("authorization", f"Bearer {_TOKEN}"),)
            )
        call = recorder.last("Drain")
        assert (call.code, call.reason, call.principal) == (grpc.StatusCode.PERMISSION_DENIED, "ROLE_REQUIRED", "alice")


def _cancel(call: Call) -> None:
    with pytest.raises(asyncio.CancelledError), call:
        raise asyncio.CancelledError


def _generate(max_tokens: int) -> executor_pb2.GenerateRequest:
    return executor_pb2.GenerateRequest(
        input_ids=PROMPT,
        logits_policy=policy_pb2.LogitsReturnPolicy(greedy_argmax=policy_pb2.GreedyArgmax()),
        max_tokens=max_tokens,
    )
