"""StreamDecode through a real server: packing, errors per item, half-close, cancellation, slow readers."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from types import SimpleNamespace

import grpc
import pytest

from ferrule.v1 import executor_pb2, types_pb2
from ferrule_server.api.limits import ApiLimits
from ferrule_server.api.services import executor as executor_service
from ferrule_server.api.streams.decode_stream import DecodeStream
from tests.api.harness import (
    FULL,
    PROMPT,
    RunningServer,
    StreamClient,
    decode_item,
    read_status,
    refusal_of,
    refused,
    wait_until,
)
from tests.fakes import FakeExecutor, fake_next_token


def test_32_items_of_one_frame_share_a_step_and_a_frame(server: RunningServer) -> None:
    """Packed: one frame in, one step, one frame out, each result under its own number."""
    handles = [server.prefill((*PROMPT, i)).kv_cache for i in range(32)]
    steps = server.engine.counters.steps
    stream = server.open_stream()
    stream.send(*(decode_item(handle, 7) for handle in handles), first_seq=100)
    frame = stream.read()
    assert sorted(result.seq for result in frame.results) == list(range(100, 132))
    assert server.engine.counters.steps == steps + 1
    for result in frame.results:
        assert result.decode.kv_cache.cache_id == handles[result.seq - 100].cache_id
        assert result.decode.kv_cache.length == len(PROMPT) + 2
        assert result.decode.timing.step_rows == 32
    assert frame.free_blocks == server.free_blocks
    assert stream.rest() == []


def test_half_close_finishes_what_is_under_way() -> None:
    """Items sent before the half-close are all answered, then the stream ends with OK."""
    executor = FakeExecutor()
    with RunningServer(executor) as server:
        handles = [server.prefill((i, 2, 3)).kv_cache for i in range(4)]
        executor.gate = threading.Event()
        stream = server.open_stream()
        stream.send(*(decode_item(handle, 5) for handle in handles))
        stream.half_close()
        assert executor.is_waiting.wait(10)
        executor.gate.set()
        results = [result for frame in stream.call for result in frame.results]
        assert sorted(result.seq for result in results) == [0, 1, 2, 3]
        assert stream.call.code() is grpc.StatusCode.OK


def test_releases_come_with_the_frame_and_serve_its_items() -> None:
    """A pool of one sequence's size: the release in the frame makes room for the item beside it."""
    with RunningServer(FakeExecutor(num_blocks=3, block_size=4)) as server:
        old = server.prefill((1, 2, 3, 4)).kv_cache
        handle = server.prefill((5, 6, 7, 8)).kv_cache
        stream = server.open_stream()
        stream.send(decode_item(handle, 9))
        assert read_status(stream.read().results[0].error).reason == "KV_BLOCKS_EXHAUSTED"
        stream.send(decode_item(handle, 9), release=[old])
        frames = [stream.read()]
        while not any(frame.results for frame in frames):
            frames.append(stream.read())
        released = [result for frame in frames for result in frame.releases]
        assert [result.released for result in released] == [True]
        assert frames[0].releases
        assert frames[-1].results[0].HasField("decode")
        assert frames[-1].free_blocks == 0
        stream.send(release=[old])
        assert not stream.read().releases[0].released


def test_a_broken_stream_runs_nothing_that_has_no_step_yet() -> None:
    """What is in the step is committed and can be replayed; what waits behind it never happens."""
    executor = FakeExecutor()
    with RunningServer(executor) as server:
        first, second = server.prefill((1, 2, 3)).kv_cache, server.prefill((4, 5, 6)).kv_cache
        executor.gate = threading.Event()
        stream = server.open_stream()
        stream.send(decode_item(first, 7))
        assert executor.is_waiting.wait(10)
        num_steps = len(executor.batches)
        stream.send(decode_item(second, 8), first_seq=1)
        time.sleep(0.1)
        stream.call.cancel()
        wait_until(lambda: not server.state.streams)
        executor.gate.set()
        assert server.decode(first, 7).replayed
        assert server.info(second).kv_cache == second
        assert len(executor.batches) == num_steps
        assert not server.decode(second, 9).replayed


def test_a_reader_that_stops_reading_loses_its_stream_not_its_sequences() -> None:
    """SLOW_CONSUMER ends the stream; the engine went on, others are served, and the appends can be replayed."""
    vocab_size = 32768
    executor = FakeExecutor(vocab_size=vocab_size, num_blocks=512, max_context=1024)
    limits = ApiLimits(max_stream_queue_bytes=1 << 20, max_stream_frame_bytes=256 << 10)
    with RunningServer(executor, limits=limits) as server:
        handle = server.prefill((1, 2, 3)).kv_cache
        stream = server.open_stream()
        wait_until(lambda: bool(server.state.streams))
        for _ in range(400):  # of 4 rows of 128 KiB: gRPC's window grows while it finds room, but not for ever
            stream.send(*(decode_item(handle, policy=FULL) for _ in range(4)))
            time.sleep(0.002)
            if not server.state.streams:
                break
        wait_until(lambda: not server.state.streams)
        assert server.decode(handle, 7).outputs.tokens[0] == fake_next_token((1, 2, 3, 7), vocab_size)
        with pytest.raises(grpc.RpcError) as caught:
            list(stream.call)
        refusal = refusal_of(caught.value)
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "SLOW_CONSUMER")
        assert int(refusal.metadata["queued_bytes"]) > int(refusal.metadata["limit_bytes"]) == 1 << 20


