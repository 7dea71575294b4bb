"""Views: what a look between two steps sees, that it changes nothing, and what it costs."""

from __future__ import annotations

import itertools
import pickle
import threading
import time
from typing import Any, cast

import pytest

from ferrule_server.engine import host_calls
from ferrule_server.engine.bridge.gate import Gate
from ferrule_server.engine.host_calls import View
from ferrule_server.engine.jobs import (
    AppendJob,
    ForkJob,
    ForkResult,
    GenerateJob,
    ListResult,
    OutputRequest,
    StopRules,
    Window,
)
from ferrule_server.engine.metrics.counters import EngineCounters, EngineSnapshot
from ferrule_server.executor.base import OutputSpec
from ferrule_server.kv.handle import Handle
from tests.engine.harness import GREEDY, Harness, wait_until
from tests.engine.streams import start

PROMPT = tuple(range(1, 20))


def _append(handle: Handle | None, *token_ids: int, principal: str = "alice", ttl_s: float | None = None) -> AppendJob:
    return AppendJob(principal, token_ids, handle, GREEDY, ttl_s=ttl_s)


def _fork(harness: Harness, handle: Handle, count: int) -> tuple[Handle, ...]:
    outcome = harness.answer(ForkResult, ForkJob("alice", handle, handle.length, count))
    return outcome.handles


def _look(harness: Harness, max_sequences: int = 256, max_principals: int = 64) -> View:
    return harness.answer(View, host_calls.view("root", max_sequences, max_principals))


def test_a_look_sees_sequences_blocks_and_principals(harness: Harness) -> None:
    """Of everybody, with what is shared, whose lease ends soonest first; a look renews nothing."""
    root = harness.submit(_append(None, *PROMPT, ttl_s=50.0)).result().handle
    branch = _fork(harness, root, 1)[0]
    harness.submit(_append(None, 1, 2, 3, principal="bob", ttl_s=20.0)).result()
    view = _look(harness)
    assert [each.principal for each in view.sequences] == ["bob", "alice", "alice"]
    assert {each.handle_id: each.parent_handle_id for each in view.sequences[1:]} == {
        root.handle_id: "",
        branch.handle_id: root.handle_id,
    }
    assert all(0 < each.expires_in_s < each.ttl_s for each in view.sequences)
    num_owners = sorted(count for count in view.refcounts if count)
    assert num_owners == [1] + [2] * harness.store.pool.num_blocks_for(len(PROMPT))
    assert (view.kv.live_sequences, view.snapshot.num_sequences, view.num_principals) == (3, 3, 2)
    assert [each.name for each in view.principals] == ["bob", "alice"]
    again = _look(harness)
    assert again.sequences[0].expires_in_s < view.sequences[0].expires_in_s


def test_all_times_of_a_view_or_a_page_are_of_one_moment(harness: Harness) -> None:
    """However long it takes to describe the sequences: the clock is read once for all of them."""
    begun_s = float(round(time.monotonic()))
    harness.clock = lambda: begun_s
    for _ in range(4):
        harness.submit(_append(None, *PROMPT)).result()
    ticks = itertools.count()
    harness.clock = lambda: begun_s + next(ticks) / 1024  # every reading differs, and no sum is rounded
    page = harness.answer(ListResult, host_calls.list_caches("alice"))
    for seen in (_look(harness).sequences, page.caches):
        assert len(seen) == 4
        assert len({(each.age_s, each.lease.expires_in_s) for each in seen}) == 1


def test_sums_of_a_principal_grow_with_its_appends_alone(harness: Harness) -> None:
    """Tokens and times of what was appended; a replay, a query, a fork and a release count nothing."""
    first = harness.submit(_append(None, *PROMPT)).result().handle
    second = harness.submit(_append(first, 7)).result().handle
    before = _look(harness).principals[0]
    assert (before.num_appends, before.num_tokens) == (2, len(PROMPT) + 1)
    assert before.run_ns > 0 < before.queue_ns
    assert harness.submit(_append(first, 7)).result().replayed
    harness.submit(_append(second)).result()
    _fork(harness, second, 2)
    harness.submit(host_calls.release("alice", (second,))).outcome()
    after = _look(harness).principals[0]
    assert (after.num_appends, after.num_tokens, after.run_ns) == (2, len(PROMPT) + 1, before.run_ns)
    assert (before.num_sequences, after.num_sequences) == (1, 2)


def test_tokens_from_the_prefix_cache_are_no_work(harness: Harness) -> None:
    """A prompt that begins like another counts for what is run of it."""
    block_size = harness.store.pool.block_size
    prompt = tuple(range(1, 2 * block_size + 2))
    harness.submit(_append(None, *prompt)).result()
    assert harness.submit(_append(None, *prompt)).result().cached_tokens == 2 * block_size
    assert _look(harness).principals[0].num_tokens == len(prompt) + 1


def test_each_token_of_a_generate_is_an_append(harness: Harness) -> None:
    """So that a principal that lets the server loop is seen like one that loops itself."""
    output = OutputRequest(OutputSpec(greedy=True))
    job = GenerateJob("alice", PROMPT, None, output, StopRules(max_tokens=6), Window(1 << 20))
    pending = harness.submit(job)
    wait_until(lambda: pending.is_done and not harness.engine.snapshot().num_streams)
    seen = _look(harness).principals[0]
    assert seen.num_tokens == len(PROMPT) + 5
    assert seen.num_appends == 6


