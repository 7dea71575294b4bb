"""Attacks by name: what each is answered, and that the others are served meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import socket
import struct
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from grpc_status import rpc_status

from ferrule.v1 import cache_pb2, executor_pb2, executor_pb2_grpc, policy_pb2, types_pb2
from ferrule_server.api.limits import ApiLimits
from ferrule_server.api.receiving.bounds import SLACK_BYTES
from ferrule_server.api.rpc.handlers import Registrar
from ferrule_server.api.rpc.intake import Intake
from ferrule_server.api.rpc.state import ServerState
from ferrule_server.api.security.auth import OpenAccess
from ferrule_server.executor.reference import PagedReferenceExecutor
from tests.api.harness import (
    GREEDY,
    PROMPT,
    Refusal,
    RunningServer,
    decode_item,
    read_status,
    refused,
    wait_until,
)
from tests.api.hostile import http2

Code = grpc.StatusCode
Policy = policy_pb2.LogitsReturnPolicy
_GET_STATUS = "/ferrule.v1.ModelExecutorService/GetStatus"


def _refusal(call: Callable[[], object]) -> Refusal:
    with refused() as refusals:
        call()
    return refusals[0]


def _core_error(call: Callable[[], object]) -> tuple[grpc.StatusCode, str]:
    """Return code and text of an error that gRPC itself answers, without an ErrorInfo, as documented."""
    with pytest.raises(grpc.RpcError) as caught:
        call()
    assert rpc_status.from_call(caught.value) is None
    return caught.value.code(), caught.value.details() or ""


def _goes_on(server: RunningServer) -> None:
    """The server still answers on other connections."""
    handle = server.prefill().kv_cache
    assert server.decode(handle, 7).kv_cache.length == len(PROMPT) + 1
    server.release(handle)


@contextlib.contextmanager
def _longest_pause(server: RunningServer) -> Iterator[list[float]]:
    """The list holds, afterwards, the longest time that the event loop did one thing, in seconds of its processor time.

    Others of this busy machine do not count that way.
    """
    longest = [0.0]

    async def watch() -> None:
        last = time.thread_time()
        while True:
            await asyncio.sleep(0)
            now = time.thread_time()
            longest[0] = max(longest[0], now - last)
            last = now

    watching = asyncio.run_coroutine_threadsafe(watch(), server.loop)
    try:
        yield longest
    finally:
        watching.cancel()


# ---- the connection -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_bytes", [16 << 10, 32 << 10])
def test_metadata_beyond_16_kb_is_refused(server: RunningServer, num_bytes: int) -> None:
    """RESOURCE_EXHAUSTED by gRPC; 4 KB are taken."""
    request = executor_pb2.GetStatusRequest()
    assert server.stub.GetStatus(request, timeout=10, metadata=(("x-some", "y" * 4096),)).status.is_ready
    code, _ = _core_error(lambda: server.stub.GetStatus(request, timeout=10, metadata=(("x-some", "y" * num_bytes),)))
    assert code is Code.RESOURCE_EXHAUSTED
    _goes_on(server)


def test_many_small_metadata_fields_are_refused(server: RunningServer) -> None:
    """It is the sum that counts."""
    metadata = tuple((f"x-{index}", "y") for index in range(2000))
    code, _ = _core_error(lambda: server.stub.GetStatus(executor_pb2.GetStatusRequest(), timeout=10, metadata=metadata))
    assert code is Code.RESOURCE_EXHAUSTED
    _goes_on(server)


def test_a_ping_flood_is_told_to_calm_down(server: RunningServer) -> None:
    """GOAWAY with ENHANCE_YOUR_CALM after a few, and the connection is closed."""
    with http2.peer(server.address.host, server.address.port) as peer:
        peer.send(*[http2.frame(http2.PING, payload=bytes(8))] * 1000)
        goaways = [payload for kind, _, _, payload in peer.frames() if kind == http2.GOAWAY]
    assert int.from_bytes(goaways[-1][4:8], "big") == http2.ENHANCE_YOUR_CALM
    assert goaways[-1][8:] == b"too_many_pings"
    _goes_on(server)


def test_a_settings_flood_is_only_answered(server: RunningServer) -> None:
    """Each is acknowledged, or the connection closed; the others are served."""
    with http2.peer(server.address.host, server.address.port) as peer:
        peer.send(*[http2.settings()] * 2000)
        _goes_on(server)


def test_rapid_reset_leaves_nothing_behind(server: RunningServer) -> None:
    """Thousands of calls that are cancelled as soon as they are made (CVE-2023-44487)."""
    with http2.peer(server.address.host, server.address.port) as peer:
        headers = http2.call_headers(_GET_STATUS)
        for index in range(2000):
            stream = 2 * index + 1
            peer.send(
                http2.frame(http2.HEADERS, http2.END_HEADERS, stream, headers),
                http2.frame(http2.RST_STREAM, 0, stream, http2.CANCEL.to_bytes(4, "big")),
            )
        _goes_on(server)
    wait_until(lambda: server.state.num_active == 0 and not server.state.streams)
    _goes_on(server)


def test_a_watcher_that_takes_nothing_holds_up_no_drain() -> None:
    """With a window of 0 not even the first status can be sent to it."""
    with RunningServer() as server, http2.peer(server.address.host, server.address.port, window=0) as peer:
        peer.send(
            http2.frame(http2.HEADERS, http2.END_HEADERS, 1, http2.call_headers("/grpc.health.v1.Health/Watch")),
            http2.frame(http2.DATA, http2.END_STREAM, 1, http2.grpc_message(b"")),
        )
        wait_until(lambda: len(server.server._health._watchers) == 1)
        server.run(server.server.drain(60.0))


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /ferrule.v1.ModelExecutorService/GetStatus HTTP/1.1\r\nContent-Length: 4\r\n\r\nabcd",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)),
        bytes(100_000),
        b"\xff" * 100_000,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 100_000,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + http2.settings() + http2.frame(http2.HEADERS, 4, 1, b"\xff" * 1000),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + http2.settings() + http2.frame(http2.DATA, 0, 7, b"no such stream"),
    ],
    ids=["http1-get", "http1-post", "tls", "zeros", "ones", "no-frames", "no-headers", "no-stream"],
)
def test_what_is_no_grpc_is_hung_up_on(server: RunningServer, data: bytes) -> None:
    """Garbage, HTTP/1, TLS to a plain port, broken frames."""
    with (
        socket.create_connection((server.address.host, server.address.port), timeout=10) as client,
        contextlib.suppress(OSError),  # it has hung up, before all was sent perhaps
    ):
        client.sendall(data)
        client.shutdown(socket.SHUT_WR)
        while client.recv(1 << 16):
            pass
    _goes_on(server)


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        (http2.call_headers("/nobody/Nothing"), http2.grpc_message(b"")),
        (http2.call_headers("no path at all"), http2.grpc_message(b"")),
        (http2.call_headers("/ferrule.v1.ModelExecutorService/Unknown"), http2.grpc_message(b"")),
        (http2.call_headers(_GET_STATUS, method="GET"), http2.grpc_message(b"")),
        (http2.call_headers(_GET_STATUS, content_type="text/html"), http2.grpc_message(b"")),
        (http2.call_headers(_GET_STATUS, grpc_encoding="nonsense"), http2.grpc_message(b"x", flag=1)),
        (http2.call_headers(_GET_STATUS, grpc_encoding="gzip"), http2.grpc_message(b"no gzip", flag=1)),
        (http2.call_headers(_GET_STATUS, grpc_timeout="nonsense"), http2.grpc_message(b"")),
        (http2.call_headers(_GET_STATUS, grpc_timeout="99999999H"), http2.grpc_message(b"")),
        (http2.call_headers(_GET_STATUS, authorization="Bearer \x00"), http2.grpc_message(b"")),
        (http2.call_headers(_GET_STATUS), http2.grpc_message(b"abc", length=1)),
        (http2.call_headers(_GET_STATUS), http2.grpc_message(b"", flag=0xFF)),
        (http2.call_headers(_GET_STATUS), http2.grpc_message(b"") * 1000),
        (b"\x00" * 100, http2.grpc_message(b"")),
    ],
)
def test_a_call_that_lies_about_itself_is_answered_or_hung_up_on(
    server: RunningServer, headers: bytes, message: bytes
) -> None:
    """No such method, no such encoding, a length that is not its own: gRPC's answer, and none of ours is needed."""
    with http2.peer(server.address.host, server.address.port) as peer:
        peer.send(
            http2.frame(http2.HEADERS, http2.END_HEADERS, 1, headers),
            http2.frame(http2.DATA, http2.END_STREAM, 1, message),
        )
        for kind, flags, stream, _ in peer.frames():
            if kind in (http2.RST_STREAM, http2.GOAWAY):
                break
            if stream == 1 and kind in (http2.HEADERS, http2.DATA) and flags & http2.END_STREAM:
                break
    _goes_on(server)


