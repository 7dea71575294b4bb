"""Random and damaged messages to every method of every service: always a typed answer, and a server that goes on.

The default run sends a few hundred. ``FERRULE_HYPOTHESIS=long`` sends tens of thousands, from random seeds.
"""

from __future__ import annotations

import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.rpc import status_pb2
from grpc_health.v1 import health_pb2
from grpc_status import rpc_status
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from ferrule.v1 import cache_pb2, executor_pb2, policy_pb2, tokenizer_pb2, types_pb2
from ferrule_server.api.limits import ApiLimits
from ferrule_server.api.serve import SERVICES
from ferrule_server.text.tokenizer import Tokenizer
from tests.api.harness import DEMO_FOLDER, GREEDY, RunningServer, read_status
from tests.api.hostile.strategies import NUM_LIVE, damages, messages, placed, serialized

_IS_LONG = os.environ.get("FERRULE_HYPOTHESIS") == "long"
pytestmark = pytest.mark.timeout(3600 if _IS_LONG else 120)
_HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
_CONTRACT = Path(__file__).parents[3] / "protos" / "README.md"
_IMPOSSIBLE = ("NON_FINITE_LOGITS", "ENGINE_FAULT")
"""In the contract, and never the answer to a message: the executor here has no NaN, and a fault would be a bug."""


def _methods() -> list[MethodDescriptor]:
    pool = descriptor_pool.Default()
    return [method for name in (*SERVICES, _HEALTH) for method in pool.FindServiceByName(name).methods]


METHODS = {f"{method.containing_service.name}.{method.name}": method for method in _methods()}
STREAM = METHODS.pop("ModelExecutorService.StreamDecode")
LAST_CALLS = {name: METHODS.pop(name) for name in ("AdminService.Drain", "AdminService.Shutdown")}
"""Nothing more is served behind them."""


def reasons_of_the_contract() -> set[tuple[str, str]]:
    """Return the (code, reason) pairs of the contract's table, quotas written out."""
    rows = re.findall(r"^\| ([A-Z_]+) \| (`[^|]*`) \|", _CONTRACT.read_text(), re.MULTILINE)
    return {(code, reason) for code, cell in rows for reason in re.findall(r"`([A-Z_]+)\*?`", cell)}


REASONS = {(code, reason) for code, reason in reasons_of_the_contract() if reason not in _IMPOSSIBLE}


def _valid(name: str, live: types_pb2.KvCacheHandle) -> Message:
    """Return a message that is served, for what is drawn to be laid over; empty where no field is needed."""
    sample = policy_pb2.LogitsReturnPolicy(sample=policy_pb2.Sample(temperature=0.5, seed=3))
    decode = executor_pb2.DecodeInput(kv_cache=live, input_ids=[7], logits_policy=sample)
    prompt = executor_pb2.PrefillInput(input_ids=[1, 2, 3], logits_policy=GREEDY)
    piece = executor_pb2.UnifiedBatchItem(q_tokens=[1, 2, 3], logits_policy=GREEDY)
    verify = executor_pb2.VerifyInput(
        kv_cache=live,
        input_ids=[7],
        draft_ids=[8, 9],
        logits_policy=sample,
        acceptance=executor_pb2.ACCEPTANCE_RULE_REJECTION,
        draft_probs={"sparse": {"row_sizes": [1, 2], "token_ids": [8, 9, 10], "probs": [1.0, 0.5, 0.5]}},
    )
    items = [
        executor_pb2.StreamItem(seq=1, decode=decode),
        executor_pb2.StreamItem(seq=2, verify=verify),
        executor_pb2.StreamItem(seq=3, unified=piece),
    ]
    known: dict[str, Message] = {
        "Prefill": executor_pb2.PrefillRequest(input=prompt),
        "BatchPrefill": executor_pb2.BatchPrefillRequest(inputs=[prompt, prompt]),
        "Decode": executor_pb2.DecodeRequest(input=decode),
        "BatchDecode": executor_pb2.BatchDecodeRequest(inputs=[decode]),
        "StreamDecode": executor_pb2.StreamDecodeRequest(items=items),
        "UnifiedDecode": executor_pb2.UnifiedDecodeRequest(batch={"items": [piece]}),
        "ForwardVerify": executor_pb2.ForwardVerifyRequest(input=verify),
        "Forward": executor_pb2.ForwardRequest(input_ids=[1, 2, 3], logits_policy=GREEDY),
        "Generate": executor_pb2.GenerateRequest(input_ids=[1, 2, 3], logits_policy=sample, max_tokens=5),
        "RegisterTokenMask": cache_pb2.RegisterTokenMaskRequest(masks=[bytes([255] * 32)]),
        "ForkCache": cache_pb2.ForkCacheRequest(kv_cache=live),
        "TruncateKv": cache_pb2.TruncateKvRequest(kv_cache=live, new_length=live.length),
        "KeepAlive": cache_pb2.KeepAliveRequest(kv_caches=[live]),
        "GetCacheInfo": cache_pb2.GetCacheInfoRequest(kv_cache=live),
        "Tokenize": tokenizer_pb2.TokenizeRequest(text="def main():"),
        "Detokenize": tokenizer_pb2.DetokenizeRequest(token_ids=[1, 2, 3]),
    }
    return known.get(name, executor_pb2.GetStatusRequest())


