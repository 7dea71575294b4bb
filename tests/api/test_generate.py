"""Generate through a real server: the tokens of a decode loop, every end, and every way of leaving."""

from __future__ import annotations

import asyncio
import threading
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
    EPOCH,
    GREEDY,
    INSTANCE,
    NOTHING,
    PROMPT,
    RunningServer,
    read_status,
    refusal_of,
    refused,
    wait_until,
)
from tests.fakes import FakeExecutor, fake_next_token

REWIND = types_pb2.STALE_POLICY_REWIND
Handle = types_pb2.KvCacheHandle
Output = executor_pb2.GenerateOutput


def sampled(seed: int | None = None, **fields: Any) -> policy_pb2.LogitsReturnPolicy:
    """Return a policy that draws."""
    return policy_pb2.LogitsReturnPolicy(sample=policy_pb2.Sample(seed=seed, **fields))


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


def loop(server: RunningServer, handle: Handle, token: int, count: int, policy: Any = GREEDY) -> list[int]:
    """Return the tokens that decoding one by one gives from ``token`` on, which is the first of them."""
    (branch,), tokens = server.fork(handle), [token]
    while len(tokens) < count:
        output = server.decode(branch, tokens[-1], policy=policy)
        branch = output.kv_cache
        tokens.append(output.outputs.tokens[0])
    server.release(branch)
    return tokens


# ---- the tokens of a decode loop ------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [GREEDY, sampled(11, temperature=0.9), sampled(5, repetition_penalty=1.5)])
def test_its_tokens_are_those_of_a_decode_loop(server: RunningServer, policy: Any) -> None:
    """From a prompt, from a handle with tokens, and from a handle alone."""
    prefilled = server.prefill(PROMPT, policy)
    expected = loop(server, prefilled.kv_cache, prefilled.outputs.tokens[0], 12, policy)
    fresh = Branch(generate(server, *PROMPT, policy=policy, max_tokens=12))
    assert (fresh.tokens, fresh.finish) == (expected, "MAX_TOKENS")
    half = server.prefill(PROMPT[:9], policy).kv_cache
    continued = Branch(generate(server, *PROMPT[9:], kv_cache=half, policy=policy, max_tokens=12))
    assert continued.tokens == expected
    assert continued.handle.cache_id == half.cache_id
    queried = Branch(generate(server, kv_cache=prefilled.kv_cache, policy=policy, max_tokens=12))
    assert queried.tokens == expected
    assert queried.handle.lineage == continued.handle.lineage == fresh.handle.lineage


def test_a_handle_covers_all_before_the_newest_token(server: RunningServer) -> None:
    """In every frame: to go on, it is sent with that token; what is already there is replayed."""
    frames = generate(server, *PROMPT, request_id="g", max_tokens=6)
    assert all(frame.request_id == "g" for frame in frames)
    drawn: list[int] = []
    for frame in frames:
        (output,) = frame.outputs
        drawn += output.outputs.tokens
        assert output.resume_from.length == len(PROMPT) + len(drawn) - 1
        assert frame.timing.run_ns > 0
        assert frame.timing.step_rows > 0
    handles = {output.resume_from.length: output.resume_from for output in Branch(frames).outputs}
    for length, handle in handles.items():
        again = server.decode(handle, drawn[length - len(PROMPT)])
        assert again.replayed is (length < len(PROMPT) + 5)
        assert again.kv_cache.length == length + 1
    assert list(server.info(handles[min(handles)], include_token_ids=True).token_ids) == [*PROMPT, *drawn]


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


def test_without_a_selection_it_draws_and_tells_the_seed(server: RunningServer) -> None:
    """In the first frame of a branch; with it the same tokens come again."""
    frames = generate(server, *PROMPT, policy=NOTHING, max_tokens=6)
    seeds = [output.outputs.seed for output in Branch(frames).outputs if output.outputs.HasField("seed")]
    assert len(seeds) == 1
    assert Branch(frames).outputs[0].outputs.HasField("seed")
    assert not any(output.outputs.HasField("logits") for output in Branch(frames).outputs)
    again = Branch(generate(server, *PROMPT, policy=sampled(seeds[0]), max_tokens=6))
    assert again.tokens == Branch(frames).tokens
    other = Branch(generate(server, *PROMPT, policy=NOTHING, max_tokens=6))
    assert other.outputs[0].outputs.seed != seeds[0]


