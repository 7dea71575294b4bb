"""Bucket: the level is what was poured in less what the rate has allowed, and never negative."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ferrule_server.errors import QuotaExceeded
from ferrule_server.fairness.bucket import Bucket, Meter


def test_a_bucket_sinks_with_time_and_saves_nothing_up() -> None:
    """An idle bucket is empty, not below empty; what is taken back leaves no credit."""
    bucket = Bucket(10.0, rate=2.0)
    bucket.pour(8.0, 20.0)
    assert bucket.settle(23.0) == 2.0
    assert not bucket.is_empty(23.5)
    assert bucket.is_empty(24.0)
    bucket.pour(-5.0, 23.0)
    assert bucket.settle(23.0) == 0.0


@pytest.mark.parametrize("rate", [0, 1, 50])
def test_a_meter_says_when_it_allows_more(rate: int) -> None:
    """And for a rate of 0 that it never will."""
    now = [100.0]
    meter = Meter("CALL_RATE", lambda _: rate, lambda: now[0])
    meter.charge("a", 3 * rate)
    error = meter.excess("a")
    assert isinstance(error, QuotaExceeded)
    assert (error.retry_after_s is None) == (rate == 0)
    with pytest.raises(QuotaExceeded):
        meter.check("a")
    now[0] += error.retry_after_s or 10**9
    assert (meter.excess("a") is None) == (rate > 0)


class BucketMachine(RuleBasedStateMachine):
    """Work at random times, at a rate that changes, in whole numbers so that the model is exact."""

    def __init__(self) -> None:
        super().__init__()
        self.bucket = Bucket(0, 1)
        self.now = self.level = 0

    @rule(amount=st.integers(-50, 200))
    def pour(self, amount: int) -> None:
        """Count work, or take it back."""
        self.bucket.pour(amount, self.now)
        self.level = max(0, self.level + amount)

    @rule(seconds=st.integers(0, 30), settles=st.booleans())
    def wait(self, seconds: int, *, settles: bool) -> None:
        """Time passes, and is looked at now or later."""
        self.now += seconds
        self.level = max(0, self.level - seconds * int(self.bucket.rate))
        if settles:
            assert self.bucket.settle(self.now) == self.level

    @rule(rate=st.integers(0, 9))
    def change_rate(self, rate: int) -> None:
        """Another rate applies from now on."""
        self.bucket.settle(self.now)
        self.bucket.rate = rate

    @invariant()
    def is_whole(self) -> None:
        """It is empty exactly if the model is."""
        self.bucket.check_integrity()
        assert self.bucket.is_empty(self.now) == (self.level == 0)


TestBucketMachine = BucketMachine.TestCase
TestBucketMachine.settings = settings(max_examples=100, stateful_step_count=40)
