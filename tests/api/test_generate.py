"""Generate through a real server: the tokens of a decode loop, every end, and every way of leaving."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import grpc
import pytest

from ferrule.v1 import executor_pb2, policy_pb2, types_pb2
from ferrule_server.api.limits import ApiLimits
from ferrule_server.api.security.auth import OpenAccess
from ferrule_server.engine.settings import EngineSettings
from ferrule_server.executor.base import DeviceLost
from ferrule_server.quotas import QuotaLimits
from ferrule_server.text.tokenizer import Tokenizer
from tests.api.harness import (
    DEMO_FOLDER,
    GREEDY,
    PROMPT,
    RunningServer,
    is_parked,
    read_status,
    refusal_of,
    refused,
    wait_until,
)
from tests.fakes import FakeExecutor, fake_next_token

REWIND = types_pb2.STALE_POLICY_REWIND
Handle = types_pb2.KvCacheHandle


def request_of(*input_ids: int, policy: Any = GREEDY, **fields: Any) -> executor_pb2.GenerateRequest:
    """Return a GenerateRequest."""
    fields.setdefault("max_tokens", 8)
    return executor_pb2.GenerateRequest(input_ids=input_ids, logits_policy=policy, **fields)


def generate(server: RunningServer, *input_ids: int, **fields: Any) -> list[executor_pb2.GenerateResponse]:
    """Call Generate and return its frames."""
    return list(server.stub.Generate(request_of(*input_ids, **fields), timeout=20))


class Branch:
    """What one branch said, put together.

    Attributes:
        outputs: Its parts, in order.
    """

    def __init__(self, frames: Iterable[executor_pb2.GenerateResponse], index: int = 0) -> None:
        self.outputs = [output for frame in frames for output in frame.outputs if output.index == index]

    @property
    def tokens(self) -> list[int]:
        """Tokens drawn."""
        return [token for output in self.outputs for token in output.outputs.tokens]

    @property
    def finish(self) -> str:
        """Why it ended, which only the last part may tell."""
        assert not any(output.finish_reason for output in self.outputs[:-1])
        return executor_pb2.FinishReason.Name(self.outputs[-1].finish_reason).removeprefix("FINISH_REASON_")

    @property
    def handle(self) -> Handle:
        """The newest handle."""
        return next(output.resume_from for output in reversed(self.outputs) if output.HasField("resume_from"))

    @property
    def text(self) -> str:
        """Its text."""
        return "".join(output.text for output in self.outputs)


# ---- the tokens of a decode loop ------------------------------------------------------------------------------------


def test_rows_come_with_all_that_the_policy_asks_for(server: RunningServer) -> None:
    """As in Decode, in whatever way frames are put together."""
    policy = policy_pb2.LogitsReturnPolicy(
        greedy_argmax={}, full_logits={}, logprobs=True, top_logprobs=3, logprob_token_ids=[1, 2], entropy=True
    )
    branch = Branch(generate(server, *PROMPT, policy=policy, max_tokens=5))
    prefilled = server.prefill(PROMPT, policy)
    handle, outputs = prefilled.kv_cache, [prefilled.outputs]
    while len(outputs) < 5:
        decoded = server.decode(handle, outputs[-1].tokens[0], policy=policy)
        handle = decoded.kv_cache
        outputs.append(decoded.outputs)
    for name in (
        "model_logprobs",
        "sampled_logprobs",
        "top_token_ids",
        "top_logprobs",
        "requested_logprobs",
        "entropies",
    ):
        drawn = [value for output in branch.outputs for value in getattr(output.outputs, name)]
        assert drawn == [value for output in outputs for value in getattr(output, name)], name
    assert b"".join(output.outputs.logits.data for output in branch.outputs) == b"".join(
        output.logits.data for output in outputs
    )


# ---- every end ------------------------------------------------------------------------------------------------------

_VOCAB = 2048


@pytest.fixture
def talker() -> Any:
    """A server with a tokenizer, whose next token is a function of all before it, and which has a stop token."""
    tokenizer = Tokenizer.load(DEMO_FOLDER)
    executor = FakeExecutor(
        vocab_size=_VOCAB, num_blocks=256, max_context=64, eos_ids=(_greedy((1, 2, 3), 5, _VOCAB)[4],)
    )
    with RunningServer(executor, tokenizer=tokenizer) as server:
        yield server


def test_text_is_returned_and_stop_strings_are_found_across_tokens(talker: RunningServer) -> None:
    """All of the text of the drawn tokens before the stop, and the rest of it too if that is asked for."""
    tokenizer = Tokenizer.load(DEMO_FOLDER)
    assert tokenizer is not None
    drawn = _greedy((1, 2, 3), 8, _VOCAB)
    text = tokenizer.decode(drawn)
    branch = Branch(generate(talker, 1, 2, 3, ignore_eos=True, return_text=True))
    assert branch.text == text
    border = tokenizer.decode(drawn[:3])
    stop = border[-1:] + tokenizer.decode(drawn[:4])[len(border) :][:1]
    stopped = Branch(generate(talker, 1, 2, 3, ignore_eos=True, return_text=True, stop_strings=["~~", stop]))
    assert stopped.finish == "STOP_SEQUENCE"
    assert stopped.text == text[: text.index(stop)]
    assert len(stopped.tokens) <= 4
    whole = Branch(
        generate(talker, 1, 2, 3, ignore_eos=True, return_text=True, stop_strings=["~~", stop], include_stop_text=True)
    )
    assert (whole.tokens, whole.text) == (stopped.tokens, tokenizer.decode(stopped.tokens))
    assert stop in whole.text
    silent = Branch(generate(talker, 1, 2, 3, ignore_eos=True, stop_strings=[stop]))
    assert (silent.tokens, silent.text) == (stopped.tokens, "")


# ---- errors before the first frame ----------------------------------------------------------------------------------


def test_what_a_principal_may_not_use_is_refused() -> None:
    """Sequences for all branches, or none; rows waiting; prompt tokens per second; places in the queue."""
    for quotas, fields, reason in (
        (QuotaLimits(handles=2), {"n": 3}, "QUOTA_HANDLES"),
        (QuotaLimits(queued_rows=2), {}, "QUOTA_QUEUED_ROWS"),
        (QuotaLimits(kv_tokens=2), {}, "QUOTA_KV_TOKENS"),
    ):
        with RunningServer(FakeExecutor(), access=OpenAccess(is_admin=True, quotas=quotas)) as server:
            with refused() as refusals:
                generate(server, 1, 2, 3, **fields)
            assert (refusals[0].code, refusals[0].reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, reason)
            wait_until(lambda server=server: server.engine.snapshot().num_streams == 0)
            wait_until(lambda server=server: server.engine._parts.gate.num_jobs == 0)
    with RunningServer(FakeExecutor(step_time_s=0.01), settings=EngineSettings(max_waiting_jobs=1)) as server:
        call = server.stub.Generate(request_of(1, 2, max_tokens=None), timeout=20)
        next(call)
        with refused() as refusals:
            generate(server, 3)
        assert refusals[0].reason == "QUEUE_FULL"
        call.cancel()


def test_a_step_that_fails_ends_the_branch_with_the_fault() -> None:
    """Before the first token it is the status of the call; later an end whose handle is good. So with a lost device."""
    executor = FakeExecutor()
    with RunningServer(executor) as server:
        executor.errors = {number: RuntimeError("a bug") for number in (1, 2)}
        with refused() as refusals:
            generate(server, 1, 2, 3)
        assert refusals[0].reason == "ENGINE_FAULT"
        executor.errors = {number: RuntimeError("a bug") for number in (6, 7)}
        branch = Branch(generate(server, 1, 2, 3))
        assert (branch.tokens, branch.finish) == (_greedy((1, 2, 3), 3, 32), "ERROR")
        assert read_status(branch.outputs[-1].error).reason == "ENGINE_FAULT"
        assert server.decode(branch.handle, branch.tokens[-1]).kv_cache.length == branch.handle.length + 1
        executor.errors = {len(executor.batches) + 3: DeviceLost("gone")}
        try:
            reason = read_status(Branch(generate(server, 4, 5, 6)).outputs[-1].error).reason
        except grpc.RpcError as error:
            reason = refusal_of(error).reason
        assert reason in ("HANDLE_LOST", "DRAINING")


# ---- leaving --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leaves_by", ["cancel", "deadline"])
def test_a_caller_who_leaves_stops_it_within_a_step(leaves_by: str) -> None:
    """The tip may be ahead of what was read; REWIND goes on from there."""
    executor = FakeExecutor(step_time_s=0.01, num_blocks=256, max_context=512)
    with RunningServer(executor) as server:
        call = server.stub.Generate(
            request_of(1, 2, 3, max_tokens=None), timeout=0.3 if leaves_by == "deadline" else 20
        )
        frames = [next(call) for _ in range(3)]
        if leaves_by == "cancel":
            call.cancel()
        with pytest.raises(grpc.RpcError):
            frames.extend(call)
        wait_until(lambda: not server.state.streams)
        num_steps = len(executor.batches)
        time.sleep(0.1)
        assert len(executor.batches) <= num_steps + 1
        assert server.engine.snapshot().num_streams == 0
        assert server.engine.snapshot().num_running == 0
        branch = Branch(frames)
        output = server.decode(branch.handle, branch.tokens[-1], on_stale=REWIND)
        assert output.outputs.tokens[0] == fake_next_token((1, 2, 3, *branch.tokens), 32)


def test_a_reader_that_stops_parks_its_own_call_and_nothing_else() -> None:
    """What waits is bounded, others are served as before, and all tokens come once it reads on."""
    vocab_size = 16384
    executor = FakeExecutor(vocab_size=vocab_size, num_blocks=512, max_context=1024)
    limits = ApiLimits(stream_window_bytes=1 << 20, max_stream_frame_bytes=512 << 10)
    policy = policy_pb2.LogitsReturnPolicy(greedy_argmax={}, full_logits={})
    with RunningServer(executor, limits=limits) as server:
        handle = server.prefill((5, 6)).kv_cache
        call = server.stub.Generate(request_of(1, 2, 3, policy=policy, max_tokens=400), timeout=60)
        first = next(call)
        wait_until(lambda: is_parked(server), 30)
        (stream,) = server.state.streams
        job = stream._job  # type: ignore[attr-defined]
        num_drawn = job.rows_run
        assert num_drawn < 400
        assert job.window.sent_bytes - job.window.taken_bytes < (1 << 20) + 2 * job.row_bytes
        time.sleep(0.2)
        assert job.rows_run == num_drawn
        started = time.monotonic()
        for _ in range(20):
            handle = server.decode(handle, 7).kv_cache
        assert time.monotonic() - started < 30
        frames = [first, *call]
        branch = Branch(frames)
        assert branch.tokens == _greedy((1, 2, 3), 400, vocab_size)
        assert all(frame.ByteSize() <= 512 << 10 for frame in frames)
        assert job.window.taken_bytes == job.window.sent_bytes


def _greedy(prompt: tuple[int, ...], count: int, vocab_size: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(fake_next_token(tokens, vocab_size))
    return tokens[len(prompt) :]


def test_a_parked_call_that_is_cancelled_gives_everything_back() -> None:
    """Nobody waits for a window that never opens."""
    executor = FakeExecutor(vocab_size=16384, num_blocks=512, max_context=1024)
    policy = policy_pb2.LogitsReturnPolicy(greedy_argmax={}, full_logits={})
    with RunningServer(executor, limits=ApiLimits(stream_window_bytes=1 << 18)) as server:
        call = server.stub.Generate(request_of(1, 2, 3, policy=policy, max_tokens=900), timeout=60)
        next(call)
        wait_until(lambda: is_parked(server), 30)
        call.cancel()
        wait_until(lambda: not server.state.streams)
        wait_until(lambda: server.engine.snapshot().num_streams == 0)
        wait_until(lambda: server.engine._parts.gate.num_jobs == 0)


def test_a_call_thatis_parked_for_longer_than_its_lease_hears_of_that() -> None:
    """A reader that comes back gets what was drawn, and then the reason why there is no more."""
    executor = FakeExecutor(vocab_size=16384, num_blocks=512, max_context=1024)
    policy = policy_pb2.LogitsReturnPolicy(greedy_argmax={}, full_logits={})
    with RunningServer(executor, limits=ApiLimits(stream_window_bytes=1 << 18)) as server:
        call = server.stub.Generate(request_of(1, 2, 3, policy=policy, max_tokens=900), timeout=60)
        first = next(call)
        wait_until(lambda: is_parked(server), 30)
        server.clock.offset_s += 61
        wait_until(lambda: server.engine.snapshot().num_streams == 0)
        wait_until(lambda: server.free_blocks == server.engine.info.num_blocks - 1)
        branch = Branch([first, *call])
        assert branch.finish == "ERROR"
        assert read_status(branch.outputs[-1].error).reason == "HANDLE_EXPIRED"
        assert branch.tokens == _greedy((1, 2, 3), len(branch.tokens), 16384)


def test_a_draining_server_lets_it_go_on_and_refuses_new_ones() -> None:
    """On a live handle until the grace is over; then it ends with DRAINING."""
    executor = FakeExecutor(step_time_s=0.01, num_blocks=1024, max_context=4096)
    with RunningServer(executor) as server:
        handle = server.prefill((1, 2, 3)).kv_cache
        before = Branch(generate(server, 8, 9, request_id="before", max_tokens=3))
        running = server.stub.Generate(request_of(kv_cache=handle, max_tokens=None), timeout=20)
        next(running)
        drained = asyncio.run_coroutine_threadsafe(server.server.drain(0.6), server.loop)
        wait_until(lambda: server.state.phase.value == "draining")
        for fields in ({}, {"request_id": "new"}):
            with refused() as refusals:
                generate(server, 5, 6, **fields)
            assert (refusals[0].code, refusals[0].reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        again = Branch(generate(server, 8, 9, request_id="before", max_tokens=3))
        assert (again.tokens, again.handle) == (before.tokens, before.handle)
        branch = server.fork(handle)[0]
        assert len(Branch(generate(server, kv_cache=branch, max_tokens=3)).tokens) == 3
        assert not drained.done()
        with pytest.raises(grpc.RpcError) as caught:
            list(running)
        assert (caught.value.code(), refusal_of(caught.value).reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        drained.result(timeout=10)


def test_a_drain_waits_for_one_that_comes_to_its_end() -> None:
    """It is under way, so the server is not done before it is."""
    executor = FakeExecutor(step_time_s=0.01, num_blocks=256, max_context=512)
    with RunningServer(executor) as server:
        call = server.stub.Generate(request_of(1, 2, 3, max_tokens=30), timeout=20)
        first = next(call)
        drained = asyncio.run_coroutine_threadsafe(server.server.drain(0.05), server.loop)
        branch = Branch([first, *call])
        assert (len(branch.tokens), branch.finish) == (30, "MAX_TOKENS")
        drained.result(timeout=10)


def test_an_engine_that_closes_ends_it_with_a_status(tmp_path: Path) -> None:
    """DRAINING, in the last frame or as the status of the call; never silence."""
    executor = FakeExecutor(step_time_s=0.01, num_blocks=256, max_context=512)
    with RunningServer(executor) as server:
        call = server.stub.Generate(request_of(1, 2, 3, max_tokens=None), timeout=20)
        first = next(call)
        server.engine.close()
        frames, reason = [first], ""
        try:
            frames.extend(call)
        except grpc.RpcError as error:
            reason = refusal_of(error).reason
        else:
            assert Branch(frames).finish == "ERROR"
            reason = read_status(Branch(frames).outputs[-1].error).reason
        assert reason == "DRAINING"
