"""Requests of any length: the same message, in bounded time without a pause, in bounded memory."""

from __future__ import annotations

import asyncio
import contextlib
import struct
import time
import tracemalloc
from collections.abc import Iterator
from unittest import mock

import pytest
from google.protobuf.message import DecodeError, Message
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ferrule.v1 import cache_pb2, executor_pb2, policy_pb2, tokenizer_pb2, types_pb2
from ferrule_server.api.receiving import parsing
from ferrule_server.api.receiving.parsing import MAX_MESSAGES, PIECE_BYTES, PLAIN_BYTES, parse
from ferrule_server.errors import FeatureUnsupported, InvalidRequest
from ferrule_server.fairness import turns
from tests.api.hostile.strategies import damages, messages, serialized

TYPES: tuple[type[Message], ...] = (
    executor_pb2.BatchPrefillRequest,
    executor_pb2.UnifiedDecodeRequest,
    executor_pb2.StreamDecodeRequest,
    executor_pb2.ForwardVerifyRequest,
    executor_pb2.GenerateRequest,
    cache_pb2.KeepAliveRequest,
)


def parsed(kind: type[Message], data: bytes) -> Message:
    """Parse on a loop of its own."""
    message = kind()
    asyncio.run(parse(message, data, contextlib.nullcontext()))
    return message


BIASED = executor_pb2.GenerateRequest(
    logits_policy=policy_pb2.LogitsReturnPolicy(sample=policy_pb2.Sample(logit_bias={3: 0.5}))
)


HOW = {"short": (1 << 30, 1 << 30), "counted": (0, 1 << 30), "counted before": (0, 0)}
"""The lengths from which messages are counted, and from which before they are parsed."""


@contextlib.contextmanager
def lengths(how: str) -> Iterator[None]:
    """Parse requests as if they were short or long."""
    piece_bytes, plain_bytes = HOW[how]
    with mock.patch.multiple(parsing, PIECE_BYTES=piece_bytes, PLAIN_BYTES=plain_bytes):
        yield


def num_messages(message: Message) -> int:
    """Return how many messages there are in a message, by the slow way."""
    found = 0
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        is_map = field.message_type.GetOptions().map_entry
        parts = value if field.is_repeated else [value]
        found += len(parts) + (0 if is_map else sum(map(num_messages, parts)))
    return found


@settings(max_examples=300)
@given(
    st.sampled_from(TYPES).flatmap(lambda kind: st.tuples(st.just(kind), messages(kind.DESCRIPTOR))),
    st.sampled_from([*HOW]),
)
@example((executor_pb2.GenerateRequest, BIASED), "counted before")
def test_every_length_gives_the_same_message(drawn: tuple[type[Message], Message], how: str) -> None:
    """And the same count; NaN compares by its bytes."""
    kind, message = drawn
    data = serialized(message)
    try:
        expected = kind.FromString(data)
    except DecodeError:  # text that is not UTF-8
        return
    found = kind()
    with lengths(how):
        count = asyncio.run(parse(found, data, contextlib.nullcontext()))
    assert serialized(found) == serialized(expected)
    assert count == (0 if how == "short" or not data else num_messages(expected))


def test_a_huge_entry_of_a_map_is_parsed_as_it_is() -> None:
    """Only a client that means harm sends one: the last key and value within it count."""
    entry = b"\x08\x03" * PIECE_BYTES + b"\x15" + struct.pack("<f", 0.5)
    sample = b"\x52" + _length(len(entry)) + entry
    data = b"\x1a" + _length(len(sample)) + sample
    assert parsed(policy_pb2.LogitsReturnPolicy, data) == BIASED.logits_policy


@settings(max_examples=300)
@given(
    st.sampled_from(TYPES).flatmap(lambda kind: st.tuples(st.just(kind), messages(kind.DESCRIPTOR))),
    damages(),
    st.sampled_from([*HOW]),
)
def test_what_protobuf_refuses_is_refused(drawn: tuple[type[Message], Message], damage: object, how: str) -> None:
    """With DecodeError and nothing else, unless there is a field that no version of the contract has."""
    kind, message = drawn
    data = damage(serialized(message))  # type: ignore[operator]
    with lengths(how):
        try:
            found = parsed(kind, data)
        except DecodeError:
            return
        except FeatureUnsupported:
            whole = kind.FromString(data)
            num_bytes = whole.ByteSize()
            whole.DiscardUnknownFields()
            assert whole.ByteSize() < num_bytes
            return
    assert serialized(found) == serialized(kind.FromString(data))


