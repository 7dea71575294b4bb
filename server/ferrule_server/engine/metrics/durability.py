"""Figures of the journal of durable sequences, as they are shown to operators."""

from __future__ import annotations

from dataclasses import dataclass

from ferrule_server.durability.writer import SYNC_BOUNDS_S
from ferrule_server.engine.metrics.histogram import HistogramReading


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
        num_groups: Group commits: the records of one step or more.
        num_syncs: Calls of fdatasync that succeeded; fewer than groups if several were merged.
        num_bytes: Bytes written.
        directory_bytes: Bytes of the segments on the disk, preallocated ones included.
        num_failures: Writes and syncs that failed.
        num_snapshots: Complete snapshots written.
        sync_buckets: Observations of the time of a write and its sync in each bucket, as ``HistogramReading.counts``.
        sync_sum_s: Sum of these times, in seconds.
    """

    is_healthy: bool
    num_sequences: int
    num_cold: int
    tokens_to_recompute: int
    num_restored: int
    num_recomputed_tokens: int
    num_groups: int
    num_syncs: int
    num_bytes: int
    directory_bytes: int
    num_failures: int
    num_snapshots: int
    sync_buckets: tuple[int, ...]
    sync_sum_s: float

    @property
    def sync_times(self) -> HistogramReading:
        """Times of a write and its sync."""
        return HistogramReading(SYNC_BOUNDS_S, self.sync_buckets, self.sync_sum_s)
