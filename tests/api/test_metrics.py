"""Live figures: GetCacheMetrics, the counters of GetStatus, and registered masks through the service."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ferrule.v1 import cache_pb2, executor_pb2, info_pb2, policy_pb2
from ferrule_server.api.security.auth import OpenAccess
from ferrule_server.engine.masks import OVERHEAD_BYTES
from ferrule_server.executor.reference import PagedReferenceExecutor
from ferrule_server.quotas import QuotaLimits
from tests.api.harness import GREEDY, RunningServer, refused, wait_until

MASK_BYTES = 32
COUNTED_BYTES = MASK_BYTES + OVERHEAD_BYTES
QUOTA_MASKS = 3


@pytest.fixture
def own() -> Iterator[RunningServer]:
    """A server of the test's own, with a small pool and room for three masks."""
    access = OpenAccess(is_admin=True, quotas=QuotaLimits(mask_bytes=QUOTA_MASKS * COUNTED_BYTES))
    executor = PagedReferenceExecutor(kv_memory_bytes=1 << 18)
    with RunningServer(executor, access=access) as server:
        yield server


def _metrics(server: RunningServer) -> cache_pb2.CacheMetrics:
    metrics = server.stub.GetCacheMetrics(cache_pb2.GetCacheMetricsRequest(), timeout=20).metrics
    assert metrics.empty_blocks + metrics.cached_blocks + metrics.used_blocks == server.engine.info.num_blocks - 1
    return metrics


def _status(server: RunningServer) -> info_pb2.ExecutorStatus:
    return server.stub.GetStatus(executor_pb2.GetStatusRequest(), timeout=20).status