def test_connections_that_say_nothing_cost_nobody_else(server: RunningServer) -> None:
    """300 of them, half of a handshake each."""
    with contextlib.ExitStack() as open_ones:
        for _ in range(300):
            client = socket.create_connection((server.address.host, server.address.port), timeout=10)
            open_ones.enter_context(client)
            client.sendall(b"PRI * HTTP/2.0\r\n")
        _goes_on(server)


# ---- the message ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [90, 101, 100_000])
def test_groups_within_groups_are_refused_not_followed(server: RunningServer, depth: int) -> None:
    """No message of the contract contains itself, so only unknown fields can nest; the parser stops at 100."""
    data = b"\x9b\x06" * depth + b"\x9c\x06" * depth
    refusal = _refusal(lambda: server.raw_unary("ModelExecutorService/GetStatus", data))
    reason = "INVALID_FIELD" if len(data) <= SLACK_BYTES else "REQUEST_TOO_LARGE"
    assert refusal.reason == ("FEATURE_UNSUPPORTED" if depth < 100 else reason)
    _goes_on(server)


@pytest.mark.parametrize(
    ("num_tokens", "reason"),
    [(513, "CONTEXT_EXCEEDED"), (40_000, "CONTEXT_EXCEEDED"), (4_000_000, "REQUEST_TOO_LARGE")],
)
def test_a_huge_prompt_is_refused_without_a_long_pause(server: RunningServer, num_tokens: int, reason: str) -> None:
    """For a new sequence and behind a handle; the tokens are not even looked at."""
    handle = server.prefill().kv_cache
    prompt = executor_pb2.PrefillInput(input_ids=[1] * num_tokens, logits_policy=GREEDY)
    behind = executor_pb2.DecodeInput(input_ids=[1] * num_tokens, logits_policy=GREEDY, kv_cache=handle)
    prefill = executor_pb2.PrefillRequest(input=prompt).SerializeToString()
    decode = executor_pb2.DecodeRequest(input=behind).SerializeToString()
    with _longest_pause(server) as longest:
        for method, data in (("Prefill", prefill), ("Decode", decode)):
            refusal = _refusal(lambda: server.raw_unary(f"ModelExecutorService/{method}", data))  # noqa: B023
            assert refusal.reason == reason
            if reason == "CONTEXT_EXCEEDED":
                assert (refusal.code, refusal.metadata["max_context"]) == (Code.OUT_OF_RANGE, "512")
            else:
                assert refusal.metadata["num_bytes"] == str(len(data))
    assert longest[0] < 0.3  # 0.03; 0.5 when the tokens were looked at
    _goes_on(server)


