"""Random requests through real gRPC, by unary calls and streams, against a sequential model that predicts each answer.

Every handle ever given out stays in play, those of ended sequences and of earlier runs of the server too. Replies are
dropped and requests sent again, sent twice at once, or cancelled under way; two principals work on one server; its
clock is moved and it is restarted. Code, reason, flags, length, lineage and drawn token of each answer must be those
of the model.

``FERRULE_HYPOTHESIS=long`` runs more than 10 000 steps on random seeds; a failure prints the steps that lead to it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any, ClassVar

import grpc
import hypothesis.strategies as st
import pytest
from google.protobuf.duration_pb2 import Duration
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from ferrule.v1 import cache_pb2, executor_pb2, executor_pb2_grpc, types_pb2
from ferrule_server.api.auth import OpenAccess
from ferrule_server.api.principal import Caller
from ferrule_server.executor.paged_reference import PagedReferenceExecutor
from tests.api.harness import FakeClock, Refusal, RunningServer, read_status, refusal_of
from tests.chaos.figures import report
from tests.chaos.sequential_model import (
    GREEDY,
    MAX_TTL_S,
    NOTHING,
    SEEDED,
    UNSEEDED,
    Answered,
    Expected,
    Forked,
    Issued,
    Policy,
    Refused,
    Sequence,
    SequentialModel,
    Tokens,
    drawn_token,
)

MAX_CONTEXT = 40
MAX_LIVE = 40
PRINCIPALS = ("alice", "bob")
IS_LONG = os.environ.get("FERRULE_HYPOTHESIS") == "long"
MIN_STEPS = 10_000
FAIL, FORK, REWIND = types_pb2.STALE_POLICY_FAIL, types_pb2.STALE_POLICY_FORK, types_pb2.STALE_POLICY_REWIND

# Few different tokens, so that equal continuations (replays, ABA) come up by themselves.
tokens_st = st.lists(st.integers(1, 2), min_size=1, max_size=3).map(tuple)
maybe_tokens_st = st.one_of(tokens_st, tokens_st, tokens_st, st.just(()))
prompt_st = st.lists(st.integers(1, 2), min_size=1, max_size=MAX_CONTEXT + 2).map(tuple)
short_prompt_st = st.lists(st.integers(1, 2), min_size=1, max_size=8).map(tuple)
index_st = st.integers(0, 10_000)
policy_st = st.one_of(
    st.just(Policy(GREEDY)),
    st.builds(Policy, st.just(SEEDED), st.integers(0, 2)),
    st.just(Policy(UNSEEDED)),
    st.just(Policy(NOTHING)),
)
stale_st = st.sampled_from([FAIL, FAIL, FORK, REWIND])
ttl_st = st.sampled_from([None, None, 1.0, 8.0, 300.0, 7200.0])
request_id_st = st.sampled_from(["", "", "a", "b", "c"])
principal_st = st.sampled_from([PRINCIPALS[0], PRINCIPALS[0], PRINCIPALS[0], PRINCIPALS[1]])
how_st = st.sampled_from(["once", "once", "lost", "lost", "twice"])
rpc_st = st.sampled_from(["decode", "prefill", "stream"])


@dataclass(frozen=True)
class AppendRequest:
    """What is appended, to which of the handles, and by whom."""

    principal: str
    index: int
    tokens: Tokens
    policy: Policy
    on_stale: int = FAIL
    request_id: str = ""


append_st = st.builds(AppendRequest, principal_st, index_st, maybe_tokens_st, policy_st, stale_st, request_id_st)


class ModelClock(FakeClock):
    """The model's time: it moves only when the model says so."""

    def __init__(self, model: SequentialModel) -> None:
        super().__init__()
        self._model = model

    def __call__(self) -> float:
        """Return the time."""
        return self._model.clock_s


class NamedAccess(OpenAccess):
    """Whoever calls is who they say they are: enough to have two principals."""

    def admit(self, context: Any) -> Caller:  # of grpc.aio
        """Return the caller that the metadata names."""
        return Caller(dict(context.invocation_metadata())["principal"])


def _as(principal: str) -> tuple[tuple[str, str], ...]:
    return (("principal", principal),)


