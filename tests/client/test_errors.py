"""Errors: every reason of the contract has its class, and gRPC's own failures get readable reasons."""

from __future__ import annotations

import inspect
import pickle
import re
import threading
import time
import traceback
from pathlib import Path

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2

import ferrule.errors
from ferrule import Client, FerruleError, Handle, HandleNotFoundError
from ferrule.errors import (
    CallCancelledError,
    DeadlineExceededError,
    HandleStaleError,
    InvalidRequestError,
    MessageTooLargeError,
    QuotaExceededError,
    ResourceExhaustedError,
    UnavailableError,
    UnsupportedError,
    WrongInstanceError,
)
from ferrule.types import Append
from ferrule_client import errors
from ferrule_client._status import BY_REASON, error_from_status
from tests.client.fake_server import Failure, FakeServer, status_of

ROOT = Path(__file__).resolve().parents[2]
CODES = grpc.StatusCode


@pytest.mark.parametrize("reason", sorted(BY_REASON))
def test_each_reason_becomes_its_class(reason: str) -> None:
    """The reason decides, and code, message and metadata stay readable."""
    error = error_from_status(status_of(CODES.ABORTED, reason, "what happened", handle_id="0123", extra="1"))
    assert type(error) is BY_REASON[reason]
    assert (error.code, error.reason, error.message) == (CODES.ABORTED, reason, "what happened")
    assert error.metadata == {"handle_id": "0123", "extra": "1"}
    assert str(error) == f"what happened ({reason})"
    assert pickle.loads(pickle.dumps(error)).metadata == error.metadata


def test_every_reason_of_the_server_is_known() -> None:
    """No reason in the server's error tree falls back to its code."""
    source = (ROOT / "server" / "ferrule_server" / "errors.py").read_text()
    reasons = set(re.findall(r'REASON = "([A-Z_]+)"', source))
    assert len(reasons) > 20
    assert reasons <= set(BY_REASON)


def test_every_class_is_reached_and_drawn() -> None:
    """The tree in the docstring and the classes agree, and no class is dead."""
    classes = {name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, Exception)}
    assert classes == set(errors.__all__)
    assert all(name in (errors.__doc__ or "") for name in classes)
    reached = {cls.__name__ for cls in BY_REASON.values()} | {"FerruleError", "OutOfRangeError"}
    assert classes - reached == {"PendingTokenError", "QuotaExceededError", "ResourceExhaustedError"}
    assert ferrule.errors.__all__ == errors.__all__
    assert all(getattr(ferrule.errors, name) is getattr(errors, name) for name in classes)


def test_values_of_errors_are_typed() -> None:
    """What a caller acts on is an attribute."""
    stale = error_from_status(status_of(CODES.ABORTED, "HANDLE_STALE", tip_length="128"))
    assert isinstance(stale, HandleStaleError)
    assert stale.tip_length == 128
    instance = error_from_status(status_of(CODES.ABORTED, "WRONG_INSTANCE", instance="b"))
    assert isinstance(instance, WrongInstanceError)
    assert instance.instance == "b"
    assert isinstance(error_from_status(status_of(CODES.NOT_FOUND, "EPOCH_CHANGED")), HandleNotFoundError)
    numbers = {"quota": "KV_TOKENS", "used": "96", "limit": "128", "needed": "48"}
    quota = error_from_status(status_of(CODES.RESOURCE_EXHAUSTED, "QUOTA_KV_TOKENS", **numbers))
    assert isinstance(quota, QuotaExceededError)
    assert (quota.quota, quota.used, quota.limit, quota.needed) == ("KV_TOKENS", 96, 128, 48)
    bare = error_from_status(status_of(CODES.RESOURCE_EXHAUSTED, "QUOTA_HANDLES"))
    assert isinstance(bare, QuotaExceededError)
    assert (bare.quota, bare.used, bare.limit, bare.needed) == ("HANDLES", None, None, None)


def test_retry_and_field_details_are_read() -> None:
    """RetryInfo and BadRequest travel beside the ErrorInfo."""
    status = status_of(CODES.RESOURCE_EXHAUSTED, "QUEUE_FULL")
    retry = error_details_pb2.RetryInfo()
    retry.retry_delay.FromMilliseconds(250)
    for detail in (retry, error_details_pb2.BadRequest(field_violations=[{"field": "input.ids"}])):
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    error = error_from_status(status)
    assert isinstance(error, ResourceExhaustedError)
    assert error.retry_after_s == 0.25
    assert pickle.loads(pickle.dumps(error)).retry_after_s == 0.25
    assert error.metadata["field"] == "input.ids"


