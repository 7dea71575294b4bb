"""The interface between the engine and an executor: a protocol and plain numpy values, without torch.

One *step* is one :meth:`Executor.run` over a :class:`StepBatch`: any mix of prefill chunks, decode rows and queries.
Index arrays are int32, C-contiguous and owned by the caller; an executor does not keep them after ``run`` returns.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from ferrule_server.model.config import ModelConfig

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]

BLOCK_SIZE = 16
"""Slots per block, unless another size is configured."""

NULL_BLOCK = 0
"""Block 0 is never handed out: unused entries of a block table refer to it."""

NO_SLOT = -1
"""Slot of a row whose K and V are not written: padding, and rows that are run again for a query."""


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """How one token is drawn from one row. Order: temperature, top-k, top-p, min-p, then one Philox draw.

    Attributes:
        temperature: At least 0; 0 selects the largest logit.
        top_k: Keep the k largest; 0 keeps all. Among equal logits the lowest ids are kept.
        top_p: Keep the smallest set of largest probabilities whose sum reaches it; in (0, 1], 1 keeps all.
        min_p: Drop tokens whose probability is below this share of the largest; in [0, 1], 0 keeps all.
        seed: 64-bit unsigned key of the Philox draw.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True, weakref_slot=True)
class TokenMask:
    """A set of tokens that may be chosen. Two masks are equal if their fingerprints are equal.

    An executor may keep a copy on its device, for as long as the mask itself is referred to.

    Attributes:
        fingerprint: 16 bytes, a digest of the bits.
        bits: uint8 [ceil(vocab_size / 8)], id i at bit (i mod 8) of byte (i div 8), 1 = allowed; read only, bits
            beyond the vocabulary are 0, at least one is 1.
    """

    fingerprint: bytes
    bits: npt.NDArray[np.uint8] = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Shaping:
    """The changes to a row's logits before a token is chosen from them. Order: penalties, bias, mask.

    The penalties count the tokens of ``StepBatch.histories``. If a token occurs c > 0 times, its logit is first divided
    (positive) or multiplied (negative) by ``repetition_penalty``. Then c * ``frequency_penalty`` and
    ``presence_penalty`` are subtracted from it.

    Attributes:
        repetition_penalty: More than 0; 1 changes nothing.
        frequency_penalty: 0 changes nothing.
        presence_penalty: 0 changes nothing.
        penalty_start: Index of the first token of the sequence that is counted.
        bias: (token id, the number to add to its logit), ids ascending and distinct.
        mask: The tokens that may be chosen; None: all.
    """

    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    penalty_start: int = 0
    bias: tuple[tuple[int, float], ...] = ()
    mask: TokenMask | None = None

    @property
    def has_penalties(self) -> bool:
        """Whether any penalty changes a logit, so that the tokens before must be counted."""
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0


@dataclass(frozen=True, slots=True)
class DraftDistribution:
    """The distribution that a draft token was drawn from. Two are equal if their digests are equal.

    Attributes:
        digest: 16 bytes over ids and probabilities as they were received.
        token_ids: int32 [n], distinct, in any order; None: ``probs`` is over the whole vocabulary.
        probs: float64 [n], each at least 0, their sum 1 within 1e-3; read only.
    """

    digest: bytes
    token_ids: Int32Array | None = field(compare=False, repr=False)
    probs: npt.NDArray[np.float64] = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class DraftSpec:
    """A draft for the token that a row predicts; it is accepted or replaced so that the output has the distribution p.

    p is the distribution of the row's ``sample`` after its shaping; q is that of the draft, divided by its sum. The
    draft x is accepted if u(ACCEPT) < p(x) / q(x). Otherwise a token is drawn with u(RESIDUAL) from max(p - q, 0),
    normalised (Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative Decoding", 2023; Chen et
    al., 2023). If a draft was chosen with certainty, q(x) is 1: the draft is accepted with probability p(x), and
    otherwise a token is drawn from p without x.

    Attributes:
        token_id: The draft.
        distribution: q; None: the draft was chosen with certainty.
    """

    token_id: int
    distribution: DraftDistribution | None = None


