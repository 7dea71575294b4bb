"""Buffers: where fields lie, how much memory they take, what a step finds in them."""

from __future__ import annotations

import ast
import inspect
import math
import textwrap
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch

from ferrule_server.executor.cuda.buffers import (
    TABLE_WIDTH,
    DecodeBuffers,
    Limits,
    decode_buffer_bytes,
    input_layout,
    result_layout,
)
from ferrule_server.executor.cuda.layout import ALIGNMENT, Layout
from ferrule_server.kernels.cuda import argmax, head, log_sum_exp, sample
from ferrule_server.kernels.cuda.spec import MODEL_SHAPES, ModelShape
from ferrule_server.kernels.cuda.work_list import max_items, max_places
from tests.executor.cuda.fake_gpu import FakeGpu

SHAPE = ModelShape(136, 200, 2, 4, 2, 64, 1001, has_qk_norm=True)
LIMITS = Limits(max_blocks=37, max_rows=20, max_requests=7, max_entries=11)
NUM_CTAS = 3
LAYOUTS = [input_layout(SHAPE, LIMITS, NUM_CTAS), result_layout(LIMITS), result_layout(Limits(1, max_rows=1))]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fields_lie_apart_and_aligned(layout: Layout) -> None:
    """In order, each at a multiple of 256, none in another, all inside."""
    end = 0
    for field in layout.fields.values():
        assert field.offset % ALIGNMENT == 0
        assert end <= field.offset < end + ALIGNMENT
        end = field.offset + math.prod(field.shape) * field.dtype.itemsize
        assert layout.end_of(field.name, field.shape[0]) == field.end == end
    assert layout.num_bytes % ALIGNMENT == 0
    assert end <= layout.num_bytes < end + ALIGNMENT


@pytest.mark.parametrize("layout", LAYOUTS)
def test_host_and_device_see_the_same_fields(layout: Layout) -> None:
    """What is written through one view is read through the other, value by value and shape by shape."""
    memory = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    arrays, views = layout.arrays(memory), layout.views(memory)
    for number, array in enumerate(arrays.values()):
        array[...] = number + 1
    for number, field in enumerate(layout.fields.values()):
        view = views[field.name]
        assert (view.dtype, tuple(view.shape)) == (field.dtype, field.shape) == (view.dtype, arrays[field.name].shape)
        assert bool((view == number + 1).all())


def test_the_rows_in_use_end_inside_a_field() -> None:
    """So many rows of so many bytes behind its begin."""
    layout = Layout([("a", torch.int32, (5,)), ("b", torch.float32, (6, 3, 2))])
    assert layout.end_of("a", 2) == 8
    assert layout.end_of("b", 0) == layout.fields["b"].offset == 256
    assert layout.end_of("b", 5) == 256 + 5 * 24


def test_fields_that_lie_close_together_are_one_span() -> None:
    """Of each field its first rows; a wide gap is not copied, nor a field that is not used or not of this layout."""
    layout = Layout((name, torch.int32, (size,)) for name, size in (("a", 9), ("b", 9), ("c", 20000), ("d", 9)))
    assert layout.spans({}) == layout.spans({"a": 0, "e": 3}) == []
    assert layout.spans({"c": 2, "a": 5}) == [slice(0, layout.end_of("c", 2))]
    assert layout.spans({"b": 9, "c": 10, "d": 1}) == [
        slice(layout.fields["b"].offset, layout.end_of("c", 10)),
        slice(layout.fields["d"].offset, layout.end_of("d", 1)),
    ]