def _register(server: RunningServer, *token_ids: int) -> list[bytes]:
    """Register a mask for each token, which alone it allows."""
    masks = [bytes(1 << t % 8 if i == t // 8 else 0 for i in range(MASK_BYTES)) for t in token_ids]
    response = server.stub.RegisterTokenMask(cache_pb2.RegisterTokenMaskRequest(masks=masks), timeout=20)
    return list(response.fingerprints)


def _chosen(server: RunningServer, fingerprint: bytes) -> list[int]:
    """Return the token that is chosen under a registered mask."""
    mask = policy_pb2.TokenMask(fingerprint=fingerprint)
    policy = policy_pb2.LogitsReturnPolicy(greedy_argmax=policy_pb2.GreedyArgmax(token_mask=mask))
    return list(server.prefill(policy=policy).outputs.tokens)


def test_a_fresh_pool_is_empty(own: RunningServer) -> None:
    """Nothing but its size."""
    assert {field.name for field, _ in _metrics(own).ListFields()} == {"empty_blocks"}


def test_what_happens_to_sequences_is_counted(own: RunningServer) -> None:
    """Created, forked, rolled back, found again, released, run out."""
    block_size = own.engine.info.block_size
    prompt = range(2 * block_size + 1)
    first = own.prefill(prompt).kv_cache
    own.fork(first, 2)
    before = _metrics(own)
    assert (before.used_blocks, before.shared_blocks, _status(own).live_sequences) == (3, 3, 3)
    assert (before.num_created, before.num_forks) == (3, 2)
    own.decode(first, 7)
    own.decode(first, 7)
    with refused():
        own.decode(first, 8)
    own.truncate(first, 3)
    own.release(first)
    after = _metrics(own)
    assert (after.num_replays, after.num_stale, after.num_truncates, after.num_released) == (1, 1, 1, 1)
    assert after.num_block_copies == 1
    own.clock.offset_s += 100.0
    own.prefill((250, 251))
    wait_until(lambda: _metrics(own).num_expired == 2)
    gone = _metrics(own)
    assert _status(own).live_sequences == 1
    assert gone.cached_blocks >= 2
    assert own.prefill(prompt).cached_tokens == 2 * block_size
    found = _metrics(own)
    assert found.num_prefix_hit_tokens == 2 * block_size
    assert found.num_prefix_lookup_tokens - gone.num_prefix_lookup_tokens >= 2 * block_size


def test_a_pool_that_is_full_is_counted(own: RunningServer) -> None:
    """Cached blocks give way first; what still finds no room is refused."""
    total_blocks, block_size = own.engine.info.num_blocks - 1, own.engine.info.block_size
    num_prompts = total_blocks // 8
    own.release(own.prefill((0,) * (8 * block_size)).kv_cache)
    assert _metrics(own).cached_blocks == 8
    for token in range(1, num_prompts + 1):
        own.prefill((token,) * (8 * block_size))
    metrics = _metrics(own)
    assert (metrics.used_blocks, metrics.num_exhausted) == (8 * num_prompts, 0)
    assert metrics.num_prefix_evictions == 8 - (total_blocks - 8 * num_prompts)
    with refused() as refusals:
        own.prefill((255,) * (8 * block_size))
    assert refusals[0].reason == "KV_BLOCKS_EXHAUSTED"
    assert _metrics(own).num_exhausted == 1


def test_verifies_and_generates_are_counted(own: RunningServer) -> None:
    """Drafts brought, drafts accepted, and all tokens that decoding appended."""
    prompt = (1, 2, 3)
    plain = own.prefill(prompt)
    tokens = [plain.outputs.tokens[0]]
    handle = plain.kv_cache
    for _ in range(3):
        output = own.decode(handle, tokens[-1])
        handle = output.kv_cache
        tokens.append(output.outputs.tokens[0])
    before = _status(own)
    assert (before.num_decodes, before.num_decode_tokens, before.num_verifies) == (3, 3, 0)
    wrong = (tokens[2] + 1) % 256
    message = executor_pb2.VerifyInput(
        kv_cache=own.prefill(prompt).kv_cache,
        input_ids=tokens[:1],
        draft_ids=[tokens[1], wrong, 5],
        logits_policy=GREEDY,
        acceptance=executor_pb2.ACCEPTANCE_RULE_EXACT,
    )
    verified = own.stub.ForwardVerify(executor_pb2.ForwardVerifyRequest(input=message), timeout=20).output
    assert (verified.accepted_count, verified.next_token) == (1, tokens[2])
    status = _status(own)
    assert (status.num_verifies, status.num_draft_tokens, status.num_accepted_tokens) == (1, 3, 1)
    assert status.num_decode_tokens == 3 + 2
    request = executor_pb2.GenerateRequest(input_ids=prompt, max_tokens=2, ignore_eos=True, logits_policy=GREEDY)
    assert len(list(own.stub.Generate(request, timeout=20))) >= 1
    assert (_status(own).num_generates, _status(own).active_streams) == (1, 0)


def test_a_stream_that_nobody_reads_is_under_way(own: RunningServer) -> None:
    """Until its caller goes away."""
    call = own.stub.Generate(executor_pb2.GenerateRequest(input_ids=[1], logits_policy=GREEDY), timeout=20)
    next(iter(call))
    assert _status(own).active_streams == 1
    call.cancel()


def test_a_registered_mask_stands_for_its_tokens(own: RunningServer) -> None:
    """In any policy, by 16 opaque bytes; it is counted, registered twice it is the same."""
    first, second = _register(own, 65, 66)
    assert len(first) == 16
    assert _register(own, 65) == [first]
    assert (_chosen(own, first), _chosen(own, second)) == ([65], [66])
    metrics = _metrics(own)
    assert (metrics.token_masks, metrics.token_mask_bytes) == (2, 2 * COUNTED_BYTES)


def test_masks_beyond_the_quota_replace_those_used_least_recently(own: RunningServer) -> None:
    """MASK_UNKNOWN for what gave way; what cannot fit by itself is refused with the numbers."""
    first, second, third = _register(own, 1, 2, 3)
    _chosen(own, first)
    _register(own, 4)
    assert (_chosen(own, first), _chosen(own, third)) == ([1], [3])
    with refused() as refusals:
        _chosen(own, second)
    assert refusals[0].reason == "MASK_UNKNOWN"
    assert refusals[0].metadata["fingerprint"] == second.hex()
    with refused() as refusals:
        _register(own, 5, 6, 7, 8)
    assert refusals[0].reason == "QUOTA_MASK_BYTES"
    assert refusals[0].metadata["limit"] == str(QUOTA_MASKS * COUNTED_BYTES)
    assert refusals[0].metadata["needed"] == str(4 * COUNTED_BYTES)
    assert _metrics(own).token_masks == QUOTA_MASKS
    quotas = own.stub.GetCapabilities(executor_pb2.GetCapabilitiesRequest()).capabilities.caller.quotas
    assert quotas.mask_bytes == QUOTA_MASKS * COUNTED_BYTES
