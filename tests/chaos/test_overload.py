"""Twice as much as the server can do: refused at once, what is accepted is as fast as ever, and it still answers.

Steps take 20 ms, as on a device, during which the interpreter is free. *Capacity* is what the server does when every
place in its queue is always taken. *Unloaded* is a quarter of that: requests that come at random times, independent of
each other, as in the overload, so that some meet a running step. All clients are processes of their own.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.figures import report
from tests.chaos.load import run_loads, summary, undisturbed
from tests.chaos.server_process import ServerProcess

pytestmark = pytest.mark.slow

PLACES = 8
SECONDS = 12.0
MIN_CAPACITY = 150.0
REFERENCE = ("--executor=paged-reference", "--max-context=4096", "--kv-memory=64MiB")
SHIPPED = ("--model=demo", "--kv-memory=64MiB")
"""Its rows of logits are large enough to fill what a slow reader leaves unread."""


def _server(folder: Path, *arguments: str) -> ServerProcess:
    timed = (f"--steps={folder / 'steps'}", "--step-ms=20", "--row-us=20", "--log-level=error")
    return ServerProcess(folder / "log", *timed, *arguments, program="tests.chaos.timed_server")


def test_twice_the_load_is_refused_at_once_and_slows_nobody(tmp_path: Path) -> None:
    """Rejections in < 10 ms p99, accepted p99 <= 1.5 of unloaded, health p99 <= 10 ms, all in the same run."""
    random_arrivals = {"kind": "arrivals", "seconds": SECONDS, "count": 4 * PLACES}
    health = noise = {"seconds": SECONDS}
    with undisturbed() as is_undisturbed, _server(tmp_path, *REFERENCE, f"--max-waiting-jobs={PLACES}") as server:
        full = run_loads(server.target, full={"kind": "decode", "seconds": 5.0, "count": PLACES})["full"]
        capacity = len(full.latencies_ms) / full.seconds
        calm = run_loads(server.target, load={**random_arrivals, "rate": capacity / 4}, health=health)
        over = run_loads(server.target, load={**random_arrivals, "rate": capacity * 2}, health=health, noise=noise)
    load = over["load"]
    rate = load.counts["arrivals"] / load.seconds
    unloaded, accepted = summary(calm["load"].latencies_ms), summary(load.latencies_ms)
    refused, checks = summary(load.refused_ms), summary(over["health"].latencies_ms)
    report(
        "overload",
        capacity_per_s=round(capacity),
        offered_per_s=round(rate),
        accepted_ms=accepted,
        unloaded_ms=unloaded,
        ratio_p99=round(accepted["p99"] / unloaded["p99"], 2),
        refused_ms=refused,
        health_ms=checks,
        health_unloaded_ms=summary(calm["health"].latencies_ms),
        noise_ms=summary(over["noise"].latencies_ms),
        real_time=is_undisturbed,
        counts=load.counts,
    )
    assert capacity >= MIN_CAPACITY, "a quiet run proves nothing"
    assert rate >= 1.8 * capacity, "the load was not twice of what the server can do"
    assert refused["count"] >= 0.25 * load.counts["arrivals"], "hardly anything was refused: that was no overload"
    assert accepted["count"] / load.seconds >= 0.5 * capacity, "an overloaded server goes on working"
    assert load.counts["QUEUE_FULL"] == refused["count"], "refused for another reason"
    assert load.counts["without RetryInfo"] == 0
    assert refused["p99"] < 10.0
    assert accepted["p99"] <= 1.5 * unloaded["p99"]
    assert checks["p99"] <= 10.0
    assert checks["count"] >= 50 * SECONDS


def test_readers_that_do_not_read_are_cut_and_slow_nobody(tmp_path: Path) -> None:
    """Slow readers end with SLOW_CONSUMER, their sequences live on, and others are as fast as beside good readers."""
    decode = {"seconds": SECONDS, "count": 4}
    readers = {"kind": "reader", "seconds": SECONDS, "count": 3}
    with undisturbed(), _server(tmp_path, *SHIPPED) as server:
        beside_good = run_loads(server.target, decode=decode, readers=readers)
        beside_slow = run_loads(server.target, decode=decode, readers={**readers, "slow": 1})
        used_blocks = server.used_blocks
    good, slow = summary(beside_good["decode"].latencies_ms), summary(beside_slow["decode"].latencies_ms)
    counts = beside_slow["readers"].counts
    report("slow readers", beside_good_ms=good, beside_slow_ms=slow, slow_readers=counts)
    assert slow["count"] >= 4 * SECONDS * 10, "a quiet run proves nothing"
    assert beside_good["readers"].counts["OK"] == 3
    assert counts["SLOW_CONSUMER"] == 3
    assert counts["sequences alive"] == 3
    assert slow["p99"] <= 1.5 * good["p99"]
    assert used_blocks == 0
