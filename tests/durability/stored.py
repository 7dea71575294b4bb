"""Journals as the bytes of their files, made from groups of records without a writer."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

from ferrule_server.durability.directory import Identity, segment_path
from ferrule_server.durability.files import Files
from ferrule_server.durability.frames import Previous, SegmentHeader, encode_frame
from ferrule_server.durability.records import Tag

PATH = Path("/journal")
IDENTITY = Identity("east-1", "0123456789ab", b"\1\2", "float32", 16, b"k" * 16, 3)

Segments = dict[int, bytes]


class StoredFiles(Files):
    """Files in memory that are only read: the identity and some segments."""

    def __init__(self, segments: Segments, identity: bytes = IDENTITY.encode()) -> None:
        self.contents = {segment_path(PATH, number): data for number, data in segments.items()}
        self.contents[PATH / "identity.json"] = identity

    def read_bytes(self, path: Path) -> bytes:
        """Return the content of a file."""
        if path not in self.contents:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return self.contents[path]

    def list_names(self, path: Path) -> list[str]:
        """Return the names of the files."""
        return [each.name for each in self.contents if each.parent == path]


def segment_of(
    number: int, payloads: Sequence[bytes], previous: Previous | None, *, room: int = 100, is_named: bool = False
) -> bytes:
    """Return a segment: its header, a frame for each payload, and some zeros."""
    data = b""
    header = SegmentHeader(number, IDENTITY.epoch, IDENTITY.generation, previous, is_named=is_named)
    for payload in (header.encode(), *payloads):
        data += encode_frame(payload, number, len(data))
    return data + bytes(room)


def store(groups: Sequence[bytes], *, segment_bytes: int = 4000, first: int = 1) -> Segments:
    """Return the segments that hold the groups, a frame for each; a snapshot begins a segment."""
    return store_parts(split(groups, segment_bytes), first=first)


def split(groups: Sequence[bytes], segment_bytes: int = 4000) -> list[list[bytes]]:
    """Return the groups of each segment."""
    parts: list[list[bytes]] = []
    for group in filter(None, groups):
        if not parts or group[0] == Tag.SNAPSHOT_BEGIN or sum(map(len, parts[-1])) > segment_bytes:
            parts.append([])
        parts[-1].append(group)
    return parts


def store_parts(parts: Sequence[Sequence[bytes]], *, first: int = 1) -> Segments:
    """Return the segments that hold these payloads."""
    segments: Segments = {}
    previous: Previous | None = None
    for number, payloads in enumerate(parts, first):
        segments[number] = segment_of(number, payloads, previous)
        previous = Previous(number, len(segments[number]) - 100)
    return segments
