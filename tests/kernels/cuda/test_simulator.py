"""The simulator itself: for each hazard a small kernel that has it and is caught, and its sound twin that passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ferrule_server.kernels.cuda.intrinsics import (
    I32,
    INTRINSICS,
    Address,
    atomic_increment_wrapping,
    barrier,
    cta_id,
    fence,
    grid_wait,
    load_f32,
    load_i32,
    load_relaxed_f32,
    load_relaxed_u32,
    load_stream_v4,
    load_u32,
    load_v4,
    num_ctas,
    shared_fetch_add_u32,
    shared_load_f32,
    shared_load_u32,
    shared_store_f32,
    shared_store_u32,
    shuffle_xor_f32,
    store_f32,
    store_u16,
    store_u32,
    store_v4,
    thread_id,
    warp_barrier,
)
from ferrule_server.kernels.cuda.specialise import i32, u32, unrolled
from tests.kernels.cuda.mutation import SurvivingMutants, check_mutants
from tools import cuda_simulator as simulator
from tools.cuda_simulator import Launch, Memory, run
from tools.cuda_simulator.shared import SHARED
from tools.cuda_simulator.translate import BLOCKING
from tools.cuda_simulator.twins import ATOMIC, GLOBAL

NUM_THREADS = 64


def reverse(x: Address, y: Address, *, HAS_BARRIER: bool, TRIPS: int, HAS_SECOND: bool) -> None:  # noqa: N803
    """Write x backwards through shared memory, once or more times."""
    grid_wait()
    i = thread_id()
    for trip in unrolled(TRIPS):
        shared_store_f32(4 * i, load_f32(x + 4 * i))
        if HAS_BARRIER:
            barrier()
        store_f32(y + 256 * trip + 4 * i, shared_load_f32(252 - 4 * i))
        if HAS_SECOND:
            barrier()


def sum_over_ctas(x: Address, partials: Address, ticket: Address, y: Address, *, FENCES: tuple[int, int]) -> None:  # noqa: N803
    """Sum x of all CTAs in the CTA that comes last."""
    grid_wait()
    i = thread_id()
    c = cta_id()
    store_f32(partials + 256 * c + 4 * i, load_f32(x + 256 * c + 4 * i))
    barrier()
    if i == 0:
        if FENCES[0]:
            fence()
        old = atomic_increment_wrapping(ticket, num_ctas() - 1)
        if FENCES[1]:
            fence()
        shared_store_u32(0, old)
    barrier()
    if shared_load_u32(0) == num_ctas() - 1:
        total = 0.0
        c = 0
        while c < num_ctas():
            total += load_relaxed_f32(partials + 256 * c + 4 * i)
            c = i32(c + 1)
        store_f32(y + 4 * i, total)


def launch(
    kernel: Callable[..., None], *args: int, grid: int = 1, threads: int = NUM_THREADS, **constants: Any
) -> Launch:
    """Return a launch with some shared memory."""
    return Launch(kernel, constants, args, grid=grid, num_threads=threads, shared_bytes=1024)


def simple(kernel: Callable[..., None], *, grid: int = 1, threads: int = NUM_THREADS, **constants: Any) -> Memory:
    """Run a kernel on 256 bytes of immutable x, mutable y and unwritten z, one value for each of 64 threads."""
    memory = Memory()
    x = memory.put("x", np.arange(64, dtype=np.float32))
    y = memory.put("y", np.zeros(64, np.float32), mutable=True)
    z = memory.empty("z", 64, np.float32)
    run(memory, [launch(kernel, x, y, z, grid=grid, threads=threads, **constants)])
    return memory


@pytest.mark.parametrize("seed", range(3))
def test_threads_meet_at_a_barrier_and_read_what_others_stored(seed: int) -> None:
    """With its barriers the kernel gives the same right result in any order."""
    memory = Memory()
    x = memory.put("x", np.arange(64, dtype=np.float32), offset=16)
    y = memory.empty("y", (2, 64), np.float32)
    run(memory, [launch(reverse, x, y, HAS_BARRIER=True, HAS_SECOND=True, TRIPS=2)], seed=seed)
    assert (memory.get("y") == np.arange(64)[::-1]).all()


@pytest.mark.parametrize(("first", "second"), [(False, True), (True, False)])
def test_a_missing_barrier_is_a_race_and_names_both_lines(first: bool, second: bool) -> None:
    """A store followed by a load, and a load followed by the next round's store."""
    memory = Memory()
    x = memory.put("x", np.arange(64, dtype=np.float32))
    y = memory.empty("y", (2, 64), np.float32)
    with pytest.raises(
        simulator.Race, match=r"shared_(load|store)_f32 on line \d+ of test_simulator.py .* and shared_"
    ):
        run(memory, [launch(reverse, x, y, HAS_BARRIER=first, HAS_SECOND=second, TRIPS=2)])


