"""Counts of calls: by name, code and reason, and read while they change."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import grpc
import pytest

from ferrule_server.api.rpc.call_counts import CALL_BOUNDS_S, CallCounts
from ferrule_server.api.rpc.observe import Call

EXECUTOR = "ferrule.v1.ModelExecutorService"


class _Context:
    """gRPC's side of a call that is not there."""


def call_of(rpc: str, service: str = EXECUTOR) -> Call:
    """A call under way."""
    return Call(service, rpc, _Context())  # type: ignore[arg-type]


def ended(counts: CallCounts, call: Call, code: grpc.StatusCode, reason: str = "", duration_ns: int = 0) -> None:
    """Begin and end a call."""
    counts.begin(call)
    call.record_refusal(code, reason)
    call.end_ns = call.begin_ns + max(1, duration_ns)
    counts.end(call)


@pytest.fixture
def switching() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_calls_are_counted_by_method_code_and_reason() -> None:
    """One that is under way is in flight only; one that has ended is counted by how."""
    counts = CallCounts()
    counts.begin(call_of("Prefill"))
    ended(counts, call_of("Prefill"), grpc.StatusCode.OK)
    ended(counts, call_of("Prefill"), grpc.StatusCode.ABORTED, "HANDLE_STALE")
    ended(counts, call_of("Decode"), grpc.StatusCode.ABORTED, "HANDLE_STALE")
    assert counts.in_flight() == {"Prefill": 1, "Decode": 0}
    assert counts.ended() == {
        ("Prefill", "OK", ""): 1,
        ("Prefill", "ABORTED", "HANDLE_STALE"): 1,
        ("Decode", "ABORTED", "HANDLE_STALE"): 1,
    }
    assert counts.ended_for("HANDLE_STALE") == 2


def test_durations_are_told_in_seconds() -> None:
    """A call of 2 ms is in the bucket up to 2 ms."""
    counts = CallCounts()
    ended(counts, call_of("Prefill"), grpc.StatusCode.OK, duration_ns=2_000_000)
    reading = counts.seconds()["Prefill"]
    assert reading.counts[CALL_BOUNDS_S.index(2e-3)] == 1
    assert reading.sum == pytest.approx(2e-3)


@pytest.mark.usefixtures("switching")
def test_readers_see_whole_tables_while_new_rows_come() -> None:
    """Going through what another thread adds to would raise; a reader goes through a copy."""
    counts, stop = CallCounts(), threading.Event()
    failures: list[BaseException] = []

    def count() -> None:
        for index in range(4000):
            ended(counts, call_of(f"Rpc{index}"), grpc.StatusCode.OK)
            counts.refuse_item(f"REASON_{index}")
        stop.set()

    def read() -> None:
        try:
            while not stop.is_set():
                for table in (counts.ended(), counts.in_flight(), counts.seconds(), counts.refused_items()):
                    for _ in table:
                        pass
                counts.ended_for("HANDLE_STALE")
        except RuntimeError as failure:
            failures.append(failure)

    threads = [threading.Thread(target=target) for target in (count, read, read)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(counts.ended()) == len(counts.refused_items()) == 4000