@dataclass(frozen=True, slots=True)
class OutputSpec:
    """The values that one output row returns; nothing else leaves the device.

    Attributes:
        full_logits: Return the whole row of raw logits, float32.
        greedy: Choose the token with the largest logit, the lowest id among equals. Excludes ``sample``.
        sample: How to draw a token; None: none is drawn.
        logprobs: Return two log-probabilities of the chosen token: under the model's own distribution (T=1), and under
            the one that it was drawn from.
        num_top_logprobs: Return the k largest log-probabilities (T=1) with their ids, largest first, ties by lowest id.
        target_id: Return the log-probability (T=1) of this token, a known next token; -1: none.
        shaping: Applied to the logits that ``greedy``, ``sample`` and ``draft`` use; other values use the raw logits.
        logprob_ids: Return the log-probabilities (T=1) of these tokens.
        entropy: Return the entropy of the raw distribution (T=1), in nats.
        hidden_state: Return the row after the final norm.
        draft: Accept this draft or draw another token, instead of a plain draw; needs ``sample``.
    """

    full_logits: bool = False
    greedy: bool = False
    sample: SampleSpec | None = None
    logprobs: bool = False
    num_top_logprobs: int = 0
    target_id: int = -1
    shaping: Shaping | None = None
    logprob_ids: tuple[int, ...] = ()
    entropy: bool = False
    hidden_state: bool = False
    draft: DraftSpec | None = None


