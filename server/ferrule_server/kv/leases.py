"""Leases: which sequence may expire next, in O(log n) per renewal at worst and usually in O(1)."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping

from ferrule_server.kv.sequence import Sequence

PIN_RECHECK_S = 0.25
"""A pinned sequence past its lease is checked again after this many seconds. It is collected at most so much later than
its last pin ends, which leaves most of a second for a step that may be running then."""

_SPARE_ENTRIES = 64


class LeaseHeap:
    """When to check which sequence, as a heap with lazy deletion.

    A renewal usually moves the end of a lease later and changes nothing here; the entry moves when it reaches the top.
    Only an end earlier than the entry is pushed again.

    Invariant: every sequence has an entry at its ``scheduled_at``, which is not after its ``expires_at``, or else (it
    was overdue while pinned) at most PIN_RECHECK_S from now; after each push there are at most twice as many entries
    as sequences, plus a constant.

    Args:
        sequences: The live ones by cache_id, owned by the caller; an entry of any other is void.
    """

    def __init__(self, sequences: Mapping[str, Sequence]) -> None:
        self._sequences = sequences
        # By cache_id, so that the heap never keeps a released sequence's tokens alive.
        self._entries: list[tuple[float, str]] = []

    def schedule(self, sequence: Sequence, at: float) -> None:
        """Check the sequence at a time before its ``scheduled_at``."""
        sequence.scheduled_at = at
        heapq.heappush(self._entries, (at, sequence.cache_id))
        if len(self._entries) > 2 * len(self._sequences) + _SPARE_ENTRIES:
            self._entries = [(each.scheduled_at, cache_id) for cache_id, each in self._sequences.items()]
            heapq.heapify(self._entries)

    def next_at(self) -> float | None:
        """Return when the first lease may end, or None when there is none."""
        self._settle()
        return self._entries[0][0] if self._entries else None

    def take_due(self, now: float) -> list[Sequence]:
        """Return the sequences whose lease has ended, except pinned ones; each is returned once."""
        due: list[Sequence] = []
        self._settle()
        while self._entries and self._entries[0][0] <= now:
            sequence = self._sequences[heapq.heappop(self._entries)[1]]
            sequence.scheduled_at = math.inf
            if sequence.num_pins:
                self.schedule(sequence, now + PIN_RECHECK_S)
            else:
                due.append(sequence)
            self._settle()
        return due

    def check_integrity(self, now: float) -> None:
        """Raise AssertionError unless the invariant of the class holds."""
        entries = set(self._entries)
        for cache_id, sequence in self._sequences.items():
            assert (sequence.scheduled_at, cache_id) in entries, f"{sequence.handle_id} is not in the lease heap"
            latest = max(sequence.expires_at, now + PIN_RECHECK_S)
            assert sequence.scheduled_at <= latest, f"{sequence.handle_id} is checked too late"

    def _settle(self) -> None:
        """Bring a valid entry to the top whose time is the end of its lease, or later."""
        while self._entries:
            at, cache_id = self._entries[0]
            sequence = self._sequences.get(cache_id)
            if sequence is None or sequence.scheduled_at != at:
                heapq.heappop(self._entries)
            elif at < sequence.expires_at:
                sequence.scheduled_at = sequence.expires_at
                heapq.heapreplace(self._entries, (sequence.expires_at, cache_id))
            else:
                return
