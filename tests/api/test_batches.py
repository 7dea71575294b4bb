"""BatchPrefill, BatchDecode and UnifiedDecode: as each item alone, together in one step, failing alone."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import grpc
import pytest

from ferrule.v1 import executor_pb2, policy_pb2, types_pb2
from ferrule_server.api.limits import ApiLimits
from ferrule_server.api.security.auth import OpenAccess
from ferrule_server.engine.settings import EngineSettings
from ferrule_server.quotas import QuotaLimits
from tests.api.harness import (
    EPOCH,
    FULL,
    GREEDY,
    INSTANCE,
    NOTHING,
    PROMPT,
    Refusal,
    RunningServer,
    read_status,
    refused,
    wait_until,
)
from tests.fakes import FakeExecutor

SAMPLE = policy_pb2.LogitsReturnPolicy(sample=policy_pb2.Sample(temperature=0.7, seed=5), logprobs=True)
POLICIES = [FULL, GREEDY, SAMPLE, NOTHING]


def prompt_of(*input_ids: int, policy: policy_pb2.LogitsReturnPolicy = GREEDY, **fields: Any) -> Any:
    """Return a PrefillInput."""
    return executor_pb2.PrefillInput(input_ids=input_ids, logits_policy=policy, **fields)


def decode_of(handle: types_pb2.KvCacheHandle, *input_ids: int, **fields: Any) -> Any:
    """Return a DecodeInput."""
    policy = fields.pop("policy", GREEDY)
    return executor_pb2.DecodeInput(kv_cache=handle, input_ids=input_ids, logits_policy=policy, **fields)


def piece_of(*q_tokens: int, policy: policy_pb2.LogitsReturnPolicy = GREEDY, **fields: Any) -> Any:
    """Return a UnifiedBatchItem."""
    return executor_pb2.UnifiedBatchItem(q_tokens=q_tokens, logits_policy=policy, **fields)


def batch_prefill(server: RunningServer, *inputs: Any) -> executor_pb2.BatchPrefillResponse:
    """Call BatchPrefill."""
    return server.stub.BatchPrefill(executor_pb2.BatchPrefillRequest(inputs=inputs), timeout=20)


def batch_decode(server: RunningServer, *inputs: Any) -> executor_pb2.BatchDecodeResponse:
    """Call BatchDecode."""
    return server.stub.BatchDecode(executor_pb2.BatchDecodeRequest(inputs=inputs), timeout=20)


def unified(server: RunningServer, *items: Any) -> executor_pb2.UnifiedDecodeResponse:
    """Call UnifiedDecode."""
    batch = executor_pb2.UnifiedBatch(items=items)
    return server.stub.UnifiedDecode(executor_pb2.UnifiedDecodeRequest(batch=batch), timeout=20)


def _refusals(response: Any) -> dict[int, Refusal]:
    """Return the errors of a batch's items by place; places are in order and every result is set."""
    assert all(result.WhichOneof("result") for result in response.results)
    failed = ((place, result.error) for place, result in enumerate(response.results) if result.HasField("error"))
    return {place: read_status(error) for place, error in failed}


# ---- as each alone --------------------------------------------------------------------------------------------------


def test_prompts_of_a_batch_answer_as_each_alone(server: RunningServer) -> None:
    """Any mix of policies and lengths: the same rows, the same lineage, and one step for all."""
    prompts = [tuple(range(i, 2 * i + 3)) for i in range(1, 9)]
    alone = [server.prefill(prompt, POLICIES[i % 4]) for i, prompt in enumerate(prompts)]
    num_steps = server.engine.counters.steps
    response = batch_prefill(
        server, *(prompt_of(*prompt, policy=POLICIES[i % 4], request_id=f"p{i}") for i, prompt in enumerate(prompts))
    )
    assert _refusals(response) == {}
    assert server.engine.counters.steps == num_steps + 1
    for i, (result, expected) in enumerate(zip(response.results, alone, strict=True)):
        assert result.output.request_id == f"p{i}"
        assert result.output.outputs == expected.outputs
        assert result.output.kv_cache.lineage == expected.kv_cache.lineage
        assert result.output.kv_cache.cache_id != expected.kv_cache.cache_id
        assert result.output.ttl == expected.ttl
        assert not result.output.replayed
        assert result.output.timing.run_ns > 0
        assert result.output.timing.step_rows >= sum(map(len, prompts)) - sum(
            each.output.cached_tokens for each in response.results
        )
    assert response.free_blocks == server.free_blocks