def test_a_barrier_that_nothing_needs_survives_mutation() -> None:
    """The harness reports superfluous synchronisation by line."""

    def run_it(specialised: Any) -> None:
        memory = Memory()
        x = memory.put("x", np.arange(64, dtype=np.float32))
        y = memory.empty("y", (1, 64), np.float32)
        made = launch(reverse, x, y, HAS_BARRIER=True, HAS_SECOND=True, TRIPS=1)
        run(memory, [replace(made, specialised=specialised)])
        assert (memory.get("y") == np.arange(64)[::-1]).all()

    with pytest.raises(SurvivingMutants, match=r"reverse passes without barrier on line \d+ of test_simulator.py$"):
        check_mutants(reverse, {"HAS_BARRIER": True, "HAS_SECOND": True, "TRIPS": 1}, run_it)
    check_mutants(reverse, {"HAS_BARRIER": True, "HAS_SECOND": False, "TRIPS": 1}, run_it)


def _sum(memory: Memory, seed: int = 0, fences: tuple[int, int] = (1, 1), specialised: Any = None) -> None:
    x = memory.put("x", np.arange(192, dtype=np.float32), mutable=True)
    partials = memory.empty("partials", 192, np.float32)
    ticket = memory.put("ticket", np.zeros(1, np.uint32), mutable=True)
    y = memory.empty("y", 64, np.float32)
    made = launch(sum_over_ctas, x, partials, ticket, y, grid=3, FENCES=fences)
    run(memory, [replace(made, specialised=specialised)] * 2, seed=seed)
    assert (memory.get("y") == np.arange(192).reshape(3, 64).sum(0)).all()


@pytest.mark.parametrize("seed", range(3))
def test_the_last_cta_reads_what_all_wrote(seed: int) -> None:
    """Fence, ticket, fence between barriers orders the partials; the ticket is ready for the next launch."""
    _sum(Memory(), seed)


@pytest.mark.parametrize("fences", [(0, 1), (1, 0)])
@pytest.mark.parametrize("seed", range(3))
def test_each_fence_around_a_ticket_is_needed(seed: int, fences: tuple[int, int]) -> None:
    """Whatever the order of turns, and also where the values happen to be right."""
    with pytest.raises((simulator.Race, AssertionError)):
        _sum(Memory(), seed, fences)


def test_everything_that_orders_the_ticket_kernel_is_needed() -> None:
    """Two barriers, two fences and the wait: no mutant survives."""
    found = check_mutants(sum_over_ctas, {"FENCES": (1, 1)}, lambda mutant: _sum(Memory(), specialised=mutant))
    assert sorted(mutation.name for mutation in found) == ["barrier", "barrier", "fence", "fence", "grid_wait"]


def test_a_result_does_not_depend_on_anything_but_the_seed() -> None:
    """The order in which CTAs take tickets differs between seeds and is the same for one."""

    def order(seed: int) -> list[int]:
        memory = Memory()
        ticket = memory.put("ticket", np.zeros(1, np.uint32), mutable=True)
        y = memory.empty("y", 4, np.uint32)
        run(memory, [launch(take_ticket, ticket, y, grid=4)], seed=seed)
        return list(map(int, memory.get("y")))

    assert order(1) == order(1)
    assert len({tuple(order(seed)) for seed in range(8)}) > 3


def take_ticket(ticket: Address, y: Address) -> None:
    """Note which turn each CTA got."""
    grid_wait()
    if thread_id() == 0:
        store_u32(y + 4 * cta_id(), atomic_increment_wrapping(ticket, 1000))


