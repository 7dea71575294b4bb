"""Calls are admitted before their message is read, and the message has a deadline of its own.

Strangers are refused at once, whatever they send or do not send, and the server keeps no more of it than the windows of
a stream that nobody reads. From those who are let in the whole message must come within ``message_timeout_s``.
"""

from __future__ import annotations

import logging
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from ferrule_server.api.limits import ApiLimits
from ferrule_server.text.tokenizer import Tokenizer
from tests.api.harness import DEMO_FOLDER, RunningServer, token_access
from tests.api.hostile.http2 import grpc_message
from tests.api.hostile.unary_clients import (
    CHECK,
    DENIED,
    METHODS,
    NO_MESSAGE,
    PREFILL,
    TIMED_OUT,
    TOKEN,
    TOO_LARGE,
    Client,
    Code,
    Method,
    RawClient,
    answer_of,
    each,
    never,
    nothing_is_left,
)

pytestmark = pytest.mark.usefixtures("no_pauses")

TIMEOUT_S = 0.5
SLACK_S = 5.0
"""How late an answer may be on a machine that is busy: much earlier than without a deadline."""

every_method = each()
guarded_method = each(one for one in METHODS if not one.is_open)


def _serve(folder: Path, limits: ApiLimits) -> RunningServer:
    """Return a server that asks for tokens."""
    access = token_access(folder, {TOKEN: "alice"})
    return RunningServer(access=access, tokenizer=Tokenizer.load(DEMO_FOLDER), limits=limits)


@pytest.fixture(scope="module")
def patient_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """It waits for a message longer than any test does."""
    with _serve(tmp_path_factory.mktemp("patient"), ApiLimits()) as running:
        yield running


@pytest.fixture(scope="module")
def impatient_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """It waits for a message for a moment."""
    with _serve(tmp_path_factory.mktemp("impatient"), ApiLimits(message_timeout_s=TIMEOUT_S)) as running:
        yield running


@pytest.fixture(autouse=True)
def clean(
    patient_server: RunningServer, impatient_server: RunningServer, caplog: pytest.LogCaptureFixture
) -> Iterator[None]:
    """After each test nothing is under way, and nothing was an error of the server's own."""
    with caplog.at_level(logging.WARNING):
        yield
        nothing_is_left(patient_server)
        nothing_is_left(impatient_server)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


def _nothing(raw: RawClient, stream: int, message: bytes) -> None:
    """Send nothing."""


def _a_part(raw: RawClient, stream: int, message: bytes) -> None:
    """Send a part of the message."""
    raw.send(stream, grpc_message(message)[:7], is_last=False)


def _the_head(raw: RawClient, stream: int, message: bytes) -> None:
    """Send the head of a message of 2 MiB, half of what is accepted."""
    raw.send(stream, struct.pack(">BI", 0, 2 << 20) + b"x", is_last=False)


def _a_long_head(raw: RawClient, stream: int, message: bytes) -> None:
    """Send the head of a message of 4 GiB."""
    raw.send(stream, struct.pack(">BI", 0, 2**32 - 1) + b"x", is_last=False)


Begin = Callable[[RawClient, int, bytes], None]
every_beginning = pytest.mark.parametrize("begin", [_nothing, _a_part, _the_head, _a_long_head])


def _is_served(raw: RawClient) -> bool:
    """Report whether an ordinary call on the same connection is served."""
    stream = raw.begin(CHECK)
    raw.send(stream, grpc_message(CHECK.message))
    raw.answer(stream)
    return bool(CHECK.kind.FromString(raw.reply(stream)) == CHECK.kind(status=1))


# ---- strangers ------------------------------------------------------------------------------------------------------


@every_beginning
@guarded_method
def test_strangers_are_refused_before_their_message_is_there(
    patient_server: RunningServer, method: Method, begin: Begin
) -> None:
    """UNAUTHENTICATED at once, though the stream is still open and the server would wait for the message."""
    with RawClient(patient_server) as raw:
        stream = raw.begin(method)
        begin(raw, stream, method.message)
        assert raw.answer(stream, timeout_s=SLACK_S) is Code.UNAUTHENTICATED
        assert _is_served(raw)


@guarded_method
def test_strangers_read_why(patient_server: RunningServer, method: Method) -> None:
    """TOKEN_MISSING, by a client of gRPC that has sent nothing yet, and the same connection serves others."""
    client = Client(patient_server)
    with client.channel, never() as messages:
        assert client.ask(method, messages(), timeout=SLACK_S).outcome == DENIED
        assert client.ask(PREFILL, [PREFILL.message], TOKEN).is_good(PREFILL)


@guarded_method
def test_what_strangers_send_is_not_kept(patient_server: RunningServer, method: Method) -> None:
    """Fifty calls on one connection with a message of 8 MiB each, all but its end: 400 MiB if they were kept."""
    memory = psutil.Process().memory_info
    with RawClient(patient_server) as raw:
        before = memory().rss
        for _ in range(50):
            stream = raw.begin(method)
            raw.send(stream, struct.pack(">BI", 0, 8 << 20), is_last=False)
            raw.pour(stream, (8 << 20) - (64 << 10))
        assert memory().rss - before < 64 << 20
        assert _is_served(raw)


@every_method
def test_a_refusal_is_trailers_only(patient_server: RunningServer, method: Method) -> None:
    """One header block and nothing else: clients and proxies try no call again that has begun to be answered."""
    with RawClient(patient_server) as raw:
        for token in ("", TOKEN):
            stream = raw.begin(method, token, is_last=True)
            assert raw.answer(stream, timeout_s=SLACK_S) is not Code.OK
            assert raw.num_heads(stream) == 1