def test_branches_are_sequences_of_their_own_with_seeds_of_their_own(server: RunningServer) -> None:
    """Branch i draws what a Generate with the seed plus i draws; the first one is on the given sequence."""
    handle = server.prefill().kv_cache
    last_seed = 2**64 - 1
    frames = generate(server, 7, kv_cache=handle, policy=sampled(last_seed), n=3, max_tokens=6)
    branches = [Branch(frames, index) for index in range(3)]
    assert branches[0].handle.cache_id == handle.cache_id
    assert len({branch.handle.cache_id for branch in branches}) == 3
    assert [branch.outputs[0].outputs.seed for branch in branches] == [last_seed, 0, 1]
    for branch in branches:
        alone = generate(server, *PROMPT, 7, policy=sampled(branch.outputs[0].outputs.seed), max_tokens=6)
        assert branch.tokens == Branch(alone).tokens
        assert branch.finish == "MAX_TOKENS"
    greedy = [Branch(generate(server, *PROMPT, n=2), index).tokens for index in range(2)]
    assert greedy[0] == greedy[1]


def test_a_repeated_request_id_goes_on_from_the_same_sequence(server: RunningServer) -> None:
    """Its prompt is not run again, and the same tokens come again, with the seed that was drawn."""
    first = Branch(generate(server, *PROMPT, policy=NOTHING, request_id="one loop", max_tokens=4))
    num_rows = server.engine.counters.prefill_tokens
    again = Branch(generate(server, *PROMPT, policy=NOTHING, request_id="one loop", max_tokens=6))
    assert again.outputs[0].replayed
    assert not first.outputs[0].replayed
    assert again.handle.cache_id == first.handle.cache_id
    assert again.tokens[:4] == first.tokens
    assert again.outputs[0].outputs.seed == first.outputs[0].outputs.seed
    assert server.engine.counters.prefill_tokens == num_rows
    with refused() as refusals:
        generate(server, 1, 2, request_id="one loop")
    assert refusals[0].reason == "REQUEST_ID_REUSED"


def test_tokens_from_the_prefix_cache_are_counted(server: RunningServer) -> None:
    """In the first frame of the first branch."""
    prompt = [*range(50, 90)]
    server.release(server.prefill(prompt).kv_cache)
    frames = generate(server, *prompt, n=2)
    assert Branch(frames).outputs[0].cached_tokens == 32
    assert sum(output.cached_tokens for frame in frames for output in frame.outputs) == 32


# ---- every end ------------------------------------------------------------------------------------------------------

_VOCAB = 2048


@pytest.fixture
def talker() -> Any:
    """A server with a tokenizer, whose next token is a function of all before it, and which has a stop token."""
    tokenizer = Tokenizer.load(DEMO_FOLDER)
    executor = FakeExecutor(vocab_size=_VOCAB, num_blocks=256, max_context=64, eos_ids=(_drawn(5)[4],))
    with RunningServer(executor, tokenizer=tokenizer) as server:
        yield server


def _drawn(count: int, prompt: tuple[int, ...] = (1, 2, 3)) -> list[int]:
    """Return what the fake model draws greedily behind a prompt."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(fake_next_token(tokens, _VOCAB))
    return tokens[len(prompt) :]


def test_every_rule_ends_a_branch_with_its_name(talker: RunningServer) -> None:
    """The token or run that ends it is returned; the model's own stop tokens unless they are ignored."""
    drawn = _drawn(8)
    ids = policy_pb2.TokenIdList
    for fields, num_tokens, finish in (
        ({"max_tokens": 20}, 5, "EOS"),
        ({"max_tokens": 3}, 3, "MAX_TOKENS"),
        ({"ignore_eos": True}, 8, "MAX_TOKENS"),
        ({"stop_token_ids": [drawn[2]]}, 3, "STOP_TOKEN"),
        ({"stop_sequences": [ids(token_ids=[9, 9]), ids(token_ids=drawn[1:4])]}, 4, "STOP_SEQUENCE"),
        ({"max_tokens": None, "ignore_eos": True}, 62, "CONTEXT_FULL"),
    ):
        branch = Branch(generate(talker, 1, 2, 3, **{"max_tokens": 8, **fields}))
        assert (len(branch.tokens), branch.finish) == (num_tokens, finish), fields
        assert branch.tokens[:8] == drawn[:num_tokens]


def test_text_is_returned_and_stop_strings_are_found_across_tokens(talker: RunningServer) -> None:
    """All of the text of the drawn tokens, the stop included."""
    tokenizer = Tokenizer.load(DEMO_FOLDER)
    assert tokenizer is not None
    drawn = _drawn(8)
    text = tokenizer.decode(drawn)
    branch = Branch(generate(talker, 1, 2, 3, ignore_eos=True, return_text=True))
    assert branch.text == text
    border = tokenizer.decode(drawn[:3])
    stop = border[-1:] + tokenizer.decode(drawn[:4])[len(border) :][:1]
    stopped = Branch(generate(talker, 1, 2, 3, ignore_eos=True, return_text=True, stop_strings=["~~", stop]))
    assert stopped.finish == "STOP_SEQUENCE"
    assert stop in stopped.text
    assert text.startswith(stopped.text)
    assert len(stopped.tokens) <= 4
    silent = Branch(generate(talker, 1, 2, 3, ignore_eos=True, stop_strings=[stop]))
    assert (silent.tokens, silent.text) == (stopped.tokens, "")


