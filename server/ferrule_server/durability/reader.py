"""Reads the journal of a directory: what survives, what is torn, and what is damaged.

Each segment says in its header which one precedes it and how much of that one was confirmed, so the segments are found
from the newest to the oldest, and then read in order from the last complete snapshot on::

    3 (superseded)   4: BEGIN .. END ..   5: ..  torn frame   6 (header torn: unused)
                     ^ base                      ^ never confirmed, ignored

Nothing is changed, and no lock is needed: a segment that grows meanwhile is read as far as it was at first.
"""

from __future__ import annotations

import base64
import errno
import gc
import hashlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final, NamedTuple

from ferrule_server.durability.directory import Identity, Newest, list_segments, read_identity, segment_path
from ferrule_server.durability.files import Files
from ferrule_server.durability.frames import Frame, Previous, Scan, SegmentHeader, Tail, scan
from ferrule_server.durability.records import BadRecord, Tag
from ferrule_server.durability.replay import JournalState
from ferrule_server.durability.writer import LastFrame
from ferrule_server.errors import ConfigError

_MAX_NAMED: Final = 8
"""Most sequences that an error names."""

OnProgress = Callable[[float], None]
"""Called with the part that has been read, 0 to 1."""


class Role(StrEnum):
    """What a segment is to the state."""

    BASE = "base"
    """It begins with the snapshot from which the state is read."""
    READ = "read"
    """It follows the base."""
    SUPERSEDED = "superseded"
    """It precedes the base, and would have been deleted next."""
    UNUSED = "unused"
    """It has no header, or no later segment follows it."""


@dataclass(slots=True)
class SegmentReport:
    """What a segment contains.

    Attributes:
        number: Of the segment.
        size_bytes: Of its file. used_bytes: of its valid frames.
        num_frames: Its valid frames, the header among them.
        num_records: Of those that were read into the state.
        role: What it is to the state.
        tail: What follows its last valid frame. reason: why that is torn or damaged.
    """

    number: int
    size_bytes: int
    used_bytes: int
    num_frames: int
    tail: Tail
    reason: str
    role: Role = Role.UNUSED
    num_records: int = 0


class Damage(NamedTuple):
    """Where a journal cannot be read on, and what follows.

    Attributes:
        segment: Number of the segment. offset: where the first bad frame begins.
        reason: What is wrong with it.
        touched: The handle_ids of the sequences that readable records after it create, change or end; sorted.
        num_frames_after: Valid frames after it.
    """

    segment: int
    offset: int
    reason: str
    touched: tuple[str, ...] = ()
    num_frames_after: int = 0

    @property
    def lost(self) -> str:
        """What would be lost if the journal ended there."""
        if not self.num_frames_after:
            return "nothing readable follows; the records from there on would be lost"
        more = "" if len(self.touched) <= _MAX_NAMED else ", ..."
        names = ", ".join(self.touched[:_MAX_NAMED]) + more
        changed = f"change {len(self.touched)} sequences ({names})" if names else "change no sequence that can be named"
        return f"{self.num_frames_after} frames after it {changed} and would be lost"


class JournalDamaged(ConfigError):
    """A journal holds something that a crash cannot leave.

    Attributes:
        damage: What, and what would be lost if the journal ended there.
    """

    def __init__(self, damage: Damage) -> None:
        segment, offset, reason = damage[:3]
        super().__init__(
            f"the journal is damaged: segment {segment}, offset {offset}: {reason}; {damage.lost}; "
            "see `ferrule durable verify`, then restore a backup, or start with another directory"
        )
        self.damage = damage


@dataclass(slots=True)
class Journal:
    """What a directory contains.

    Attributes:
        identity: Of the directory.
        newest: The newest segment in use as a file names it; None: no file does.
        state: What its records describe, up to the damage if there is one.
        last_frame: The last valid frame, for the writer; None: no segment is in use.
        segments: All segments, ascending.
        damage: Where the state ends too early; None: it is complete.
        digests: The versions of the digests of requests in the records.
    """

    identity: Identity
    newest: Newest | None = None
    state: JournalState = field(default_factory=JournalState)
    last_frame: LastFrame | None = None
    segments: list[SegmentReport] = field(default_factory=list)
    damage: Damage | None = None
    digests: set[str] = field(default_factory=set)

    def handle_id(self, secret: bytes) -> str:
        """Return the loggable name of the sequence with that secret."""
        text = base64.urlsafe_b64encode(secret).rstrip(b"=").decode()
        cache_id = f"{self.identity.instance}.{self.identity.epoch}.{text}"
        return hashlib.sha256(cache_id.encode()).hexdigest()[:16]


