"""Parses requests, within bounds on time and memory.

Protobuf parses a message without interruption and holds the interpreter meanwhile; the time is charged to the principal
like all other work on the event loop. Messages cost most: 1 MiB of empty ones takes 20 ms and 40 MiB. So the messages
within a long request are counted, in slices, with turns of other calls in between::

    up to 64 KiB     parse
    up to 1 MiB      [ parse -> count ]
    above            count in the encoding -> [ parse ]    only methods that carry distributions or masks

Until a parsed message is counted its memory is unknown, so the caller may let one request at a time into the brackets.
There a request rests between slices but does not wait for its turn: all others would wait with it.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from ferrule_server.errors import FeatureUnsupported, InvalidRequest
from ferrule_server.fairness.turns import Turns

PIECE_BYTES: Final = 64 << 10
"""A shorter request is parsed in a few milliseconds, and takes little memory."""
PLAIN_BYTES: Final = 1 << 20
"""The messages of a longer request are counted before it is parsed."""
MAX_MESSAGES: Final = 1 << 16
"""Most messages within one request of more than ``PIECE_BYTES``, including entries of maps."""
MESSAGE_BYTES: Final = 64
"""Least memory of a message, however short its encoding is."""
_MAX_FIELDS: Final = 1 << 19
"""Most fields within one request of more than ``PLAIN_BYTES``; each entry of a list that is not packed counts."""
_PAUSE_FIELDS: Final = 256

_VARINT, _FIXED64, _LENGTH_DELIMITED, _FIXED32 = 0, 1, 2, 5
_FIXED_BYTES: Final = {_FIXED64: 8, _FIXED32: 4}
_MAX_VARINT_BYTES: Final = 10
_MORE: Final = 0x80
"""Set in every byte of a varint but the last."""


async def parse(message: Message, data: bytes, alone: AbstractAsyncContextManager[None]) -> int:
    """Fill an empty message from its encoding.

    Args:
        message: The message.
        data: Its encoding.
        alone: Entered while memory is taken that is not known yet.

    Returns:
        The number of messages within it; 0 for a short message, whose messages are not counted.

    Raises:
        DecodeError: The bytes are not such a message.
        InvalidRequest: The message has more messages or fields than any request needs.
        FeatureUnsupported: A field is not of this version of the contract. To ignore it would be to do something else
            than the client asks for.
    """
    num_messages = 0
    if len(data) > PLAIN_BYTES:
        num_messages = await _counted(_encoded_fields(message.DESCRIPTOR, data), Turns().pause)
    async with alone:
        message.ParseFromString(data)
        if PIECE_BYTES < len(data) <= PLAIN_BYTES:
            num_messages = await _counted(_messages_in(message), Turns().rest)
        message.DiscardUnknownFields()
        if message.SerializeToString() != data and _has_unknown_field(message, data):
            text = "has a field that this server does not know; it is older than the client"
            raise FeatureUnsupported("unknown field", f"{message.DESCRIPTOR.full_name} {text}")
    return num_messages


def _has_unknown_field(message: Message, data: bytes) -> bool:
    """Return whether an encoding has more in it than the message that was parsed from it without unknown fields.

    Most encodings equal that of the message. Others have their fields in another order, or write defaults.
    """
    whole = type(message)()
    whole.ParseFromString(data)
    return whole.ByteSize() != message.ByteSize()


async def _counted(fields: Iterator[int], pause: Callable[[], Awaitable[None]]) -> int:
    """Return the sum of the messages that fields add; pause from time to time.

    Raises:
        InvalidRequest: There are more messages or fields than any request needs.
    """
    num_messages = 0
    for num_fields, added in enumerate(fields, start=1):
        num_messages += added
        if num_messages > MAX_MESSAGES or num_fields > _MAX_FIELDS:
            raise InvalidRequest("request", f"has more than {MAX_MESSAGES} messages in it; send several requests")
        if num_fields % _PAUSE_FIELDS == 0:
            await pause()
    return num_messages


def _messages_in(message: Message) -> Iterator[int]:
    """Yield how many messages each field of a message, and of the messages in it, has."""
    for field, value in message.ListFields():
        kind: Any = field.message_type
        if kind is None:
            continue
        parts = value if field.is_repeated else (value,)
        yield len(parts)
        for part in () if kind.GetOptions().map_entry else parts:
            yield 0  # a part without messages in it takes time, too
            yield from _messages_in(part)


def _encoded_fields(descriptor: Any, data: bytes) -> Iterator[int]:
    """Yield 1 for each field of an encoded message, and of the messages in it, that is a message, else 0.

    Any: the descriptor classes have no types in common.
    """
    open_messages, position = [(descriptor, len(data))], 0
    while open_messages:
        descriptor, end = open_messages[-1]
        if position >= end:
            open_messages.pop()
            continue
        tag, position = _varint(data, position)
        inner, field_end = _extent(tag & 7, data, position)
        if field_end > end:
            raise DecodeError("a field is longer than its message")
        field = _message_fields(descriptor).get(tag >> 3) if tag & 7 == _LENGTH_DELIMITED else None
        if field is None:
            position = field_end
        else:
            open_messages.append((field.message_type, field_end))
            position = inner
        yield int(field is not None)


@functools.cache
def _message_fields(descriptor: Any) -> dict[int, Any]:
    """Return the fields of a message type that are messages, by number."""
    return {field.number: field for field in descriptor.fields if field.type == FieldDescriptor.TYPE_MESSAGE}


def _extent(wire_type: int, data: bytes, position: int) -> tuple[int, int]:
    """Return the start and the end of the content of a field."""
    if wire_type == _LENGTH_DELIMITED:
        length, position = _varint(data, position)
        return position, position + length
    if wire_type == _VARINT:
        return position, _varint(data, position)[1]
    if wire_type not in _FIXED_BYTES:
        raise DecodeError(f"wire type {wire_type} is not served")
    return position, position + _FIXED_BYTES[wire_type]


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """Return the number at a position and its end."""
    value = shift = 0
    for at in range(position, min(position + _MAX_VARINT_BYTES, len(data))):
        byte = data[at]
        value |= (byte & ~_MORE) << shift
        if byte < _MORE:
            return value, at + 1
        shift += 7
    raise DecodeError("a number does not end")
