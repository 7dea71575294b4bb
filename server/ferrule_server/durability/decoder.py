"""How records are read: strictly, since a journal may come from a damaged disk."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, TypeVar

from ferrule_server.durability import records
from ferrule_server.durability.records import Answer, BadRecord, DraftsAnswer, Numbers, Row, Tag, Truncation

Fields = tuple[object, ...]
"""The fields of a record, in the order in which its :class:`~.records.Tag` names them."""

_T = TypeVar("_T")
_MAX_UINT32: Final = (1 << 32) - 1
_ENDS: Final = {each.value: each for each in records.End}
_SHAPE_MASK: Final = 0xFFF
_JUDGED: Final = records.WAS_ACCEPTED | records.WAS_REJECTED


NUMBER_BYTES: Final = tuple(sum((0, 0, 4, 8)[shape >> shift & 3] for shift in (0, 2, 4, 6)) for shape in range(256))
"""The bytes of the numbers of a row, by shape."""


@dataclass(slots=True)
class Definitions:
    """The numbers of principals and policies that are valid at a place of the journal."""

    principals: list[str] = field(default_factory=list)
    policies: list[bytes] = field(default_factory=list)


class Cursor:
    """Reads fields of a payload, one after the other.

    Attributes:
        at: Where the next field begins.
    """

    __slots__ = ("_payload", "at")

    def __init__(self, payload: bytes, at: int = 0) -> None:
        self._payload = payload
        self.at = at

    def take(self, size: int) -> bytes:
        """Return the next ``size`` bytes."""
        end = self.at + size
        data = self._payload[self.at : end]
        if len(data) != size:
            raise BadRecord(f"the payload ends inside a field of {size} bytes")
        self.at = end
        return data

    def byte(self) -> int:
        """Return the next byte.

        Raises:
            IndexError: There is none.
        """
        at = self.at
        self.at = at + 1
        return self._payload[at]

    def varint(self, limit: int = _MAX_UINT32) -> int:
        """Return the next varint, at most ``limit``, which is at least 127."""
        byte = self._payload[self.at]
        self.at += 1
        return byte if byte < 0x80 else self._long_varint(byte & 0x7F, limit)

    def _long_varint(self, value: int, limit: int) -> int:
        shift, byte = 7, 0x80
        while byte >= 0x80:
            byte = self.byte()
            value |= (byte & 0x7F) << shift
            shift += 7
            if shift > 63:
                raise BadRecord("a varint has more than 8 bytes")
        if value > limit:
            raise BadRecord(f"the varint {value} is above {limit}")
        return value

    def flags(self, allowed: int) -> int:
        """Return the next byte, which holds flags."""
        flags = self.byte()
        if flags & ~allowed:
            raise BadRecord(f"unknown flags {flags:#x}")
        return flags

    def optional(self) -> int | None:
        """Return the next varint minus one; None if it is 0."""
        value = self.varint(_MAX_UINT32 + 1)
        return value - 1 if value else None

    def double(self) -> float:
        """Return the next double."""
        value: float = records.FLOAT64.unpack(self.take(8))[0]
        return value

    def seconds(self) -> float:
        """Return the next double, which is a time above 0."""
        value = self.double()
        if not value > 0.0:
            raise BadRecord(f"a lease of {value} s")
        return value

    def seed(self) -> int:
        """Return the next seed."""
        value: int = records.UINT64.unpack(self.take(8))[0]
        return value

    def text(self) -> str:
        """Return the next text."""
        try:
            return self.take(self.varint()).decode()
        except UnicodeDecodeError as error:
            raise BadRecord("a text is not UTF-8") from error

    def token_ids(self) -> array[int]:
        """Return the next tokens."""
        token_ids = array("I")
        token_ids.frombytes(self.take(4 * self.varint()))
        return token_ids


def decode(payload: bytes, at: int, definitions: Definitions) -> tuple[int, Fields, int]:
    """Return the tag and the fields of the record that begins at ``at``, any but a step, and where it ends.

    Args:
        payload: The payload of a frame.
        at: Below the length of the payload.
        definitions: As they are there; definitions change them. After the begin of a snapshot there are none.

    Raises:
        BadRecord: It is malformed. The definitions are not changed.
    """
    tag, cursor = payload[at], Cursor(payload, at + 1)
    read = _READERS.get(tag)
    if read is None:
        raise BadRecord(f"unknown record {tag}")
    try:
        return tag, read(cursor, definitions), cursor.at
    except IndexError:
        raise BadRecord("the payload ends inside a record") from None


def read_numbers(cursor: Cursor, shape: int) -> Numbers:
    """Return the four numbers of a row, which come next."""
    first, second = _number(cursor, shape & 3), _number(cursor, shape >> 2 & 3)
    if not shape & 0xF0:
        return first, second, None, None
    return first, second, _number(cursor, shape >> 4 & 3), _number(cursor, shape >> 6 & 3)


def _number(cursor: Cursor, kind: int) -> float | None:
    if kind == records.DOUBLE:
        return cursor.double()
    if kind == records.SINGLE:
        value: float = records.FLOAT32.unpack(cursor.take(4))[0]
        return value
    return 0.0 if kind else None


def _define(known: list[_T], index: int, value: _T) -> Fields:
    if index != len(known):
        raise BadRecord(f"definition {index} follows {len(known)} others")
    known.append(value)
    return index, value


def _principal(cursor: Cursor, definitions: Definitions) -> str:
    return _defined(definitions.principals, cursor.varint())


def _defined(known: list[_T], index: int) -> _T:
    if index >= len(known):
        raise BadRecord(f"{index} is used and not defined")
    return known[index]


def _sequence(cursor: Cursor, definitions: Definitions) -> Fields:
    no = _no(cursor)
    flags = cursor.flags(
        records.IS_PUBLISHED | records.HAS_PREFIX | records.HAS_ANSWER | records.HAS_TRUNCATION | records.HAS_PARENT
    )
    secret, principal = cursor.take(records.DIGEST_BYTES), _principal(cursor, definitions)
    ttl_s, reserved_length, window = cursor.seconds(), cursor.varint(), cursor.varint()
    parent = cursor.take(8).hex() if flags & records.HAS_PARENT else ""
    prefix = (_no(cursor), cursor.varint()) if flags & records.HAS_PREFIX else (0, 0)
    token_ids = cursor.token_ids()
    answer = _answer(cursor, definitions) if flags & records.HAS_ANSWER else None
    truncation = _truncation(cursor) if flags & records.HAS_TRUNCATION else None
    is_published = bool(flags & records.IS_PUBLISHED)
    state = records.SequenceState(
        no, secret, principal, ttl_s, is_published, reserved_length, parent, token_ids, answer, truncation, window
    )
    return state, *prefix


def _append(cursor: Cursor, definitions: Definitions) -> Fields:
    no, flags = _no(cursor), cursor.flags(records.IS_REWIND | records.HAS_TTL | records.APPEND_HAS_ANSWER)
    rewind_to = cursor.varint() if flags & records.IS_REWIND else None
    ttl_s = cursor.seconds() if flags & records.HAS_TTL else None
    token_ids = cursor.token_ids()
    answer = _answer(cursor, definitions) if flags & records.APPEND_HAS_ANSWER else None
    return no, rewind_to, token_ids, ttl_s, answer


def _answer(cursor: Cursor, definitions: Definitions) -> Answer:
    flags = cursor.flags(records.HAS_SEED | records.IS_PARTIAL | records.HAS_DRAFTS)
    start, num_tokens = cursor.varint(), cursor.varint()
    policy = _defined(definitions.policies, cursor.varint())
    seed = cursor.seed() if flags & records.HAS_SEED else None
    drafts = _drafts(cursor) if flags & records.HAS_DRAFTS else None
    num_rows = cursor.varint()
    first = start + num_tokens - num_rows + 1
    rows = tuple(_row(cursor, position) for position in range(first, first + num_rows))
    return Answer(start, num_tokens, policy, seed, rows, not flags & records.IS_PARTIAL, drafts)


def _drafts(cursor: Cursor) -> DraftsAnswer:
    digest, num_certain, draft_ids = cursor.take(records.DIGEST_BYTES), cursor.varint(), tuple(cursor.token_ids())
    accepted_count = cursor.varint()
    if accepted_count > len(draft_ids):
        raise BadRecord(f"{accepted_count} of {len(draft_ids)} drafts were accepted")
    return DraftsAnswer(digest, num_certain, draft_ids, accepted_count, cursor.optional())


def _row(cursor: Cursor, position: int) -> Row:
    shape = cursor.byte() | cursor.byte() << 8
    if shape & ~_SHAPE_MASK or shape & _JUDGED == _JUDGED:
        raise BadRecord(f"a row of shape {shape:#x}")
    if shape & records.HAS_POSITION:
        position = cursor.varint()
    token = cursor.varint() if shape & records.HAS_TOKEN else None
    numbers = read_numbers(cursor, shape) if shape & 0xFF else _NO_NUMBERS
    is_accepted = bool(shape & records.WAS_ACCEPTED) if shape & _JUDGED else None
    if position < 0:
        raise BadRecord(f"a row at position {position}")
    return Row(position, token, *numbers, is_accepted)


def _truncation(cursor: Cursor) -> Truncation:
    return Truncation(cursor.varint(), cursor.take(records.DIGEST_BYTES), cursor.varint(), cursor.varint())


def _end(cursor: Cursor, _: Definitions) -> Fields:
    no, how = _no(cursor), _ENDS.get(cursor.byte())
    if how is None:
        raise BadRecord("a sequence has ended in an unknown way")
    return no, how


def _creation(cursor: Cursor, definitions: Definitions) -> Fields:
    principal = _principal(cursor, definitions)
    flags = cursor.flags(records.HAS_LOOP | records.CREATION_HAS_SEED | records.HAS_VERIFIED)
    request_id, content = cursor.text(), cursor.take(records.DIGEST_BYTES)
    loop = cursor.take(records.DIGEST_BYTES) if flags & records.HAS_LOOP else b""
    start, length, lineage = cursor.varint(), cursor.varint(), cursor.take(records.DIGEST_BYTES)
    seed = cursor.seed() if flags & records.CREATION_HAS_SEED else None
    verified = (cursor.varint(), cursor.optional()) if flags & records.HAS_VERIFIED else None
    members = tuple(cursor.varint() or cursor.take(records.DIGEST_BYTES) for _ in range(cursor.varint()))
    if not members:
        raise BadRecord("a creation of no sequence")
    return (records.Creation(principal, request_id, content, loop, start, length, lineage, seed, verified, members),)


def _no(cursor: Cursor) -> int:
    no = cursor.varint()
    if not no:
        raise BadRecord("a sequence has the number 0")
    return no


_NO_NUMBERS: Final[Numbers] = (None, None, None, None)
_READERS: Final[Mapping[int, Callable[[Cursor, Definitions], Fields]]] = MappingProxyType(
    {
        Tag.PRINCIPAL: lambda cursor, known: _define(known.principals, cursor.varint(), cursor.text()),
        Tag.POLICY: lambda cursor, known: _define(known.policies, cursor.varint(), cursor.take(records.DIGEST_BYTES)),
        Tag.SEQUENCE: _sequence,
        Tag.APPEND: _append,
        Tag.TRUNCATE: lambda cursor, _: (_no(cursor), _truncation(cursor)),
        Tag.RESERVE: lambda cursor, _: (_no(cursor), cursor.varint()),
        Tag.LEASE: lambda cursor, _: (_no(cursor), cursor.seconds()),
        Tag.END: _end,
        Tag.CREATION: _creation,
        Tag.TOMBSTONE: lambda cursor, known: (_principal(cursor, known), cursor.take(records.DIGEST_BYTES)),
        Tag.MASK: lambda cursor, known: (_principal(cursor, known), cursor.take(cursor.varint())),
        Tag.SNAPSHOT_BEGIN: lambda _cursor, _: (),
        Tag.SNAPSHOT_END: lambda _cursor, _: (),
    }
)
