"""Forward through a real server: the rows of a prefill, in stretches, and nothing left behind."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc
import numpy as np
import pytest

from ferrule.v1 import executor_pb2, policy_pb2, types_pb2
from ferrule_server.api.limits import ApiLimits
from ferrule_server.engine.settings import EngineSettings
from tests.api.harness import FULL, PROMPT, RunningServer, is_parked, refusal_of, refused, wait_until
from tests.fakes import FakeExecutor, fake_logits

ALL = types_pb2.LOGITS_POSITIONS_ALL
LONG = tuple((7 * i) % 256 for i in range(300))


def request_of(*input_ids: int, **fields: Any) -> executor_pb2.ForwardRequest:
    """Return a ForwardRequest."""
    policy = fields.pop("policy", FULL)
    return executor_pb2.ForwardRequest(input_ids=input_ids, logits_policy=policy, **fields)


def forward(server: RunningServer, *input_ids: int, **fields: Any) -> list[executor_pb2.ForwardResponse]:
    """Call Forward and return its stretches, which must come in order and without gaps."""
    frames = list(server.stub.Forward(request_of(*input_ids, **fields), timeout=20))
    position = 0
    for frame in frames:
        assert frame.first_position == position
        position += frame.outputs.num_rows
    assert [frame.is_last for frame in frames] == [False] * (len(frames) - 1) + [True]
    return frames


def _vector(tensor: types_pb2.Tensor) -> Any:
    assert tensor.dtype == types_pb2.DATA_TYPE_FLOAT32
    return np.frombuffer(tensor.data, "<f4").reshape(tuple(tensor.shape))


def test_its_rows_are_those_of_a_prefill_and_nothing_is_kept(server: RunningServer) -> None:
    """All values of the policy, bit for bit, in one stretch where they fit."""
    policy = policy_pb2.LogitsReturnPolicy(
        full_logits={}, greedy_argmax={}, target_logprobs=True, top_logprobs=2, entropy=True, hidden_state=True
    )
    expected = server.prefill(PROMPT, policy, logits_positions=ALL).outputs
    num_live, num_free = server.engine.snapshot().num_sequences, server.free_blocks
    (frame,) = forward(server, *PROMPT, policy=policy, request_id="f")
    assert frame.outputs == expected
    assert frame.request_id == "f"
    assert len(frame.outputs.target_logprobs) == len(PROMPT) - 1
    assert frame.timing.run_ns > 0
    assert frame.timing.step_rows == len(PROMPT)
    wait_until(lambda: server.engine.snapshot().num_sequences == num_live)
    assert server.free_blocks == num_free


def test_long_inputs_come_in_stretches_that_fit_into_messages() -> None:
    """Each below the limit; together what one would be, targets across the cuts too."""
    with RunningServer(limits=ApiLimits(max_stream_frame_bytes=64 << 10)) as server:
        policy = policy_pb2.LogitsReturnPolicy(full_logits={}, target_logprobs=True)
        frames = forward(server, *LONG, policy=policy)
        assert len(frames) > 4
        assert all(frame.ByteSize() <= 64 << 10 for frame in frames)
        whole = server.prefill(LONG, policy, logits_positions=ALL).outputs
        logits = b"".join(frame.outputs.logits.data for frame in frames)
        rows = np.frombuffer(logits, "<f4").reshape(len(LONG), -1)
        np.testing.assert_allclose(rows, _vector(whole.logits), rtol=1e-5, atol=1e-6)  # other cuts, other sums
        targets = [value for frame in frames for value in frame.outputs.target_logprobs]
        assert len(targets) == len(LONG) - 1
        np.testing.assert_allclose(targets, whole.target_logprobs, rtol=1e-5, atol=1e-6)


def _slow_server() -> RunningServer:
    """Return a server whose rows are large and whose window is small."""
    executor = FakeExecutor(vocab_size=16384, num_blocks=512, max_context=1024)
    limits = ApiLimits(stream_window_bytes=1 << 20, max_stream_frame_bytes=512 << 10)
    return RunningServer(executor, limits=limits, settings=EngineSettings(max_step_time_s=60.0))


def test_a_reader_that_stops_parks_its_own_call_and_nothing_else() -> None:
    """What waits is bounded, others are served, and all rows come once it reads on."""
    tokens = tuple(i % 16384 for i in range(400))
    with _slow_server() as server:
        call = server.stub.Forward(request_of(*tokens), timeout=60)
        first = next(call)
        wait_until(lambda: is_parked(server), 30)
        (stream,) = server.state.streams
        job = stream._job  # type: ignore[attr-defined]
        assert job.rows_run < 400
        assert job.window.sent_bytes - job.window.taken_bytes <= job.window.limit_bytes + (512 << 10)
        num_rows = job.rows_run
        handle = server.prefill((1, 2)).kv_cache
        for _ in range(5):
            handle = server.decode(handle, 7).kv_cache
        assert job.rows_run == num_rows
        frames = [first, *call]
        assert sum(frame.outputs.num_rows for frame in frames) == 400
        assert frames[-1].is_last
        last = _vector(frames[-1].outputs.logits)[-1]
        np.testing.assert_array_equal(last, fake_logits(tokens, 16384))
        server.release(handle)
        wait_until(lambda: server.free_blocks == server.engine.info.num_blocks - 1)


def test_a_reader_that_is_slower_than_a_lease_loses_its_call() -> None:
    """The sequence behind it ends like any other; what was computed is read before the status."""
    with _slow_server() as server:
        call = server.stub.Forward(request_of(*range(400)), timeout=60)
        frames = [next(call)]
        wait_until(lambda: is_parked(server), 30)
        server.clock.offset_s += 61
        wait_until(lambda: server.engine.snapshot().num_streams == 0)
        wait_until(lambda: server.free_blocks == server.engine.info.num_blocks - 1)
        with refused() as refusals:
            frames.extend(call)
        assert (refusals[0].code, refusals[0].reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "SLOW_CONSUMER")
        assert not any(frame.is_last for frame in frames)


@pytest.mark.parametrize("leaves_by", ["cancel", "deadline"])
def test_a_caller_who_leaves_gives_everything_back(leaves_by: str) -> None:
    """Parked or running: no sequence, no block, no place in the queue stays."""
    with _slow_server() as server:
        timeout = 1.0 if leaves_by == "deadline" else 60
        call = server.stub.Forward(request_of(*range(400)), timeout=timeout)
        next(call)
        if leaves_by == "cancel":
            call.cancel()
        else:
            time.sleep(1.0)
        wait_until(lambda: not server.state.streams)
        wait_until(lambda: server.engine.snapshot().num_streams == 0)
        wait_until(lambda: server.free_blocks == server.engine.info.num_blocks - 1)
        wait_until(lambda: server.engine._parts.gate.num_jobs == 0)


def test_a_draining_server_refuses_new_ones_and_ends_what_runs() -> None:
    """A reader that never comes back holds the drain no longer than its grace."""
    with _slow_server() as server:
        handle = server.prefill((1, 2)).kv_cache
        call = server.stub.Forward(request_of(*range(400)), timeout=60)
        next(call)
        drained = asyncio.run_coroutine_threadsafe(server.server.drain(0.3), server.loop)
        wait_until(lambda: server.state.phase.value == "draining")
        with refused() as refusals:
            forward(server, 1, 2)
        assert (refusals[0].code, refusals[0].reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        drained.result(timeout=10)
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
        assert refusal_of(caught.value).reason == "DRAINING"
        assert handle.length == 2
