"""Figures of the journal of durable sequences, as they are shown to operators."""

from __future__ import annotations

from dataclasses import dataclass

from ferrule_server.durability.writer import SYNC_BOUNDS_S, JournalCounters
from ferrule_server.engine.metrics.timings import HistogramReading


@dataclass(frozen=True, slots=True)
class DurabilityFigures:
    """The journal at one moment. Counters are since the start of the process.

    Attributes:
        is_healthy: Records reach the disk; False: durable sequences are answered with DURABILITY_LOST.
        num_sequences: Durable sequences that are alive.
        num_cold: Of these, sequences without KV, as after a restart.
        tokens_to_recompute: Tokens of the cold ones.
        num_restored: Sequences that were read from the journal at the start.
        num_recomputed_tokens: Tokens whose KV was computed again.
        directory_bytes: Bytes of the segments on the disk, preallocated ones included.
        num_snapshots: Complete snapshots written.
        counters: What the journal thread has done; a copy.
    """

    is_healthy: bool
    num_sequences: int
    num_cold: int
    tokens_to_recompute: int
    num_restored: int
    num_recomputed_tokens: int
    directory_bytes: int
    num_snapshots: int
    counters: JournalCounters

    @property
    def sync_times(self) -> HistogramReading:
        """Times of a write and its sync."""
        return HistogramReading(SYNC_BOUNDS_S, tuple(self.counters.sync_counts), self.counters.sum_sync_ns * 1e-9)
