"""The simulator's tensor cores, asynchronous copies and arithmetic, against numpy and torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from ferrule_server.kernels.cuda.intrinsics import (
    I32,
    Address,
    barrier,
    copy_async_16_or_zeros,
    copy_async_commit,
    copy_async_wait,
    exp2,
    grid_wait,
    load_f32,
    load_u32,
    mma_bf16,
    shared_load_u32,
    store_f32,
    store_u32,
    thread_id,
)
from ferrule_server.kernels.cuda.specialise import Specialised, i32, unrolled
from tests.kernels.cuda.mutation import check_mutants
from tools import cuda_simulator as simulator
from tools.cuda_simulator import Launch, Memory, from_bf16, run, to_bf16
from tools.cuda_simulator.numbers import PURE


def multiply(a: Address, b: Address, c: Address, *, STEPS: int) -> None:  # noqa: N803
    """One warp: c [16, 8] = a [16, k] @ b [8, k] transposed, k = 16 STEPS."""
    grid_wait()
    g = thread_id() >> 2
    t = thread_id() & 3
    sums = (0.0, 0.0, 0.0, 0.0)
    for step in unrolled(STEPS):
        left = a + (g * 16 * STEPS + 16 * step + 2 * t) * 2
        right = b + (g * 16 * STEPS + 16 * step + 2 * t) * 2
        down = 8 * 16 * STEPS * 2
        rows = (load_u32(left), load_u32(left + down), load_u32(left + 16), load_u32(left + down + 16))
        sums = mma_bf16(rows, (load_u32(right), load_u32(right + 16)), sums)
    for i in unrolled(4):
        store_f32(c + ((g + 8 * (i >> 1)) * 8 + 2 * t + (i & 1)) * 4, sums[i])


def test_mma_multiplies_fragments_where_they_lie() -> None:
    """Equal to a float64 product to a float32 rounding."""
    rng = np.random.default_rng(5)
    a, b = to_bf16(rng.normal(size=(16, 32))), to_bf16(rng.normal(size=(8, 32)))
    memory = Memory()
    c = memory.empty("c", (16, 8), np.float32)
    args = (memory.put("a", a), memory.put("b", b), c)
    run(memory, [Launch(multiply, {"STEPS": 2}, args, grid=1, num_threads=32)])
    expected = from_bf16(a).astype(np.float64) @ from_bf16(b).astype(np.float64).T
    np.testing.assert_allclose(memory.get("c"), expected, rtol=0, atol=2e-6)


def pipeline(x: Address, y: Address, n: I32) -> None:
    """Copy n tiles of 512 bytes through two stages of shared memory; the tile after the last is zeros."""
    grid_wait()
    i = thread_id()
    copy_async_16_or_zeros(16 * i, x + 16 * i, 16)
    copy_async_commit()
    tile = 0
    while tile < n:
        following = i32(tile + 1)
        size = 16 if following < n else 0
        copy_async_16_or_zeros((following & 1) * 512 + 16 * i, x + following * 512 + 16 * i, size)
        copy_async_commit()
        copy_async_wait(1)
        barrier()
        for word in unrolled(4):
            place = (31 - i) * 4 + 128 * word
            store_u32(y + tile * 512 + place, shared_load_u32((tile & 1) * 512 + place))
        barrier()
        tile = following
    copy_async_wait(0)
    barrier()
    store_u32(y + n * 512 + 4 * i, shared_load_u32((n & 1) * 512 + 508 - 4 * i))


def _pipeline(specialised: Specialised | None = None) -> None:
    memory = Memory()
    values = np.arange(3 * 128, dtype=np.uint32)
    x, y = memory.put("x", values, mutable=True), memory.empty("y", 3 * 128 + 32, np.uint32)
    run(memory, [Launch(pipeline, {}, (x, y, 3), 1, 32, 1024, specialised)])
    assert memory.get("y").tolist() == [*values.tolist(), *[0] * 32]


def test_asynchronous_copies_arrive_at_the_wait_and_are_seen_after_the_barrier() -> None:
    """A pipeline of two stages is right, and needs every commit, wait and barrier it has; none may wait for less."""
    _pipeline()
    found = check_mutants(pipeline, {}, _pipeline)
    names = [mutation.name for mutation in found]
    assert names.count("barrier") == 3
    assert {"copy_async_commit", "copy_async_wait_0", "copy_async_wait_1"} <= set(names)
    assert {mutation.instead for mutation in found} == {"", "copy_async_wait_1", "copy_async_wait_2"}


def early(x: Address, y: Address, *, HOW: str) -> None:  # noqa: N803
    """Read what an asynchronous copy brings before it is there."""
    grid_wait()
    i = thread_id()
    copy_async_16_or_zeros(16 * i, x + 16 * i, 16)
    if HOW != "no commit":
        copy_async_commit()
    if HOW not in ("no wait", "no end"):
        copy_async_wait(0)
    store_u32(y + 4 * i, shared_load_u32(16 * i if HOW != "neighbour" else 16 * (i ^ 1)))
    if HOW != "no end":
        copy_async_commit()
        copy_async_wait(0)


@pytest.mark.parametrize("how", ["no commit", "no wait"])
def test_a_copy_that_was_not_waited_for_has_not_arrived(how: str) -> None:
    """The thread itself sees what was there before."""
    assert (_early("right") == 7).all()
    assert (_early(how) == 0xFFFFFFFF).all()


def test_a_thread_waits_for_its_copies_before_it_ends() -> None:
    """Its shared memory may be another CTA's by then."""
    with pytest.raises(simulator.WaitMissing, match="before its copies"):
        _early("no end")


