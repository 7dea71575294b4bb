"""Jobs: the requests that the engine accepts, and their results. Made by ``api/``, carried out by the engine thread.

The base class of a job says all that other code needs to know about its kind::

    Job           has a principal
      QueuedJob   may wait for a step: counted by the gate and by quotas, and can be cancelled
        LaneJob   waits for its turn on one sequence: AppendJob, ForkJob, TruncateJob
        StreamJob is answered in frames by a driver: GenerateJob, ForwardJob
      HostCall    reads or changes sequences between two steps (``host_calls.py``)
      WarmupJob   runs steps that touch no sequence

A job is passed to :meth:`Engine.submit` together with a :class:`Sink`. The engine thread never calls the sink: after
each step one callback on the event loop delivers every finished job to its sink. Then it flushes each of these sinks
once, so a stream sends one frame per step.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar

from ferrule_server.errors import FerruleError
from ferrule_server.executor.base import DraftDistribution, Float32Array, OutputSpec, RowOutput, TokenMask
from ferrule_server.kv.handle import Handle, StalePolicy
from ferrule_server.kv.new_sequence import USUAL, NewSequence
from ferrule_server.suffixes import Suffixes

SEED_BITS: Final = 52
"""Size of the seeds that the server draws: a double, and so every language and JSON, holds them exactly."""

_R_co = TypeVar("_R_co", covariant=True)


@dataclass(frozen=True, slots=True)
class OutputRequest:
    """What an append returns: the contract's LogitsReturnPolicy and LogitsPositions, checked.

    Attributes:
        spec: What each output row returns; None returns no rows at all (policy ``none``).
        all_positions: True: one row for each input token; False: the last one only.
        is_seeded: False if the caller gave no seed for ``spec.sample``; the engine then chooses one.
        wants_targets: Fill ``target_logprob`` of row i with input token i + 1.
        last_target: With ``wants_targets``, the token that follows the last row if it is known; -1: unknown.
    """

    spec: OutputSpec | None
    all_positions: bool = False
    is_seeded: bool = True
    wants_targets: bool = False
    last_target: int = -1


class Acceptance(enum.Enum):
    """How it is decided which drafts of a verify are accepted: the contract's AcceptanceRule."""

    NONE = "none"
    """The client decides: all drafts are appended."""
    EXACT = "exact"
    """A draft is accepted if it is the token that the row before it chooses."""
    REJECTION = "rejection"
    """Speculative sampling: see ``executor.base.DraftSpec``."""


@dataclass(frozen=True, slots=True)
class Drafts:
    """Makes an append a verify: its last tokens are drafts, in a chain.

    Rows are numbered from the last certain token on: row 0 is that token, row r is draft r, counted from 1.

    Attributes:
        count: How many of the job's last ``token_ids`` are drafts; may be 0.
        acceptance: The rule for accepting drafts.
        distributions: For REJECTION, the distribution of each draft; empty: each was chosen with certainty.
        row_masks: Tokens that may follow each row, in place of the selection's mask: count + 1 of them, or none.
        wants_row_handles: Return a handle at row 0 and at each appended draft.
    """

    count: int
    acceptance: Acceptance = Acceptance.NONE
    distributions: tuple[DraftDistribution, ...] = ()
    row_masks: tuple[TokenMask, ...] = ()
    wants_row_handles: bool = False


class Follow(enum.Enum):
    """What comes after an append that chooses a token, as far as is known before the token is."""

    UNKNOWN = "unknown"
    """The caller decides what comes next, and when."""
    LIKELY = "likely"
    """The token is appended at once, unless it ends the text."""
    NOTHING = "nothing"
    """The token is the last one, whichever it is."""


class Job(Generic[_R_co]):
    """A request to the engine; its outcome is an ``_R_co`` or a FerruleError.

    Attributes:
        principal: The principal that sent it; it cannot see sequences of others.
        submitted_ns: When it was submitted, on the monotonic clock; written by the engine.
    """

    __slots__ = ()
    principal: str
    submitted_ns: int


