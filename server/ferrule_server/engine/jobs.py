"""Jobs: one request waiting, and what it returns. Made by the wire ring, carried out by the engine thread.

A job is handed to :meth:`Engine.submit` together with a :class:`Sink`. The engine calls nothing of the sink itself:
after each step one callback on the event loop delivers every finished job to its sink, then flushes each touched sink
once, so that a stream sends one frame per step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, Protocol

from ferrule_server.errors import FerruleError
from ferrule_server.executor.base import OutputSpec, RowOutput
from ferrule_server.kv.handle import Handle, StalePolicy
from ferrule_server.kv.reserved_slots import SlotReservation


@dataclass(frozen=True, slots=True)
class OutputRequest:
    """What an append returns: the contract's LogitsReturnPolicy and LogitsPositions, checked.

    Attributes:
        spec: Wanted of each output row; None returns no rows at all (policy ``none``).
        all_positions: A row for each input token instead of the last one only.
        is_seeded: False when ``spec.sample`` has no seed of the caller's; the engine then draws one.
        wants_targets: Fill ``target_logprob`` of row i with input token i + 1 (the last row has none).
    """

    spec: OutputSpec | None
    all_positions: bool = False
    is_seeded: bool = True
    wants_targets: bool = False


@dataclass(eq=False, slots=True)
class AppendJob:
    """Prefill or decode: tokens behind a handle, or a new sequence.

    Attributes:
        principal: Who asks; handles of others are unknown to them.
        token_ids: Checked against the vocabulary. Empty with a handle of length > 0: a query.
        handle: None starts a new sequence.
        output: What comes back.
        on_stale: What to do behind the tip.
        ttl_s: Lease in seconds, clamped by the engine; None keeps the present one (60 s on a new sequence).
        request_id: Where the job makes a sequence: the same one again makes nothing and gets the same answer.
        is_cancelled: Set (from any thread) when the caller is gone; honoured until the job's last chunk is run.
        rows_run: Rows that steps were spent on so far, written by the engine.
        is_repeat_only: A new sequence is not wanted: answered only if it repeats a creation, else DRAINING.
        reserved_length: Of a new sequence: tokens up to which room is reserved with it; 0: its own need.
    """

    principal: str
    token_ids: tuple[int, ...]
    handle: Handle | None
    output: OutputRequest
    on_stale: StalePolicy = StalePolicy.FAIL
    ttl_s: float | None = None
    request_id: str = ""
    is_cancelled: bool = False
    submitted_ns: int = 0
    rows_run: int = 0
    is_repeat_only: bool = False
    reserved_length: int = 0

    def branched_to(self, cache_id: str) -> bool:
        """Return whether an answer in the sequence ``cache_id`` lies in a branch of the handle's own."""
        return self.handle is not None and self.handle.cache_id != cache_id


@dataclass(eq=False, slots=True)
class ForkJob:
    """``count`` new handles on the first ``length`` tokens (at most ``handle.length``), all or nothing.

    With a ``request_id`` the same job again makes nothing and gets the same handles.
    """

    principal: str
    handle: Handle
    length: int
    count: int
    ttl_s: float | None = None
    request_id: str = ""
    is_cancelled: bool = False
    submitted_ns: int = 0


@dataclass(eq=False, slots=True)
class TruncateJob:
    """Shorten a sequence to ``new_length`` tokens, an absolute length: idempotent without a request_id."""

    request_id: ClassVar[str] = ""

    principal: str
    handle: Handle
    new_length: int
    is_cancelled: bool = False
    submitted_ns: int = 0


class SlotsWanted(NamedTuple):
    """Room wanted for one sequence, whatever the length of the handle: see ``kv/reserved_slots.py``."""

    handle: Handle
    target_length: int
    admission_target_length: int = 0


@dataclass(eq=False, slots=True)
class ReserveJob:
    """Reserve room for sequences, all or nothing; carried out as it comes, also while appends are in flight."""

    principal: str
    wanted: tuple[SlotsWanted, ...]
    submitted_ns: int = 0


@dataclass(eq=False, slots=True)
class ReleaseJob:
    """Give back sequences, whatever the lengths of the handles."""

    principal: str
    handles: tuple[Handle, ...]
    submitted_ns: int = 0


@dataclass(eq=False, slots=True)
class KeepAliveJob:
    """Renew leases, whatever the lengths of the handles; ``ttl_s`` None keeps each sequence's own."""

    principal: str
    handles: tuple[Handle, ...]
    ttl_s: float | None = None
    submitted_ns: int = 0


@dataclass(eq=False, slots=True)
class InfoJob:
    """Describe one sequence, whatever the length of the handle."""

    principal: str
    handle: Handle
    with_token_ids: bool = False
    submitted_ns: int = 0