def test_decodes_of_a_batch_answer_as_each_alone(server: RunningServer) -> None:
    """Decodes, several tokens at once and queries, in one step."""
    handles = [server.prefill((*PROMPT, i), NOTHING).kv_cache for i in range(8)]
    twins = [server.fork(handle)[0] for handle in handles]
    inputs = [(7,), (8, 9), (), (3,)] * 2
    num_steps = server.engine.counters.steps
    response = batch_decode(server, *(decode_of(h, *inputs[i], policy=POLICIES[i % 3]) for i, h in enumerate(handles)))
    assert _refusals(response) == {}
    assert server.engine.counters.steps == num_steps + 1
    for i, (result, twin) in enumerate(zip(response.results, twins, strict=True)):
        expected = server.decode(twin, *inputs[i], policy=POLICIES[i % 3])
        assert result.output.outputs == expected.outputs
        assert result.output.kv_cache.cache_id == handles[i].cache_id
        assert (result.output.kv_cache.length, result.output.kv_cache.lineage) == (
            expected.kv_cache.length,
            expected.kv_cache.lineage,
        )
        assert result.output.timing.step_rows == sum(len(one) or 1 for one in inputs)


def test_pieces_of_a_unified_batch_answer_as_each_alone(server: RunningServer) -> None:
    """A new sequence, the next chunk of a prompt, a decode, all positions: one step, whatever the mix."""
    started = server.prefill(PROMPT[:10], NOTHING).kv_cache
    decoding = server.prefill((*PROMPT, 3), NOTHING).kv_cache
    twin = server.fork(decoding)[0]
    num_steps = server.engine.counters.steps
    response = unified(
        server,
        piece_of(*PROMPT, 77, policy=FULL, cache=executor_pb2.CacheOptions(skip_prefix_reuse=True)),
        piece_of(*PROMPT[10:], kv_cache=started, pos_offset=10, policy=FULL),
        piece_of(9, kv_cache=decoding, pos_offset=decoding.length),
        piece_of(5, 6, 7, logits_positions=types_pb2.LOGITS_POSITIONS_ALL, policy=FULL, request_id="all"),
    )
    assert _refusals(response) == {}
    assert server.engine.counters.steps == num_steps + 1
    assert response.free_blocks == server.free_blocks
    new, chunk, decoded, rows = (result.output for result in response.results)
    assert new.outputs == server.prefill((*PROMPT, 77), FULL).outputs
    whole = server.prefill(PROMPT, FULL)
    assert chunk.outputs == whole.outputs
    assert (chunk.kv_cache.cache_id, chunk.kv_cache.lineage) == (started.cache_id, whole.kv_cache.lineage)
    assert decoded.outputs == server.decode(twin, 9).outputs
    assert rows.outputs == server.prefill((5, 6, 7), FULL, logits_positions=types_pb2.LOGITS_POSITIONS_ALL).outputs
    assert rows.request_id == "all"


def test_a_chunk_that_is_not_final_computes_no_row(server: RunningServer) -> None:
    """Chunk by chunk the prompt is the one run whole; only the last one answers."""
    whole = server.prefill(PROMPT, FULL)
    handle, outputs = None, []
    for start in range(0, len(PROMPT), 5):
        tokens = PROMPT[start : start + 5]
        more: dict[str, Any] = {} if handle is None else {"kv_cache": handle}
        piece = piece_of(*tokens, pos_offset=start, is_final_chunk=start + 5 >= len(PROMPT), policy=FULL, **more)
        output = unified(server, piece).results[0].output
        handle = output.kv_cache
        outputs.append(output)
    assert [output.HasField("outputs") for output in outputs] == [False] * 3 + [True]
    assert outputs[-1].outputs == whole.outputs
    assert handle is not None
    assert handle.lineage == whole.kv_cache.lineage


# ---- failing --------------------------------------------------------------------------------------------------------


def _unknown(cache_id: str = f"{INSTANCE}.{EPOCH}.{'A' * 22}") -> types_pb2.KvCacheHandle:
    return types_pb2.KvCacheHandle(cache_id=cache_id, length=3, lineage=bytes(16))