_SAMPLE = policy_pb2.Sample


@pytest.mark.parametrize("temperature", [5e-324, 1e-45, 1e-30, 3e38])
def test_extreme_temperatures_draw_a_token(server: RunningServer, temperature: float) -> None:
    """So small that logits / temperature overflows, or so large that all are alike: never NaN, never a fault."""
    output = server.prefill(policy=Policy(sample=_SAMPLE(temperature=temperature, seed=1), logprobs=True))
    assert output.outputs.tokens[0] < 256
    assert not math.isnan(output.outputs.sampled_logprobs[0])


@pytest.mark.parametrize("top_k", [256, 257, 2**31, 2**32 - 1])
def test_top_k_beyond_the_vocabulary_keeps_it_all(server: RunningServer, top_k: int) -> None:
    """The same as no top-k."""
    unlimited = server.prefill(policy=Policy(sample=_SAMPLE(seed=5))).outputs.tokens[0]
    assert server.prefill(policy=Policy(sample=_SAMPLE(seed=5, top_k=top_k))).outputs.tokens[0] == unlimited


@pytest.mark.parametrize(
    ("seconds", "nanos"), [(-1, 0), (-(2**63), 0), (2**63 - 1, 0), (0, -1), (0, 2**31 - 1), (1, -(2**31))]
)
def test_durations_out_of_their_range_are_refused_or_clamped(server: RunningServer, seconds: int, nanos: int) -> None:
    """One that is negative or no Duration is named; one of ages is the longest lease."""
    ttl = Duration(seconds=seconds, nanos=nanos)
    cache = executor_pb2.CacheOptions(ttl=ttl)
    if seconds < 0 or not 0 <= nanos < 10**9:
        refusal = _refusal(lambda: server.prefill(cache=cache))
        assert (refusal.code, refusal.reason) == (Code.INVALID_ARGUMENT, "INVALID_FIELD")
        assert refusal.fields == ("input.cache.ttl",)
    else:
        assert server.prefill(cache=cache).ttl == Duration(seconds=3600)


