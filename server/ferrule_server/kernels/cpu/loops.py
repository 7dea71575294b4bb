"""A loop of LLVM code that carries values in registers."""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from ferrule_server.kernels.cpu.lanes import I64, Builder, Value


def loop(
    builder: Builder, count: Value, values: list[Value], body: Callable[[Value, list[Value]], list[Value]]
) -> list[Value]:
    """Write a loop of at least one round that carries values in registers, and return what they are after it.

    Args:
        builder: It is positioned after the loop on return.
        count: int64, rounds.
        values: Before the first round.
        body: Writes one round; gets its number and the values, and returns the next values.
    """
    before = builder.block
    inside, after = builder.append_basic_block("loop"), builder.append_basic_block("after")
    builder.branch(inside)
    builder.position_at_end(inside)
    number = builder.phi(I64)
    number.add_incoming(ir.Constant(I64, 0), before)
    carried = [builder.phi(value.type) for value in values]
    for phi, value in zip(carried, values, strict=True):
        phi.add_incoming(value, before)
    results = body(number, list(carried))
    following = builder.add(number, ir.Constant(I64, 1))
    last = builder.block
    number.add_incoming(following, last)
    for phi, value in zip(carried, results, strict=True):
        phi.add_incoming(value, last)
    builder.cbranch(builder.icmp_signed("<", following, count), inside, after)
    builder.position_at_end(after)
    return results
