"""What the engine knows of an executor: a protocol and plain numpy values. No torch here.

One *step* is one :meth:`Executor.run` over a :class:`StepBatch`: any mix of prefill chunks, decode rows and queries.
Index arrays are int32, C-contiguous, owned by the caller and not kept after ``run`` returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from ferrule_server.model.config import ModelConfig

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]

BLOCK_SIZE = 16
"""Slots per block, unless something else is asked for."""

NULL_BLOCK = 0
"""Block 0 is never handed out: unused entries of a block table point at it."""

NO_SLOT = -1
"""Slot of a row whose K and V are not written: padding, and rows run again for a query."""


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """How one token is drawn from one row. Order: temperature, top-k, top-p, min-p, then one Philox draw.

    Attributes:
        temperature: At least 0; 0 takes the largest logit.
        top_k: Keep the k largest; 0 keeps all. Ties at the border go to the lowest ids.
        top_p: Keep the smallest set of largest probabilities whose sum reaches it; in (0, 1], 1 keeps all.
        min_p: Drop tokens below this share of the largest probability; in [0, 1], 0 keeps all.
        seed: 64-bit unsigned key of the Philox draw.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True, weakref_slot=True)
class TokenMask:
    """A set of tokens that may be chosen; two are equal where their fingerprints are.

    An executor may keep what it makes of one on its device, for as long as the mask itself is referred to.

    Attributes:
        fingerprint: 16 bytes, a digest of the bits.
        bits: uint8 [ceil(vocab_size / 8)], id i at bit (i mod 8) of byte (i div 8), 1 = allowed; read only, bits
            beyond the vocabulary are 0, at least one is 1.
    """

    fingerprint: bytes
    bits: npt.NDArray[np.uint8] = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Shaping:
    """What changes a row's logits before a token is chosen from them. Order: penalties, bias, mask.

    The penalties count the tokens of ``StepBatch.histories``: with c occurrences of a token its logit is first divided
    (positive) or multiplied (negative) by ``repetition_penalty`` where c > 0, then loses c * ``frequency_penalty``, and
    ``presence_penalty`` where c > 0.

    Attributes:
        repetition_penalty: More than 0; 1 changes nothing.
        frequency_penalty: 0 changes nothing.
        presence_penalty: 0 changes nothing.
        penalty_start: Index of the first token of the sequence that counts.
        bias: (token id, what is added to its logit), ids ascending and distinct.
        mask: Tokens that may be chosen; None: all.
    """

    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    penalty_start: int = 0
    bias: tuple[tuple[int, float], ...] = ()
    mask: TokenMask | None = None

    @property
    def has_penalties(self) -> bool:
        """Whether the tokens before count."""
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0


@dataclass(frozen=True, slots=True)
class DraftLaw:
    """The law a draft token was drawn from; two are equal where their digests are.

    Attributes:
        digest: 16 bytes over ids and probabilities as they came.
        token_ids: int32 [n], distinct, in any order; None: ``probs`` is over the whole vocabulary.
        probs: float64 [n], each at least 0, their sum 1 within 1e-3; read only.
    """

    digest: bytes
    token_ids: Int32Array | None = field(compare=False, repr=False)
    probs: npt.NDArray[np.float64] = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class DraftSpec:
    """A draft for the token that a row predicts, to be accepted or replaced so that the law drawn from stays p.

    p is the law of the row's ``sample`` after its shaping, q the draft's. The draft x is accepted where
    u(ACCEPT) < p(x) / q(x); else a token is drawn with u(RESIDUAL) from max(p - q, 0), normalised (Leviathan, Kalman
    and Matias, "Fast Inference from Transformers via Speculative Decoding", 2023; Chen et al., 2023). A draft chosen
    with certainty has q(x) = 1: accepted with probability p(x), else drawn from p without x. q is divided by its sum.

    Attributes:
        token_id: The draft.
        law: q; None: chosen with certainty.
    """

    token_id: int
    law: DraftLaw | None = None