class Stream:
    """A StreamDecode call of one principal, one item per frame."""

    def __init__(self, stub: executor_pb2_grpc.ModelExecutorServiceStub, metadata: tuple[tuple[str, str], ...]) -> None:
        self._frames: queue.SimpleQueue[executor_pb2.StreamDecodeRequest | None] = queue.SimpleQueue()
        self._replies = stub.StreamDecode(iter(self._frames.get, None), timeout=600, metadata=metadata)
        self._seq = count()

    def exchange(self, item: executor_pb2.DecodeInput) -> executor_pb2.DecodeOutput | Refusal:
        """Send an item and return its output or error."""
        seq = next(self._seq)
        frame = executor_pb2.StreamDecodeRequest(items=[executor_pb2.StreamItem(seq=seq, decode=item)])
        self._frames.put(frame)
        (result,) = next(self._replies).results
        assert (result.seq, result.request_id) == (seq, item.request_id)
        return result.decode if result.HasField("decode") else read_status(result.error)

    def close(self) -> None:
        """Half-close and read to the end."""
        self._frames.put(None)
        assert list(self._replies) == []


@contextlib.contextmanager
def _quiet_log() -> Iterator[None]:
    """Write no line for each of thousands of refusals, which are meant; other tests read the log again afterwards."""
    log = logging.getLogger("ferrule_server")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