@dataclass(slots=True)
class RowOutput:
    """The results of one output row; fields that were not requested are None (or empty).

    It is not changed after it is made. It is not frozen, because one is made for every token, and that would double the
    cost.

    Attributes:
        position: Index in its sequence of the token this row predicts (row position + 1).
        token: The chosen token id.
        model_logprob: Natural log-probability of ``token`` at T=1 under the raw logits.
        sampled_logprob: Natural log-probability of ``token`` under the distribution that it was drawn from (0.0 when
            greedy); if the row has a draft, under p, the distribution of the output.
        target_logprob: Natural log-probability (T=1) of ``OutputSpec.target_id``.
        top_ids: int32 [k], largest log-probability first.
        top_logprobs: float32 [k].
        logits: float32 [vocab_size], owned by the receiver.
        requested_logprobs: float32 [len(logprob_ids)].
        entropy: Of the raw distribution, in nats.
        hidden_state: float32 [hidden_size], owned by the receiver.
        is_accepted: Whether ``token`` is the row's draft, accepted; None if the row has no draft.
        is_finite: False if the row held NaN or infinity; then every other field is unset.
    """

    position: int
    token: int | None = None
    model_logprob: float | None = None
    sampled_logprob: float | None = None
    target_logprob: float | None = None
    top_ids: Int32Array | None = None
    top_logprobs: Float32Array | None = None
    logits: Float32Array | None = None
    requested_logprobs: Float32Array | None = None
    entropy: float | None = None
    hidden_state: Float32Array | None = None
    is_accepted: bool | None = None
    is_finite: bool = True


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One step: rows (tokens) grouped by sequence, in order.

    Row r of sequence s attends to the KV at positions 0..positions[r] of that sequence, read from the pool through
    ``block_tables[s]``; the KV of rows with a slot is written before any row reads it.

    Attributes:
        token_ids: int32 [num_rows].
        positions: int32 [num_rows], index of each token in its sequence; consecutive inside a sequence.
        slot_mapping: int32 [num_rows], block_id * block_size + offset to write K and V at; NO_SLOT: nothing is written.
        cu_seqlens_q: int32 [num_seqs + 1], first row of each sequence; the last entry is num_rows.
        kv_lens: int32 [num_seqs], tokens in the pool once this step is written (= last position + 1).
        block_tables: int32 [num_seqs, max_blocks], block ids in order, NULL_BLOCK after the last.
        output_rows: int32 [num_outputs], rows that go through the output head, ascending.
        output_specs: What each output row returns; len == num_outputs.
        histories: For each output whose shaping has penalties, the tokens that they count: int32, those of its sequence
            from ``penalty_start`` up to the row's own. None for the other outputs; empty if no output has penalties.
        feedback: int32 [num_rows], index of an output row of the step submitted just before: the token of this row is
            the one chosen there, and ``token_ids`` is ignored; -1: the token is in ``token_ids``. None: all tokens are
            there. Only for :meth:`PipelinedExecutor.submit`.
    """

    token_ids: Int32Array
    positions: Int32Array
    slot_mapping: Int32Array
    cu_seqlens_q: Int32Array
    kv_lens: Int32Array
    block_tables: Int32Array
    output_rows: Int32Array
    output_specs: tuple[OutputSpec, ...]
    histories: tuple[Int32Array | None, ...] = ()
    feedback: Int32Array | None = None

    @property
    def num_rows(self) -> int:
        """Number of tokens in the step."""
        return len(self.token_ids)

    @property
    def num_seqs(self) -> int:
        """Number of sequences in the step; a sequence may be in several groups only if it is only read."""
        return len(self.kv_lens)


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """The model that an executor runs, as ``ModelInfo`` of the contract describes it.

    Attributes:
        config: Its network, and the only record of its sizes.
        model_id: Folder name, hub id, ``demo`` or ``paged-reference``.
        num_parameters: Distinct parameters (tied ones once).
        max_context: Longest sequence in tokens that the model and the server allow.
        dtype: Type of the weights in memory: ``float32``, ``bfloat16`` or ``float16``; ``int8`` or ``int4`` if they are
            quantised.
        fingerprint: 32 bytes over weights, dtypes and everything else that determines the KV; root of the lineage.
        weights_bytes: Bytes of the weights in memory.
        packed_types: Of the matrices that are kept as they are in the file, by the names of its format, the most
            frequent first.
    """

    config: ModelConfig
    model_id: str
    num_parameters: int
    max_context: int
    dtype: str
    fingerprint: bytes
    weights_bytes: int = 0
    packed_types: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ExecutorInfo:
    """The description of an executor. All of it is fixed at start.

    Attributes:
        name: ``torch``, ``paged-reference``, ...
        device: ``cpu`` or ``cuda:0``.
        kv_dtype: Data type of K and V in the pool: ``float32``, ``bfloat16`` or ``float16``.
        block_size: Slots per block, a power of two.
        num_blocks: Blocks in the pool, the null block included.
        bytes_per_block: Bytes of one block, K and V of all layers that write them: its rows in all arrays of the pool.
        supported_dtypes: Types of weights that this executor can run.
        fallback_reason: Why a faster executor is not in use; empty if none was requested.
        device_name: The name that the driver reports; empty if it is unknown.
        kernel_set: Name of the kernels whose bits are promised: the same tokens give the same bits, whatever is around
            them. Empty: nothing is promised.
        kernel_set_reason: Why these kernels, for people.
    """

    name: str
    device: str
    kv_dtype: str
    block_size: int
    num_blocks: int
    bytes_per_block: int
    model: ModelDescription
    supported_dtypes: tuple[str, ...] = ("float32",)
    fallback_reason: str = ""
    device_name: str = ""
    kernel_set: str = ""
    kernel_set_reason: str = ""

    @property
    def numerics_fingerprint(self) -> bytes:
        """32 bytes that are equal if the same tokens give the same bits of KV, for receipts and stored blocks."""
        names = (self.name, self.kernel_set, self.kv_dtype, str(self.block_size))
        return hashlib.sha256(b"\0".join([self.model.fingerprint, *(name.encode() for name in names)])).digest()


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The uses of a device's memory, in bytes.

    Attributes:
        total: All memory of the device.
        weights: The weights of the model.
        kv_pool: The blocks.
        buffers: Everything else that a step on the kernels needs.
        workspace: Reserved for torch: prefill and outputs that the kernels do not cover.
        graphs: Used by captured graphs so far; in a plan made before, reserved for them.
        free: The rest.
    """

    total: int
    weights: int
    kv_pool: int
    buffers: int
    workspace: int
    graphs: int
    free: int


