"""Clients made of the generated stubs alone, which repeat what broke: the server's promises without our own client.

They know one rule: an append whose reply did not come is sent again, word for word.

Every attempt has a short deadline of its own: a call that gRPC forgets shows up as DEADLINE_EXCEEDED among the breaks.
"""

from __future__ import annotations

import queue
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc
from google.protobuf.duration_pb2 import Duration
from grpc_status import rpc_status

from ferrule.v1 import executor_pb2, executor_pb2_grpc, policy_pb2, types_pb2
from tests.chaos.model_policies import EXACT, REJECTION, SEEDED, Drafts, Policy

_PREFILL_S = 20.0
_ATTEMPT_S = 1.0
_STREAM_S = 3.0
_APPEND_S = 60.0
_PAUSE_S = 0.005

LASTING = executor_pb2.CacheOptions(ttl=Duration(seconds=1200))
"""A lease that outlives a campaign, on a slow machine too."""

CHANNEL_OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 10),
    ("grpc.max_reconnect_backoff_ms", 100),
]
"""Connections of one's own, and back within milliseconds: gRPC's default waits a second and more."""


def open_channel(target: str) -> grpc.Channel:
    """Return a channel that shares its connection with no other and comes back fast."""
    return grpc.insecure_channel(target, options=CHANNEL_OPTIONS)


def is_break(error: grpc.RpcError) -> bool:
    """Whether a call ended because its connection or its time did, not because the server said so."""
    codes = (
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.DEADLINE_EXCEEDED,
    )
    return error.code() in codes and rpc_status.from_call(error) is None


@dataclass
class Breaks:
    """What the clients of a run met.

    Attributes:
        codes: Calls that broke, by what gRPC called it.
        replayed: Appends answered as replays.
    """

    codes: Counter[str] = field(default_factory=Counter)
    replayed: int = 0

    def note(self, error: grpc.RpcError) -> None:
        """Count a break and give the channel a moment; anything else is raised."""
        if not is_break(error):
            raise error
        self.codes[error.code().name] += 1
        time.sleep(_PAUSE_S)

    def add(self, other: Breaks) -> None:
        """Add what another client met."""
        self.codes += other.codes
        self.replayed += other.replayed


Input = executor_pb2.DecodeInput | executor_pb2.VerifyInput
Output = executor_pb2.DecodeOutput | executor_pb2.VerifyOutput | executor_pb2.PrefillOutput
"""They have all in common that is read here: a handle, rows and whether it is a replay."""


class Appender(Protocol):
    """Appends tokens to several sequences at once, each exactly once, whatever breaks."""

    def append(self, inputs: Sequence[Input]) -> Sequence[Output]:
        """Return the outputs in the order of the inputs."""
        ...

    def close(self) -> None:
        """Close the connection."""
        ...


