"""Clients that send the one message of a call in unusual ways, over grpcio and over bare HTTP/2, and what came back."""

from __future__ import annotations

import re
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from grpc_status import rpc_status

from ferrule.v1 import executor_pb2, tokenizer_pb2
from tests.api.harness import GREEDY, RunningServer, read_status, wait_until
from tests.api.hostile import http2

TOKEN = "ferrule_alice"
"""Opens the servers of these tests."""

Code = grpc.StatusCode
OK = (Code.OK, "")
DENIED = (Code.UNAUTHENTICATED, "TOKEN_MISSING")
TIMED_OUT = (Code.DEADLINE_EXCEEDED, "REQUEST_TIMEOUT")
NO_MESSAGE = (Code.INVALID_ARGUMENT, "INVALID_FIELD")
TOO_LARGE = {(Code.RESOURCE_EXHAUSTED, ""), (Code.INVALID_ARGUMENT, "REQUEST_TOO_LARGE")}
"""By gRPC itself, which counts the bytes of a message before and after it is unpacked, or by this server."""

_LEFT_OPEN_S = 20.0
_WINDOW = 65535
_FRAME = 8192


@dataclass(frozen=True, slots=True)
class Method:
    """A method with one request, and a request that it answers.

    Attributes:
        path: Service and method.
        message: The request, on the wire.
        kind: Class of its replies.
        is_open: No credentials are needed.
    """

    path: str
    message: bytes
    kind: type[Message]
    is_open: bool = False

    @property
    def name(self) -> str:
        """Its name, for the ids of tests."""
        return self.path.rpartition("/")[2]


_EXECUTOR = "ferrule.v1.ModelExecutorService"
_PROMPT = executor_pb2.PrefillInput(input_ids=[1, 2, 3], logits_policy=GREEDY)
PREFILL = Method(
    f"{_EXECUTOR}/Prefill",
    executor_pb2.PrefillRequest(input=_PROMPT).SerializeToString(),
    executor_pb2.PrefillResponse,
)
GENERATE = Method(
    f"{_EXECUTOR}/Generate",
    executor_pb2.GenerateRequest(input_ids=[1, 2, 3], logits_policy=GREEDY, max_tokens=3).SerializeToString(),
    executor_pb2.GenerateResponse,
)
ENCODE = Method(
    "ferrule.v1.TokenizerService/Tokenize",
    tokenizer_pb2.TokenizeRequest(text="def area(").SerializeToString(),
    tokenizer_pb2.TokenizeResponse,
)
CHECK = Method(
    "grpc.health.v1.Health/Check",
    health_pb2.HealthCheckRequest(service="ferrule.v1.ModelExecutorService").SerializeToString(),
    health_pb2.HealthCheckResponse,
    is_open=True,
)
METHODS = (PREFILL, GENERATE, ENCODE, CHECK)


def each(methods: Iterable[Method] = METHODS) -> pytest.MarkDecorator:
    """Run a test with each method: Prefill and Check every time, the others in the long campaign."""
    cases = [
        pytest.param(one, id=one.name, marks=() if one in (PREFILL, CHECK) else pytest.mark.slow) for one in methods
    ]
    return pytest.mark.parametrize("method", cases)


@dataclass(frozen=True, slots=True)
class Answer:
    """How a call ended.

    Attributes:
        code: Its status code.
        reason: Of our ErrorInfo; empty for OK and for an error of gRPC's own.
        metadata: Of the ErrorInfo.
        replies: What came before the end.
    """

    code: grpc.StatusCode
    reason: str = ""
    metadata: dict[str, str] = field(default_factory=dict)
    replies: tuple[bytes, ...] = ()

    @property
    def outcome(self) -> tuple[grpc.StatusCode, str]:
        """Code and reason."""
        return self.code, self.reason

    def is_good(self, method: Method) -> bool:
        """Report whether the method was served: its replies are there and can be parsed."""
        return self.outcome == OK and bool(self.replies) and all(map(method.kind.FromString, self.replies))


class Client:
    """A grpcio client with one connection that sends any number of messages to any method.

    Args:
        server: Who is called.
    """

    def __init__(self, server: RunningServer) -> None:
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
        self.channel = grpc.insecure_channel(server.address.target, options=options)

    def open(
        self,
        method: Method,
        messages: Iterable[bytes],
        token: str = "",
        *,
        compression: grpc.Compression | None = None,
        timeout: float | None = 20.0,
    ) -> Any:  # gRPC's call
        """Begin a call. On the wire a method with one request looks like one with many."""
        multi: Any = self.channel.stream_stream(f"/{method.path}")
        metadata = (("authorization", f"Bearer {token}"),) if token else ()
        return multi(iter(messages), timeout=timeout, metadata=metadata, compression=compression)

    def ask(self, method: Method, messages: Iterable[bytes], token: str = "", **options: Any) -> Answer:
        """Make a call and return how it ended."""
        return answer_of(self.open(method, messages, token, **options))


def answer_of(call: Any) -> Answer:
    """Read a call to its end."""
    replies: list[bytes] = []
    try:
        replies.extend(call)
    except grpc.RpcError as error:
        status = rpc_status.from_call(error)
        if status is None:
            return Answer(error.code(), replies=tuple(replies))
        refusal = read_status(status)
        return Answer(refusal.code, refusal.reason, refusal.metadata, tuple(replies))
    return Answer(Code.OK, replies=tuple(replies))


@contextmanager
def never() -> Iterator[Callable[..., Iterator[bytes]]]:
    """Make request iterators that give some messages and then neither another one nor an end, until the block ends."""
    ended = threading.Event()

    def messages(*first: bytes) -> Iterator[bytes]:
        yield from first
        ended.wait(_LEFT_OPEN_S)

    try:
        yield messages
    finally:
        ended.set()