class QueuedJob(Job[_R_co]):
    """A job that may wait for a step. Until it is finished, it has a place in the queue and its rows count for quotas.

    Attributes:
        handle: The sequence that it works on; None: a new one, or none.
        request_id: If the job creates a sequence: a repeated job with this id creates nothing and gets the same answer.
        is_cancelled: Set (from any thread) when the caller has gone; honoured until the job's last chunk is planned.
        rows_run: Rows that steps have run for it so far, written by the engine.
    """

    __slots__ = ()
    handle: Handle | None
    request_id: str
    is_cancelled: bool
    rows_run: int

    def cancel(self) -> None:
        """Record that no caller waits for the job; from any thread. What has been committed stays."""
        self.is_cancelled = True  # type: ignore[misc]  # each kind of job has the slot

    @property
    def num_rows(self) -> int:
        """Rows that the job may need; 0 for a fork."""
        return 0

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens that count for the prefill rate: those of new sequences, and of appends of more than one token."""
        return 0


class LaneJob(QueuedJob[_R_co]):
    """A job that is judged by the state of its sequence, when its turn in the sequence's lane comes."""

    __slots__ = ()


class StreamJob(QueuedJob[_R_co]):
    """A job that is answered in frames.

    Attributes:
        token_ids: The prompt.
        output: What each row or token returns.
        window: How far the answer may run ahead of its reader. row_bytes: what a row or token counts in it.
    """

    __slots__ = ()
    token_ids: tuple[int, ...]
    output: OutputRequest
    window: Window
    row_bytes: int


@dataclass(eq=False, slots=True)
class _Asked:
    """Whose job it is, and what is noted of it until it is finished; see :class:`QueuedJob`."""

    principal: str
    _: KW_ONLY
    is_cancelled: bool = False
    submitted_ns: int = 0
    rows_run: int = 0


@dataclass(eq=False, slots=True)
class _Prompt(_Asked):
    """Tokens for the sequence of a handle or for a new one, and how a new one is kept; see :class:`AppendJob`."""

    token_ids: tuple[int, ...]
    handle: Handle | None
    output: OutputRequest
    _: KW_ONLY
    new: NewSequence = USUAL


@dataclass(eq=False, slots=True)
class AppendJob(_Prompt, LaneJob["AppendResult"]):
    """Prefill or decode: append tokens to the sequence of a handle, or to a new one.

    Attributes:
        principal, request_id, is_cancelled, rows_run: As in :class:`QueuedJob`.
        token_ids: Checked against the vocabulary. Empty with a handle of length > 0: a query.
        handle: None starts a new sequence.
        output: What the rows return.
        on_stale: What to do if the handle is behind the tip.
        ttl_s: Lease in seconds, clamped by the engine; None keeps the current one (60 s on a new sequence).
        new: How a new sequence is kept.
        drafts: Set for a verify; ``output`` then applies to row 0 and every draft, whatever ``all_positions`` says.
        cohort: Jobs that the client scheduled for one step, by a number of their own; 0: none.
        is_internal: Made by the engine itself for a Generate or Forward: no client will return with its handle.
        keeps_record: The answer is kept for a retry; False if no retry is possible.
        follow: Whether the engine continues the sequence itself, so that the next step can be prepared
            (``lookahead.py``).
        loop: Digest of the Generate that it belongs to, ``creations.loop_of``; empty: it is a request of its own.
    """

    on_stale: StalePolicy = StalePolicy.FAIL
    ttl_s: float | None = None
    request_id: str = ""
    drafts: Drafts | None = None
    cohort: int = 0
    is_internal: bool = False
    keeps_record: bool = True
    follow: Follow = Follow.UNKNOWN
    loop: bytes = b""

    @property
    def num_rows(self) -> int:
        """One row per token; a query is one row."""
        return len(self.token_ids) or 1

    @property
    def num_prompt_tokens(self) -> int:
        """All tokens except drafts; 0 for a decode, which is one token after a handle."""
        num_tokens = len(self.token_ids) - (self.drafts.count if self.drafts is not None else 0)
        return 0 if num_tokens == 1 and self.handle is not None else num_tokens


@dataclass(eq=False, slots=True)
class ForkJob(_Asked, LaneJob["ForkResult"]):
    """Create ``count`` new handles on the first ``length`` tokens (at most ``handle.length``), all or nothing.

    If a job with a ``request_id`` is repeated, nothing is created and the answer has the same handles. ``loop`` is as
    in :class:`AppendJob`.
    """

    handle: Handle
    length: int
    count: int
    ttl_s: float | None = None
    request_id: str = ""
    loop: bytes = b""


@dataclass(eq=False, slots=True)
class TruncateJob(_Asked, LaneJob["TruncateResult"]):
    """Shorten a sequence to ``new_length`` tokens, an absolute length: this is idempotent without a request_id."""

    handle: Handle
    new_length: int
    request_id: str = field(default="", init=False)


