"""A feature is listed exactly if a call to it succeeds; each is called here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from ferrule.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    cache_pb2,
    executor_pb2,
    info_pb2,
    policy_pb2,
    tokenizer_pb2,
    types_pb2,
)
from ferrule_server.config import ServerConfig
from ferrule_server.executor.base import ExecutorState
from ferrule_server.executor.reference import PagedReferenceExecutor
from ferrule_server.loading import create_executor
from tests.api.harness import FULL, GREEDY, RunningServer, decode_item, read_status, refusal_of, refused

Policy = policy_pb2.LogitsReturnPolicy
Server = RunningServer


def _sample(**fields: object) -> Policy:
    return Policy(sample=policy_pb2.Sample(**fields))  # type: ignore[arg-type]


def _masked(server: Server) -> None:
    """Each form of a mask, the registered one too."""
    num_bytes = -(-server.engine.info.model.config.vocab_size // 8)
    bits = bytes([2, *[0] * (num_bytes - 1)])
    request = cache_pb2.RegisterTokenMaskRequest(masks=[bits])
    (fingerprint,) = server.stub.RegisterTokenMask(request, timeout=20).fingerprints
    for mask in (
        policy_pb2.TokenMask(allowed_ids=policy_pb2.TokenIdList(token_ids=[1])),
        policy_pb2.TokenMask(inline_bits=bits),
        policy_pb2.TokenMask(fingerprint=fingerprint),
    ):
        output = server.prefill(policy=Policy(greedy_argmax=policy_pb2.GreedyArgmax(token_mask=mask)))
        assert list(output.outputs.tokens) == [1]


def _unified(server: Server) -> None:
    """As a call, and as an item of a stream."""
    batch = executor_pb2.UnifiedBatch(items=[executor_pb2.UnifiedBatchItem(q_tokens=[1, 2], logits_policy=GREEDY)])
    response = server.stub.UnifiedDecode(executor_pb2.UnifiedDecodeRequest(batch=batch), timeout=20)
    assert response.results[0].HasField("output")
    _stream(server, batch.items[0])


def _verify(server: Server, *parents: int) -> None:
    """As a call, and as an item of a stream."""
    for send in (
        lambda each: server.stub.ForwardVerify(executor_pb2.ForwardVerifyRequest(input=each), timeout=20),
        lambda each: _stream(server, each),
    ):
        handle = server.prefill().kv_cache
        send(
            executor_pb2.VerifyInput(
                kv_cache=handle, input_ids=[1], draft_ids=[2, 3], parents=parents, logits_policy=GREEDY
            )
        )


def _batch_prefill(server: Server) -> None:
    request = executor_pb2.BatchPrefillRequest(
        inputs=[executor_pb2.PrefillInput(input_ids=[i, 2], logits_policy=GREEDY) for i in range(3)]
    )
    assert all(result.HasField("output") for result in server.stub.BatchPrefill(request, timeout=20).results)


def _batch_decode(server: Server) -> None:
    inputs = [decode_item(server.prefill((i, 2)).kv_cache, 7) for i in range(3)]
    response = server.stub.BatchDecode(executor_pb2.BatchDecodeRequest(inputs=inputs), timeout=20)
    assert all(result.HasField("output") for result in response.results)


def _penalised(server: Server) -> None:
    for name in ("repetition_penalty", "frequency_penalty", "presence_penalty"):
        server.prefill(policy=_sample(**{name: 0.5}))
    server.prefill(policy=Policy(greedy_argmax=policy_pb2.GreedyArgmax(repetition_penalty=2.0)))


def _generate(server: Server) -> None:
    request = executor_pb2.GenerateRequest(input_ids=[1], max_tokens=3, n=2)
    assert sum(
        output.outputs.num_rows for frame in server.stub.Generate(request, timeout=20) for output in frame.outputs
    )


def _forward(server: Server) -> None:
    request = executor_pb2.ForwardRequest(input_ids=[1, 2], logits_policy=FULL)
    assert list(server.stub.Forward(request, timeout=20))[-1].is_last


def _fork(server: Server) -> None:
    handle = server.prefill().kv_cache
    server.fork(handle)
    server.decode(handle, 7)
    assert server.decode(handle, 8, on_stale=types_pb2.STALE_POLICY_FORK).kv_cache.cache_id != handle.cache_id


def _truncate(server: Server) -> None:
    handle = server.prefill().kv_cache
    server.decode(handle, 7)
    assert server.decode(handle, 8, on_stale=types_pb2.STALE_POLICY_REWIND).kv_cache.cache_id == handle.cache_id
    server.truncate(handle, 1)


def _reserve(server: Server) -> None:
    handle = server.prefill(cache=executor_pb2.CacheOptions(reserve_length=40)).kv_cache
    wanted = cache_pb2.KvSlotRequest(kv_cache=handle, target_length=50)
    server.stub.ReserveKvSlots(cache_pb2.ReserveKvSlotsRequest(requests=[wanted]), timeout=20)


def _tokenize(server: Server) -> None:
    ids = server.text.Tokenize(tokenizer_pb2.TokenizeRequest(text="Hello"), timeout=20).token_ids
    server.text.Detokenize(tokenizer_pb2.DetokenizeRequest(token_ids=ids), timeout=20)


def _chat(server: Server) -> None:
    message = tokenizer_pb2.ChatMessage(role="user", content="Hello")
    server.text.ApplyChatTemplate(tokenizer_pb2.ApplyChatTemplateRequest(messages=[message]), timeout=20)


def _administer(server: Server) -> None:
    """All of it, on a server of its own: this one goes on."""
    with RunningServer() as other:
        admin = admin_pb2_grpc.AdminServiceStub(other.channel)
        admin.Warmup(admin_pb2.WarmupRequest(), timeout=20)
        admin.Drain(admin_pb2.DrainRequest(), timeout=20)
        admin.Shutdown(admin_pb2.ShutdownRequest(), timeout=20)


def _stream(
    server: Server, item: executor_pb2.DecodeInput | executor_pb2.VerifyInput | executor_pb2.UnifiedBatchItem
) -> None:
    """Send one item; its own error fails the call."""
    stream = server.open_stream()
    stream.send(item)
    result = stream.read().results[0]
    stream.half_close()
    if result.HasField("error"):
        raise _ItemError(read_status(result.error).reason)


class _ItemError(Exception):
    """The item of a stream failed; the argument is the reason."""


def _durable(server: Server) -> None:
    """A sequence that is to survive the process."""
    server.prefill(cache=executor_pb2.CacheOptions(durability=types_pb2.DURABILITY_JOURNALED))


CALLS: dict[info_pb2.Feature, Callable[[Server], object]] = {
    info_pb2.FEATURE_BATCH_PREFILL: _batch_prefill,
    info_pb2.FEATURE_BATCH_DECODE: _batch_decode,
    info_pb2.FEATURE_STREAM_DECODE: lambda server: _stream(server, decode_item(server.prefill().kv_cache, 7)),
    info_pb2.FEATURE_UNIFIED_DECODE: _unified,
    info_pb2.FEATURE_FORWARD_VERIFY: _verify,
    info_pb2.FEATURE_TREE_VERIFY: lambda server: _verify(server, 0, 0),
    info_pb2.FEATURE_FORWARD: _forward,
    info_pb2.FEATURE_GENERATE: _generate,
    info_pb2.FEATURE_FORK: _fork,
    info_pb2.FEATURE_TRUNCATE: _truncate,
    info_pb2.FEATURE_RESERVE: _reserve,
    info_pb2.FEATURE_TOKEN_MASKS: _masked,
    info_pb2.FEATURE_PENALTIES: _penalised,
    info_pb2.FEATURE_LOGIT_BIAS: lambda server: server.prefill(policy=_sample(logit_bias={1: 0.5})),
    info_pb2.FEATURE_LOGPROB_TOKEN_IDS: lambda server: server.prefill(policy=Policy(logprob_token_ids=[1])),
    info_pb2.FEATURE_TARGET_LOGPROBS: lambda server: server.prefill(policy=Policy(target_logprobs=True)),
    info_pb2.FEATURE_ENTROPY: lambda server: server.prefill(policy=Policy(entropy=True)),
    info_pb2.FEATURE_HIDDEN_STATE: lambda server: server.prefill(policy=Policy(hidden_state=True)),
    info_pb2.FEATURE_ALL_POSITIONS: lambda server: server.prefill(logits_positions=types_pb2.LOGITS_POSITIONS_ALL),
    info_pb2.FEATURE_TOKENIZER: _tokenize,
    info_pb2.FEATURE_CHAT_TEMPLATE: _chat,
    info_pb2.FEATURE_CACHE_METRICS: lambda server: server.stub.GetCacheMetrics(cache_pb2.GetCacheMetricsRequest()),
    info_pb2.FEATURE_ADMIN: _administer,
    info_pb2.FEATURE_DURABLE_HANDLES: _durable,
}
"""One call per feature that succeeds where it is served."""

NOT_CALLABLE = {info_pb2.FEATURE_PREFIX_CACHE, info_pb2.FEATURE_REQUEST_ID, info_pb2.FEATURE_DETERMINISTIC}
"""Features about what a call does, not whether it succeeds: tested below."""


@pytest.fixture
def capabilities(server: Server) -> info_pb2.ExecutorCapabilities:
    """What the server says it can do."""
    return server.stub.GetCapabilities(executor_pb2.GetCapabilitiesRequest()).capabilities


def test_every_feature_is_tested() -> None:
    """A new feature needs a call here."""
    assert set(info_pb2.Feature.values()) == set(CALLS) | NOT_CALLABLE | {info_pb2.FEATURE_UNSPECIFIED}


@pytest.mark.parametrize("feature", CALLS, ids=info_pb2.Feature.Name)
def test_a_feature_is_listed_exactly_if_the_call_succeeds(
    server: Server, capabilities: info_pb2.ExecutorCapabilities, feature: info_pb2.Feature
) -> None:
    """Without it the answer is FEATURE_UNSUPPORTED, never something else."""
    _check_feature(server, capabilities, feature)


@pytest.fixture(scope="module")
def shipped() -> Iterator[Server]:
    """The bundled model on the kernels of the processor, with its tokenizer and its chat template."""
    loaded = create_executor(ServerConfig(dtype="float32", kv_memory_bytes=16 << 20), lambda _stage, _share: None)
    with RunningServer(loaded.executor, tokenizer=loaded.tokenizer, chat_template=loaded.chat_template) as server:
        yield server


@pytest.mark.parametrize("feature", CALLS, ids=info_pb2.Feature.Name)
def test_the_bundled_model_has_every_feature_but_trees(shipped: Server, feature: info_pb2.Feature) -> None:
    """The same where there is a tokenizer."""
    lacking = (info_pb2.FEATURE_TREE_VERIFY, info_pb2.FEATURE_DURABLE_HANDLES)  # the second needs --durable
    capabilities = shipped.stub.GetCapabilities(executor_pb2.GetCapabilitiesRequest()).capabilities
    _check_feature(shipped, capabilities, feature)
    assert (feature in capabilities.features) is (feature not in lacking)


@pytest.fixture(scope="module")
def half() -> Iterator[Server]:
    """The bundled model in float16."""
    config = ServerConfig(executor="torch", dtype="float16", kv_memory_bytes=16 << 20)
    loaded = create_executor(config, lambda _stage, _share: None)
    with RunningServer(loaded.executor, tokenizer=loaded.tokenizer, chat_template=loaded.chat_template) as server:
        yield server


def test_a_model_in_float16_says_so_and_answers(half: Server) -> None:
    """Its weights, its KV, and the types that the executor can run; its sizes are those of config.json."""
    info = half.stub.GetModelInfo(executor_pb2.GetModelInfoRequest()).info
    assert (info.dtype, info.kv_dtype) == (types_pb2.DATA_TYPE_FLOAT16, types_pb2.DATA_TYPE_FLOAT16)
    assert (info.num_layers, info.num_heads, info.num_kv_heads, info.head_dim) == (6, 4, 2, 64)
    made = half.stub.GetCapabilities(executor_pb2.GetCapabilitiesRequest()).capabilities
    assert types_pb2.DATA_TYPE_FLOAT16 in made.supported_dtypes
    assert made.memory_requirements.kv_bytes_per_token == 6 * 2 * 2 * 64 * 2
    output = half.prefill(policy=GREEDY)
    assert len(output.outputs.tokens) == 1


def _check_feature(server: Server, capabilities: info_pb2.ExecutorCapabilities, feature: info_pb2.Feature) -> None:
    reason = _reason_of_refusal(lambda: CALLS[feature](server))
    assert reason in (None, "FEATURE_UNSUPPORTED")
    assert (feature in capabilities.features) is (reason is None)


def _reason_of_refusal(call: Callable[[], object]) -> str | None:
    """Return why a call or its item was refused; None: it was not."""
    try:
        call()
    except _ItemError as error:
        return str(error)
    except grpc.RpcError as error:
        return refusal_of(error).reason
    return None


def test_features_about_what_a_call_does(server: Server, capabilities: info_pb2.ExecutorCapabilities) -> None:
    """Creation by request_id, prompts found again; nothing deterministic beyond what executors are."""
    assert info_pb2.FEATURE_DETERMINISTIC not in capabilities.features
    assert info_pb2.FEATURE_PREFIX_CACHE in capabilities.features
    assert server.prefill(range(100, 150)).cached_tokens == 0
    found = server.prefill(range(100, 150)).cached_tokens
    assert found == 50 // capabilities.block_size * capabilities.block_size
    first, second = server.prefill(request_id="same"), server.prefill(request_id="same")
    assert info_pb2.FEATURE_REQUEST_ID in capabilities.features
    assert first.kv_cache == second.kv_cache


def test_the_longest_sequence_is_one_that_the_pool_can_hold() -> None:
    """It is served, one token more is not; the model itself would take more."""
    executor = PagedReferenceExecutor(kv_memory_bytes=1 << 15)
    with RunningServer(executor) as server:
        longest = server.stub.GetModelInfo(executor_pb2.GetModelInfoRequest(), timeout=20).info.max_sequence_length
        assert longest == (executor.info.num_blocks - 1) * executor.info.block_size < executor.info.model.max_context
        assert server.prefill((1,) * longest).kv_cache.length == longest
        with refused() as refusals:
            server.prefill((1,) * (longest + 1))
        assert refusals[0].reason == "EXCEEDS_POOL"


def test_limits_are_those_that_hold(server: Server, capabilities: info_pb2.ExecutorCapabilities) -> None:
    """Each limit named is served, one more is refused."""
    info = server.engine.info
    assert (capabilities.block_size, capabilities.total_blocks) == (info.block_size, info.num_blocks - 1)
    assert capabilities.memory_requirements.kv_pool_bytes == info.num_blocks * info.bytes_per_block
    assert capabilities.memory_requirements.kv_bytes_per_token * info.block_size == info.bytes_per_block
    assert capabilities.max_step_rows == 512
    assert (capabilities.min_ttl.seconds, capabilities.default_ttl.seconds) == (5, 60)
    assert capabilities.max_ttl.seconds == 3600
    limits = server.limits
    assert capabilities.max_handles_per_request == limits.max_handles_per_request
    assert capabilities.max_items_per_frame == limits.max_items_per_frame
    for name in (
        "max_text_bytes",
        "max_text_tokens",
        "max_draft_tokens",
        "max_masks_per_request",
        "max_logprob_token_ids",
        "max_logit_biases",
        "max_stops",
        "max_stop_tokens",
        "max_stop_bytes",
    ):
        assert getattr(capabilities, name) == getattr(limits, name) > 0
    handle = server.prefill().kv_cache
    assert len(server.fork(handle, capabilities.max_fork_count)) == capabilities.max_fork_count
    with refused() as refusals:
        server.fork(handle, capabilities.max_fork_count + 1)
    assert refusals[0].fields == ("count",)
    with refused() as refusals:
        server.prefill((1,) * (info.model.max_context + 1), GREEDY)
    assert refusals[0].reason == "CONTEXT_EXCEEDED"


def test_the_executor_is_the_one_that_serves() -> None:
    """After a fallback it is not the one that was loaded."""
    with RunningServer() as server:
        serving = server.state.serving
        assert serving is not None
        server.state.serving = dataclasses.replace(serving, executor_state=lambda: ExecutorState("torch"))
        assert server.stub.GetStatus(executor_pb2.GetStatusRequest()).status.executor == "torch"


def test_the_description_of_the_model_reads_no_file(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made on the event loop: /proc/cpuinfo has a page for each core."""
    read: list[Path] = []

    def noting(path: Path, *_: object, **__: object) -> str:
        read.append(path)
        return ""

    monkeypatch.setattr(Path, "read_text", noting)
    info = server.stub.GetModelInfo(executor_pb2.GetModelInfoRequest()).info
    assert info.device_name
    assert not read