def test_items_fail_alone_with_the_path_of_their_field(server: RunningServer) -> None:
    """Each in its own result, as the unary call would; what is good beside them runs."""
    handle, moved = server.prefill().kv_cache, server.prefill().kv_cache
    server.decode(moved, 7)
    long = "x" * 129
    response = batch_decode(
        server,
        decode_of(handle, 7),
        decode_of(handle, 300),
        executor_pb2.DecodeInput(input_ids=[1]),
        decode_of(moved, 9),
        decode_of(_unknown(), 1),
        decode_of(_unknown(f"{INSTANCE}.0123456789ab.{'A' * 22}"), 1),
        decode_of(_unknown(f"elsewhere.{EPOCH}.{'A' * 22}"), 1),
        decode_of(moved, request_id=long),
        decode_of(server.prefill().kv_cache, *([1] * 513)),
    )
    refusals = _refusals(response)
    assert {place: refusal.reason for place, refusal in refusals.items()} == {
        1: "TOKEN_OUT_OF_VOCAB",
        2: "INVALID_FIELD",
        3: "HANDLE_STALE",
        4: "HANDLE_UNKNOWN",
        5: "EPOCH_CHANGED",
        6: "WRONG_INSTANCE",
        7: "INVALID_FIELD",
        8: "CONTEXT_EXCEEDED",
    }
    assert refusals[1].fields == ("inputs[1].input_ids[0]",)
    assert refusals[2].fields == ("inputs[2].kv_cache",)
    assert refusals[3].metadata["tip_length"] == str(len(PROMPT) + 1)
    assert refusals[7].fields == ("inputs[7].request_id",)
    assert response.results[0].output.kv_cache.length == len(PROMPT) + 1


def test_what_a_principal_may_not_use_fails_item_by_item() -> None:
    """Sequences, rows waiting and places in the queue, as far as they go; masks and leases that are gone."""
    quotas = QuotaLimits(handles=4, queued_rows=20)
    settings = EngineSettings(max_step_time_s=60.0, max_waiting_jobs=6)
    with RunningServer(access=OpenAccess(is_admin=True, quotas=quotas), settings=settings) as server:
        response = batch_prefill(server, *[prompt_of(1, 2, 3)] * 3, prompt_of(*range(30)), *[prompt_of(4)] * 4)
        refusals = _refusals(response)
        assert {place: refusal.reason for place, refusal in refusals.items()} == {
            3: "QUOTA_QUEUED_ROWS",
            5: "QUOTA_HANDLES",
            6: "QUOTA_HANDLES",
            7: "QUEUE_FULL",
        }
        assert refusals[3].retry_after_s is None  # it can never be had
        assert refusals[7].retry_after_s is not None
        handles = [result.output.kv_cache for result in response.results[:3]]
        server.clock.offset_s += 30
        server.decode(handles[1], 5)
        server.clock.offset_s += 40
        wait_until(lambda: server.engine.snapshot().num_sequences == 1)
        masked = policy_pb2.LogitsReturnPolicy(greedy_argmax={"token_mask": {"fingerprint": bytes(16)}})
        decoded = batch_decode(server, decode_of(handles[0], 6), decode_of(handles[1], 5, policy=masked))
        assert [refusal.reason for refusal in _refusals(decoded).values()] == ["HANDLE_EXPIRED", "MASK_UNKNOWN"]


def test_recomputed_and_cached_tokens_are_told(server: RunningServer) -> None:
    """Of a replay whose values were not kept, and of pieces whose beginning was there."""
    prompt = range(130, 170)
    (first,) = unified(server, piece_of(*prompt)).results
    (again,) = unified(server, piece_of(*prompt)).results
    assert (first.output.cached_tokens, again.output.cached_tokens) == (0, 32)
    handle = again.output.kv_cache
    batch_decode(server, decode_of(handle, 7))
    replay = batch_decode(server, decode_of(handle, 7, policy=FULL)).results[0].output
    assert (replay.replayed, replay.recomputed) == (True, True)
    assert replay.timing.step_rows == 1


def test_the_pool_is_shared_out_in_item_order() -> None:
    """What finds no block fails alone; what is larger than the pool says so."""
    with RunningServer(FakeExecutor(num_blocks=5, block_size=4, max_context=64)) as server:
        response = batch_prefill(
            server, prompt_of(*range(8)), prompt_of(*range(17)), prompt_of(*range(8)), prompt_of(1)
        )
        refusals = _refusals(response)
        assert {place: refusal.reason for place, refusal in refusals.items()} == {
            1: "EXCEEDS_POOL",
            3: "KV_BLOCKS_EXHAUSTED",
        }
        assert refusals[3].retry_after_s is not None
        assert response.free_blocks == 0