@dataclass(frozen=True, slots=True)
class OutputSpec:
    """What is wanted of one output row; nothing else leaves the device.

    Attributes:
        full_logits: The whole row of raw logits, float32.
        greedy: The token with the largest logit, the lowest id among equals. Excludes ``sample``.
        sample: Draw a token; None draws none.
        logprobs: log softmax of the chosen token: the model's own (T=1) and that of the law drawn from.
        num_top_logprobs: The k largest log-probabilities (T=1) with their ids, largest first, ties by lowest id.
        target_id: Log-probability (T=1) of this token, -1 for none (scoring of a known next token).
        shaping: Applied to what ``greedy``, ``sample`` and ``draft`` choose from; all other values are of the raw ones.
        logprob_ids: Log-probabilities (T=1) of these tokens.
        entropy: Of the raw distribution (T=1), in nats.
        hidden_state: The row after the final norm.
        draft: Accept this draft or draw another token, in place of a plain draw; needs ``sample``.
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
    """The results of one output row; fields that were not asked for are None (or empty).

    Nobody changes one once it is made; it is not frozen because one is made for every token, and that would double
    its cost.

    Attributes:
        position: Index in its sequence of the token this row predicts (row position + 1).
        token: The chosen token id.
        model_logprob: Natural log-probability of ``token`` at T=1 under the raw logits.
        sampled_logprob: Natural log-probability of ``token`` under the law it was drawn from (0.0 when greedy); where
            the row has a draft, under p, the law of what comes out.
        target_logprob: Natural log-probability (T=1) of ``OutputSpec.target_id``.
        top_ids: int32 [k], largest log-probability first.
        top_logprobs: float32 [k].
        logits: float32 [vocab_size], owned by the receiver.
        requested_logprobs: float32 [len(logprob_ids)].
        entropy: Of the raw distribution, in nats.
        hidden_state: float32 [hidden_size], owned by the receiver.
        is_accepted: Whether ``token`` is the row's draft, accepted; None where there was none.
        is_finite: False when the row held NaN or infinity; then every other field is unset.
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
        slot_mapping: int32 [num_rows], block_id * block_size + offset to write K and V at, or NO_SLOT: keep the pool.
        cu_seqlens_q: int32 [num_seqs + 1], first row of each sequence; the last entry is num_rows.
        kv_lens: int32 [num_seqs], tokens in the pool once this step is written (= last position + 1).
        block_tables: int32 [num_seqs, max_blocks], block ids in order, NULL_BLOCK beyond the last.
        output_rows: int32 [num_outputs], rows that go through the output head, ascending.
        output_specs: What each output row returns; len == num_outputs.
        histories: For each output whose shaping has penalties, the tokens they count: int32, those of its sequence
            from ``penalty_start`` up to the row's own. None for the others; empty where there are none at all.
        feedback: int32 [num_rows]: the row's token is the one that so many-th output row of the step submitted just
            before chooses, which the host need not know yet (``token_ids`` says nothing then); -1: it is in
            ``token_ids``. None: all are. For :meth:`PipelinedExecutor.submit` only.
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
        """Number of sequences in the step; one sequence may stand in several groups only as a reader."""
        return len(self.kv_lens)


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """The model that an executor runs, as ``ModelInfo`` of the contract describes it.

    Attributes:
        config: Its network; the one record of its sizes.
        model_id: Folder name, hub id, ``demo`` or ``paged-reference``.
        num_parameters: Distinct parameters (tied ones once).
        max_context: Longest sequence in tokens the model and the server allow.
        dtype: Of the weights in memory: ``float32`` or ``bfloat16``.
        fingerprint: 32 bytes over weights, dtypes and everything else that decides the KV; root of the lineage.
        weights_bytes: Bytes of the weights in memory.
    """

    config: ModelConfig
    model_id: str
    num_parameters: int
    max_context: int
    dtype: str
    fingerprint: bytes
    weights_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ExecutorInfo:
    """What an executor is and what it holds. All of it is fixed at start.

    Attributes:
        name: ``torch``, ``paged-reference``, ...
        device: ``cpu`` or ``cuda:0``.
        kv_dtype: Data type of K and V in the pool.
        block_size: Slots per block, a power of two.
        num_blocks: Blocks in the pool, the null block included.
        bytes_per_block: K and V of all layers of one block.
        supported_dtypes: Weight types this executor can run.
        fallback_reason: Why a faster executor is not in use; empty when none was wanted.
        device_name: Of the device, as its driver says it; empty: nobody has asked it.
        activation_bytes_per_row: Memory of intermediate tensors for each row of a step, measured; 0: not known.
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
    activation_bytes_per_row: int = 0


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What the memory of a device is for, in bytes.

    Attributes:
        total: Of the device.
        weights: Of the model.
        kv_pool: Blocks.
        buffers: Everything a step on the kernels needs besides.
        workspace: Kept for torch: prefill and outputs that the kernels do not cover.
        graphs: Taken by captured graphs so far; in a plan made before, what is kept for them.
        free: Left over.
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
    """How a :class:`PipelinedExecutor` is doing.

    Attributes:
        name: What runs the next decode step: ``numba-cuda`` or ``torch``.
        preparation: What is still being prepared, for people: ``compiling kernels, 23 of 42``; empty: nothing.
        fallback_reason: Why torch runs every step for good, or which steps do not run the fast way, and why; empty if
            there is nothing to report.
        memory: What the memory is for; None where no device was found.
        captured_batch_sizes: Rows of the graphs that exist, ascending.
        num_graph_steps: Steps that replayed a graph.
        num_launched_steps: Steps whose kernels were launched one by one, because there was no graph.
        num_torch_steps: Steps, or parts of steps, that torch ran.
        device_allocated_bytes: What this process holds of the device's memory now; 0 where nobody counts it.
        device_peak_bytes: Most that it held.
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
        """Whether torch runs every step, and will."""
        return self.name == "torch" and bool(self.fallback_reason)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step returned.

    Attributes:
        rows: One per output row, in the order of ``StepBatch.output_rows``.
        paths: How each of these rows was computed: ``graph`` (kernels in a graph), ``kernels`` (launched one by one),
            either with ``+torch`` if torch chose from their logits, or ``torch``. Empty if the executor has one way.
    """

    rows: list[RowOutput] = field(default_factory=list)
    paths: Sequence[str] = field(default=(), compare=False)


class Executor(Protocol):
    """Runs steps over a block pool it owns. Called from the engine thread only.

    A ``run`` that raises leaves every KV slot outside ``slot_mapping`` untouched. The KV pool is laid out
    ``[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]``.
    """

    @property
    def info(self) -> ExecutorInfo:
        """What this executor is; constant."""
        ...

    def run(self, batch: StepBatch) -> StepResult:
        """Write the KV of the step's rows and return what its output rows asked for.

        Raises:
            DeviceLost: The device is gone for good and no KV can be trusted.
        """
        ...

    def copy_blocks(self, block_pairs: Int32Array) -> None:
        """Copy whole blocks, all layers: int32 [n, 2] of (source, destination), destinations distinct."""
        ...

    def copy_slots(self, slot_pairs: Int32Array) -> None:
        """Copy single slots, all layers: int32 [n, 2] of (source, destination), read before any is written."""
        ...

    def read_blocks(self, block_ids: Int32Array) -> npt.NDArray[np.uint8]:
        """Return the raw bytes of blocks: uint8 [n, bytes_per_block], a copy."""
        ...

    def write_blocks(self, block_ids: Int32Array, data: npt.NDArray[np.uint8]) -> None:
        """Overwrite blocks with raw bytes of the same shape as :meth:`read_blocks` returns."""
        ...

    def close(self) -> None:
        """Free the device; the executor is not used again."""
        ...


class PendingStep(Protocol):
    """A step that was submitted and may not have run yet."""

    def result(self) -> StepResult:
        """Wait for the step and return what its output rows asked for; once.

        Raises:
            DeviceLost: As :meth:`Executor.run`.
        """
        ...


@runtime_checkable
class PipelinedExecutor(Executor, Protocol):
    """An executor that takes the next step before the last one's results are read, and prepares things in between.

    Steps, copies and transfers act in the order of the calls. At most two submitted steps are pending at a time, and
    their results are asked for in order; ``run`` is not called while one is pending. A step whose result nobody wants
    is asked for it all the same.
    """

    @property
    def state(self) -> ExecutorState:
        """What it is doing and how; from any thread, a new value whenever something changes."""
        ...

    def can_submit(self, batch: StepBatch) -> bool:
        """Return whether :meth:`submit` would take this batch without waiting for the device.

        One row per sequence, each with an output whose values leave the device without the host's help.
        """
        ...

    def submit(self, batch: StepBatch) -> PendingStep:
        """Put a step that :meth:`can_submit` into the device's queue.

        Raises:
            DeviceLost: As :meth:`Executor.run`.
        """
        ...

    def tend(self) -> bool:
        """Do one piece of preparation (load kernels, capture a graph) and return whether there is more to do.

        Called between steps, when nothing is pending: who is served waits for one piece at most.

        Raises:
            DeviceLost: As :meth:`Executor.run`.
        """
        ...


class DeviceLost(Exception):
    """The device is gone for good: every handle is lost and the process should end."""
