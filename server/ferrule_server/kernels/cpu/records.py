"""The records that kernels read: addresses and sizes of a model, of its layers, and of one step.

Every address is that of memory owned by the executor, aligned to 64 bytes. Rows of activations have the stride that the
record names, and the memory holds some rows more than a step has, so that a kernel may read whole tiles.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import types
from numba.extending import intrinsic
from numba.np.numpy_support import from_dtype

from ferrule_server.kernels.cpu.lanes import Builder, Value, pointer

__all__ = [
    "BEST_BYTES",
    "LAYER",
    "MODEL",
    "MOST_TOP",
    "RESULT_FIELDS",
    "STEP",
    "WANTS_LOGITS",
    "WANTS_SUMS",
    "layer_at",
    "model_at",
    "step_at",
]

WANTS_LOGITS: Final = 1
"""The output needs its whole row of logits."""
WANTS_SUMS: Final = 2
"""The output needs the log of the sum of exp(logit)."""
MOST_TOP: Final = 64
"""The most of the largest logits that are kept of a row."""
RESULT_FIELDS: Final = 5
"""float64 fields of an output: best token (-1: a logit is not finite), its logit, log sum, entropy, target logit."""
BEST_BYTES: Final = 32
"""What a thread keeps of an output: largest logit, its token, whether all are finite, number of top entries, merged."""


def _record(addresses: str, sizes: str = "", numbers: str = "") -> np.dtype[Any]:
    whole = [(name, np.int64) for name in (addresses + " " + sizes).split()]
    return np.dtype([*whole, *((name, np.float32) for name in numbers.split())], align=True)


LAYER: Final = _record(
    "attention_norm attention_norm_bias qkv qkv_bias q_norm k_norm out out_bias attention_out_norm "
    "mlp_norm mlp_norm_bias gate_up gate_up_bias down down_bias mlp_out_norm "
    "input_gate input_projection input_norm pool attend_kernel merge_kernel",
    "head_dim num_kv_heads num_queries_per_kv is_value_key num_projected_heads heads_at_once groups_at_once "
    "head_stride num_qkv_units query_tiles intermediate_tiles num_activated_units "
    "pool_offset block_bytes head_bytes rotation_offset window input_offset",
    "score_scale scale",
)
"""Weights of a layer. Linear layers are packed (``dot``), all others are float32; 0: the layer has none.

Biases are as long as the packed rows. A group of ``gate_up`` holds 32 rows of gate, then the same 32 of up; without a
gate it holds 64 rows.

    input_*              of the second embedding, if there is one
    *_kernel             machine code for heads of this width (``compiled``)
    is_value_key         values are the projected keys; there are no other values in ``qkv``
    num_projected_heads  query, key and value heads in ``qkv``; without keys the layer reads K and V of an earlier one
    heads_at_once        heads of one unit of ``qkv``: 1, or as many as fit in 64 outputs
    groups_at_once       groups of 64 outputs of one unit
    head_stride          outputs from one head of a unit to the next
    num_*_units          units of ``qkv`` and ``gate_up``
    *_tiles              tiles of 32 inputs of ``out`` and ``down``
    pool                 the KV pool
    pool_offset          bytes from the begin of a block
    block_bytes, head_bytes   strides of the pool; K and V are ``num_kv_heads * head_bytes`` apart
    rotation_offset      bytes from the begin of a row of rotations
    window               how many tokens a row attends to, itself included; 0: all
    input_offset         values from the begin of a row of ``inputs``
    score_scale          multiplies the products of queries and keys
    scale                multiplies the residual stream at the end of the layer
