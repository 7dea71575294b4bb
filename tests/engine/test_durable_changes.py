"""Durable sequences that change while something else is under way: every change reaches the journal, once."""

from __future__ import annotations

import gc
import shutil
import threading
from dataclasses import replace
from pathlib import Path

from ferrule_server.engine import host_calls
from ferrule_server.engine.durable.confirmations import Confirmations
from ferrule_server.engine.durable.journal import Journal
from ferrule_server.engine.jobs import AppendResult, CacheInfo, ForkJob, ForkResult, HostCall
from ferrule_server.errors import Cancelled, Restoring
from ferrule_server.executor.base import DeviceLost
from ferrule_server.kv.handle import Handle, StalePolicy
from ferrule_server.kv.sequence import Sequence
from tests.engine.conftest import Servers
from tests.engine.harness import Harness, append, wait_until
from tests.engine.streams import SteppedExecutor
from tests.engine.test_durable import durable, info
from tests.fakes import FakeExecutor


def handle_at(server: Harness, handle: Handle, length: int) -> Handle:
    """The handle of the first ``length`` tokens."""
    return Handle(handle.cache_id, length, server.store.registry.sequences[handle.cache_id].chain.at(length))


def stepped() -> SteppedExecutor:
    """An executor whose steps run freely until a test wants otherwise."""
    executor = SteppedExecutor()
    executor.is_stepped = False
    return executor


def test_a_lease_that_changes_during_a_rewind_does_not_hide_it(servers: Servers) -> None:
    """The rewind has dropped tokens and is given up; the next append goes to the same place in the journal."""
    executor = stepped()
    server = servers.start(executor=executor, max_step_rows=2)
    handle = server.submit(durable(*range(1, 13))).result().handle
    early = handle_at(server, handle, 4)
    executor.is_stepped = True
    rewind = append(early, 9, 9, 9, 9, on_stale=StalePolicy.REWIND)
    pending = server.submit(rewind)
    executor.arrive()
    renewed = server.submit(host_calls.keep_alive("me", (handle,), 45.0))
    rewind.is_cancelled = True
    executor.run_freely()
    assert isinstance(pending.error(), Cancelled)
    renewed.outcome()
    assert server.decode(early, 7).handle.length == 5
    server = servers.crash()
    assert info(server, handle).token_ids == (1, 2, 3, 4, 7)


def test_a_lease_that_changes_with_an_append_does_not_hide_it(servers: Servers) -> None:
    """Both are written, and the sequence is not written as a whole for it."""
    server = servers.start()
    handle = server.submit(durable(*range(1, 200))).result().handle
    before = server.engine.durability()
    result = server.submit(replace(append(handle, 4), ttl_s=45.0)).result()
    after = server.engine.durability()
    assert before is not None
    assert after is not None
    assert after.counters.num_bytes - before.counters.num_bytes < 200
    server = servers.crash()
    found = info(server, result.handle)
    assert (found.length, found.lease.ttl_s) == (200, 45.0)
    assert server.decode(handle, 4).replayed


def test_a_rewind_in_flight_is_not_shown_before_it_is_on_the_disk(servers: Servers, tmp_path: Path) -> None:
    """Its tokens are dropped when it is admitted; what a reply has shown of that is still so after a crash."""
    executor = stepped()
    server = servers.start(executor=executor, max_step_rows=2)
    handle = server.submit(durable(*range(1, 13))).result().handle
    early = handle_at(server, handle, 4)
    executor.is_stepped = True
    pending = server.submit(append(early, 9, 9, 9, 9, on_stale=StalePolicy.REWIND))
    executor.arrive()
    asked = server.submit(host_calls.describe("me", handle, with_token_ids=True))
    executor.step()
    shown = asked.outcome()
    shutil.copytree(tmp_path / "0", tmp_path / "copy")
    executor.run_freely()
    assert pending.result().handle.length == 8
    assert isinstance(shown, CacheInfo)
    assert shown.token_ids == (1, 2, 3, 4)
    with Harness(durable=tmp_path / "copy") as after:
        assert info(after, handle).token_ids == shown.token_ids
        assert after.decode(early, 9, 9, 9, 9).handle.length == 8


def test_jobs_that_wait_when_the_device_is_lost_hear_that_the_sequence_comes_back(servers: Servers) -> None:
    """A durable sequence outlives the process; nothing pins it any more."""
    executor = FakeExecutor()
    server = servers.start(executor=executor)
    handle = server.submit(durable(1, 2, 3)).result().handle
    executor.errors[len(executor.batches) + 1] = DeviceLost()
    for pending in server.submit_all(append(handle, 4), append(handle, 5)):
        assert isinstance(pending.error(), Restoring)
    assert server.store.registry.sequences[handle.cache_id].num_pins == 0