def test_text_needs_a_tokenizer(server: RunningServer) -> None:
    """What this model cannot do is unsupported, and nothing is run."""
    for fields in ({"return_text": True}, {"stop_strings": ["x"]}):
        with refused() as refusals:
            generate(server, *PROMPT, **fields)
        assert (refusals[0].code, refusals[0].reason) == (grpc.StatusCode.UNIMPLEMENTED, "FEATURE_UNSUPPORTED")


def test_a_pool_that_is_full_ends_a_branch_whose_handle_stays_good() -> None:
    """Room that others free is room to go on in."""
    with RunningServer(FakeExecutor(num_blocks=7, block_size=4)) as server:
        other = server.prefill((9, 9, 9, 9)).kv_cache
        branch = Branch(generate(server, 1, 2, 3, max_tokens=None))
        assert branch.finish == "KV_BLOCKS_EXHAUSTED"
        assert server.info(branch.handle).kv_cache.length == 20
        server.release(other)
        assert server.decode(branch.handle, branch.tokens[-1]).kv_cache.length == branch.handle.length + 1


def test_a_branch_that_fails_says_so_and_the_others_go_on() -> None:
    """A row that is not finite ends its own branch; its last handle stays good."""
    executor = FakeExecutor(vocab_size=_VOCAB, num_blocks=256)
    with RunningServer(executor) as server:
        alone = [Branch(generate(server, 1, 2, 3, policy=sampled(seed))).tokens for seed in (4, 5)]
        executor.bad_token_ids = {alone[1][2]}
        frames = generate(server, 1, 2, 3, policy=sampled(4), n=2)
        good, bad = Branch(frames, 0), Branch(frames, 1)
        assert (good.tokens, good.finish) == (alone[0], "MAX_TOKENS")
        assert (bad.tokens, bad.finish) == (alone[1][:3], "ERROR")
        assert read_status(bad.outputs[-1].error).reason == "NON_FINITE_LOGITS"
        executor.bad_token_ids = set()
        assert server.decode(bad.handle, bad.tokens[-1]).kv_cache.length == bad.handle.length + 1


# ---- errors before the first frame ----------------------------------------------------------------------------------


def test_bad_requests_say_what_is_wrong(server: RunningServer) -> None:
    """The field, and nothing is run."""
    num_steps = server.engine.counters.steps
    ids = policy_pb2.TokenIdList
    for request, field in (
        (request_of(), "input_ids"),
        (request_of(1, 256), "input_ids[1]"),
        (request_of(1, max_tokens=0), "max_tokens"),
        (request_of(1, n=257), "n"),
        (request_of(1, policy=sampled(temperature=-1.0)), "logits_policy.sample.temperature"),
        (request_of(1, stop_token_ids=[256]), "stop_token_ids[0]"),
        (request_of(1, stop_sequences=[ids()]), "stop_sequences[0].token_ids"),
        (request_of(1, request_id="x" * 129), "request_id"),
        (request_of(1, kv_cache=Handle(cache_id="x", length=0, lineage=bytes(16))), "kv_cache.length"),
        (request_of(1, on_stale=9), "on_stale"),
        (request_of(1, 2, cache=executor_pb2.CacheOptions(reserve_length=1)), "cache.reserve_length"),
    ):
        with refused() as refusals:
            list(server.stub.Generate(request, timeout=20))
        assert (refusals[0].code, refusals[0].fields) == (grpc.StatusCode.INVALID_ARGUMENT, (field,))
    assert server.engine.counters.steps == num_steps
    call: Any = server.channel.unary_stream("/ferrule.v1.ModelExecutorService/Generate")
    with refused() as refusals:
        list(call(b"\xff\xff", timeout=10))
    assert refusals[0].fields == ("request",)


