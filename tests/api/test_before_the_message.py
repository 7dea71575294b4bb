"""Calls whose message is missing, late, doubled, large, packed or cut up: answered, and nothing is left of them.

Methods with credentials, with a stream of replies, open to all, and of another service. Each test says how a call may
end; in every test no ERROR is logged, the next call on the same connection is served, and no call stays under way.
"""

from __future__ import annotations

import gzip
import logging
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import grpc
import pytest

from ferrule.v1 import executor_pb2
from ferrule_server.api.limits import ApiLimits
from ferrule_server.text.tokenizer import Tokenizer
from tests.api.harness import DEMO_FOLDER, GREEDY, PROMPT, RunningServer, decode_item, token_access
from tests.api.hostile.http2 import grpc_message
from tests.api.hostile.unary_clients import (
    CHECK,
    DENIED,
    GENERATE,
    NO_MESSAGE,
    OK,
    PREFILL,
    TIMED_OUT,
    TOKEN,
    TOO_LARGE,
    Answer,
    Client,
    Method,
    RawClient,
    each,
    never,
    nothing_is_left,
)
from tests.fakes import FakeExecutor

Code = grpc.StatusCode
PACKED = (Code.UNIMPLEMENTED, "")
"""How a compressed call ends, with or without credentials."""
PIECES = 1 << 20
every_method = each()
every_caller = pytest.mark.parametrize("token", ["", TOKEN], ids=["stranger", "alice"])


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server that asks for tokens."""
    access = token_access(tmp_path_factory.mktemp("tokens"), {TOKEN: "alice"})
    with RunningServer(access=access, tokenizer=Tokenizer.load(DEMO_FOLDER)) as running:
        yield running


@pytest.fixture
def server(shared: RunningServer, caplog: pytest.LogCaptureFixture) -> Iterator[RunningServer]:
    """The server; after the test nothing is under way, and nothing was an error of the server's own."""
    with caplog.at_level(logging.WARNING):
        yield shared
        nothing_is_left(shared)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


@pytest.fixture
def client(server: RunningServer) -> Iterator[Client]:
    """A client of one connection, on which an ordinary call is served after the test."""
    one = Client(server)
    with one.channel:
        yield one
        assert one.ask(PREFILL, [PREFILL.message], TOKEN).is_good(PREFILL)


@pytest.fixture
def raw(server: RunningServer) -> Iterator[RawClient]:
    """A connection of bare HTTP/2, on which an ordinary call is served after the test."""
    with RawClient(server) as one:
        yield one
        stream = one.begin(CHECK)
        one.send(stream, grpc_message(CHECK.message))
        one.answer(stream)
        assert CHECK.kind.FromString(one.reply(stream)) == CHECK.kind(status=1)


def is_as_said(answer: Answer, method: Method, token: str, *allowed: tuple[grpc.StatusCode, str]) -> bool:
    """Report whether a call ended as it may: a stranger is refused, where credentials are needed."""
    if token or method.is_open:
        return answer.outcome in allowed
    return answer.outcome == DENIED


@every_caller
@every_method
def test_a_second_message_is_not_served(server: RunningServer, client: Client, method: Method, token: str) -> None:
    """Either the first one is answered once, or the call is refused as a whole (INVALID_FIELD, or UNIMPLEMENTED)."""
    num_before = server.state.num_sequences
    answer = client.ask(method, [method.message, method.message], token)
    assert is_as_said(answer, method, token, OK, NO_MESSAGE, (Code.UNIMPLEMENTED, "")), answer
    assert server.state.num_sequences - num_before <= 1
    if answer.outcome == OK and method.name != "Generate":
        assert len(answer.replies) == 1


@every_caller
@every_method
def test_a_message_beyond_the_limit_is_refused(
    server: RunningServer, client: Client, method: Method, token: str
) -> None:
    """RESOURCE_EXHAUSTED by gRPC or REQUEST_TOO_LARGE, by its size; a stranger may be refused as such first."""
    answer = client.ask(method, [bytes(server.limits.max_request_bytes + 1)], token)
    assert answer.outcome in TOO_LARGE | ({DENIED} if not token else set()), answer


@every_caller
@every_method
def test_a_compressed_message_is_refused(client: Client, method: Method, token: str) -> None:
    """UNIMPLEMENTED, by gzip and deflate: gRPC would inflate it before it looks at its size."""
    for compression in (grpc.Compression.Gzip, grpc.Compression.Deflate):
        answer = client.ask(method, [method.message], token, compression=compression)
        assert answer.outcome == PACKED, answer


@every_caller
@every_method
def test_a_compression_bomb_is_refused(server: RunningServer, client: Client, method: Method, token: str) -> None:
    """20 KB that would be more than the limit, refused for being compressed."""
    bomb = bytes(server.limits.max_request_bytes + (1 << 20))
    answer = client.ask(method, [bomb], token, compression=grpc.Compression.Gzip)
    assert answer.outcome == PACKED, answer