class RawClient:
    """One connection of bare HTTP/2 that begins calls and sends their bytes as it likes.

    Args:
        server: Who is called.
    """

    def __init__(self, server: RunningServer) -> None:
        self._peer = http2.Peer(server.address.host, server.address.port)
        self._frames = self._peer.frames()
        self._next = 1
        self._blocks: dict[int, list[bytes]] = {}
        self._data: dict[int, bytes] = {}
        self._ended: set[int] = set()
        self._window, self._initial = _WINDOW, _WINDOW
        self._windows: dict[int, int] = {}

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._peer.socket.close()

    def begin(self, method: Method, token: str = "", *, is_last: bool = False, **headers: str) -> int:
        """Send the headers of a call and return its stream."""
        stream, self._next = self._next, self._next + 2
        if token:
            headers["authorization"] = f"Bearer {token}"
        flags = http2.END_HEADERS | (http2.END_STREAM if is_last else 0)
        self._peer.send(http2.frame(http2.HEADERS, flags, stream, http2.call_headers(f"/{method.path}", **headers)))
        return stream

    def send(self, stream: int, *pieces: bytes, is_last: bool = True) -> None:
        """Send bytes, each piece in a frame of its own; the last one ends the stream unless told otherwise."""
        flags = [0] * (len(pieces) - 1) + [http2.END_STREAM if is_last else 0]
        frames = [http2.frame(http2.DATA, flag, stream, piece) for flag, piece in zip(flags, pieces, strict=True)]
        self._peer.send(b"".join(frames))
        self._count_sent(stream, sum(map(len, pieces)))

    def pour(self, stream: int, size: int, patience_s: float = 0.5) -> int:
        """Send zeros as far as the server's windows allow, without ending the stream.

        Args:
            stream: The call.
            size: Bytes to send at most.
            patience_s: How long to wait for a larger window.

        Returns:
            The bytes sent.
        """
        sent = 0
        while sent + _FRAME <= size and stream not in self._ended:
            if min(self._window, self._initial + self._windows.get(stream, 0)) < _FRAME:
                try:
                    if not self._read(patience_s):
                        break
                except TimeoutError:
                    break
                continue
            self._peer.send(http2.frame(http2.DATA, 0, stream, bytes(_FRAME)))
            self._count_sent(stream, _FRAME)
            sent += _FRAME
        return sent

    def _count_sent(self, stream: int, num_bytes: int) -> None:
        self._window -= num_bytes
        self._windows[stream] = self._windows.get(stream, 0) - num_bytes

    def reset(self, stream: int) -> None:
        """Cancel a call."""
        self._peer.send(http2.frame(http2.RST_STREAM, 0, stream, http2.CANCEL.to_bytes(4, "big")))

    def answer(self, stream: int, timeout_s: float = 10.0) -> grpc.StatusCode | None:
        """Read on until a call has ended and return its status code; None: it was reset without one.

        Only the first error of a connection is told apart: later ones may be an entry of the header table.

        Raises:
            TimeoutError: It is still open.
        """
        end = time.monotonic() + timeout_s
        while stream not in self._ended:
            if not self._read(max(0.001, end - time.monotonic())):
                return None
        return _code_in(b"".join(self._blocks.get(stream, [])))

    def num_heads(self, stream: int) -> int:
        """Return how many header blocks have come for a call: of a refusal that can be tried again one."""
        return len(self._blocks.get(stream, []))

    def reply(self, stream: int) -> bytes:
        """Return the message that a call has answered, without its head."""
        return self._data[stream][5:]

    def _read(self, timeout_s: float) -> bool:
        """Read one frame; False: the server has hung up.

        Raises:
            TimeoutError: None came in time.
        """
        self._peer.socket.settimeout(timeout_s)
        try:
            self._take(*next(self._frames))
        except StopIteration:
            return False
        except TimeoutError:
            self._frames = self._peer.frames()  # the generator has ended with the error
            raise
        return True

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == http2.PING and not flags & http2.ACK:
            self._peer.send(http2.frame(http2.PING, http2.ACK, 0, payload))
        elif kind == http2.SETTINGS and not flags & http2.ACK:
            self._peer.send(http2.frame(http2.SETTINGS, http2.ACK))
            entries = dict(struct.iter_unpack(">HI", payload))
            self._initial = entries.get(http2.INITIAL_WINDOW_SIZE, self._initial)
        elif kind == http2.WINDOW_UPDATE and stream == 0:
            self._window += int.from_bytes(payload, "big")
        elif kind == http2.WINDOW_UPDATE:
            self._windows[stream] = self._windows.get(stream, 0) + int.from_bytes(payload, "big")
        elif kind == http2.HEADERS:
            self._blocks.setdefault(stream, []).append(payload)
        elif kind == http2.DATA:
            self._data[stream] = self._data.get(stream, b"") + payload
        is_end = kind in (http2.HEADERS, http2.DATA) and flags & http2.END_STREAM
        if is_end or kind == http2.RST_STREAM:
            self._ended.add(stream)


def _code_in(block: bytes) -> grpc.StatusCode | None:
    """Find the status in a header block as gRPC core writes it: without Huffman coding."""
    found = re.search(rb"grpc-status[\x01\x02](\d{1,2})", block)
    if found is None:
        return None
    return next(code for code in grpc.StatusCode if code.value[0] == int(found[1]))


def nothing_is_left(server: RunningServer) -> None:
    """Wait until no call is under way, in any of the places that count them."""
    wait_until(lambda: server.state.num_active == 0 and not server.state.streams)
    wait_until(lambda: not any(server.state.calls.in_flight().values()))
