"""Every supports_ flag is true exactly if a call to the thing succeeds; each is called here."""

from __future__ import annotations

from collections.abc import Callable

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
from tests.api.harness import GREEDY, RunningServer, decode_item, read_status, refusal_of, refused

Policy = policy_pb2.LogitsReturnPolicy
Server = RunningServer


def _sample(**fields: object) -> Policy:
    return Policy(sample=policy_pb2.Sample(**fields))  # type: ignore[arg-type]


def _masked(server: Server) -> None:
    mask = policy_pb2.TokenMask(allowed_ids=policy_pb2.TokenIdList(token_ids=[1]))
    server.prefill(policy=Policy(greedy_argmax=policy_pb2.GreedyArgmax(token_mask=mask)))


def _stream(server: Server, item: executor_pb2.DecodeInput | executor_pb2.VerifyInput) -> None:
    """Send one item; its own error fails the call."""
    stream = server.open_stream()
    stream.send(item)
    result = stream.read().results[0]
    stream.half_close()
    if result.HasField("error"):
        raise _ItemError(read_status(result.error).reason)


class _ItemError(Exception):
    """The item of a stream failed; the argument is the reason."""


CALLS: dict[str, Callable[[Server], object]] = {
    "supports_batch_prefill": lambda server: server.stub.BatchPrefill(executor_pb2.BatchPrefillRequest()),
    "supports_batch_decode": lambda server: server.stub.BatchDecode(executor_pb2.BatchDecodeRequest()),
    "supports_stream_decode": lambda server: _stream(server, decode_item(server.prefill().kv_cache, 7)),
    "supports_unified_decode": lambda server: server.stub.UnifiedDecode(executor_pb2.UnifiedDecodeRequest()),
    "supports_forward_verify": lambda server: _stream(server, executor_pb2.VerifyInput()),
    "supports_tree_verify": lambda server: server.stub.ForwardVerify(executor_pb2.ForwardVerifyRequest()),
    "supports_forward": lambda server: list(server.stub.Forward(executor_pb2.ForwardRequest(input_ids=[1]))),
    "supports_generate": lambda server: list(server.stub.Generate(executor_pb2.GenerateRequest(input_ids=[1]))),
    "supports_fork": lambda server: server.fork(server.prefill().kv_cache),
    "supports_truncate": lambda server: server.truncate(server.prefill().kv_cache, 1),
    "supports_reserve": lambda server: server.prefill(cache=executor_pb2.CacheOptions(reserve_length=40)),
    "supports_token_masks": _masked,
    "supports_penalties": lambda server: server.prefill(policy=_sample(frequency_penalty=0.5)),
    "supports_logit_bias": lambda server: server.prefill(policy=_sample(logit_bias={1: 0.5})),
    "supports_logprob_token_ids": lambda server: server.prefill(policy=Policy(logprob_token_ids=[1])),
    "supports_target_logprobs": lambda server: server.prefill(policy=Policy(target_logprobs=True)),
    "supports_entropy": lambda server: server.prefill(policy=Policy(entropy=True)),
    "supports_hidden_state": lambda server: server.prefill(policy=Policy(hidden_state=True)),
    "supports_all_positions": lambda server: server.prefill(logits_positions=types_pb2.LOGITS_POSITIONS_ALL),
    "supports_chat_template": lambda server: server.text.ApplyChatTemplate(tokenizer_pb2.ApplyChatTemplateRequest()),
    "supports_cache_metrics": lambda server: server.stub.GetCacheMetrics(cache_pb2.GetCacheMetricsRequest()),
    "supports_admin": lambda server: admin_pb2_grpc.AdminServiceStub(server.channel).Warmup(admin_pb2.WarmupRequest()),
}
"""One call per flag that succeeds where the thing is served."""

NOT_CALLABLE = {"supports_prefix_cache", "supports_request_id", "supports_deterministic"}
"""Flags about what a call does, not whether it succeeds: tested below."""


@pytest.fixture
def capabilities(server: Server) -> info_pb2.ExecutorCapabilities:
    """What the server says it can do."""
    return server.stub.GetCapabilities(executor_pb2.GetCapabilitiesRequest()).capabilities


def test_every_flag_is_tested() -> None:
    """A new flag needs a call here."""
    flags = {field.name for field in info_pb2.ExecutorCapabilities.DESCRIPTOR.fields if "supports_" in field.name}
    assert flags == set(CALLS) | NOT_CALLABLE


@pytest.mark.parametrize("flag", CALLS)
def test_a_flag_is_true_exactly_if_the_call_succeeds(
    server: Server, capabilities: info_pb2.ExecutorCapabilities, flag: str
) -> None:
    """False means FEATURE_UNSUPPORTED, never something else."""
    reason = _reason_of_refusal(lambda: CALLS[flag](server))
    assert reason in (None, "FEATURE_UNSUPPORTED")
    assert getattr(capabilities, flag) is (reason is None)


def _reason_of_refusal(call: Callable[[], object]) -> str | None:
    """Return why a call or its item was refused; None: it was not."""
    try:
        call()
    except _ItemError as error:
        return str(error)
    except grpc.RpcError as error:
        return refusal_of(error).reason
    return None


def test_flags_about_what_a_call_does(server: Server, capabilities: info_pb2.ExecutorCapabilities) -> None:
    """Creation by request_id; no prefix cache, nothing deterministic beyond what executors are."""
    assert not capabilities.supports_prefix_cache
    assert not capabilities.supports_deterministic
    first, second = server.prefill(request_id="same"), server.prefill(request_id="same")
    assert capabilities.supports_request_id
    assert first.kv_cache == second.kv_cache


def test_limits_are_those_that_hold(server: Server, capabilities: info_pb2.ExecutorCapabilities) -> None:
    """Each limit named is served, one more is refused."""
    info = server.engine.info
    assert capabilities.executor == "paged-reference"
    assert (capabilities.block_size, capabilities.total_blocks) == (info.block_size, info.num_blocks - 1)
    assert capabilities.memory_requirements.kv_pool_bytes == info.num_blocks * info.bytes_per_block
    assert capabilities.memory_requirements.kv_bytes_per_token * info.block_size == info.bytes_per_block
    assert capabilities.max_step_rows == 512
    assert (capabilities.min_ttl.seconds, capabilities.default_ttl.seconds) == (5, 60)
    assert capabilities.max_ttl.seconds == 3600
    limits = server.limits
    assert capabilities.max_handles_per_request == limits.max_handles_per_request
    assert capabilities.max_items_per_frame == limits.max_items_per_frame
    assert (capabilities.max_text_bytes, capabilities.max_text_tokens) == (
        limits.max_text_bytes,
        limits.max_text_tokens,
    )
    assert info_pb2.ATTENTION_MECHANISM_PAGED in capabilities.attention_mechanisms
    handle = server.prefill().kv_cache
    assert len(server.fork(handle, capabilities.max_fork_count)) == capabilities.max_fork_count
    with refused() as refusals:
        server.fork(handle, capabilities.max_fork_count + 1)
    assert refusals[0].fields == ("count",)
    with refused() as refusals:
        server.prefill((1,) * (capabilities.max_sequence_length + 1), GREEDY)
    assert refusals[0].reason == "CONTEXT_EXCEEDED"


def test_hints_about_prefixes_change_no_answer(server: Server) -> None:
    """Both values of both hints are accepted."""
    for value in (True, False):
        options = executor_pb2.CacheOptions(reuse_prefix=value, publish_prefix=value)
        assert server.prefill(cache=options).cached_tokens == 0
