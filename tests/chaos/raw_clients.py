"""Clients made of the generated stubs alone, which repeat what broke: the server's promises without our own client.

They know one rule: an append whose reply did not come is sent again, word for word.

Every attempt has a short deadline of its own, because of gRPC itself: where connections are cut all the time, one call
in a few thousand of grpcio 1.75.1 stays queued on a channel that has no connection and makes none, until its deadline
(seen with an echo server of gRPC's own, no code of ours in it; no experiment, retry or backoff setting changes it).
"""

from __future__ import annotations

import queue
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import grpc
from google.protobuf.duration_pb2 import Duration
from grpc_status import rpc_status

from ferrule.v1 import executor_pb2, executor_pb2_grpc, policy_pb2, types_pb2

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


class Appender(Protocol):
    """Appends tokens to several sequences at once, each exactly once, whatever breaks."""

    def append(self, inputs: Sequence[executor_pb2.DecodeInput]) -> list[executor_pb2.DecodeOutput]:
        """Return the outputs in the order of the inputs."""
        ...

    def close(self) -> None:
        """Close the connection."""
        ...


class UnaryAppender:
    """One Decode for each input, again until it is answered.

    Args:
        target: Where to connect to.
        breaks: Counts what broke.
    """

    def __init__(self, target: str, breaks: Breaks) -> None:
        self._channel = open_channel(target)
        self._stub = executor_pb2_grpc.ModelExecutorServiceStub(self._channel)
        self._breaks = breaks

    def append(self, inputs: Sequence[executor_pb2.DecodeInput]) -> list[executor_pb2.DecodeOutput]:
        """Return the outputs in the order of the inputs."""
        return [self._append(one) for one in inputs]

    def _append(self, one: executor_pb2.DecodeInput) -> executor_pb2.DecodeOutput:
        deadline = time.monotonic() + _APPEND_S
        while True:
            try:
                output = self._stub.Decode(executor_pb2.DecodeRequest(input=one), timeout=_ATTEMPT_S).output
            except grpc.RpcError as error:
                self._breaks.note(error)
                if time.monotonic() > deadline:
                    raise
            else:
                self._breaks.replayed += output.replayed
                return output

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()


class StreamAppender:
    """One frame for all inputs; a new stream after each break or _STREAM_S, with those that are not answered yet.

    Args:
        target: Where to connect to.
        breaks: Counts what broke.
    """

    def __init__(self, target: str, breaks: Breaks) -> None:
        self._channel = open_channel(target)
        self._stub = executor_pb2_grpc.ModelExecutorServiceStub(self._channel)
        self._breaks = breaks
        self._frames: queue.SimpleQueue[executor_pb2.StreamDecodeRequest | None] | None = None

    def append(self, inputs: Sequence[executor_pb2.DecodeInput]) -> list[executor_pb2.DecodeOutput]:
        """Return the outputs in the order of the inputs."""
        done: dict[int, executor_pb2.DecodeOutput] = {}
        deadline = time.monotonic() + _APPEND_S
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

    def _exchange(self, inputs: Sequence[executor_pb2.DecodeInput], done: dict[int, executor_pb2.DecodeOutput]) -> None:
        """Send what has no answer yet as one frame and read until all of it has."""
        if self._frames is None:
            self._frames = queue.SimpleQueue()
            self._call = self._stub.StreamDecode(iter(self._frames.get, None), timeout=_STREAM_S)
        items = [executor_pb2.StreamItem(seq=seq, decode=one) for seq, one in enumerate(inputs) if seq not in done]
        self._frames.put(executor_pb2.StreamDecodeRequest(items=items))
        while len(done) < len(inputs):
            for result in next(self._call).results:
                assert result.HasField("decode"), f"item {result.seq} failed: {result.error}"
                done[result.seq] = result.decode

    def _end_stream(self) -> None:
        if self._frames is not None:
            self._call.cancel()
            self._frames.put(None)
            self._frames = None

    def close(self) -> None:
        """Close the connection."""
        self._end_stream()
        self._channel.close()


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

    def next_input(self) -> executor_pb2.DecodeInput:
        """Return the append of the newest token."""
        return executor_pb2.DecodeInput(input_ids=self.tokens[-1:], kv_cache=self.handle, logits_policy=self.policy)

    def take(self, output: executor_pb2.PrefillOutput | executor_pb2.DecodeOutput) -> None:
        """Note an answer."""
        self.handle = output.kv_cache
        self.tokens.append(output.outputs.tokens[0])
        if output.outputs.top_k == 2:
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
