"""The journal of the engine: what happens to durable sequences, in groups of records that are synced together.

    HEALTHY -- a write or sync fails --> LOST -- each second --> PROBING -- an empty segment is synced --> WRITING
       ^                                  ^                         | fails                                  | fails
       |                                  +-------------------------+----------------------------------------+
       +-- a snapshot of everything is synced -------------------------------------------------------------- +

While it is not healthy, everything that depends on it is answered with DURABILITY_LOST. A disk that does not answer for
``STALL_S`` counts as lost too, until it answers.

A sequence is written as a whole when it is created, and again in each snapshot. After that only its changes are. If a
change does not begin where the journal left the sequence, because the engine failed in between, the sequence is written
as a whole again.
"""

from __future__ import annotations

import base64
import enum
import errno
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from typing import Final

from ferrule_server.durability.directory import DurableDirectory
from ferrule_server.durability.records import Creation as CreationState
from ferrule_server.durability.records import Encoder, End, SequenceState
from ferrule_server.durability.records import Truncation as TruncationState
from ferrule_server.durability.writer import JournalWriter
from ferrule_server.engine.appends.creations import Creations
from ferrule_server.engine.appends.records import ReplayRecords
from ferrule_server.engine.appends.running import Creation, RunningAppend
from ferrule_server.engine.durable.answers import Policies, answer_of
from ferrule_server.engine.jobs import ForkResult, TruncateJob
from ferrule_server.engine.masks import MAX_MASK_BYTES
from ferrule_server.engine.metrics.durability import DurabilityFigures
from ferrule_server.executor.base import TokenMask
from ferrule_server.kv.lineage import CHUNK_TOKENS
from ferrule_server.kv.sequence import Sequence
from ferrule_server.kv.sequence_store import SequenceStore

_LOG = logging.getLogger(__name__)

STALL_S: Final = 10.0
"""A sync that takes longer counts as a failure until it is done."""
_RETRY_S: Final = 1.0
_LONGEST_RETRY_S: Final = 30.0
_LEAST_BYTES: Final = 16 << 20
"""Less than this is never worth a snapshot."""
_SLICE_NS: Final = 1_000_000
"""Time that one turn of the engine spends on a snapshot."""
_CLOSE_S: Final = 5.0
_BEGIN_S: Final = 60.0
"""Longest time for which a disk may take nothing of the first snapshot."""


class Health(enum.Enum):
    """Whether the journal can be relied on."""

    HEALTHY = "healthy"
    LOST = "lost"
    PROBING = "probing"
    WRITING = "writing"


@dataclass(eq=False, slots=True)
class _Known:
    """A durable sequence as the journal has it.

    Attributes:
        no: Its number in the journal.
        sequence: The sequence. length, ttl_s: as written.
        prefix_length: Tokens that it shares with its source and its siblings; 0: it was prefilled.
        source_id: The handle_id of the sequence that it was branched from; a name, since that one may have ended.
    """

    no: int
    sequence: Sequence
    length: int = 0
    ttl_s: float = 0.0
    prefix_length: int = 0
    source_id: str = ""