def test_large_results_of_one_step_are_split_into_frames() -> None:
    """No frame passes the limit on one message, however many rows a step has."""
    executor = FakeExecutor(vocab_size=8192)
    with RunningServer(executor, limits=ApiLimits(max_stream_frame_bytes=101_000)) as server:
        handles = [server.prefill((i, 2, 3)).kv_cache for i in range(9)]
        stream = server.open_stream()
        stream.send(*(decode_item(handle, 5, policy=FULL) for handle in handles))
        frames = stream.rest()
        assert [len(frame.results) for frame in frames] == [3, 3, 3]
        assert all(frame.ByteSize() <= 101_000 for frame in frames)


def test_one_stream_carries_many_frames_without_leaking(server: RunningServer) -> None:
    """500 tokens, four sequences: the pending table is empty at the end and the lengths add up."""
    handles = [server.prefill((1, 2, i)).kv_cache for i in range(4)]
    stream = server.open_stream()
    for _ in range(100):
        stream.send(*(decode_item(handle, 7) for handle in handles))
        for result in stream.read().results:
            handles[result.seq] = result.decode.kv_cache
    assert [handle.length for handle in handles] == [103] * 4
    (open_stream,) = server.state.streams
    assert not open_stream._pending  # type: ignore[attr-defined]
    assert stream.rest() == []
    wait_until(lambda: not server.state.streams)


def test_a_stream_that_a_client_only_opens_and_closes_ends_well(server: RunningServer) -> None:
    """No frame at all."""
    stream = StreamClient(server.stub)
    assert stream.rest() == []
    assert stream.call.code() is grpc.StatusCode.OK


def _sends_raw(server: RunningServer, *frames: bytes) -> grpc.RpcError | None:
    """Send frames as bytes, half-close and read to the end; return the status, None for OK."""
    try:
        list(server.raw_stream(*frames))
    except grpc.RpcError as error:
        return error
    return None


def test_a_stream_that_ends_while_its_first_frame_is_written_has_a_status(server: RunningServer) -> None:
    """300 times: the half-close may be read before the write of the answer has returned."""
    assert [_sends_raw(server, b"") for _ in range(300)] == [None] * 300


def test_a_stream_that_fails_while_its_first_frame_is_written_has_a_status(server: RunningServer) -> None:
    """300 times: a frame that is answered at once, and right behind it one that ends the stream."""
    bad_item = executor_pb2.StreamDecodeRequest(items=[executor_pb2.StreamItem(seq=1)]).SerializeToString()
    for _ in range(300):
        error = _sends_raw(server, bad_item, b"\xff\xff\xff\xff")
        assert error is not None
        assert refusal_of(error).fields == ("request",)