class SlotsWanted(NamedTuple):
    """The room that one sequence needs, whatever the length of the handle: see ``kv/reserved_slots.py``."""

    handle: Handle
    target_length: int
    admission_target_length: int = 0


@dataclass(eq=False, slots=True)
class Window:
    """How far a streamed answer may run ahead of its reader, in bytes. Two counters with one writer each; no lock.

    Attributes:
        limit_bytes: The engine continues while fewer bytes than this have been sent and not taken.
        sent_bytes: Written by the engine thread. taken_bytes: written by the event loop.
    """

    limit_bytes: int
    sent_bytes: int = 0
    taken_bytes: int = 0

    @property
    def is_open(self) -> bool:
        """Whether more may be sent."""
        return self.sent_bytes - self.taken_bytes < self.limit_bytes


class TextStop(Protocol):
    """Looks for stop strings in the text of one branch's tokens; called from the engine thread."""

    def feed(self, token_id: int) -> bool:
        """Take the next token, and return whether it completes one of the strings."""


@dataclass(frozen=True, slots=True)
class StopRules:
    """The conditions that end a branch of Generate.

    Attributes:
        max_tokens: Most tokens drawn; 0: no limit.
        eos_ids: The model's own stop tokens; empty if they are ignored. token_ids: the stop tokens of the request.
        sequences: Runs of tokens, none of them empty. suffixes: the same, prepared for the search once for all
            branches.
        new_text_stop: Returns a search for stop strings, one for each branch; None: there are no stop strings.
    """

    max_tokens: int = 0
    eos_ids: frozenset[int] = frozenset()
    token_ids: frozenset[int] = frozenset()
    sequences: tuple[tuple[int, ...], ...] = ()
    new_text_stop: Callable[[], TextStop] | None = None
    suffixes: Suffixes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Prepare the sequences here, where the request is planned, and not on the engine thread."""
        object.__setattr__(self, "suffixes", Suffixes(map(packed_ids, self.sequences)))


def packed_ids(token_ids: tuple[int, ...]) -> bytes:
    """Return token ids as four bytes each, big-endian, so that runs of tokens can be searched as bytes."""
    return struct.pack(f">{len(token_ids)}I", *token_ids)


@dataclass(eq=False, slots=True)
class GenerateJob(_Prompt, StreamJob["GenerateFrame"]):
    """The decode loop: append tokens to the sequence of a handle or to a new one, then draw one token after another.

    The job is answered with any number of :class:`GenerateFrame`, of which the last has ``is_last``; or with an error
    instead of the first. Each token is an append of its own, committed as it is drawn.

    Attributes:
        principal, token_ids, handle, on_stale, ttl_s, request_id, is_cancelled, new: As in :class:`AppendJob`;
            ``token_ids`` may be empty with a handle.
        output: What each token returns; its spec has a selection. Branch i draws with seed + i modulo 2^64.
        num_branches: Number of sequences: the given or new one, and forks of it.
        stop: The conditions that end a branch.
        window: How far the answer may run ahead of its reader.
        row_bytes: What a token counts in the window.
        has_begun: Its first frame is delivered: the prompt has been run. Written by the gate.
    """

    stop: StopRules
    window: Window
    on_stale: StalePolicy = StalePolicy.FAIL
    ttl_s: float | None = None
    request_id: str = ""
    num_branches: int = 1
    row_bytes: int = 64
    has_begun: bool = False

    @property
    def num_rows(self) -> int:
        """The prompt until it has been run, and one row per branch in each step."""
        return self.num_branches + (0 if self.has_begun else len(self.token_ids))

    @property
    def num_prompt_tokens(self) -> int:
        """All tokens of the prompt; 0 if it is one token after a handle."""
        num_tokens = len(self.token_ids)
        return 0 if num_tokens == 1 and self.handle is not None else num_tokens


class Pooling(enum.Enum):
    """How the hidden states of many rows become one."""

    NONE = "none"
    MEAN = "mean"
    LAST = "last"


@dataclass(eq=False, slots=True)
class ForwardJob(_Asked, StreamJob["ForwardFrame"]):
    """Run all rows of some tokens and keep no sequence; answered with any number of :class:`ForwardFrame`, or an error.

    Attributes:
        output: What each row returns, ``all_positions`` True; spec None: only the pooled hidden state is returned.
        pooling: Whether the last frame carries one vector over all rows.
        chunk_rows: Most rows in one frame, and so in one step.
        window: How far the answer may run ahead of its reader. row_bytes: what a row counts in it.
    """

    token_ids: tuple[int, ...]
    output: OutputRequest
    window: Window
    chunk_rows: int
    row_bytes: int
    pooling: Pooling = Pooling.NONE
    request_id: str = ""
    handle: None = field(default=None, init=False)

    @property
    def num_rows(self) -> int:
        """One row per token."""
        return len(self.token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        """All tokens."""
        return len(self.token_ids)


@dataclass(eq=False, slots=True)
class HostCall(Job[_R_co]):
    """Reads or changes sequences without a step; made by the functions of ``host_calls.py``.

    It is carried out when it is taken, even while appends are in flight: it waits only for the current step.

    Attributes:
        carry_out: Called on the engine thread with a ``host_calls.Host`` and the time at which leases are judged.
            Returns the result; may raise a FerruleError.
        handles: The sequences that the result is about; empty: any.
    """

    principal: str
    carry_out: Callable[[Any, float], _R_co]  # Any: host_calls imports jobs
    handles: tuple[Handle, ...] = ()
    submitted_ns: int = 0


@dataclass(eq=False, slots=True)
class WarmupJob(Job["WarmupResult"]):
    """Run steps of real shapes that touch no sequence; empty ``batch_sizes``: the engine chooses."""

    principal: str
    batch_sizes: tuple[int, ...] = ()
    submitted_ns: int = 0


@dataclass(slots=True)
class StepTiming:
    """How the time of a job was spent.

    Not frozen, like AppendResult: both are made for every token, and frozen ones cost double.

    Attributes:
        queue_ns: From submission to the start of its first step.
        run_ns: Sum of the run times of the steps that had a row of it.
        step_rows: Rows of its last step, including those of other jobs.
        started_ns: When its first step began, on the monotonic clock; 0: nothing was run.
    """

    queue_ns: int = 0
    run_ns: int = 0
    step_rows: int = 0
    started_ns: int = 0


@dataclass(frozen=True, slots=True)
class Verified:
    """The result of judging the drafts of a verify.

    Attributes:
        accepted_count: Accepted drafts; 0 with Acceptance.NONE, where all are appended.
        next_token: The token that follows the last accepted row; None with Acceptance.NONE.
        row_handles: If requested: at row 0 and at each appended draft; the last one is the answer's handle.
    """

    accepted_count: int = 0
    next_token: int | None = None
    row_handles: tuple[Handle, ...] = ()

    def num_appended(self, num_drafts: int) -> int:
        """Return how many drafts are appended: the accepted ones, or all if the client decides.

        This relies on two conditions: a rule always chooses a ``next_token``, and Acceptance.NONE never does; and
        ``num_drafts`` is the number of drafts of the very verify that has this result.
        """
        return num_drafts if self.next_token is None else self.accepted_count


@dataclass(slots=True)
class AppendResult:
    """What an append returns.

    Attributes:
        handle: The handle to continue with.
        rows: Output rows in order (one, or one per input token), empty for policy ``none``. Of a verify: row 0 and the
            accepted rows, or all rows with Acceptance.NONE.
        seed: The seed that sampling used, None if nothing was sampled.
        cached_tokens: Input tokens whose KV was taken from the prefix cache.
        replayed: True if these tokens were appended before and nothing was appended now.
        recomputed: True if a replay's rows had to be run again.
        ttl_s: Seconds of the sequence's lease, as granted; it has just been renewed.
        verified: Set for a verify.
    """

    handle: Handle
    rows: tuple[RowOutput, ...] = ()
    seed: int | None = None
    cached_tokens: int = 0
    timing: StepTiming = field(default_factory=StepTiming)
    replayed: bool = False
    recomputed: bool = False
    ttl_s: float = 0.0
    verified: Verified | None = None


class Finish(enum.Enum):
    """Why a branch of Generate ended. The names are those of the contract, the values those of metrics."""

    EOS = "eos"
    STOP_TOKEN = "stop_token"  # noqa: S105  (a token of text)
    STOP_SEQUENCE = "stop_sequence"
    MAX_TOKENS = "max_tokens"
    CONTEXT_FULL = "context_full"
    KV_BLOCKS_EXHAUSTED = "blocks_exhausted"
    ERROR = "error"


@dataclass(slots=True)
class BranchFrame:
    """The news of one branch of Generate in one step.

    Attributes:
        index: Number of the branch, from 0.
        handle: Covers every token before the last one in ``rows``; None if the branch ended without any.
        rows: The rows of the drawn tokens, in order.
        seed: The seed of the branch, in its first frame; None in later ones, and if nothing is drawn.
        finish: Why the branch ended; None: it continues.
        error: Set with Finish.ERROR.
        cached_tokens, replayed: As reported by the prefill, in the first frame of branch 0.
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
    """The news of all branches of a Generate; ``is_last`` when all of them have ended."""

    branches: tuple[BranchFrame, ...]
    timing: StepTiming
    is_last: bool = False


