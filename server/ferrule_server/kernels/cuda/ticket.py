"""How CTAs of one grid meet without waiting for each other: the one that arrives last does what is left to do.

Source: the "threadfence reduction" pattern of the CUDA C++ Programming Guide, "Memory Fence Functions"; the counter
wraps to 0 by itself, so that a captured graph can be replayed.
"""

from __future__ import annotations

from ferrule_server.kernels.cuda import intrinsics as ptx
from ferrule_server.kernels.cuda.intrinsics import I32, U32, Address, Offset, device

__all__ = ["arrive"]


@device
def arrive(ticket: Address, num_arrivals: I32, flag: Offset, *, ALL_STORE: bool) -> U32:
    """Return 1 in all threads of the CTA that arrives last, else 0; it sees what the others stored, by strong loads.

    Args:
        ticket: uint32, 0 before the first arrival, and again after the last.
        num_arrivals: How many arrivals there are.
        flag: 4 bytes of shared memory.
        ALL_STORE: Any thread may have stored since the last barrier; else only thread 0 has, and the flag is not read
            any more since the last arrival.
    """
    if ALL_STORE:
        ptx.barrier()
    if ptx.thread_id() == 0:
        ptx.fence()
        before = ptx.atomic_increment_wrapping(ticket, num_arrivals - 1)
        ptx.fence()
        ptx.shared_store_u32(flag, 1 if before == num_arrivals - 1 else 0)
    ptx.barrier()
    return ptx.shared_load_u32(flag)