def read_directory(path: Path, files: Files, on_progress: OnProgress | None = None) -> Journal:
    """Read the journal of a server that starts.

    Raises:
        JournalDamaged: It holds something that a crash cannot leave.
        ConfigError, FileNotFoundError: The directory has no readable identity.
    """
    journal = survey(path, files, on_progress)
    if journal.damage is not None:
        raise JournalDamaged(journal.damage)
    return journal


def survey(path: Path, files: Files, on_progress: OnProgress | None = None) -> Journal:
    """Read a journal, as far as it can be read.

    Raises:
        ConfigError, FileNotFoundError: The directory has no readable identity, or a segment was deleted meanwhile.
        OSError: A file cannot be read, is not a regular one, or is too large.
    """
    journal = Journal(read_identity(path, files), Newest.find(path, files))
    was_enabled = gc.isenabled()
    gc.disable()  # it would look at all sequences again and again; there are no cycles
    try:
        _Survey(path, files, journal, on_progress or (lambda _: None)).run()
    finally:
        if was_enabled:
            gc.enable()
    return journal


@dataclass(slots=True)
class _Part:
    """A segment of the chain.

    Attributes:
        report: What it contains.
        header: Its header; None: it cannot be read.
        is_snapshot: Its first record begins a snapshot.
        resumes_at: Where valid frames follow a damaged one.
        frames: The valid frames, until they are read for the first time.
    """

    report: SegmentReport
    header: SegmentHeader | None
    is_snapshot: bool
    resumes_at: int | None
    frames: list[Frame]


