"""Parses large requests in slices, with turns of other calls in between.

Protobuf parses a message without interruption and holds the interpreter meanwhile: 16 MB of empty messages take a
second and 500 MB. Merging the parts of an encoded message one after the other gives the same message (protobuf.dev,
"Encoding", section "Last One Wins"). A large message is therefore cut between its fields, after they are counted.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from ferrule_server.api.receiving.turns import Turns
from ferrule_server.errors import FeatureUnsupported, InvalidRequest

PIECE_BYTES: Final = 64 << 10
"""So much is parsed without a pause, in a few milliseconds at most."""
MAX_MESSAGES: Final = 1 << 18
"""Most messages within one request, including entries of maps."""
MESSAGE_BYTES: Final = 64
"""Least memory of a message, however short its encoding is."""
_MAX_FIELDS: Final = 1 << 21
"""Most fields within one request; each entry of a list that is not packed counts."""
_PAUSE_FIELDS: Final = 512

_VARINT, _FIXED64, _LENGTH_DELIMITED, _FIXED32 = 0, 1, 2, 5
_WIRE_TYPES: Final = {
    FieldDescriptor.TYPE_STRING: _LENGTH_DELIMITED,
    FieldDescriptor.TYPE_BYTES: _LENGTH_DELIMITED,
    FieldDescriptor.TYPE_MESSAGE: _LENGTH_DELIMITED,
    FieldDescriptor.TYPE_FLOAT: _FIXED32,
    FieldDescriptor.TYPE_DOUBLE: _FIXED64,
}
"""Other types of the contract are varints."""
_FIXED_BYTES: Final = {_FIXED64: 8, _FIXED32: 4}
_MAX_VARINT_BYTES: Final = 10
_MORE: Final = 0x80
"""Set in every byte of a varint but the last."""


async def parse(message: Message, data: bytes) -> int:
    """Fill an empty message from its encoding.

    Returns:
        The number of messages within it; 0 for a short message, whose messages are not counted.

    Raises:
        DecodeError: The bytes are not such a message.
        InvalidRequest: The message has more messages or fields than any request needs.
        FeatureUnsupported: A field is not of this version of the contract. To ignore it would be to do something else
            than the client asks for.
    """
    if len(data) <= PIECE_BYTES:
        message.ParseFromString(data)
        message.DiscardUnknownFields()
        if message.SerializeToString() != data and _has_unknown_field(message, data):
            raise _unknown_field(message.DESCRIPTOR)
        return 0
    turns = Turns()
    num_messages = 0
    for num_fields, is_message in enumerate(_fields(message.DESCRIPTOR, data, 0, len(data)), start=1):
        num_messages += is_message
        if num_messages > MAX_MESSAGES or num_fields > _MAX_FIELDS:
            raise InvalidRequest("request", f"has more than {MAX_MESSAGES} messages in it; send several requests")
        if num_fields % _PAUSE_FIELDS == 0:
            await turns.pause()
    await _merge(message, data, turns)
    return num_messages


def _has_unknown_field(message: Message, data: bytes) -> bool:
    """Return whether an encoding has more in it than the message that was parsed from it without unknown fields.

    Most encodings equal that of the message. Others have their fields in another order, or write defaults.
    """
    whole = type(message)()
    whole.ParseFromString(data)
    return whole.ByteSize() != message.ByteSize()


def _unknown_field(descriptor: Any) -> FeatureUnsupported:
    """Return the error of a client that is newer than this server, with the name of the message."""
    text = f"{descriptor.full_name} has a field that this server does not know; it is older than the client"
    return FeatureUnsupported("unknown field", text)


async def _merge(message: Message, data: bytes, turns: Turns) -> None:
    """Add an encoding to a message, in pieces that end between two fields; a large message in it is cut as well.

    An entry of a map is not cut, since it has no message to be added to. It is only large if it repeats its fields.
    """
    begin = 0
    for field, start, inner, end in _top_fields(message.DESCRIPTOR, data):
        is_large = field is not None and end - inner > PIECE_BYTES and not field.message_type.GetOptions().map_entry
        if is_large or end - begin > PIECE_BYTES:
            message.MergeFromString(data[begin:start])
            begin = start
            await turns.pause()
        if is_large:
            await _merge(_part(message, field), data[inner:end], turns)
            begin = end
    message.MergeFromString(data[begin:])
    await turns.pause()


def _part(message: Message, field: Any) -> Message:  # Any: the descriptor classes have no types in common
    """Return the message to which an encoded field is added."""
    value: Any = getattr(message, field.name)
    if field.is_repeated:
        added: Message = value.add()
        return added
    value.SetInParent()
    part: Message = value
    return part


def _top_fields(descriptor: Any, data: bytes) -> Iterator[tuple[Any, int, int, int]]:
    """Yield for each field its descriptor if it is a message, its start, the start of its content, and its end."""
    position = 0
    while position < len(data):
        start = position
        number, wire_type, position = _tag(data, position)
        inner, position = _extent(wire_type, data, position)
        if position > len(data):
            raise DecodeError("a field is longer than its message")
        yield _message_field(descriptor, number, wire_type), start, inner, position


def _fields(descriptor: Any, data: bytes, position: int, end: int) -> Iterator[bool]:
    """Yield whether each field of a message, and of the messages in it, is a message."""
    open_messages = [(descriptor, end)]
    while open_messages:
        descriptor, end = open_messages[-1]
        if position >= end:
            open_messages.pop()
            continue
        number, wire_type, position = _tag(data, position)
        inner, field_end = _extent(wire_type, data, position)
        if field_end > end:
            raise DecodeError("a field is longer than its message")
        if wire_type not in _wire_types(descriptor).get(number, ()):
            raise _unknown_field(descriptor)
        field = _message_field(descriptor, number, wire_type)
        if field is None:
            position = field_end
        else:
            open_messages.append((field.message_type, field_end))
            position = inner
        yield field is not None


def _message_field(descriptor: Any, number: int, wire_type: int) -> Any:
    """Return the descriptor of a field that is a message, None for any other field."""
    return _message_fields(descriptor).get(number) if wire_type == _LENGTH_DELIMITED else None


@functools.cache
def _message_fields(descriptor: Any) -> dict[int, Any]:
    """Return the fields of a message type that are messages, by number."""
    return {field.number: field for field in descriptor.fields if field.type == FieldDescriptor.TYPE_MESSAGE}


@functools.cache
def _wire_types(descriptor: Any) -> dict[int, frozenset[int]]:
    """Return how each field of a message type may be written; protobuf ignores a field that is written otherwise."""
    return {
        field.number: frozenset(
            {_WIRE_TYPES.get(field.type, _VARINT)} | ({_LENGTH_DELIMITED} if field.is_repeated else set())
        )
        for field in descriptor.fields
    }


def _tag(data: bytes, position: int) -> tuple[int, int, int]:
    """Return the number and wire type of the field at a position, and the start of its content."""
    tag, position = _varint(data, position)
    return tag >> 3, tag & 7, position


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
    if position < len(data) and (byte := data[position]) < _MORE:  # nearly all of them
        return byte, position + 1
    value = shift = 0
    for at in range(position, min(position + _MAX_VARINT_BYTES, len(data))):
        byte = data[at]
        value |= (byte & ~_MORE) << shift
        if byte < _MORE:
            return value, at + 1
        shift += 7
    raise DecodeError("a number does not end")