def test_a_client_that_hangs_up_during_a_write_is_no_fault(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing above the level DEBUG is logged."""
    executor = FakeExecutor(vocab_size=32768, num_blocks=512, max_context=1024)
    limits = ApiLimits(max_stream_queue_bytes=64 << 20)
    with RunningServer(executor, limits=limits) as server, caplog.at_level(logging.DEBUG, "ferrule_server.api"):
        handle = server.prefill((1, 2, 3)).kv_cache
        stream = server.open_stream()
        for _ in range(40):  # 20 MiB: more than gRPC takes from the writer while nobody reads
            stream.send(*(decode_item(handle, policy=FULL) for _ in range(4)))
        wait_until(lambda: server.state.streams)
        (open_stream,) = server.state.streams
        wait_until(lambda: len(executor.batches) > 160 and open_stream._queue)  # type: ignore[attr-defined]
        time.sleep(0.1)
        assert open_stream._is_writing  # type: ignore[attr-defined]
        stream.call.cancel()
        wait_until(lambda: not server.state.streams)
        time.sleep(0.1)
    assert [record for record in caplog.records if record.levelno > logging.DEBUG] == []


def test_a_client_that_hangs_up_as_its_stream_opens_is_no_fault(
    server: RunningServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The very first thing that is sent fails, and the call is cancelled a moment later."""

    class HungUp(DecodeStream):
        async def run(self) -> None:
            self._writer._context = SimpleNamespace(send_initial_metadata=self._fail)  # type: ignore[assignment]
            await super().run()

        async def _fail(self, _: object) -> None:
            opened.set()
            raise grpc.aio.InternalError("the call is gone")

    opened = threading.Event()
    monkeypatch.setattr(executor_service, "DecodeStream", HungUp)
    stream = StreamClient(server.stub)
    assert opened.wait(10)
    stream.call.cancel()
    wait_until(lambda: not server.state.streams)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_frame_with_too_much_in_it_ends_the_stream(caplog: pytest.LogCaptureFixture) -> None:
    """With its own status, before anything of it is done, and in one line of the log."""
    with RunningServer(limits=ApiLimits(max_items_per_frame=3, max_handles_per_request=3)) as server:
        handle = server.prefill().kv_cache
        for num_items, num_releases, field in ((4, 0, "items"), (0, 4, "release"), (4, 1, "items")):
            caplog.clear()
            stream = server.open_stream()
            stream.send(*[decode_item(handle)] * 3, release=[types_pb2.KvCacheHandle(cache_id="x")] * 3)
            num_results = 0
            while num_results < 3:
                num_results += len(stream.read().results)
            stream.send(*[decode_item(handle)] * num_items, release=[handle] * num_releases)
            with refused() as refusals:
                list(stream.call)
            assert (refusals[0].reason, refusals[0].fields) == ("INVALID_FIELD", (field,))
            assert len(caplog.records) == 1
        assert server.info(handle).kv_cache == handle


def test_many_bad_items_of_a_frame_are_one_line_each_reason(
    server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    """The line says how many."""
    stream = server.open_stream()
    handle = types_pb2.KvCacheHandle(cache_id="elsewhere.x.y", length=1, lineage=bytes(16))
    bad = executor_pb2.VerifyInput(input_ids=[300], kv_cache=handle)
    stream.send(*[None] * 400, *[bad] * 70)
    assert len(stream.read().results) == 470
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert "reason=INVALID_FIELD" in lines[0]
    assert "count=400" in lines[0]
    assert "count=70" in lines[1]


def test_an_id_that_is_too_long_is_not_sent_back(server: RunningServer) -> None:
    """Whatever kind of item carries it: an echo nobody bounds is memory nobody counts."""
    handle = server.prefill().kv_cache
    endless = "x" * 10_000
    stream = server.open_stream()
    stream.send(
        decode_item(handle, request_id=endless),
        executor_pb2.VerifyInput(request_id=endless),
        executor_pb2.UnifiedBatchItem(request_id=endless),
    )
    frame = stream.read()
    assert frame.ByteSize() < 4096
    assert read_status(frame.results[0].error).fields == ("items[0].decode.request_id",)


def test_errors_count_towards_the_bound_of_a_stream(caplog: pytest.LogCaptureFixture) -> None:
    """A client that sends what is refused at once and reads nothing loses its stream."""
    bad = executor_pb2.StreamDecodeRequest(items=[executor_pb2.StreamItem(seq=1)] * 100)
    with RunningServer(limits=ApiLimits(max_stream_queue_bytes=64 << 10)) as server:
        call = server.stub.StreamDecode(itertools.repeat(bad, 1000), timeout=20)
        wait_until(lambda: "SLOW_CONSUMER" in caplog.text)
        with refused() as refusals:
            list(call)
        assert refusals[0].reason == "SLOW_CONSUMER"


@pytest.mark.parametrize("num_good", [0, 1])
def test_releases_come_before_the_errors_of_their_frame(server: RunningServer, num_good: int) -> None:
    """Each frame answers in order: what it ended, then what it ran or refused."""
    handle, old = server.prefill().kv_cache, server.prefill((1, 2)).kv_cache
    stream = server.open_stream()
    stream.send(None, *[decode_item(handle)] * num_good, release=[old])
    frames = stream.rest()
    assert frames[0].releases
    assert sum(len(frame.results) for frame in frames) == 1 + num_good
    assert stream.call.code() is grpc.StatusCode.OK


def test_a_draining_server_refuses_the_new_prompts_of_a_frame_alone() -> None:
    """Repeats of earlier ones and live handles are served beside them; the releases end the drain."""
    with RunningServer() as server:
        handle = server.prefill().kv_cache
        stream = server.open_stream()
        prompt = executor_pb2.UnifiedBatchItem(q_tokens=[1, 2], request_id="early")
        stream.send(prompt)
        early = stream.read().results[0].unified.kv_cache
        drained = asyncio.run_coroutine_threadsafe(server.server.drain(60.0), server.loop)
        wait_until(lambda: server.state.phase.value == "draining")
        late = executor_pb2.UnifiedBatchItem(q_tokens=[1, 2], request_id="late")
        piece = executor_pb2.UnifiedBatchItem(q_tokens=[3], kv_cache=early)
        stream.send(executor_pb2.UnifiedBatchItem(q_tokens=[1, 2]), late, prompt, piece, decode_item(handle, 7))
        results: dict[int, executor_pb2.StreamResult] = {}
        while len(results) < 5:
            results.update((result.seq, result) for result in stream.read().results)
        assert [read_status(results[seq].error).reason for seq in (0, 1)] == ["DRAINING"] * 2
        assert (results[2].unified.kv_cache, results[2].unified.replayed) == (early, True)
        assert results[3].unified.kv_cache.length == 3
        assert results[4].decode.kv_cache.length == len(PROMPT) + 1
        stream.send(release=[handle, early])
        stream.read()
        drained.result(timeout=10)
