"""The keep-alive thread: there only while a cache needs it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence

import grpc
import pytest

from ferrule import Client, FerruleError, Handle, HandleNotFoundError
from ferrule.errors import CallCancelledError, DeadlineExceededError
from ferrule.types import Lease
from ferrule_client import _leases
from ferrule_client._leases import Leases
from ferrule_client._tip import Tip
from ferrule_client.sync._lease import LeaseKeeper
from tests.client.fake_server import Failure, FakeServer, threads_named, wait_for


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Renew after moments instead of seconds."""
    monkeypatch.setattr(_leases, "_MIN_LEASE_S", 0.15)
    monkeypatch.setattr(_leases, "_MAX_PAUSE_S", 0.05)


def num_threads() -> int:
    """Return the number of keep-alive threads."""
    return len(list(threads_named("ferrule-keep-alive")))


def test_thread_lives_as_long_as_the_caches(fake: FakeServer, fake_client: Client) -> None:
    """It starts with the first cache and ends with the last one."""
    assert num_threads() == 0
    with fake_client.prefill([*b"ab"]):
        with fake_client.prefill([*b"ab"]):
            assert num_threads() == 1
        assert num_threads() == 1
    wait_for(lambda: num_threads() == 0)
    with fake_client.prefill([*b"ab"], keep_alive=False):
        assert num_threads() == 0
    with fake_client.prefill([*b"ab"]) as cache:
        handle = cache.detach()
        wait_for(lambda: num_threads() == 0)
    fake_client.release([handle])


def test_leases_are_renewed_together_at_a_third(fake: FakeServer, fake_client: Client) -> None:
    """One call for all caches; the granted lease sets the pace."""
    fake.ttl_s = 0.3
    caches = [fake_client.prefill([*b"ab"]) for _ in range(3)]
    wait_for(lambda: fake.kept.count(3) >= 3)
    fake.ttl_s = 300.0
    num_calls = fake.calls["KeepAlive"]
    wait_for(lambda: fake.calls["KeepAlive"] > num_calls)
    fake_client.release(caches)
    wait_for(lambda: num_threads() == 0)


def test_granted_lease_sets_the_pace_from_the_start(fake: FakeServer, fake_client: Client) -> None:
    """A server that says what it granted is not asked again before a third of that; it is so of forks too."""
    fake.granted_ttl_s = 300.0
    with fake_client.prefill([*b"ab"]) as cache, cache.fork() as branch:
        assert cache._tip.ttl_s == branch._tip.ttl_s == 300.0
        time.sleep(0.2)  # the shortest lease of these tests has come and gone
        assert fake.calls["KeepAlive"] == 0
        fake.granted_ttl_s = fake.ttl_s = 0.2
        with cache.fork(ttl=0.2):
            wait_for(lambda: fake.calls["KeepAlive"] > 1)


def test_keeping_survives_a_connection_that_hangs() -> None:
    """A renewal that gets no answer is given up while there is time in the lease for another one."""
    calls: list[float] = []

    def renew(handles: Sequence[Handle], timeout_s: float) -> list[Lease | FerruleError]:
        calls.append(time.monotonic())
        if len(calls) == 1:
            time.sleep(timeout_s)
            raise DeadlineExceededError(grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", "hung")
        return [Lease(300.0, 300.0) for _ in handles]

    keeper = LeaseKeeper(renew)
    tip = Tip(Handle("a.b.c", 1, bytes(16)), ttl_s=1.5)
    began = time.monotonic()
    keeper.add(tip)
    wait_for(lambda: tip.ttl_s == 300.0)
    keeper.close()
    assert calls[0] - began >= 0.5
    assert calls[1] - began < 1.5


def test_lease_of_a_sequence_left_behind_changes_nothing() -> None:
    """The cache moved to another sequence while the old one's renewal was under way."""
    tip = Tip(Handle("a.b.old", 1, bytes(16)))

    def renew(handles: Sequence[Handle], timeout_s: float) -> list[Lease | FerruleError]:
        if handles[0].cache_id == "a.b.new":
            return [Lease(300.0, 300.0)]
        tip.revive(Handle("a.b.new", 1, bytes(16)), ttl_s=None)
        return [HandleNotFoundError(grpc.StatusCode.NOT_FOUND, "EPOCH_CHANGED", "gone")]

    keeper = LeaseKeeper(renew)
    keeper.add(tip)
    wait_for(lambda: tip.ttl_s == 300.0)
    keeper.close()


def test_failures_do_not_end_the_keeping(fake: FakeServer) -> None:
    """A server that was away for a moment is asked again; a lease that is gone is not."""
    with Client(fake.target, max_retries=0) as client:
        cache, lost = (client.prefill([*b"ab"]) for _ in range(2))
        fake.ttl_s = 0.15
        fake.failures["KeepAlive"] = [Failure(grpc.StatusCode.UNAVAILABLE)] * 2
        wait_for(lambda: fake.kept.count(2) >= 1)
        del fake.sequences[lost.handle.cache_id]
        wait_for(lambda: fake.kept.count(1) >= 2)
        client.release([cache, lost])


def test_thread_ends_with_the_client(fake: FakeServer) -> None:
    """Closing the client ends it, though a cache was forgotten; so does the end of the last cache's object."""
    client = Client(fake.target)
    cache = client.prefill([*b"ab"])
    client.close()
    assert num_threads() == 0
    with pytest.raises(CallCancelledError, match="closed"):
        cache.release()
    assert cache.is_released
    client = Client(fake.target)
    cache = client.prefill([*b"ab"])
    assert num_threads() == 1
    with pytest.warns(ResourceWarning):
        del cache
    wait_for(lambda: num_threads() == 0)
    client.close()


def test_thread_does_not_keep_the_process(target: str) -> None:
    """A script that ends without releasing anything ends."""
    script = f"""
from ferrule import Client
from ferrule.types import Append
client = Client({target!r})
cache = client.prefill([1, 2, 3])
loop = cache.generate(20)
next(loop)
client.release([cache.detach()])
other = client.prefill([1, 2, 3], ttl=5)
stream = client.stream()
stream.run([Append(other, [1])])
client.release([other.handle])
print("end of script", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", script], timeout=300, capture_output=True, text=True, check=False)
    assert done.stdout == "end of script\n"
    assert done.returncode == 0, done.stderr


def test_lease_renewed_by_hand_is_kept_from_then_on(fake: FakeServer, fake_client: Client) -> None:
    """A shorter one too: it would run out if the keeper went on by the old one."""
    fake.granted_ttl_s = 300.0
    with fake_client.prefill([*b"ab"]) as cache:
        fake.ttl_s = 0.15
        fake_client.keep_alive([cache], ttl=0.15)
        assert cache._tip.ttl_s == 0.15
        wait_for(lambda: fake.calls["KeepAlive"] > 2)


def test_finaliser_may_strike_while_leases_are_looked_at() -> None:
    """A collection of garbage may run anywhere, and end caches that were never released."""
    leases, tips = Leases(), [Tip(Handle(f"x.{number}", 1, b"l")) for number in range(4)]

    class Due(float):
        def __lt__(self, other: float) -> bool:
            leases.due.pop(tips[0], None)
            return float(self) < float(other)

    for tip in tips:
        leases.begin(tip, 0.0)
    leases.due[tips[1]] = Due(3.0)
    assert leases.first() == leases.due[tips[2]]
    assert tips[0] not in leases.due
