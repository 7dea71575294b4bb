"""Bad input, each with its typed error and the path of the field, and a server that goes on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from ferrule.v1 import cache_pb2, executor_pb2, policy_pb2, types_pb2
from tests.api.harness import GREEDY, INSTANCE, PROMPT, Refusal, RunningServer, decode_item, read_status, refused

Code = grpc.StatusCode
Policy = policy_pb2.LogitsReturnPolicy


def _refusal(call: Callable[[], object]) -> Refusal:
    with refused() as refusals:
        call()
    return refusals[0]


def _goes_on(server: RunningServer) -> None:
    """The server still answers."""
    assert server.prefill().kv_cache.length == len(PROMPT)


def test_unknown_handle(server: RunningServer) -> None:
    """Never issued, released, and of another instance; nothing of the id is repeated."""
    handle = server.prefill().kv_cache
    server.release(handle)
    refusal = _refusal(lambda: server.decode(handle, 1))
    assert (refusal.code, refusal.reason) == (Code.NOT_FOUND, "HANDLE_UNKNOWN")
    assert handle.cache_id not in refusal.message
    guessed = types_pb2.KvCacheHandle(cache_id=handle.cache_id[:-4] + "AAAA", length=1, lineage=bytes(16))
    again = _refusal(lambda: server.decode(guessed, 1))
    assert (again.code, again.reason, set(again.metadata)) == (refusal.code, refusal.reason, set(refusal.metadata))
    _goes_on(server)


@pytest.mark.parametrize("cache_id", ["x", "a.b", "...", "\u00fc" * 60, "test.feedc0ffee00.", "test.feedc0ffee00.A.A"])
def test_a_made_up_cache_id_is_never_a_fault(server: RunningServer, cache_id: str) -> None:
    """Whatever text is sent, the answer is one of the handle errors."""
    handle = types_pb2.KvCacheHandle(cache_id=cache_id, length=1, lineage=bytes(16))
    assert _refusal(lambda: server.decode(handle, 1)).code in (Code.NOT_FOUND, Code.ABORTED)
    assert _refusal(lambda: server.info(handle)).code in (Code.NOT_FOUND, Code.ABORTED)
    assert not server.release(handle).results[0].released


def _sample(**fields: float) -> Policy:
    return Policy(sample=policy_pb2.Sample(**fields))  # type: ignore[arg-type]


GOOD_POLICIES = [
    _sample(top_k=2**32 - 1, top_p=1.0, min_p=1.0),
    _sample(repetition_penalty=1.0, frequency_penalty=0.0, presence_penalty=-0.0),
    Policy(sample=policy_pb2.Sample(seed=2**64 - 1, penalty_start=5)),
    Policy(top_logprobs=1024),
    Policy(target_logprobs=True),
    Policy(),
]


@pytest.mark.parametrize("policy", GOOD_POLICIES, ids=range(len(GOOD_POLICIES)))
def test_border_values_are_served(server: RunningServer, policy: Policy) -> None:
    """Neutral penalties, the largest seed, a top_k beyond the vocabulary."""
    assert server.prefill(policy=policy).kv_cache.length == len(PROMPT)


def test_bad_fork_and_list_fields_are_named(server: RunningServer) -> None:
    """Counts, lengths, leases and page tokens."""
    handle = server.prefill().kv_cache
    requests: list[tuple[dict[str, Any], str]] = [
        ({"count": 0}, "count"),
        ({"count": 257}, "count"),
        ({"length": 0}, "length"),
        ({"length": len(PROMPT) + 1}, "length"),
        ({"request_id": "x" * 129}, "request_id"),
    ]
    for fields, path in requests:
        request = cache_pb2.ForkCacheRequest(kv_cache=handle, **fields)
        assert _refusal(lambda request=request: server.stub.ForkCache(request)).fields == (path,)  # type: ignore[misc]
    negative = cache_pb2.ForkCacheRequest(kv_cache=handle)
    negative.ttl.FromSeconds(-1)
    assert _refusal(lambda: server.stub.ForkCache(negative)).fields == ("ttl",)
    for token in ("x", "====", "MTIz", "\u00fc", "M" * 24):
        page = cache_pb2.ListCachesRequest(page_token=token)
        assert _refusal(lambda page=page: server.stub.ListCaches(page)).fields == ("page_token",)  # type: ignore[misc]


NOT_UTF8 = cache_pb2.GetCacheInfoRequest(kv_cache=types_pb2.KvCacheHandle(cache_id="abc")).SerializeToString()
NOT_UTF8 = NOT_UTF8.replace(b"abc", b"\xff\xfe\xfd")
GARBAGE = b"\xff\xff\xff\xff"


@pytest.mark.parametrize(
    ("method", "message", "name"),
    [
        ("ModelExecutorService/Prefill", GARBAGE, "ferrule.v1.PrefillRequest"),
        ("ModelExecutorService/GetCacheInfo", NOT_UTF8, "ferrule.v1.GetCacheInfoRequest"),
        ("ModelExecutorService/BatchDecode", GARBAGE, "ferrule.v1.BatchDecodeRequest"),
        ("TokenizerService/Tokenize", GARBAGE, "ferrule.v1.TokenizeRequest"),
        ("AdminService/Drain", GARBAGE, "ferrule.v1.DrainRequest"),
    ],
)
def test_what_is_no_message_is_a_bad_field(
    server: RunningServer, caplog: pytest.LogCaptureFixture, method: str, message: bytes, name: str
) -> None:
    """Typed like every other error, one line in the log and no traceback."""
    refusal = _refusal(lambda: server.raw_unary(method, message))
    assert (refusal.code, refusal.reason, refusal.fields) == (Code.INVALID_ARGUMENT, "INVALID_FIELD", ("request",))
    assert name in refusal.message
    assert [(record.levelname, record.exc_info) for record in caplog.records] == [("WARNING", None)]
    _goes_on(server)


def test_what_is_no_message_ends_a_server_stream_and_a_decode_stream(
    server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    """The stream's own status says so, not a fault."""
    generate: Any = server.channel.unary_stream("/ferrule.v1.ModelExecutorService/Generate")
    for call in (lambda: list(generate(GARBAGE, timeout=10)), lambda: list(server.raw_stream(GARBAGE))):
        refusal = _refusal(call)
        assert (refusal.code, refusal.reason, refusal.fields) == (Code.INVALID_ARGUMENT, "INVALID_FIELD", ("request",))
    assert [(record.levelname, record.exc_info) for record in caplog.records] == [("WARNING", None)] * 2


