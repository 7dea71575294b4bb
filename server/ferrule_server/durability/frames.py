r"""Frames: one group commit each, and how a frame that was never confirmed is told from one that was damaged.

    uint24 length of the payload   uint8 format version   uint32 CRC-32C   payload, each byte XOR 0xF5   0xF5

A frame is written after the one before it was synced, over zeros. After a crash the last frame may therefore lack any
of its 512-byte sectors, or its end, and these are still zero; every other frame is whole, or it was damaged later::

                       sector                    sector
    ...frame 6  0xF5 | frame 7 ...             | ... frame 7   0xF5  0 0 0 0
                      \_ torn: only zeros here, or the 0xF5 is missing

The XOR keeps zeros in records from being zeros on the disk: a sector of token ids 0 must not look like a missing one.
The frame of etcd's write-ahead log is recognised as torn in the same way (etcd, server/storage/wal/decoder.go).
"""

from __future__ import annotations

import enum
import json
import struct
from dataclasses import asdict, dataclass
from typing import Final, NamedTuple

import google_crc32c

END: Final = 0xF5
VERSION: Final = 1
OVERHEAD_BYTES: Final = 9
MAX_PAYLOAD_BYTES: Final = (1 << 24) - 1
SECTOR_BYTES: Final = 512

_HEAD: Final = struct.Struct("<II")
_COVERED: Final = struct.Struct("<QQI")
_END_BYTE: Final = bytes([END])
_VERSION_BYTE: Final = bytes([VERSION])
_XOR: Final = bytes(byte ^ END for byte in range(256))
_NUMBERS_END: Final = 1 << 63
_MAX_CANDIDATES: Final = 1 << 20
_MAX_CHECKED_BYTES: Final = 1 << 30
"""The search for a frame after a bad one ends after so many places, or so many bytes of checksums."""


class Tail(enum.StrEnum):
    """What follows the last valid frame of a segment."""

    CLEAN = "clean"
    """Zeros."""
    TORN = "torn"
    """A frame that was never confirmed, and is to be ignored."""
    DAMAGED = "damaged"
    """A frame that was confirmed, or something that no crash leaves."""


class Frame(NamedTuple):
    """A valid frame.

    Attributes:
        offset: Where it begins in its segment.
        payload: As it was given to :func:`encode_frame`.
    """

    offset: int
    payload: bytes


class Scan(NamedTuple):
    """The frames of a segment.

    Attributes:
        frames: Valid frames, one directly after the other.
        end: The offset of the byte after the last of them.
        tail: What follows.
        reason: Why the tail is torn or damaged; empty if it is clean.
        resumes_at: The offset of the first valid frame after a damaged one, if there is one.
    """

    frames: list[Frame]
    end: int
    tail: Tail
    reason: str = ""
    resumes_at: int | None = None


def frame_bytes(payload_bytes: int) -> int:
    """Return how much room the frame of a payload takes."""
    return payload_bytes + OVERHEAD_BYTES


def encode_frame(payload: bytes, segment: int, offset: int) -> bytes:
    """Return the frame that stands at `offset` of a segment; nowhere else is it valid.

    Raises:
        ValueError: The payload is empty or longer than MAX_PAYLOAD_BYTES.
    """
    if not 0 < len(payload) <= MAX_PAYLOAD_BYTES:
        raise ValueError(f"a payload of {len(payload)} bytes does not fit in a frame")
    head = len(payload) | VERSION << 24
    stored = payload.translate(_XOR)
    return _HEAD.pack(head, _checksum(segment, offset, head, stored)) + stored + _END_BYTE


def scan(data: bytes, segment: int, *, start: int = 0, valid_bytes: int | None = None) -> Scan:
    """Read the frames of a segment; the time is linear in its size, whatever it contains.

    Args:
        data: The whole segment.
        segment: Its number.
        start: Where the first frame begins: 0, or ``resumes_at`` of another scan.
        valid_bytes: What the header of the next segment says of this one: exactly so many bytes are confirmed. What
            follows them is not read. None: the segment is the last.
    """
    if valid_bytes is not None:
        data = data[:valid_bytes]
    frames, end = [], start
    while (payload := _payload_at(data, segment, end)) is not None:
        frames.append(Frame(end, payload))
        end += len(payload) + OVERHEAD_BYTES
    found = Scan(frames, end, *_tail(data, segment, end))
    if valid_bytes is None or end == valid_bytes:
        return found
    reason = f"{valid_bytes} bytes were confirmed, {end} are valid"
    return found._replace(tail=Tail.DAMAGED, reason=found.reason or reason)


def _checksum(segment: int, offset: int, head: int, stored: bytes) -> int:
    covered: int = google_crc32c.value(_COVERED.pack(segment, offset, head) + stored)
    return covered


def _payload_at(data: bytes, segment: int, offset: int) -> bytes | None:
    """Return the payload of the valid frame that begins at `offset`, or None."""
    if len(data) - offset <= OVERHEAD_BYTES:
        return None
    head, checksum = _HEAD.unpack_from(data, offset)
    last = offset + _HEAD.size + (head & MAX_PAYLOAD_BYTES)
    if head >> 24 != VERSION or last >= len(data) or data[last] != END:
        return None
    stored = data[offset + _HEAD.size : last]
    if not stored or _checksum(segment, offset, head, stored) != checksum:
        return None
    return stored.translate(_XOR)


