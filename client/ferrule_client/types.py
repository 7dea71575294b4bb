"""The values that calls return: plain Python and numpy, nothing of gRPC in them; frozen, but for ``Answer``."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from ferrule.v1 import types_pb2
from ferrule_client import _notebook as notebook
from ferrule_client._public import publish

__all__ = [
    "Acceptance",
    "Answer",
    "CacheInfo",
    "CacheMetrics",
    "CacheSummary",
    "Caller",
    "Capabilities",
    "ChatMessage",
    "ChatPrompt",
    "Drained",
    "Durability",
    "FinishReason",
    "FloatArray",
    "ForwardChunk",
    "Handle",
    "Lease",
    "MemoryUsage",
    "ModelInfo",
    "OnStale",
    "Output",
    "Pending",
    "Pooling",
    "Quotas",
    "Released",
    "Reservation",
    "Rows",
    "Score",
    "Status",
    "Timing",
    "TlsConfig",
    "Token",
    "TokenLogprob",
    "Tokens",
    "Verification",
    "Warmed",
    "WarmStep",
    "WithText",
]

FloatArray = npt.NDArray[np.float32]
"""A float32 array."""

Tokens = int | np.integer | Sequence[int] | npt.NDArray[np.integer]
"""One token id, or several in order."""

OnStale = Literal["fail", "fork", "rewind"]
"""What an append does if its handle is before the tip: refuse, branch there, or drop what follows."""

Pending = Literal["auto", "send", "drop"]
"""What an append does with a pending token.

``auto``: send it first; if the given tokens begin with that ``Token``, once; if with an equal int, raise
``PendingTokenError``. ``send``: send it first, whatever follows. ``drop``: replace it.
"""

Acceptance = Literal["none", "greedy", "exact", "rejection"]
"""Who decides which drafts of a verify hold: the client, the token that the policy chooses, or speculative sampling.

