"""Loops and branches of LLVM code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from llvmlite import ir

from ferrule_server.kernels.cpu.lanes import I64, Builder, Value, advance, prefetch

LINE: Final = 64
"""Bytes of a cache line."""


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


def prefetch_lines(builder: Builder, address: Value, count: Value) -> None:
    """Write a loop that prefetches ``count`` cache lines from an address on, at least one."""

    def line(number: Value, _: list[Value]) -> list[Value]:
        prefetch.emit(builder, advance(builder, address, number, LINE))
        return []

    loop(builder, count, [], line)


def for_each_count(builder: Builder, count: Value, most: int, write_code: Callable[[int], None]) -> None:
    """Write code for each number from 1 to ``most``, and the branch to that of ``count``; the builder is after it."""
    done = builder.append_basic_block("counted")
    blocks = [builder.append_basic_block(f"count.{number}") for number in range(1, most + 1)]
    switch = builder.switch(count, blocks[0])
    for number, block in enumerate(blocks, 1):
        switch.add_case(ir.Constant(I64, number), block)
        builder.position_at_end(block)
        write_code(number)
        builder.branch(done)
    builder.position_at_end(done)