@every_caller
@every_method
def test_what_is_not_packed_as_it_says_is_refused(raw: RawClient, method: Method, token: str) -> None:
    """A flag without a packed message: INTERNAL or UNIMPLEMENTED by gRPC, INVALID_ARGUMENT, or a reset."""
    stream = raw.begin(method, token, grpc_encoding="gzip")
    raw.send(stream, grpc_message(b"not gzip", flag=1))
    code = raw.answer(stream)
    assert code in (None, Code.INTERNAL, Code.UNIMPLEMENTED, Code.INVALID_ARGUMENT, Code.UNAUTHENTICATED), code


@every_caller
@every_method
def test_a_packed_message_in_pieces_is_refused(raw: RawClient, method: Method, token: str) -> None:
    """Compressed by the client itself, five bytes a frame."""
    stream = raw.begin(method, token, grpc_encoding="gzip")
    data = grpc_message(gzip.compress(method.message), flag=1)
    raw.send(stream, *(data[start : start + 5] for start in range(0, len(data), 5)))
    assert raw.answer(stream) is Code.UNIMPLEMENTED


@every_caller
@every_method
def test_a_message_in_frames_of_one_byte_is_served(raw: RawClient, method: Method, token: str) -> None:
    """With empty frames between, the length of the message cut up too."""
    stream = raw.begin(method, token)
    pieces = [bytes([one]) for one in grpc_message(method.message)]
    raw.send(stream, *(part for piece in pieces for part in (b"", piece)))
    code = raw.answer(stream)
    assert code is (Code.OK if token or method.is_open else Code.UNAUTHENTICATED)


def _after_headers(raw: RawClient, method: Method, token: str) -> int:
    return raw.begin(method, token)


def _after_a_part(raw: RawClient, method: Method, token: str) -> int:
    stream = raw.begin(method, token)
    raw.send(stream, grpc_message(method.message)[:7], is_last=False)
    return stream


def _after_the_message(raw: RawClient, method: Method, token: str) -> int:
    stream = raw.begin(method, token)
    raw.send(stream, grpc_message(method.message))
    return stream


def _after_half_a_megabyte(raw: RawClient, method: Method, token: str) -> int:
    stream = raw.begin(method, token)
    raw.send(stream, struct.pack(">BI", 0, PIECES), *[bytes(8192)] * 7, is_last=False)
    return stream


@every_caller
@every_method
@pytest.mark.parametrize("begin", [_after_headers, _after_a_part, _after_the_message, _after_half_a_megabyte])
def test_calls_that_are_cancelled_before_they_are_read_leave_nothing(
    server: RunningServer, raw: RawClient, method: Method, token: str, begin: Callable[[RawClient, Method, str], int]
) -> None:
    """50 of them on one connection; sequences that a few may have made have their leases."""
    for stream in [begin(raw, method, token) for _ in range(50 if begin is not _after_half_a_megabyte else 1)]:
        raw.reset(stream)
    nothing_is_left(server)


@every_caller
@every_method
@pytest.mark.parametrize("begin", [_after_headers, _after_a_part])
def test_connections_that_end_before_the_message_leave_nothing(
    server: RunningServer, method: Method, token: str, begin: Callable[[RawClient, Method, str], int]
) -> None:
    """The client is gone without a word; no line of the log is an error."""
    for _ in range(5):
        with RawClient(server) as gone:
            for _ in range(10):
                begin(gone, method, token)
    nothing_is_left(server)


@every_method
def test_a_deadline_that_passes_before_the_message_ends_the_call(client: Client, method: Method) -> None:
    """The client's own deadline: DEADLINE_EXCEEDED; the server may say REQUEST_TIMEOUT first."""
    with never() as messages:
        answer = client.ask(method, messages(), TOKEN, timeout=0.3)
    assert answer.outcome in {(Code.DEADLINE_EXCEEDED, ""), TIMED_OUT}, answer


# ---- no deadline for what is no message -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def impatient() -> Iterator[RunningServer]:
    """A server that waits for the message of a call for a moment only."""
    executor = FakeExecutor(step_time_s=0.05, max_context=256)
    with RunningServer(executor, limits=ApiLimits(message_timeout_s=0.3)) as running:
        yield running


def test_a_call_may_last_longer_than_its_message_may_take(impatient: RunningServer) -> None:
    """The time is over when the message is there; a Generate and a Watch go on."""
    client = Client(impatient)
    with client.channel, never() as messages:
        request = executor_pb2.GenerateRequest(input_ids=[1, 2, 3], logits_policy=GREEDY, max_tokens=20)
        started = time.monotonic()
        answer = client.ask(GENERATE, messages(request.SerializeToString()))
        assert answer.is_good(GENERATE), answer
        assert time.monotonic() - started > 0.6
        watch = client.open(replace(CHECK, path="grpc.health.v1.Health/Watch"), messages(CHECK.message))
        assert next(watch)
        time.sleep(0.6)
        assert watch.is_active()
        watch.cancel()
    nothing_is_left(impatient)


def test_frames_of_a_stream_may_come_at_any_time(impatient: RunningServer) -> None:
    """A StreamDecode is open as long as its client likes, also before its first frame."""
    handle = impatient.prefill().kv_cache
    stream = impatient.open_stream()
    for token in (7, 8):
        time.sleep(0.6)
        stream.send(decode_item(handle, token))
        handle = stream.read().results[0].decode.kv_cache
    assert handle.length == len(PROMPT) + 2
    assert stream.rest() == []
    impatient.release(handle)
