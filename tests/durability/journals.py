"""Reads what writers have written, as the server does at a start, but only down to the records."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from ferrule_server.durability.directory import Wanted, list_segments, segment_path
from ferrule_server.durability.files import Files
from ferrule_server.durability.frames import Scan, SegmentHeader, Tail, scan
from ferrule_server.durability.reader import Damage, JournalDamaged
from ferrule_server.durability.writer import LastFrame

PATH = Path("/journal")
WANTED = Wanted("east-1", b"\x01\x02", "float32", 16)


def record(number: int, num_bytes: int = 12) -> bytes:
    """Return a record that tells its number, at least 12 bytes long."""
    return b"%010d" % number + b"." * (num_bytes - 11) + b";"


class Journal(NamedTuple):
    """What a directory contains.

    Attributes:
        numbers: Of the records, in order.
        last_frame: Where a writer goes on; None: there is no segment.
        segments: Those that were read, oldest first.
    """

    numbers: list[int]
    last_frame: LastFrame | None
    segments: list[int]


def read_journal(files: Files) -> Journal:
    """Read the newest segment that has a header, and those before it."""
    scans = {
        number: scan(files.read_bytes(segment_path(PATH, number)), number) for number in list_segments(PATH, files)
    }
    for number, found in scans.items():
        check(number, found)
    begun = [number for number, found in scans.items() if found.frames]
    if not begun:
        return Journal([], None, [])
    last = max(begun)
    last_frame = LastFrame(last, scans[last].frames[-1].offset, scans[last].end)
    numbers, segments = [], [last]
    numbers += numbers_in(scans[last])
    while (previous := header_of(scans[segments[0]]).previous) is not None and previous.segment in scans:
        found = scan(files.read_bytes(segment_path(PATH, previous.segment)), previous.segment, valid_bytes=previous[1])
        check(previous.segment, found)
        scans[previous.segment] = found
        numbers[:0] = numbers_in(found)
        segments.insert(0, previous.segment)
    return Journal(numbers, last_frame, segments)


def check(number: int, found: Scan) -> None:
    """Raise if a segment is damaged."""
    if found.tail is Tail.DAMAGED:
        raise JournalDamaged(Damage(number, found.end, found.reason))


def header_of(found: Scan) -> SegmentHeader:
    """Return the header of a segment."""
    return SegmentHeader.decode(found.frames[0].payload)


def numbers_in(found: Scan) -> list[int]:
    """Return the numbers of the records in a segment."""
    records = b"".join(frame.payload for frame in found.frames[1:]).split(b";")
    return [int(each.rstrip(b".")) for each in records[:-1]]