@guarded_method
def test_strangers_who_send_nothing_and_end_are_refused(patient_server: RunningServer, method: Method) -> None:
    """As if a message had come: credentials are looked at first."""
    client = Client(patient_server)
    with client.channel:
        assert client.ask(method, [], timeout=SLACK_S).outcome == DENIED
    with RawClient(patient_server) as raw:
        assert raw.answer(raw.begin(method, is_last=True), timeout_s=SLACK_S) is Code.UNAUTHENTICATED


# ---- those who are let in -------------------------------------------------------------------------------------------


@every_beginning
@every_method
def test_a_message_that_does_not_come_ends_the_call(
    impatient_server: RunningServer, method: Method, begin: Begin
) -> None:
    """REQUEST_TIMEOUT after the time that a message may take, or earlier by the length that it claims."""
    allowed = {Code.DEADLINE_EXCEEDED} | ({code for code, _ in TOO_LARGE} if begin is _a_long_head else set())
    with RawClient(impatient_server) as raw:
        stream, started = raw.begin(method, TOKEN), time.monotonic()
        begin(raw, stream, method.message)
        code = raw.answer(stream, timeout_s=TIMEOUT_S + SLACK_S)
        assert code in allowed
        if code is Code.DEADLINE_EXCEEDED:
            assert time.monotonic() - started > 0.8 * TIMEOUT_S
        assert _is_served(raw)


@every_method
def test_a_client_reads_that_its_message_did_not_come(
    impatient_server: RunningServer, method: Method, caplog: pytest.LogCaptureFixture
) -> None:
    """REQUEST_TIMEOUT with the time in its metadata; one line of the log and one call counted with the reason."""
    num_before = impatient_server.state.calls.ended_for("REQUEST_TIMEOUT")
    client = Client(impatient_server)
    with client.channel, never() as messages:
        answer = client.ask(method, messages(), TOKEN, timeout=TIMEOUT_S + SLACK_S)
        assert answer.outcome == TIMED_OUT
        assert answer.metadata == {"timeout_s": str(TIMEOUT_S)}
        assert client.ask(PREFILL, [PREFILL.message], TOKEN).is_good(PREFILL)
    lines = [record.getMessage() for record in caplog.records if "reason=REQUEST_TIMEOUT" in record.getMessage()]
    assert len(lines) == 1
    nothing_is_left(impatient_server)
    assert impatient_server.state.calls.ended_for("REQUEST_TIMEOUT") == num_before + 1


@every_method
def test_a_message_that_trickles_gains_no_time(impatient_server: RunningServer, method: Method) -> None:
    """A byte now and then is no reason to wait longer: the time is that of the whole message."""
    with RawClient(impatient_server) as raw:
        stream, started = raw.begin(method, TOKEN), time.monotonic()
        raw.send(stream, struct.pack(">BI", 0, 1000), is_last=False)
        code = None
        while code is None and time.monotonic() - started < TIMEOUT_S + SLACK_S:
            raw.send(stream, b"x", is_last=False)
            try:
                code = raw.answer(stream, timeout_s=0.05)
            except TimeoutError:
                continue
        assert code is Code.DEADLINE_EXCEEDED
        assert _is_served(raw)


@every_method
def test_a_message_that_comes_late_but_in_time_is_served(impatient_server: RunningServer, method: Method) -> None:
    """Half of the time before it, and the end of the stream after all of it."""
    with RawClient(impatient_server) as raw:
        stream = raw.begin(method, TOKEN)
        time.sleep(0.5 * TIMEOUT_S)
        raw.send(stream, grpc_message(method.message), is_last=False)
        assert raw.answer(stream, timeout_s=SLACK_S) is Code.OK


@every_method
def test_an_end_without_a_message_is_refused_at_once(patient_server: RunningServer, method: Method) -> None:
    """INVALID_FIELD for the field ``request``, as for what cannot be parsed; nothing waits for a timeout."""
    client = Client(patient_server)
    with client.channel:
        answer = client.ask(method, [], TOKEN, timeout=SLACK_S)
        assert answer.outcome == NO_MESSAGE
        assert answer.metadata == {"field": "request"}
        assert client.ask(PREFILL, [PREFILL.message], TOKEN).is_good(PREFILL)
    with RawClient(patient_server) as raw:
        stream = raw.begin(method, TOKEN, is_last=True)
        assert raw.answer(stream, timeout_s=SLACK_S) is Code.INVALID_ARGUMENT


@every_method
def test_an_end_within_the_message_is_refused_at_once(patient_server: RunningServer, method: Method) -> None:
    """INVALID_ARGUMENT by this server, or INTERNAL by gRPC, which has counted the bytes."""
    with RawClient(patient_server) as raw:
        stream = raw.begin(method, TOKEN)
        raw.send(stream, grpc_message(method.message, length=len(method.message) + 9))
        assert raw.answer(stream, timeout_s=SLACK_S) in (Code.INVALID_ARGUMENT, Code.INTERNAL)
        assert _is_served(raw)


def test_a_hundred_calls_that_wait_for_their_message_end_together(impatient_server: RunningServer) -> None:
    """Each with REQUEST_TIMEOUT, none holds up another, and others are served meanwhile."""
    client = Client(impatient_server)
    with client.channel, never() as messages:
        calls = [client.open(PREFILL, messages(), TOKEN, timeout=TIMEOUT_S + SLACK_S) for _ in range(100)]
        assert client.ask(PREFILL, [PREFILL.message], TOKEN).is_good(PREFILL)
        reasons = [answer_of(call).reason for call in calls]
    assert reasons == ["REQUEST_TIMEOUT"] * 100
