"""How the threads of a step work together: a barrier, work that is claimed piece by piece, and parking.

All of it lies in one array of int64 words, the *sync block*, and every word that threads write has a cache line of its
own. Threads meet at a barrier some hundred times in a step, so a barrier that is not contended takes about 0.1 us: a
thread spins briefly, then it yields its processor, which the thread that it waits for may need. Between steps
threads are parked in semaphores of the C library and use no time.
"""

from __future__ import annotations

import ctypes
from typing import Final

import numpy as np
from llvmlite import ir
from numba import types

from ferrule_server.kernels.cpu.kernel import kernel, operation
from ferrule_server.kernels.cpu.lanes import I64, Builder, Value, call, pointer, prefetch

_C: Final = ctypes.CDLL(None)

_LINE: Final = 64
_ARRIVED: Final = 0
_GENERATION: Final = _LINE
_IS_ABORTED: Final = 2 * _LINE
_WAITED: Final = 3 * _LINE
_FIRST_SEMAPHORE: Final = 4 * _LINE
_MOST_THREADS: Final = 256
_FIRST_CLAIM: Final = (4 + _MOST_THREADS) * _LINE
_SPINS: Final = 3000
_MOST_LINES_AHEAD: Final = 2048
"""128 KiB, so that much is left of an L2 cache of 512 KiB."""

_sem_wait = types.ExternalFunction("sem_wait", types.int32(types.intp))
_sem_post = types.ExternalFunction("sem_post", types.int32(types.intp))
_sched_yield = types.ExternalFunction("sched_yield", types.int32())


@operation(types.int64, types.int64, types.int64)
def _atomic_add(builder: Builder, address: Value, value: Value) -> Value:
    """Add to a word and return what it was."""
    return builder.atomic_rmw("add", pointer(builder, address, I64), value, "acq_rel")


@operation(types.int64, types.int64)
def _atomic_read(builder: Builder, address: Value) -> Value:
    """Return a word; later reads see what was written before it was."""
    return builder.load_atomic(pointer(builder, address, I64), "acquire", 8)


@operation(types.void, types.int64, types.int64)
def _atomic_write(builder: Builder, address: Value, value: Value) -> None:
    """Write a word, after everything written before."""
    builder.store_atomic(value, pointer(builder, address, I64), "release", 8)


@operation(types.void)
def _relax(builder: Builder) -> None:
    """Hint to the processor that this thread spins."""
    if builder.module.triple.startswith("x86_64"):
        call(builder, "llvm.x86.sse2.pause", ir.VoidType(), [])


class SyncBlock:
    """The sync block of one group of threads.

    Args:
        num_claims: Stages of a step in which work is claimed.

    Attributes:
        address: Where the words are; they live as long as this object.
    """

    def __init__(self, num_claims: int) -> None:
        num_bytes = _FIRST_CLAIM + num_claims * _LINE
        self._words = np.zeros((num_bytes + _LINE) // 8, np.int64)
        self.address = self._words.ctypes.data + -self._words.ctypes.data % _LINE
        for thread in range(_MOST_THREADS):
            _C.sem_init(ctypes.c_void_p(self._semaphore(thread)), 0, 0)

    @staticmethod
    def is_aborted_at(address: int) -> bool:
        """Return whether the sync block at an address was aborted."""
        return bool(ctypes.c_int64.from_address(address + _IS_ABORTED).value)

    def take_waited_share(self) -> float:
        """Return for which share of the last step threads have waited long, those left out that are still waiting."""
        waited, taken = (ctypes.c_int64.from_address(self.address + _WAITED + offset) for offset in (0, 8))
        share = waited.value / max(1, taken.value)
        waited.value = 0
        return share

    def abort(self, num_threads: int) -> None:
        """End this step and every later one: waiting threads leave their barrier, and parked ones are released."""
        ctypes.c_int64.from_address(self.address + _IS_ABORTED).value = 1
        for thread in range(num_threads):
            _C.sem_post(ctypes.c_void_p(self._semaphore(thread)))

    def _semaphore(self, thread: int) -> int:
        return self.address + _FIRST_SEMAPHORE + thread * _LINE


@operation(types.int64)
def _ticks(builder: Builder) -> Value:
    """Return the time in a unit of the processor's own."""
    name = "readcyclecounter" if builder.module.triple.startswith("x86_64") else "readsteadycounter"
    return call(builder, f"llvm.{name}", I64, [])


@kernel
def begin_step(sync: int) -> None:
    """Note the time at which a step begins."""
    _atomic_write(sync + _WAITED + 8, _ticks())


@kernel
def end_step(sync: int) -> None:
    """Note the time that a step has taken."""
    _atomic_write(sync + _WAITED + 8, _ticks() - _atomic_read(sync + _WAITED + 8))


@kernel
def is_aborted(sync: int) -> bool:
    """Return whether the step was aborted."""
    return _atomic_read(sync + _IS_ABORTED) != 0


@kernel
def reset(sync: int, num_claims: int, num_threads: int) -> None:
    """Begin a step: each thread has the piece of its own number. The others are parked, or leave the last barrier."""
    for number in range(num_claims):
        _atomic_write(sync + _FIRST_CLAIM + number * _LINE, num_threads)


@kernel
def barrier(sync: int, num_threads: int, ahead: int) -> bool:
    """Wait until all threads of the step have arrived; return False if the step was aborted.

    Meanwhile memory from the address ``ahead`` on is prefetched, unless it is 0: a thread that waits for another one
    leaves the memory to it, but threads that all wait for each other would leave it idle.

    The last thread to arrive releases the others by changing the generation, which never returns to an old value. So a
    thread that is slow to leave cannot be caught by the next barrier, or by the next step.
    """
    generation = _atomic_read(sync + _GENERATION)
    if _atomic_add(sync + _ARRIVED, 1) == num_threads - 1:
        _atomic_write(sync + _ARRIVED, 0)
        _atomic_write(sync + _GENERATION, generation + 1)
        return not is_aborted(sync)
    spins, since = 0, 0
    while _atomic_read(sync + _GENERATION) == generation:
        if is_aborted(sync):
            return False
        if spins < _SPINS:
            if ahead != 0 and spins < _MOST_LINES_AHEAD:
                prefetch(ahead + spins * _LINE)
            else:
                _relax()
            spins += 1
        else:
            since = since or _ticks()
            _sched_yield()
    if since != 0:
        _atomic_add(sync + _WAITED, _ticks() - since)
    return True


@kernel
def claim(sync: int, number: int) -> int:
    """Return the next piece of work of a stage that no thread has; a thread's first one is its own number."""
    return _atomic_add(sync + _FIRST_CLAIM + number * _LINE, 1)


@kernel
def share(num_items: int, num_threads: int, thread: int) -> tuple[int, int]:
    """Return the first item of a thread's share of equal items, and the first one that is no longer in it."""
    return num_items * thread // num_threads, num_items * (thread + 1) // num_threads


@kernel
def park(sync: int, thread: int) -> None:
    """Wait without using time until the thread is released."""
    while _sem_wait(sync + _FIRST_SEMAPHORE + thread * _LINE) != 0:
        pass  # a signal came


@kernel
def release(sync: int, thread: int) -> None:
    """Wake a parked thread; if it is not parked, its next :func:`park` returns at once."""
    _sem_post(sync + _FIRST_SEMAPHORE + thread * _LINE)