def test_pieces_share_one_step_while_others_decode_and_prompts_are_paced() -> None:
    """Three chunks of 60 rows beside a sequence that was decoded just now: the client scheduled them, so they are."""
    with RunningServer(settings=EngineSettings(max_step_time_s=0.001)) as server:
        handle = server.prefill((1, 2, 3)).kv_cache
        for token in range(1, 5):
            handle = batch_decode(server, decode_of(handle, token)).results[0].output.kv_cache
        pieces = [[token] * 60 for token in (4, 5, 6)]
        response = unified(server, *(piece_of(*piece) for piece in pieces), piece_of(7, kv_cache=handle))
        assert [result.output.timing.step_rows for result in response.results] == [181] * 4
        num_steps = server.engine.counters.steps
        batch_prefill(server, *(prompt_of(*[token] * 60) for token in (7, 8, 9)))
        assert server.engine.counters.steps > num_steps + 1


def test_a_reply_that_would_be_too_large_is_refused_before_anything_runs() -> None:
    """The whole call, though each item alone would fit."""
    with RunningServer(limits=ApiLimits(max_reply_bytes=8000)) as server:
        handle = server.prefill().kv_cache
        num_steps, num_free = server.engine.counters.steps, server.free_blocks
        for call, field in (
            (lambda: batch_prefill(server, *[prompt_of(1, policy=FULL)] * 9), "inputs[0].logits_policy"),
            (lambda: batch_decode(server, *[decode_of(handle, policy=FULL)] * 9), "inputs[0].logits_policy"),
            (lambda: unified(server, *[piece_of(1, policy=FULL)] * 9), "batch.items[0].logits_policy"),
        ):
            with refused() as refusals:
                call()
            assert (refusals[0].reason, refusals[0].fields) == ("REPLY_TOO_LARGE", (field,))
            assert int(refusals[0].metadata["reply_bytes"]) > 8000
        assert (server.engine.counters.steps, server.free_blocks) == (num_steps, num_free)
        assert len(batch_prefill(server, *[prompt_of(1, policy=FULL)] * 4).results) == 4


# ---- leaving --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leaves_by", ["cancel", "deadline"])
def test_a_caller_who_leaves_takes_back_what_has_no_step_yet(leaves_by: str) -> None:
    """None of the batch has happened; no block is held."""
    executor = FakeExecutor()
    with RunningServer(executor) as server:
        handles = [server.prefill((i, 2, 3)).kv_cache for i in range(3)]
        executor.gate = threading.Event()
        blocker = server.stub.Decode.future(executor_pb2.DecodeRequest(input=decode_of(handles[0], 7)), timeout=20)
        assert executor.is_waiting.wait(10)
        num_steps, num_free = len(executor.batches), server.free_blocks
        request = executor_pb2.BatchDecodeRequest(inputs=[decode_of(handle, 8) for handle in handles[1:]])
        call = server.stub.BatchDecode.future(request, timeout=0.2 if leaves_by == "deadline" else 20)
        time.sleep(0.1)
        if leaves_by == "cancel":
            call.cancel()
        with pytest.raises((grpc.RpcError, grpc.FutureCancelledError)):
            call.result()
        wait_until(lambda: server.state.num_active == 1)
        executor.gate.set()
        assert blocker.result().output.kv_cache.length == 4
        assert [server.info(handle).kv_cache for handle in handles[1:]] == handles[1:]
        assert len(executor.batches) == num_steps
        assert server.free_blocks == num_free


def test_a_draining_server_refuses_new_sequences_item_by_item() -> None:
    """Live handles are served beside them, and so are repeats of what was made before."""
    with RunningServer() as server:
        handle = server.prefill().kv_cache
        first = batch_prefill(server, prompt_of(5, 6, request_id="before")).results[0].output
        drained = asyncio.run_coroutine_threadsafe(server.server.drain(60.0), server.loop)
        wait_until(lambda: server.state.phase.value == "draining")
        response = batch_prefill(
            server,
            prompt_of(1),
            prompt_of(1, request_id="new"),
            prompt_of(5, 6, request_id="before"),
            prompt_of(7, kv_cache=handle),
        )
        refusals = _refusals(response)
        assert {place: refusal.reason for place, refusal in refusals.items()} == {0: "DRAINING", 1: "DRAINING"}
        assert response.results[2].output.kv_cache == first.kv_cache
        newest = response.results[3].output.kv_cache
        pieces = unified(server, piece_of(1), piece_of(8, kv_cache=newest))
        assert {place: refusal.reason for place, refusal in _refusals(pieces).items()} == {0: "DRAINING"}
        assert not drained.done()
        server.release(newest, first.kv_cache)
        drained.result(timeout=10)