``greedy`` is ``exact`` by a greedy policy.
"""

FinishReason = Literal[
    "eos", "stop_token", "stop_sequence", "max_tokens", "context_full", "kv_blocks_exhausted", "error", "closed"
]
"""Why a generation ended; ``closed`` means the caller or an error ended it before its end."""

Durability = Literal["none", "journaled"]
"""Whether a sequence ends with the server process, or continues after a restart of the server."""

Pooling = Literal["mean", "last"]
"""How the hidden states of all tokens become one vector: their mean, or that of the last one."""

WithText = bool | Literal["as_drawn"]
"""Whether the tokens of a generation have text; ``as_drawn``: also that of the stop text which ends it."""

ChatMessage = Mapping[str, object]
"""One message of a conversation: ``role``, ``content``, and what else the template knows, such as ``tool_calls``."""


@dataclass(frozen=True, slots=True, repr=False)
class Handle:
    """Names exactly the KV of the first ``length`` tokens of one sequence on one server.

    A value: it never changes meaning, may be copied, kept and sent to another process. It is also a secret, so its
    ``repr`` shows the loggable ``handle_id`` only.

    Attributes:
        cache_id: The sequence, opaque and secret.
        length: Number of tokens covered, 1 or more.
        lineage: Fingerprint of the model and these tokens, 16 bytes; equal means equal tokens and model.
        instance: Name of the server instance that has the sequence; the client sends its calls there.
        handle_id: Loggable id of the sequence, the same as in the server's logs and lists.
    """

    cache_id: str
    length: int
    lineage: bytes
    instance: str = field(default="", compare=False)
    handle_id: str = field(default="", compare=False)

    def __repr__(self) -> str:
        return f"Handle({self.handle_id}, length={self.length})"

    def to_string(self) -> str:
        """Return the handle as text for files, environments and URLs. Keep it secret: it is all that access takes.

        Example:
            ``os.environ["TRUNK"] = cache.detach().to_string()``
        """
        from ferrule_client import _convert

        return base64.urlsafe_b64encode(_convert.handle_to_message(self).SerializeToString()).decode().rstrip("=")

    @classmethod
    def from_string(cls, text: str) -> Handle:
        """Return the handle that ``to_string`` wrote.

        Raises:
            ValueError: The text was not written by it.

        Example:
            ``cache = client.adopt(Handle.from_string(os.environ["TRUNK"]))``
        """
        from ferrule_client import _convert

        try:
            data = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
            handle = _convert.handle_from_message(types_pb2.KvCacheHandle.FromString(data))
        except (ValueError, DecodeError):
            handle = cls("", 0, b"")
        if not handle.cache_id or not handle.length:
            raise ValueError("this is no handle that Handle.to_string() wrote")  # without the text: it may be a secret
        return handle


@dataclass(frozen=True, slots=True)
class Timing:
    """Where the time of one request went on the server.

    Attributes:
        queue_ns: Nanoseconds it waited for its first step.
        run_ns: Nanoseconds of the steps that computed it; 0 for a replay out of the record.
        step_rows: Rows in the last of those steps, over all clients.
    """

    queue_ns: int = 0
    run_ns: int = 0
    step_rows: int = 0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token and its natural log-probability under the raw model."""

    token: int
    logprob: float


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Rows:
    """Output rows. Reading an array that the policy did not ask for raises AttributeError; lists are empty then.

    Attributes:
        tokens: Chosen token of each row.
        logprobs: Raw log-probability of each of ``tokens``.
        sampled_logprobs: Log-probability of each of ``tokens`` under the distribution it was drawn from.
        top_logprobs: For each row its most likely tokens, most likely first.
        arrays: The arrays that were asked for, by the names of the properties that return them.
        timing: Where the time went on the server.
    """

    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    sampled_logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    arrays: Mapping[str, FloatArray] = field(default_factory=dict, repr=False)
    timing: Timing = Timing()

    @property
    def logits(self) -> FloatArray:
        """Raw logits, float32 [num_rows, vocab_size], read-only; ``logits[-1]`` is the newest row."""
        return self._asked("logits", "logits()")

    @property
    def target_logprobs(self) -> FloatArray:
        """Raw log-probability of each row's next input token, float32 [num_rows]; the last row of a text has none."""
        return self._asked("target_logprobs", "Policy(target_logprobs=True)")

    @property
    def requested_logprobs(self) -> FloatArray:
        """Raw log-probabilities of ``logprob_token_ids``, float32 [num_rows, len(logprob_token_ids)]."""
        return self._asked("requested_logprobs", "Policy(logprob_token_ids=...)")

    @property
    def entropies(self) -> FloatArray:
        """Entropy of each row in nats, float32 [num_rows]."""
        return self._asked("entropies", "Policy(entropy=True)")

    @property
    def hidden_state(self) -> FloatArray:
        """Hidden states after the final norm, float32 [num_rows, hidden_size]."""
        return self._asked("hidden_state", "Policy(hidden_state=True)")

    def _asked(self, name: str, policy: str) -> FloatArray:
        array = self.arrays.get(name)
        if array is None:
            raise AttributeError(f"there is no {name}: the policy did not ask for it, as {policy} does")
        return array

    def _cut(self, rows: slice) -> dict[str, Any]:  # Any: keyword arguments of ``replace``
        """Return the fields of some of the rows."""
        arrays = {name: array[rows] for name, array in self.arrays.items()}
        names = ("tokens", "logprobs", "sampled_logprobs", "top_logprobs")
        return {"arrays": arrays, **{name: getattr(self, name)[rows] for name in names}}


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Output(Rows):
    """The result of one append, prefill or draw. See ``Rows`` for what the policy asked for.

    Attributes:
        handle: The sequence after the call.
        seed: Seed of the draw, if a token was drawn.
        replayed: True: the append had already happened, and nothing was appended.
        recomputed: True: the rows of a replay were computed again.
        cached_tokens: Input tokens that came from the prefix cache (prefill only).
        request_id: The request's id.
        ahead: How far ``token`` is beyond the end of ``handle``: less than 0 for an earlier row of several, else 0.
    """

    handle: Handle
    seed: int | None = None
    replayed: bool = False
    recomputed: bool = False
    cached_tokens: int = 0
    request_id: str = ""
    ahead: int = field(default=0, repr=False)

    @property
    def token(self) -> Token:
        """Chosen token of the newest row, or an AttributeError if the policy chose none.

        It is pending: the next append sends it first. A verify with acceptance ``none`` leaves nothing pending.
        """
        if not self.tokens:
            raise AttributeError("there is no token: the policy chose none, as greedy() and sample() do")
        return Token(self.tokens[-1], self)

    @property
    def logprob(self) -> float:
        """Raw log-probability of ``token``, or an AttributeError if it was not asked for."""
        return self.token.logprob

    def row(self, index: int) -> Output:
        """Return one row as an output of its own."""
        cut = self._cut(slice(index, index + 1))
        cut["arrays"].pop("target_logprobs", None)  # has no entry for the last row
        return replace(self, ahead=self.ahead - (len(self.tokens) - 1 - index), **cut)

    def _repr_html_(self) -> str:
        return notebook.output_html(self)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ForwardChunk(Rows):
    """Rows of consecutive positions of a forward pass.

    Attributes:
        first_position: Position of the first row.
        num_rows: Number of rows.
        is_last: True: the last rows of the input.
    """

    first_position: int
    num_rows: int
    is_last: bool = False

    @property
    def pooled_hidden_state(self) -> FloatArray:
        """The pooled hidden states of all rows, float32 [hidden_size]; with the last chunk only."""
        return self._asked("pooled_hidden_state", "pooling=")

    def behind(self, position: int) -> ForwardChunk | None:
        """Return the rows from a position on, or None if there are none."""
        skip = position - self.first_position
        if skip <= 0:
            return self
        if skip >= self.num_rows:
            return None
        pooled = {name: array for name, array in self.arrays.items() if name == "pooled_hidden_state"}
        rows = replace(self, arrays={name: array for name, array in self.arrays.items() if name not in pooled})
        cut = rows._cut(slice(skip, None))  # noqa: SLF001
        cut["arrays"] |= pooled
        return replace(self, first_position=position, num_rows=self.num_rows - skip, **cut)