class Target:
    """A server under attack, a few live handles on it, and what it answered.

    Attributes:
        answers: How often each answer came, by its code and reason.
    """

    def __init__(self, server: RunningServer, faults: list[str]) -> None:
        self.server = server
        self.answers: Counter[str] = Counter()
        self._faults = faults

    def live(self) -> list[types_pb2.KvCacheHandle]:
        """Return fresh live handles, the only ones there are."""
        self._release_all()
        first = self.server.prefill(range(1, 20)).kv_cache
        live = [first, *self.server.fork(first, NUM_LIVE - 1)]
        self.server.decode(live[1], 9)
        return live

    def call(self, method: MethodDescriptor, frames: Sequence[bytes]) -> None:
        """Send bytes to a method and check every answer."""
        path = f"/{method.containing_service.full_name}/{method.name}"
        reply_type = GetMessageClass(method.output_type)
        try:
            for reply in _replies(self.server.channel, method, path, frames):
                self._check_reply(reply_type.FromString(reply))
            self.answers["OK"] += 1
        except grpc.RpcError as error:
            self._check_error(error, max(map(len, frames)))

    def check(self) -> None:
        """Make sure that the server still serves, that its state is sound, and that nothing went wrong inside."""
        self._release_all()  # a frame may fill the pool with thousands of sequences
        handle = self.server.prefill((1, 2, 3)).kv_cache
        assert self.server.decode(handle, 4).kv_cache.length == 4
        self.server.release(handle)
        self.server.store.check_integrity()
        assert self._faults == []

    def _release_all(self) -> None:
        handles = [sequence.cache_id for sequence in list(self.server.store.registry)]
        for start in range(0, len(handles), 4000):
            part = handles[start : start + 4000]
            self.server.release(*(types_pb2.KvCacheHandle(cache_id=cache_id) for cache_id in part))

    def _check_reply(self, reply: Message) -> None:
        for field, value in reply.ListFields():
            if field.message_type is None or not field.is_repeated:
                continue
            for item in value:
                if getattr(item, "HasField", None) and "error" in item.DESCRIPTOR.fields_by_name:
                    self._check_item(item)

    def _check_item(self, item: Any) -> None:  # a result of a batch, a stream or KeepAlive
        if item.HasField("error"):
            self._check_status(item.error)
        else:
            self.answers["OK (item)"] += 1

    def _check_error(self, error: Any, num_bytes: int) -> None:  # a grpc.RpcError that is a call too
        status = rpc_status.from_call(error)
        if status is not None:
            self._check_status(status)
            return
        code = error.code()
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            assert num_bytes > self.server.limits.max_request_bytes
        else:
            assert code in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.DEADLINE_EXCEEDED), error
        self.answers[f"{code.name} by gRPC or the health protocol"] += 1

    def _check_status(self, status: status_pb2.Status) -> None:
        refusal = read_status(status)
        assert len(status.SerializeToString()) <= 4096
        name = (refusal.code.name, refusal.reason)
        assert name in REASONS or ((name[0], "QUOTA_") in REASONS and name[1].startswith("QUOTA_")), refusal
        self.answers[" / ".join(name)] += 1


