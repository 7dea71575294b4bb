"""Branches: what ``on_stale=FORK`` makes runs side by side, whatever becomes of the sequence it came from."""

from __future__ import annotations

import pytest

from ferrule_server.engine import host_calls
from ferrule_server.engine.jobs import (
    AppendResult,
    CacheInfo,
    OutputRequest,
    TruncateJob,
    TruncateResult,
)
from ferrule_server.errors import HandleUnknown
from ferrule_server.executor.base import OutputSpec, Shaping
from ferrule_server.kv.handle import Handle, StalePolicy
from tests.engine.harness import NOTHING, Harness, append
from tests.fakes import FakeExecutor, fake_next_token

VOCAB = 32
PENALISED = OutputRequest(OutputSpec(greedy=True, shaping=Shaping(presence_penalty=2.0)))
FORK, REWIND = StalePolicy.FORK, StalePolicy.REWIND


def moved_on(harness: Harness, *token_ids: int) -> Handle:
    """A handle behind the tip of its sequence."""
    first = harness.prefill(*token_ids)
    harness.decode(first.handle, 31)
    return first.handle


def tokens_of(harness: Harness, handle: Handle) -> tuple[int, ...]:
    """What the sequence holds."""
    info = harness.answer(CacheInfo, host_calls.describe("me", handle, with_token_ids=True))
    assert info.token_ids is not None
    return info.token_ids


@pytest.mark.parametrize("length", [3, 4, 5])
def test_branches_of_one_handle_run_in_one_step(length: int) -> None:
    """Sixteen of them are one batch, each in a sequence of its own."""
    prompt = tuple(range(length))
    with Harness() as harness:
        handle, num_steps = moved_on(harness, *prompt), len(harness.executor.batches)
        sinks = harness.submit_all(*(append(handle, 10 + i, on_stale=FORK) for i in range(16)))
        results = [sink.result() for sink in sinks]
        assert [batch.num_rows for batch in harness.executor.batches[num_steps:]] == [16]
        assert [result.rows[0].token for result in results] == [
            fake_next_token((*prompt, 10 + i), VOCAB) for i in range(16)
        ]
        assert len({result.handle.cache_id for result in results}) == 16
        assert tokens_of(harness, handle) == (*prompt, 31)


def test_the_source_goes_on_while_branches_run() -> None:
    """An append, a rewind and a truncate under a long branch change nothing in it; penalties count what it holds."""
    prompt = (1, 2, 3, 4, 5, 6)
    with Harness(FakeExecutor(num_blocks=200), max_step_rows=4) as harness:
        handle = moved_on(harness, *prompt)
        harness.executor.step_time_s = 0.01
        tokens = tuple(7 + i % 20 for i in range(200))
        branch = harness.hold(append(handle, *tokens, output=PENALISED, on_stale=FORK))
        rewound = harness.submit(append(handle, 8, on_stale=REWIND))
        harness.let_go()
        assert rewound.result().rows[0].token == fake_next_token((*prompt, 8), VOCAB)
        assert not branch.is_done
        truncated = harness.answer(TruncateResult, TruncateJob("me", handle, 2))
        after = harness.decode(truncated.handle, 9, 9, 9)
        assert after.rows[0].token == fake_next_token((1, 2, 9, 9, 9), VOCAB)
        assert not branch.is_done
        harness.executor.step_time_s = 0.0
        made = branch.result()
        assert tokens_of(harness, made.handle) == (*prompt, *tokens)
        assert harness.decode(made.handle).rows[0].token == fake_next_token((*prompt, *tokens), VOCAB)
        assert tokens_of(harness, after.handle) == (1, 2, 9, 9, 9)


