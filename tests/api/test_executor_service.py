"""ModelExecutorService through a real server: appends, caches, leases, what the server says about itself."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from ferrule.v1 import cache_pb2, executor_pb2, info_pb2, policy_pb2, types_pb2
from tests.api.harness import EPOCH, FULL, GREEDY, INSTANCE, NOTHING, PROMPT, RunningServer, refused, wait_until
from tests.fakes import FakeExecutor, fake_next_token


def logits_of(outputs: policy_pb2.Outputs) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """Return the float32 logits of a reply in their shape."""
    tensor = outputs.logits
    assert tensor.dtype == types_pb2.DATA_TYPE_FLOAT32
    return np.frombuffer(tensor.data, "<f4").reshape(tuple(tensor.shape)).astype(np.float32)


def test_model_info_describes_the_executor(server: RunningServer) -> None:
    """GetModelInfo mirrors what is loaded."""
    info = server.stub.GetModelInfo(executor_pb2.GetModelInfoRequest()).info
    assert (info.model_id, info.vocab_size, info.max_sequence_length) == ("paged-reference", 256, 512)
    assert (info.dtype, info.kv_dtype) == (types_pb2.DATA_TYPE_FLOAT32, types_pb2.DATA_TYPE_FLOAT32)
    assert info.device_type == types_pb2.DEVICE_TYPE_CPU
    assert info.device_name
    assert len(info.fingerprint) == 32


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


def test_prefill_returns_a_handle_and_the_greedy_token(server: RunningServer) -> None:
    """The reference model repeats the last token it saw; the handle covers the prompt."""
    output = server.prefill(request_id="mine", cache=executor_pb2.CacheOptions(skip_prefix_reuse=True))
    assert output.request_id == "mine"
    assert output.kv_cache.length == len(PROMPT)
    assert output.kv_cache.cache_id.startswith(f"{INSTANCE}.{EPOCH}.")
    assert len(output.kv_cache.lineage) == 16
    assert output.outputs.num_rows == 1
    assert len(output.outputs.tokens) == 1
    assert output.timing.run_ns > 0
    assert output.timing.step_rows >= len(PROMPT)
    assert not output.replayed


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


def test_full_logits_are_those_that_the_greedy_token_is_chosen_by(server: RunningServer) -> None:
    """Raw, in float32 if no type is named; the greedy token is their argmax."""
    handle = server.prefill().kv_cache
    logits = logits_of(server.decode(handle, policy=FULL).outputs)
    assert logits.shape == (1, 256)
    assert logits.dtype == np.float32
    assert int(logits[0].argmax()) == server.decode(handle).outputs.tokens[0]


def test_all_positions_give_a_row_per_token_with_targets(server: RunningServer) -> None:
    """LOGITS_POSITIONS_ALL scores a prompt: one row per token, one target less."""
    policy = policy_pb2.LogitsReturnPolicy(full_logits=policy_pb2.FullLogits(), target_logprobs=True)
    output = server.prefill((3, 5, 3, 9), policy, logits_positions=types_pb2.LOGITS_POSITIONS_ALL)
    logits = logits_of(output.outputs)
    assert logits.shape == (4, 256)
    assert output.outputs.num_rows == 4
    expected = [row[target] - np.log(np.exp(row).sum()) for row, target in zip(logits, (5, 3, 9), strict=False)]
    assert output.outputs.target_logprobs == pytest.approx(expected, abs=1e-5)


def test_sampling_answers_the_seed_and_logprobs(server: RunningServer) -> None:
    """A seed given is used; none given is drawn and returned, and drawing again with it gives the same token."""
    policy = policy_pb2.LogitsReturnPolicy(sample=policy_pb2.Sample(temperature=2.0), logprobs=True, top_logprobs=3)
    first = server.prefill(policy=policy)
    assert 0 <= first.outputs.seed < 2**52
    assert first.outputs.HasField("seed")
    assert len(first.outputs.top_token_ids) == len(first.outputs.top_logprobs) == 3
    assert len(first.outputs.model_logprobs) == len(first.outputs.sampled_logprobs) == 1
    policy.sample.seed = first.outputs.seed
    again = server.decode(first.kv_cache, policy=policy)
    assert again.outputs.tokens == first.outputs.tokens
    assert again.outputs.seed == first.outputs.seed


def test_temperature_zero_is_greedy_and_has_no_seed(server: RunningServer) -> None:
    """Nothing is drawn, so no seed is returned."""
    policy = policy_pb2.LogitsReturnPolicy(sample=policy_pb2.Sample(temperature=0.0))
    output = server.prefill(policy=policy)
    assert output.outputs.tokens == server.decode(output.kv_cache).outputs.tokens
    assert not output.outputs.HasField("seed")


def test_policy_none_appends_and_returns_no_rows(server: RunningServer) -> None:
    """Only the handle comes back."""
    output = server.prefill(policy=NOTHING)
    assert output.kv_cache.length == len(PROMPT)
    assert not output.HasField("outputs")


def test_decode_moves_the_handle_by_its_tokens(server: RunningServer) -> None:
    """One token, then several at once."""
    handle = server.prefill().kv_cache
    one = server.decode(handle, 7)
    many = server.decode(one.kv_cache, 8, 9, 10)
    assert one.kv_cache.length == len(PROMPT) + 1
    assert many.kv_cache.length == len(PROMPT) + 4
    assert many.kv_cache.cache_id == handle.cache_id
    assert many.kv_cache.lineage != one.kv_cache.lineage


def test_query_changes_nothing(server: RunningServer) -> None:
    """An input without tokens runs the last row again and returns the same handle."""
    first = server.prefill()
    query = server.decode(first.kv_cache)
    assert query.kv_cache == first.kv_cache
    assert query.outputs.tokens == first.outputs.tokens
    assert not query.replayed
    again = server.prefill((), kv_cache=first.kv_cache)
    assert again.kv_cache == first.kv_cache


def test_a_repeated_decode_is_a_replay(server: RunningServer) -> None:
    """The retry after a lost reply gets the same answer and appends nothing."""
    handle = server.prefill().kv_cache
    first = server.decode(handle, 7)
    again = server.decode(handle, 7)
    assert again.replayed
    assert not again.recomputed
    assert again.kv_cache == first.kv_cache
    assert again.outputs == first.outputs
    assert again.timing == types_pb2.Timing()
    assert server.info(handle).kv_cache == first.kv_cache


def test_a_replay_under_another_policy_is_recomputed(server: RunningServer) -> None:
    """The record has no logits, so the row is run again, and says so."""
    handle = server.prefill().kv_cache
    server.decode(handle, 7)
    again = server.decode(handle, 7, policy=FULL)
    assert again.replayed
    assert again.recomputed
    assert len(again.outputs.logits.data) == 4 * 256


def test_on_stale_fork_branches_at_the_handle(server: RunningServer) -> None:
    """FORK gives a new sequence that holds the prompt and the other token."""
    handle = server.prefill().kv_cache
    server.decode(handle, 7)
    branch = server.decode(handle, 8, on_stale=types_pb2.STALE_POLICY_FORK)
    assert branch.kv_cache.cache_id != handle.cache_id
    assert list(server.info(branch.kv_cache, include_token_ids=True).token_ids) == [*PROMPT, 8]
    assert list(server.info(handle, include_token_ids=True).token_ids) == [*PROMPT, 7]


def test_on_stale_rewind_drops_the_tail(server: RunningServer) -> None:
    """REWIND rolls the sequence back to the handle and appends there."""
    handle = server.prefill().kv_cache
    newest = server.decode(server.decode(handle, 7).kv_cache, 9).kv_cache
    rewound = server.decode(handle, 8, on_stale=types_pb2.STALE_POLICY_REWIND)
    assert rewound.kv_cache.cache_id == handle.cache_id
    assert list(server.info(handle, include_token_ids=True).token_ids) == [*PROMPT, 8]
    with refused() as refusals:
        server.decode(newest, 1)
    assert refusals[0].reason == "HANDLE_STALE"


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


def test_fork_can_branch_at_a_shorter_length(server: RunningServer) -> None:
    """``length`` names the branch point."""
    parent = server.prefill().kv_cache
    request = cache_pb2.ForkCacheRequest(kv_cache=parent, length=5)
    branch = server.stub.ForkCache(request).kv_caches[0]
    assert branch.length == 5
    assert list(server.info(branch, include_token_ids=True).token_ids) == list(PROMPT[:5])


def test_truncate_rolls_back_and_frees_blocks(server: RunningServer) -> None:
    """Decoding again after a truncate gives what a prefill of the kept tokens gives; asking twice is no error."""
    handle = server.prefill(tuple(range(40))).kv_cache
    response = server.truncate(handle, 10)
    assert response.freed_blocks == 2
    assert response.kv_cache.length == 10
    assert server.truncate(handle, 10).kv_cache == response.kv_cache
    assert server.decode(response.kv_cache, 99).kv_cache.length == 11
    with refused() as refusals:
        server.decode(handle, 1)
    assert refusals[0].reason == "HANDLE_STALE"


def test_release_is_idempotent_and_says_what_it_freed(server: RunningServer) -> None:
    """Twice released, or never made: released is false, and it is no error."""
    handle = server.prefill().kv_cache
    made_up = types_pb2.KvCacheHandle(cache_id="nobody", length=1, lineage=bytes(16))
    first = server.release(handle, made_up)
    assert [result.released for result in first.results] == [True, False]
    assert first.freed_blocks == 2
    assert not server.release(handle).results[0].released
    assert server.release().freed_blocks == 0


def test_cache_info_shows_shared_blocks(server: RunningServer) -> None:
    """Equal block ids in two sequences are one shared block."""
    parent = server.prefill().kv_cache
    branch = server.fork(parent)[0]
    tip = server.decode(branch, 99).kv_cache
    info = server.info(parent, include_blocks=True)
    other = server.info(tip, include_blocks=True)
    assert info.summary.num_blocks == len(info.block_ids) == 2
    assert info.block_ids[0] == other.block_ids[0]
    assert info.block_ids[1] != other.block_ids[1]
    assert list(info.block_ref_counts) == [2, 1]
    assert info.summary.num_shared_blocks == 1
    assert info.summary.kv_bytes == 2 * server.engine.info.bytes_per_block
    assert not info.token_ids
    assert info.summary.lease.ttl.seconds == 60
    assert 59 < info.summary.lease.expires_in.ToNanoseconds() * 1e-9 <= 60
    assert info.summary.create_time.seconds > 0


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


def test_lease_of_a_prefill_runs_out_and_frees_its_blocks() -> None:
    """Nobody renews: the owner hears HANDLE_EXPIRED and the pool is whole."""
    with RunningServer() as server:
        output = server.prefill(cache=_ttl(30))
        server.clock.offset_s += 20
        server.decode(output.kv_cache, 7)
        server.clock.offset_s += 20
        server.decode(output.kv_cache, 7)
        server.clock.offset_s += 31
        with refused() as refusals:
            server.decode(output.kv_cache, 7)
        assert refusals[0].reason == "HANDLE_EXPIRED"
        wait_until(lambda: server.free_blocks == server.engine.info.num_blocks - 1)


def _ttl(seconds: int) -> executor_pb2.CacheOptions:
    options = executor_pb2.CacheOptions()
    options.ttl.FromSeconds(seconds)
    return options


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


def test_trivial_masks_and_positions_are_accepted(server: RunningServer) -> None:
    """All ones, and consecutive positions from the handle's length on."""
    handle = server.prefill((5, 6), attention_mask=[1, 1], position_ids=[0, 1]).kv_cache
    output = server.prefill((7,), kv_cache=handle, attention_mask=[1], position_ids=[2])
    assert output.kv_cache.length == 3


