"""Large requests parsed in slices: the same message, in bounded time without a pause, in bounded memory."""

from __future__ import annotations

import asyncio
import contextlib
import struct
import time
import tracemalloc
from unittest import mock

import pytest
from google.protobuf.message import DecodeError, Message
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ferrule.v1 import cache_pb2, executor_pb2, policy_pb2, tokenizer_pb2, types_pb2
from ferrule_server.api.receiving import parsing
from ferrule_server.api.receiving.parsing import MAX_MESSAGES, PIECE_BYTES, parse
from ferrule_server.errors import FeatureUnsupported, InvalidRequest
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
    asyncio.run(parse(message, data))
    return message


BIASED = executor_pb2.GenerateRequest(
    logits_policy=policy_pb2.LogitsReturnPolicy(sample=policy_pb2.Sample(logit_bias={3: 0.5}))
)


@settings(max_examples=300)
@given(
    st.sampled_from(TYPES).flatmap(lambda kind: st.tuples(st.just(kind), messages(kind.DESCRIPTOR))), st.integers(0, 40)
)
@example((executor_pb2.GenerateRequest, BIASED), 0)  # an entry of a map that is larger than a piece
def test_slices_give_the_same_message(drawn: tuple[type[Message], Message], piece_bytes: int) -> None:
    """However small they are; NaN compares by its bytes."""
    kind, message = drawn
    data = serialized(message)
    try:
        expected = serialized(kind.FromString(data))
    except DecodeError:  # text that is not UTF-8
        return
    with mock.patch.object(parsing, "PIECE_BYTES", piece_bytes):
        assert serialized(parsed(kind, data)) == expected


def test_a_huge_entry_of_a_map_is_parsed_as_it_is() -> None:
    """Only a client that means harm sends one: the last key and value within it count."""
    entry = b"\x08\x03" * PIECE_BYTES + b"\x15" + struct.pack("<f", 0.5)
    sample = b"\x52" + _length(len(entry)) + entry
    data = b"\x1a" + _length(len(sample)) + sample
    assert parsed(policy_pb2.LogitsReturnPolicy, data) == BIASED.logits_policy


@settings(max_examples=300)
@given(st.sampled_from(TYPES).flatmap(lambda kind: st.tuples(st.just(kind), messages(kind.DESCRIPTOR))), damages())
def test_what_protobuf_refuses_is_refused_in_slices_too(drawn: tuple[type[Message], Message], damage: object) -> None:
    """With DecodeError and nothing else, unless there is a field that no version of the contract has."""
    kind, message = drawn
    data = damage(serialized(message))  # type: ignore[operator]
    with mock.patch.object(parsing, "PIECE_BYTES", 16):
        try:
            found = parsed(kind, data)
        except DecodeError:
            return
        except FeatureUnsupported:
            with contextlib.suppress(DecodeError):
                whole = kind.FromString(data)
                num_bytes = whole.ByteSize()
                whole.DiscardUnknownFields()
                assert whole.ByteSize() < num_bytes
            return
    assert serialized(found) == serialized(kind.FromString(data))


def test_a_huge_list_of_nothing_is_refused_before_anything_is_made_of_it() -> None:
    """16 MB of empty messages took 500 MB and a second."""
    data = b"\x0a\x00" * (8 << 20)
    tracemalloc.start()
    with pytest.raises(InvalidRequest, match=f"more than {MAX_MESSAGES} messages"):
        parsed(executor_pb2.BatchPrefillRequest, data)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 1 << 20
    inner = b"\x52\x00" * (4 << 20)  # token_masks, in an item of a frame
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
    policy = policy_pb2.LogitsReturnPolicy(sample=policy_pb2.Sample(logit_bias=dict.fromkeys(range(400), 1.0)))
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
    """The longest time without a pause is a few milliseconds, of 20 to 60 in all."""
    message = _many()[name]
    data = message.SerializeToString()
    assert len(data) > 4 * PIECE_BYTES

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
        await parse(found, data)
        is_over = True
        await task
        assert found == message
        return longest_s

    assert asyncio.run(longest_pause_s()) < 0.03


@pytest.mark.parametrize("num_chars", [3, 70_000])
@pytest.mark.parametrize("wrong", [b"\x1a\x01x", b"\x15\0\0\0\0"], ids=["a bool as text", "a bool as a float"])
def test_a_known_number_written_in_another_way_is_unknown(num_chars: int, wrong: bytes) -> None:
    """Protobuf would ignore the field, in small messages and in large ones."""
    data = tokenizer_pb2.TokenizeRequest(text="x" * num_chars).SerializeToString() + wrong
    with pytest.raises(FeatureUnsupported, match=r"ferrule\.v1\.TokenizeRequest"):
        parsed(tokenizer_pb2.TokenizeRequest, data)
