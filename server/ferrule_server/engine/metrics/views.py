"""Views: the data of a server view; ``viewer.py`` takes them.

A view shares nothing with the engine that can change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ferrule_server.engine.metrics.counters import EngineSnapshot
from ferrule_server.engine.metrics.timings import HistogramReading
from ferrule_server.kv.metrics import KvMetrics


@dataclass(slots=True)
class SequenceSeen:
    """One live sequence. Not frozen: a thousand are made on the engine thread at a time.

    Attributes:
        handle_id, parent_handle_id, principal, length, reserved_length, first_position, lowest_length, ttl_s,
        is_appending: As in :class:`~ferrule_server.kv.sequence.Sequence`.
        block_ids: The blocks that it holds of its tokens; the view's refcounts show which blocks are shared.
        num_spares: Blocks that it holds besides.
        expires_in_s: Seconds left of its lease, at least 0. age_s: since it was created.
        num_pending: Jobs in flight or waiting on it.
        is_durable, tokens_to_recompute: As in :class:`~ferrule_server.engine.jobs.CacheInfo`.
    """

    handle_id: str
    parent_handle_id: str
    principal: str
    length: int
    reserved_length: int
    first_position: int
    lowest_length: int
    block_ids: tuple[int, ...] = field(repr=False)
    num_spares: int
    ttl_s: float
    expires_in_s: float
    age_s: float
    num_pending: int
    is_appending: bool
    is_durable: bool = False
    tokens_to_recompute: int = 0


@dataclass(slots=True)
class PrincipalSeen:
    """One principal: what it holds, its unfinished jobs, and the sums over its appends.

    Attributes:
        num_sequences, num_blocks: Live sequences, and the blocks that they hold.
        num_jobs, num_rows: Jobs in the queue or in flight, and their rows.
        num_appends: Appends committed. num_tokens: their tokens, without those from the prefix cache.
        queue_ns: Time that the appends waited for their first steps. run_ns: run time of the steps with rows of them.
    """

    name: str
    num_sequences: int
    num_blocks: int
    num_jobs: int
    num_rows: int
    num_appends: int = 0
    num_tokens: int = 0
    queue_ns: int = 0
    run_ns: int = 0


@dataclass(frozen=True, slots=True)
class View:
    """The server between two steps.

    Attributes:
        at_s: Time of the view on ``time.monotonic``. unix_ns: the same by the wall clock.
        snapshot: The engine's figures.
        timings: The readings of :class:`~.timings.EngineTimings`, by the names of its histograms.
        kv: The counters of the pool.
        refcounts: Owners of each block, the null block at index 0; the view's own copy.
        is_cached: A byte for each block, 1 if only the prefix cache holds it.
        has_gaps: As in :class:`~ferrule_server.kv.block_pool.BlockPool`.
        sequences: Those whose leases end soonest, in that order.
        principals: The most recently active first.
        num_principals: Known principals, including those not listed. num_jobs: accepted and unfinished jobs of all.
    """

    at_s: float
    unix_ns: int
    snapshot: EngineSnapshot
    timings: Mapping[str, HistogramReading]
    kv: KvMetrics
    refcounts: list[int] = field(repr=False)
    is_cached: bytes = field(repr=False)
    has_gaps: bool
    sequences: tuple[SequenceSeen, ...]
    principals: tuple[PrincipalSeen, ...]
    num_principals: int
    num_jobs: int
