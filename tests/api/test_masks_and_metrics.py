"""RegisterTokenMask and GetCacheMetrics through a real server: masks by name within a quota, counters that are true."""

from __future__ import annotations

from collections.abc import Sequence

import grpc

from ferrule.v1 import cache_pb2, executor_pb2, info_pb2, policy_pb2, types_pb2
from ferrule_server.api.security.auth import OpenAccess
from ferrule_server.engine.masks import OVERHEAD_BYTES
from ferrule_server.quotas import QuotaLimits
from tests.api.harness import GREEDY, PROMPT, RunningServer, refused, wait_until
from tests.fakes import FakeExecutor


def _bits(*token_ids: int) -> bytes:
    """Return the packed set of some of 256 tokens."""
    return sum(1 << token for token in token_ids).to_bytes(32, "little")


def _register(server: RunningServer, *masks: bytes) -> Sequence[bytes]:
    return server.stub.RegisterTokenMask(cache_pb2.RegisterTokenMaskRequest(masks=masks), timeout=20).fingerprints


def _only(fingerprint: bytes) -> policy_pb2.LogitsReturnPolicy:
    mask = policy_pb2.TokenMask(fingerprint=fingerprint)
    return policy_pb2.LogitsReturnPolicy(greedy_argmax=policy_pb2.GreedyArgmax(token_mask=mask))


def _metrics(server: RunningServer) -> cache_pb2.CacheMetrics:
    return server.stub.GetCacheMetrics(cache_pb2.GetCacheMetricsRequest(), timeout=20).metrics


# ---- masks ----------------------------------------------------------------------------------------------------------


def test_a_mask_is_used_by_the_name_of_its_content(server: RunningServer) -> None:
    """The same content has the same name, in request order, however often it is registered."""
    names = _register(server, _bits(7), _bits(9), _bits(7))
    assert [len(name) for name in names] == [16] * 3
    assert names[0] == names[2] != names[1]
    assert _register(server, _bits(9)) == [names[1]]
    assert [server.prefill(policy=_only(name)).outputs.tokens[0] for name in names] == [7, 9, 7]


def test_the_least_recently_used_mask_goes_first() -> None:
    """Beyond the quota; its use then says so, and registering it again is all there is to do."""
    access = OpenAccess(is_admin=True, quotas=QuotaLimits(mask_bytes=2 * (32 + OVERHEAD_BYTES)))
    with RunningServer(access=access) as server:
        first, second = _register(server, _bits(1), _bits(2))
        server.prefill(policy=_only(first))
        (third,) = _register(server, _bits(3))
        with refused() as refusals:
            server.prefill(policy=_only(second))
        assert (refusals[0].code, refusals[0].reason) == (grpc.StatusCode.NOT_FOUND, "MASK_UNKNOWN")
        assert [server.prefill(policy=_only(name)).outputs.tokens[0] for name in (first, third)] == [1, 3]
        assert (_metrics(server).token_masks, _metrics(server).token_mask_bytes) == (2, 2 * (32 + OVERHEAD_BYTES))
        with refused() as refusals:
            _register(server, _bits(4), _bits(5), _bits(6))
        assert (refusals[0].code, refusals[0].reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUOTA_MASK_BYTES")
        assert refusals[0].retry_after_s is None
        assert [server.prefill(policy=_only(name)).outputs.tokens[0] for name in (first, third)] == [1, 3]


# ---- metrics --------------------------------------------------------------------------------------------------------


def test_counters_follow_what_happened() -> None:
    """Every one of them, each moved by what it counts."""
    with RunningServer(FakeExecutor(num_blocks=17, block_size=4, max_context=64)) as server:
        now = _metrics(server)
        assert now.empty_blocks == 16
        assert len(now.ListFields()) == 1  # all others are 0
        handle = server.prefill(range(10)).kv_cache
        branch = server.fork(handle)[0]
        now = _metrics(server)
        assert (now.num_created, now.num_forks) == (2, 1)
        assert (now.used_blocks, now.shared_blocks, now.num_block_copies) == (3, 3, 0)
        server.decode(branch, 7)
        server.decode(branch, 7)
        server.truncate(handle, 9)
        with refused():
            server.decode(branch, 8)
        now = _metrics(server)
        assert (now.num_block_copies, now.num_replays, now.num_stale, now.num_truncates) == (1, 1, 1, 1)
        server.decode(branch, 8, on_stale=types_pb2.STALE_POLICY_REWIND)
        assert _metrics(server).num_truncates == 2
        with refused():
            server.prefill((5,) * 52)
        assert _metrics(server).num_exhausted == 1
        server.release(handle)
        server.clock.offset_s += 61
        wait_until(lambda: _metrics(server).num_expired == 1)
        now = _metrics(server)
        assert (now.num_released, now.num_expired, now.tombstones) == (1, 1, 1)
        assert now.used_blocks == 0
        assert now.empty_blocks + now.cached_blocks == 16
        assert now.cached_blocks == 2


def test_prefix_hits_are_counted_in_tokens() -> None:
    """Looked up, found, and pushed out when the pool needs the blocks."""
    with RunningServer(FakeExecutor(num_blocks=9, block_size=4, max_context=64)) as server:
        server.release(server.prefill(range(10)).kv_cache)
        again = server.prefill(range(10))
        assert again.cached_tokens == 8
        now = _metrics(server)
        assert (now.num_prefix_lookup_tokens, now.num_prefix_hit_tokens, now.num_prefix_evictions) == (20, 8, 0)
        server.release(again.kv_cache)
        server.prefill(range(20, 31), cache={"reserve_length": 32})
        assert _metrics(server).num_prefix_evictions == 2


def test_every_block_is_empty_cached_or_used(server: RunningServer) -> None:
    """The shared server's pool is whole: empty, cached and used blocks are all there are."""
    server.prefill(PROMPT)
    now = _metrics(server)
    assert now.empty_blocks + now.cached_blocks + now.used_blocks == server.engine.info.num_blocks - 1


def _status(server: RunningServer) -> info_pb2.ExecutorStatus:
    return server.stub.GetStatus(executor_pb2.GetStatusRequest(), timeout=20).status


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
