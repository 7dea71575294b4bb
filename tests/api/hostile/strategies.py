"""Random and mutated messages of any type, made from its descriptor, as strategies of Hypothesis.

Three layers: a message whose fields are all legal for protobuf and mostly not for us; its bytes; and these bytes
damaged. Handles of live sequences are drawn as places in a list (``@live:2``) and put in by :func:`placed`, since a
strategy must not depend on what the server holds.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

from ferrule.v1 import types_pb2

NUM_LIVE = 3
"""Live handles that a drawn message may name."""

BAD_TEXT = "~not~utf8~"
"""Stands for bytes that are no UTF-8 until :func:`serialized` puts them in."""

_PLACES = tuple(f"@live:{place}" for place in range(NUM_LIVE))
_HANDLE = types_pb2.KvCacheHandle.DESCRIPTOR.full_name
_MAX_DEPTH = 5

_num_fields = st.sampled_from((1, 1, 2, 3, 6))

_UINTS = (0, 1, 2, 5, 15, 16, 17, 127, 128, 255, 256, 257, 511, 512, 513, 1024, 1025, 2**31 - 1, 2**31)
_FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 2.0, math.nan, math.inf, -math.inf, 5e-324, 1e-40, 3.4e38, -3.4e38, 1e308)
_TEXTS = ("", "a", "r0", "r1", "r2", "\x00", "x" * 128, "x" * 129, "\u00fc" * 65, "\U0001f600", "a\nb", "{}", "../..")
_NAMES = ("a.b.c", "...", "test.feedc0ffee00." + "A" * 22, "test.0123456789ab." + "A" * 22, "other.x." + "A" * 22)


@functools.cache
def messages(descriptor: Descriptor, depth: int = 0, *, is_small: bool = False) -> st.SearchStrategy[Message]:
    """Return a strategy of messages of one type, any of their fields set to anything that protobuf can hold.

    Args:
        descriptor: The type.
        depth: How many messages it stands in.
        is_small: It stands in a list of thousands: no long lists and texts of its own.
    """
    if descriptor.full_name == _HANDLE:
        return st.one_of(_live_handles(), _fields_of(descriptor, depth, is_small))
    return _fields_of(descriptor, depth, is_small)


def _fields_of(descriptor: Descriptor, depth: int, is_small: bool) -> st.SearchStrategy[Message]:
    make = GetMessageClass(descriptor)
    usable = [field for field in descriptor.fields if depth < _MAX_DEPTH or field.message_type is None]
    if not usable:
        return st.builds(make)

    @st.composite
    def build(draw: st.DrawFn) -> Message:
        message = make()
        num_fields = 2 if is_small else draw(_num_fields)
        wanted = draw(st.lists(st.sampled_from(usable), unique_by=_number_of, max_size=num_fields))
        for field in wanted:  # two of one oneof may be among them: the last one counts
            _set(message, field, draw(_values(field, depth, is_small)))
        return message

    return build()


def _number_of(field: FieldDescriptor) -> int:
    return field.number


def _set(message: Message, field: FieldDescriptor, value: Any) -> None:  # whatever the field holds
    if field.is_repeated:
        target = getattr(message, field.name)
        if isinstance(value, dict):
            target.update(value)
        else:
            target.extend(value)
    elif field.message_type is not None:
        getattr(message, field.name).CopyFrom(value)
    else:
        setattr(message, field.name, value)


@functools.cache  # a strategy is dear to make and cheap to draw from
def _values(field: FieldDescriptor, depth: int, is_small: bool) -> st.SearchStrategy[Any]:
    """Return a strategy of values of one field, repeated ones from empty to far too many."""
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        keys, values = field.message_type.fields
        return st.dictionaries(_scalars(keys, is_small), _scalars(values, is_small), max_size=4)
    if not field.is_repeated:
        return _ones(field, depth, is_small)
    one = _ones(field, depth, True)
    few = st.lists(_ones(field, depth, is_small), max_size=3)
    if is_small:
        return few
    many = st.tuples(one, st.sampled_from((257, 513, 4097))).map(lambda drawn: [drawn[0]] * drawn[1])
    return st.one_of(few, few, few, st.lists(one, max_size=20), many)


def _ones(field: FieldDescriptor, depth: int, is_small: bool) -> st.SearchStrategy[Any]:
    if field.message_type is not None:
        return messages(field.message_type, depth + 1, is_small=is_small)
    return _scalars(field, is_small)


def _scalars(field: FieldDescriptor, is_small: bool) -> st.SearchStrategy[Any]:
    kind = field.cpp_type
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return st.booleans()
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        return _enums(field.enum_type)
    if kind in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        any_float = st.floats(width=32) if kind == FieldDescriptor.CPPTYPE_FLOAT else st.floats()
        return st.one_of(st.floats(0.0, 1.0, width=32), st.sampled_from(_FLOATS), any_float)
    if kind == FieldDescriptor.CPPTYPE_STRING:
        return _bytes(is_small) if field.type == FieldDescriptor.TYPE_BYTES else _texts(is_small)
    return _integers(kind)


def _bytes(is_small: bool) -> st.SearchStrategy[bytes]:
    usual = st.one_of(st.binary(max_size=20), st.sampled_from((15, 16, 17, 31, 32, 33)).map(bytes))
    return usual if is_small else st.one_of(usual, usual, st.integers(0, 600).map(bytes), st.just(bytes(100_000)))


def _texts(is_small: bool) -> st.SearchStrategy[str]:
    usual = st.one_of(st.sampled_from((*_TEXTS, *_NAMES, BAD_TEXT)), st.text(max_size=20))
    return usual if is_small else st.one_of(usual, usual, usual, st.just("y" * 100_000))


def _integers(kind: int) -> st.SearchStrategy[int]:
    bits = 32 if kind in (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_UINT32) else 64
    is_signed = kind in (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_INT64)
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if is_signed else (0, 2**bits - 1)
    usual = [value for value in (*_UINTS, low, high, *(-value for value in _UINTS)) if low <= value <= high]
    return st.one_of(st.integers(0, 20), st.sampled_from(usual), st.integers(low, high))


def _enums(enum: EnumDescriptor | None) -> st.SearchStrategy[int]:
    assert enum is not None
    known = [value.number for value in enum.values]
    return st.sampled_from([*known, *known, -1, 99, 2**31 - 1, -(2**31)])


def _live_handles() -> st.SearchStrategy[Message]:
    """Places of live handles, most of them changed: a length or a lineage that is wrong."""
    return st.builds(
        lambda place, length, lineage: types_pb2.KvCacheHandle(cache_id=place, length=length, lineage=lineage),
        st.sampled_from(_PLACES),
        st.sampled_from((0, 0, 0, 0, 1, 2, 1000, 2**32 - 1)),  # 0: its own
        st.sampled_from((b"", b"", b"", b"", b"x", bytes(15), bytes(16), bytes(17))),  # empty: its own
    )


def placed(message: Message, live: Sequence[types_pb2.KvCacheHandle]) -> Message:
    """Return the message with the live handles in their places, changed in place."""
    if isinstance(message, types_pb2.KvCacheHandle):
        if message.cache_id in _PLACES:
            _place(message, live[_PLACES.index(message.cache_id)])
        return message
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        for inner in value if field.is_repeated else (value,):
            placed(inner, live)
    return message


def _place(message: types_pb2.KvCacheHandle, live: types_pb2.KvCacheHandle) -> None:
    message.cache_id = live.cache_id
    message.length = message.length or live.length
    message.lineage = message.lineage or live.lineage


def serialized(message: Message) -> bytes:
    """Return the bytes of a message, with text that is no UTF-8 where that was drawn."""
    return message.SerializeToString().replace(BAD_TEXT.encode(), b"\xff\xfe\xc0\x80\xed\xa0\x80\xf5\x80\x80")


def _cut(data: bytes, chance: random.Random) -> bytes:
    return data[: chance.randrange(len(data) + 1)]


def _flip(data: bytes, chance: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 8))):
        if changed:
            changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def _insert(data: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(data) + 1)
    return data[:at] + chance.randbytes(chance.choice((1, 2, 9, 40))) + data[at:]


def _twice(data: bytes, _: random.Random) -> bytes:
    return data + data


def _add_unknown(data: bytes, chance: random.Random) -> bytes:
    """A field of a number that no message has, as each of the wire types."""
    return data + chance.choice((b"\xf8\xff\x03\x05", b"\xfa\xff\x03\x03abc", b"\xfd\xff\x03\0\0\0\0", b"\xfb\xff\x03"))


def _nest(data: bytes, chance: random.Random) -> bytes:
    """Groups within groups."""
    depth = chance.choice((10, 99, 101, 5000))
    return data + b"\x9b\x06" * depth + b"\x9c\x06" * depth


def _keep(data: bytes, _: random.Random) -> bytes:
    return data


_DAMAGES: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    *(_keep,) * 6,
    _cut,
    _flip,
    _flip,
    _insert,
    _twice,
    _add_unknown,
    _nest,
)


def damages() -> st.SearchStrategy[Callable[[bytes], bytes]]:
    """Return a strategy of what happens to the bytes of a message on their way; often nothing."""
    return st.builds(
        lambda damage, seed: lambda data: damage(data, random.Random(seed)),
        st.sampled_from(_DAMAGES),
        st.integers(0, 2**32 - 1),
    )