@dataclass(frozen=True, slots=True, eq=False)
class Score:
    """How likely the model finds a continuation of a context, token by token.

    Attributes:
        token_ids: Token ids of the continuation.
        logprobs: Natural log-probability of each under the raw model, given all tokens before it, float32
            [number of tokens].
        greedy_ids: The most likely token in the place of each.
    """

    token_ids: tuple[int, ...]
    logprobs: FloatArray
    greedy_ids: tuple[int, ...]

    @property
    def total(self) -> float:
        """Log-probability of the whole continuation: the sum of ``logprobs``."""
        return float(self.logprobs.sum(dtype=np.float64))

    @property
    def is_greedy(self) -> bool:
        """True: greedy decoding after the context begins with the continuation."""
        return self.token_ids == self.greedy_ids


class Token(int):
    """A token that the server has chosen: an int that knows where.

    It can be compared and put into arrays like any int. Its cache keeps it as *pending* until something is appended:
    the next append sends it first. Passing this object confirms that, and the token is sent once.

    Attributes:
        output: The output that it came with: log-probabilities, seed, timing, handle. It is kept as long as the token.
        index: Number of the branch of a generation, from 0.
        text: What it adds to the text of a generation, if that was asked for; empty while a character is incomplete. If
            the server sent several tokens together, the last one has the text of all of them.
    """

    output: Output
    index: int
    text: str

    def __new__(cls, token: int, output: Output, index: int = 0, text: str = "") -> Self:
        """Return the token."""
        self = super().__new__(cls, token)
        self.output = output
        self.index = index
        self.text = text
        return self

    def __getnewargs__(self) -> tuple[int, Output, int, str]:  # type: ignore[override]
        return int(self), self.output, self.index, self.text

    @property
    def position(self) -> int:
        """Index of the token in the sequence."""
        return self.output.handle.length + self.output.ahead

    @property
    def lineage(self) -> bytes | None:
        """Lineage of the tokens before it, or None if the server sent it together with later tokens."""
        return None if self.output.ahead else self.output.handle.lineage

    @property
    def logprob(self) -> float:
        """Its raw log-probability, or an AttributeError if it was not asked for."""
        return self._last(self.output.logprobs)

    @property
    def sampled_logprob(self) -> float:
        """Its log-probability under the distribution it was drawn from, or an AttributeError as for ``logprob``."""
        return self._last(self.output.sampled_logprobs)

    @property
    def top_logprobs(self) -> tuple[TokenLogprob, ...]:
        """The most likely tokens in its place, most likely first; empty if they were not asked for."""
        return self.output.top_logprobs[-1] if self.output.top_logprobs else ()

    def _last(self, values: Sequence[float]) -> float:
        if not values:
            raise AttributeError("there is no log-probability: ask for it with logprobs=True in the policy")
        return values[-1]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Verification:
    """What a verify has decided about draft tokens.

    Attributes:
        output: The sequence and its rows; by a rule, ``output.tokens`` holds the accepted drafts, then ``next_token``.
        accepted_count: Number of accepted drafts; 0 without an acceptance rule.
        accepted_indices: Rows of the accepted drafts, in path order.
        has_next: True: the server chose a token after the last accepted row, as it does by every rule but ``none``.
        row_handles: Handles at row 0 and at each appended draft, if asked for.
    """

    output: Output
    accepted_count: int
    accepted_indices: tuple[int, ...] = ()
    has_next: bool = False
    row_handles: tuple[Handle, ...] = ()

    @property
    def next_token(self) -> Token:
        """Token after the last accepted row, which is pending, or an AttributeError if there was no acceptance rule."""
        if not self.has_next:
            raise AttributeError("there is no next token: with acceptance none, you choose it")
        return self.output.token