def _replies(channel: grpc.Channel, method: MethodDescriptor, path: str, frames: Sequence[bytes]) -> Iterator[bytes]:
    call: Any  # no serializers: bytes in, bytes out
    if method.client_streaming:
        call = channel.stream_stream(path)
        yield from call(iter(frames), timeout=20)
    elif method.server_streaming:
        call = channel.unary_stream(path)
        yield from call(frames[0], timeout=0.2 if method.name == "Watch" else 20)
    else:
        call = channel.unary_unary(path)
        yield call(frames[0], timeout=20)


class _Faults(logging.Handler):
    """Collects what should not be in a log: errors and tracebacks."""

    def __init__(self) -> None:
        super().__init__()
        self.faults: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.ERROR or record.exc_info is not None:
            self.faults.append(f"{record.name}: {record.getMessage()} {record.exc_info}")


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    """A paged-reference server with a tokenizer, attacked by all tests of this file."""
    faults = _Faults()
    logging.getLogger().addHandler(faults)
    try:
        limits = ApiLimits(max_fork_count=8)  # or some Generate draws 256 times the context
        with RunningServer(tokenizer=Tokenizer.load(DEMO_FOLDER), limits=limits) as server:
            target = Target(server, faults.faults)
            yield target
            print("\n".join(f"{count:8} {answer}" for answer, count in sorted(target.answers.items())))
        assert faults.faults == []
    finally:
        logging.getLogger().removeHandler(faults)


_mostly = st.sampled_from((True, True, True, False))


def _attack(num_examples: int, num_examples_long: int) -> Callable[[Any], Any]:
    """Return the settings of an attack: the same few messages every time, or many new ones."""
    return settings(
        max_examples=num_examples_long if _IS_LONG else num_examples,
        derandomize=not _IS_LONG,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )


def _laid_over(name: str, drawn: Message, live: Sequence[types_pb2.KvCacheHandle], *, is_over_valid: bool) -> bytes:
    placed(drawn, live)
    valid = _valid(name, live[0])
    if is_over_valid and type(valid) is type(drawn):
        valid.MergeFrom(drawn)
        drawn = valid
    return serialized(drawn)


def test_the_table_of_the_contract_is_read() -> None:
    """All of it, or the attacks would prove less than they say."""
    pairs = reasons_of_the_contract()
    assert ("INVALID_ARGUMENT", "INVALID_FIELD") in pairs
    assert ("RESOURCE_EXHAUSTED", "QUOTA_") in pairs
    assert ("UNAVAILABLE", "DRAINING") in pairs
    assert len(pairs) >= 26


_RUNS = ("Prefill", "Decode", "Verify", "Forward", "Generate")


@pytest.mark.parametrize("name", METHODS)
def test_any_message_to_any_method_has_a_typed_answer(target: Target, name: str) -> None:
    """Never INTERNAL, never UNKNOWN, never a traceback; and the next request is served."""
    method = METHODS[name]

    @_attack(60 if any(word in name for word in _RUNS) else 16, 3000)
    @given(messages(method.input_type), _mostly, damages())
    def attack(drawn: Message, is_over_valid: bool, damage: Callable[[bytes], bytes]) -> None:
        data = _laid_over(method.name, drawn, target.live(), is_over_valid=is_over_valid)
        target.call(method, [damage(data)])
        target.check()

    attack()


@pytest.mark.parametrize("name", LAST_CALLS)
def test_any_message_that_ends_the_serving_has_a_typed_answer(name: str) -> None:
    """And leaves a server that says what it is doing, and ends."""
    method = LAST_CALLS[name]
    faults: list[str] = []

    @_attack(6, 100)
    @given(messages(method.input_type), damages())
    def attack(drawn: Message, damage: Callable[[bytes], bytes]) -> None:
        with RunningServer() as server:
            Target(server, faults).call(method, [damage(serialized(drawn))])
            assert server.stub.GetStatus(executor_pb2.GetStatusRequest(), timeout=20).status.instance

    attack()


def test_any_frames_on_a_stream_have_typed_answers(target: Target) -> None:
    """A bad item fails alone, a bad frame the stream; neither anything else."""
    frame = st.tuples(messages(STREAM.input_type), _mostly, damages())

    @_attack(30, 10_000)
    @given(st.lists(frame, min_size=1, max_size=4))
    def attack(frames: list[tuple[Message, bool, Callable[[bytes], bytes]]]) -> None:
        live = target.live()
        target.call(
            STREAM,
            [damage(_laid_over("StreamDecode", drawn, live, is_over_valid=valid)) for drawn, valid, damage in frames],
        )
        target.check()

    attack()
