"""The engine: every promise of the append rule, through real steps over a pool that notices wrong block tables."""

from __future__ import annotations

import threading
import time

import pytest

from ferrule_server.engine import host_calls
from ferrule_server.engine.jobs import (
    AppendJob,
    CacheInfo,
    ForkJob,
    ForkResult,
    Lease,
    ListResult,
    OutputRequest,
    TruncateJob,
)
from ferrule_server.errors import (
    BlocksExhausted,
    Cancelled,
    ContextExceeded,
    Draining,
    EngineFault,
    ExceedsPool,
    HandleLost,
    HandleStale,
    HandleUnknown,
    NonFiniteLogits,
    SeedRequired,
)
from ferrule_server.executor.base import DeviceLost, OutputSpec, SampleSpec
from ferrule_server.kv.block_pool import BlockPool
from ferrule_server.kv.handle import Handle, StalePolicy
from tests.engine.harness import NOTHING, Harness, append
from tests.fakes import FakeExecutor, fake_next_token

VOCAB = 32
ALL = OutputRequest(OutputSpec(greedy=True), all_positions=True)
UNSEEDED = OutputRequest(OutputSpec(sample=SampleSpec()), is_seeded=False)


def next_token(*token_ids: int) -> int:
    """What the model says after these tokens."""
    return fake_next_token(token_ids, VOCAB)


def fork(harness: Harness, handle: Handle, count: int = 1) -> tuple[Handle, ...]:
    """Fork at the handle's length and wait."""
    result = harness.answer(ForkResult, ForkJob("me", handle, handle.length, count))
    return result.handles


def test_decode_sees_exactly_the_tokens_before_it(harness: Harness) -> None:
    """Prefill and decodes give the token of their whole prefix."""
    first = harness.prefill(1, 2, 3)
    assert first.rows[0].token == next_token(1, 2, 3)
    assert first.handle.length == 3
    second = harness.decode(first.handle, 4)
    assert second.rows[0].token == next_token(1, 2, 3, 4)
    assert second.handle.length == 4
    assert not second.replayed


def test_long_prefill_is_run_in_chunks_and_answers_once() -> None:
    """Chunks are written beyond the tip; only the last one moves it."""
    tokens = [i % VOCAB for i in range(50)]
    with Harness(max_step_rows=7) as harness:
        result = harness.prefill(*tokens)
        assert result.rows[0].token == next_token(*tokens)
        assert [len(batch.token_ids) for batch in harness.executor.batches] == [7] * 7 + [1]
        assert result.timing.step_rows == 1


def test_query_runs_the_last_row_again_and_appends_nothing(harness: Harness) -> None:
    """An empty input answers under the new policy and leaves the handle as it is."""
    first = harness.prefill(1, 2, 3, output=NOTHING)
    assert first.rows == ()
    query = harness.decode(first.handle)
    assert query.rows[0].token == next_token(1, 2, 3)
    assert query.handle == first.handle
    assert harness.executor.batches[-1].slot_mapping.tolist() == [-1]


def test_query_without_outputs_runs_nothing(harness: Harness) -> None:
    """Policy none on a query costs no step."""
    first = harness.prefill(1, 2)
    num_steps = len(harness.executor.batches)
    assert harness.decode(first.handle, output=NOTHING).handle == first.handle
    assert len(harness.executor.batches) == num_steps


def test_repeated_append_is_replayed_from_the_record(harness: Harness) -> None:
    """A retry after a lost reply never doubles a token and runs nothing."""
    first = harness.prefill(1, 2, 3)
    once = harness.decode(first.handle, 4)
    num_steps = len(harness.executor.batches)
    again = harness.decode(first.handle, 4)
    assert again.replayed
    assert not again.recomputed
    assert (again.handle, again.rows) == (once.handle, once.rows)
    assert len(harness.executor.batches) == num_steps


def test_unseeded_sampling_replays_the_same_token_and_seed(harness: Harness) -> None:
    """The seed drawn for the first try is kept and returned again."""
    first = harness.prefill(1, 2, 3)
    once = harness.decode(first.handle, 4, output=UNSEEDED)
    again = harness.decode(first.handle, 4, output=UNSEEDED)
    assert again.replayed
    assert once.seed is not None
    assert (again.seed, again.rows) == (once.seed, once.rows)


