"""Jobs: what can be asked of the engine, and what it answers. Made by ``api/``, carried out by the engine thread.

The base class of a job says all that others need to know about its kind::

    Job           has a principal
      QueuedJob   may wait for a step: counted by the gate and by quotas, and can be cancelled
        LaneJob   waits for its turn on one sequence: AppendJob, ForkJob, TruncateJob
        StreamJob is answered in frames by a driver: GenerateJob, ForwardJob
      HostCall    reads or changes sequences between two steps (``host_calls.py``)
      WarmupJob   runs steps that touch no sequence

A job is handed to :meth:`Engine.submit` together with a :class:`Sink`. The engine calls nothing of the sink itself:
after each step one callback on the event loop delivers every finished job to its sink, then flushes each touched sink
once, so that a stream sends one frame per step.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from ferrule_server.errors import FerruleError
from ferrule_server.executor.base import DraftLaw, Float32Array, OutputSpec, RowOutput, TokenMask
from ferrule_server.kv.handle import Handle, StalePolicy
from ferrule_server.suffixes import Suffixes

_R_co = TypeVar("_R_co", covariant=True)


@dataclass(frozen=True, slots=True)
class OutputRequest:
    """What an append returns: the contract's LogitsReturnPolicy and LogitsPositions, checked.

    Attributes:
        spec: Wanted of each output row; None returns no rows at all (policy ``none``).
        all_positions: A row for each input token instead of the last one only.
        is_seeded: False when ``spec.sample`` has no seed of the caller's; the engine then draws one.
        wants_targets: Fill ``target_logprob`` of row i with input token i + 1.
        last_target: With ``wants_targets``, the token that follows the last row, where it is known; -1: it is not.
    """

    spec: OutputSpec | None
    all_positions: bool = False
    is_seeded: bool = True
    wants_targets: bool = False
    last_target: int = -1


class Acceptance(enum.Enum):
    """Who decides which drafts of a verify hold: the contract's AcceptanceRule."""

    NONE = "none"
    """The client: all drafts are appended."""
    EXACT = "exact"
    """A draft holds if it is the token that the row before chooses."""
    REJECTION = "rejection"
    """Speculative sampling: see ``executor.base.DraftSpec``."""


@dataclass(frozen=True, slots=True)
class Drafts:
    """What makes an append a verify: its last tokens are drafts, a chain.

    Rows are numbered from the last certain token on: row 0 is that token, row r is draft r, counted from 1.

    Attributes:
        count: How many of the job's ``token_ids``, the last ones, are drafts; may be 0.
        acceptance: Who decides.
        laws: What each draft was drawn from, for REJECTION: one per draft, or none: chosen with certainty.
        row_masks: Tokens that may follow each row, in place of the selection's mask: count + 1 of them, or none.
        wants_row_handles: Return a handle at row 0 and at each appended draft.
    """

    count: int
    acceptance: Acceptance = Acceptance.NONE
    laws: tuple[DraftLaw, ...] = ()
    row_masks: tuple[TokenMask, ...] = ()
    wants_row_handles: bool = False


class Follow(enum.Enum):
    """What comes after an append that chooses a token, as far as can be told before the token is there."""

    UNKNOWN = "unknown"
    """Whatever its caller likes, whenever."""
    LIKELY = "likely"
    """The token is appended at once, unless it ends the text."""
    NOTHING = "nothing"
    """Whatever the token, it is the last."""


class Job(Generic[_R_co]):
    """What is asked of the engine; answered with an ``_R_co``, or a FerruleError.

    Attributes:
        principal: Who asks; sequences of others are unknown to them.
        submitted_ns: When it was handed over, on the monotonic clock; written by the engine.
    """

    __slots__ = ()
    principal: str
    submitted_ns: int


class QueuedJob(Job[_R_co]):
    """A job that may wait for a step. Until it is finished it has a place in the queue, and its rows count for quotas.

    Attributes:
        handle: The sequence that it is about; None: a new one, or none.
        request_id: Where the job makes a sequence: the same one again makes nothing and gets the same answer.
        is_cancelled: Set (from any thread) when the caller is gone; honoured until the job's last chunk is run.
        rows_run: Rows that steps were spent on so far, written by the engine.
    """

    __slots__ = ()
    handle: Handle | None
    request_id: str
    is_cancelled: bool
    rows_run: int

    def cancel(self) -> None:
        """Note that nobody waits for the job; from any thread. What has been committed stays."""
        self.is_cancelled = True  # type: ignore[misc]  # each kind of job has the slot

    @property
    def num_rows(self) -> int:
        """Rows that the job may need; a fork none."""
        return 0

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens that count for the prefill rate: those of new sequences, and of appends of more than one token."""
        return 0


class LaneJob(QueuedJob[_R_co]):
    """A job that is judged by the state of its sequence, when its turn in the sequence's lane has come."""

    __slots__ = ()


