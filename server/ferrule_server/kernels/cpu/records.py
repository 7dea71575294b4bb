"""The records that kernels read: a thread, the stages of a model, its layers, the model itself, and one step.

Every address is that of memory owned by the executor, aligned to 64 bytes. Rows of activations have the stride that the
record names, and the memory holds some rows more than a step has, so that a kernel may read whole tiles.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import types
from numba.np.numpy_support import from_dtype

from ferrule_server.kernels.cpu.kernel import Record, kernel, operation
from ferrule_server.kernels.cpu.lanes import I8, Builder, Value, pointer

WANTS_LOGITS: Final = 1
"""The output needs its whole row of logits."""
WANTS_SUMS: Final = 2
"""The output needs the log of the sum of exp(logit)."""
MOST_TOP: Final = 64
"""The most of the largest logits that are kept of a row."""
RESULT_FIELDS: Final = 9
"""float64 fields of an output: best token (-1: a logit is not finite), its logit, log sum, entropy, target logit; the
token chosen, its weight and that of all tokens, and whether it is the draft, accepted."""
BEST_BYTES: Final = 32
"""What a thread keeps of an output: largest logit, its token, whether all are finite, number of top entries, merged."""


def _record(addresses: str, sizes: str = "", numbers: str = "", doubles: str = "") -> np.dtype[Any]:
    whole = [(name, np.int64) for name in (addresses + " " + sizes).split()]
    wide = [(name, np.float64) for name in doubles.split()]
    return np.dtype([*whole, *wide, *((name, np.float32) for name in numbers.split())], align=True)


THREAD: Final = _record("model step sync shaped weights sums bins digits tokens", "number")
"""What one thread of a step is called with: MODEL, STEP, the sync block (``sync``), its own memory for the choice of a
token, and which thread it is.

    shaped, weights  float64 [whole runs of tokens], logits and weights of a row; -inf and 0 after the vocabulary
    sums             float64, of the weights of each run
    bins             float64 [bins, 2], what the even and the odd tokens of a bin weigh
    digits           int16 [whole runs of tokens], the bin of each token
    tokens           int32 [whole runs of tokens], those that are still looked at
"""

STAGE: Final = _record(
    "kernel multiply layer following weight bias inputs out kept",
    "kind rows num_together claim num_units unit_bytes expert_bytes groups_at_once sum_bytes num_tiles input_bytes "
    "out_bytes kept_bytes size first_head end_head is_open is_int8",
    "factor",
)
"""One stage of a step, prepared when a model is loaded; which fields have a meaning depends on its kind (``kinds``).

    kernel           machine code that claims the stage's work; 0: its rows are shared out
    multiply         machine code of a linear layer for matrices of one kind
    layer            LAYER, of what follows heads
    following        STAGE of the next linear layer, whose weights a thread prefetches when it has no work
    weight, bias     of a linear layer or a norm; 0: there is none. Biases are as long as the packed rows
    inputs           rows that are read, in steps of ``input_bytes``
    rows             of what its rows are (``Rows``)
    num_together     stages from this one on between two barriers, all of the same rows; 0 after the first of them
    claim            number of the stage among those whose work is claimed
    num_units        units of a linear layer, or of one expert, of ``unit_bytes``
    expert_bytes     from the weights of one expert to those of the next; 0: they are not those of experts
    groups_at_once   groups of 64 outputs of a unit, which are ``sum_bytes`` of each row
    num_tiles        tiles of 32 inputs
    out              rows that are written, in steps of ``out_bytes``: inputs of linear layers
    kept             float32 rows of ``size`` values, in steps of ``kept_bytes``: written by ``KEEP``, read later
    first_head, end_head   which of the query, key and value heads it projects
    is_int8          inputs become int8, else int16
    is_open          the next stage does not depend on this one: there is no barrier between them
    factor           multiplies what is written or added
"""

LAYER: Final = _record(
    "q_norm k_norm pool",
    "head_dim num_kv_heads num_queries_per_kv is_value_key heads_at_once head_stride "
    "pool_offset block_bytes head_bytes rotation_offset window",
    "score_scale",
)
"""The heads of a layer.

    q_norm, k_norm       float32 weights of norms; 0: heads are not normed
    is_value_key         values are the projected keys; there are no other values among the projected heads
    heads_at_once        heads of one unit: 1, or as many as fit in 64 outputs
    head_stride          outputs from one head of a unit to the next
    pool                 the KV pool
    pool_offset          bytes from the begin of a block
    block_bytes, head_bytes   strides of the pool; K and V are ``num_kv_heads * head_bytes`` apart
    rotation_offset      bytes from the begin of a row of rotations
    window               how many tokens a row attends to, itself included; 0: all
    score_scale          multiplies the products of queries and keys