def test_hints_about_prefixes_change_no_answer(server: Server) -> None:
    """What is found, or kept, and nothing else."""
    hints = executor_pb2.CacheOptions
    hidden, shown = range(150, 200), range(200, 250)
    first = server.prefill(hidden, cache=hints(skip_prefix_publish=True))
    assert server.prefill(hidden, cache=hints(skip_prefix_publish=True)).cached_tokens == 0
    plain = server.prefill(shown, cache=hints(skip_prefix_publish=False))
    again = server.prefill(shown, cache=hints(skip_prefix_reuse=True))
    found = server.prefill(shown, cache=hints(skip_prefix_reuse=False))
    assert (plain.cached_tokens, again.cached_tokens, found.cached_tokens) == (0, 0, 48)
    assert plain.outputs == again.outputs == found.outputs
    assert first.kv_cache.lineage != plain.kv_cache.lineage


def test_without_a_prefix_cache_the_hints_have_no_effect() -> None:
    """And the feature is not listed."""
    with RunningServer(has_prefix_cache=False) as server:
        served = server.stub.GetCapabilities(executor_pb2.GetCapabilitiesRequest()).capabilities
        assert info_pb2.FEATURE_PREFIX_CACHE not in served.features
        for value in (True, False):
            options = executor_pb2.CacheOptions(skip_prefix_reuse=value, skip_prefix_publish=value)
            assert server.prefill(cache=options).cached_tokens == 0