def two_ctas_store(x: Address, y: Address, z: Address) -> None:
    """Store to the same place from all CTAs."""
    grid_wait()
    if thread_id() == 0:
        store_f32(z, 1.0)


def test_two_ctas_that_store_to_one_place_race() -> None:
    """Equal values do not make it right."""
    simple(two_ctas_store)
    with pytest.raises(simulator.Race, match=r"z\+0 by thread 0 of CTA 0"):
        simple(two_ctas_store, grid=2)


def neighbours(x: Address, y: Address, z: Address) -> None:
    """Store 16 bits from each thread, then look at a whole vector."""
    grid_wait()
    i = thread_id()
    store_u16(z + 2 * i, i)
    barrier()
    if i < 8:
        store_v4(y + 16 * i, load_v4(z + 16 * i))


def test_accesses_of_different_width_are_compared_byte_by_byte() -> None:
    """Neighbouring halves of a word do not race; a vector over them is ordered by the barrier."""
    memory = simple(neighbours)
    assert memory.get("y").view(np.uint16)[:64].tolist() == list(range(64))


def narrow_after_wide(x: Address, y: Address, z: Address) -> None:
    """Store a vector, then one word at its beginning and one inside."""
    grid_wait()
    if thread_id() == 0:
        store_v4(z, (1, 2, 3, 4))
    barrier()
    if thread_id() == 1:
        store_u32(z, 5)
        store_u32(z + 8, 6)
        fence()
        store_u32(z + 12, load_relaxed_u32(z) + load_relaxed_u32(z + 4))


def test_stores_that_overlap_are_published_whole() -> None:
    """The later one wins where both wrote, the earlier one stays elsewhere."""
    assert simple(narrow_after_wide).get("z").view(np.uint32)[:4].tolist() == [5, 2, 6, 7]


def old_value(x: Address, y: Address, z: Address, *, LOAD: str, HAS_FENCE: bool) -> None:  # noqa: N803
    """CTA 1 looks at y, CTA 0 stores to it and raises a flag, CTA 1 looks again; the flags are at y + 128."""
    grid_wait()
    if thread_id() == 0:
        if cta_id() == 0:
            while load_relaxed_u32(y + 128) < 1:
                i32(0)
            store_f32(y, 5.0)
            if HAS_FENCE:
                fence()
            atomic_increment_wrapping(y + 128, 9)
            while load_relaxed_u32(y + 128) < 3:
                i32(0)
        else:
            load_f32(y)
            atomic_increment_wrapping(y + 128, 9)
            while load_relaxed_u32(y + 128) < 2:
                i32(0)
            if LOAD == "weak":
                store_f32(z, load_f32(y))
            else:
                store_f32(z, load_relaxed_f32(y))
            atomic_increment_wrapping(y + 128, 9)


@pytest.mark.parametrize(("load", "has_fence"), [("weak", True), ("weak", False), ("strong", False)])
def test_an_unordered_load_sees_the_old_value(load: str, has_fence: bool) -> None:
    """A weak load sees its CTA's cache, a store stays in its CTA until a fence; both are races besides."""
    memory = Memory()
    y = memory.put("y", np.zeros(64, np.float32), mutable=True)
    z = memory.empty("z", 64, np.float32)
    with pytest.raises(simulator.Race):
        run(memory, [launch(old_value, 0, y, z, grid=2, LOAD=load, HAS_FENCE=has_fence)])
    assert memory.get("z")[0] == 0.0


def exchange_in_warp(x: Address, y: Address, z: Address, *, HAS_BARRIER: bool) -> None:  # noqa: N803
    """Hand values to the next lane through shared memory, then sum by shuffles."""
    grid_wait()
    i = thread_id()
    shared_store_f32(4 * i, load_f32(x + 4 * i))
    value = shuffle_xor_f32(1.0, 1)
    if HAS_BARRIER:
        warp_barrier()
    value = shared_load_f32(4 * (i ^ 1))
    for step in unrolled(5):
        value = value + shuffle_xor_f32(value, 1 << step)
    store_f32(y + 4 * i, value)


def test_a_warp_barrier_orders_its_warp_and_a_shuffle_does_not() -> None:
    """The sum is right with the barrier; without it the shuffle before the load does not help."""
    got = simple(exchange_in_warp, HAS_BARRIER=True).get("y")
    assert got[0] == sum(range(32))
    assert got[63] == sum(range(32, 64))
    with pytest.raises(simulator.Race):
        simple(exchange_in_warp, HAS_BARRIER=False)