def test_counters_of_a_view_stand_still(harness: Harness) -> None:
    """What the engine does later is not seen in an earlier view."""
    handle = harness.submit(_append(None, *PROMPT)).result().handle
    view = _look(harness)
    harness.submit(_append(handle, 1)).result()
    harness.submit(_append(Handle("a.b.c", 1, b""), 1)).error()
    assert view.snapshot.counters.decodes == 0
    assert view.snapshot.refused == {}
    assert view.timings["step"].count == 1
    later = _look(harness)
    assert (later.snapshot.counters.decodes, sum(later.snapshot.refused.values())) == (1, 1)
    assert later.timings["step"].count == 2


def test_lists_are_bounded(harness: Harness) -> None:
    """However much there is; how much there is stays known."""
    for index in range(6):
        harness.submit(_append(None, 1, 2, principal=f"p{index}", ttl_s=10.0 + index)).result()
    view = _look(harness, max_sequences=2, max_principals=3)
    assert [each.principal for each in view.sequences] == ["p0", "p1"]
    assert [each.name for each in view.principals] == ["p5", "p4", "p3"]
    assert (view.num_principals, view.kv.live_sequences) == (6, 6)
    assert _look(harness, 0, 0).sequences == ()


def test_a_full_queue_keeps_nobody_from_looking() -> None:
    """A view is no work that waits: it is let in where appends are refused, and tells what waits."""
    with Harness(max_waiting_jobs=2) as harness:
        handle = harness.submit(_append(None, *PROMPT)).result().handle
        waiting = harness.hold_all(*(_append(handle, 5 + index) for index in range(2)))
        assert harness.submit(_append(handle, 9)).error().reason == "QUEUE_FULL"
        looking = harness.submit(host_calls.view("root"))
        harness.let_go()
        view = looking.outcome()
        assert isinstance(view, View)
        assert view.snapshot.refused["QUEUE_FULL"] == 1
        for pending in waiting:
            pending.outcome()


def test_the_gate_tells_what_each_has_pending() -> None:
    """Jobs and rows, of those who have any."""
    gate, sink = Gate(8), cast("Any", object())
    jobs = [_append(None, 1, 2, 3), _append(None, 4), _append(None, 5, principal="bob")]
    entries: list[Any] = [(job, sink) for job in jobs]
    gate.admit(entries)
    assert gate.pending() == {"alice": (2, 4), "bob": (1, 1)}


def test_what_was_seen_never_changes_afterwards(harness: Harness) -> None:
    """A view and a snapshot are values: to the last counter they stay what they were while the engine goes on."""
    handle = harness.submit(_append(None, *PROMPT)).result().handle
    seen: list[object] = [_look(harness), harness.engine.snapshot()]
    pictures = [pickle.dumps(each) for each in seen]
    output = OutputRequest(OutputSpec(greedy=True))
    stream = start(harness, GenerateJob("alice", (7,), handle, output, StopRules(max_tokens=20), Window(1 << 20)))
    assert stream.branch().tokens
    harness.submit(_append(None, *PROMPT, principal="bob")).result()
    harness.submit(_append(handle, 9)).error()
    harness.submit(host_calls.release("alice", (handle,))).outcome()
    assert [pickle.dumps(each) for each in seen] == pictures
    assert harness.engine.snapshot().counters.decodes > 0


def test_a_snapshot_agrees_with_its_own_counters(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the engine thread refuses a job while another thread takes the snapshot."""
    copy = EngineCounters.copy

    def copy_then_refuse(counters: EngineCounters) -> EngineCounters:
        copied = copy(counters)
        counters.refuse("alice", "HANDLE_STALE")
        return copied

    monkeypatch.setattr(EngineCounters, "copy", copy_then_refuse)
    first, second = harness.engine.snapshot(), harness.engine.snapshot()
    assert (first.refused, second.refused) == ({}, {"HANDLE_STALE": 1})


def test_snapshots_of_other_threads_are_whole_values(harness: Harness) -> None:
    """Taken by the thousand while the engine counts: nothing raises, and no figure of a later one is lower."""
    faults: list[str] = []
    is_over = threading.Event()

    def read() -> None:
        before = _totals(harness.engine.snapshot())
        while not is_over.is_set():
            now = _totals(harness.engine.snapshot())
            if any(new < old for old, new in zip(before, now, strict=True)):
                faults.append(f"{now} after {before}")
                return
            before = now
            time.sleep(0)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        handle = harness.submit(_append(None, *PROMPT)).result().handle
        for number in range(10):
            handle = harness.submit(_append(handle, number)).result().handle
            harness.submit(_append(None, number, principal=f"p{number}")).result()
    finally:
        is_over.set()
        reader.join(10)
    assert not faults
    assert not reader.is_alive()


def _totals(snapshot: EngineSnapshot) -> tuple[int, ...]:
    counters = snapshot.counters
    return counters.steps, counters.step_ns, counters.prefills, counters.decodes, sum(snapshot.refused.values())