def test_replay_under_another_policy_is_recomputed_without_writing(harness: Harness) -> None:
    """The record does not cover it, so the rows run again with no slots."""
    first = harness.prefill(1, 2, 3)
    harness.decode(first.handle, 4, 5)
    again = harness.decode(first.handle, 4, 5, output=ALL)
    assert again.replayed
    assert again.recomputed
    assert [row.token for row in again.rows] == [next_token(1, 2, 3, 4), next_token(1, 2, 3, 4, 5)]
    assert harness.executor.batches[-1].slot_mapping.tolist() == [-1, -1]
    assert again.handle.length == 5


def test_resampling_an_older_append_needs_its_seed(harness: Harness) -> None:
    """Without the seed another token could come out, so it is refused."""
    first = harness.prefill(1, 2, 3)
    second = harness.decode(first.handle, 4, output=UNSEEDED)
    harness.decode(second.handle, 5)
    error = harness.submit(append(first.handle, 4, output=UNSEEDED)).error()
    assert isinstance(error, SeedRequired)
    assert second.seed is not None
    seeded = OutputRequest(OutputSpec(sample=SampleSpec(seed=second.seed)))
    again = harness.decode(first.handle, 4, output=seeded)
    assert again.rows[0].token == second.rows[0].token


def test_stale_append_fails_and_says_where_the_tip_is(harness: Harness) -> None:
    """Other tokens behind the tip are refused, and so is a longer input that only begins alike."""
    first = harness.prefill(1, 2, 3)
    harness.decode(first.handle, 4)
    for tokens in ((5,), (4, 5)):
        error = harness.submit(append(first.handle, *tokens)).error()
        assert isinstance(error, HandleStale)
        assert error.metadata["tip_length"] == "4"


def test_forked_handles_copy_on_the_first_divergent_append_only(harness: Harness) -> None:
    """Full blocks stay shared; the partial one is copied once per branch that writes."""
    first = harness.prefill(*range(6))
    branches = fork(harness, first.handle, 3)
    assert harness.executor.copied_blocks == []
    pending = harness.submit_all(*(append(handle, 20 + i) for i, handle in enumerate(branches)))
    tokens = [each.result().rows[0].token for each in pending]
    assert tokens == [next_token(*range(6), 20 + i) for i in range(3)]
    assert len(harness.executor.copied_blocks) == 3
    assert harness.decode(first.handle, 31).rows[0].token == next_token(*range(6), 31)
    assert len(harness.executor.copied_blocks) == 3


def test_a_bad_row_fails_alone() -> None:
    """NaN logits end their own item; neighbours and the handle are as if it had not been."""
    executor = FakeExecutor()
    executor.bad_token_ids = {13}
    with Harness(executor) as harness:
        one, two = harness.prefill(1, 2).handle, harness.prefill(3, 4).handle
        bad, good = harness.submit_all(append(one, 13), append(two, 5))
        assert isinstance(bad.error(), NonFiniteLogits)
        assert good.result().rows[0].token == next_token(3, 4, 5)
        assert harness.decode(one, 6).rows[0].token == next_token(1, 2, 6)


def test_a_failed_step_is_run_apart_and_harms_nobody(harness: Harness) -> None:
    """One crash of a mixed step: every part is run alone and all succeed."""
    handles = [harness.prefill(i, i + 1).handle for i in range(3)]
    harness.executor.errors[len(harness.executor.batches) + 1] = RuntimeError("once")
    pending = harness.submit_all(*(append(handle, 9) for handle in handles))
    assert [each.result().handle.length for each in pending] == [3, 3, 3]


def test_an_append_that_keeps_failing_ends_alone_and_its_handle_stays_good(harness: Harness) -> None:
    """ENGINE_FAULT carries an id; the others of its step are answered."""
    one, two = harness.prefill(1, 2).handle, harness.prefill(3, 4).handle
    step = len(harness.executor.batches)
    harness.executor.errors = {step + 1: RuntimeError("together"), step + 2: RuntimeError("alone")}
    bad, good = harness.submit_all(append(one, 9), append(two, 5))
    error = bad.error()
    assert isinstance(error, EngineFault)
    assert error.metadata["fault_id"]
    assert good.result().rows[0].token == next_token(3, 4, 5)
    assert harness.decode(one, 9).rows[0].token == next_token(1, 2, 9)