def test_a_request_id_used_again_during_a_snapshot_is_written_once(servers: Servers) -> None:
    """The creation of an earlier request, kept for long enough, must not follow the new one of the same name."""
    server = servers.start()
    now = server.store.clock()
    server.clock = lambda: now
    live = server.submit(durable(5, 5, 5, request_id="b", ttl_s=3000.0)).result().handle
    server.release(server.submit(durable(1, 2, 3, request_id="a")).result().handle)
    server.clock = lambda: now + 1000
    journal = server.engine._parts.endings.journal
    assert isinstance(journal, Journal)
    snapshot = journal._write_snapshot()

    def begin(*_: object) -> None:
        for _step in range(2):  # the live sequence, and its creation
            next(snapshot)

    def finish(*_: object) -> None:
        journal._snapshot = snapshot

    server.submit(HostCall("me", begin)).outcome()
    again = server.submit(durable(1, 2, 3, request_id="a")).result().handle
    server.submit(HostCall("me", finish)).outcome()
    wait_until(lambda: journal.num_snapshots == 2)
    server = servers.crash()
    assert info(server, live).length == 3
    assert server.submit(durable(1, 2, 3, request_id="a")).result().handle == again


def test_what_waits_for_the_disk_is_not_overtaken_by_what_need_not(servers: Servers) -> None:
    """A group is on the disk a moment before its outcomes are sent; others of the principal come after these."""
    server = servers.start()
    handle = server.submit(durable(1, 2, 3)).result().handle
    confirmations = server.engine._outlet
    assert isinstance(confirmations, Confirmations)
    is_synced, may_release, release = threading.Event(), threading.Event(), confirmations._release

    def late(group: int) -> None:
        is_synced.set()
        assert may_release.wait(20)
        release(group)

    confirmations.journal._on_synced = late
    first = server.submit(append(handle, 4))
    assert is_synced.wait(20)
    second = server.submit(host_calls.describe("me", handle))
    wait_until(lambda: len(confirmations._held) == 2 or second.is_done)
    assert not second.is_done
    may_release.set()
    assert first.result().handle.length == 4
    assert isinstance(second.outcome(), CacheInfo)


def test_sequences_that_have_ended_are_not_kept_in_memory(servers: Servers) -> None:
    """Neither by their forks, which are written without the tokens of the source, nor by the tokens themselves."""
    server = servers.start(executor=FakeExecutor(num_blocks=400, max_context=1024))
    handle = server.submit(durable(*[1, 2] * 160)).result().handle
    ended = set()
    for _ in range(4):
        forked = server.answer(ForkResult, ForkJob("me", handle, 320, 1))
        server.release(handle)
        ended.add(handle.handle_id)
        (handle,) = forked.handles
    gc.collect()
    assert not [each for each in gc.get_objects() if type(each) is Sequence and each.handle_id in ended]


def test_a_restart_without_prefix_cache_publishes_nothing(servers: Servers) -> None:
    """Although the sequence was published before; only cold sequences find what it computes again."""
    server = servers.start()
    handle = server.submit(durable(*range(1, 13))).result().handle
    server = servers.crash()
    server.store._cache.is_on = False
    assert isinstance(server.submit(append(handle, 4)).outcome(), AppendResult)
    server.engine.close()
    server.check_integrity()


def test_forks_that_are_used_at_once_compute_their_trunk_once(servers: Servers) -> None:
    """One of them computes it, the others ask again; so the pool is as full as it was before the crash."""
    server = servers.start(executor=FakeExecutor(num_blocks=40))
    trunk = server.submit(durable(*range(1, 31), *range(1, 31))).result().handle
    forked = server.answer(ForkResult, ForkJob("me", trunk, 60, 6))
    handles = [server.decode(handle, 3).handle for handle in forked.handles]
    server = servers.crash(executor=FakeExecutor(num_blocks=40))
    outcomes = [pending.outcome() for pending in server.submit_all(*(append(each, 4) for each in handles))]
    assert [isinstance(each, Restoring) for each in outcomes] == [False, True, True, True, True, True]
    for pending in server.submit_all(*(append(each, 4) for each in handles)):
        assert pending.result().handle.length == 62
    assert server.engine.counters.restored_tokens < 60 + 6 * 4
    assert server.engine.num_free_blocks() == 39 - 15 - 6
