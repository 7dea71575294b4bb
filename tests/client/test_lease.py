"""The keep-alive thread: there only while a cache needs it."""

from __future__ import annotations

import subprocess
import sys

import grpc
import pytest

from ferrule_client import CallCancelledError, Client, _lease, no_output
from tests.client.fake_server import Failure, FakeServer, threads_named, wait_for


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Renew after moments instead of seconds."""
    monkeypatch.setattr(_lease, "_MIN_LEASE_S", 0.15)
    monkeypatch.setattr(_lease, "_MAX_PAUSE_S", 0.05)


def num_threads() -> int:
    """Return the number of keep-alive threads."""
    return len(list(threads_named("ferrule-keep-alive")))


def test_thread_lives_as_long_as_the_caches(fake: FakeServer, fake_client: Client) -> None:
    """It starts with the first cache and ends with the last one."""
    assert num_threads() == 0
    with fake_client.prefill([*b"ab"], policy=no_output()):
        with fake_client.prefill([*b"ab"], policy=no_output()):
            assert num_threads() == 1
        assert num_threads() == 1
    wait_for(lambda: num_threads() == 0)
    with fake_client.prefill([*b"ab"], policy=no_output(), keep_alive=False):
        assert num_threads() == 0
    with fake_client.prefill([*b"ab"], policy=no_output()) as cache:
        handle = cache.detach()
        wait_for(lambda: num_threads() == 0)
    fake_client.release([handle])


def test_leases_are_renewed_together_at_a_third(fake: FakeServer, fake_client: Client) -> None:
    """One call for all caches; the granted lease sets the pace."""
    fake.ttl_s = 0.3
    caches = [fake_client.prefill([*b"ab"], policy=no_output()) for _ in range(3)]
    wait_for(lambda: fake.kept.count(3) >= 3)
    fake.ttl_s = 300.0
    num_calls = fake.calls["KeepAlive"]
    wait_for(lambda: fake.calls["KeepAlive"] > num_calls)
    fake_client.release(caches)
    wait_for(lambda: num_threads() == 0)


def test_failures_do_not_end_the_keeping(fake: FakeServer) -> None:
    """A server that was away for a moment is asked again; a lease that is gone is not."""
    with Client.connect(fake.target, max_retries=0) as client:
        cache, lost = (client.prefill([*b"ab"], policy=no_output()) for _ in range(2))
        fake.ttl_s = 0.15
        fake.failures["KeepAlive"] = [Failure(grpc.StatusCode.UNAVAILABLE)] * 2
        wait_for(lambda: fake.kept.count(2) >= 1)
        del fake.sequences[lost.handle.cache_id]
        wait_for(lambda: fake.kept.count(1) >= 2)
        client.release([cache, lost])


def test_thread_ends_with_the_client(fake: FakeServer) -> None:
    """Closing the client ends it, though a cache was forgotten; so does the end of the last cache's object."""
    client = Client.connect(fake.target)
    cache = client.prefill([*b"ab"], policy=no_output())
    client.close()
    assert num_threads() == 0
    with pytest.raises(CallCancelledError, match="closed"):
        cache.release()
    assert cache.is_released
    client = Client.connect(fake.target)
    cache = client.prefill([*b"ab"], policy=no_output())
    assert num_threads() == 1
    with pytest.warns(ResourceWarning):
        del cache
    wait_for(lambda: num_threads() == 0)
    client.close()


def test_thread_does_not_keep_the_process(target: str) -> None:
    """A script that ends without releasing anything ends."""
    script = f"""
from ferrule_client import Client
client = Client.connect({target!r})
cache = client.prefill([1, 2, 3])
loop = cache.generate(20)
next(loop)
client.release([cache.detach()])
other = client.prefill([1, 2, 3], ttl=5)
stream = client.stream()
stream.decode([other], [1])
client.release([other.handle])
print("end of script", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", script], timeout=30, capture_output=True, text=True, check=False)
    assert done.stdout == "end of script\n"
    assert done.returncode == 0, done.stderr