def test_a_lost_device_loses_every_handle_and_says_so(harness: Harness) -> None:
    """After DeviceLost nothing runs, in flight or later, the owner is told once, and nothing counts as live."""
    handle = harness.submit(append(None, 1, 2, request_id="r")).result().handle
    harness.executor.errors[len(harness.executor.batches) + 1] = DeviceLost()
    one, waiting = harness.submit_all(append(handle, 3), append(handle, 4))
    assert isinstance(one.error(), HandleLost)
    assert isinstance(waiting.error(), HandleLost)
    assert harness.num_failures == 1
    assert harness.engine.snapshot().is_failed
    harness.engine.close()
    assert isinstance(harness.submit(append(handle, 3)).error(), Draining)
    harness.check_integrity()


def test_release_acts_at_the_next_boundary_and_ends_what_waits() -> None:
    """Appends in flight and waiting on a released sequence answer HANDLE_UNKNOWN; its blocks are back."""
    with Harness(max_step_rows=4) as harness:
        first = harness.prefill(1, 2, 3)
        running = harness.hold(append(first.handle, *([4] * 20)))
        waiting = harness.submit(append(first.handle, 5))
        released = harness.submit(host_calls.release("me", (first.handle,)))
        harness.let_go()
        assert isinstance(running.error(), HandleUnknown)
        assert isinstance(waiting.error(), HandleUnknown)
        assert released.outcome() == (1,)
        snapshot = harness.engine.snapshot()
        assert snapshot.free_blocks == snapshot.total_blocks
        assert snapshot.num_waiting == 0


def test_lack_of_room_is_refused_before_anything_runs() -> None:
    """Full now, more than the pool, more than the context: three errors, nothing reserved."""
    executor = FakeExecutor(num_blocks=9, max_context=40)
    with Harness(executor) as harness:
        handle = harness.prefill(*([1] * 20)).handle
        num_steps = len(executor.batches)
        full = harness.submit(append(None, *([2] * 16))).error()
        assert isinstance(full, BlocksExhausted)
        assert full.metadata == {"needed_blocks": "4", "free_blocks": "3"}
        assert full.retry_after_s is not None
        assert isinstance(harness.submit(append(None, *([2] * 36))).error(), ExceedsPool)
        assert isinstance(harness.submit(append(handle, *([2] * 21))).error(), ContextExceeded)
        assert len(executor.batches) == num_steps
        assert harness.engine.snapshot().free_blocks == 3


def test_info_shows_blocks_and_sharing(harness: Harness) -> None:
    """GetCacheInfo's facts: tip, tokens, refcounts, parent."""
    first = harness.prefill(*range(6))
    (branch,) = fork(harness, first.handle)
    info = harness.answer(CacheInfo, host_calls.describe("me", branch, with_token_ids=True))
    assert info.tip == branch
    assert info.token_ids == tuple(range(6))
    assert info.block_refcounts == (2, 2)
    assert (info.num_blocks, info.num_shared_blocks) == (2, 2)
    assert info.parent_handle_id == first.handle.handle_id
    assert 0 < info.lease.expires_in_s <= info.lease.ttl_s == 60


def test_a_page_of_long_sequences_is_not_read_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand branches of a long prompt on a page held up every step for 0.2 s: two million blocks looked at."""
    looked_at: list[int] = []
    refcount = BlockPool.refcount

    def counted(pool: BlockPool, block_id: int) -> int:
        looked_at.append(block_id)
        return refcount(pool, block_id)

    monkeypatch.setattr(BlockPool, "refcount", counted)
    with Harness() as harness:
        first = harness.prefill(*range(32), *range(32))
        fork(harness, first.handle, count=9)
        harness.decode(first.handle, 1)
        looked_at.clear()
        page = harness.answer(ListResult, host_calls.list_caches("me"))
        assert len(looked_at) <= 10 * 5
        assert sorted((each.num_blocks, each.num_shared_blocks) for each in page.caches) == [(16, 16)] * 9 + [(17, 16)]


def test_list_pages_through_own_sequences_without_secrets(harness: Harness) -> None:
    """Pages follow handle_id; other principals' sequences are not there."""
    mine = {harness.prefill(i).handle.handle_id for i in range(5)}
    seen: list[str] = []
    after = ""
    while True:
        page = harness.answer(ListResult, host_calls.list_caches("me", after, 2))
        assert page.total == 5
        seen += [cache.handle_id for cache in page.caches]
        assert all(cache.tip is None for cache in page.caches)
        after = page.next_after
        if not after:
            break
    assert seen == sorted(mine)
    other = harness.answer(ListResult, host_calls.list_caches("you"))
    assert other.caches == ()