@dataclass(eq=False, slots=True)
class ListJob:
    """List the principal's sequences in order of handle_id, after ``after_handle_id``."""

    principal: str
    after_handle_id: str = ""
    limit: int = 100
    submitted_ns: int = 0


Job = AppendJob | ForkJob | TruncateJob | ReserveJob | ReleaseJob | KeepAliveJob | InfoJob | ListJob


@dataclass(slots=True)
class StepTiming:
    """Where the time of a job went. Not frozen, here and in AppendResult: made for every token, frozen costs double.

    Attributes:
        queue_ns: From submission to the start of its first step.
        run_ns: Sum of the run times of the steps it had a row in.
        step_rows: Rows of its last step, those of others included.
    """

    queue_ns: int = 0
    run_ns: int = 0
    step_rows: int = 0


@dataclass(slots=True)
class AppendResult:
    """What an append returns.

    Attributes:
        handle: The handle to go on with.
        rows: Output rows in order (one, or one per input token), empty for policy ``none``.
        seed: The seed sampling used, None when nothing was sampled.
        cached_tokens: Input tokens whose KV was taken from the prefix cache.
        replayed: True when these tokens were appended before and nothing was appended now.
        recomputed: True when a replay's rows had to be run again.
        forked: True when ``on_stale=FORK`` made a new sequence.
        ttl_s: Seconds of the sequence's lease, as granted; it has just been renewed.
    """

    handle: Handle
    rows: tuple[RowOutput, ...] = ()
    seed: int | None = None
    cached_tokens: int = 0
    timing: StepTiming = field(default_factory=StepTiming)
    replayed: bool = False
    recomputed: bool = False
    forked: bool = False
    ttl_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ForkResult:
    """The new handles of a fork, the seconds of their leases, and whether they had been made before."""

    handles: tuple[Handle, ...]
    ttl_s: float = 0.0
    replayed: bool = False


@dataclass(frozen=True, slots=True)
class TruncateResult:
    """The handle after a truncate, and how many blocks it gave back to the pool."""

    handle: Handle
    freed_blocks: int


@dataclass(frozen=True, slots=True)
class ReleaseResult:
    """Per handle the blocks it gave back to the pool, or None where there was nothing to release."""

    freed_blocks: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Lease:
    """A lease: seconds granted at each renewal, and seconds left of it now."""

    ttl_s: float
    expires_in_s: float


@dataclass(frozen=True, slots=True)
class KeepAliveResult:
    """Per handle its lease, or why it could not be renewed."""

    leases: tuple[Lease | FerruleError, ...]


@dataclass(frozen=True, slots=True)
class CacheInfo:
    """One sequence as its owner may see it.

    Attributes:
        tip: The newest handle (``None`` in lists, which never carry secrets).
        num_blocks: Blocks it holds, those set aside for tokens to come included.
        num_shared_blocks: Blocks of its tokens that other sequences use too.
        block_ids: Blocks of its tokens in order; block_refcounts: how many sequences use each (1 = own, more = shared).
            Both empty in lists.
        kv_bytes: Bytes of all its blocks, shared ones counted whole.
        age_s: Seconds since it was made.
        parent_handle_id: The sequence it was forked from; empty when prefilled.
        num_pending: Jobs in flight or waiting on it.
        token_ids: None unless asked for.
        reserved_length: Tokens up to which room is reserved; 0: nothing is.
    """

    handle_id: str
    length: int
    tip: Handle | None
    num_blocks: int
    num_shared_blocks: int
    kv_bytes: int
    age_s: float
    lease: Lease
    parent_handle_id: str = ""
    num_pending: int = 0
    token_ids: tuple[int, ...] | None = None
    reserved_length: int = 0
    block_ids: tuple[int, ...] = ()
    block_refcounts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ListResult:
    """One page of sequences, the handle_id to go on after (empty at the end), and how many there are in all."""

    caches: tuple[CacheInfo, ...]
    next_after: str
    total: int


Result = (
    AppendResult
    | ForkResult
    | TruncateResult
    | SlotReservation
    | ReleaseResult
    | KeepAliveResult
    | CacheInfo
    | ListResult
)
Outcome = Result | FerruleError


class Sink(Protocol):
    """Where finished jobs go. Both methods run on the event loop's thread and must not block or raise."""

    def deliver(self, job: Job, outcome: Outcome) -> None:
        """Take the outcome of one job."""
        ...

    def flush(self) -> None:
        """All outcomes of this step that go here have been delivered."""
        ...


Entry = tuple[Job, Sink]
"""A job and who asked for it."""