def test_a_frame_is_judged_in_item_order_around_its_branches(harness: Harness) -> None:
    """Branch, rewind, branch of what the rewind dropped: each as if sent alone, one after another."""
    first = harness.prefill(1, 2, 3)
    second = harness.decode(first.handle, 4)
    third = harness.decode(second.handle, 5)
    sinks = harness.submit_all(
        append(second.handle, 6, on_stale=FORK),
        append(first.handle, 7, on_stale=REWIND),
        append(second.handle, 8, on_stale=FORK),
        append(first.handle, 9, on_stale=FORK),
        append(third.handle, 9),
    )
    outcomes = [sink.outcome() for sink in sinks]
    assert [getattr(each, "REASON", "") for each in outcomes] == ["", "", "HANDLE_STALE", "", "HANDLE_STALE"]
    results = [each for each in outcomes if isinstance(each, AppendResult)]
    held = [tokens_of(harness, result.handle) for result in results]
    assert held == [(1, 2, 3, 4, 6), (1, 2, 3, 7), (1, 2, 3, 9)]


def test_releasing_the_source_ends_its_branches() -> None:
    """HANDLE_UNKNOWN for each that runs, and not a block stays behind; a branch that is done lives on."""
    with Harness(max_step_rows=4) as harness:
        handle = moved_on(harness, 1, 2, 3, 4, 5)
        done = harness.submit(append(handle, 6, on_stale=FORK)).result()
        jobs = [append(handle, *([7 + i] * 30), on_stale=FORK) for i in range(3)]
        jobs.append(append(handle, 11, *([12] * 30), on_stale=REWIND))
        sinks = harness.hold_all(*jobs)
        released = harness.submit(host_calls.release("me", (handle,)))
        harness.let_go()
        released.outcome()
        assert all(isinstance(sink.error(), HandleUnknown) for sink in sinks)
        harness.check_integrity()
        assert harness.decode(done.handle).rows[0].token == fake_next_token((1, 2, 3, 4, 5, 6), VOCAB)
        harness.release(done.handle)
        assert harness.store.pool.num_used == 0


def test_branches_in_flight_are_pending_work_of_their_source() -> None:
    """GetCacheInfo counts them, and they keep its lease from running out."""
    with Harness(max_step_rows=4) as harness:
        handle = moved_on(harness, 1, 2, 3)
        sinks = harness.hold_all(*(append(handle, *([9 + i] * 20), on_stale=FORK) for i in range(3)))
        pending = harness.submit(host_calls.describe("me", handle))
        harness.let_go()
        info = pending.outcome()
        assert isinstance(info, CacheInfo)
        assert info.num_pending == 3
        for sink in sinks:
            sink.result()
        info = harness.answer(CacheInfo, host_calls.describe("me", handle))
        assert info.num_pending == 0
        assert harness.store.resolve(handle, "me").num_pins == 0


def test_the_same_request_joins_the_branch_while_it_runs() -> None:
    """By request_id, also behind another append on the source; without one, everybody has a branch of their own."""
    with Harness(max_step_rows=4) as harness:
        handle = moved_on(harness, 1, 2, 3)
        long = harness.hold(append(handle, 8, *([9] * 20), on_stale=REWIND))
        jobs = [append(handle, 10, 11, on_stale=FORK, request_id="r") for _ in range(3)]
        sinks = harness.submit_all(*jobs, append(handle, 10, 11, on_stale=FORK))
        harness.let_go()
        results = [sink.result() for sink in sinks]
        assert len({result.handle for result in results[:3]}) == 1
        assert [result.replayed for result in results] == [False, True, True, False]
        assert results[3].handle != results[0].handle
        long.result()


def test_a_branch_has_the_lease_that_its_source_had_when_it_was_judged(harness: Harness) -> None:
    """What stands behind it in the same batch may set another one; the branch takes no notice."""
    handle = moved_on(harness, 1, 2, 3)
    query = append(handle, output=NOTHING, ttl_s=7.0)
    own = append(handle, 11, on_stale=FORK, ttl_s=9.0)
    branch, queried, with_own = harness.submit_all(append(handle, 10, on_stale=FORK), query, own)
    assert (branch.result().ttl_s, queried.result().ttl_s, with_own.result().ttl_s) == (60.0, 7.0, 9.0)