def _tail(data: bytes, segment: int, start: int) -> tuple[Tail, str, int | None]:
    """Classify what begins at `start`, where no valid frame begins."""
    stop = len(data.rstrip(b"\0"))
    if stop <= start:
        return Tail.CLEAN, "", None
    next_frame, is_certain = _next_frame(data, segment, start + 1, stop)
    if next_frame is not None:
        return Tail.DAMAGED, f"a valid frame follows at {next_frame}", next_frame
    if not is_certain:
        return Tail.DAMAGED, "the rest is not a frame, and too irregular to be searched for one", None
    if stop - start > frame_bytes(MAX_PAYLOAD_BYTES):
        return Tail.DAMAGED, f"{stop - start} bytes follow, more than a frame has", None
    return *_last_frame(data[:stop], segment, start), None


def _next_frame(data: bytes, segment: int, start: int, stop: int) -> tuple[int | None, bool]:
    """Return where the first valid frame at or after `start` begins, and whether the answer is certain.

    In bytes that somebody has chosen, each may be the beginning of a frame of any length. So the effort is bounded.
    """
    num_checked_bytes = 0
    at = data.find(_VERSION_BYTE, start + 3, stop)
    for _ in range(_MAX_CANDIDATES):
        if at < 0:
            return None, True
        offset = at - 3
        last = offset + _HEAD.size + int.from_bytes(data[offset:at], "little")
        if last < stop and data[last] == END:
            if _payload_at(data, segment, offset) is not None:
                return offset, True
            num_checked_bytes += last - offset
            if num_checked_bytes > _MAX_CHECKED_BYTES:
                break
        at = data.find(_VERSION_BYTE, at + 1, stop)
    return None, False


def _last_frame(data: bytes, segment: int, start: int) -> tuple[Tail, str]:
    """Classify a bad frame that no other follows; `data` ends with the last byte that is not zero."""
    head = int.from_bytes(data[start : start + 4], "little")
    stated = head & MAX_PAYLOAD_BYTES
    length = len(data) - start - OVERHEAD_BYTES  # of its payload, unless its end is missing
    if _is_valid_with(head, data, segment, start):
        return Tail.DAMAGED, f"it has format version {head >> 24}, this server reads {VERSION}"
    if _is_valid_with(length | head >> 24 << 24, data, segment, start):
        return Tail.DAMAGED, f"its length is {length}, it says {stated}"
    if _lacks_sector(data, start, states_its_length=0 < length == stated):
        return Tail.TORN, "a sector of it was not written"
    if len(data) - start >= 4 and head >> 24 != VERSION:
        return Tail.DAMAGED, "what follows does not begin as a frame does"
    if start + frame_bytes(stated) > len(data):
        return Tail.TORN, "its end was not written"
    return Tail.DAMAGED, "its checksum is wrong"


def _is_valid_with(head: int, data: bytes, segment: int, start: int) -> bool:
    """Whether the last frame is valid with another length and version, so that only these are wrong or unknown."""
    if len(data) - start <= OVERHEAD_BYTES or data[-1] != END:
        return False
    checksum: int = _HEAD.unpack_from(data, start)[1]
    return _checksum(segment, start, head, data[start + _HEAD.size : -1]) == checksum


def _lacks_sector(data: bytes, start: int, *, states_its_length: bool) -> bool:
    """Whether a sector of the last frame is zero, as far as it belongs to the frame.

    The first part may be one or two bytes that a whole frame has as zeros: those of a length that is a multiple of 256.
    They are not missing if the length that is read with them is right.
    """
    first = start + SECTOR_BYTES - start % SECTOR_BYTES
    if not states_its_length and not any(data[start:first]):
        return True
    zeros = bytes(SECTOR_BYTES)
    return any(data.startswith(zeros, at) for at in range(first, len(data), SECTOR_BYTES))


class Previous(NamedTuple):
    """The segment before, and how much of it was confirmed when the new one began."""

    segment: int
    valid_bytes: int


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """The payload of the first frame of a segment.

    Attributes:
        segment: Number of the segment.
        epoch: That of the directory: 12 hexadecimal digits.
        generation: That of the server which wrote the segment.
        previous: Where the records before those of this segment are; None: it is the first of its directory. Numbers
            between the two are segments that were never used.
        digests: The version of the digests of requests in its records.
        is_named: Whether a file must name it before it counts; False: a version wrote it that knows no such file.
    """

    segment: int
    epoch: str
    generation: int
    previous: Previous | None
    digests: str = ""
    is_named: bool = False

    def encode(self) -> bytes:
        """Return the payload."""
        previous = None if self.previous is None else self.previous._asdict()
        return json.dumps(asdict(self) | {"previous": previous}).encode()

    @classmethod
    def decode(cls, payload: bytes) -> SegmentHeader:
        """Read a payload.

        Raises:
            ValueError: It is not the header of a segment.
        """
        try:
            values = json.loads(payload)
            previous = values["previous"] if values["previous"] is None else Previous(**values["previous"])
            fields = (values["segment"], values["epoch"], values["generation"], previous, values["digests"])
            header = cls(*fields, is_named=values.get("is_named", False) is not False)
        except (TypeError, KeyError, RecursionError) as error:
            raise ValueError(f"the header of a segment is malformed: {error}") from None
        numbers = (header.segment, header.generation, *(previous or ()))
        if not all(type(number) is int and 0 <= number < _NUMBERS_END for number in numbers):
            raise ValueError("the header of a segment has numbers that are out of range")
        if not isinstance(header.epoch, str) or not isinstance(header.digests, str):
            raise ValueError("the header of a segment has an epoch or a version that is not a text")
        return header