@dataclass(frozen=True, slots=True)
class Lease:
    """How long a sequence lives without being used.

    Attributes:
        ttl_s: Seconds as granted: what each renewal sets.
        expires_in_s: Seconds left when the server answered.
    """

    ttl_s: float
    expires_in_s: float


@dataclass(frozen=True, slots=True)
class Released:
    """What a release did.

    Attributes:
        released: For each handle: True if it was alive, False if there was nothing to release.
        freed_blocks: Blocks that went back to the pool; those still shared do not count.
    """

    released: tuple[bool, ...]
    freed_blocks: int


@dataclass(frozen=True, slots=True)
class Reservation:
    """What a reservation took.

    Attributes:
        new_blocks: For each sequence: blocks taken from the pool; 0 where its room was there already.
        free_blocks: Free blocks left in the pool.
    """

    new_blocks: tuple[int, ...]
    free_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheInfo:
    """State of one sequence.

    Attributes:
        handle: Handle at the tip.
        token_ids: Token ids up to the tip, if asked for.
        num_blocks: Blocks it holds, shared and reserved ones included.
        num_shared_blocks: Of these, blocks that other sequences hold too.
        block_ids: Blocks in token order, if asked for; equal ids in two sequences are one shared block.
        block_ref_counts: Number of sequences that hold each of ``block_ids``.
        kv_bytes: Bytes of KV that the blocks take.
        reserved_length: Length in tokens up to which room is reserved.
        first_position: First token whose KV it holds; 0, unless it drops KV outside the window.
        lowest_length: Lowest length at which it can be continued, forked or truncated; below it its KV is incomplete.
        lease: Its lease.
        create_time: When it was created, by the server's wall clock.
        durability: ``journaled``: it survives the server process; ``none``: it does not; ``unspecified``: the server is
            older than durable handles.
        tokens_to_recompute: Tokens whose KV is computed again when it is needed, as after a restart of the server; 0:
            none.
    """

    handle: Handle
    token_ids: tuple[int, ...]
    num_blocks: int
    num_shared_blocks: int
    block_ids: tuple[int, ...]
    block_ref_counts: tuple[int, ...]
    kv_bytes: int
    reserved_length: int
    first_position: int
    lowest_length: int
    lease: Lease
    create_time: datetime | None
    durability: str
    tokens_to_recompute: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSummary:
    """One line of a list of sequences.

    Attributes:
        handle_id: Loggable id.
        length: Tokens at the tip.
        num_blocks: Blocks it holds, shared ones included.
        num_shared_blocks: Of these, blocks that other sequences hold too.
        kv_bytes: Bytes of KV that the blocks take.
        reserved_length: Length in tokens up to which room is reserved.
        first_position: First token whose KV it holds; 0, unless it drops KV outside the window.
        lowest_length: Lowest length at which it can be continued, forked or truncated; below it its KV is incomplete.
        lease: Its lease.
        create_time: When it was created, by the server's wall clock.
        durability: As in ``CacheInfo``.
        tokens_to_recompute: As in ``CacheInfo``.
        handle: At the tip, with which the sequence can be used again; None unless it was asked for.
    """

    handle_id: str
    length: int
    num_blocks: int
    num_shared_blocks: int
    kv_bytes: int
    reserved_length: int
    first_position: int
    lowest_length: int
    lease: Lease
    create_time: datetime | None
    durability: str
    tokens_to_recompute: int
    handle: Handle | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """The model that is served; it does not change while the server runs.

    Attributes:
        model_id: Folder name, hub id, ``demo`` or ``paged-reference``.
        architecture: As its config.json names it.
        num_parameters: Number of weights; 0 for an executor without any.
        hidden_size: Width of the residual stream.
        num_layers: Number of decoder layers.
        num_heads: Number of query heads.
        num_kv_heads: Number of key and value heads. If it differs between layers, the largest.
        head_dim: Width of one head. If it differs between layers, the largest.
        vocab_size: Number of token ids; every id sent must be below it.
        max_sequence_length: Longest sequence served, in tokens.
        dtype: Element type it computes with, such as ``bfloat16``.
        kv_dtype: Element type of the KV cache.
        device_type: Kind of device, such as ``cpu``.
        device_name: Name of that device, for people.
        fingerprint: Roots every lineage, 32 bytes.
        eos_token_ids: Tokens that end a text.
        stop_token_ids: Tokens at which to stop by default: those and the chat template's.
        bos_token_id: Token put before a text, or None.
        attention_window: Tokens to which a row attends at most; 0: some layer attends to all of them.
        packed_types: Of the matrices that are used as they are in the file, such as ``Q4_K``, the most frequent first.
    """

    model_id: str
    architecture: str
    num_parameters: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_sequence_length: int
    dtype: str
    kv_dtype: str
    device_type: str
    device_name: str
    fingerprint: bytes
    eos_token_ids: tuple[int, ...]
    stop_token_ids: tuple[int, ...]
    bos_token_id: int | None
    attention_window: int
    packed_types: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quotas:
    """What one principal may use at most; None: no limit of its own.

    Attributes:
        handles: Live sequences.
        kv_tokens: Tokens that its blocks in use have room for; a shared block counts once.
        queued_rows: Rows of appends accepted and not finished.
        prefill_tokens_per_second: Prompt tokens per second, on average.
        retained_bytes: Bytes of outputs kept for replay; no call is refused for it.
        mask_bytes: Bytes of registered token masks, 1 KiB besides the bits of each; beyond it the least recently used
            ones are dropped.
        calls_per_second: Calls per second, on average.
        request_bytes_per_second: Bytes of requests per second, on average.
        text_bytes_per_second: Bytes of text per second that are encoded, decoded or rendered, on average.
    """

    handles: int | None
    kv_tokens: int | None
    queued_rows: int | None
    prefill_tokens_per_second: int | None
    retained_bytes: int | None
    mask_bytes: int | None
    calls_per_second: int | None
    request_bytes_per_second: int | None
    text_bytes_per_second: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Whom the credentials of a client stand for.

    Attributes:
        principal: The owner of its handles; ``local`` on a server that asks for no credentials.
        is_admin: True: it may use the AdminService.
        quotas: What it may use at most.
    """

    principal: str
    is_admin: bool
    quotas: Quotas


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What the server can do, and its limits; they do not change while the server runs, but for those of ``caller``.

    Attributes:
        features: Names of everything served, such as ``fork`` or ``chat_template``: the contract's ``Feature`` in lower
            case, without its prefix.
        max_batch_size: Most sequences in one step.
        max_step_rows: Most rows (tokens) in one step.
        max_fork_count: Most branches of one fork.
        max_top_logprobs: Largest ``top_logprobs``.
        max_draft_tokens: Most drafts in one verify.
        max_request_bytes: Largest message the server takes.
        max_reply_bytes: Largest message it sends.
        block_size: Tokens in one block of the KV pool.
        total_blocks: Blocks in the pool.
        min_ttl_s: Shortest lease, in seconds.
        max_ttl_s: Longest lease, in seconds.
        default_ttl_s: Lease when none is asked for, in seconds.
        max_handles_per_request: Most handles in one renewal, release or reservation. The client sends longer lists of
            renewals and releases in several requests.
        max_items_per_frame: Most items in one frame of a stream.
        max_text_bytes: Longest text to encode, in bytes of UTF-8.
        max_text_tokens: Most token ids to decode into text.
        max_masks_per_request: Most masks registered in one call.
        max_logprob_token_ids: Most ``logprob_token_ids`` of a policy.
        max_logit_biases: Most entries of a ``logit_bias``.
        max_stops: Most stop tokens, stop sequences and stop strings of a generation, each.
        max_stop_tokens: Longest stop sequence, in tokens.
        max_stop_bytes: Longest stop string, in bytes of UTF-8.
        supported_dtypes: Element types in which a model can be loaded.
        parameter_bytes: Bytes of all weights as loaded.
        kv_bytes_per_token: Bytes of KV of one token, over all layers.
        kv_pool_bytes: Bytes of the whole KV pool.
        caller: Who we are there, and our quotas, as they were when this was asked for. None: an older server.
    """

    features: frozenset[str]
    max_batch_size: int
    max_step_rows: int
    max_fork_count: int
    max_top_logprobs: int
    max_draft_tokens: int
    max_request_bytes: int
    max_reply_bytes: int
    block_size: int
    total_blocks: int
    min_ttl_s: float
    max_ttl_s: float
    default_ttl_s: float
    max_handles_per_request: int
    max_items_per_frame: int
    max_text_bytes: int
    max_text_tokens: int
    max_masks_per_request: int
    max_logprob_token_ids: int
    max_logit_biases: int
    max_stops: int
    max_stop_tokens: int
    max_stop_bytes: int
    supported_dtypes: tuple[str, ...]
    parameter_bytes: int
    kv_bytes_per_token: int
    kv_pool_bytes: int
    caller: Caller | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUsage:
    """Memory in use, in bytes. A figure that the platform does not give is 0.

    Attributes:
        host_resident_bytes: Resident memory of the server's process.
        host_peak_bytes: Its highest since start.
        device_allocated_bytes: Memory that the process has allocated on the device.
        device_peak_bytes: Its highest since start.
        device_total_bytes: Memory of the whole device.
    """

    host_resident_bytes: int
    host_peak_bytes: int
    device_allocated_bytes: int
    device_peak_bytes: int
    device_total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """How the server is doing now; every figure is measured.

    Counters, ``live_sequences`` and mean times are the caller's own, unless it has the role admin: then they are those
    of all callers. Counters of steps are 0 without the role.

    Attributes:
        state: ``starting``, ``ready``, ``busy``, ``draining`` or ``failed``.
        is_ready: True: requests are accepted.
        load_progress: From 0 to 1; 1 once loaded.
        load_stage: What is being loaded, for people; empty once loaded.
        executor: Name of the executor that runs decode steps.
        fallback_reason: Why the preferred executor is not the one that runs; empty: it is, or it is being prepared.
        instance: Name of this server.
        epoch: Text that is new with every server run.
        server_version: Version of the server.
        start_time: When this run began.
        live_sequences: Sequences alive: one's own; with the role admin those of all callers.
        queue_depth: Requests waiting for a step.
        free_blocks: Blocks free or reclaimable at once.
        current_batch_size: Sequences in the step that runs now, or in the last one.
        active_streams: Generations and forward passes under way.
        num_steps: Steps run since start.
        num_prefills: Appends finished since start that made a sequence or carried more than one token.
        num_decodes: Appends of one token finished since start.
        num_verifies: Verify requests finished since start.
        num_generates: Generations accepted since start.
        num_prefill_tokens: Tokens appended by prefills since start.
        num_decode_tokens: Tokens appended by decodes since start.
        num_draft_tokens: Draft tokens that verify requests brought since start.
        num_accepted_tokens: Of these, tokens that an acceptance rule accepted.
        num_errors: Requests refused or failed since start.
        avg_prefill_ns: Mean nanoseconds of the steps of a prefill; 0: none yet.
        avg_decode_ns: Mean nanoseconds of the step of a decode; 0: none yet.
        last_step_time: When the last step ended, by the server's wall clock; None: none yet, or without the role.
        memory: Memory of the server's process and its device.
        debug: How the executor does it, by name, for people: what is being prepared, its kernels, the plan of the
            device's memory, counters of steps. Anything of it may change with the server's version.
    """

    state: str
    is_ready: bool
    load_progress: float
    load_stage: str
    executor: str
    fallback_reason: str
    instance: str
    epoch: str
    server_version: str
    start_time: datetime | None
    live_sequences: int
    queue_depth: int
    free_blocks: int
    current_batch_size: int
    active_streams: int
    num_steps: int
    num_prefills: int
    num_decodes: int
    num_verifies: int
    num_generates: int
    num_prefill_tokens: int
    num_decode_tokens: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_errors: int
    avg_prefill_ns: int
    avg_decode_ns: int
    last_step_time: datetime | None
    memory: MemoryUsage
    debug: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheMetrics:
    """Counters of the KV pool. Names beginning ``num_`` count since start, the others say how it is now.

    What is counted is one's own, unless the caller has the role admin. Without it ``shared_blocks``, ``tombstones``,
    ``num_prefix_evictions`` and ``num_exhausted``, which are kept for all callers together, are 0.

    Attributes:
        empty_blocks: Blocks that hold nothing.
        cached_blocks: Blocks that only the prefix cache holds; reclaimed when needed.
        used_blocks: Blocks that sequences hold, each counted once.
        shared_blocks: Of these, blocks that two or more sequences hold.
        tombstones: Tombstones kept for released and expired sequences.
        num_created: Sequences created, forks included.
        num_forks: Branches made.
        num_truncates: Truncates and rewinds done.
        num_released: Sequences released by clients.
        num_expired: Sequences whose lease ran out.
        num_block_copies: Blocks copied because a branch wrote into a shared one.
        num_prefix_lookup_tokens: Prompt tokens looked up in the prefix cache.
        num_prefix_hit_tokens: Of these, tokens found.
        num_prefix_evictions: Cached blocks reclaimed for new sequences.
        num_given_back: Blocks that sequences gave back because they lie outside the window.
        num_exhausted: Requests refused with KV_BLOCKS_EXHAUSTED.
        num_replays: Appends answered as a replay.
        num_stale: Appends answered HANDLE_STALE.
        token_masks: Token masks registered now.
        token_mask_bytes: Bytes of these.
    """

    empty_blocks: int
    cached_blocks: int
    used_blocks: int
    shared_blocks: int
    tombstones: int
    num_created: int
    num_forks: int
    num_truncates: int
    num_released: int
    num_expired: int
    num_block_copies: int
    num_prefix_lookup_tokens: int
    num_prefix_hit_tokens: int
    num_prefix_evictions: int
    num_given_back: int
    num_exhausted: int
    num_replays: int
    num_stale: int
    token_masks: int
    token_mask_bytes: int


