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
    "input_norm qkv qkv_bias q_norm k_norm out out_bias post_norm gate_up gate_up_bias down down_bias pool_offset"
)
"""Weights of a layer. Linear layers are packed (``dot``), all others are float32; 0: the layer has none.

Biases are as long as the packed rows. A group of ``gate_up`` holds 32 rows of gate, then the same 32 of up.
"""

MODEL: Final = _record(
    "layers embedding head final_norm frequencies pool linear_kernel attend_kernel merge_kernel",
    "num_layers hidden_size num_heads num_kv_heads head_dim num_queries_per_kv vocab_size is_tied "
    "hidden_tiles query_tiles intermediate_tiles "
    "heads_at_once groups_at_once head_stride num_qkv_units num_hidden_units num_activated_units num_head_units "
    "block_bytes head_bytes",
    "norm_eps score_scale",
)
"""Sizes of a model, and memory that does not change between steps.

    layers                   LAYER [num_layers]
    frequencies              float32 [head_dim / 2], radians per position
    *_kernel                 machine code (``compiled``)
    *_tiles                  tiles of 32 inputs of the linear layers that read this width
    heads_at_once            query, key and value heads of one unit of ``qkv``: 1, or as many as fit in 64 outputs
    groups_at_once           groups of 64 outputs of one unit
    head_stride              outputs from one head of a unit to the next
    num_qkv_units            units of ``qkv``
    num_*_units              units of the other linear layers, by what they write
    block_bytes, head_bytes   strides of the KV pool; K and V are ``num_kv_heads * head_bytes`` apart
"""

STEP: Final = _record(
    "token_ids positions slot_mapping begins ends ancestors block_tables output_rows "
    "tasks merges partials hidden normed queries attended activated quantised rotations scratch "
    "wants targets top_counts logits best sums tops results top_results",
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
    normed, attended, activated   inputs of linear layers, float32 or bfloat16, with their strides in bytes
    quantised        the same as integers, of one linear layer at a time (``quantise_row``)
    queries          float32 [num_rows, num_heads * head_dim], divided by sqrt(head_dim)
    rotations        float32 [num_rows, head_dim], cosines then sines
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