def test_handles_that_cannot_be_gone_on_from_say_so(server: RunningServer) -> None:
    """As in Prefill: nothing of the answer has been sent, so it is the status of the call."""
    moved = server.prefill().kv_cache
    server.decode(moved, 7)
    full = server.prefill((1,) * 512).kv_cache
    for handle, input_ids, reason in (
        (Handle(cache_id=f"{INSTANCE}.{EPOCH}.{'A' * 22}", length=3, lineage=bytes(16)), (1,), "HANDLE_UNKNOWN"),
        (Handle(cache_id=f"{INSTANCE}.0123456789ab.{'A' * 22}", length=3, lineage=bytes(16)), (1,), "EPOCH_CHANGED"),
        (Handle(cache_id=f"elsewhere.{EPOCH}.{'A' * 22}", length=3, lineage=bytes(16)), (1,), "WRONG_INSTANCE"),
        (moved, (9,), "HANDLE_STALE"),
        (full, (1,), "CONTEXT_EXCEEDED"),
    ):
        with refused() as refusals:
            generate(server, *input_ids, kv_cache=handle)
        assert refusals[0].reason == reason
    assert Branch(generate(server, 9, kv_cache=moved, on_stale=REWIND)).handle.cache_id == moved.cache_id
    unknown = policy_pb2.LogitsReturnPolicy(greedy_argmax={"token_mask": {"fingerprint": bytes(16)}})
    with refused() as refusals:
        generate(server, 1, policy=unknown)
    assert refusals[0].reason == "MASK_UNKNOWN"


def test_a_prompt_that_finds_no_room_is_refused() -> None:
    """Full now, or larger than the pool."""
    with RunningServer(FakeExecutor(num_blocks=5, block_size=4)) as server:
        server.prefill((9,) * 12)
        for length, reason in ((5, "KV_BLOCKS_EXHAUSTED"), (17, "EXCEEDS_POOL")):
            with refused() as refusals:
                generate(server, *[1] * length)
            assert refusals[0].reason == reason


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
            wait_until(lambda server=server: server.engine._gate.num_jobs == 0)
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
        wait_until(lambda: _is_parked(server), 30)
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
        assert time.monotonic() - started < 5
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


def _is_parked(server: RunningServer) -> bool:
    """Whether the one stream there is has its window closed, and has had for a moment: gRPC takes no more of it."""
    (stream,) = server.state.streams
    window = stream._job.window  # type: ignore[attr-defined]
    taken_bytes = window.taken_bytes
    time.sleep(0.1)
    return not window.is_open and window.taken_bytes == taken_bytes and server.engine.snapshot().num_running == 0


def test_a_parked_call_that_is_cancelled_gives_everything_back() -> None:
    """Nobody waits for a window that never opens."""
    executor = FakeExecutor(vocab_size=16384, num_blocks=512, max_context=1024)
    policy = policy_pb2.LogitsReturnPolicy(greedy_argmax={}, full_logits={})
    with RunningServer(executor, limits=ApiLimits(stream_window_bytes=1 << 18)) as server:
        call = server.stub.Generate(request_of(1, 2, 3, policy=policy, max_tokens=900), timeout=60)
        next(call)
        wait_until(lambda: _is_parked(server), 30)
        call.cancel()
        wait_until(lambda: not server.state.streams)
        wait_until(lambda: server.engine.snapshot().num_streams == 0)
        wait_until(lambda: server.engine._gate.num_jobs == 0)


def test_a_call_that_is_parked_for_longer_than_its_lease_hears_of_that() -> None:
    """A reader that comes back gets what was drawn, and then the reason why there is no more."""
    executor = FakeExecutor(vocab_size=16384, num_blocks=512, max_context=1024)
    policy = policy_pb2.LogitsReturnPolicy(greedy_argmax={}, full_logits={})
    with RunningServer(executor, limits=ApiLimits(stream_window_bytes=1 << 18)) as server:
        call = server.stub.Generate(request_of(1, 2, 3, policy=policy, max_tokens=900), timeout=60)
        first = next(call)
        wait_until(lambda: _is_parked(server), 30)
        server.clock.offset_s += 61
        wait_until(lambda: server.engine.snapshot().num_streams == 0)
        wait_until(lambda: server.free_blocks == server.engine.info.num_blocks - 1)
        branch = Branch([first, *call])
        assert branch.finish == "ERROR"
        assert read_status(branch.outputs[-1].error).reason == "HANDLE_EXPIRED"
        assert branch.tokens == _greedy((1, 2, 3), len(branch.tokens), 16384)


def test_many_at_once_share_steps(server: RunningServer) -> None:
    """Each has the tokens it has alone."""
    results: dict[int, list[int]] = {}

    def run(seed: int) -> None:
        results[seed] = Branch(generate(server, *PROMPT, seed, policy=sampled(seed), max_tokens=30)).tokens

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    for seed in range(0, 12, 5):
        alone = Branch(generate(server, *PROMPT, seed, policy=sampled(seed), max_tokens=30)).tokens
        assert results[seed] == alone


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