def test_huge_lists_in_a_policy_are_refused_without_a_long_pause(server: RunningServer) -> None:
    """A million allowed tokens, many biases, and as many ids to be scored: more than are taken, so not looked at."""
    many = policy_pb2.TokenMask(allowed_ids=policy_pb2.TokenIdList(token_ids=[1] * 1_000_000))
    policies = (
        Policy(greedy_argmax=policy_pb2.GreedyArgmax(token_mask=many)),
        Policy(sample=_SAMPLE(logit_bias=dict.fromkeys(range(200_000), 1.0))),
        Policy(logprob_token_ids=[1] * 1_000_000),
    )
    inputs = (executor_pb2.PrefillInput(input_ids=[1], logits_policy=policy) for policy in policies)
    requests = [executor_pb2.PrefillRequest(input=message).SerializeToString() for message in inputs]
    with _longest_pause(server) as longest:
        for data in requests:
            refusal = _refusal(lambda data=data: server.raw_unary("ModelExecutorService/Prefill", data))  # type: ignore[misc]
            assert (refusal.code, refusal.reason) == (Code.INVALID_ARGUMENT, "REQUEST_TOO_LARGE")
    assert longest[0] < 0.1  # not parsed; 0.4 when they were


def _large_batches(server: RunningServer) -> dict[str, tuple[str, bytes]]:
    """Return requests with many items, each of them as large as it may be, by what is large in them."""
    handle = server.prefill().kv_cache
    biased = Policy(sample=_SAMPLE(seed=1, logit_bias=dict.fromkeys(range(120), 0.5)))
    tokens = executor_pb2.PrefillInput(input_ids=[7] * 512, logits_policy=GREEDY)
    wide = executor_pb2.PrefillInput(input_ids=[7], logits_policy=biased)
    piece = executor_pb2.UnifiedBatchItem(q_tokens=[7], logits_policy=biased)
    dense = types_pb2.Tensor(dtype=types_pb2.DATA_TYPE_FLOAT32, shape=[64, 256], data=_flat_distributions(64))
    verify = executor_pb2.VerifyInput(
        kv_cache=handle,
        input_ids=[7],
        draft_ids=[8] * 64,
        logits_policy=Policy(sample=_SAMPLE(seed=1)),
        acceptance=executor_pb2.ACCEPTANCE_RULE_REJECTION,
        draft_probs=executor_pb2.DraftProbs(dense=dense),
    )
    frame = executor_pb2.StreamDecodeRequest(items=[{"verify": verify}] * 60)
    return {
        "tokens": ("BatchPrefill", executor_pb2.BatchPrefillRequest(inputs=[tokens] * 512).SerializeToString()),
        "biases": ("BatchPrefill", executor_pb2.BatchPrefillRequest(inputs=[wide] * 512).SerializeToString()),
        "pieces": (
            "UnifiedDecode",
            executor_pb2.UnifiedDecodeRequest(batch={"items": [piece] * 512}).SerializeToString(),
        ),
        "distributions": ("StreamDecode", frame.SerializeToString()),
    }


