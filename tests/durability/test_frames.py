"""Frames: what was written is read, what was never confirmed is cut, and what was confirmed is never cut silently."""

from __future__ import annotations

import os
import time
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ferrule_server.durability import frames
from ferrule_server.durability.frames import (
    END,
    MAX_PAYLOAD_BYTES,
    OVERHEAD_BYTES,
    SECTOR_BYTES,
    Frame,
    Previous,
    Scan,
    SegmentHeader,
    Tail,
    encode_frame,
    frame_bytes,
    scan,
)
from tests.durability.fault_files import Write, sectors_of

SEGMENT = 7
ZEROS = bytes(SECTOR_BYTES * 8)
LARGEST = MAX_PAYLOAD_BYTES + OVERHEAD_BYTES


def segment_of(*payloads: bytes, zeros: bytes = ZEROS) -> bytes:
    """Return a segment with one frame for each payload."""
    data = b""
    for payload in payloads:
        data += encode_frame(payload, SEGMENT, len(data))
    return data + zeros


def torn(before: bytes, frame: bytes, parts: list[Write]) -> bytes:
    """Return a segment whose last frame is on the disk in parts."""
    data = bytearray(before + bytes(len(frame)) + ZEROS)
    for offset, part in parts:
        data[offset : offset + len(part)] = part
    return bytes(data)


def end_of(frame: Frame) -> int:
    """Return the offset of the byte after a frame."""
    return frame.offset + frame_bytes(len(frame.payload))


def payloads_of(found: Scan) -> list[bytes]:
    """Return the payloads of the frames that were found."""
    return [frame.payload for frame in found.frames]


@given(st.lists(st.binary(min_size=1, max_size=2000), max_size=8))
def test_frames_are_read_as_they_were_written(payloads: list[bytes]) -> None:
    """All of them, with their places, and a clean tail."""
    data = segment_of(*payloads)
    found = scan(data, SEGMENT)
    assert payloads_of(found) == payloads
    assert [frame.offset for frame in found.frames] == [0, *(end_of(frame) for frame in found.frames)][: len(payloads)]
    assert found[1:] == (len(data) - len(ZEROS), Tail.CLEAN, "", None)


@pytest.mark.parametrize("size", [0, MAX_PAYLOAD_BYTES + 1])
def test_payload_of_another_size_is_refused(size: int) -> None:
    """Its length would not fit in the frame, or its frame would be zeros."""
    with pytest.raises(ValueError, match="does not fit"):
        encode_frame(bytes(size), SEGMENT, 0)


def test_largest_frame_is_read() -> None:
    """The limit itself is allowed."""
    payload = os.urandom(MAX_PAYLOAD_BYTES)
    assert payloads_of(scan(segment_of(payload), SEGMENT)) == [payload]


@pytest.mark.parametrize(("segment", "shift"), [(SEGMENT + 1, 0), (SEGMENT, 1)])
def test_frame_is_valid_at_its_place_only(segment: int, shift: int) -> None:
    """A frame of another segment, or one that was moved, is not taken."""
    data = bytes(shift) + encode_frame(b"records", SEGMENT, 0) + ZEROS
    assert scan(data, segment, start=shift).frames == []


def test_segment_that_is_full_to_the_last_byte_is_clean() -> None:
    """There need not be a zero after the last frame."""
    data = segment_of(b"records", zeros=b"")
    assert scan(data, SEGMENT)[1:] == (len(data), Tail.CLEAN, "", None)


# ---- torn -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [0, 1, 495, 500, 501, 502, 503, 510])
@pytest.mark.parametrize("size", [1, 2, 247, 256, 600, 1600])
def test_frame_torn_at_any_byte_is_cut(before: int, size: int) -> None:
    """After each number of bytes but the last, it is torn or was never begun; frames before it are read."""
    first = segment_of(bytes(before), zeros=b"") if before else b""
    frame = encode_frame(os.urandom(size), SEGMENT, len(first))
    for kept in range(len(frame)):
        found = scan(torn(first, frame, [Write(len(first), frame[:kept])]), SEGMENT)
        assert found.end == len(first)
        assert found.tail is (Tail.TORN if any(frame[:kept]) else Tail.CLEAN), kept


