"""AdminService: what warming up runs, what draining serves and refuses, and how long."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ferrule.v1 import admin_pb2, admin_pb2_grpc, cache_pb2, executor_pb2, info_pb2, types_pb2
from tests.api.harness import RunningServer, decode_item, refusal_of, refused, wait_until

Health = health_pb2.HealthCheckResponse


def _admin(server: RunningServer) -> admin_pb2_grpc.AdminServiceStub:
    return admin_pb2_grpc.AdminServiceStub(server.channel)


def _seconds(value: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(int(value * 1e9))
    return duration


def _drain(server: RunningServer, grace_s: float | None = None) -> admin_pb2.DrainResponse:
    request = admin_pb2.DrainRequest(grace=None if grace_s is None else _seconds(grace_s))
    return _admin(server).Drain(request, timeout=20)


def _shut_down(server: RunningServer, grace_s: float | None = None) -> admin_pb2.ShutdownResponse:
    request = admin_pb2.ShutdownRequest(grace=None if grace_s is None else _seconds(grace_s))
    return _admin(server).Shutdown(request, timeout=20)


def _health(server: RunningServer) -> int:
    status: int = health_pb2_grpc.HealthStub(server.channel).Check(health_pb2.HealthCheckRequest(), timeout=10).status
    return status


def _state(server: RunningServer) -> int:
    state: int = server.stub.GetStatus(executor_pb2.GetStatusRequest(), timeout=10).status.state
    return state


def _reason(call: Any) -> str:  # any callable
    with refused() as refusals:
        call()
    return refusals[0].reason


# ---- Warmup ---------------------------------------------------------------------------------------------------------


def test_warming_up_runs_real_steps_and_tells_which(own: RunningServer) -> None:
    """At the sizes asked for, and one prefill as large as a step; no sequence, no block, no handle."""
    handle = own.prefill().kv_cache
    free_blocks, steps_before = own.free_blocks, own.engine.counters.steps
    response = _admin(own).Warmup(admin_pb2.WarmupRequest(batch_sizes=[4, 1, 4]), timeout=20)
    assert list(response.batch_sizes) == [1, 4]
    assert {(step.num_sequences, step.num_rows) for step in response.steps} >= {(1, 1), (4, 4)}
    assert max(step.num_rows for step in response.steps) == 512
    assert sum(step.run_ns for step in response.steps) > 0
    assert own.free_blocks == free_blocks
    assert own.engine.snapshot().num_sequences == 1
    assert own.engine.counters.steps >= steps_before
    assert own.decode(handle, 7).kv_cache.length == handle.length + 1
    own.store.check_integrity()


def test_what_is_warm_is_left_alone(own: RunningServer) -> None:
    """Asked again there is nothing to run; without sizes the executor has its own."""
    first = _admin(own).Warmup(admin_pb2.WarmupRequest(), timeout=20)
    again = _admin(own).Warmup(admin_pb2.WarmupRequest(), timeout=20)
    assert first.steps
    assert list(first.batch_sizes) == sorted(set(first.batch_sizes))
    assert not again.steps
    assert again.batch_sizes == first.batch_sizes


@pytest.mark.parametrize(("sizes", "field"), [([0], "[0]"), ([1, 513], "[1]"), ([1] * 65, "")])
def test_sizes_that_no_step_has_are_refused(own: RunningServer, sizes: list[int], field: str) -> None:
    """From 1 to the rows of a step, and not too many."""
    with refused() as refusals:
        _admin(own).Warmup(admin_pb2.WarmupRequest(batch_sizes=sizes), timeout=20)
    assert (refusals[0].reason, refusals[0].fields) == ("INVALID_FIELD", (f"batch_sizes{field}",))


# ---- Drain ----------------------------------------------------------------------------------------------------------


def test_when_the_grace_is_over_nothing_is_taken(own: RunningServer) -> None:
    """Live handles and open streams hear DRAINING; what only looks, and administration, is still there."""
    handle = own.prefill().kv_cache
    stream = own.open_stream()
    stream.send(decode_item(handle, 7))
    stream.read()
    _drain(own, 0.3)
    stream.send(decode_item(handle, 7))
    assert stream.read().results[0].decode.replayed
    assert _reason(stream.read) == "DRAINING"
    assert _reason(lambda: own.decode(handle, 8)) == "DRAINING"
    assert _state(own) == info_pb2.EXECUTOR_STATE_DRAINING
    assert _drain(own).live_sequences == 1
    assert _reason(lambda: own.decode(handle, 8)) == "DRAINING"  # what is closed stays closed
    own.stub.GetModelInfo(executor_pb2.GetModelInfoRequest(), timeout=10)
    own.stub.GetCapabilities(executor_pb2.GetCapabilitiesRequest(), timeout=10)
    own.stub.GetCacheMetrics(cache_pb2.GetCacheMetricsRequest(), timeout=10)
    assert not own.server.asked_to_stop.is_set()
    _shut_down(own)
    assert own.server.asked_to_stop.is_set()


@pytest.mark.parametrize(("first_s", "later_s"), [(0.4, 60.0), (60.0, 0.1)])
def test_a_later_grace_replaces_the_earlier_one(own: RunningServer, first_s: float, later_s: float) -> None:
    """Longer or shorter."""
    handle = own.prefill().kv_cache
    _drain(own, first_s)
    _drain(own, later_s)
    if later_s > first_s:
        time.sleep(2 * first_s)
        assert own.decode(handle, 8).kv_cache.length == handle.length + 1
    else:
        wait_until(lambda: _is_closed(own, handle))


def _is_closed(server: RunningServer, handle: types_pb2.KvCacheHandle) -> bool:
    """Whether not even a live handle is served."""
    try:
        server.fork(handle)
    except grpc.RpcError as error:
        return refusal_of(error).reason == "DRAINING"
    return False


def test_a_grace_is_not_negative(own: RunningServer) -> None:
    """And must be a duration; nothing has changed then."""
    for grace in (Duration(seconds=-1), Duration(seconds=1, nanos=2_000_000_000)):
        for call, request in (
            (_admin(own).Drain, admin_pb2.DrainRequest(grace=grace)),
            (_admin(own).Shutdown, admin_pb2.ShutdownRequest(grace=grace)),
        ):
            with refused() as refusals:
                call(request, timeout=20)  # type: ignore[arg-type]
            assert refusals[0].fields == ("grace",)
    own.prefill()
    assert _health(own) == Health.SERVING


def test_nothing_is_administered_while_the_model_loads() -> None:
    """STARTING, as everything else."""
    with RunningServer(is_loaded=False) as server:
        for call in (
            lambda: _admin(server).Warmup(admin_pb2.WarmupRequest(), timeout=20),
            lambda: _drain(server),
            lambda: _shut_down(server),
        ):
            assert _reason(call) == "STARTING"


# ---- Shutdown -------------------------------------------------------------------------------------------------------


def _end(server: RunningServer) -> Future[None]:
    """Do what the process does once it is asked to stop."""

    async def end() -> None:
        await server.server.asked_to_stop.wait()
        await server.server.drain()

    return asyncio.run_coroutine_threadsafe(end(), server.loop)


def test_a_shutdown_serves_live_handles_for_its_grace(own: RunningServer) -> None:
    """It is answered at once, with what would be lost; asked again a new grace counts; then nothing is left."""
    ended, handle = _end(own), own.prefill().kv_cache
    assert _shut_down(own, 60.0).live_sequences == 1
    wait_until(lambda: _health(own) == Health.NOT_SERVING)
    assert _reason(own.prefill) == "DRAINING"
    own.decode(handle, 7)
    assert not ended.done()
    assert _shut_down(own, 0.0).live_sequences == 1
    ended.result(timeout=10)
    assert _reason(lambda: own.decode(handle, 8)) == "DRAINING"


def test_a_shutdown_ends_as_soon_as_nothing_is_alive(own: RunningServer) -> None:
    """Long before its grace; a drain before it changes nothing about that."""
    ended, handle = _end(own), own.prefill().kv_cache
    _drain(own, 60.0)
    _shut_down(own, 60.0)
    own.release(handle)
    ended.result(timeout=10)


def test_a_shutdown_after_the_grace_of_a_drain_waits_for_nobody(own: RunningServer) -> None:
    """Who cannot use a handle any more is not waited for."""
    ended, handle = _end(own), own.prefill().kv_cache
    _drain(own, 0.0)
    wait_until(lambda: _is_closed(own, handle))
    started = time.monotonic()
    assert _shut_down(own, 60.0).live_sequences == 1
    ended.result(timeout=10)
    assert time.monotonic() - started < 3.0
