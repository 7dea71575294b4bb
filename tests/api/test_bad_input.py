"""Bad input, each with its typed error and the path of the field, and a server that goes on."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from grpc_status import rpc_status

from ferrule.v1 import cache_pb2, executor_pb2, policy_pb2, types_pb2
from ferrule_server.api.limits import ApiLimits
from tests.api.harness import FULL, GREEDY, INSTANCE, PROMPT, Refusal, RunningServer, decode_item, read_status, refused
from tests.fakes import FakeExecutor

Code = grpc.StatusCode
Policy = policy_pb2.LogitsReturnPolicy


def _refusal(call: Callable[[], object]) -> Refusal:
    with refused() as refusals:
        call()
    return refusals[0]


def _goes_on(server: RunningServer) -> None:
    """The server still answers."""
    assert server.prefill().kv_cache.length == len(PROMPT)


def test_empty_prompt(server: RunningServer) -> None:
    """A new sequence needs a token."""
    refusal = _refusal(lambda: server.prefill(()))
    assert (refusal.code, refusal.reason) == (Code.INVALID_ARGUMENT, "INVALID_FIELD")
    assert refusal.fields == ("input.input_ids",)
    _goes_on(server)


def test_token_out_of_vocabulary(server: RunningServer) -> None:
    """The first bad token is named by its place."""
    refusal = _refusal(lambda: server.prefill((1, 255, 256, 2**32 - 1)))
    assert (refusal.code, refusal.reason) == (Code.INVALID_ARGUMENT, "TOKEN_OUT_OF_VOCAB")
    assert refusal.fields == ("input.input_ids[2]",)
    assert (refusal.metadata["token_id"], refusal.metadata["vocab_size"]) == ("256", "256")
    _goes_on(server)


def test_context_exceeded(server: RunningServer) -> None:
    """By a prompt and by an append; the sequence stays as it was."""
    refusal = _refusal(lambda: server.prefill((1,) * 513))
    assert (refusal.code, refusal.reason) == (Code.OUT_OF_RANGE, "CONTEXT_EXCEEDED")
    assert (refusal.metadata["length"], refusal.metadata["max_context"]) == ("513", "512")
    full = server.prefill((1,) * 512).kv_cache
    assert _refusal(lambda: server.decode(full, 1)).reason == "CONTEXT_EXCEEDED"
    assert server.decode(full).kv_cache == full


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


def test_stale_handle(server: RunningServer) -> None:
    """The tip's length is in the metadata."""
    handle = server.prefill().kv_cache
    server.decode(handle, 7)
    refusal = _refusal(lambda: server.decode(handle, 8))
    assert (refusal.code, refusal.reason) == (Code.ABORTED, "HANDLE_STALE")
    assert refusal.metadata["tip_length"] == str(len(PROMPT) + 1)
    forged = types_pb2.KvCacheHandle(cache_id=handle.cache_id, length=len(PROMPT), lineage=b"x" * 16)
    assert _refusal(lambda: server.decode(forged, 8)).reason == "HANDLE_STALE"


def test_truncate_beyond(server: RunningServer) -> None:
    """To more than the handle's length, and to nothing."""
    handle = server.prefill().kv_cache
    for new_length in (len(PROMPT) + 1, 0, 2**32 - 1):
        refusal = _refusal(lambda new_length=new_length: server.truncate(handle, new_length))  # type: ignore[misc]
        assert (refusal.code, refusal.reason) == (Code.OUT_OF_RANGE, "TRUNCATE_BEYOND")
    assert server.info(handle).kv_cache == handle


def test_a_message_of_20_mb_is_refused_by_grpc_itself(server: RunningServer) -> None:
    """Without ErrorInfo, as documented; the connection and the server go on."""
    message = executor_pb2.PrefillRequest(input=executor_pb2.PrefillInput(request_id="x" * (20 << 20)))
    with pytest.raises(grpc.RpcError) as caught:
        server.stub.Prefill(message, timeout=20)
    assert caught.value.code() is Code.RESOURCE_EXHAUSTED
    assert rpc_status.from_call(caught.value) is None
    assert "larger than max" in (caught.value.details() or "")
    _goes_on(server)


def test_a_reply_that_would_be_too_large_runs_nothing() -> None:
    """Refused before the engine sees it: no step, no sequence."""
    executor = FakeExecutor(vocab_size=1000)
    with RunningServer(executor, limits=ApiLimits(max_reply_bytes=100_000)) as server:
        refusal = _refusal(lambda: server.prefill((1,) * 30, FULL, logits_positions=types_pb2.LOGITS_POSITIONS_ALL))
        assert refusal.reason == "REPLY_TOO_LARGE"
        assert int(refusal.metadata["reply_bytes"]) > 120_000
        assert not executor.batches
        half = Policy(full_logits=policy_pb2.FullLogits(dtype=types_pb2.DATA_TYPE_BFLOAT16))
        output = server.prefill((1,) * 30, half, logits_positions=types_pb2.LOGITS_POSITIONS_ALL)
        assert len(output.outputs.logits.data) == 60_000


def _sample(**fields: float) -> Policy:
    return Policy(sample=policy_pb2.Sample(**fields))  # type: ignore[arg-type]


