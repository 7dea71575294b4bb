"""Calls of kernels by the address of their machine code: a kernel that is called so is compiled by itself."""

from __future__ import annotations

from llvmlite import ir
from numba import types

from ferrule_server.kernels.cpu.kernel import operation
from ferrule_server.kernels.cpu.lanes import I8, I64, Builder, Value, pointer


def _call(builder: Builder, address: Value, *arguments: Value) -> None:
    """Call machine code with its plan, which has no value, and numbers."""
    function = ir.FunctionType(I64, [I8.as_pointer(), *[I64] * len(arguments)])
    builder.call(pointer(builder, address, function), [ir.Constant(I8.as_pointer(), None), *arguments])


@operation(types.void, *[types.int64] * 3)
def call_stage(builder: Builder, address: Value, thread: Value, stage: Value) -> None:
    """Call what claims the work of a stage."""
    _call(builder, address, thread, stage)


@operation(types.void, *[types.int64] * 9)
def call_multiply(
    builder: Builder, address: Value, weight: Value, num_tiles: Value, num_rows: Value, inputs: Value,
    input_bytes: Value, sums: Value, sum_bytes: Value, ahead: Value,
) -> None:  # fmt: skip
    """Call ``multiply.multiply``."""
    _call(builder, address, weight, num_tiles, num_rows, inputs, input_bytes, sums, sum_bytes, ahead)


@operation(types.void, *[types.int64] * 5)
def call_look_up(builder: Builder, address: Value, embedding: Value, token_id: Value, out: Value, size: Value) -> None:
    """Call ``activations.look_up``."""
    _call(builder, address, embedding, token_id, out, size)