@pytest.mark.parametrize("num_bytes", [1 << 19, 1 << 20, 16 << 20])
def test_a_huge_list_of_nothing_is_refused(num_bytes: int) -> None:
    """The longest lists before anything is made of them: 16 MB of empty messages took 500 MB and a second."""
    data = b"\x0a\x00" * (num_bytes // 2)
    tracemalloc.start()
    with pytest.raises(InvalidRequest, match=f"more than {MAX_MESSAGES} messages"):
        parsed(executor_pb2.BatchPrefillRequest, data)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 1 << 20
    inner = b"\x52\x00" * (num_bytes // 4)  # token_masks, in an item of a frame
    verify = b"\x1a" + _length(len(inner)) + inner
    with pytest.raises(InvalidRequest):
        parsed(executor_pb2.StreamDecodeRequest, b"\x0a" + _length(len(verify)) + verify)


def _length(number: int) -> bytes:
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes((*out, number))


def _many() -> dict[str, Message]:
    policy = policy_pb2.LogitsReturnPolicy(sample=policy_pb2.Sample(logit_bias=dict.fromkeys(range(120), 1.0)))
    prefill = executor_pb2.PrefillInput(input_ids=range(100_000, 102_000), logits_policy=policy)
    item = executor_pb2.UnifiedBatchItem(q_tokens=range(100_000, 104_000), logits_policy=policy)
    handle = types_pb2.KvCacheHandle(cache_id="x" * 60, length=7, lineage=bytes(16))
    return {
        "batch": executor_pb2.BatchPrefillRequest(inputs=[prefill] * 400),
        "one field": executor_pb2.UnifiedDecodeRequest(batch={"items": [item] * 300}),
        "frame": executor_pb2.StreamDecodeRequest(
            items=[{"decode": {"kv_cache": handle}}] * 5000, release=[handle] * 5000
        ),
    }


@pytest.mark.parametrize("name", ["batch", "one field", "frame"])
def test_others_run_while_a_large_request_is_parsed(name: str) -> None:
    """The longest time without a pause is what protobuf itself takes, whatever the machine, and a few milliseconds."""
    message = _many()[name]
    data = message.SerializeToString()
    begin_s = time.thread_time()
    type(message).FromString(data).SerializeToString()
    protobuf_s = time.thread_time() - begin_s
    assert len(data) > 4 * PIECE_BYTES
    expected = num_messages(message)

    async def longest_pause_s() -> float:
        longest_s, is_over = 0.0, False

        async def watch() -> None:
            nonlocal longest_s
            last_s = time.thread_time()
            while not is_over:
                await asyncio.sleep(0)
                now_s = time.thread_time()
                longest_s, last_s = max(longest_s, now_s - last_s), now_s

        task = asyncio.create_task(watch())
        await asyncio.sleep(0)
        found = type(message)()
        assert await parse(found, data, contextlib.nullcontext()) == expected
        is_over = True
        await task
        assert found == message
        return longest_s

    assert asyncio.run(longest_pause_s()) < 1.5 * protobuf_s + 0.005


@pytest.mark.parametrize("item", [b"\x0a\x00", b"\x0a\x04\x0a\x02ab"], ids=["empty", "numbers"])
def test_items_without_messages_in_them_are_counted_in_slices(item: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flat list has one field, but each of its items takes a microsecond or two. After a slice comes as long a rest.

    Without it the engine thread, which needs the interpreter many times in a step, would wait for it each time.
    """
    monkeypatch.setattr(turns, "SLICE_NS", 0)
    with mock.patch.object(asyncio, "sleep", wraps=asyncio.sleep) as sleep:
        parsed(executor_pb2.BatchPrefillRequest, item * 65_000)
    assert sleep.call_count >= 65_000 // 512
    assert all(call.args[0] > 0.0 for call in sleep.call_args_list)


@pytest.mark.parametrize("num_chars", [3, 70_000, PLAIN_BYTES])
@pytest.mark.parametrize("wrong", [b"\x1a\x01x", b"\x15\0\0\0\0"], ids=["a bool as text", "a bool as a float"])
def test_a_known_number_written_in_another_way_is_unknown(num_chars: int, wrong: bytes) -> None:
    """Protobuf would ignore the field, in small messages and in large ones."""
    data = tokenizer_pb2.TokenizeRequest(text="x" * num_chars).SerializeToString() + wrong
    with pytest.raises(FeatureUnsupported, match=r"ferrule\.v1\.TokenizeRequest"):
        parsed(tokenizer_pb2.TokenizeRequest, data)