def count(x: Address, y: Address, z: Address, *, BARRIERS: tuple[int, int]) -> None:  # noqa: N803
    """Count threads by parity with atomics in shared memory."""
    grid_wait()
    i = thread_id()
    if i < 2:
        shared_store_u32(4 * i, 0)
    if BARRIERS[0]:
        barrier()
    shared_fetch_add_u32(4 * (i & 1), 1)
    if BARRIERS[1]:
        barrier()
    if i < 2:
        store_u32(y + 4 * i, shared_load_u32(4 * i))


def test_atomics_race_with_plain_accesses_only() -> None:
    """Threads may add in any order; the zero before and the load after need barriers."""
    assert simple(count, BARRIERS=(1, 1)).get("y").view(np.uint32)[:2].tolist() == [32, 32]
    for barriers in ((0, 1), (1, 0)):
        with pytest.raises(simulator.Race):
            simple(count, BARRIERS=barriers)


def follow(x: Address, y: Address, *, ADD: int) -> None:  # noqa: N803
    """Add the immutable x, fetched before the wait, to y."""
    i = thread_id()
    weight = load_stream_v4(x + 16 * (i >> 2))
    grid_wait()
    store_u32(y + 4 * i, load_u32(y + 4 * i) + weight[0] + ADD)


def test_launches_of_one_run_follow_each_other() -> None:
    """Each sees all of the one before it."""
    memory = Memory()
    x = memory.put("x", np.repeat(np.arange(16, dtype=np.uint32), 4))
    y = memory.put("y", np.zeros(64, np.uint32), mutable=True)
    run(memory, [launch(follow, x, y, ADD=1)] * 3)
    assert (memory.get("y") == 3 * (np.arange(64) // 4 + 1)).all()


def gather(pool: Address, blocks: Address, stride: Address, y: Address, *, WIDTH: int) -> None:  # noqa: N803
    """Load one word of each block of a table."""
    grid_wait()
    i = thread_id()
    block = load_i32(blocks + 4 * i)
    if WIDTH == 64:
        store_u32(y + 4 * i, load_u32(pool + block * stride))
    else:
        store_u32(y + 4 * i, load_u32(pool + u32(block * stride)))


def test_a_pool_larger_than_32_bits_takes_64_bit_offsets() -> None:
    """Blocks near the end of 200 GiB are found; 32-bit offsets break their promise."""
    memory, stride = Memory(), 3 << 20
    pool = memory.sparse("pool", 200 << 30)
    table = (200 << 30) // stride - 1 - np.arange(32, dtype=np.int32) * 3
    for value, block in enumerate(table):
        memory.write(pool + int(block) * stride, np.uint32(value))
    blocks = memory.put("blocks", table, mutable=True)
    y = memory.empty("y", 32, np.uint32)
    run(memory, [launch(gather, pool, blocks, stride, y, threads=32, WIDTH=64)])
    assert memory.get("y").tolist() == list(range(32))
    with pytest.raises(simulator.PromiseBroken):
        run(memory, [launch(gather, pool, blocks, stride, y, threads=32, WIDTH=32)])


def test_every_intrinsic_has_one_twin() -> None:
    """Nothing that compiles is missing here, and nothing here is unknown to the compiler."""
    twins = [*SHARED, *GLOBAL, *ATOMIC, *BLOCKING, *simulator.PURE]
    assert len(twins) == len(set(twins))
    assert set(twins) - {"f32", "i32", "u32"} == set(INTRINSICS)


def test_an_intrinsic_called_in_python_is_an_error() -> None:
    """It has no body, and None would go on as if it were a value."""
    with pytest.raises(RuntimeError, match="load_u32 runs on a device"):
        load_u32(0)
    with pytest.raises(RuntimeError, match="barrier runs on a device"):
        barrier()


def unused(size: I32) -> None:
    """Wait."""
    grid_wait()


def test_a_runtime_integer_has_32_bits() -> None:
    """As the driver passes it."""
    with pytest.raises(AssertionError):
        run(Memory(), [launch(unused, 1 << 31)])
