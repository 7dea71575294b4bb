"""A server and the sequential model beside it: how the state machine of the protocol sends, and compares what it hears.

Every handle ever given out stays in play, those of ended sequences and of earlier runs of the server too.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import time
from collections import Counter
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, ClassVar

import grpc
import hypothesis.strategies as st
from google.protobuf.duration_pb2 import Duration
from hypothesis.stateful import RuleBasedStateMachine

from ferrule.v1 import cache_pb2, executor_pb2, executor_pb2_grpc, policy_pb2, types_pb2
from ferrule_server.api.security.auth import OpenAccess
from ferrule_server.api.security.principal import Caller
from ferrule_server.executor.reference import PagedReferenceExecutor
from tests.api.harness import FakeClock, Refusal, RunningServer, read_status, refusal_of
from tests.chaos.model_policies import (
    EXACT,
    GREEDY,
    MASKED,
    MASKS,
    NONE,
    NOTHING,
    PLAIN,
    REJECTION,
    SEEDED,
    SHAPED,
    UNSEEDED,
    Drafts,
    Policy,
    Tokens,
    drawn_token,
    packed,
)
from tests.chaos.sequential_model import (
    FAIL,
    FORK,
    MAX_TTL_S,
    REWIND,
    Answered,
    Ask,
    Expected,
    Issued,
    Refused,
    Sequence,
    SequentialModel,
)

MAX_CONTEXT = 40
MAX_LIVE = 40
BLOCK_SIZE = 2
WINDOW = 2
PRINCIPALS = ("alice", "bob")

# Few different tokens, so that equal continuations (replays, ABA) come up by themselves.
tokens_st = st.lists(st.integers(1, 2), min_size=1, max_size=3).map(tuple)
maybe_tokens_st = st.one_of(tokens_st, tokens_st, tokens_st, st.just(()))
prompt_st = st.lists(st.integers(1, 2), min_size=1, max_size=MAX_CONTEXT + 2).map(tuple)
short_prompt_st = st.lists(st.integers(1, 2), min_size=1, max_size=8).map(tuple)
index_st = st.integers(0, 10_000)
shape_st = st.sampled_from([PLAIN, MASKED, MASKED, SHAPED])
policy_st = st.one_of(
    st.builds(Policy, st.just(GREEDY), st.just(0), shape_st),
    st.builds(Policy, st.just(SEEDED), st.integers(0, 2), shape_st),
    st.builds(Policy, st.just(UNSEEDED), st.just(0), shape_st),
    st.just(Policy(NOTHING)),
)
choosing_st = policy_st.map(lambda policy: policy if policy.chooses else Policy(GREEDY, 0, MASKED))
stale_st = st.sampled_from([FAIL, FAIL, FORK, REWIND])
ttl_st = st.sampled_from([None, None, 1.0, 8.0, 300.0, 7200.0])
request_id_st = st.sampled_from(["", "", "a", "b", "c"])
principal_st = st.sampled_from([PRINCIPALS[0], PRINCIPALS[0], PRINCIPALS[0], PRINCIPALS[1]])
how_st = st.sampled_from(["once", "once", "lost", "lost", "twice"])
rpc_st = st.sampled_from(["decode", "prefill", "stream", "unified"])
ask_st = st.builds(Ask, maybe_tokens_st, policy_st, stale_st, request_id_st)


@st.composite
def drafts_st(draw: st.DrawFn) -> Drafts:
    """Return drafts; most of them go with most policies."""
    draft_ids = tuple(draw(st.lists(st.integers(1, 2), max_size=4)))
    acceptance = draw(st.sampled_from([EXACT, EXACT, REJECTION, REJECTION, NONE]))
    probs: tuple[tuple[float, float], ...] = ()
    if acceptance == REJECTION and draw(st.booleans()):
        probs = tuple(draw(st.sampled_from([(0.25, 0.75), (0.5, 0.5), (0.875, 0.125)])) for _ in draft_ids)
    row_masks: tuple[Tokens, ...] = ()
    if draw(st.integers(0, 3)) == 0:
        row_masks = tuple(draw(st.sampled_from([(1,), (2,), (1, 2), (2, 3)])) for _ in range(len(draft_ids) + 1))
    return Drafts(draft_ids, acceptance, probs, draw(st.booleans()), row_masks, draw(st.booleans()))


@dataclass(frozen=True)
class Item:
    """One append of any kind, as one of many or alone.

    Attributes:
        kind: ``prefill``, ``decode``, ``verify`` or ``unified``. issued: None is a new sequence.
        is_final, shift: Of ``unified``: whether rows are wanted, and by how much ``pos_offset`` is wrong; None: unset.
    """

    kind: str
    issued: Issued | None
    ask: Ask
    is_final: bool = True
    shift: int | None = None

    @property
    def real_ask(self) -> Ask:
        """What it comes to: pieces that are not final return no rows."""
        return self.ask if self.is_final else replace(self.ask, policy=Policy(NOTHING))


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


def as_principal(principal: str) -> tuple[tuple[str, str], ...]:
    """Return the metadata that names who calls."""
    return (("principal", principal),)


_FIELDS = {
    executor_pb2.DecodeInput: "decode",
    executor_pb2.VerifyInput: "verify",
    executor_pb2.UnifiedBatchItem: "unified",
}


class Stream:
    """A StreamDecode call of one principal."""

    def __init__(self, stub: executor_pb2_grpc.ModelExecutorServiceStub, metadata: tuple[tuple[str, str], ...]) -> None:
        self._frames: queue.SimpleQueue[executor_pb2.StreamDecodeRequest | None] = queue.SimpleQueue()
        self._replies = stub.StreamDecode(iter(self._frames.get, None), timeout=600, metadata=metadata)
        self._seq = count()

    def exchange(self, items: SequenceOf[Any]) -> list[Any]:  # inputs; outputs or Refusals
        """Send items as one frame and return their outputs or errors, in order."""
        frame, asked, answers = executor_pb2.StreamDecodeRequest(), dict[int, Any](), dict[int, Any]()
        for item in items:
            seq = next(self._seq)
            getattr(frame.items.add(seq=seq), _FIELDS[type(item)]).CopyFrom(item)
            asked[seq] = item
        self._frames.put(frame)
        while len(answers) < len(asked):
            for result in next(self._replies).results:
                assert result.seq not in answers, "answered twice"
                kind = result.WhichOneof("result")
                assert kind in ("error", _FIELDS[type(asked[result.seq])])
                answers[result.seq] = read_status(result.error) if kind == "error" else getattr(result, kind)
                assert kind == "error" or answers[result.seq].request_id == asked[result.seq].request_id
        return [answers[seq] for seq in asked]

    def close(self) -> None:
        """Half-close and read to the end."""
        self._frames.put(None)
        assert list(self._replies) == []


@contextlib.contextmanager
def quiet_log() -> Iterator[None]:
    """Write no line for each of thousands of refusals, which are meant; other tests read the log again afterwards."""
    log = logging.getLogger("ferrule_server")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


class ProtocolBase(RuleBasedStateMachine):
    """One server and one model of it."""

    steps: ClassVar[Counter[str]] = Counter()
    answers: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.model = SequentialModel(MAX_CONTEXT, window=WINDOW, block_size=BLOCK_SIZE)
        self._rest = contextlib.ExitStack()
        self.num_since_restart = 0
        self.start()

    def teardown(self) -> None:
        """Every sequence is what the model says, and after their release the pool is empty."""
        try:
            for issued in {each.owner: each for each in self.model.issued if each.owner in self.model.live}.values():
                request = cache_pb2.GetCacheInfoRequest(kv_cache=issued.handle, include_token_ids=True)
                info = self.call(self.server.stub.GetCacheInfo, request, issued.owner.principal).info
                assert tuple(info.token_ids) == issued.owner.tokens
                released = cache_pb2.ReleaseCacheRequest(kv_caches=[issued.handle])
                self.call(self.server.stub.ReleaseCache, released, issued.owner.principal)
                issued.owner.died = "released"
            self.pass_time(MAX_TTL_S + 0.7137)  # sequences whose only reply was dropped end by their leases
            assert self.server.free_blocks == self.server.engine.info.num_blocks - 1
            self.server.store.check_integrity()
        finally:
            self.stop()

    def stop(self) -> None:
        """End this run of the server."""
        for stream in self._streams.values():
            stream.close()
        self._rest.close()

    def start(self) -> None:
        """Begin a run of the server; masks have to be registered with each."""
        self._rest.enter_context(quiet_log())
        access = NamedAccess(is_admin=False)
        executor = PagedReferenceExecutor(
            max_context=MAX_CONTEXT, kv_memory_bytes=4 << 20, window=WINDOW, block_size=BLOCK_SIZE
        )
        server = RunningServer(executor, access=access, clock=ModelClock(self.model), epoch=f"run{self.model.epoch}")
        self.server = self._rest.enter_context(server)
        self._streams: dict[str, Stream] = {}
        self._num_masks = 0
        self._named = {principal: self._register(principal) for principal in PRINCIPALS}

    def _register(self, principal: str) -> dict[str, bytes]:
        request = cache_pb2.RegisterTokenMaskRequest(masks=[packed(mask) for mask in MASKS.values()])
        fingerprints = self.call(self.server.stub.RegisterTokenMask, request, principal).fingerprints
        return dict(zip(MASKS, fingerprints, strict=True))

    @property
    def is_full(self) -> bool:
        """Whether there are so many sequences that no rule is to make more.

        No precondition: how far a call came that was cut short is chance, and drawing must not depend on that.
        """
        return len(self.model.live) >= MAX_LIVE

    # ---- calls ------------------------------------------------------------------------------------------------------

    def call(self, method: Any, request: Any, principal: str) -> Any:  # of the stubs
        """Return the reply."""
        return method(request, timeout=20, metadata=as_principal(principal))

    def attempt(self, method: Any, request: Any, principal: str) -> Any:  # of the stubs
        """Return the reply or what was refused."""
        try:
            return self.call(method, request, principal)
        except grpc.RpcError as error:
            return refusal_of(error)

    def stream(self, principal: str) -> Stream:
        """Return the principal's own stream."""
        if principal not in self._streams:
            self._streams[principal] = Stream(self.server.stub, as_principal(principal))
        return self._streams[principal]

    def pick(self, index: int) -> Issued:
        """Return one of the handles given out; as a rule of a live sequence."""
        spread = index * 2_654_435_761 >> 9
        of_live = [each for each in self.model.issued if each.owner in self.model.live]
        choice = of_live if of_live and spread % 8 else self.model.issued
        return choice[spread // 8 % len(choice)]

    # ---- answers ----------------------------------------------------------------------------------------------------

    def check(self, expected: Expected, got: Any, drafts: Drafts | None = None) -> None:  # an output or a Refusal
        """Compare an answer with the prediction, and take its handle."""
        if isinstance(expected, Refused) or isinstance(got, Refusal):
            self.check_refusal(expected, got)
            return
        self.answers["replayed" if got.replayed else "answered"] += 1
        assert expected.replayed in (None, got.replayed)
        if isinstance(got, executor_pb2.PrefillOutput):
            assert got.ttl.ToNanoseconds() / 1e9 == expected.ttl_s
            self.check_cached(got.cached_tokens, len(expected.tokens))
        self.check_rows(expected, got)
        self.take(got.kv_cache, expected.owner, expected.tokens, is_new=expected.is_new)
        if drafts is not None:
            self.check_drafts(expected, got, drafts)

    def check_refusal(self, expected: object, got: Any) -> None:
        """Compare a refusal with the prediction."""
        assert isinstance(got, Refusal), f"expected {expected}, got an answer: {got}"
        assert isinstance(expected, Refused), f"expected {expected}, was refused: {got}"
        assert (got.code, got.reason) == (expected.code, expected.reason), got
        if expected.tip_length is not None:
            assert got.metadata["tip_length"] == str(expected.tip_length)
        self.answers[got.reason] += 1

    def check_rows(self, expected: Answered, got: Any) -> None:
        """The tokens chosen are those of the tokens before alone; an unseeded draw is the one drawn first."""
        if not expected.policy.chooses:
            assert not got.HasField("outputs")
            return
        if expected.policy.kind == UNSEEDED and expected.draw.seed is None:
            expected.draw.seed = got.outputs.seed
        assert got.outputs.HasField("seed") == expected.policy.draws
        if expected.policy.draws:
            assert got.outputs.seed == expected.draw.seed
        if expected.verified is not None:
            tokens = expected.verified.chosen
        else:
            tokens = (drawn_token(expected.tokens, expected.policy, expected.draw.seed, WINDOW),)
        assert (tuple(got.outputs.tokens), got.outputs.num_rows) == (tokens, len(tokens))

    def check_drafts(self, expected: Answered, got: executor_pb2.VerifyOutput, drafts: Drafts) -> None:
        """What holds of the drafts is what the rule says, and every row that is there has its handle."""
        verified = expected.verified
        assert verified is not None
        assert got.HasField("next_token") == (verified.next_token is not None)
        assert got.next_token == (verified.next_token or 0)
        assert (got.accepted_count, list(got.accepted_indices)) == (
            verified.num_held,
            list(range(1, verified.num_held + 1)),
        )
        num_there = len(drafts.draft_ids) if drafts.acceptance == NONE else verified.num_held
        assert len(got.row_handles) == (num_there + 1 if drafts.wants_handles else 0)
        for num_less, handle in enumerate(reversed(got.row_handles)):
            self.take(handle, expected.owner, expected.tokens[: len(expected.tokens) - num_less])
        self.answers["drafts held" if verified.num_held else "no draft held"] += 1

    def check_cached(self, num_cached: int, num_tokens: int) -> None:
        """What comes out of the prefix cache are whole blocks."""
        assert num_cached % BLOCK_SIZE == 0
        assert num_cached <= num_tokens
        self.answers["prefix hit"] += num_cached > 0

    def take(self, handle: types_pb2.KvCacheHandle, owner: Sequence, tokens: Tokens, *, is_new: bool = False) -> None:
        """Check a handle that was given out and keep it."""
        known = self.check_handle(handle, owner, tokens)
        assert not (known and is_new)
        self.model.issued.append(Issued(handle, owner, tokens))

    def check_handle(self, handle: types_pb2.KvCacheHandle, owner: Sequence, tokens: Tokens) -> bool:
        """Check that a handle names these tokens of this sequence; returns whether the sequence was known."""
        assert handle.length == len(tokens)
        known = [each.owner for each in self.model.issued if each.handle.cache_id == handle.cache_id]
        assert all(each is owner for each in known)
        same = [each.handle.lineage for each in self.model.issued if each.tokens == tokens]
        assert all(lineage == handle.lineage for lineage in same), "equal tokens, other lineage"
        return bool(known)

    def pass_time(self, seconds: float) -> None:
        """Move the clock and wait until the server has collected what expired."""
        self.model.wait(seconds)
        deadline = time.monotonic() + 60
        while self.server.engine.snapshot().num_sequences != len(self.model.live):
            assert time.monotonic() < deadline, "leases that ended were not collected"
            self.call(self.server.stub.KeepAlive, cache_pb2.KeepAliveRequest(), PRINCIPALS[0])  # wakes the engine
            time.sleep(0.005)

    # ---- sending ----------------------------------------------------------------------------------------------------

    def policy_message(self, policy: Policy, principal: str) -> policy_pb2.LogitsReturnPolicy:
        """Return a policy, its mask written in each way in turn: all of them ask for the same."""
        if policy.shape == PLAIN or not policy.chooses:
            return policy.message()
        self._num_masks += 1
        match self._num_masks % 3:
            case 0:
                return policy.message()
            case 1:
                return policy.message(policy_pb2.TokenMask(inline_bits=packed(MASKS[policy.shape])))
            case _:
                return policy.message(policy_pb2.TokenMask(fingerprint=self._named[principal][policy.shape]))

    def message(self, item: Item, principal: str) -> Any:  # an input
        """Return the input of an append."""
        ask, kind = item.ask, item.kind
        fields: dict[str, Any] = {  # of either message
            "q_tokens" if kind == "unified" else "input_ids": ask.tokens,
            "kv_cache": None if item.issued is None else item.issued.handle,
            "logits_policy": self.policy_message(ask.policy, principal),
            "on_stale": ask.on_stale,
            "request_id": ask.request_id,
        }
        if kind in ("prefill", "unified"):
            fields["cache"] = cache_options(ask)
        if kind == "unified":
            length = 0 if item.issued is None else len(item.issued.tokens)
            fields["pos_offset"] = None if item.shift is None else length + item.shift
            fields["is_final_chunk"] = None if item.is_final else False
        message = _INPUTS[kind](**fields)
        if ask.drafts is not None:
            message.MergeFrom(ask.drafts.message())
        return message

    def predict(self, item: Item, principal: str, got: Any) -> Expected:  # an output or a Refusal
        """Follow one append on the model; of what was answered it may know the seed."""
        if item.shift or (item.issued is None and item.kind in ("decode", "verify")):
            return Refused(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
        if item.issued is None:
            return self.model.create(principal, item.real_ask)
        told = None if isinstance(got, Refusal) or not got.outputs.HasField("seed") else got.outputs.seed
        return self.model.append(principal, item.issued, item.real_ask, told)

    def send(self, rpc: str, item: Item, principal: str, how: str) -> None:
        """Send once, or once for nothing and once more, or twice at the same time; compare the answers."""
        message = self.message(item, principal)
        if how == "twice" and rpc != "stream":
            calls = [self.future(message, principal) for _ in range(2)]
            answers = sorted((outcome(call) for call in calls), key=lambda got: getattr(got, "replayed", False))
        else:
            answers = [self.exchange(rpc, message, principal) for _ in range(2 if how == "lost" else 1)]
        for number, got in enumerate(answers):
            expected = self.predict(item, principal, got)
            if how != "lost" or number == 1:
                self.check(expected, got, item.ask.drafts)
        self.steps[f"{rpc} {how}"] += 1

    def future(self, message: Any, principal: str) -> Any:  # an input; grpc.Future
        """Begin a unary call."""
        name, make_request = _UNARY[type(message)]
        method = getattr(self.server.stub, name)
        return method.future(make_request(message), timeout=20, metadata=as_principal(principal))

    def exchange(self, rpc: str, message: Any, principal: str) -> Any:  # an input; an output or a Refusal
        """Send and wait for the answer."""
        if rpc == "stream":
            (answer,) = self.stream(principal).exchange([message])
            return answer
        return outcome(self.future(message, principal))


_INPUTS: dict[str, type[Any]] = {  # messages
    "prefill": executor_pb2.PrefillInput,
    "decode": executor_pb2.DecodeInput,
    "verify": executor_pb2.VerifyInput,
    "unified": executor_pb2.UnifiedBatchItem,
}
_UNARY: dict[type[Any], tuple[str, Callable[[Any], Any]]] = {
    executor_pb2.PrefillInput: ("Prefill", lambda message: executor_pb2.PrefillRequest(input=message)),
    executor_pb2.DecodeInput: ("Decode", lambda message: executor_pb2.DecodeRequest(input=message)),
    executor_pb2.VerifyInput: ("ForwardVerify", lambda message: executor_pb2.ForwardVerifyRequest(input=message)),
    executor_pb2.UnifiedBatchItem: (
        "UnifiedDecode",
        lambda message: executor_pb2.UnifiedDecodeRequest(batch=executor_pb2.UnifiedBatch(items=[message])),
    ),
}


def outcome(call: Any) -> Any:  # grpc.Future; an output or a Refusal
    """Return what came of a unary call."""
    try:
        reply = call.result()
    except grpc.RpcError as error:
        return refusal_of(error)
    if isinstance(reply, executor_pb2.UnifiedDecodeResponse):
        (result,) = reply.results
        return result_of(result)
    return reply.output


def result_of(result: Any) -> Any:  # of a batch; an output or a Refusal
    """Return what came of one item of a batch."""
    return read_status(result.error) if result.HasField("error") else result.output


def cache_options(ask: Ask) -> executor_pb2.CacheOptions:
    """Return how a new sequence is kept."""
    return executor_pb2.CacheOptions(ttl=duration(ask.ttl_s), drop_outside_window=ask.drops)


def duration(seconds: float | None) -> Duration | None:
    """Return seconds as a message."""
    return None if seconds is None else Duration(seconds=int(seconds))