@dataclass(slots=True)
class ForwardFrame:
    """Rows from ``first_position`` on; the last frame has the pooled hidden state, float32 [hidden_size]."""

    first_position: int
    rows: tuple[RowOutput, ...]
    timing: StepTiming
    seed: int | None = None
    is_last: bool = False
    pooled: Float32Array | None = None


class WarmStep(NamedTuple):
    """One step that was run to warm up."""

    num_seqs: int
    num_rows: int
    run_ns: int


@dataclass(frozen=True, slots=True)
class WarmupResult:
    """The steps that were run, and the batch sizes that are now warm, ascending."""

    steps: tuple[WarmStep, ...]
    batch_sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ForkResult:
    """The new handles of a fork, the seconds of their leases, and whether they had been created before."""

    handles: tuple[Handle, ...]
    ttl_s: float = 0.0
    replayed: bool = False


@dataclass(frozen=True, slots=True)
class TruncateResult:
    """The handle after a truncate, and how many blocks it returned to the pool."""

    handle: Handle
    freed_blocks: int


@dataclass(frozen=True, slots=True)
class Lease:
    """A lease: seconds granted at each renewal, and seconds that are left now."""

    ttl_s: float
    expires_in_s: float


@dataclass(slots=True)
class CacheInfo:
    """One sequence as its owner and views see it. Not frozen: a thousand are made on the engine thread at a time.

    Attributes:
        principal: The owner.
        num_blocks: Blocks that it holds, including those set aside for future tokens.
        kv_bytes: Bytes of all its blocks; shared ones count in full.
        age_s: Seconds since it was created.
        ttl_s, expires_in_s: As in :class:`Lease`.
        parent_handle_id: The sequence it was forked from; empty if it was prefilled.
        num_pending: Jobs in flight or waiting on it.
        reserved_length: Tokens up to which room is reserved; 0: none is.
        is_appending, first_position, lowest_length: As in :class:`~ferrule_server.kv.sequence.Sequence`.
        is_durable: It survives the process.
        tokens_to_recompute: Tokens whose KV must be computed before it can be used: it was restored.
        block_ids: Blocks that it holds of its tokens, in order; block_refcounts: how many sequences use each (1 =
            unshared). Both empty in lists; views have refcounts of all blocks instead.
        num_shared_blocks: Blocks of its tokens that other sequences use too; 0 in views, whose readers count them.
        tip: The newest handle; ``None`` unless it is asked for, since it is a secret.
        token_ids: None unless requested.
    """

    handle_id: str
    principal: str
    length: int
    num_blocks: int
    kv_bytes: int
    age_s: float
    ttl_s: float
    expires_in_s: float
    parent_handle_id: str = ""
    num_pending: int = 0
    is_appending: bool = False
    reserved_length: int = 0
    first_position: int = 0
    lowest_length: int = 1
    is_durable: bool = False
    tokens_to_recompute: int = 0
    block_ids: tuple[int, ...] = field(default=(), repr=False)
    block_refcounts: tuple[int, ...] = ()
    num_shared_blocks: int = 0
    tip: Handle | None = None
    token_ids: tuple[int, ...] | None = None

    @property
    def lease(self) -> Lease:
        """Its lease."""
        return Lease(self.ttl_s, self.expires_in_s)


@dataclass(frozen=True, slots=True)
class ListResult:
    """One page of sequences, the handle_id after which to continue (empty at the end), and the total number."""

    caches: tuple[CacheInfo, ...]
    next_after: str
    total: int


Outcome = object
"""The outcome of a job: its result, a frame or a FerruleError."""


class Sink(Protocol):
    """Receives finished jobs. Both methods run on the event loop's thread and must not block or raise."""

    def deliver(self, job: Job[object], outcome: Outcome) -> None:
        """Take the outcome of one job."""

    def flush(self) -> None:
        """Handle the end of a step: all outcomes of it for this sink have been delivered."""


Entry = tuple[Job[object], Sink]
"""A job and the sink that receives its outcome."""