def test_frame_with_any_sectors_missing_is_cut() -> None:
    """Whichever they are; only with all of them it is whole."""
    random = Random(5)
    for _ in range(600):
        first = segment_of(random.randbytes(random.randrange(1, 700)), zeros=b"")
        frame = encode_frame(random.randbytes(random.randrange(1, 3000)), SEGMENT, len(first))
        parts = sectors_of(Write(len(first), frame))
        kept = [part for part in parts if random.random() < 0.7]
        found = scan(torn(first, frame, kept), SEGMENT)
        is_there = any(any(part.data) for part in kept)
        assert found.tail is (Tail.TORN if is_there and kept != parts else Tail.CLEAN), found
        assert len(found.frames) == 1 + (kept == parts)


# ---- damaged --------------------------------------------------------------------------------------------------------


def flips(data: bytes, stop: int) -> list[tuple[int, bytes]]:
    """Return the data once for each bit before `stop`, with this bit flipped, and the place of its byte."""
    flipped = []
    for bit in range(stop * 8):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        flipped.append((bit // 8, bytes(changed)))
    return flipped


FLIPPED: list[list[bytes]] = [
    [b"x" * 20, b"y", b"z" * 33, os.urandom(40)],  # short frames
    [os.urandom(700), b"1"],  # across a sector
    [bytes(1100)],  # sectors of zeros in the records
    [b"\xff" * 1100],
    *([bytes(502 - shift), bytes(256)] for shift in range(9)),  # a head across sectors, the low byte of the length is 0
    [bytes(502), bytes(1)],
]


@pytest.mark.parametrize("payloads", FLIPPED, ids=range(len(FLIPPED)))
def test_every_flipped_bit_is_damage(payloads: list[bytes]) -> None:
    """Of the last frame too, which is followed by zeros, as a torn one is: never is a whole frame cut."""
    data = segment_of(*payloads)
    whole = scan(data, SEGMENT)
    for at, changed in flips(data, whole.end):
        hit = next(index for index, frame in enumerate(whole.frames) if at < end_of(frame))
        found = scan(changed, SEGMENT)
        assert found.tail is Tail.DAMAGED, (at, found)
        assert found.frames == whole.frames[:hit]
        following = whole.frames[hit + 1].offset if hit + 1 < len(payloads) else None
        assert found.resumes_at == following


def test_zeroed_frame_before_another_is_damage() -> None:
    """A sector that the disk has lost looks like one that was never written, but for the frame that follows."""
    data = bytearray(segment_of(b"a" * 600, b"b" * 600, b"c" * 600))
    data[609:1218] = bytes(609)
    found = scan(bytes(data), SEGMENT)
    assert (found.tail, found.end, found.resumes_at) == (Tail.DAMAGED, 609, 1218)
    assert payloads_of(scan(bytes(data), SEGMENT, start=1218)) == [b"c" * 600]


def test_bytes_further_than_a_frame_reaches_are_damage() -> None:
    """No crash leaves them, whatever is missing before."""
    data = bytearray(LARGEST + 600)
    data[LARGEST - 1] = END
    assert scan(bytes(data), SEGMENT).tail is Tail.TORN
    data[LARGEST] = END
    assert scan(bytes(data), SEGMENT).tail is Tail.DAMAGED


@pytest.mark.parametrize("rest", [b"the remains of a longer frame\xf5", b"\x09\x00\x00\x02"])
def test_what_does_not_begin_as_a_frame_is_damage(rest: bytes) -> None:
    """Even if it might be read as the begin of one that is longer."""
    assert scan(segment_of(b"records", zeros=rest + ZEROS), SEGMENT).tail is Tail.DAMAGED


def test_frame_of_another_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """An older server says why it does not read a newer journal, and does not cut it."""
    monkeypatch.setattr(frames, "VERSION", 2)
    data = segment_of(b"records")
    monkeypatch.setattr(frames, "VERSION", 1)
    found = scan(data, SEGMENT)
    assert found.tail is Tail.DAMAGED
    assert found.reason == "it has format version 2, this server reads 1"


def test_only_confirmed_bytes_of_a_predecessor_are_read() -> None:
    """Frames and torn ends after them do not count, and fewer are damage."""
    data = segment_of(b"one", b"two", b"three")
    second = scan(data, SEGMENT).frames[1]
    assert payloads_of(scan(data, SEGMENT, valid_bytes=end_of(second))) == [b"one", b"two"]
    assert scan(data, SEGMENT, valid_bytes=end_of(second)).tail is Tail.CLEAN
    for missing in (data[: second.offset] + ZEROS, data[: second.offset], data[: end_of(second) - 1] + ZEROS):
        found = scan(missing, SEGMENT, valid_bytes=end_of(second))
        assert (found.tail, found.frames) == (Tail.DAMAGED, [Frame(0, b"one")])


# ---- hostile --------------------------------------------------------------------------------------------------------

HOSTILE = {
    "candidates": b"\x01" * (20 << 20),
    "ends": b"\xf5" * (20 << 20),
    "random": Random(1).randbytes(20 << 20),
    "long frames": b"\x00\x00\x40\x01\xf5\xf5\xf5\xf5" * (5 << 19),
    "short frames": b"\x01\x00\x00\x01\xf5\xf5\xf5\xf5\xf5\xf5" * (1 << 21),
    "one bit": bytes(20 << 20) + b"\x01",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_segment_is_judged_in_bounded_time(name: str) -> None:
    """Each byte may be the begin of a frame that reaches far; the limit is many times what it takes."""
    began = time.monotonic()
    assert scan(HOSTILE[name], SEGMENT).tail is Tail.DAMAGED
    assert time.monotonic() - began < 30


@given(st.binary(max_size=1500), st.binary(max_size=1500), st.integers(0, 1500))
def test_no_bytes_break_the_scan(before: bytes, after: bytes, cut: int) -> None:
    """Whatever is there, frames that are read were written, and the answer is one of the three."""
    frame = encode_frame(b"records", SEGMENT, len(before))
    found = scan((before + frame + after)[:cut], SEGMENT)
    assert found.end <= cut
    assert (found.tail is Tail.CLEAN) == (found.reason == "")


# ---- header ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("previous", [None, Previous(3, 700)])
def test_header_is_read_as_it_was_written(previous: Previous | None) -> None:
    """With and without a predecessor."""
    header = SegmentHeader(4, "0123456789ab", 2, previous)
    assert SegmentHeader.decode(header.encode()) == header


@pytest.mark.parametrize(
    "payload",
    [
        *(b"", b"\xff", b"{", b"[]", b"1", b"null", b"[" * 100_000, b"{}"),
        b'{"segment": "1", "epoch": "a", "generation": 1, "previous": null}',
        b'{"segment": 9223372036854775808, "epoch": "a", "generation": 1, "previous": null}',
        b'{"segment": true, "epoch": "a", "generation": 1, "previous": null}',
        b'{"segment": 1, "epoch": 2, "generation": 1, "previous": null}',
        b'{"segment": 1, "epoch": "a", "generation": 1, "previous": {"segment": 1}}',
        b'{"segment": 1, "epoch": "a", "generation": 1, "previous": {"segment": 1, "valid_bytes": -1}}',
        b'{"segment": 1, "epoch": "a", "generation": 1, "previous": [1, 2]}',
    ],
)
def test_malformed_header_is_a_value_error(payload: bytes) -> None:
    """And no other error."""
    with pytest.raises(ValueError):  # noqa: PT011 - of json too
        SegmentHeader.decode(payload)