def call_until_answered(
    method: Callable[..., Any],
    request: object,
    breaks: Breaks,
    *,
    attempt_s: float = _ATTEMPT_S,
    patience_s: float = _APPEND_S,
) -> Any:  # of the stub
    """Send a request, word for word, until it is answered."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return method(request, timeout=attempt_s)
        except grpc.RpcError as error:
            breaks.note(error)
            if time.monotonic() > deadline:
                raise


class StubClient:
    """A client of stubs with a connection of its own.

    Args:
        target: Where to connect to.
        breaks: Counts what broke.

    Attributes:
        patience_s: How long one request may be repeated.
    """

    patience_s = _APPEND_S

    def __init__(self, target: str, breaks: Breaks) -> None:
        self._channel = open_channel(target)
        self._stub = executor_pb2_grpc.ModelExecutorServiceStub(self._channel)
        self._breaks = breaks

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()


class UnaryAppender(StubClient):
    """One Decode or ForwardVerify for each input, again until it is answered."""

    def append(self, inputs: Sequence[Input]) -> Sequence[Output]:
        """Return the outputs in the order of the inputs."""
        outputs = [self._append(one) for one in inputs]
        self._breaks.replayed += sum(output.replayed for output in outputs)
        return outputs

    def _append(self, one: Input) -> Output:
        if isinstance(one, executor_pb2.DecodeInput):
            return self._call(self._stub.Decode, executor_pb2.DecodeRequest(input=one)).output  # type: ignore[no-any-return]
        return self._call(self._stub.ForwardVerify, executor_pb2.ForwardVerifyRequest(input=one)).output  # type: ignore[no-any-return]

    def _call(self, method: Callable[..., Any], request: object) -> Any:  # of the stub
        return call_until_answered(method, request, self._breaks, patience_s=self.patience_s)


class BatchAppender(UnaryAppender):
    """One BatchDecode for all inputs, the whole of it again until it is answered."""

    def append(self, inputs: Sequence[Input]) -> Sequence[Output]:
        """Return the outputs in the order of the inputs."""
        request = executor_pb2.BatchDecodeRequest(inputs=inputs)  # type: ignore[arg-type]  # no verifies here
        return self._read(self._call(self._stub.BatchDecode, request))

    def _read(self, reply: executor_pb2.BatchDecodeResponse | executor_pb2.UnifiedDecodeResponse) -> Sequence[Output]:
        for place, result in enumerate(reply.results):
            assert result.HasField("output"), f"item {place} failed: {result}"
        outputs = [result.output for result in reply.results]
        self._breaks.replayed += sum(output.replayed for output in outputs)
        return outputs


class UnifiedAppender(BatchAppender):
    """One UnifiedDecode for all inputs."""

    def append(self, inputs: Sequence[Input]) -> Sequence[Output]:
        """Return the outputs in the order of the inputs."""
        batch = executor_pb2.UnifiedBatch(items=[unified_item(one) for one in inputs])
        return self._read(self._call(self._stub.UnifiedDecode, executor_pb2.UnifiedDecodeRequest(batch=batch)))


def unified_item(one: Input) -> executor_pb2.UnifiedBatchItem:
    """Return a decode as a piece of a batch, with its position as a check."""
    return executor_pb2.UnifiedBatchItem(
        q_tokens=one.input_ids,
        kv_cache=one.kv_cache,
        pos_offset=one.kv_cache.length,
        logits_policy=one.logits_policy,
        on_stale=one.on_stale,
    )


class StreamAppender(StubClient):
    """One frame for all inputs; a new stream after each break or _STREAM_S, with those that are not answered yet."""

    _frames: queue.SimpleQueue[executor_pb2.StreamDecodeRequest | None] | None = None

    def append(self, inputs: Sequence[Input]) -> Sequence[Output]:
        """Return the outputs in the order of the inputs."""
        done: dict[int, Output] = {}
        deadline = time.monotonic() + self.patience_s
        while len(done) < len(inputs):
            try:
                self._exchange(inputs, done)
            except grpc.RpcError as error:
                self._breaks.note(error)
            except StopIteration:
                self._breaks.codes["OK"] += 1
            else:
                continue
            self._end_stream()
            assert time.monotonic() < deadline, "no connection lasted long enough"
        self._breaks.replayed += sum(output.replayed for output in done.values())
        return [done[seq] for seq in range(len(inputs))]

    def _exchange(self, inputs: Sequence[Input], done: dict[int, Output]) -> None:
        """Send what has no answer yet as one frame and read until all of it has."""
        if self._frames is None:
            self._frames = queue.SimpleQueue()
            self._call = self._stub.StreamDecode(iter(self._frames.get, None), timeout=_STREAM_S)
        items = [self._item(seq, one) for seq, one in enumerate(inputs) if seq not in done]
        self._frames.put(executor_pb2.StreamDecodeRequest(items=items))
        while len(done) < len(inputs):
            for result in next(self._call).results:
                assert not result.HasField("error"), f"item {result.seq} failed: {result.error}"
                done[result.seq] = getattr(result, str(result.WhichOneof("result")))

    def _item(self, seq: int, one: Input) -> executor_pb2.StreamItem:
        if isinstance(one, executor_pb2.VerifyInput):
            return executor_pb2.StreamItem(seq=seq, verify=one)
        return executor_pb2.StreamItem(seq=seq, decode=one)

    def _end_stream(self) -> None:
        if self._frames is not None:
            self._call.cancel()
            self._frames.put(None)
            self._frames = None

    def close(self) -> None:
        """Close the connection."""
        self._end_stream()
        super().close()


class UnifiedStreamAppender(StreamAppender):
    """The same with pieces of a batch."""

    def _item(self, seq: int, one: Input) -> executor_pb2.StreamItem:
        return executor_pb2.StreamItem(seq=seq, unified=unified_item(one))


@dataclass
class Session:
    """One sequence and what its client saw of it.

    Attributes:
        prompt: Its first tokens.
        policy: What each append asks for.
        handle: The newest one.
        tokens: Drawn by the server so far; all but the last have been appended.
        gaps: Of each drawn token where asked for: by how much the likeliest token leads, in nats.
    """

    prompt: tuple[int, ...]
    policy: policy_pb2.LogitsReturnPolicy
    handle: types_pb2.KvCacheHandle = field(default_factory=types_pb2.KvCacheHandle)
    tokens: list[int] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)

    def begin(self, stub: executor_pb2_grpc.ModelExecutorServiceStub) -> None:
        """Run the prompt."""
        message = executor_pb2.PrefillInput(input_ids=self.prompt, logits_policy=self.policy, cache=LASTING)
        self.take(stub.Prefill(executor_pb2.PrefillRequest(input=message), timeout=_PREFILL_S).output)

    def next_input(self) -> Input:
        """Return what goes on with it."""
        return self.next_decode()

    def next_decode(self) -> executor_pb2.DecodeInput:
        """Return the append of the newest token."""
        return executor_pb2.DecodeInput(input_ids=self.tokens[-1:], kv_cache=self.handle, logits_policy=self.policy)

    def take(self, output: Output) -> None:
        """Note an answer."""
        self.handle = output.kv_cache
        self.tokens += output.outputs.tokens
        if len(output.outputs.top_logprobs) == 2:
            first, second = output.outputs.top_logprobs
            self.gaps.append(first - second)

    @property
    def sent(self) -> list[int]:
        """Tokens that the sequence should hold."""
        return [*self.prompt, *self.tokens[:-1]]


def run_session(appender: Appender, sessions: Sequence[Session], num_appends: int) -> None:
    """Append ``num_appends`` tokens to each of the sessions, all of them side by side."""
    for _ in range(num_appends):
        outputs = appender.append([session.next_input() for session in sessions])
        for session, output in zip(sessions, outputs, strict=True):
            session.take(output)


@dataclass
class VerifySession(Session):
    """One sequence that goes on by verifies of random drafts, the same ones in each run.

    Attributes:
        chance: Draws them. acceptances: of each round in turn. distribution: what the policy asks for.
        num_held: Drafts that held so far. num_rounds: verifies sent.
    """

    chance: random.Random = field(default_factory=random.Random)
    acceptances: tuple[executor_pb2.AcceptanceRule, ...] = (EXACT,)
    distribution: Policy = field(default_factory=lambda: Policy(SEEDED))
    num_held: int = 0
    num_rounds: int = 0

    def next_input(self) -> Input:
        """Return a verify of the newest token and up to three drafts."""
        draft_ids = tuple(self.chance.choices((1, 2), k=self.chance.randint(0, 3)))
        acceptance = self.acceptances[self.num_rounds % len(self.acceptances)]
        self.num_rounds += 1
        has_probs = acceptance == REJECTION and self.chance.random() < 0.7
        probs = tuple(self.chance.choice([(0.25, 0.75), (0.5, 0.5)]) for _ in draft_ids) if has_probs else ()
        drafts = Drafts(draft_ids, acceptance, probs, is_dense=self.chance.random() < 0.2)
        item = drafts.message()
        item.MergeFrom(
            executor_pb2.VerifyInput(input_ids=self.tokens[-1:], kv_cache=self.handle, logits_policy=self.policy)
        )
        return item

    def take(self, output: Output) -> None:
        """Note an answer: the drafts that hold and the token that follows."""
        super().take(output)
        if isinstance(output, executor_pb2.VerifyOutput):
            assert (output.accepted_count + 1, output.next_token) == (output.outputs.num_rows, self.tokens[-1])
            self.num_held += output.accepted_count