def test_logits_come_in_the_type_asked_for(server: RunningServer) -> None:
    """bfloat16 is the rounded upper half, float16 the nearest value."""
    exact = server.prefill(policy=FULL)
    reference = logits_of(exact.outputs)[0]
    for dtype, size in ((types_pb2.DATA_TYPE_BFLOAT16, 2), (types_pb2.DATA_TYPE_FLOAT16, 2)):
        policy = policy_pb2.LogitsReturnPolicy(full_logits=policy_pb2.FullLogits(dtype=dtype))
        tensor = server.decode(exact.kv_cache, policy=policy).outputs.logits
        assert tensor.dtype == dtype
        assert list(tensor.shape) == [1, 256]
        assert len(tensor.data) == 256 * size
        if dtype == types_pb2.DATA_TYPE_FLOAT16:
            values = np.frombuffer(tensor.data, "<f2").astype(np.float32)
        else:
            values = (np.frombuffer(tensor.data, "<u2").astype(np.uint32) << 16).view(np.float32)
        np.testing.assert_allclose(values, reference, rtol=2**-8)


def test_a_client_that_goes_away_before_its_step_changes_nothing() -> None:
    """A call cancelled while another step runs is never appended, and its blocks come back."""
    executor = FakeExecutor()
    with RunningServer(executor) as server:
        handle = server.prefill((1, 2, 3)).kv_cache
        executor.gate = threading.Event()
        busy = server.stub.Prefill.future(
            executor_pb2.PrefillRequest(input=executor_pb2.PrefillInput(input_ids=[4], logits_policy=GREEDY))
        )
        assert executor.is_waiting.wait(10)
        gone = server.stub.Decode.future(
            executor_pb2.DecodeRequest(
                input=executor_pb2.DecodeInput(input_ids=[5], kv_cache=handle, logits_policy=GREEDY)
            )
        )
        wait_until(lambda: server.state.num_active == 2)
        gone.cancel()
        wait_until(lambda: server.state.num_active == 1)
        executor.gate.set()
        assert busy.result(timeout=10).output.kv_cache.length == 1
        assert server.info(handle).kv_cache == handle
        answer = server.decode(handle, 6)
        assert not answer.replayed
        assert answer.outputs.tokens[0] == fake_next_token((1, 2, 3, 6), 32)