class _Survey:
    """One reading of a directory, which fills a :class:`Journal`."""

    def __init__(self, path: Path, files: Files, journal: Journal, on_progress: OnProgress) -> None:
        self._path = path
        self._files = files
        self._journal = journal
        self._on_progress = on_progress

    def run(self) -> None:
        """Find the segments, read from the last complete snapshot, and check that the newest one is there."""
        parts = self._find()
        self._read_all(parts)
        if self._journal.damage is not None:
            return
        self._journal.damage = self._loss([part.header for part in parts if part.header is not None])
        if self._journal.damage is not None and Newest.find(self._path, self._files) != self._journal.newest:
            raise FileNotFoundError(errno.ENOENT, "deleted meanwhile", str(self._path))

    def _loss(self, headers: list[SegmentHeader]) -> Damage | None:
        """Return what is lost of the newest segment or of its name, if anything is."""
        newest, segments = self._journal.newest, self._journal.segments
        if newest is None:
            if segments and not any(header.is_named for header in headers):
                return None
            number = segments[-1].number if segments else 0
            return Damage(number, 0, "the file that names the newest segment (*.newest) is missing")
        report = next((each for each in segments if each.number == newest.segment), None)
        is_past = any(header.generation > newest.generation and not header.is_named for header in headers)
        if is_past or not newest.segment or (report is not None and report.num_frames):
            return None
        what = "is missing" if report is None else "has lost its header"
        return Damage(newest.segment, 0, f"the newest segment, named by {newest.file_name}, {what}")

    def _read_all(self, parts: list[_Part]) -> None:
        """Read from the last complete snapshot; without one, all segments."""
        bases = [index for index, part in enumerate(parts) if part.is_snapshot and index]
        for base in [*reversed(bases), 0]:
            self._replay(parts, base)
            if self._journal.state.num_snapshots:
                return
        if parts and self._journal.damage is None:
            self._check_begin(parts)

    def _check_begin(self, parts: list[_Part]) -> None:
        """Check that a journal without a complete snapshot is there from its very begin."""
        header = parts[0].header
        first = next((part for part in parts if part.report.num_frames > 1), None)
        if header is None or header.previous is not None or (first is not None and not first.is_snapshot):
            reason = "it does not begin with a complete snapshot, and what precedes it is missing"
            self._journal.damage = Damage(parts[0].report.number, 0, reason)

    def _find(self) -> list[_Part]:
        """Return the segments in use, the oldest first, and report all."""
        parts: list[_Part] = []
        reports: list[SegmentReport] = []
        previous: Previous | None = None
        numbers = list_segments(self._path, self._files)
        is_open = True
        for index, number in enumerate(reversed(numbers)):
            is_next = is_open and (previous is None or number == previous.segment)
            part = self._look(number, previous.valid_bytes if previous is not None and is_next else None)
            reports.insert(0, part.report)
            self._on_progress((index + 1) / len(numbers) / 2)
            if not is_next or (previous is None and self._was_never_used(part)):
                is_open = is_open and (previous is None or number > previous.segment)
                continue
            part.report.role = Role.SUPERSEDED
            parts.insert(0, part)
            previous = None if part.header is None else part.header.previous
            is_open = previous is not None
        self._journal.segments = reports
        return parts

    def _look(self, number: int, valid_bytes: int | None) -> _Part:
        """Return what a segment contains."""
        data = self._files.read_bytes(segment_path(self._path, number))
        found = scan(data, number, valid_bytes=valid_bytes)
        header, found = _header_of(found, number, self._journal.identity.epoch)
        report = SegmentReport(number, len(data), found.end, len(found.frames), found.tail, found.reason)
        is_snapshot = len(found.frames) > 1 and found.frames[1].payload[0] == Tag.SNAPSHOT_BEGIN
        return _Part(report, header, is_snapshot, found.resumes_at, found.frames)

    def _was_never_used(self, part: _Part) -> bool:
        """Return whether the creation of a segment was interrupted, so that nothing in it counts."""
        newest, header = self._journal.newest, part.header
        if header is None:
            return part.report.tail is not Tail.DAMAGED
        return newest is not None and header.is_named and header.segment > newest.segment

    def _replay(self, parts: list[_Part], base: int) -> None:
        """Read the state from the segment ``base`` on."""
        journal = self._journal
        journal.state, journal.last_frame, journal.damage = JournalState(), None, None
        journal.digests = {part.header.digests for part in parts[base:] if part.header is not None}
        for index, part in enumerate(parts[base:], base):
            part.report.role = Role.BASE if index == base else Role.READ
            journal.damage = self._read(part)
            self._on_progress((1 + (index + 1 - base) / (len(parts) - base)) / 2)
            if journal.damage is not None:
                self._add_lost(parts[base:], journal.damage)
                return

    def _read(self, part: _Part) -> Damage | None:
        """Read the records of a segment into the state, until there is damage, and return that."""
        state, report = self._journal.state, part.report
        before, start, damage = state.num_records, 0, None
        for start, payload in self._frames(part):
            try:
                state.read(payload)
            except BadRecord as error:
                reason = f"the frame is whole, and a record in it is wrong: {error}"
                damage = Damage(report.number, start, reason)
                break
        report.num_records = state.num_records - before
        self._journal.last_frame = LastFrame(report.number, start, report.used_bytes)
        if damage is None and report.tail is Tail.DAMAGED:
            return Damage(report.number, report.used_bytes, report.reason)
        return damage

    def _frames(self, part: _Part) -> list[Frame]:
        """Return the valid frames of a segment except its header, as far as they were when it was looked at."""
        frames, part.frames, report = part.frames, [], part.report
        if not frames:
            data = self._files.read_bytes(segment_path(self._path, report.number))
            frames = scan(data, report.number, valid_bytes=report.used_bytes).frames
        return frames[1:]

    def _add_lost(self, parts: list[_Part], damage: Damage) -> None:
        """Add to the damage what follows it, by reading all once more and over it."""
        after, num_frames_after = JournalState(), 0
        for part in parts:
            for offset, payload in self._all_frames(part):
                num_frames_after += (part.report.number, offset) > damage[:2]
                with suppress(BadRecord):
                    after.read(payload)
        before, then = self._journal.state.sequences, after.sequences
        changed = [before.get(no) or then[no] for no in before.keys() | then.keys() if before.get(no) != then.get(no)]
        touched = tuple(sorted(self._journal.handle_id(state.secret) for state in changed))
        self._journal.damage = damage._replace(touched=touched, num_frames_after=num_frames_after)

    def _all_frames(self, part: _Part) -> Iterator[Frame]:
        """Yield all valid frames of a segment except its header, those after damage too."""
        yield from self._frames(part)
        data, start = self._files.read_bytes(segment_path(self._path, part.report.number)), part.resumes_at
        while start is not None:
            found = scan(data, part.report.number, start=start)
            yield from found.frames
            start = found.resumes_at


def _header_of(found: Scan, segment: int, epoch: str) -> tuple[SegmentHeader | None, Scan]:
    """Return the header of a segment; if it is wrong, None, and the frames as damaged from the begin."""
    if not found.frames:
        return None, found
    try:
        header = SegmentHeader.decode(found.frames[0].payload)
    except ValueError as error:
        return None, Scan([], 0, Tail.DAMAGED, str(error))
    if (header.segment, header.epoch) != (segment, epoch):
        reason = f"its header says segment {header.segment} of epoch {header.epoch}"
        return None, Scan([], 0, Tail.DAMAGED, reason)
    return header, found