def _flat_distributions(num_rows: int) -> bytes:
    return struct.pack("<f", 1 / 256) * 256 * num_rows


@pytest.mark.parametrize("name", ["tokens", "biases", "pieces", "distributions"])
def test_a_large_batch_makes_nobody_wait_for_all_of_it(name: str) -> None:
    """However large its items are, others have their turn in between."""
    with RunningServer(PagedReferenceExecutor(kv_memory_bytes=64 << 20)) as server:
        method, data = _large_batches(server)[name]
        call: Any = server.channel.stream_stream(f"/ferrule.v1.ModelExecutorService/{method}")
        with _longest_pause(server) as longest:
            assert list(call(iter([data]), timeout=60))
        assert longest[0] < 0.3


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"stop_token_ids": [1] * 1_000_000}, "request"),
        ({"stop_sequences": [policy_pb2.TokenIdList(token_ids=[1])] * 1_000}, "stop_sequences"),
        ({"stop_sequences": [policy_pb2.TokenIdList(token_ids=[1] * 1_000_000)]}, "request"),
        ({"stop_strings": ["x" * (2 << 20)]}, "request"),
        ({"stop_strings": ["x"] * 1_000_000}, "request"),
        ({"n": 2**32 - 1}, "n"),
    ],
)
def test_ends_without_end_are_refused_without_a_long_pause(
    server: RunningServer, fields: dict[str, Any], path: str
) -> None:
    """As many stops as a message holds are not looked at one by one."""
    request = executor_pb2.GenerateRequest(input_ids=[1], logits_policy=GREEDY, **fields)
    with _longest_pause(server) as longest:
        refusal = _refusal(lambda: list(server.stub.Generate(request, timeout=20)))
    assert (refusal.code, refusal.fields) == (Code.INVALID_ARGUMENT, (path,))
    assert longest[0] < 0.5


def _oversized() -> dict[str, Message]:
    """Return a request with far too much in it for each kind of method."""
    stops = [policy_pb2.TokenIdList(token_ids=[1])] * 5000
    return {
        "KeepAlive": cache_pb2.KeepAliveRequest(kv_caches=_unknown(5000)),
        "StreamDecode": executor_pb2.StreamDecodeRequest(release=_unknown(5000)),
        "BatchPrefill": executor_pb2.BatchPrefillRequest(inputs=[executor_pb2.PrefillInput(input_ids=[1])] * 5000),
        "UnifiedDecode": executor_pb2.UnifiedDecodeRequest(batch={"items": [{"q_tokens": [1]}] * 5000}),
        "Generate": executor_pb2.GenerateRequest(input_ids=[1], stop_sequences=stops),
    }


@pytest.mark.parametrize("name", ["KeepAlive", "StreamDecode", "BatchPrefill", "UnifiedDecode", "Generate"])
def test_a_refused_request_is_not_kept_until_the_garbage_collector_comes(server: RunningServer, name: str) -> None:
    """16 MB of empty handles are 500 MB once parsed; refused a few times a second they must not add up."""
    message = _oversized()[name]
    kind, data = type(message), message.SerializeToString()
    del message
    call: Any = server.channel.stream_stream(f"/ferrule.v1.ModelExecutorService/{name}")
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            assert _refusal(lambda: list(call(iter([data]), timeout=20))).reason == "INVALID_FIELD"
        wait_until(lambda: not any(type(each) is kind for each in gc.get_objects()))
    finally:
        gc.enable()