BAD_POLICIES: list[tuple[Policy, str]] = [
    (Policy(logprobs=True), "logprobs"),
    (Policy(top_logprobs=1025), "top_logprobs"),
    (Policy(full_logits=policy_pb2.FullLogits(dtype=types_pb2.DATA_TYPE_INT8)), "full_logits.dtype"),
    (Policy(full_logits=policy_pb2.FullLogits(dtype=77)), "full_logits.dtype"),  # type: ignore[arg-type]
    (_sample(temperature=-0.1), "sample.temperature"),
    (_sample(temperature=math.nan), "sample.temperature"),
    (_sample(temperature=math.inf), "sample.temperature"),
    (_sample(top_p=0.0), "sample.top_p"),
    (_sample(top_p=1.01), "sample.top_p"),
    (_sample(top_p=math.nan), "sample.top_p"),
    (_sample(min_p=-0.1), "sample.min_p"),
    (_sample(min_p=1.5), "sample.min_p"),
    (_sample(min_p=math.nan), "sample.min_p"),
    (_sample(repetition_penalty=-1.0), "sample.repetition_penalty"),
    (_sample(frequency_penalty=math.nan), "sample.frequency_penalty"),
    (_sample(presence_penalty=math.inf), "sample.presence_penalty"),
    (Policy(greedy_argmax=policy_pb2.GreedyArgmax(repetition_penalty=-1)), "greedy_argmax.repetition_penalty"),
]


@pytest.mark.parametrize(("policy", "field"), BAD_POLICIES, ids=lambda value: value if isinstance(value, str) else "")
def test_bad_policies_are_named_by_field(server: RunningServer, policy: Policy, field: str) -> None:
    """Out of range, not a number, or two things that exclude each other."""
    refusal = _refusal(lambda: server.prefill(policy=policy))
    assert (refusal.code, refusal.reason) == (Code.INVALID_ARGUMENT, "INVALID_FIELD")
    assert refusal.fields == (f"input.logits_policy.{field}",)


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


BAD_PREFILLS: list[tuple[dict[str, Any], str]] = [
    ({"attention_mask": [1, 0]}, "input.attention_mask[1]"),
    ({"attention_mask": [1]}, "input.attention_mask"),
    ({"position_ids": [0, 2]}, "input.position_ids[1]"),
    ({"position_ids": [1, 2]}, "input.position_ids[0]"),
    ({"position_ids": [0, 1, 2]}, "input.position_ids"),
    ({"request_id": "x" * 129}, "input.request_id"),
    ({"on_stale": 9}, "input.on_stale"),
    ({"logits_positions": 9}, "input.logits_positions"),
    ({"kv_cache": types_pb2.KvCacheHandle(length=1, lineage=bytes(16))}, "input.kv_cache.cache_id"),
    ({"kv_cache": types_pb2.KvCacheHandle(cache_id="x" * 129, length=1, lineage=bytes(16))}, "input.kv_cache.cache_id"),
    ({"kv_cache": types_pb2.KvCacheHandle(cache_id="x", lineage=bytes(16))}, "input.kv_cache.length"),
    ({"kv_cache": types_pb2.KvCacheHandle(cache_id="x", length=1, lineage=bytes(15))}, "input.kv_cache.lineage"),
]


@pytest.mark.parametrize(("fields", "path"), BAD_PREFILLS, ids=[path for _, path in BAD_PREFILLS])
def test_bad_prefill_fields_are_named(server: RunningServer, fields: dict[str, Any], path: str) -> None:
    """Nothing is silently ignored."""
    refusal = _refusal(lambda: server.prefill((1, 2), **fields))
    assert (refusal.code, refusal.reason, refusal.fields) == (Code.INVALID_ARGUMENT, "INVALID_FIELD", (path,))


def test_unset_messages_are_named(server: RunningServer) -> None:
    """A request without its one field."""
    stub = server.stub
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: stub.Prefill(executor_pb2.PrefillRequest()), "input"),
        (lambda: stub.Decode(executor_pb2.DecodeRequest()), "input"),
        (lambda: stub.Decode(executor_pb2.DecodeRequest(input=executor_pb2.DecodeInput())), "input.kv_cache"),
        (lambda: stub.ForkCache(cache_pb2.ForkCacheRequest()), "kv_cache"),
        (lambda: stub.TruncateKv(cache_pb2.TruncateKvRequest()), "kv_cache"),
        (lambda: stub.GetCacheInfo(cache_pb2.GetCacheInfoRequest()), "kv_cache"),
    ]
    for call, field in calls:
        assert _refusal(call).fields == (field,)


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


def test_lists_of_handles_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    """The limit itself is served, one more is one error and one line in the log."""
    with RunningServer(limits=ApiLimits(max_handles_per_request=3)) as server:
        handles = [types_pb2.KvCacheHandle(cache_id="x")] * 4
        assert len(server.release(*handles[:3]).results) == 3
        assert len(server.stub.KeepAlive(cache_pb2.KeepAliveRequest(kv_caches=handles[:3])).results) == 3
        calls: list[Callable[[], object]] = [
            lambda: server.release(*handles),
            lambda: server.stub.KeepAlive(cache_pb2.KeepAliveRequest(kv_caches=handles)),
        ]
        for call in calls:
            caplog.clear()
            refusal = _refusal(call)
            assert (refusal.reason, refusal.fields) == ("INVALID_FIELD", ("kv_caches",))
            assert len(caplog.records) == 1


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


def test_a_reused_request_id_has_its_path(server: RunningServer) -> None:
    """The engine knows the id alone; unary or on a stream, the field is that of the input."""
    branch: dict[str, Any] = {"on_stale": types_pb2.STALE_POLICY_FORK, "request_id": "of a prompt"}
    handle = server.prefill(request_id="of a prompt").kv_cache
    server.decode(handle, 3)
    stream = server.open_stream()
    stream.send(decode_item(handle, 9, **branch))
    (result,) = (result for frame in stream.rest() for result in frame.results)
    refusals = {
        "input.": _refusal(lambda: server.decode(handle, 9, **branch)),
        "items[0].decode.": read_status(result.error),
    }
    for at, refusal in refusals.items():
        path = f"{at}request_id"
        assert (refusal.reason, refusal.fields, refusal.metadata["field"]) == ("REQUEST_ID_REUSED", (path,), path)


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