def test_another_thread_needs_a_barrier_to_see_a_copy() -> None:
    """A wait is about the thread's own copies."""
    with pytest.raises(simulator.Race, match="copy_async_16"):
        _early("neighbour")


def _early(how: str) -> Any:
    memory = Memory()
    x, y = memory.put("x", np.full(128, 7, np.uint32), mutable=True), memory.empty("y", 32, np.uint32)
    run(memory, [Launch(early, {"HOW": how}, (x, y), 1, 32, 512)])
    return memory.get("y")


def overflow(x: Address, y: Address) -> None:
    """Leave the range of float32 and come back, in two statements and in one."""
    grid_wait()
    i = thread_id()
    value = load_f32(x) * 1e38
    value *= 1e-38
    store_f32(y + 8 * i, value)
    store_f32(y + 8 * i + 4, exp2(-200.0) + 16777217.0)


def test_float_variables_hold_float32() -> None:
    """They overflow as on the device, and have its precision."""
    memory = Memory()
    x = memory.put("x", np.full(4, 1e10, np.float32), mutable=True)
    run(memory, [Launch(overflow, {}, (x, memory.empty("y", 64, np.float32)), 1, 32)])
    assert memory.get("y")[:2].tolist() == [math.inf, 16777216.0]


def test_bf16_rounds_as_torch_does() -> None:
    """To nearest even, with infinities and NaN, for arrays, packed words and single values."""
    rng = np.random.default_rng(6)
    values = rng.integers(0, 1 << 32, 4096, np.uint32).view(np.float32)
    values[:4] = math.inf, -math.inf, math.nan, 3.4028235e38
    expected = torch.from_numpy(values).bfloat16().float().numpy()
    np.testing.assert_array_equal(from_bf16(to_bf16(values)), expected)
    np.testing.assert_array_equal([PURE["round_bf16"](value) for value in values.tolist()], expected)
    words = [PURE["pack_bf16"](low, high) for low, high in values.reshape(-1, 2).tolist()]
    np.testing.assert_array_equal(np.array(words, np.uint32).view(np.uint16), to_bf16(values))


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("permute_bytes", (0x33221100, 0x77665544, 0x7410), 0x77441100),
        ("permute_bytes", (0x00000080, 0x4B000000, 0x7448), 0x4B0000FF),
        ("multiply_high", (0xFFFFFFFF, 0xFFFFFFFF), 0xFFFFFFFE),
        ("multiply_low", (0xFFFFFFFF, 0xFFFFFFFF), 1),
        ("multiply_high_u64", (-1, -1), -2),
        ("add_wrapping", (0xFFFFFFFF, 2), 1),
        ("float_of", (16777217,), 16777216.0),
        ("float_bits", (-0.0,), 0x80000000),
        ("bits_float", (0x3F800000,), 1.0),
        ("round_u64", (2.5,), 2),
        ("round_u64", (-3.0,), 0),
        ("round_u64", (1e30,), (1 << 64) - 1),
        ("float_of_u64", (-1,), float(1 << 64)),
        ("exp2", (-200.0,), 0.0),
        ("exp2", (200.0,), math.inf),
        ("exp2", (-math.inf,), 0.0),
        ("log2", (0.0,), -math.inf),
        ("reciprocal", (-0.0,), -math.inf),
        ("reciprocal_sqrt", (0.25,), 2.0),
        ("max_f32", (math.nan, 1.0), 1.0),
        ("max_f32", (1.0, math.nan), 1.0),
        ("dot_bf16", (1.0, (0x3F804000, 0, 0, 0), (0x40004040, 0, 0, 0)), 1.0 + 2 * 3 + 1 * 2),
    ],
)
def test_arithmetic_at_its_edges(name: str, arguments: tuple[Any, ...], expected: float) -> None:
    """By the PTX manual."""
    twin: Callable[..., object] = PURE[name]
    assert twin(*arguments) == expected
