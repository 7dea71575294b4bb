"""CallRates and Meter with a clock of their own: what is admitted, when again, and what is remembered."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ferrule.v1 import cache_pb2, executor_pb2
from ferrule_server.api.rpc.intake import CallRates
from ferrule_server.api.security.auth import OpenAccess
from ferrule_server.errors import QuotaExceeded
from ferrule_server.fairness.bucket import BURST_S, Meter
from ferrule_server.quotas import UNLIMITED, QuotaLimits
from tests.api.harness import RunningServer, refused


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


def rates_of(**limits: int) -> tuple[CallRates, Clock]:
    """Return call rates with the same limits for every principal, and their clock."""
    clock = Clock()
    return CallRates(lambda _: QuotaLimits(**limits), clock), clock


def num_remembered(rates: CallRates) -> int:
    """Return how many principals are remembered; one that both meters remember counts twice."""
    return len(rates._calls.buckets) + len(rates._bytes.buckets)


def refusal(rates: CallRates, principal: str = "me") -> QuotaExceeded:
    """Return the error of a call that must be refused."""
    with pytest.raises(QuotaExceeded) as caught:
        rates.admit(principal)
    return caught.value


def test_a_burst_of_one_second_is_admitted_then_calls_wait() -> None:
    """The error says after how long the next call is admitted."""
    rates, clock = rates_of(calls_per_s=10)
    for _ in range(10):
        rates.admit("me")
    error = refusal(rates)
    assert (error.reason, error.metadata) == ("QUOTA_CALL_RATE", {"quota": "CALL_RATE", "used": "10", "limit": "10"})
    assert error.retry_after_s is not None
    assert 0 < error.retry_after_s <= 0.1
    assert "10 calls to make up for at 10 per second" in error.message
    clock.now += error.retry_after_s
    rates.admit("me")


def test_a_large_request_overdraws_and_the_next_call_waits() -> None:
    """However large it is: its size is only known when it has arrived."""
    rates, clock = rates_of(request_bytes_per_s=1000)
    rates.admit("me")
    rates.charge_bytes("me", 5000)
    error = refusal(rates)
    assert (error.reason, error.metadata["used"]) == ("QUOTA_REQUEST_BYTES", "5000")
    assert error.retry_after_s == pytest.approx(4.02)
    assert rates.charge_bytes("me", 0) == pytest.approx(4.02)
    clock.now += 4.02
    assert rates.charge_bytes("me", 0) == 0.0
    rates.admit("me")


def test_a_refused_call_is_not_counted() -> None:
    """Neither is one that is refused by the other quota."""
    rates, clock = rates_of(calls_per_s=1, request_bytes_per_s=10)
    rates.charge_bytes("me", 10)
    for _ in range(50):
        assert refusal(rates).reason == "QUOTA_REQUEST_BYTES"
    clock.now += 0.5
    rates.admit("me")
    assert refusal(rates).reason == "QUOTA_CALL_RATE"


def test_some_calls_are_counted_and_never_refused() -> None:
    """What a caller over its rate may always send makes it wait longer for all else."""
    rates, _ = rates_of(calls_per_s=1, request_bytes_per_s=1)
    rates.admit("me")
    before = refusal(rates).retry_after_s
    rates.admit("me", is_always=True)
    after = refusal(rates).retry_after_s
    assert before is not None
    assert after == pytest.approx(before + 1.0)


def test_a_caller_over_its_rate_can_look_keep_and_give_back() -> None:
    """Only the three methods that say so: all else is refused until its time comes."""
    access = OpenAccess(is_admin=False, quotas=QuotaLimits(calls_per_s=2))
    with RunningServer(access=access) as server:
        handle = server.prefill().kv_cache
        with refused() as refusals:
            for _ in range(20):
                server.stub.GetCacheInfo(cache_pb2.GetCacheInfoRequest(kv_cache=handle), timeout=20)
        assert refusals[0].reason == "QUOTA_CALL_RATE"
        for _ in range(5):
            server.stub.GetStatus(executor_pb2.GetStatusRequest(), timeout=20)
            kept = server.stub.KeepAlive(cache_pb2.KeepAliveRequest(kv_caches=[handle]), timeout=20)
            assert kept.results[0].HasField("lease")
        released = server.stub.ReleaseCache(cache_pb2.ReleaseCacheRequest(kv_caches=[handle]), timeout=20)
        assert released.results[0].released


def test_principals_do_not_share_a_rate() -> None:
    """What one of them has spent is refused to nobody else."""
    rates, _ = rates_of(calls_per_s=1, request_bytes_per_s=1)
    rates.admit("a")
    rates.charge_bytes("a", 1 << 20)
    rates.admit("b")
    refusal(rates, "a")


def test_without_the_quotas_nothing_is_refused_or_remembered() -> None:
    """The usual case costs two look-ups."""
    rates = CallRates(lambda _: UNLIMITED)
    for _ in range(1000):
        rates.admit("me")
        rates.charge_bytes("me", 1 << 30)
    assert num_remembered(rates) == 0
    assert rates.charge_bytes("me", 0) == 0.0


def test_a_changed_limit_holds_at_once() -> None:
    """Quotas follow the token file while the server runs."""
    clock, limits = Clock(), {"me": QuotaLimits(calls_per_s=1)}
    rates = CallRates(lambda principal: limits[principal], clock)
    rates.admit("me")
    refusal(rates)
    limits["me"] = QuotaLimits(calls_per_s=3)
    rates.admit("me")
    limits["me"] = UNLIMITED
    rates.admit("me")
    assert num_remembered(rates) == 0


def test_idle_principals_are_forgotten() -> None:
    """However many there are over time, memory is bounded by how many are active."""
    rates, clock = rates_of(calls_per_s=10, request_bytes_per_s=1000)
    for number in range(10_000):
        rates.admit(f"p{number}")
        rates.charge_bytes(f"p{number}", 100)
        clock.now += 0.01
    assert num_remembered(rates) < 300


@given(
    rate=st.integers(1, 50),
    moves=st.lists(st.tuples(st.floats(0, 3), st.integers(0, 200), st.sampled_from("abc")), max_size=60),
)
def test_nobody_gets_more_than_its_rate(rate: int, moves: list[tuple[float, int, str]]) -> None:
    """Up to any moment a principal has spent at most its rate, one burst and the one amount that overdrew."""
    clock = Clock()
    meter, spent, largest = Meter("TEXT_RATE", lambda _: rate, clock), dict.fromkeys("abc", 0), dict.fromkeys("abc", 0)
    for pause, amount, name in moves:
        clock.now += pause
        if wait_s := meter.wait_s(name):
            with pytest.raises(QuotaExceeded) as caught:
                meter.check(name)
            assert caught.value.retry_after_s == wait_s
        else:
            meter.check(name)
            meter.charge(name, amount)
            spent[name] += amount
            largest[name] = max(largest[name], amount)
        meter.check_integrity()
        assert spent[name] <= rate * (clock.now - 100.0 + BURST_S) + largest[name] + 1e-6


def test_a_refund_makes_room_again() -> None:
    """What did not happen is not paid for."""
    meter = Meter("TEXT_RATE", lambda _: 10, Clock())
    meter.charge("me", 10)
    meter.refund("me", 4)
    meter.check("me")
    meter.refund("you", 4)
    assert len(meter.buckets) == 1
