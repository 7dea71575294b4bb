"""ModelExecutorService through a real server: appends, caches, leases, what the server says about itself."""

from __future__ import annotations

import numpy as np
import pytest

from ferrule.v1 import cache_pb2, executor_pb2, info_pb2, policy_pb2, types_pb2
from tests.api.harness import EPOCH, FULL, INSTANCE, PROMPT, RunningServer


def logits_of(outputs: policy_pb2.Outputs) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """Return the float32 logits of a reply in their shape."""
    tensor = outputs.logits
    assert tensor.dtype == types_pb2.DATA_TYPE_FLOAT32
    return np.frombuffer(tensor.data, "<f4").reshape(tuple(tensor.shape)).astype(np.float32)


def test_status_counts_what_happened(server: RunningServer) -> None:
    """GetStatus is measured: each number moves with what was done."""
    before = server.stub.GetStatus(executor_pb2.GetStatusRequest()).status
    handle = server.prefill(cache=executor_pb2.CacheOptions(skip_prefix_reuse=True)).kv_cache
    server.decode(handle, 7)
    after = server.stub.GetStatus(executor_pb2.GetStatusRequest()).status
    assert after.state == info_pb2.EXECUTOR_STATE_READY
    assert after.is_ready
    assert after.load_progress == 1.0
    assert (after.instance, after.epoch, after.server_version) == (INSTANCE, EPOCH, "0.0.0")
    assert after.num_prefills == before.num_prefills + 1
    assert after.num_prefill_tokens == before.num_prefill_tokens + len(PROMPT)
    assert after.num_decodes == before.num_decodes + 1
    assert after.num_steps >= before.num_steps + 2  # more where the prompt is cut, since others decoded just now
    assert after.live_sequences == before.live_sequences + 1
    assert after.free_blocks == server.engine.info.num_blocks - 1 - 2
    assert after.current_batch_size == 1
    assert after.last_step_time.ToNanoseconds() > before.start_time.ToNanoseconds()
    assert after.avg_prefill_ns > 0
    assert after.avg_decode_ns > 0
    assert after.memory.host_peak_bytes >= after.memory.host_resident_bytes > 1 << 20


def test_an_unset_policy_returns_nothing_and_appends(server: RunningServer) -> None:
    """The handle alone comes back; a query that asks for nothing runs no row."""
    message = executor_pb2.PrefillInput(input_ids=PROMPT)
    output = server.stub.Prefill(executor_pb2.PrefillRequest(input=message), timeout=20).output
    assert output.kv_cache.length == len(PROMPT)
    assert not output.HasField("outputs")
    steps = server.engine.counters.steps
    query = executor_pb2.DecodeRequest(input=executor_pb2.DecodeInput(kv_cache=output.kv_cache))
    answer = server.stub.Decode(query, timeout=20).output
    assert (answer.kv_cache, answer.HasField("outputs")) == (output.kv_cache, False)
    assert server.engine.counters.steps == steps


def test_all_positions_give_a_row_per_token_with_targets(server: RunningServer) -> None:
    """LOGITS_POSITIONS_ALL scores a prompt: one row per token, one target less."""
    policy = policy_pb2.LogitsReturnPolicy(full_logits=policy_pb2.FullLogits(), target_logprobs=True)
    output = server.prefill((3, 5, 3, 9), policy, logits_positions=types_pb2.LOGITS_POSITIONS_ALL)
    logits = logits_of(output.outputs)
    assert logits.shape == (4, 256)
    assert output.outputs.num_rows == 4
    expected = [row[target] - np.log(np.exp(row).sum()) for row, target in zip(logits, (5, 3, 9), strict=False)]
    assert output.outputs.target_logprobs == pytest.approx(expected, abs=1e-5)


def test_forks_do_not_see_each_other(server: RunningServer) -> None:
    """Branches share blocks and diverge by copy-on-write; releasing the parent does not touch them."""
    parent = server.prefill()
    branches = server.fork(parent.kv_cache, 3)
    assert len({branch.cache_id for branch in branches}) == 3
    assert all(branch.lineage == parent.kv_cache.lineage for branch in branches)
    tips = [server.decode(branch, token).kv_cache for branch, token in zip(branches, (30, 31, 32), strict=True)]
    server.release(parent.kv_cache)
    for tip, token in zip(tips, (30, 31, 32), strict=True):
        assert list(server.info(tip, include_token_ids=True).token_ids) == [*PROMPT, token]
        alone = server.prefill((*PROMPT, token), FULL)
        query = server.decode(tip, policy=FULL)
        assert query.outputs.logits == alone.outputs.logits
        assert query.kv_cache.lineage == alone.kv_cache.lineage


def test_keep_alive_answers_each_handle(server: RunningServer) -> None:
    """Leases are clamped to the limits; what is unknown is an error of its own entry."""
    handle = server.prefill().kv_cache
    made_up = types_pb2.KvCacheHandle(cache_id=f"{INSTANCE}.{EPOCH}.AAAAAAAAAAAAAAAAAAAAAA")
    request = cache_pb2.KeepAliveRequest(kv_caches=[handle, made_up])
    request.ttl.FromSeconds(10**6)
    response = server.stub.KeepAlive(request)
    assert response.results[0].lease.ttl.seconds == 3600
    assert response.results[1].error.code == 5
    request.ttl.FromSeconds(1)
    assert server.stub.KeepAlive(request).results[0].lease.ttl.seconds == 5
    request.ttl.FromSeconds(0)  # as unset: the lease as it is
    assert server.stub.KeepAlive(request).results[0].lease.ttl.seconds == 5


def test_list_caches_pages_through_all_sequences_once(server: RunningServer) -> None:
    """Pages come in order of handle_id, carry no secret, and end with an empty token."""
    made = {server.info(server.prefill((1, 2, 3)).kv_cache).summary.handle_id for _ in range(7)}
    seen: list[str] = []
    token = ""
    while True:
        page = server.stub.ListCaches(cache_pb2.ListCachesRequest(page_size=3, page_token=token))
        assert len(page.caches) <= 3
        assert b"test.feed" not in page.SerializeToString()
        seen += [cache.handle_id for cache in page.caches]
        token = page.next_page_token
        if not token:
            break
    assert seen == sorted(seen)
    assert set(seen) == made
    assert page.caches[0].length == 3
    assert page.caches[0].num_blocks == 1