class StreamJob(QueuedJob[_R_co]):
    """A job that is answered in frames.

    Attributes:
        token_ids: The prompt.
        output: What comes with each row or token.
        window: How far it may run ahead of its reader. row_bytes: what a row or token takes in it.
    """

    __slots__ = ()
    token_ids: tuple[int, ...]
    output: OutputRequest
    window: Window
    row_bytes: int


@dataclass(eq=False, slots=True)
class AppendJob(LaneJob["AppendResult"]):
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
        reuse_prefix: Of a new sequence: its prompt may be looked up in the prefix cache. publish_prefix: its blocks may
            be found there by later prompts.
        drafts: Set for a verify; ``output`` then holds for row 0 and every draft, whatever ``all_positions`` says.
        cohort: Jobs that the client scheduled for one step, by a number of their own; 0: none.
        is_internal: Made by the engine itself for a Generate or Forward: nobody comes back with its handle.
        keeps_record: Its answer is remembered for a retry; False where nobody can ask again.
        follow: Whether the engine itself goes on behind it: so the next step may be prepared (``lookahead.py``).
        loop: Of the Generate that it belongs to, ``creations.loop_of``; empty: a request of its own.
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
    reuse_prefix: bool = True
    publish_prefix: bool = True
    drafts: Drafts | None = None
    cohort: int = 0
    is_internal: bool = False
    keeps_record: bool = True
    follow: Follow = Follow.UNKNOWN
    loop: bytes = b""

    @property
    def num_rows(self) -> int:
        """One per token; a query is one row."""
        return len(self.token_ids) or 1

    @property
    def num_prompt_tokens(self) -> int:
        """All tokens but drafts, unless it is a decode: one token after a handle."""
        num_tokens = len(self.token_ids) - (self.drafts.count if self.drafts is not None else 0)
        return 0 if num_tokens == 1 and self.handle is not None else num_tokens

    def branched_to(self, cache_id: str) -> bool:
        """Return whether an answer in the sequence ``cache_id`` lies in a branch of the handle's own."""
        return self.handle is not None and self.handle.cache_id != cache_id


@dataclass(eq=False, slots=True)
class ForkJob(LaneJob["ForkResult"]):
    """``count`` new handles on the first ``length`` tokens (at most ``handle.length``), all or nothing.

    With a ``request_id`` the same job again makes nothing and gets the same handles. ``loop`` is as in
    :class:`AppendJob`.
    """

    principal: str
    handle: Handle
    length: int
    count: int
    ttl_s: float | None = None
    request_id: str = ""
    is_cancelled: bool = False
    submitted_ns: int = 0
    loop: bytes = b""
    rows_run: int = field(default=0, init=False)


@dataclass(eq=False, slots=True)
class TruncateJob(LaneJob["TruncateResult"]):
    """Shorten a sequence to ``new_length`` tokens, an absolute length: idempotent without a request_id."""

    principal: str
    handle: Handle
    new_length: int
    is_cancelled: bool = False
    submitted_ns: int = 0
    request_id: str = field(default="", init=False)
    rows_run: int = field(default=0, init=False)


class SlotsWanted(NamedTuple):
    """Room wanted for one sequence, whatever the length of the handle: see ``kv/reserved_slots.py``."""

    handle: Handle
    target_length: int
    admission_target_length: int = 0


class Window:
    """How far a streamed answer may run ahead of its reader, in bytes. Two counters, each with one writer, no lock.

    Args:
        limit_bytes: The engine goes on while fewer than this are on their way.
    """

    __slots__ = ("limit_bytes", "sent_bytes", "taken_bytes")

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.sent_bytes = 0  # written by the engine thread
        self.taken_bytes = 0  # written by the event loop

    @property
    def is_open(self) -> bool:
        """Whether more may be sent."""
        return self.sent_bytes - self.taken_bytes < self.limit_bytes


class TextStop(Protocol):
    """Looks for stop strings in the text of the tokens of one branch; called from the engine thread."""

    def feed(self, token_id: int) -> bool:
        """Take the next token; whether one of the strings is complete with it."""
        ...