def test_a_list_with_tips_has_the_newest_handles(harness: Harness) -> None:
    """Its owner can go on with them."""
    first = harness.prefill(1, 2, 3).handle
    tip = harness.decode(first, 4).handle
    page = harness.answer(ListResult, host_calls.list_caches("me", with_tips=True))
    assert [cache.tip for cache in page.caches] == [tip]
    assert harness.decode(page.caches[0].tip, 5).handle.length == 5  # type: ignore[arg-type]


def test_keep_alive_answers_each_handle_alone(harness: Harness) -> None:
    """One unknown handle does not spoil the batch; the ttl is clamped."""
    handle = harness.prefill(1, 2).handle
    result = harness.answer(tuple, host_calls.keep_alive("me", (handle, Handle("x", 1, bytes(16))), 1.0))
    assert result[0] == Lease(5.0, 5.0)
    assert isinstance(result[1], HandleUnknown)


@pytest.mark.parametrize("kind", ["fork", "truncate", "append"])
@pytest.mark.parametrize("where", ["in the lane", "in the inbox"])
def test_cancelled_while_waiting_changes_nothing(kind: str, where: str) -> None:
    """Also a fork or a truncate whose caller left before its turn never happens."""
    with Harness(max_step_rows=4) as harness:
        first = harness.prefill(1, 2, 3)
        harness.executor.gate = threading.Event()
        long = append(first.handle, *([4] * 20))
        job: ForkJob | TruncateJob | AppendJob = ForkJob("me", first.handle, 3, 5)
        if kind == "truncate":
            job = TruncateJob("me", first.handle, 2)
        elif kind == "append":
            job = append(first.handle, 9, on_stale=StalePolicy.REWIND)
        if where == "in the lane":  # both are judged before the first step
            running, waiting = harness.submit_all(long, job)
            assert harness.executor.is_waiting.wait(10)
            assert harness.engine._lanes.num_waiting == 1
        else:
            running = harness.submit(long)
            assert harness.executor.is_waiting.wait(10)
            waiting = harness.submit(job)
        job.is_cancelled = True
        harness.let_go()
        tip = running.result().handle
        assert isinstance(waiting.error(), Cancelled)
        assert harness.engine.snapshot().num_sequences == 1
        assert not harness.decode(tip, 5).replayed


def test_close_answers_everything_that_is_left() -> None:
    """In flight, waiting and late jobs are answered with DRAINING, once each."""
    executor = FakeExecutor()
    harness = Harness(executor, max_step_rows=4)
    harness.engine.start()
    first = harness.prefill(1, 2, 3)
    running = harness.hold(append(first.handle, *([4] * 20)))
    waiting = harness.submit(append(first.handle, 5))
    closer = threading.Thread(target=harness.engine.close)
    closer.start()
    harness.let_go()
    closer.join(10)
    late = harness.submit(append(first.handle, 6))
    for pending in (running, waiting, late):
        assert isinstance(pending.error(), Draining)
    assert executor.is_closed
    harness.store.check_integrity()


def test_gather_window_puts_half_cohorts_together() -> None:
    """Clients that answer a moment later join the next step instead of alternating for ever."""
    executor = FakeExecutor(step_time_s=0.02)
    with Harness(executor, gather_gap_s=0.002) as harness:
        handles = [harness.prefill(i, i + 1).handle for i in range(4)]
        done = threading.Barrier(4)

        def drive(index: int) -> None:
            handle = handles[index]
            time.sleep(0.01 * (index % 2))
            for _ in range(12):
                handle = harness.decode(handle, 7).handle
            done.wait(20)

        threads = [threading.Thread(target=drive, args=(i,)) for i in range(4)]
        num_steps = len(executor.batches)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        sizes = [batch.num_rows for batch in executor.batches[num_steps:]]
        assert sum(sizes) == 48
        assert sizes.count(4) >= 6, f"step sizes {sizes}"