@dataclass(frozen=True, slots=True)
class ExecutorState:
    """The state of a :class:`ReportingExecutor`; fields about GPUs keep their defaults elsewhere.

    Attributes:
        name: What runs the next decode step: ``numba-cuda`` or ``torch``.
        preparation: The preparation in progress, for people: ``capturing graphs, 3 left``; empty if there is none.
        fallback_reason: Why torch runs every step permanently, or why kernels run slower than they could;
            empty if there is nothing to report.
        memory: The uses of the memory; None if no device was found.
        captured_batch_sizes: Rows of the graphs that exist, ascending.
        num_graph_steps: Steps that replayed a graph.
        num_launched_steps: Steps whose kernels were launched one by one, because there was no graph.
        num_torch_steps: Steps, or parts of steps, that torch ran.
        device_allocated_bytes: Bytes that this process holds of the device's memory; 0 if they are not counted.
        device_peak_bytes: The most that it held.
    """

    name: str
    preparation: str = ""
    fallback_reason: str = ""
    memory: MemoryPlan | None = None
    captured_batch_sizes: tuple[int, ...] = ()
    num_graph_steps: int = 0
    num_launched_steps: int = 0
    num_torch_steps: int = 0
    device_allocated_bytes: int = 0
    device_peak_bytes: int = 0

    @property
    def is_torch_for_good(self) -> bool:
        """Whether torch runs every step permanently."""
        return self.name == "torch" and bool(self.fallback_reason)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The results of a step.

    Attributes:
        rows: One per output row, in the order of ``StepBatch.output_rows``.
        paths: How each of these rows was computed: ``graph`` (kernels in a graph), ``kernels`` (launched one by one),
            either with ``+torch`` if torch chose from their logits, or ``torch``. Empty if the executor has one path.
    """

    rows: list[RowOutput] = field(default_factory=list)
    paths: Sequence[str] = field(default=(), compare=False)


class Executor(Protocol):
    """Runs steps over a block pool that it owns. Called only from the engine thread.

    A ``run`` that raises leaves every KV slot outside ``slot_mapping`` untouched.

    The pool is one array for each of ``ModelConfig.kv_groups``, the layers that write K and V and have equal heads:
    ``[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]``, of type ``ExecutorInfo.kv_dtype``, contiguous,
    allocated once and zeroed; 0 is K, 1 is V. ``num_layers`` counts the layers of the group; a layer that reads the K
    and V of an earlier one is in no group. Most models have a single group, and GPU kernels run only those. A block is
    the row of that index in every array. Its bytes, as they are transferred, are these rows one after another, in the
    order of the groups: ``bytes_per_block`` in all.
    """

    @property
    def info(self) -> ExecutorInfo:
        """The description of this executor; constant."""

    def run(self, batch: StepBatch) -> StepResult:
        """Write the KV of the step's rows and return what its output rows request.

        Raises:
            DeviceLost: The device is gone permanently and no KV can be trusted.
        """

    def copy_blocks(self, block_pairs: Int32Array) -> None:
        """Copy whole blocks, all layers: int32 [n, 2] of (source, destination), destinations distinct."""

    def copy_slots(self, slot_pairs: Int32Array) -> None:
        """Copy single slots, all layers: int32 [n, 2] of (source, destination), read before any is written."""

    def read_blocks(self, block_ids: Int32Array) -> npt.NDArray[np.uint8]:
        """Return the raw bytes of blocks: uint8 [n, bytes_per_block], a copy."""

    def write_blocks(self, block_ids: Int32Array, data: npt.NDArray[np.uint8]) -> None:
        """Overwrite blocks with raw bytes of the same shape as :meth:`read_blocks` returns."""

    def close(self) -> None:
        """Free the device; the executor is not used again."""


class PendingStep(Protocol):
    """A step that was submitted and may still be in the queue."""

    def result(self) -> StepResult:
        """Wait for the step and return what its output rows request; called once.

        Raises:
            DeviceLost: As :meth:`Executor.run`.
        """


@runtime_checkable
class ReportingExecutor(Executor, Protocol):
    """An executor whose state changes while it runs."""

    @property
    def state(self) -> ExecutorState:
        """The current state; read from any thread, a new value whenever something changes."""


@runtime_checkable
class PipelinedExecutor(ReportingExecutor, Protocol):
    """An executor that accepts the next step before the results of the last one are read, and prepares in between.

    Steps, copies and transfers take effect in the order of the calls. At most two submitted steps are pending at once.
    The caller reads their results in order, even a result that is no longer needed. It does not call ``run`` while a
    step is pending.
    """

    def can_submit(self, batch: StepBatch) -> bool:
        """Return whether :meth:`submit` would accept this batch without waiting for the device.

        Such a batch has one row per sequence, and the device alone computes all values that its outputs return.
        """

    def submit(self, batch: StepBatch) -> PendingStep:
        """Put a step that :meth:`can_submit` accepts into the device's queue.

        Raises:
            DeviceLost: As :meth:`Executor.run`.
        """

    def tend(self) -> bool:
        """Do one piece of preparation (load kernels, capture a graph) and return whether there is more to do.

        Called between steps, while nothing is pending, so a caller waits for at most one piece.

        Raises:
            DeviceLost: As :meth:`Executor.run`.
        """


class DeviceLost(Exception):
    """The device is gone permanently; every handle is lost, and the process should end."""