@dataclass(frozen=True, slots=True)
class StopRules:
    """What ends a branch of Generate.

    Attributes:
        max_tokens: Tokens drawn; 0: no limit.
        eos_ids: The model's own stop tokens, empty where they are ignored. token_ids: those of the request.
        sequences: Runs of tokens, each at least one. suffixes: the same, prepared for the search once for all branches.
        new_text_stop: Makes what looks for stop strings, for each branch; None: there are none.
    """

    max_tokens: int = 0
    eos_ids: frozenset[int] = frozenset()
    token_ids: frozenset[int] = frozenset()
    sequences: tuple[tuple[int, ...], ...] = ()
    new_text_stop: Callable[[], TextStop] | None = None
    suffixes: Suffixes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Prepare the sequences here, where the request is planned, so that the engine thread need not."""
        object.__setattr__(self, "suffixes", Suffixes(map(packed_ids, self.sequences)))


def packed_ids(token_ids: tuple[int, ...]) -> bytes:
    """Return token ids as four bytes each, big-endian, so that runs of tokens can be searched as bytes."""
    return struct.pack(f">{len(token_ids)}I", *token_ids)


@dataclass(eq=False, slots=True)
class GenerateJob(StreamJob["GenerateFrame"]):
    """The decode loop: tokens behind a handle or a new sequence, then one token after the other.

    Answered with any number of :class:`GenerateFrame`, the last of which says so, or with an error in place of the
    first. Every token is an append of its own, committed as it is drawn.

    Attributes:
        principal, token_ids, handle, on_stale, ttl_s, request_id, is_cancelled, is_repeat_only, reserved_length,
        reuse_prefix, publish_prefix: As in :class:`AppendJob`; ``token_ids`` may be empty with a handle.
        output: What comes with each token; its spec has a selection. Branch i draws with seed + i modulo 2^64.
        num_branches: Sequences, the first one the given or new one, the others forks of it.
        stop: What ends a branch.
        window: How far it may run ahead of its reader.
        row_bytes: What a token takes in the window.
        has_begun: Its first frame is delivered: the prompt has been run. Written by the gate.
    """

    principal: str
    token_ids: tuple[int, ...]
    handle: Handle | None
    output: OutputRequest
    stop: StopRules
    window: Window
    on_stale: StalePolicy = StalePolicy.FAIL
    ttl_s: float | None = None
    request_id: str = ""
    is_cancelled: bool = False
    submitted_ns: int = 0
    rows_run: int = 0
    is_repeat_only: bool = False
    reserved_length: int = 0
    reuse_prefix: bool = True
    publish_prefix: bool = True
    num_branches: int = 1
    row_bytes: int = 64
    has_begun: bool = False

    @property
    def num_rows(self) -> int:
        """The prompt until it has been run, and a row for each branch in each step."""
        return self.num_branches + (0 if self.has_begun else len(self.token_ids))

    @property
    def num_prompt_tokens(self) -> int:
        """The prompt, unless it is one token after a handle."""
        num_tokens = len(self.token_ids)
        return 0 if num_tokens == 1 and self.handle is not None else num_tokens


class Pooling(enum.Enum):
    """How hidden states of many rows become one."""

    NONE = "none"
    MEAN = "mean"
    LAST = "last"


@dataclass(eq=False, slots=True)
class ForwardJob(StreamJob["ForwardFrame"]):
    """All rows of some tokens, no sequence left behind; answered with :class:`ForwardFrame` s, or an error.

    Attributes:
        output: What comes with each row, ``all_positions`` True; spec None: nothing but the pooled hidden state.
        pooling: Whether one vector over all rows comes with the last frame.
        chunk_rows: Most rows in one frame, and so in one step.
        window: How far it may run ahead of its reader. row_bytes: what a row takes in it.
    """

    principal: str
    token_ids: tuple[int, ...]
    output: OutputRequest
    window: Window
    chunk_rows: int
    row_bytes: int
    pooling: Pooling = Pooling.NONE
    request_id: str = ""
    is_cancelled: bool = False
    submitted_ns: int = 0
    rows_run: int = 0
    handle: None = field(default=None, init=False)

    @property
    def num_rows(self) -> int:
        """One per token."""
        return len(self.token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        """All tokens."""
        return len(self.token_ids)


@dataclass(eq=False, slots=True)
class HostCall(Job[_R_co]):
    """A look at sequences, or a change of them, that needs no step; made by the functions of ``host_calls.py``.

    Carried out as it comes, also while appends are in flight: it waits for nothing but the step under way.

    Attributes:
        carry_out: Is called on the engine thread with its parts, a ``host_calls.Host``, and the moment at which leases
            are judged. Returns the result; may raise a FerruleError.
    """

    principal: str
    carry_out: Callable[[Any, float], _R_co]  # Any: host_calls imports jobs
    submitted_ns: int = 0


@dataclass(eq=False, slots=True)
class WarmupJob(Job["WarmupResult"]):
    """Run steps of real shapes that touch no sequence; empty ``batch_sizes``: the engine's own choice."""

    principal: str
    batch_sizes: tuple[int, ...] = ()
    submitted_ns: int = 0


