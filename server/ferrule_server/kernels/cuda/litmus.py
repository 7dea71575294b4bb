"""One launch of a chain that tests whether ``grid_wait`` keeps its promise; no step runs it.

Every kernel lets the next one start in its first lines and reads, after its own wait, what the kernels before it wrote.
That is right only if the wait ends when those kernels have ended and what they stored is seen by every multiprocessor.
This kernel makes a broken promise visible: it lets the next launch start, spins, and stores last.

Each launch of a chain owns a row of words. All words of all rows are equal before a chain, and each launch adds 1 to
those of its row, so a word that a later launch reads too early is 1 too small. Nothing depends on the arguments of a
run, so a captured chain can be replayed.

Source: the shape of the test is that of a litmus test for message passing, with a grid on either side (J. Alglave et
al., "GPU Concurrency: Weak Behaviours and Programming Assumptions", ASPLOS 2015).
"""

from __future__ import annotations

from typing import Final

from ferrule_server.kernels.cuda import intrinsics as ptx
from ferrule_server.kernels.cuda.intrinsics import I32, U32, Address, device
from ferrule_server.kernels.cuda.spec import KernelSpec
from ferrule_server.kernels.cuda.specialise import i32, registers, u32, unrolled

__all__ = ["CONTROL", "ROW_BYTES", "SPECS", "WAITING", "litmus"]

THREADS: Final = 128
U: Final = 4
"""Accesses in flight per thread."""

ROW_BYTES: Final = THREADS * U * 16
"""Of a row, for each CTA."""


def litmus(before: Address, first: Address, own: Address, stale: Address, cycles: I32, *, WAITS: bool) -> None:
    """Count the stale words of two rows, spin, and add 1 to the words of a third.

    Launch: any grid, THREADS threads, no shared memory. A CTA stores ROW_BYTES in one piece and reads as many, which up
    to U other CTAs stored; together they read whole rows.

    Args:
        before: uint32 [num_ctas, ROW_BYTES / 4], the row of the launch before this one; 0: this is the first.
        first: The row of the first launch of the chain; 0: it is not read.
        own: The row of this launch, every word the same.
        stale: uint64, the number of words found that are not one more than those of ``own``; added to.
        cycles: CTA i spins for i mod 4 times as many before it stores.
        WAITS: False is the control: it reads above the wait, as if the wait were not there. It waits before it stores,
            so that its chains do not run into each other.
    """
    ptx.grid_launch_dependents()
    if WAITS:
        ptx.grid_wait()
    place = own + i32(ptx.cta_id() * ROW_BYTES + ptx.thread_id() * 16)
    wanted = u32(ptx.load_u32(place) + 1)
    count = i32(0)
    if before != 0:
        count = _num_stale(before, wanted)
    if first != 0:
        count = i32(count + _num_stale(first, wanted))
    if count != 0:
        ptx.atomic_add_u64(stale, count)
    if not WAITS:
        ptx.grid_wait()
    end = ptx.clock() + cycles * (ptx.cta_id() & 3)
    while ptx.clock() < end:
        pass
    for u in unrolled(U):
        ptx.store_v4(place + u * THREADS * 16, (wanted, wanted, wanted, wanted))


@device
def _num_stale(row: Address, wanted: U32) -> I32:
    """Return how many of the words that this thread reads of a row are not the wanted one."""
    words = registers(U)
    for u in unrolled(U):
        words[u] = ptx.load_v4(row + i32(((u * ptx.num_ctas() + ptx.cta_id()) * THREADS + ptx.thread_id()) * 16))
    found = i32(0)
    for u in unrolled(U):
        for i in unrolled(4):
            if words[u][i] != wanted:
                found = i32(found + 1)
    return found


WAITING: Final = KernelSpec(litmus, (("WAITS", True),), num_threads=THREADS, shared_bytes=0, min_vector_loads=2 * U)
CONTROL: Final = KernelSpec(litmus, (("WAITS", False),), num_threads=THREADS, shared_bytes=0, min_vector_loads=2 * U)
"""Must be found to read stale words: a test in which nothing overlaps proves nothing."""

SPECS: Final = (WAITING, CONTROL)