def test_an_answered_request_is_not_kept_either(server: RunningServer) -> None:
    """Of a method that streams its answer too: the request is gone with the call."""
    request = executor_pb2.GenerateRequest(input_ids=[1, 2, 3], logits_policy=GREEDY, max_tokens=5)
    data = request.SerializeToString()
    del request
    call: Any = server.channel.unary_stream("/ferrule.v1.ModelExecutorService/Generate")
    kind = executor_pb2.GenerateRequest
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            assert list(call(data, timeout=20))
        wait_until(lambda: not any(type(each) is kind for each in gc.get_objects()))
    finally:
        gc.enable()


class _Handlers:
    """Stands in for a grpc.aio server: keeps the handlers that are registered."""

    def __init__(self) -> None:
        self.handlers: list[Any] = []

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """Take them."""
        self.handlers.extend(handlers)


def test_nothing_a_stranger_sends_is_parsed() -> None:
    """Parsing 16 MB of empty messages takes a second and 500 MB: first the credentials, then the message."""
    kept = _Handlers()
    state = ServerState("test", "0", "0", ApiLimits())
    registrar = Registrar(
        kept,  # type: ignore[arg-type]
        state,
        OpenAccess(is_admin=True),
        Intake(state),
    )
    executor_pb2_grpc.add_ModelExecutorServiceServicer_to_server(
        executor_pb2_grpc.ModelExecutorServiceServicer(), cast("grpc.aio.Server", registrar)
    )
    service = executor_pb2.DESCRIPTOR.services_by_name["ModelExecutorService"]
    for method in service.methods:
        details = SimpleNamespace(method=f"/{service.full_name}/{method.name}", invocation_metadata=())
        handler = kept.handlers[0].service(details)
        assert handler.request_streaming, method.name  # gRPC receives nothing before it is asked to
        assert handler.request_deserializer is None, method.name


# ---- many at once ---------------------------------------------------------------------------------------------------


def _unknown(count: int) -> list[types_pb2.KvCacheHandle]:
    """Handles of this server's form that it never gave out."""
    names = (f"test.feedc0ffee00.{index:022d}" for index in range(count))
    return [types_pb2.KvCacheHandle(cache_id=name, length=1, lineage=bytes(16)) for name in names]


def test_many_unknown_handles_are_answered_without_a_long_pause(server: RunningServer) -> None:
    """Each with its own reason, by KeepAlive and ReleaseCache; as many as a request may hold."""
    handles = _unknown(server.limits.max_handles_per_request)
    with _longest_pause(server) as longest:
        kept = server.stub.KeepAlive(cache_pb2.KeepAliveRequest(kv_caches=handles), timeout=20)
        released = server.release(*handles)
    assert len(released.results) == len(handles)
    assert {read_status(result.error).reason for result in kept.results} == {"HANDLE_UNKNOWN"}
    assert len(kept.results) == len({result.handle_id for result in released.results}) == len(handles)
    assert longest[0] < 0.5


def test_a_frame_of_4096_bad_items_is_answered_item_by_item(server: RunningServer) -> None:
    """In one or several frames, in order of nothing but their numbers; the stream goes on."""
    stream = server.open_stream()
    with _longest_pause(server) as longest:
        stream.send(*(decode_item(handle, 1) for handle in _unknown(4096)))
        seqs: set[int] = set()
        while len(seqs) < 4096:
            for result in stream.read().results:
                assert read_status(result.error).reason == "HANDLE_UNKNOWN"
                seqs.add(result.seq)
    assert longest[0] < 1.0
    handle = server.prefill().kv_cache
    stream.send(decode_item(handle, 7))
    assert stream.read().results[0].HasField("decode")
    assert stream.rest() == []


def test_a_frame_of_4096_good_items_on_one_handle_is_one_append(server: RunningServer) -> None:
    """The first appends, the others are replays or joins of it."""
    handle = server.prefill().kv_cache
    stream = server.open_stream()
    stream.send(*[decode_item(handle, 7)] * 4096)
    results: list[executor_pb2.StreamResult] = []
    while len(results) < 4096:
        results += stream.read().results
    assert {result.decode.kv_cache.length for result in results} == {len(PROMPT) + 1}
    assert server.info(handle).kv_cache.length == len(PROMPT) + 1