@dataclass(slots=True)
class StepTiming:
    """Where the time of a job went. Not frozen, here and in AppendResult: made for every token, frozen costs double.

    Attributes:
        queue_ns: From submission to the start of its first step.
        run_ns: Sum of the run times of the steps it had a row in.
        step_rows: Rows of its last step, those of others included.
        started_ns: When its first step began, on the monotonic clock; 0: nothing was run.
    """

    queue_ns: int = 0
    run_ns: int = 0
    step_rows: int = 0
    started_ns: int = 0


@dataclass(frozen=True, slots=True)
class Verified:
    """What became of the drafts of a verify.

    Attributes:
        accepted_count: Drafts that hold; 0 with Acceptance.NONE, where all are appended.
        next_token: The token that follows the last accepted row; None with Acceptance.NONE.
        row_handles: If asked for: at row 0 and at each appended draft; the last one is the answer's handle.
    """

    accepted_count: int = 0
    next_token: int | None = None
    row_handles: tuple[Handle, ...] = ()


@dataclass(slots=True)
class AppendResult:
    """What an append returns.

    Attributes:
        handle: The handle to go on with.
        rows: Output rows in order (one, or one per input token), empty for policy ``none``. Of a verify: row 0 and the
            accepted rows, or all rows with Acceptance.NONE.
        seed: The seed sampling used, None when nothing was sampled.
        cached_tokens: Input tokens whose KV was taken from the prefix cache.
        replayed: True when these tokens were appended before and nothing was appended now.
        recomputed: True when a replay's rows had to be run again.
        forked: True when ``on_stale=FORK`` made a new sequence.
        ttl_s: Seconds of the sequence's lease, as granted; it has just been renewed.
        verified: Of a verify.
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
    verified: Verified | None = None


class Finish(enum.Enum):
    """Why a branch of Generate ended."""

    EOS = "eos"
    STOP_TOKEN = "stop_token"  # noqa: S105  (a token of text)
    STOP_SEQUENCE = "stop_sequence"
    MAX_TOKENS = "max_tokens"
    CONTEXT_FULL = "context_full"
    BLOCKS_EXHAUSTED = "blocks_exhausted"
    ERROR = "error"


@dataclass(slots=True)
class BranchFrame:
    """What happened to one branch of Generate in one step.

    Attributes:
        index: Number of the branch, from 0.
        handle: Covers every token before the last one in ``rows``; None where the branch ended without any.
        rows: Of the tokens drawn, in order.
        seed: What they are drawn with, in the branch's first frame; None later, and where nothing is drawn.
        finish: Why it ended; None: it goes on.
        error: With Finish.ERROR.
        cached_tokens, replayed: Of the prefill, in the first frame of branch 0.
    """

    index: int
    handle: Handle | None
    rows: tuple[RowOutput, ...] = ()
    seed: int | None = None
    finish: Finish | None = None
    error: FerruleError | None = None
    cached_tokens: int = 0
    replayed: bool = False


@dataclass(slots=True)
class GenerateFrame:
    """What happened to the branches of a Generate; ``is_last`` when all of them have ended."""

    branches: tuple[BranchFrame, ...]
    timing: StepTiming
    is_last: bool = False


@dataclass(slots=True)
class ForwardFrame:
    """Rows from ``first_position`` on; the pooled hidden state, float32 [hidden_size], with the last frame."""

    first_position: int
    rows: tuple[RowOutput, ...]
    timing: StepTiming
    seed: int | None = None
    is_last: bool = False
    pooled: Float32Array | None = None


class WarmStep(NamedTuple):
    """One step run to warm up."""

    num_seqs: int
    num_rows: int
    run_ns: int


@dataclass(frozen=True, slots=True)
class WarmupResult:
    """The steps that were run, and the batch sizes that are warm now, ascending."""

    steps: tuple[WarmStep, ...]
    batch_sizes: tuple[int, ...]


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
class Lease:
    """A lease: seconds granted at each renewal, and seconds left of it now."""

    ttl_s: float
    expires_in_s: float


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


Outcome = object
"""What a job is answered with: its result, a frame or a FerruleError."""


class Sink(Protocol):
    """Where finished jobs go. Both methods run on the event loop's thread and must not block or raise."""

    def deliver(self, job: Job[object], outcome: Outcome) -> None:
        """Take the outcome of one job."""
        ...

    def flush(self) -> None:
        """All outcomes of this step that go here have been delivered."""
        ...


Entry = tuple[Job[object], Sink]
"""A job and who asked for it."""