class Journal:
    """Writes what happens to durable sequences. Engine thread only, except the figures.

    Invariant: every live durable sequence has a number, and the records of a group describe its state at the end of
    that group; ``group_of(principal)`` is the newest group with a record of the principal's.

    Args:
        directory: Owned by the journal from now on.
        writer: Makes the writer, with the callbacks for groups that are synced and for failures.

    Attributes:
        health: See the module.
        num_snapshots: Snapshots that are complete on the disk.
    """

    def __init__(
        self,
        directory: DurableDirectory,
        writer: Callable[[Callable[[int], None], Callable[[OSError], None]], JournalWriter],
    ) -> None:
        self.health = Health.HEALTHY
        self.num_snapshots = 0
        self._directory = directory
        self._failure: OSError | None = None
        self._encoder = Encoder()
        self._policies = Policies()
        self._known: dict[str, _Known] = {}
        self._prefixes: dict[bytes, str] = {}  # lineage -> handle_id
        self._principals: set[str] = set()
        self._groups: dict[str, int] = {}
        self._numbers = itertools.count(1)
        self._masks: dict[tuple[str, bytes], bytes] = {}
        self._num_mask_bytes = 0
        self._snapshot: Iterator[None] | None = None
        self._snapshot_group = self._slice_group = 0
        self._snapshot_bytes = 0
        self._released = self._num_restored = 0
        self._retry_s, self._retry_at = _RETRY_S, 0.0
        self._oldest = (0, 0.0)  # group that the disk may not have yet, and when it was closed
        self._writer = writer(self._note_synced, self._note_failed)

    def attach(
        self,
        store: SequenceStore,
        records: ReplayRecords,
        creations: Creations,
        *,
        on_synced: Callable[[int], None],
        wake: Callable[[], None],
    ) -> None:
        """Name the parts whose state snapshots contain, and who is told about groups on the disk and failures.

        Args:
            store: The sequences.
            records: Their last answers.
            creations: What requests have created.
            on_synced: Called on the journal thread with the number of the newest group on the disk.
            wake: Wakes the engine thread; called on the journal thread.
        """
        self._store, self._records, self._creations = store, records, creations
        self._on_synced, self._wake = on_synced, wake
        store.on_lease = self.note_lease

    def begin(self, restored: dict[int, Sequence], masks: Mapping[tuple[str, bytes], bytes]) -> None:
        """Write everything that was restored into a new segment, and wait until it is on the disk.

        From then on nothing depends on segments that an earlier process has written, of which it may not be known what
        the disk has.

        Args:
            restored: The sequences by their numbers in the journal.
            masks: Packed bits by principal and fingerprint.

        Raises:
            OSError: It cannot be written.
        """
        self._num_restored = len(restored)
        for no, sequence in restored.items():
            self._enter(sequence, no)
        for (principal, fingerprint), bits in masks.items():
            self._keep_mask(principal, fingerprint, bits)
        self._numbers = itertools.count(max(restored, default=0) + 1)
        for _ in self._write_snapshot(starts_segment=False):  # the writer has begun one
            pass
        num_bytes, deadline = -1, 0.0
        while self._writer.synced < self._snapshot_group:
            if self._writer.size_bytes != num_bytes:
                num_bytes, deadline = self._writer.size_bytes, time.monotonic() + _BEGIN_S
            if self._failure is not None or time.monotonic() > deadline:
                self._writer.discard()
                raise self._failure or OSError(errno.ETIMEDOUT, "the disk does not answer")
            time.sleep(0.001)
        self._note_snapshot_synced()

    def __len__(self) -> int:
        """Return how many durable sequences are live; from any thread."""
        return len(self._known)

    # ---- what the engine asks ---------------------------------------------------------------------------------------

    @property
    def is_lost(self) -> bool:
        """Whether nothing that depends on the journal may be answered."""
        return self.health is not Health.HEALTHY

    def figures(self, num_recomputed_tokens: int) -> DurabilityFigures:
        """Return the figures of the journal; from any thread."""
        sequences = [known.sequence for known in list(self._known.values())]
        lengths = [sequence.length for sequence in sequences if sequence.is_cold]
        counters = self._writer.counters
        return DurabilityFigures(
            is_healthy=not self.is_lost,
            num_sequences=len(sequences),
            num_cold=len(lengths),
            tokens_to_recompute=sum(lengths),
            num_restored=self._num_restored,
            num_recomputed_tokens=num_recomputed_tokens,
            directory_bytes=self._directory.size_bytes(),
            num_snapshots=self.num_snapshots,
            counters=replace(counters, sync_counts=counters.sync_counts.copy()),
        )

    def group_of(self, principal: str) -> int:
        """Return the newest group with a record of the principal's, 0 if all are on the disk."""
        group = self._groups.get(principal, 0)
        if group and group <= self._released:
            del self._groups[principal]
            return 0
        return group

    def concerns(self, principal: str) -> bool:
        """Return whether the principal has, or had, durable sequences."""
        return principal in self._principals

    # ---- what happens to sequences ----------------------------------------------------------------------------------

    def note_append(self, run: RunningAppend, sequence: Sequence) -> None:
        """Write a committed append, or the sequence that it created, and what a retry of it needs."""
        held = run.reservation
        if not held.verdict.appends:
            return
        known = self._known.get(sequence.handle_id)
        if known is None:
            self._write(self._enter(sequence, next(self._numbers), held.sequence, held.start))
        elif self._encoder.knows(known.no) and known.length == held.start:
            record = self._records.get(sequence.handle_id) if run.job.keeps_record else None
            answer = None if record is None else answer_of(record, self._policies)
            self._move(known, self._encoder.append(known.no, None, run.token_ids, None, answer))
        else:
            self._write(known)
        if run.creation is not None:
            self._write_creation(run.creation)

    def note_rewind(self, sequence: Sequence) -> None:
        """Write that the tokens after the tip were dropped, and with them the last append; others will follow."""
        known = self._known[sequence.handle_id]
        if self._encoder.knows(known.no) and known.length >= sequence.length:
            self._move(known, self._encoder.append(known.no, sequence.length, (), None, None))
        else:
            self._write(known)

    def note_fork(self, source: Sequence, result: ForkResult, creation: Creation | None) -> None:
        """Write the sequences that a fork created."""
        for handle in result.handles:
            branch = self._store.registry.sequences[handle.cache_id]
            self._write(self._enter(branch, next(self._numbers), source, handle.length))
        if creation is not None:
            self._write_creation(creation)

    def note_truncate(self, sequence: Sequence, job: TruncateJob, freed_blocks: int) -> None:
        """Write a truncate and its answer."""
        known = self._known[sequence.handle_id]
        if not self._encoder.knows(known.no) or known.length < sequence.length:
            self._write(known)
            return
        handle = job.handle
        truncation = TruncationState(handle.length, handle.lineage, job.new_length, freed_blocks)
        self._move(known, self._encoder.truncate(known.no, truncation))

    def note_reserve(self, sequence: Sequence) -> None:
        """Write the length up to which room is reserved."""
        known = self._known[sequence.handle_id]
        if not self._encoder.knows(known.no):
            self._write(known)
        else:
            self._add(known, self._encoder.reserve(known.no, sequence.reserved_length))

    def note_lease(self, sequence: Sequence) -> None:
        """Write the new duration of a lease; a renewal as such is not written."""
        known = self._known.get(sequence.handle_id)
        if known is None or known.ttl_s == sequence.ttl_s:
            return
        if not self._encoder.knows(known.no):
            self._write(known)
        else:
            known.ttl_s = sequence.ttl_s
            self._add(known, self._encoder.lease(known.no, sequence.ttl_s))

    def note_masks(self, principal: str, masks: SequenceOf[TokenMask]) -> None:
        """Write registered masks. The oldest are forgotten beyond what the server keeps of all principals."""
        self._principals.add(principal)
        for mask in masks:
            self._keep_mask(principal, mask.fingerprint, mask.bits.tobytes())
            self._append(principal, self._encoder.mask(principal, self._masks[principal, mask.fingerprint]))

    def note_state(self, sequence: Sequence) -> None:
        """Write a whole sequence, or its end, after a failure that may have changed it without a record."""
        known = self._known.get(sequence.handle_id)
        if sequence.is_released:
            self.note_ended(sequence.handle_id)
        elif known is None:
            self._write(self._enter(sequence, next(self._numbers)))
        elif known.length != sequence.length:
            self._write(known)

    def note_ended(self, handle_id: str, how: End = End.RELEASED) -> None:
        """Write that a sequence has ended, whatever its level; once."""
        known = self._known.pop(handle_id, None)
        if known is None:
            return
        if self._encoder.knows(known.no):
            self._add(known, self._encoder.end(known.no, how))
        elif not self.is_lost:  # a snapshot is being written, and this sequence was not written yet
            self._write(known)
            self._add(known, self._encoder.end(known.no, how))

    # ---- each round of the engine -----------------------------------------------------------------------------------

    def close_group(self) -> None:
        """Give the records of this round to the disk."""
        if self._writer.has_open:
            group = self._writer.close_group()
            if self._oldest[0] <= self._writer.synced:
                self._oldest = (group, time.monotonic())

    @property
    def has_open(self) -> bool:
        """Whether records wait for :meth:`close_group`."""
        return self._writer.has_open

    @property
    def has_work(self) -> bool:
        """Whether :meth:`tend` should be called without waiting for requests."""
        if self._failure is not None:
            return True
        if self._snapshot is not None:
            return self._writer.synced >= self._slice_group
        return self.health in (Health.PROBING, Health.WRITING) and self._writer.synced >= self._snapshot_group

    def tend(self) -> bool:
        """Continue or begin a snapshot, and notice failures; return whether the journal has just been lost."""
        if self._failure is not None or (not self.is_lost and self._is_stalled()):
            self._failure = None
            return self._lose()
        if self.health is Health.LOST:
            self._recover()
        elif self.health is Health.PROBING:
            if self._writer.synced >= self._snapshot_group:
                self.health, self._snapshot = Health.WRITING, self._write_snapshot(starts_segment=False)
                self._write_slice()  # its begin must be the first record of the segment
        elif self._snapshot is not None:
            if self._writer.synced >= self._slice_group:  # replies wait for no more than one slice
                self._write_slice()
        elif self._snapshot_group:
            if self._writer.synced >= self._snapshot_group:
                self._note_snapshot_synced()
        elif self._writer.size_bytes >= max(_LEAST_BYTES, 2 * self._snapshot_bytes):
            self._snapshot = self._write_snapshot()
        return False

    def close(self) -> None:
        """Wait for the disk, for a while, and give the directory back."""
        self.close_group()
        self._writer.close(_CLOSE_S)
        self._directory.close()

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _enter(self, sequence: Sequence, no: int, source: Sequence | None = None, prefix_length: int = 0) -> _Known:
        """Give a sequence a number."""
        known = _Known(no, sequence, prefix_length=prefix_length, source_id="" if source is None else source.handle_id)
        self._known[sequence.handle_id] = known
        self._principals.add(sequence.principal)
        return known

    def _add(self, known: _Known, record: bytes) -> None:
        """Add a record about a sequence that leaves its tokens as they are written."""
        self._append(known.sequence.principal, record)

    def _move(self, known: _Known, record: bytes) -> None:
        """Add a record after which the tokens of a sequence are written as they are now."""
        known.length = known.sequence.length
        self._add(known, record)

    def _append(self, principal: str, record: bytes) -> None:
        """Add a record to the open group, unless the whole state will be written once the disk works again."""
        if self.health in (Health.LOST, Health.PROBING):
            return
        self._writer.append(record)
        self._groups[principal] = self._writer.next_group

    def _write(self, known: _Known) -> None:
        """Write a whole sequence as it is now, without tokens that another one has that was written before."""
        sequence = known.sequence
        prefix_no, length = self._prefix_of(known)
        record = self._records.get(sequence.handle_id)
        last = sequence.last_truncate
        state = SequenceState(
            known.no,
            _secret_of(sequence.cache_id),
            sequence.principal,
            sequence.ttl_s,
            sequence.is_published,
            sequence.reserved_length,
            sequence.parent_handle_id,
            sequence.token_ids,
            None if record is None else answer_of(record, self._policies),
            None if last is None else TruncationState(*last.handle[1:], last.new_length, last.freed_blocks),
            sequence.window,
        )
        known.ttl_s = sequence.ttl_s
        self._move(known, self._encoder.sequence(state, prefix_no, length))

    def _prefix_of(self, known: _Known) -> tuple[int, int]:
        """Return a sequence that is written and has the same first tokens, and how many; (0, 0): there is none."""
        chain = known.sequence.chain
        length = min(known.prefix_length, len(chain)) // CHUNK_TOKENS * CHUNK_TOKENS
        if not length:
            return 0, 0
        lineage = chain.at(length)
        for other in (self._known.get(known.source_id), self._known.get(self._prefixes.get(lineage, ""))):
            if other is None or other is known or not self._encoder.knows(other.no):
                continue
            theirs = other.sequence.chain
            if other.length == len(theirs) >= length and theirs.at(length) == lineage:
                return other.no, length
        self._prefixes[lineage] = known.sequence.handle_id
        return 0, 0

    def _write_creation(self, creation: Creation) -> None:
        """Write what a request created; sequences of it that have ended are known by their secrets."""
        members: list[int | bytes] = []
        for handle in creation.handles:
            known = self._known.get(handle.handle_id)
            if known is not None and not self._encoder.knows(known.no):
                self._write(known)
            members.append(_secret_of(handle.cache_id) if known is None else known.no)
        first, verified = creation.handles[0], creation.verified
        state = CreationState(
            *creation.key,
            creation.content,
            creation.loop,
            creation.start,
            first.length,
            first.lineage,
            creation.seed,
            None if verified is None else (verified.accepted_count, verified.next_token),
            tuple(members),
        )
        self._append(creation.key[0], self._encoder.creation(state))

    def _keep_mask(self, principal: str, fingerprint: bytes, bits: bytes) -> None:
        self._num_mask_bytes += len(bits) - len(self._masks.pop((principal, fingerprint), b""))
        self._masks[principal, fingerprint] = bits
        while self._num_mask_bytes > MAX_MASK_BYTES:
            self._num_mask_bytes -= len(self._masks.pop(next(iter(self._masks))))

    def _write_snapshot(self, *, starts_segment: bool = True) -> Iterator[None]:
        """Write everything that is live, a piece each time, and close the last group."""
        if starts_segment:
            self._writer.start_segment()
        self._prefixes.clear()
        self._writer.append(self._encoder.snapshot_begin())
        for known in list(self._known.values()):
            if known.sequence.handle_id in self._known and not self._encoder.knows(known.no):
                self._write(known)
            yield
        registry = self._store.registry
        for creation in self._creations.done():
            if registry.is_durable(creation.handles[0].cache_id) and self._creations.is_kept(creation):
                self._write_creation(creation)
            yield
        for principal, cache_id in registry.tombstones():
            if registry.is_durable(cache_id):
                self._append(principal, self._encoder.tombstone(principal, _secret_of(cache_id)))
            yield
        for (principal, _), bits in list(self._masks.items()):
            self._append(principal, self._encoder.mask(principal, bits))
            yield
        self._writer.append(self._encoder.snapshot_end())
        self._snapshot_group = self._writer.close_group(ends_snapshot=True)

    def _write_slice(self) -> None:
        """Write pieces of a snapshot for a moment, the last one perhaps."""
        assert self._snapshot is not None
        stop_ns = time.perf_counter_ns() + _SLICE_NS
        for _ in self._snapshot:
            if time.perf_counter_ns() >= stop_ns:
                break
        else:
            self._snapshot = None
        self._slice_group = self._writer.next_group - (not self._writer.has_open)

    def _note_snapshot_synced(self) -> None:
        """Count a snapshot that is on the disk. A journal that was lost is complete again with it."""
        self.num_snapshots += 1
        self._snapshot_group = 0
        self._snapshot_bytes = self._writer.size_bytes
        if self.is_lost:
            self.health, self._retry_s, self._oldest = Health.HEALTHY, _RETRY_S, (0, 0.0)
            _LOG.warning("the journal is healthy again durable_sequences=%d", len(self._known))

    def _is_stalled(self) -> bool:
        group, since = self._oldest
        return group > self._writer.synced and time.monotonic() - since > STALL_S

    def _lose(self) -> bool:
        was_lost = self.is_lost
        self.health = Health.LOST
        self._snapshot, self._snapshot_group, self._oldest = None, 0, (0, 0.0)
        self._retry_at = time.monotonic() + self._retry_s
        self._retry_s = min(2 * self._retry_s, _LONGEST_RETRY_S)
        if not was_lost:
            _LOG.error(
                "the journal is lost: durable handles answer DURABILITY_LOST durable_sequences=%d", len(self._known)
            )
        return not was_lost

    def _recover(self) -> None:
        """Try to write an empty segment; only then is the whole state written."""
        if time.monotonic() >= self._retry_at:
            self._groups.clear()
            self._snapshot_group = self._writer.restart()
            self.health = Health.PROBING

    # ---- journal thread ---------------------------------------------------------------------------------------------

    def _note_synced(self, group: int) -> None:
        self._on_synced(group)
        self._released = group  # only now: an outcome that need not wait must not overtake one that has waited
        if self.health is not Health.HEALTHY or self._snapshot is not None:
            self._wake()

    def _note_failed(self, error: OSError) -> None:
        self._failure = error
        self._wake()


def _secret_of(cache_id: str) -> bytes:
    return base64.urlsafe_b64decode(cache_id.rpartition(".")[2] + "==")
