"""What ``client.admin.server_view`` returns: the server at one moment, for live displays.

Names that begin with ``num_`` or end with ``_ns``, but for those of one sequence, and histograms count since the
server started: rates are differences of two views over the difference of their ``uptime_s``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from ferrule_client._public import publish
from ferrule_client.types import CacheMetrics, Status

__all__ = ["BlockMap", "Histogram", "PrincipalView", "SequenceView", "ServerView"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockMap:
    """Picture of the block pool, with one cell for each block, or for runs of equally many where there are more.

    Attributes:
        cell_blocks: Blocks in a cell; the last cell may have fewer.
        cells: A byte for each cell, the largest over its blocks: 0 empty, 1 cached, 2 held by one owner, from 3 on
            shared by one owner fewer than the number says; 255: by 254 or more.
        fill: A byte for each cell: how much of it is held, from 0 to 255, all of it.
    """

    cell_blocks: int
    cells: bytes = field(repr=False)
    fill: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceView:
    """One live sequence. It cannot be used as a handle.

    Attributes:
        handle_id: Loggable id.
        parent_handle_id: That of the sequence it was branched from, which may be gone; empty: it was prefilled.
        principal: Who owns it.
        length: Length at the tip, in tokens.
        reserved_length: Length up to which room is reserved; 0: nothing beyond the tip's block.
        num_blocks: Blocks it holds, shared and reserved ones included.
        num_shared_blocks: Of these, blocks that other sequences hold too.
        kv_bytes: Bytes of KV that the blocks take, shared ones counted whole.
        expires_in_s: Seconds left of its lease; 0 where that is over and work in flight keeps the sequence.
        ttl_s: Seconds of the lease as granted.
        age_s: Seconds since it was created.
        num_pending: Requests in flight or waiting on it.
        is_appending: True: an append to it is in flight.
        durability: ``journaled``: it survives the server process; ``none``: it does not.
        tokens_to_recompute: Tokens whose KV is computed again when it is needed; 0: none.
    """

    handle_id: str
    parent_handle_id: str
    principal: str
    length: int
    reserved_length: int
    num_blocks: int
    num_shared_blocks: int
    kv_bytes: int
    expires_in_s: float
    ttl_s: float
    age_s: float
    num_pending: int
    is_appending: bool
    durability: str
    tokens_to_recompute: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrincipalView:
    """One principal. Its sums start over should the server have forgotten it, after a thousand others.

    Attributes:
        principal: Its name.
        live_sequences: Its live sequences, and those in creation.
        kv_tokens: Tokens that its blocks have room for, each block counted once.
        queued_jobs: Its requests accepted and not finished.
        queued_rows: Rows that these may still need.
        num_appends: Appends finished, each token of a generation counted as one.
        num_tokens: Tokens appended, those found in the prefix cache left out.
        queue_ns: Summed nanoseconds that its appends waited for their first step.
        run_ns: Summed nanoseconds of the steps that its appends had rows in; steps are shared.
    """

    principal: str
    live_sequences: int
    kv_tokens: int
    queued_jobs: int
    queued_rows: int
    num_appends: int
    num_tokens: int
    queue_ns: int
    run_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """How often values lay in which range.

    Attributes:
        upper_bounds: Upper ends of the ranges, ascending; each belongs to its range.
        counts: Values in each range; the last one, which has no upper end, is beyond all bounds.
        sum: Of all values.
    """

    upper_bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float

    @property
    def count(self) -> int:
        """Values in all."""
        return sum(self.counts)

    def since(self, earlier: Histogram) -> Histogram:
        """Return what was counted after ``earlier``; all of it where that is of another run, or has other ranges."""
        counts = tuple(now - then for now, then in zip(self.counts, earlier.counts, strict=False))
        if self.upper_bounds != earlier.upper_bounds or any(count < 0 for count in counts):
            return self
        return Histogram(upper_bounds=self.upper_bounds, counts=counts, sum=max(0.0, self.sum - earlier.sum))

    def quantile(self, share: float) -> float | None:
        """Return a value that ``share`` of the values are at most, by a straight line within its range.

        Args:
            share: From 0 to 1, such as 0.5 for the median.

        Returns:
            None where there are no values; the last bound where it lies beyond that.
        """
        rank, below, start = share * self.count, 0, 0.0
        if not self.count:
            return None
        for end, count in zip(self.upper_bounds, self.counts, strict=False):
            if count and below + count >= rank:
                return start + (end - start) * max(0.0, rank - below) / count
            below, start = below + count, end
        return start


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerView:
    """The server at one moment.

    Attributes:
        time: When it was read, by the server's wall clock.
        uptime_s: Seconds since its process started, by a clock that never jumps.
        status: State, instance, memory, tokens, steps, queue, as ``client.status`` returns them.
        cache_metrics: Blocks, prefix cache, forks, expiries, as ``client.cache_metrics`` returns them.
        running_appends: Appends with rows in the next step.
        queued_jobs: Requests accepted and not finished, those that run included.
        num_step_rows: Rows of all steps.
        step_ns: Nanoseconds in which a step was under way.
        num_refused: Requests refused, by the reason of their error.
        block_map: Picture of the pool; None: none was asked for.
        sequences: Live sequences of everybody whose lease ends soonest first; ``status.live_sequences`` is how many
            there are.
        principals: Most recently active first.
        known_principals: Principals that the server knows of, also those not listed.
        step_seconds: Duration of steps.
        queue_seconds: From a request's arrival to its first step.
        first_token_seconds: From the arrival of a prompt to its answer, or to the first token of its generation.
        inter_token_seconds: Between two tokens of one branch of a generation.
        decode_seconds: From the arrival of an append of one token, or of a verify, to its answer.
        sync_seconds: Duration of each write of the journal and its sync to the disk; empty without a journal.
        journal_state: ``healthy``, ``lost`` while durable sequences are refused because the disk failed, or
            ``unspecified``: there is no journal.
        durable_sequences: Durable sequences that are alive.
        cold_sequences: Of these, sequences without KV, as after a restart.
        tokens_to_recompute: Tokens of these.
    """

    time: datetime | None
    uptime_s: float
    status: Status
    cache_metrics: CacheMetrics
    running_appends: int
    queued_jobs: int
    num_step_rows: int
    step_ns: int
    num_refused: Mapping[str, int]
    block_map: BlockMap | None
    sequences: tuple[SequenceView, ...]
    principals: tuple[PrincipalView, ...]
    known_principals: int
    step_seconds: Histogram
    queue_seconds: Histogram
    first_token_seconds: Histogram
    inter_token_seconds: Histogram
    decode_seconds: Histogram
    sync_seconds: Histogram
    journal_state: str
    durable_sequences: int
    cold_sequences: int
    tokens_to_recompute: int


publish(globals(), __all__)