"""

MODEL: Final = _record(
    "layers embedding head final_norm final_norm_bias input_embedding input_projection input_norm rotations "
    "linear_kernel",
    "num_layers hidden_size num_heads head_dim num_rotations vocab_size input_size is_tied has_layer_norm "
    "has_norm_after has_row_norm has_v_norm is_parallel is_gated is_gelu hidden_tiles input_tiles num_hidden_units "
    "num_input_units num_head_units",
    "norm_eps embedding_scale residual_scale score_softcap logit_scale logit_softcap input_scale projection_scale",
)
"""Sizes of a model, its features, and memory that does not change between steps.

    layers                   LAYER [num_layers]
    input_embedding          [vocab_size, num_layers * input_size], the second embedding; 0: there is none
    input_projection         packed, what the residual stream adds to it; it is normed by ``input_norm``
    input_size               values that each layer reads of it
    head_dim                 of the widest heads
    rotations                float32 [num_rotations, 2, head_dim / 2]: radians per position; what multiplies the cosine
                             and sine of each pair; zeros after the pairs of narrower heads
    has_layer_norm           norms of the residual stream subtract the mean
    has_norm_after           what attention and feed-forward part return is normed before it is added
    has_row_norm             all query heads of a row are normed together, and all key heads
    has_v_norm               each value head is normed, without a weight
    is_parallel              attention and feed-forward part read the same normed rows
    is_gated, is_gelu        activation(gate) * up, else activation(up); GELU by tanh, else SiLU
    *_softcap                scores and logits become cap * tanh(score / cap); 0: they do not
    *_kernel                 machine code (``compiled``)
    *_tiles                  tiles of 32 inputs of the linear layers that read this width
    num_*_units              units of linear layers, by what they write
    input_scale              multiplies the second embedding
    projection_scale         multiplies what is projected and added to it
"""

STEP: Final = _record(
    "token_ids positions slot_mapping begins ends ancestors block_tables output_rows "
    "tasks merges partials hidden added normed queries keys temperatures attended activated quantised rotations inputs "
    "scratch wants targets top_counts logits best sums tops results top_results",
    "is_head_only num_rows table_width num_outputs num_tasks num_merges partial_bytes "
    "normed_bytes attended_bytes activated_bytes quantised_bytes scratch_bytes logit_bytes num_stages num_threads",
)
"""One step: inputs, and memory for what is between its stages.

    is_head_only     1: the residual stream is that of the step before, for more of its rows
    token_ids, positions, slot_mapping   int32 [num_rows], as in StepBatch
    begins, ends     int32 [num_rows]: row r attends to the tokens of its sequence before ends[r]
    ancestors        int64 [num_rows]: row r sees token begins[r] + j, before ends[r], if bit j is set; 0: sees all
    block_tables     int32 [num_seqs, table_width]
    output_rows      int32 [num_outputs]
    tasks            int32 [num_tasks, TASK_FIELDS] (``attention``)
    hidden           float32 [num_rows, hidden_size], the residual stream
    added            float32 [num_rows, hidden_size], what is added to it once it is normed
    normed, attended, activated   inputs of linear layers, float32 or bfloat16, with their strides in bytes
    quantised        the same as integers, of one linear layer at a time (``quantise_row``)
    queries          float32 [num_rows, num_heads * head_dim of the layer], times ``score_scale``
    keys             float32 [num_rows, num_kv_heads * head_dim], before they are normed, if ``has_row_norm``
    temperatures     float32 [num_rows], multiplies the queries of a row; 0: nothing does
    rotations        float32 [num_rows, num_rotations, head_dim], cosines then sines
    inputs           float32 [num_rows, num_layers * input_size], what the layers read of the second embedding
    scratch          ``scratch_bytes`` for each thread
"""


def _record_at(kind: np.dtype[Any]) -> Any:
    """Return a function for kernels: the record of a kind at an address."""
    record = from_dtype(kind)

    @intrinsic
    def at(typing: Any, address: Any) -> Any:
        def emit(context: Any, builder: Builder, _signature: Any, args: Any) -> Value:
            return pointer(builder, args[0], context.get_value_type(record).pointee)

        return record(types.int64), emit

    return at


layer_at = _record_at(LAYER)
model_at = _record_at(MODEL)
step_at = _record_at(STEP)
