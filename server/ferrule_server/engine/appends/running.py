"""An append in flight, the sequences that a request creates, and who is told what happened to durable ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np

from ferrule_server.durability.records import End
from ferrule_server.engine.jobs import AppendJob, Follow, ForkResult, LaneJob, Sink, StepTiming, TruncateJob, Verified
from ferrule_server.executor.base import Int32Array, OutputSpec, RowOutput, TokenMask
from ferrule_server.kv.append_rule import Verdict
from ferrule_server.kv.handle import Handle
from ferrule_server.kv.reservation import Reservation
from ferrule_server.kv.sequence import Sequence

DECODE_ROWS: Final = 8
"""An append of at most this many tokens to a sequence, without its drafts, is a decode. It is scheduled whole, before
prefill chunks. (Drafts stand for as many decodes; only the context limits the certain tokens before them.) New
sequences are prefills whatever their length, so that a flood of short prompts counts as a flood of prompts."""


@dataclass(eq=False, slots=True)
class Creation:
    """The sequences that one request created.

    Attributes:
        key: Principal and request_id.
        content: Digest of the rest of the request. loop: digest of the Generate that it belongs to, empty: none.
        run: The append that creates the sequence; None when it is done (a ForkCache is done at once).
        handles: The answered handles, in order; empty while in flight; only the first one when dead.
        start: Length before the tokens of the request. seed: the seed of its rows, None if nothing was drawn.
        verified: Of a verify: the result of its drafts, without row handles.
        num_live: Number of its sequences that have not ended.
        died_at: When the last of them ended, on the store's clock.
    """

    key: tuple[str, str]
    content: bytes
    loop: bytes = b""
    run: RunningAppend | None = None
    handles: tuple[Handle, ...] = ()
    start: int = 0
    seed: int | None = None
    verified: Verified | None = None
    num_live: int = 0
    died_at: float = 0.0


@dataclass(eq=False, slots=True)
class RunningAppend:
    """Rows of one append, some of them run already.

    Invariant: rows ``0..cursor`` have been run, or need not be: their KV was in the prefix cache. ``reservation`` is
    live until the append has ended.

    Attributes:
        job: The first job with this request. sink: receives its answer; None: it computes a cold sequence, which
            nobody asked for.
        reservation: What it means, its sequence, and the blocks of its rows. It holds the lane of that sequence unless
            it is a branch.
        token_ids: The rows' tokens.
        specs: Row index, ascending -> what it returns; rows without an entry return nothing. All draw with one seed.
        ttl_s: The lease to set at the end; None keeps the sequence's own.
        creation: Set if it creates a sequence and has a request_id.
        num_cached: Number of first tokens whose KV was in the prefix cache.
        verified: Of a verify that is replayed: the answered result, without its row handles.
        numbers: Of a replay: the numbers of its rows as they were answered, without arrays; empty: unknown.
        joined: Jobs with the same request, answered together with ``job``.
        waiting: Jobs that wait for it in the lane of its sequence.
        outputs: Results so far, in row order. timing: of its steps so far.
    """

    job: AppendJob
    sink: Sink | None
    reservation: Reservation
    token_ids: tuple[int, ...]
    specs: Mapping[int, OutputSpec]
    ttl_s: float | None = None
    creation: Creation | None = None
    num_cached: int = 0
    verified: Verified | None = None
    numbers: tuple[RowOutput, ...] = ()
    joined: tuple[tuple[AppendJob, Sink], ...] = ()
    waiting: deque[tuple[LaneJob[object], Sink]] | None = None
    cursor: int = 0
    outputs: list[RowOutput] = field(default_factory=list)
    timing: StepTiming = field(default_factory=StepTiming)

    @property
    def is_decode(self) -> bool:
        """Whether it is a decode, see ``DECODE_ROWS``."""
        if self.reservation.sequence is None:
            return False
        drafts = self.job.drafts
        return len(self.token_ids) - (0 if drafts is None else drafts.count) <= DECODE_ROWS

    @property
    def is_warming(self) -> bool:
        """Whether it computes a cold sequence and appends nothing."""
        return self.reservation.verdict is Verdict.WARM

    @property
    def is_repeatable(self) -> bool:
        """Whether it can be run again with the job's next token: it is one token of a Generate, at the tip."""
        job, spec, verdict = self.job, self.specs.get(0), self.reservation.verdict
        if job.follow is Follow.UNKNOWN or job.is_cancelled or verdict is not Verdict.APPEND or spec is None:
            return False
        is_drawn_alike = spec.sample is None or job.output.is_seeded
        is_plain = job.drafts is None and not job.request_id and not job.output.wants_targets
        return len(self.token_ids) == 1 and is_drawn_alike and is_plain

    def skip_cached(self, num_cached: int) -> None:
        """Skip the rows whose KV is cached. If that is all of them, the last one is run again, like a query."""
        self.num_cached = self.cursor = num_cached
        if num_cached and self.remaining == 0:
            self.cursor -= 1

    def restart(self, reservation: Reservation) -> None:
        """Start again with the current token of its job; the rest of the request is unchanged."""
        self.reservation = reservation
        self.token_ids, self.ttl_s = self.job.token_ids, self.job.ttl_s
        self.joined, self.waiting = (), None
        self.cursor, self.outputs = 0, []
        self.timing = StepTiming()

    @property
    def is_abandoned(self) -> bool:
        """Whether all its jobs are cancelled."""
        return self.job.is_cancelled and all(job.is_cancelled for job, _ in self.joined)

    @property
    def remaining(self) -> int:
        """Rows that have not run yet."""
        return len(self.token_ids) - self.cursor

    def num_outputs(self, num_rows: int) -> int:
        """Return how many of the next ``num_rows`` rows return something."""
        if num_rows == len(self.token_ids):
            return len(self.specs)
        return sum(row in self.specs for row in range(self.cursor, self.cursor + num_rows))

    def tokens_from(self, first: int, num_rows: int) -> Int32Array:
        """Return the tokens of its sequence from index ``first`` to the end of its first ``num_rows`` rows.

        Returns:
            int32 [start + num_rows - first], empty if that is not above 0; a copy.
        """
        held = self.reservation
        own = np.array(self.token_ids[max(0, first - held.start) : num_rows], np.int32)
        if first >= held.start:
            return own
        chain = held.chain  # of a branch: its source may have changed
        if chain is None:
            assert held.sequence is not None
            chain = held.sequence.chain
        return np.concatenate((np.array(chain.token_ids[first : held.start], np.int32), own))


class Reports(Protocol):
    """Takes what has happened to durable sequences, before anybody is told: see ``engine/durable/journal.py``."""

    def note_append(self, run: RunningAppend, sequence: Sequence, /) -> None:
        """Note a committed append, or the sequence that it created; its record is kept already."""

    def note_rewind(self, sequence: Sequence, /) -> None:
        """Note that tokens were dropped, because others will be appended in their place."""

    def note_fork(self, source: Sequence, result: ForkResult, creation: Creation | None, /) -> None:
        """Note the sequences that a fork created."""

    def note_truncate(self, sequence: Sequence, job: TruncateJob, freed_blocks: int, /) -> None:
        """Note a truncate."""

    def note_reserve(self, sequence: Sequence, /) -> None:
        """Note the length up to which room is reserved."""

    def note_state(self, sequence: Sequence, /) -> None:
        """Note a sequence that may have changed without a report, or has ended."""

    def note_ended(self, handle_id: str, how: End = ..., /) -> None:
        """Note that a sequence has ended, durable or not."""

    def note_masks(self, principal: str, masks: SequenceOf[TokenMask], /) -> None:
        """Note token masks that a client has registered."""
