"""Creations through real calls: one request_id makes one thing, over reconnects, joins, cancels and a drain."""

from __future__ import annotations

import itertools

import grpc
import pytest

from ferrule.v1 import cache_pb2, executor_pb2, policy_pb2, types_pb2
from tests.api.harness import PROMPT, RunningServer, decode_item, read_status, refused, wait_until

_NUMBERS = itertools.count()
SAMPLE = policy_pb2.LogitsReturnPolicy(sample=policy_pb2.Sample())
FORK = types_pb2.STALE_POLICY_FORK


@pytest.fixture
def request_id() -> str:
    """An id that no other test uses: ended creations are remembered for ten minutes."""
    return f"creation-{next(_NUMBERS)}"


def fork(server: RunningServer, handle: types_pb2.KvCacheHandle, request_id: str) -> cache_pb2.ForkCacheResponse:
    """Fork twofold."""
    request = cache_pb2.ForkCacheRequest(kv_cache=handle, count=2, request_id=request_id)
    return server.stub.ForkCache(request, timeout=20)


def test_a_prefill_tells_the_lease_it_was_granted(server: RunningServer, request_id: str) -> None:
    """Clamped to the limits; on an existing sequence the one that holds now."""
    options = executor_pb2.CacheOptions()
    options.ttl.FromSeconds(1)
    first = server.prefill(cache=options, request_id=request_id)
    assert first.ttl.seconds == 5
    options.ttl.FromSeconds(7)
    assert server.prefill([3], kv_cache=first.kv_cache, cache=options).ttl.seconds == 7
    branches = fork(server, first.kv_cache, "")
    assert branches.ttl.seconds == 7


def test_other_content_under_an_id_names_the_field(server: RunningServer, request_id: str) -> None:
    """INVALID_ARGUMENT / REQUEST_ID_REUSED, on every call that creates."""
    handle = server.prefill(request_id=request_id).kv_cache
    server.decode(handle, 5)
    with refused() as caught:
        server.prefill(PROMPT[:-1], request_id=request_id)
    with refused() as caught_fork:
        fork(server, handle, request_id)
    with refused() as caught_branch:
        server.decode(handle, 6, request_id=request_id, on_stale=FORK)
    for refusal, field in ((caught[0], "input."), (caught_fork[0], ""), (caught_branch[0], "input.")):
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "REQUEST_ID_REUSED")
        assert refusal.metadata["field"] == f"{field}request_id"
        assert refusal.fields == (f"{field}request_id",)


def test_a_fork_sent_again_returns_the_same_branches(server: RunningServer, request_id: str) -> None:
    """Also when the source is gone."""
    handle = server.prefill().kv_cache
    first = fork(server, handle, request_id)
    assert not first.replayed
    server.release(handle)
    again = fork(server, handle, request_id)
    assert again.replayed
    assert list(again.kv_caches) == list(first.kv_caches)
    assert server.engine.snapshot().num_sequences == 2


def test_a_branch_on_a_stream_is_found_again_on_the_next_one(server: RunningServer, request_id: str) -> None:
    """The stream broke before its answer was read: a new stream sends the same item and gets the same branch."""
    handle = server.prefill().kv_cache
    server.decode(handle, 5)
    item = decode_item(handle, 6, policy=SAMPLE, request_id=request_id, on_stale=FORK)
    broken = server.open_stream()
    broken.send(item)
    wait_until(lambda: server.engine.snapshot().num_sequences == 2)
    broken.call.cancel()
    stream = server.open_stream()
    stream.send(item)
    (result,) = stream.read().results
    assert result.decode.replayed
    unary = server.decode(handle, 6, policy=SAMPLE, request_id=request_id, on_stale=FORK)
    assert (unary.kv_cache, unary.outputs) == (result.decode.kv_cache, result.decode.outputs)
    assert server.engine.snapshot().num_sequences == 2
    assert stream.rest() == []


def test_a_stream_error_of_a_creation_is_typed(server: RunningServer, request_id: str) -> None:
    """An item that reuses an id fails alone."""
    handle = server.prefill(request_id=request_id).kv_cache
    server.decode(handle, 5)
    stream = server.open_stream()
    stream.send(decode_item(handle, 6, request_id=request_id, on_stale=FORK))
    (result,) = stream.read().results
    refusal = read_status(result.error)
    assert refusal.reason == "REQUEST_ID_REUSED"
    assert refusal.metadata["field"] == "items[0].decode.request_id"
    assert stream.rest() == []
