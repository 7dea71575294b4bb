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

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ferrule_server.executor.base import BLOCK_SIZE
from ferrule_server.executor.cuda.layout import ALIGNMENT, Layout
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

Allocate = Callable[[str, tuple[int, ...], torch.dtype], Tensor]
"""Returns a zeroed tensor, from its name, shape and type."""


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
    return Layout(
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
    return Layout(
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

    The constructor is also run on the meta device, by :func:`decode_buffer_bytes`: it allocates and makes views, and
    neither reads nor writes a value.

    Args:
        allocate: ``Gpu.allocate``, or what counts its bytes.
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

    def __init__(self, allocate: Allocate, shape: ModelShape, limits: Limits, num_ctas: int) -> None:
        rows, num_slices = limits.max_rows, -(-shape.vocab_size // DEFAULT_SLICE)
        places = (_num_places(shape, limits, num_ctas), shape.group, shape.head_dim + 4)
        self.limits = limits
        self.input_layout = input_layout(shape, limits, num_ctas)
        self.result_layout = result_layout(limits)
        self.inputs = allocate("inputs", (self.input_layout.num_bytes,), torch.uint8)
        """uint8 [input_layout.num_bytes], written by the upload of a step."""
        self.results = allocate("results", (self.result_layout.num_bytes,), torch.uint8)
        """uint8 [result_layout.num_bytes], read by its download."""
        self.hidden = allocate("hidden", (rows, shape.hidden_size), torch.bfloat16)
        """bf16 [R, hidden_size], the residual stream."""
        self.normed = allocate("normed", (rows, shape.hidden_size), torch.bfloat16)
        """bf16 [R, hidden_size], what linears read; after the chain the rows behind the final norm."""
        self.qkv = allocate("qkv", (rows, shape.qkv_size), torch.bfloat16)
        """bf16 [R, qkv_size]."""
        self.attended = allocate("attended", (rows, shape.num_heads * shape.head_dim), torch.bfloat16)
        """bf16 [R, num_heads * head_dim]."""
        self.gate_up = allocate("gate_up", (rows, 2 * shape.intermediate_size), torch.bfloat16)
        """bf16 [R, 2 * intermediate_size], of steps whose linears torch runs."""
        self.gated = allocate("gated", (rows, shape.intermediate_size), torch.bfloat16)
        """bf16 [R, intermediate_size], what the last linear of a layer reads."""
        self.logits = allocate("logits", (2 * rows, shape.vocab_size), torch.float32)
        """float32 [2 * R, V], raw ones and, from row R on, shaped ones."""
        self.attention_tickets = allocate("attention_tickets", (rows * shape.num_kv_heads,), torch.int32)
        """int32 [R * num_kv_heads], 0 between steps."""
        self.attention_partials = allocate("attention_partials", places, torch.float32)
        """float32 [places, num_heads / num_kv_heads, head_dim + 4], places as the work list counts them."""
        self.gemm_partials = allocate("gemm_partials", gemm.scratch(shape)[:1], torch.float32)
        """float32, scratch of linears whose K is split among CTAs."""
        self.gemm_tickets = allocate("gemm_tickets", gemm.scratch(shape)[1:], torch.int32)
        """int32, one for each group of rows of such a linear, 0 between steps."""
        self.head_partials = allocate("head_partials", (num_ctas, _HEAD_ROWS), torch.int64)
        """int64 [num_ctas, 2], scratch of the output head."""
        self.head_ticket = allocate("head_ticket", (1,), torch.int32)
        """int32 [1], 0 between steps."""
        self.argmax_partials = allocate("argmax_partials", (rows, num_slices), torch.int64)
        """int64 [R, S], scratch."""
        self.argmax_tickets = allocate("argmax_tickets", (rows,), torch.int32)
        """int32 [R], 0 between steps."""
        self.choice_partials = allocate("choice_partials", (2 * rows, num_slices, 16), torch.uint8)
        """uint8 [2 * R, S, 16], scratch of everything behind the logits."""
        self.choice_tickets = allocate("choice_tickets", (2 * rows,), torch.int32)
        """int32 [2 * R], of everything behind the logits, 0 between steps."""
        self.choice_borders = allocate("choice_borders", (2 * rows, BORDER_BYTES), torch.uint8)
        """uint8 [2 * R, 16], what the launches behind the logits tell each other."""
        self.choice_totals = allocate("choice_totals", (rows,), torch.int64)
        """int64 [R], written by the draw."""
        self.input = self.input_layout.views(self.inputs)
        self.result = self.result_layout.views(self.results)
        self.shaped = self.logits[limits.max_rows :]


def _num_places(shape: ModelShape, limits: Limits, num_ctas: int) -> int:
    """Return for how many partial sums of attention there is room."""
    num_tiles = limits.max_rows * shape.num_kv_heads
    wanted = max_places(num_tiles, num_ctas, limits.max_context, rows_per_tile=ROWS // shape.group)
    return min(wanted, _LARGEST_PARTIALS_BYTES // (4 * shape.group * (shape.head_dim + 4)))


def decode_buffer_bytes(shape: ModelShape, limits: Limits, num_ctas: int) -> int:
    """Return what a :class:`DecodeBuffers` takes of the device, without taking it."""
    sizes: list[int] = []

    def allocate(_name: str, dims: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(dims, dtype=dtype, device="meta")
        sizes.append(-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT)
        return tensor

    DecodeBuffers(allocate, shape, limits, num_ctas)
    return sum(sizes)
