"""Every buffer of a step on the kernels, allocated once: nothing is allocated later, and graphs hold their addresses.

What the host writes for a step lies side by side in ``inputs``, what it reads in ``results``, so that one copy each way
does; their fields are in ``input`` and ``result``::

    inputs    token_ids positions slot_mapping logits_rows hidden_state_rows work | choice_records ... entries
              every step, up to what is in use      | further spans, where tokens are not chosen greedily alone
    results   tokens | greedy chosen_logprobs figures requested top_ids top_logits
              every step, then as far as it was asked for

``work`` holds the items of the work list and, right behind those in use, the block tables, in rows of 64 bytes: an item
is one row, a table as many as it needs. To a kernel that is a table per row, 16 wide; the ``seq`` of an item is the row
its table begins at. So what is copied is what is in use, however long the longest sequence may be.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from ferrule_server.executor.base import BLOCK_SIZE
from ferrule_server.executor.cuda.gpu import Gpu
from ferrule_server.executor.cuda.layout import ALIGNMENT, Layout, pack
from ferrule_server.kernels.cuda import gemm
from ferrule_server.kernels.cuda.append import ROWS
from ferrule_server.kernels.cuda.logit_rows import DEFAULT_SLICE
from ferrule_server.kernels.cuda.sample import BORDER_BYTES, RECORD, mask_bytes
from ferrule_server.kernels.cuda.spec import ModelShape
from ferrule_server.kernels.cuda.top_k import LARGEST_K
from ferrule_server.kernels.cuda.work_list import FIELDS, max_items, max_places

TABLE_WIDTH = len(FIELDS)
"""Block ids in one row of ``work``: what the kernels are told a table is wide."""

_LARGEST_PARTIALS_BYTES = 64 << 20
"""Of the partial sums of attention; where a step would leave more, sequences are left whole."""

_HEAD_ROWS = 2
"""Rows that the kernel of the output head takes at most."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How much one step on the kernels can be; what is more goes to torch.

    Attributes:
        max_blocks: Of a sequence.
        max_rows: Rows of a step.
        max_requests: Single log-probabilities that a step returns.
        max_entries: Tokens, over all rows, whose logits penalties or a bias change.
        largest_k: Most log-probabilities of the best tokens that a row returns.
    """

    max_blocks: int
    max_rows: int = 256
    max_requests: int = 4096
    max_entries: int = 1 << 18
    largest_k: int = LARGEST_K

    @property
    def max_context(self) -> int:
        """Tokens of the longest sequence."""
        return self.max_blocks * BLOCK_SIZE


def input_layout(shape: ModelShape, limits: Limits, num_ctas: int) -> Layout:
    """Return where the fields of ``inputs`` lie; :class:`DecodeBuffers` says what is in them."""
    rows, width = limits.max_rows, TABLE_WIDTH
    num_work = max_items(rows * shape.num_kv_heads, num_ctas) + rows * -(-limits.max_blocks // width)
    return pack(
        (name, torch.int32, dims)
        for name, dims in (
            ("token_ids", (rows,)),
            ("positions", (rows,)),
            ("slot_mapping", (rows,)),
            ("logits_rows", (rows,)),
            ("hidden_state_rows", (rows,)),
            ("work", (num_work, width)),
            ("choice_records", (2 * rows, RECORD.itemsize // 4)),
            ("score_records", (rows, 4)),
            ("request_ids", (limits.max_requests,)),
            ("masks", (rows, mask_bytes(shape.vocab_size) // 4)),
            ("entries", (limits.max_entries, 4)),
        )
    )


def result_layout(limits: Limits) -> Layout:
    """Return where the fields of ``results`` lie; :class:`DecodeBuffers` says what is in them."""
    rows = limits.max_rows
    return pack(
        (
            ("tokens", torch.int32, (rows,)),
            ("greedy", torch.int32, (rows,)),
            ("chosen_logprobs", torch.float32, (rows,)),
            ("figures", torch.float32, (rows, 4)),
            ("requested", torch.float32, (limits.max_requests,)),
            ("top_ids", torch.int32, (rows, limits.largest_k)),
            ("top_logits", torch.float32, (rows, limits.largest_k)),
        )
    )


class DecodeBuffers:
    """The memory of steps on the kernels, on the device. R is ``limits.max_rows``, V the vocabulary, S its slices.

    A step uses the first rows of each buffer. Tickets are 0 between steps: every kernel leaves them so, and nothing
    else writes them.

    Args:
        gpu: Where to allocate.
        shape: Of the model.
        limits: Of a step.
        num_ctas: The grid of attention; that of the output head is no larger.

    Attributes:
        limits: As given.
        input_layout: Of ``inputs``.
        result_layout: Of ``results``.
        input: The fields of ``inputs``, all int32: ``token_ids`` [R] (-1: no token, zeros; -2 - j: ``tokens[j]`` of the
            step before), ``positions`` [R], ``slot_mapping`` [R], ``logits_rows`` and ``hidden_state_rows`` [R], which
            rows are copied whole, ``work`` [rows, 16] (see above; both the items and
            the block tables that kernels are given begin here), ``choice_records`` [2 * R, 20], each a
            ``sample.RECORD``, ``score_records`` [R, 4], ``request_ids`` [max_requests], ``masks``
            [R, mask_bytes(V) / 4], ``entries`` [max_entries, 4].
        result: The fields of ``results``: ``tokens`` int32 [R], at its begin: what the step chose, by row where all is
            greedy, else by output; ``greedy`` int32 [R], the best token of each row, -1: not finite;
            ``chosen_logprobs`` float32 [R]; ``figures`` float32 [R, 4]; ``requested`` float32 [max_requests];
            ``top_ids`` int32 [R, largest_k]; ``top_logits`` float32 [R, largest_k].
        shaped: ``logits[R:]``.
    """

    inputs: Tensor
    """uint8 [input_layout.num_bytes], written by the upload of a step."""
    results: Tensor
    """uint8 [result_layout.num_bytes], read by its download."""
    hidden: Tensor
    """bf16 [R, hidden_size], the residual stream."""
    normed: Tensor
    """bf16 [R, hidden_size], what linears read; after the chain the rows behind the final norm."""
    qkv: Tensor
    """bf16 [R, qkv_size]."""
    attended: Tensor
    """bf16 [R, num_heads * head_dim]."""
    gate_up: Tensor
    """bf16 [R, 2 * intermediate_size], of steps whose linears torch runs."""
    gated: Tensor
    """bf16 [R, intermediate_size], what the last linear of a layer reads."""
    logits: Tensor
    """float32 [2 * R, V], raw ones and, from row R on, shaped ones."""
    attention_tickets: Tensor
    """int32 [R * num_kv_heads], 0 between steps."""
    attention_partials: Tensor
    """float32 [places, num_heads / num_kv_heads, head_dim + 4], places as the work list counts them."""
    gemm_partials: Tensor
    """float32, scratch of linears whose K is split among CTAs."""
    gemm_tickets: Tensor
    """int32, one for each group of rows of such a linear, 0 between steps."""
    head_partials: Tensor
    """int64 [num_ctas, 2], scratch of the output head."""
    head_ticket: Tensor
    """int32 [1], 0 between steps."""
    argmax_partials: Tensor
    """int64 [R, S], scratch."""
    argmax_tickets: Tensor
    """int32 [R], 0 between steps."""
    choice_partials: Tensor
    """uint8 [2 * R, S, 16], scratch of everything behind the logits."""
    choice_tickets: Tensor
    """int32 [2 * R], of everything behind the logits, 0 between steps."""
    choice_borders: Tensor
    """uint8 [2 * R, 16], what the launches behind the logits tell each other."""
    choice_totals: Tensor
    """int64 [R], written by the draw."""

    def __init__(self, gpu: Gpu, shape: ModelShape, limits: Limits, num_ctas: int) -> None:
        self.limits = limits
        self.input_layout = input_layout(shape, limits, num_ctas)
        self.result_layout = result_layout(limits)
        for name, (dims, dtype) in _tensors(shape, limits, num_ctas).items():
            setattr(self, name, gpu.allocate(name, dims, dtype))
        self.input = self.input_layout.views(self.inputs)
        self.result = self.result_layout.views(self.results)
        self.shaped = self.logits[limits.max_rows :]


def decode_buffer_bytes(shape: ModelShape, limits: Limits, num_ctas: int) -> int:
    """Return what a :class:`DecodeBuffers` takes of the device, without making one."""
    sizes = (prod(dims) * dtype.itemsize for dims, dtype in _tensors(shape, limits, num_ctas).values())
    return sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)


def _tensors(shape: ModelShape, limits: Limits, num_ctas: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return shape and dtype of every tensor, by the name of its attribute."""
    rows, num_slices = limits.max_rows, -(-shape.vocab_size // DEFAULT_SLICE)
    num_tiles, place = rows * shape.num_kv_heads, (shape.group, shape.head_dim + 4)
    num_places = max_places(num_tiles, num_ctas, limits.max_context, rows_per_tile=ROWS // shape.group)
    num_places = min(num_places, _LARGEST_PARTIALS_BYTES // (4 * prod(place)))
    return {
        "inputs": ((input_layout(shape, limits, num_ctas).num_bytes,), torch.uint8),
        "results": ((result_layout(limits).num_bytes,), torch.uint8),
        "hidden": ((rows, shape.hidden_size), torch.bfloat16),
        "normed": ((rows, shape.hidden_size), torch.bfloat16),
        "qkv": ((rows, shape.qkv_size), torch.bfloat16),
        "attended": ((rows, shape.num_heads * shape.head_dim), torch.bfloat16),
        "gate_up": ((rows, 2 * shape.intermediate_size), torch.bfloat16),
        "gated": ((rows, shape.intermediate_size), torch.bfloat16),
        "logits": ((2 * rows, shape.vocab_size), torch.float32),
        "attention_tickets": ((num_tiles,), torch.int32),
        "attention_partials": ((num_places, *place), torch.float32),
        "gemm_partials": (gemm.scratch(shape)[:1], torch.float32),
        "gemm_tickets": (gemm.scratch(shape)[1:], torch.int32),
        "head_partials": ((num_ctas, _HEAD_ROWS), torch.int64),
        "head_ticket": ((1,), torch.int32),
        "argmax_partials": ((rows, num_slices), torch.int64),
        "argmax_tickets": ((rows,), torch.int32),
        "choice_partials": ((2 * rows, num_slices, 16), torch.uint8),
        "choice_tickets": ((2 * rows,), torch.int32),
        "choice_borders": ((2 * rows, BORDER_BYTES), torch.uint8),
        "choice_totals": ((rows,), torch.int64),
    }