@pytest.mark.parametrize(
    ("shape", "limits", "num_ctas"),
    [(SHAPE, LIMITS, NUM_CTAS), (SHAPE, Limits(2, max_rows=1), 1), (SHAPE, Limits(9, max_entries=1), 7)],
)
def test_the_sum_is_what_is_allocated(shape: ModelShape, limits: Limits, num_ctas: int) -> None:
    """Known before anything is allocated; memory comes in pieces of 256 bytes."""
    gpu = FakeGpu()
    DecodeBuffers(gpu.allocate, shape, limits, num_ctas)
    taken = sum(-(-call.num_bytes // 256) * 256 for call in gpu.calls("allocate"))
    assert decode_buffer_bytes(shape, limits, num_ctas) == taken


@pytest.mark.parametrize("shape", MODEL_SHAPES.values(), ids=MODEL_SHAPES)
def test_buffers_take_little_of_a_gpu(shape: ModelShape) -> None:
    """Half a GiB at most for the models that are checked, at their longest context."""
    assert decode_buffer_bytes(shape, Limits(131072 // 16), 264) < 1 << 29


def test_every_tensor_is_documented_and_zero() -> None:
    """A docstring stands below each that is allocated; tickets and counts begin at 0."""
    buffers = DecodeBuffers(FakeGpu().allocate, SHAPE, LIMITS, NUM_CTAS)
    documented = _documented_attributes(DecodeBuffers.__init__)
    for name in documented:
        tensor = getattr(buffers, name)
        assert isinstance(tensor, torch.Tensor), name
        assert not tensor.view(torch.uint8).any(), name
    assert set(vars(buffers)) - set(documented) == {
        *("limits", "input_layout", "result_layout", "input", "result", "shaped")
    }


def _documented_attributes(constructor: Callable[..., None]) -> list[str]:
    """Return the attributes that a constructor allocates right before a docstring."""
    (function,) = ast.parse(textwrap.dedent(inspect.getsource(constructor))).body
    assert isinstance(function, ast.FunctionDef)
    names = []
    for made, text in pairwise(function.body):
        match made, text:
            case (
                ast.Assign([ast.Attribute(ast.Name("self"), name)], ast.Call(ast.Name("allocate"))),
                ast.Expr(ast.Constant(str())),
            ):
                names.append(name)
    return names


def test_scratch_holds_what_the_kernels_say_they_need() -> None:
    """At the limits of a step, by the functions and constants of the kernels themselves."""
    buffers, rows, vocab = DecodeBuffers(FakeGpu().allocate, SHAPE, LIMITS, NUM_CTAS), LIMITS.max_rows, SHAPE.vocab_size
    assert buffers.head_partials.nbytes >= head.partial_bytes(NUM_CTAS, M=2)
    assert buffers.argmax_partials.nbytes >= argmax.partial_bytes(rows, vocab)
    assert buffers.attention_tickets.numel() >= rows * SHAPE.num_kv_heads
    assert buffers.input["work"].shape[0] >= max_items(rows * SHAPE.num_kv_heads, NUM_CTAS) + rows * 3
    assert buffers.input["choice_records"][0].nbytes == sample.RECORD.itemsize
    assert len(buffers.input["choice_records"]) == len(buffers.choice_borders) == 2 * rows
    assert buffers.input["score_records"][0].nbytes == log_sum_exp.RECORD_BYTES
    assert buffers.choice_borders[0].nbytes == sample.BORDER_BYTES
    assert buffers.shaped.data_ptr() == buffers.logits[rows].data_ptr()
    assert buffers.input["masks"].nbytes == rows * sample.mask_bytes(vocab)


def test_partials_fit_whatever_a_short_context_leaves() -> None:
    """And for a long one as many as the budget holds, of the size of the kernel that writes them."""
    buffers, place = DecodeBuffers(FakeGpu().allocate, SHAPE, LIMITS, NUM_CTAS), 4 * SHAPE.group * (SHAPE.head_dim + 4)
    num_tiles, rows_per_tile = LIMITS.max_rows * SHAPE.num_kv_heads, 16 // SHAPE.group
    most = max_places(num_tiles, NUM_CTAS, LIMITS.max_context, rows_per_tile=rows_per_tile)
    assert len(buffers.attention_partials) == most
    assert buffers.attention_partials.nbytes == most * place
    large = DecodeBuffers(FakeGpu().allocate, SHAPE, Limits(1 << 16, max_rows=8, max_entries=1), 500)
    assert len(large.attention_partials) == (64 << 20) // place


def test_results_begin_with_what_every_step_returns() -> None:
    """The tokens, which the step after reads where they are."""
    assert result_layout(LIMITS).fields["tokens"].offset == 0
    names = list(input_layout(SHAPE, LIMITS, NUM_CTAS).fields)
    assert names[:6] == [
        "token_ids",
        "positions",
        "slot_mapping",
        "logits_rows",
        "hidden_state_rows",
        "work",
    ]
    assert LAYOUTS[0].fields["work"].shape[1] == TABLE_WIDTH == 16