def test_new_reasons_fall_back_to_the_code() -> None:
    """A server that is newer than the client is still understood."""
    error = error_from_status(status_of(CODES.INVALID_ARGUMENT, "BRAND_NEW"))
    assert type(error) is InvalidRequestError
    assert error.reason == "BRAND_NEW"
    assert type(error_from_status(status_of(CODES.DATA_LOSS, "BRAND_NEW"))) is FerruleError


def test_oversize_message_is_named(client: Client) -> None:
    """GRPC refuses 20 MB before the server sees it; the server goes on."""
    with pytest.raises(MessageTooLargeError) as caught:
        client.prefill([2**28] * (20 << 18))
    assert caught.value.code is CODES.RESOURCE_EXHAUSTED
    assert caught.value.reason == "MESSAGE_TOO_LARGE"
    assert client.admin.health()


def test_deadline_is_named(fake: FakeServer, fake_client: Client) -> None:
    """The timeout of a call is the caller's, and its error says so."""
    fake.sequences["x"] = [1]
    slow = threading.Event()
    fake._outputs = lambda *_: slow.wait(2) and None  # type: ignore[assignment,method-assign]
    start = time.monotonic()
    with pytest.raises(DeadlineExceededError, match="timeout"):
        fake_client.prefill([1], timeout=0.2)
    assert time.monotonic() - start < 1.5
    slow.set()


def test_unreachable_server_is_named() -> None:
    """Nobody listens: a clear error, soon, though the default timeout is long."""
    start = time.monotonic()
    with Client("127.0.0.1:1") as client, pytest.raises(UnavailableError) as caught:
        client.status()
    assert caught.value.reason == "CONNECTION_FAILED"
    assert time.monotonic() - start < 10
    assert str(caught.value).startswith("no server at 127.0.0.1:1 (connection refused); start one with ")
    assert "failed to connect" in caught.value.metadata["details"]
    assert "grpc" not in "".join(traceback.format_exception(caught.value)).replace("/grpc", "").lower()
    with Client("unix:/nowhere/x.sock", max_retries=0) as client, client.stream() as stream:
        with pytest.raises(UnavailableError, match=r"no server at unix:/nowhere/x.sock \(no such socket\)"):
            client.status()
        cache = client.adopt(Handle("a.b.c", 1, bytes(16)), keep_alive=False)
        with pytest.raises(UnavailableError, match="no server at unix:/nowhere"):
            stream.run([Append(cache, 1)], timeout=0.5)  # it waits so long for the server that has the sequence
        cache.detach()


def test_call_without_an_answer_is_an_error(fake_client: Client) -> None:
    """GRPC may report success without a message when a deadline strikes at the last moment."""

    def silent(_: object, *, timeout: float | None, metadata: object) -> None:
        time.sleep(0 if timeout is None else timeout)

    unary = fake_client._connection.unary
    with pytest.raises(DeadlineExceededError, match="without an answer"):
        unary(silent, b"", timeout=0.01)  # type: ignore[arg-type]
    with pytest.raises(UnavailableError, match="without an answer") as caught:
        unary(silent, b"", timeout=None, creates=True)  # type: ignore[arg-type]
    assert caught.value.reason == "CONNECTION_LOST"


def test_unknown_call_is_unsupported(fake_client: Client) -> None:
    """A server without an RPC, or without a service, is told from a broken one."""
    with pytest.raises(UnsupportedError) as caught:
        next(fake_client.list_caches())
    assert caught.value.reason == "RPC_UNKNOWN"
    with pytest.raises(UnsupportedError):
        fake_client.admin.health()


def test_closing_the_client_cancels(fake: FakeServer) -> None:
    """A call under way ends with an error of ours when another thread closes the client."""
    fake.delay_s = 1.0
    client = Client(fake.target)
    with client.prefill([1]) as cache:
        threading.Timer(0.2, client.close).start()
        with pytest.raises(CallCancelledError):
            list(cache.generate(3))
        cache.detach()


def test_rewritten_details_are_not_believed(fake: FakeServer, fake_client: Client) -> None:
    """An error without ErrorInfo keeps gRPC's own code as its reason."""
    fake.failures["GetStatus"] = [Failure(CODES.DATA_LOSS, "odd")]
    with pytest.raises(FerruleError) as caught:
        fake_client.status()
    assert (caught.value.code, caught.value.reason) == (CODES.DATA_LOSS, "DATA_LOSS")
    assert isinstance(caught.value.__cause__, grpc.RpcError)


def test_what_the_server_told_is_not_hidden_behind_grpc(fake: FakeServer, fake_client: Client) -> None:
    """The error has all of it, so that its traceback is of one error."""
    fake.failures["Prefill"] = [Failure(CODES.INVALID_ARGUMENT, "no", reason="INVALID_FIELD")]
    with pytest.raises(InvalidRequestError) as caught:
        fake_client.prefill([1])
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__