@dataclass(frozen=True, slots=True)
class ChatPrompt(Sequence[int]):
    """A conversation as the model's chat template writes it. It is a sequence of its token ids.

    Pass it to ``prefill``, ``generate`` and every other call that takes tokens. Nothing is added to it::

        with client.prefill(client.apply_chat_template(messages)) as cache: ...

    Attributes:
        text: The text as rendered.
        token_ids: Its token ids, special tokens parsed and none added.
        tools_ignored: Tools were given, and the text is the same without them: describe them in a message instead.
    """

    text: str
    token_ids: tuple[int, ...]
    tools_ignored: bool = False

    def __len__(self) -> int:
        return len(self.token_ids)

    def __getitem__(self, index: Any) -> Any:  # Any: a number gives an id, a slice several
        return self.token_ids[index]


@dataclass(slots=True)
class Answer:
    """What the model said in one turn; ``str`` of it is its text.

    Attributes:
        text: The text.
        tokens: Its token ids.
        finish_reason: Why it ended; ``closed`` if the reader stopped it.
        seed: Seed of the draws, or None if nothing was drawn.
        num_prompt_tokens: Tokens of the conversation up to the answer.
        num_reused_tokens: Of these, tokens whose KV was there already.
        elapsed_s: Seconds from the question to the last token, the prompt's own run included.
    """

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    seed: int | None = None
    num_prompt_tokens: int = 0
    num_reused_tokens: int = 0
    elapsed_s: float = 0.0

    def __str__(self) -> str:
        return self.text

    @property
    def tokens_per_s(self) -> float:
        """Tokens drawn for each second."""
        return len(self.tokens) / self.elapsed_s if self.elapsed_s else 0.0