def test_an_endless_cache_id_is_refused_wherever_it_stands(server: RunningServer) -> None:
    """Before anything is made of it."""
    good, endless = types_pb2.KvCacheHandle(cache_id="x"), types_pb2.KvCacheHandle(cache_id="x" * 129)
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: server.release(good, endless), "kv_caches[1].cache_id"),
        (lambda: server.stub.KeepAlive(cache_pb2.KeepAliveRequest(kv_caches=[endless])), "kv_caches[0].cache_id"),
        (lambda: server.info(endless), "kv_cache.cache_id"),
        (lambda: server.fork(endless), "kv_cache.cache_id"),
    ]
    for call, path in calls:
        refusal = _refusal(call)
        assert (refusal.code, refusal.reason, refusal.fields) == (Code.INVALID_ARGUMENT, "INVALID_FIELD", (path,))


def test_fields_that_the_engine_refuses_have_their_path(server: RunningServer) -> None:
    """A replay that must draw again needs its seed: named below the input it stands in, unary or on a stream."""
    handle = server.prefill().kv_cache
    server.prefill((3, 4), kv_cache=handle)
    unseeded = Policy(sample=policy_pb2.Sample(temperature=2.0))
    stream = server.open_stream()
    stream.send(decode_item(handle), decode_item(handle, 3, policy=unseeded))
    results = {result.seq: result for frame in stream.rest() for result in frame.results}
    refusals = {
        "input.": _refusal(lambda: server.decode(handle, 3, policy=unseeded)),
        "items[1].decode.": read_status(results[1].error),
    }
    for at, refusal in refusals.items():
        path = f"{at}logits_policy.sample.seed"
        assert (refusal.reason, refusal.fields, refusal.metadata["field"]) == ("INVALID_FIELD", (path,), path)
        assert refusal.message.startswith(f"{path}: ")


def test_what_may_be_logged_of_a_handle_is_set_in_replies_and_ignored_in_requests(server: RunningServer) -> None:
    """Only cache_id names the sequence, so a forged instance or handle_id opens nothing and breaks nothing."""
    handle = server.prefill().kv_cache
    expected = hashlib.sha256(handle.cache_id.encode()).hexdigest()[:16]
    assert (handle.instance, handle.handle_id) == (INSTANCE, expected)
    assert {(each.instance, len(each.handle_id)) for each in server.fork(handle, 2)} == {(INSTANCE, 16)}
    other = server.prefill().kv_cache
    forged = types_pb2.KvCacheHandle(
        cache_id=handle.cache_id,
        length=handle.length,
        lineage=handle.lineage,
        instance="elsewhere",
        handle_id=other.handle_id,
    )
    moved = server.decode(forged, 7).kv_cache
    assert (moved.cache_id, moved.instance, moved.handle_id) == (handle.cache_id, INSTANCE, expected)
    assert server.info(other).kv_cache == other


NEWER = b"\xfa\x07\x01x"
"""Field 127 of a message, which no message of the contract has: what a newer client may send."""


@pytest.mark.parametrize("num_tokens", [3, 33_000])
def test_a_field_of_a_newer_contract_is_refused_not_ignored(server: RunningServer, num_tokens: int) -> None:
    """At any depth, in small and in large requests; nothing was run."""
    steps = server.engine.counters.steps
    prompt = executor_pb2.PrefillInput(input_ids=[300] * num_tokens, logits_policy=GREEDY)
    policy = policy_pb2.LogitsReturnPolicy.FromString(NEWER)
    options = executor_pb2.CacheOptions.FromString(NEWER)
    for newer in (
        executor_pb2.PrefillInput(logits_policy=policy),
        executor_pb2.PrefillInput(cache=options),
        executor_pb2.PrefillInput.FromString(NEWER),
    ):
        newer.MergeFrom(prompt)
        data = executor_pb2.PrefillRequest(input=newer).SerializeToString()
        refusal = _refusal(lambda data=data: server.raw_unary("ModelExecutorService/Prefill", data))  # type: ignore[misc]
        assert (refusal.code, refusal.reason) == (Code.UNIMPLEMENTED, "FEATURE_UNSUPPORTED")
        assert "older than the client" in refusal.message
    assert server.engine.counters.steps == steps


def test_a_frame_of_a_newer_contract_ends_its_stream(server: RunningServer) -> None:
    """No item of it was run, and the sequence is as it was."""
    handle = server.prefill().kv_cache
    item = executor_pb2.StreamItem(decode=executor_pb2.DecodeInput.FromString(NEWER))
    item.decode.MergeFrom(decode_item(handle, 7))
    frame = executor_pb2.StreamDecodeRequest(items=[item]).SerializeToString()
    refusal = _refusal(lambda: list(server.raw_stream(frame)))
    assert (refusal.code, refusal.reason) == (Code.UNIMPLEMENTED, "FEATURE_UNSUPPORTED")
    assert server.info(handle).kv_cache == handle
