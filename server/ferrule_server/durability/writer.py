"""The writer of the journal: a thread that writes groups of records, and reports what is on the disk.

    engine thread                         journal thread                            any thread
    append, append, close_group -- queue --> [all queued groups: one frame] write
                                             sync
                                             synced = group  -- on_synced -->        replies may be sent

A frame is written only after the one before it was synced. So at most one frame is ever in doubt, and after a failure
it is clear what is on the disk: everything up to the end of the last frame that was synced. Nothing is written to that
segment again, since a second sync would succeed without the pages that the first one lost (P. Rebello et al., "Can
Applications Recover from fsync Failures?", USENIX ATC 2020).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from ferrule_server.durability.directory import DurableDirectory
from ferrule_server.durability.frames import MAX_PAYLOAD_BYTES, Previous, encode_frame, frame_bytes

_LOG = logging.getLogger(__name__)

SEGMENT_BYTES: Final = 16 << 20
LARGEST_FRAME_BYTES: Final = 8 << 20
"""The limit of a frame with several records; a record is never split."""
_HEADER_ROOM_BYTES: Final = 512
_DISCARD_S: Final = 5.0
_CHECK_S: Final = 0.5
SYNC_BOUNDS_S: Final = (100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


class LastFrame(NamedTuple):
    """Where the last valid frame of a journal lies, as it was read.

    Attributes:
        segment: The segment.
        start: The offset of the frame.
        end: The offset of the byte after it.
    """

    segment: int
    start: int
    end: int


@dataclass(slots=True)
class JournalCounters:
    """What the journal thread has done; written by it alone, read by any thread.

    Attributes:
        num_groups: Groups on the disk.
        num_syncs: Frames written and synced; groups that waited for the disk share one.
        num_bytes: Bytes of frames written and synced.
        sum_sync_ns: How long writes and syncs took.
        sync_counts: How many took at most each of SYNC_BOUNDS_S and more than the bound before; last: longer ones.
        num_failures: How often writing failed.
    """

    num_groups: int = 0
    num_syncs: int = 0
    num_bytes: int = 0
    sum_sync_ns: int = 0
    sync_counts: list[int] = field(default_factory=lambda: [0] * (len(SYNC_BOUNDS_S) + 1))
    num_failures: int = 0

    def count_sync(self, num_bytes: int, took_ns: int) -> None:
        """Count a frame that was written and synced."""
        self.num_syncs += 1
        self.num_bytes += num_bytes
        self.sum_sync_ns += took_ns
        self.sync_counts[bisect_left(SYNC_BOUNDS_S, took_ns / 1e9)] += 1


@dataclass(frozen=True, slots=True)
class _Group:
    number: int
    records: list[bytes]
    begins_segment: bool
    ends_snapshot: bool


class _Segment:
    """The segment that is written to.

    Invariant: everything before `end` is on the disk, and nothing after it counts.
    """

    def __init__(self, directory: DurableDirectory, number: int, size: int, previous: Previous | None) -> None:
        self.number = number
        self.fd, self.end = directory.create_segment(number, size, previous)
        self.size = max(size, self.end)


class JournalWriter:
    """Writes groups of records in order, each confirmed before the next, and begins segments.

    The first segment is new, so that a snapshot can be written to it at once.

    Invariant: the groups up to ``synced`` that were accepted are on the disk. After a failure none is accepted, and
    those given away are dropped, until :meth:`restart`. Its caller then writes the whole state as new groups.

    Args:
        directory: Where the segments are.
        last_frame: The last frame of the journal that was read; None: the directory has no segment.
        segment_bytes: The size of a segment, unless a frame needs more.
        on_synced: Called on the journal thread with the number of the newest group on the disk.
        on_failed: Called on the journal thread when writing has failed, once until the next :meth:`restart`.

    Raises:
        OSError: The first segment cannot be created, or what was read cannot be confirmed.

    Attributes:
        synced: Number of the newest group on the disk; any thread may read it.
        is_failed: Whether groups are dropped; any thread may read it.
        size_bytes: Bytes of the frames that are on the disk since the last :meth:`start_segment` or :meth:`restart`.
        next_group: The number that the open group will have; engine thread only.
        counters: What the journal thread has done.
    """

    def __init__(
        self,
        directory: DurableDirectory,
        *,
        last_frame: LastFrame | None = None,
        segment_bytes: int = SEGMENT_BYTES,
        on_synced: Callable[[int], None],
        on_failed: Callable[[OSError], None],
    ) -> None:
        self._directory = directory
        self._segment_bytes = segment_bytes
        self._on_synced = on_synced
        self._on_failed = on_failed
        self.synced = 0
        self.is_failed = False
        self.size_bytes = 0
        self.next_group = 1
        self.counters = JournalCounters()
        self._open: list[bytes] = []
        self._begins_segment = False
        self._queue: deque[_Group] = deque()
        self._is_closing = self._is_complete = False
        self._check_at = 0.0
        self._changed = threading.Condition()
        self._newest_before = directory.newest
        self._next_number = max(*directory.segments(), directory.newest.segment, 0) + 1
        if last_frame is not None:
            directory.confirm(*last_frame)
        previous = last_frame and Previous(last_frame.segment, last_frame.end)
        self._segment = self._create_segment(segment_bytes, previous)
        self._first = self._base = self._segment.number
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    # ---- engine thread ----------------------------------------------------------------------------------------------

    @property
    def has_open(self) -> bool:
        """Whether the open group has records."""
        return bool(self._open)

    def append(self, record: bytes) -> None:
        """Add a record to the open group.

        Raises:
            ValueError: It is longer than MAX_PAYLOAD_BYTES.
        """
        if len(record) > MAX_PAYLOAD_BYTES:
            raise ValueError(f"a record of {len(record)} bytes is longer than {MAX_PAYLOAD_BYTES}")
        self._open.append(record)

    def close_group(self, *, ends_snapshot: bool = False) -> int:
        """Give the open group, which may be empty, to the journal thread and return its number.

        Args:
            ends_snapshot: Everything from the newest segment that :meth:`start_segment` or :meth:`restart` began is
                complete with this group: when it is on the disk, the segments before that one are deleted.
        """
        group = _Group(self.next_group, self._open, self._begins_segment, ends_snapshot)
        self.next_group += 1
        self._open, self._begins_segment = [], False
        with self._changed:
            if not self.is_failed:
                self._queue.append(group)
                self._changed.notify()
        return group.number

    def start_segment(self) -> None:
        """Let the records that are added from now on be in a new segment, which begins a snapshot."""
        if self._open:
            self.close_group()
        self._begins_segment = True

    def restart(self) -> int:
        """After a failure, accept groups again, and return the number of an empty one that begins a segment.

        If the segment cannot be created, that is another failure; otherwise the state can be written. The open group is
        dropped: its records continue a state of which a part is lost.
        """
        self._open, self._begins_segment = [], True
        with self._changed:
            self.is_failed = False
        return self.close_group()

    # ---- any thread -------------------------------------------------------------------------------------------------

    def close(self, timeout_s: float | None = None) -> None:
        """Wait until the groups that were given away are on the disk, or have failed, and end the thread.

        Args:
            timeout_s: Then the thread is left alone with a disk that does not answer; it ends with the process.
        """
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(timeout_s)

    def discard(self) -> None:
        """End a start that has failed: delete the segments that this writer has created, and give up the directory.

        They stay if the disk does not answer, or has the whole state after all, so that older segments may be gone.
        """
        self._base = 0  # a disk that answers late deletes no older segment from now on
        self.close(_DISCARD_S)
        with contextlib.suppress(OSError):
            if not self._is_complete and not self._thread.is_alive():
                self._directory.name_newest(self._newest_before)
                for number in reversed(self._directory.segments()):
                    if number >= self._first:
                        self._directory.delete_segment(number)
        self._directory.close()

    # ---- journal thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (groups := self._take()) is not None:
            try:
                self._check_segment(groups)
                for run in _runs(groups):
                    self._write_run(run)
            except OSError as error:
                self._fail(error)
            except Exception as error:  # noqa: BLE001 - replies would wait for a dead thread for ever
                _LOG.exception("a bug ended the journal")
                self._fail(OSError(errno.EIO, f"{type(error).__name__} in the journal"))
        self._directory.files.close(self._segment.fd)

    def _take(self) -> list[_Group] | None:
        """Wait for groups, but not long, and return all that are queued; None when the writer is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._is_closing, _CHECK_S)
            groups = list(self._queue)
            self._queue.clear()
            return groups if groups or not self._is_closing else None

    def _check_segment(self, groups: list[_Group]) -> None:
        """Check now and then that the segment still has its name: what is written to a deleted one is lost.

        Raises:
            FileNotFoundError: It has not.
        """
        segment, now = self._segment, time.monotonic()
        if now < self._check_at or self.is_failed or (groups and groups[0].begins_segment):
            return
        self._check_at = now + _CHECK_S
        if not self._directory.holds(segment.fd, segment.number):
            raise FileNotFoundError(errno.ENOENT, "the segment is not in its directory any more")

    def _write_run(self, groups: list[_Group]) -> None:
        """Write groups that can share frames, and report those that are on the disk."""
        if groups[0].begins_segment:
            self._rotate(0)
            self._base = self._segment.number
            self.size_bytes = 0
        for payload, newest in _payloads(groups):
            if payload:
                self._write(payload)
            if newest is not None:
                self.synced = newest
                self._on_synced(newest)
        self.counters.num_groups += len(groups)
        if any(group.ends_snapshot for group in groups):
            self._delete_before_base()

    def _delete_before_base(self) -> None:
        """Delete the segments that are not read any more, the oldest first; one that cannot be deleted stays."""
        self._is_complete = True
        try:
            for number in self._directory.segments():
                if number < self._base:
                    self._directory.delete_segment(number)
        except OSError as error:
            _LOG.warning("a segment cannot be deleted error=%s", error)

    def _write(self, payload: bytes) -> None:
        """Write a frame and sync it."""
        if self._segment.end + frame_bytes(len(payload)) > self._segment.size:
            self._rotate(len(payload))
        segment = self._segment
        frame = encode_frame(payload, segment.number, segment.end)
        began_ns = time.perf_counter_ns()
        self._directory.files.write(segment.fd, frame, segment.end)
        self._directory.files.sync(segment.fd)
        segment.end += len(frame)
        self.size_bytes += len(frame)
        self.counters.count_sync(len(frame), time.perf_counter_ns() - began_ns)

    def _rotate(self, payload_bytes: int) -> None:
        """Begin a segment that has room for a frame; only what is confirmed of the one before will be read."""
        size = max(self._segment_bytes, frame_bytes(payload_bytes) + _HEADER_ROOM_BYTES)
        before = self._segment
        self._segment = self._create_segment(size, Previous(before.number, before.end))
        with contextlib.suppress(OSError):
            self._directory.files.close(before.fd)

    def _create_segment(self, size: int, previous: Previous | None) -> _Segment:
        number = self._next_number
        self._next_number += 1
        return _Segment(self._directory, number, size, previous)

    def _fail(self, error: OSError) -> None:
        """Drop what was given away, and report the failure."""
        self.counters.num_failures += 1
        with self._changed:
            self.is_failed = True
            self._queue.clear()
        _LOG.error("the journal failed segment=%d offset=%d error=%s", self._segment.number, self._segment.end, error)
        self._on_failed(error)


def _runs(groups: Iterable[_Group]) -> Iterator[list[_Group]]:
    """Split groups before each that begins a segment."""
    run: list[_Group] = []
    for group in groups:
        if group.begins_segment and run:
            yield run
            run = []
        run.append(group)
    if run:
        yield run


def _payloads(groups: Iterable[_Group]) -> Iterator[tuple[bytes, int | None]]:
    """Yield payloads, each with the newest group of which it holds the last record, if any.

    A group is in one payload unless it is larger than LARGEST_FRAME_BYTES; a payload may be empty.
    """
    records: list[bytes] = []
    size, newest = 0, None
    for group in groups:
        room = LARGEST_FRAME_BYTES - sum(map(len, group.records))
        for index, record in enumerate(group.records):
            if records and size > (room if index == 0 else LARGEST_FRAME_BYTES - len(record)):
                yield b"".join(records), newest
                records, size, newest = [], 0, None
            records.append(record)
            size += len(record)
        newest = group.number
    yield b"".join(records), newest
