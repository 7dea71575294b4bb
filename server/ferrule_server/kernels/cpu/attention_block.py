"""Two products of attention with one block of 16 tokens: scores with K, and the weighted sum of V.

K and V are read where they lie in the pool, widened to float32 in registers, and used for several queries at once.
Each score is summed over the width of the head in 16 lanes, then over the lanes; each output over the tokens in order.
So no result depends on the queries beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from llvmlite import ir
from numba import types

from ferrule_server.kernels.cpu import lanes as simd
from ferrule_server.kernels.cpu.kernel import operation
from ferrule_server.kernels.cpu.lanes import Builder, Value
from ferrule_server.kernels.cpu.loops import LINE, for_each_count, loop
from ferrule_server.kernels.cpu.plan import Plan, PlanType

MOST_QUERIES: Final = 4
"""Queries that use one load of K or V."""

_BLOCK: Final = 16


def _element_bytes(plan: Plan) -> int:
    return 2 if plan.is_bfloat16 else 4


def _elements(builder: Builder, plan: Plan, address: Value) -> Value:
    if plan.is_bfloat16:
        return simd.widen(builder, simd.read(builder, address, simd.I16X16, 32))
    return simd.read(builder, address, simd.F32X16, 64)


def _emit_prefetches(builder: Builder, ahead: Value, place: Value, num_bytes: int) -> None:
    """Write the code that prefetches memory from an offset after an address, unless the address is 0."""
    with builder.if_then(builder.icmp_signed("!=", ahead, ir.Constant(simd.I64, 0)), likely=True):
        here = builder.add(ahead, place)
        for line in range(0, num_bytes, LINE):
            simd.prefetch.emit(builder, simd.offset(builder, here, line))


def _products(
    builder: Builder, plan: Plan, queries: Value, count: int, keys: list[Value], prefetch_piece: Callable[[int], None]
) -> list[Value]:
    """Return the products of queries and keys as 16 parts of a sum: query by query, key by key.

    All keys are taken together if there are registers for all parts, else one after the other. ``prefetch_piece`` is
    called with 0, 1, ... as often as a head has 16 dimensions.
    """
    parts = [simd.constant(0.0)] * (count * len(keys))
    columns = range(0, plan.head_dim, simd.LANES)
    order = [(i, k) for i in columns for k in range(len(keys))]
    if not plan.has_many_registers:
        order.sort(key=lambda each: each[1])
    for number, (i, k) in enumerate(order):
        if number % len(keys) == 0:
            prefetch_piece(number // len(keys))
        key = _elements(builder, plan, simd.offset(builder, keys[k], i * _element_bytes(plan)))
        for query in range(count):
            value = simd.read(builder, simd.offset(builder, queries, 4 * (query * plan.head_dim + i)), simd.F32X16, 64)
            place = query * len(keys) + k
            parts[place] = simd.fma.emit(builder, key, value, parts[place])
    return parts


@operation(types.void, PlanType, *[types.int64] * 6)
def score_block(
    builder: Builder,
    plan: Plan,
    queries: Value,
    num_queries: Value,
    keys: Value,
    scores: Value,
    score_bytes: Value,
    ahead: Value,
) -> None:
    """Write the products of queries and the 16 keys of a block.

    Args:
        plan: How to compute.
        queries: Address of float32 [num_queries, head_dim].
        num_queries: From 1 to ``MOST_QUERIES``.
        keys: Address of [16, head_dim].
        scores: Address of float32 [num_queries, 16].
        score_bytes: From the scores of one query to the next.
        ahead: Address of as much memory as the keys, prefetched meanwhile; 0: nothing is prefetched.
    """
    key_bytes = plan.head_dim * _element_bytes(plan)

    def write_code(count: int) -> None:
        room = 1 << (count - 1).bit_length()
        tokens = _BLOCK // room

        def some(number: Value, _: list[Value]) -> list[Value]:
            first = simd.advance(builder, keys, number, tokens * key_bytes)
            at = [simd.offset(builder, first, token * key_bytes) for token in range(tokens)]
            piece = tokens * key_bytes // (plan.head_dim // simd.LANES)
            begin = builder.mul(number, ir.Constant(simd.I64, tokens * key_bytes))

            def prefetch_piece(column: int) -> None:
                _emit_prefetches(builder, ahead, simd.offset(builder, begin, column * piece), piece)

            products = _products(builder, plan, queries, count, at, prefetch_piece)
            products += [simd.constant(0.0)] * (_BLOCK - len(products))
            sums = simd.sum_all(builder, products)
            place = simd.advance(builder, scores, number, 4 * tokens)
            for query in range(count):
                to = simd.advance(builder, place, score_bytes, query)
                lanes = ir.Constant(ir.VectorType(simd.I32, tokens), [query * tokens + i for i in range(tokens)])
                simd.write(builder, builder.shuffle_vector(sums, sums, lanes), to, 4)
            return []

        loop(builder, ir.Constant(simd.I64, room), [], some)

    for_each_count(builder, num_queries, MOST_QUERIES, write_code)


@operation(types.void, PlanType, *[types.int64] * 7)
def weigh_block(
    builder: Builder, plan: Plan, weights: Value, weight_bytes: Value, num_queries: Value, values: Value, num_tokens:
    Value, out: Value, ahead: Value,
) -> None:  # fmt: skip
    """Add the values of the first tokens of a block, each times its weight, to the outputs of some queries.

    Args:
        plan: How to compute.
        weights: Address of float32 [num_queries, 16].
        weight_bytes: From the weights of one query to the next.
        num_queries: From 1 to ``MOST_QUERIES``.
        values: Address of [16, head_dim].
        num_tokens: From 1 to 16.
        out: Address of float32 [num_queries, head_dim].
        ahead: Address of as much memory as 16 values, prefetched meanwhile; 0: nothing is prefetched.
    """
    element_bytes = _element_bytes(plan)

    def write_code(count: int) -> None:
        at_once = max(1, (16 if plan.has_many_registers else 4) // count)
        rows = [simd.advance(builder, weights, weight_bytes, q) for q in range(count)]
        parts = list(range(0, plan.head_dim, simd.LANES))
        for first in range(0, len(parts), at_once):
            add_parts(count, rows, parts[first : first + at_once])

    def add_parts(count: int, rows: list[Value], parts: list[int]) -> None:
        piece = len(parts) * simd.LANES * element_bytes
        places = [simd.offset(builder, out, 4 * (q * plan.head_dim + i)) for q in range(count) for i in parts]

        def token(number: Value, sums: list[Value]) -> list[Value]:
            value = simd.advance(builder, values, number, plan.head_dim * element_bytes)
            begin = builder.mul(number, ir.Constant(simd.I64, piece))
            _emit_prefetches(builder, ahead, simd.offset(builder, begin, _BLOCK * parts[0] * element_bytes), piece)
            loaded = [_elements(builder, plan, simd.offset(builder, value, i * element_bytes)) for i in parts]
            results = []
            for q in range(count):
                at = simd.advance(builder, rows[q], number, 4)
                weight = simd.spread(builder, simd.read(builder, at, simd.F32, 4), simd.F32X16)
                for i, part in enumerate(loaded):
                    results.append(simd.fma.emit(builder, weight, part, sums[q * len(parts) + i]))
            return results

        sums = loop(builder, num_tokens, [simd.read(builder, place, simd.F32X16, 64) for place in places], token)
        for place, total in zip(places, sums, strict=True):
            simd.write(builder, total, place, 64)

    for_each_count(builder, num_queries, MOST_QUERIES, write_code)