@dataclass(frozen=True, slots=True)
class WarmStep:
    """One step that warming up has run.

    Attributes:
        num_sequences: Sequences in it.
        num_rows: Rows in it: as many for a decode, more for a prefill.
        run_ns: Nanoseconds it took.
    """

    num_sequences: int
    num_rows: int
    run_ns: int


@dataclass(frozen=True, slots=True)
class Warmed:
    """What warming up did.

    Attributes:
        batch_sizes: Batch sizes that are warm now, ascending.
        steps: The steps that were run for it; none where everything was warm.
    """

    batch_sizes: tuple[int, ...]
    steps: tuple[WarmStep, ...]


@dataclass(frozen=True, slots=True)
class Drained:
    """How the server was when it was asked to go down.

    Attributes:
        live_sequences: Sequences alive.
        pending_jobs: Requests waiting or running.
    """

    live_sequences: int
    pending_jobs: int


@dataclass(frozen=True, slots=True, repr=False)
class TlsConfig:
    """Certificates for an encrypted connection, each as the bytes of a PEM file.

    Attributes:
        root_certificates: Authorities to trust; None means gRPC's own list.
        private_key: The client's key, for mutual TLS.
        certificate_chain: The client's certificates, for mutual TLS.
        server_name: Name to check the server's certificate against, if it is not the target's.
    """

    root_certificates: bytes | None = None
    private_key: bytes | None = None
    certificate_chain: bytes | None = None
    server_name: str | None = None

    def __repr__(self) -> str:
        return f"TlsConfig(mutual={self.private_key is not None}, server_name={self.server_name!r})"


publish(globals(), __all__)