"""

MODEL: Final = _record(
    "stages embedding look_up input_embedding rotations",
    "num_stages first_of_head num_claims num_layers hidden_size num_heads head_dim num_rotations vocab_size input_size "
    "has_v_norm is_gated is_gelu num_experts num_used is_sigmoid is_normalised",
    "norm_eps embedding_scale score_softcap logit_scale logit_softcap input_scale expert_scale",
)
"""Sizes of a model, its features, and memory that does not change between steps.

    stages                   STAGE [num_stages]; those from ``first_of_head`` on compute the outputs
    num_claims               how many of them have work that is claimed
    look_up                  machine code that reads a row of a packed embedding; 0: its rows are as they were stored
    input_embedding          [vocab_size, num_layers * input_size], the second embedding; 0: there is none
    input_size               values that each layer reads of it
    head_dim                 of the widest heads
    rotations                float32 [num_rotations, 2, head_dim / 2]: radians per position; what multiplies the cosine
                             and sine of each pair; zeros after the pairs of narrower heads
    has_v_norm               each value head is normed, without a weight
    is_gated, is_gelu        activation(gate) * up, else activation(up); GELU by tanh, else SiLU
    num_experts, num_used    experts of a layer, and how many of them a row passes; 0: there are none
    is_sigmoid               scores become weights one by one, else by a softmax
    is_normalised            the weights of a row are divided by their sum; ``expert_scale`` multiplies them
    *_softcap                scores and logits become cap * tanh(score / cap); 0: they do not
    input_scale              multiplies the second embedding
"""

STEP: Final = _record(
    "token_ids positions slot_mapping begins ends ancestors block_tables output_rows "
    "tasks merges partials hidden added ups normed queries keys temperatures attended activated quantised rotations "
    "inputs scores expert_ids expert_weights places pair_rows segments counts pair_normed pair_quantised "
    "pair_activated pair_ups pair_outs scratch wants targets top_counts choices logits best sums tops results "
    "top_results",
    "is_head_only num_rows table_width num_outputs num_choices num_tasks num_merges partial_bytes "
    "normed_bytes attended_bytes scratch_bytes logit_bytes num_threads",
)
"""One step: inputs, and memory for what is between its stages.

    is_head_only     1: the residual stream is that of the step before, for more of its rows
    token_ids, positions, slot_mapping   int32 [num_rows], as in StepBatch
    begins, ends     int32 [num_rows]: row r attends to the tokens of its sequence before ends[r]
    ancestors        int64 [num_rows]: row r sees token begins[r] + j, before ends[r], if bit j is set; 0: sees all
    block_tables     int32 [num_seqs, table_width]
    output_rows      int32 [num_outputs]
    choices          CHOICE [num_outputs], of which ``num_choices`` choose a token
    tasks            int32 [num_tasks, TASK_FIELDS] (``attention``)
    hidden           float32 [num_rows, hidden_size], the residual stream
    added            float32 [num_rows, hidden_size], what is added to it once it is normed
    ups              float32 [num_rows, at least intermediate_size], the outputs of ``up``, for ``gate``
    normed, attended, activated   inputs of linear layers, float32 or bfloat16, with a stride in bytes each
    quantised        the same as integers, of one linear layer at a time (``quantise_row``)
    scores           float32 [num_rows, whole 64 of num_experts]
    expert_ids, expert_weights, places   [num_rows, num_used]: int32; float32; int32, the number of the pair
    pair_rows        int32 [pairs], the row of each; pairs are sorted by expert, then by row
    segments         int32 [1 + n, 4]: n; then expert, first pair and number of pairs that are multiplied together
    counts           int32 [num_experts], scratch
    pair_*           as above, a row for each pair; pair_outs: float32 [pairs, hidden_size]
    queries          float32 [num_rows, num_heads * head_dim of the layer], times ``score_scale``
    keys             float32 [num_rows, num_kv_heads * head_dim], before all of a row are normed together
    temperatures     float32 [num_rows], multiplies the queries of a row; 0: nothing does
    rotations        float32 [num_rows, num_rotations, head_dim], cosines then sines
    inputs           float32 [num_rows, num_layers * input_size], what the layers read of the second embedding
    scratch          ``scratch_bytes`` for each thread
"""

CHOICE: Final = _record(
    "history mask bias drafts probabilities",
    "is_drawn num_counted num_biased top_k draft num_drafts seed position",
    doubles="repetition frequency presence factor top_p min_p",
)
"""How the token of an output is chosen, from which logits; the fields of Shaping, SampleSpec and DraftSpec.

    history          int32 [num_counted], tokens that penalties count
    mask             one bit for each token, 1: allowed; 0: neither mask nor penalties nor bias change the logits
    bias             int64 token and float64 number [num_biased]
    is_drawn         0: nothing is chosen; 1: the largest logit; 2: one draw
    draft            token that is accepted or replaced; -1: none
    drafts           int32 [num_drafts], the tokens of the draft's distribution; 0: the whole vocabulary
    probabilities    float64, of these tokens
    seed, position   of the random numbers
    factor           1 / temperature
"""


def _record_at(kind: np.dtype[Any]) -> Any:
    """Return a function for kernels: the record of a kind at an address."""

    @operation(from_dtype(kind), types.int64)
    def at(builder: Builder, address: Value) -> Value:
        return pointer(builder, address, ir.ArrayType(I8, kind.itemsize))

    return at


choice_at = _record_at(CHOICE)
layer_at = _record_at(LAYER)
model_at = _record_at(MODEL)
stage_at = _record_at(STAGE)
step_at = _record_at(STEP)
thread_at = _record_at(THREAD)


@kernel
def sums_of(here: Record, stage: Record) -> tuple[int, int]:
    """Return the address of the sums of a unit, in the scratch memory of a thread, and the bytes of a row of them."""
    step = step_at(here.step)
    return step.scratch + here.number * step.scratch_bytes, stage.sum_bytes