class ProtocolMachine(RuleBasedStateMachine):
    """One server, one model of it, and every request about sequences that the server has."""

    steps: ClassVar[Counter[str]] = Counter()
    answers: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.model = SequentialModel(MAX_CONTEXT)
        self._rest = contextlib.ExitStack()
        self._num_since_restart = 0
        self._start()

    def teardown(self) -> None:
        """Every sequence is what the model says, and after their release the pool is empty."""
        try:
            for issued in {each.owner: each for each in self.model.issued if each.owner in self.model.live}.values():
                request = cache_pb2.GetCacheInfoRequest(kv_cache=issued.handle, include_token_ids=True)
                info = self._call(self.server.stub.GetCacheInfo, request, issued.owner.principal).info
                assert tuple(info.token_ids) == issued.owner.tokens
                released = cache_pb2.ReleaseCacheRequest(kv_caches=[issued.handle])
                self._call(self.server.stub.ReleaseCache, released, issued.owner.principal)
                issued.owner.died = "released"
            self.pass_time(MAX_TTL_S + 0.7137)  # sequences whose only reply was dropped end by their leases
            assert self.server.free_blocks == self.server.engine.info.num_blocks - 1
            self.server.store.check_integrity()
        finally:
            self._stop()

    def _stop(self) -> None:
        for stream in self._streams.values():
            stream.close()
        self._rest.close()

    def _start(self) -> None:
        self._rest.enter_context(_quiet_log())
        access = NamedAccess(is_admin=False)
        executor = PagedReferenceExecutor(max_context=MAX_CONTEXT, kv_memory_bytes=4 << 20)
        server = RunningServer(executor, access=access, clock=ModelClock(self.model), epoch=f"run{self.model.epoch}")
        self.server = self._rest.enter_context(server)
        self._streams: dict[str, Stream] = {}

    # ---- calls ------------------------------------------------------------------------------------------------------

    def _call(self, method: Any, request: Any, principal: str) -> Any:  # of the stubs
        return method(request, timeout=20, metadata=_as(principal))

    def _try(self, method: Any, request: Any, principal: str) -> Any:  # of the stubs
        """Return the reply or what was refused."""
        try:
            return self._call(method, request, principal)
        except grpc.RpcError as error:
            return refusal_of(error)

    def _stream(self, principal: str) -> Stream:
        if principal not in self._streams:
            self._streams[principal] = Stream(self.server.stub, _as(principal))
        return self._streams[principal]

    def pick(self, index: int) -> Issued:
        """Return one of the handles given out; as a rule of a live sequence."""
        spread = index * 2_654_435_761 >> 9
        of_live = [each for each in self.model.issued if each.owner in self.model.live]
        choice = of_live if of_live and spread % 8 else self.model.issued
        return choice[spread // 8 % len(choice)]

    # ---- answers ----------------------------------------------------------------------------------------------------

    def check(self, expected: Expected, got: Any) -> None:  # an output or a Refusal
        """Compare an answer with the prediction, and take its handle."""
        if isinstance(expected, Refused) or isinstance(got, Refusal):
            self.check_refusal(expected, got)
            return
        self.answers["replayed" if got.replayed else "answered"] += 1
        assert expected.replayed in (None, got.replayed)
        if isinstance(got, executor_pb2.PrefillOutput):
            assert got.ttl.ToNanoseconds() / 1e9 == expected.ttl_s
        self.check_row(expected, got)
        self.take(got.kv_cache, expected.owner, expected.tokens, is_new=expected.is_new)

    def check_refusal(self, expected: object, got: Any) -> None:
        """Compare a refusal with the prediction."""
        assert isinstance(got, Refusal), f"expected {expected}, got an answer: {got}"
        assert isinstance(expected, Refused), f"expected {expected}, was refused: {got}"
        assert (got.code, got.reason) == (expected.code, expected.reason), got
        if expected.tip_length is not None:
            assert got.metadata["tip_length"] == str(expected.tip_length)
        self.answers[got.reason] += 1

    def check_row(self, expected: Answered, got: Any) -> None:
        """The drawn token is that of the tokens alone; an unseeded draw is the one drawn first."""
        if expected.policy.kind == NOTHING:
            assert not got.HasField("outputs")
            return
        if expected.policy.kind == UNSEEDED and expected.draw.seed is None:
            expected.draw.seed = got.outputs.seed
        if expected.policy.kind != GREEDY:
            assert got.outputs.seed == expected.draw.seed
        assert list(got.outputs.tokens) == [drawn_token(expected.tokens, expected.draw.seed)]

    def take(self, handle: types_pb2.KvCacheHandle, owner: Sequence, tokens: Tokens, *, is_new: bool = False) -> None:
        """Check a handle that was given out and keep it."""
        assert handle.length == len(tokens)
        known = [each.owner for each in self.model.issued if each.handle.cache_id == handle.cache_id]
        assert all(each is owner for each in known)
        assert not (known and is_new)
        same = [each.handle.lineage for each in self.model.issued if each.tokens == tokens]
        assert all(lineage == handle.lineage for lineage in same), "equal tokens, other lineage"
        self.model.issued.append(Issued(handle, owner, tokens))

    # ---- rules ------------------------------------------------------------------------------------------------------

    @initialize(prompt=short_prompt_st, policy=policy_st)
    def begin(self, prompt: Tokens, policy: Policy) -> None:
        """There is one sequence to begin with."""
        self.create(PRINCIPALS[0], prompt, policy)

    @precondition(lambda self: len(self.model.live) < MAX_LIVE)
    @rule(
        principal=principal_st,
        tokens=st.one_of(short_prompt_st, short_prompt_st, prompt_st),
        policy=policy_st,
        ttl_s=ttl_st,
        request_id=request_id_st,
        how=how_st,
    )
    def prefill(
        self, *, principal: str, tokens: Tokens, policy: Policy, ttl_s: float | None, request_id: str, how: str
    ) -> None:
        """Make a sequence, or hear of the one made before."""
        self.create(principal, tokens, policy, ttl_s=ttl_s, request_id=request_id, how=how)

    def create(
        self,
        principal: str,
        tokens: Tokens,
        policy: Policy,
        *,
        ttl_s: float | None = None,
        request_id: str = "",
        how: str = "once",
    ) -> None:
        """Send a Prefill without a handle."""
        message = executor_pb2.PrefillInput(
            input_ids=tokens,
            logits_policy=policy.message(),
            cache=executor_pb2.CacheOptions(ttl=_duration(ttl_s)),
            request_id=request_id,
        )

        def predict() -> Expected:
            return self.model.prefill(principal, tokens, policy, ttl_s, request_id)

        self.send("prefill", message, principal, predict, how)

    @precondition(lambda self: len(self.model.live) < MAX_LIVE)
    @rule(request=append_st, rpc=st.sampled_from(["decode", "stream"]), how=how_st)
    def append(self, request: AppendRequest, rpc: str, how: str) -> None:
        """Append behind any handle: append, query, replay, fork, rewind, or a refusal."""
        self.append_by(rpc, request, None, how)

    @precondition(lambda self: len(self.model.live) < MAX_LIVE)
    @rule(request=append_st, ttl_s=ttl_st, how=how_st)
    def append_by_prefill(self, request: AppendRequest, ttl_s: float | None, how: str) -> None:
        """The same by the call that can change the lease too."""
        self.append_by("prefill", request, ttl_s, how)

    def append_by(self, rpc: str, request: AppendRequest, ttl_s: float | None, how: str) -> None:
        """Send an append."""
        issued = self.pick(request.index)
        item = self.item(rpc, issued, request, ttl_s)

        def predict() -> Expected:
            return self.model.append(
                request.principal,
                issued,
                request.tokens,
                request.policy,
                request.on_stale,
                ttl_s=ttl_s,
                request_id=request.request_id,
            )

        self.send(rpc, item, request.principal, predict, how)

    @precondition(lambda self: len(self.model.live) < MAX_LIVE)
    @rule(index=index_st, policy=policy_st, rpc=rpc_st, how=how_st)
    def continue_as_drawn(self, index: int, policy: Policy, rpc: str, how: str) -> None:
        """Append what an honest client appends: the owner, one token, at the tip where there is one."""
        issued = self.pick(index)
        newest = [each for each in self.model.issued if each.owner is issued.owner and each.tokens == each.owner.tokens]
        issued = newest[-1] if newest else issued
        request = AppendRequest(issued.owner.principal, index, (1 + index % 2,), policy)
        item = self.item(rpc, issued, request)

        def predict() -> Expected:
            return self.model.append(request.principal, issued, request.tokens, policy, FAIL)

        self.send(rpc, item, request.principal, predict, how)

    @rule(index=index_st, tokens=tokens_st, policy=policy_st, on_stale=st.sampled_from([FAIL, REWIND]))
    def append_cancelled_and_sent_again(self, index: int, tokens: Tokens, policy: Policy, on_stale: int) -> None:
        """Hang up under way, so that nobody knows whether it happened, then send the same again."""
        issued = self.pick(index)
        principal = issued.owner.principal
        item = self.item("decode", issued, AppendRequest(principal, index, tokens, policy, on_stale))
        assert isinstance(item, executor_pb2.DecodeInput)
        request = executor_pb2.DecodeRequest(input=item)
        call = self.server.stub.Decode.future(request, timeout=20, metadata=_as(principal))
        call.cancel()
        self.model.append(principal, issued, tokens, policy, on_stale)
        expected = self.model.append(principal, issued, tokens, policy, on_stale)
        if isinstance(expected, Answered):
            expected.replayed = None
        got = self._try(self.server.stub.Decode, request, principal)
        self.check(expected, got if isinstance(got, Refusal) else got.output)
        self.steps["cancelled"] += 1

    @precondition(lambda self: len(self.model.live) < MAX_LIVE)
    @rule(
        principal=principal_st,
        index=index_st,
        cut=st.sampled_from([0, 0, 1, 3]),
        num=st.integers(1, 3),
        ttl_s=ttl_st,
        request_id=request_id_st,
        is_lost=st.booleans(),
    )
    def fork(
        self, *, principal: str, index: int, cut: int, num: int, ttl_s: float | None, request_id: str, is_lost: bool
    ) -> None:
        """Branch, or hear of the branches made before."""
        issued = self.pick(index)
        length = max(1, len(issued.tokens) - cut)
        request = cache_pb2.ForkCacheRequest(
            kv_cache=issued.handle, length=length, count=num, ttl=_duration(ttl_s), request_id=request_id
        )
        for is_checked in (not is_lost, True) if is_lost else (True,):
            expected = self.model.fork(principal, issued, length, num, ttl_s=ttl_s, request_id=request_id)
            got = self._try(self.server.stub.ForkCache, request, principal)
            if is_checked:
                self.check_fork(expected, got)
        self.steps["fork"] += 1

    def check_fork(self, expected: Forked | Refused, got: Any) -> None:  # a ForkCacheResponse or a Refusal
        """Compare the answer to a fork with the prediction, and take its handles."""
        if isinstance(expected, Refused) or isinstance(got, Refusal):
            self.check_refusal(expected, got)
            return
        assert (got.replayed, got.ttl.ToNanoseconds() / 1e9) == (expected.replayed, expected.ttl_s)
        for handle, branch in zip(got.kv_caches, expected.branches, strict=True):
            self.take(handle, branch, expected.tokens)
        self.answers["forked again" if got.replayed else "forked"] += 1

    @rule(principal=principal_st, index=index_st, cut=st.integers(-1, 4), is_lost=st.booleans())
    def truncate(self, principal: str, index: int, cut: int, is_lost: bool) -> None:
        """Shorten a sequence."""
        issued = self.pick(index)
        new_length = max(0, len(issued.tokens) - cut)
        request = cache_pb2.TruncateKvRequest(kv_cache=issued.handle, new_length=new_length)
        for is_checked in (False, True) if is_lost else (True,):
            expected = self.model.truncate(principal, issued, new_length)
            got = self._try(self.server.stub.TruncateKv, request, principal)
            if not is_checked:
                continue
            if isinstance(expected, Refused) or isinstance(got, Refusal):
                self.check_refusal(expected, got)
            else:
                self.take(got.kv_cache, issued.owner, expected)
                self.answers["truncated"] += 1
        self.steps["truncate"] += 1

    @rule(principal=principal_st, index=index_st, is_lost=st.booleans())
    def release(self, principal: str, index: int, is_lost: bool) -> None:
        """End a sequence; whoever cannot is told nothing."""
        issued = self.pick(index)
        request = cache_pb2.ReleaseCacheRequest(kv_caches=[issued.handle])
        for is_checked in (False, True) if is_lost else (True,):
            expected = self.model.release(principal, issued)
            got = self._call(self.server.stub.ReleaseCache, request, principal)
            assert not is_checked or got.results[0].released == expected
        self.steps["release"] += 1

    @rule(principal=principal_st, indices=st.lists(index_st, max_size=4), ttl_s=ttl_st)
    def keep_alive(self, principal: str, indices: list[int], ttl_s: float | None) -> None:
        """Renew leases, many at once."""
        chosen = [self.pick(index) for index in indices]
        request = cache_pb2.KeepAliveRequest(kv_caches=[each.handle for each in chosen], ttl=_duration(ttl_s))
        results = self._call(self.server.stub.KeepAlive, request, principal).results
        for issued, result in zip(chosen, results, strict=True):
            expected = self.model.touch(principal, issued, ttl_s)
            if result.HasField("error") or expected is not None:
                self.check_refusal(expected, read_status(result.error))
            else:
                assert result.lease.ttl.ToNanoseconds() / 1e9 == issued.owner.ttl_s
        self.steps["keep alive"] += 1

    @rule(principal=principal_st, index=index_st)
    def info(self, principal: str, index: int) -> None:
        """Read a sequence back."""
        issued = self.pick(index)
        request = cache_pb2.GetCacheInfoRequest(kv_cache=issued.handle, include_token_ids=True)
        expected = self.model.touch(principal, issued)
        got = self._try(self.server.stub.GetCacheInfo, request, principal)
        if expected is not None or isinstance(got, Refusal):
            self.check_refusal(expected, got)
        else:
            assert tuple(got.info.token_ids) == issued.owner.tokens
            self.take(got.info.kv_cache, issued.owner, issued.owner.tokens)
        self.steps["info"] += 1

    # No sum of these is the length of a lease: what ends just now would be judged by the length of a call.
    @rule(seconds=st.sampled_from([0.7137, 0.7137, 3.1391, 3.1391, 6.3313, 31.9071]))
    def wait(self, seconds: float) -> None:
        """Let leases end."""
        self.pass_time(seconds)
        self.steps["wait"] += 1

    @precondition(lambda self: any(each.died == "expired" for each in self.model.sequences))
    @rule(is_more=st.sampled_from([False, False, False, True]))
    def outlive_tombstones(self, is_more: bool) -> None:
        """Let so much time pass that who expired long ago is forgotten, sometimes."""
        self.pass_time(601.3317 if is_more else 31.9071)
        self.steps["tombstones"] += 1

    def pass_time(self, seconds: float) -> None:
        """Move the clock and wait until the server has collected what expired."""
        self.model.wait(seconds)
        deadline = time.monotonic() + 20
        while self.server.engine.snapshot().num_sequences != len(self.model.live):
            assert time.monotonic() < deadline, "leases that ended were not collected"
            self._call(self.server.stub.KeepAlive, cache_pb2.KeepAliveRequest(), PRINCIPALS[0])  # wakes the engine
            time.sleep(0.005)

    @precondition(lambda self: self._num_since_restart > 25)
    @rule()
    def restart(self) -> None:
        """Stop the server and start another run of it."""
        self._stop()
        self.model.restart()
        self._start()
        self._num_since_restart = 0
        self.steps["restart"] += 1
        self.create(PRINCIPALS[0], (1, 2, 1), Policy(GREEDY))

    @invariant()
    def nothing_was_made_that_nobody_asked_for(self) -> None:
        """There are as many sequences as there should be: no orphan, none lost."""
        self._num_since_restart += 1
        assert self.server.engine.snapshot().num_sequences == len(self.model.live)

    # ---- sending ----------------------------------------------------------------------------------------------------

    def item(
        self, rpc: str, issued: Issued, request: AppendRequest, ttl_s: float | None = None
    ) -> executor_pb2.PrefillInput | executor_pb2.DecodeInput:
        """Return the input of an append."""
        fields: dict[str, Any] = {  # of either message
            "input_ids": request.tokens,
            "kv_cache": issued.handle,
            "logits_policy": request.policy.message(),
            "on_stale": request.on_stale,
            "request_id": request.request_id,
        }
        if rpc != "prefill":
            return executor_pb2.DecodeInput(**fields)
        return executor_pb2.PrefillInput(**fields, cache=executor_pb2.CacheOptions(ttl=_duration(ttl_s)))

    def send(self, rpc: str, item: Any, principal: str, predict: Callable[[], Expected], how: str) -> None:
        """Send once, or once for nothing and once more, or twice at the same time; compare the answers."""
        if how == "twice" and rpc != "stream":
            first, second = predict(), predict()
            calls = [self.future(rpc, item, principal) for _ in range(2)]
            answers = sorted((_outcome(call) for call in calls), key=lambda got: getattr(got, "replayed", False))
            self.check(first, answers[0])
            self.check(second, answers[1])
        else:
            if how == "lost":
                predict()
                self.exchange(rpc, item, principal)
            expected = predict()
            self.check(expected, self.exchange(rpc, item, principal))
        self.steps[f"{rpc} {how}"] += 1

    def future(self, rpc: str, item: Any, principal: str) -> Any:  # grpc.Future
        """Begin a unary call."""
        if rpc == "prefill":
            request = executor_pb2.PrefillRequest(input=item)
            return self.server.stub.Prefill.future(request, timeout=20, metadata=_as(principal))
        return self.server.stub.Decode.future(
            executor_pb2.DecodeRequest(input=item), timeout=20, metadata=_as(principal)
        )

    def exchange(self, rpc: str, item: Any, principal: str) -> Any:  # an output or a Refusal
        """Send and wait for the answer."""
        if rpc == "stream":
            return self._stream(principal).exchange(item)
        return _outcome(self.future(rpc, item, principal))


def _outcome(call: Any) -> Any:  # grpc.Future; an output or a Refusal
    try:
        return call.result().output
    except grpc.RpcError as error:
        return refusal_of(error)


def _duration(seconds: float | None) -> Duration | None:
    return None if seconds is None else Duration(seconds=int(seconds))


def _profile() -> dict[str, Any]:
    """Return the settings: the same runs each time, or many new ones where asked for."""
    if IS_LONG:
        return {"max_examples": 1000, "stateful_step_count": 50, "derandomize": False}
    return {"max_examples": 16, "stateful_step_count": 40, "derandomize": True}


EVERY_ANSWER = {
    "answered",
    "replayed",
    "forked",
    "forked again",
    "truncated",
    "HANDLE_UNKNOWN",
    "HANDLE_EXPIRED",
    "EPOCH_CHANGED",
    "HANDLE_STALE",
    "TRUNCATE_BEYOND",
    "CONTEXT_EXCEEDED",
    "REQUEST_ID_REUSED",
    "INVALID_FIELD",
}
"""What a long run must have met, or it has tested less than it says."""


@pytest.mark.timeout(1800)
def test_every_answer_is_the_predicted_one() -> None:
    """And in a long run there are ten thousand of them, of every kind."""
    profile = settings(
        **_profile(),
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
    started = time.monotonic()
    run_state_machine_as_test(ProtocolMachine, settings=profile)
    steps, answers = ProtocolMachine.steps, ProtocolMachine.answers
    report(
        "protocol state machine",
        steps=steps.total(),
        mismatches=0,
        seconds=round(time.monotonic() - started, 1),
        steps_by_kind=dict(steps),
        answers=dict(answers),
    )
    if IS_LONG:
        assert steps.total() >= MIN_STEPS
        assert set(answers) >= EVERY_ANSWER
