"""Which access of one thread happens before which of another: vector clocks, one entry per thread.

A thread's run is cut into *segments* at everything that orders: barriers and fences. Segment ``(thread, n)`` knows, by
its vector, the last segment of each other thread that happens before it. Vectors are shared: after a barrier all
threads of a CTA have the same one.

Rules (PTX ISA, "Memory Consistency Model"): a barrier orders the threads it joins; a fence followed by a strong write
is a release, a strong read followed by a fence an acquire, and an acquire that reads from a release (also through other
atomics in between) is ordered after it. Shuffles and relaxed accesses alone order nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

__all__ = ["Clocks", "ThreadClock"]

Vector = NDArray[np.int32]


@dataclass(slots=True)
class ThreadClock:
    """Where one thread stands.

    Attributes:
        index: Of the thread in its launch.
        codes: The thread's accesses so far; see :mod:`tools.cuda_simulator.races`.
        now: Number of the current segment, from 1.
        base: Index of the current vector.
        released: Segment and vector at the last fence.
        observed: What strong reads since then may have synchronised with.
        segments: (first access, segment, vector, order of beginning) of each.
    """

    index: int
    codes: list[int]
    now: int = 1
    base: int = 0
    released: tuple[int, int] | None = None
    observed: Vector | None = None
    segments: list[tuple[int, int, int, int]] = field(default_factory=list)


class Clocks:
    """The clocks of a launch: ``vectors[i][t]`` is the last segment of thread t before segments of vector i."""

    def __init__(self, num_threads: int) -> None:
        self.vectors: list[Vector] = [np.zeros(num_threads, np.int32)]
        self._locations: dict[int, Vector] = {}
        self._num_begun = 0

    def begin(self, thread: ThreadClock) -> None:
        """Begin a thread's next segment."""
        thread.segments.append((len(thread.codes), thread.now, thread.base, self._num_begun))
        self._num_begun += 1

    def join(self, threads: Iterable[ThreadClock]) -> None:
        """Put everything the threads did before everything they do from now on."""
        members = list(threads)
        vector = self._merge({thread.base for thread in members})
        vector[[thread.index for thread in members]] = [thread.now for thread in members]
        self.vectors.append(vector)
        base, order = len(self.vectors) - 1, self._num_begun
        for thread in members:
            thread.base = base
            thread.now += 1
            thread.segments.append((len(thread.codes), thread.now, base, order))
        self._num_begun += 1

    def fence(self, thread: ThreadClock) -> None:
        """Release what was before for later strong writes; acquire what earlier strong reads have seen."""
        thread.released = (thread.now, thread.base)
        if thread.observed is not None:
            self.vectors.append(np.maximum(self.vectors[thread.base], thread.observed))
            thread.base, thread.observed = len(self.vectors) - 1, None
            thread.released = (thread.now, thread.base)
        thread.now += 1
        self.begin(thread)

    def observe(self, thread: ThreadClock, address: int) -> None:
        """Note a strong read."""
        seen = self._locations.get(address)
        if seen is not None:
            thread.observed = seen if thread.observed is None else np.maximum(thread.observed, seen)

    def exchange(self, thread: ThreadClock, address: int) -> None:
        """Note an atomic: a strong read and write in one."""
        self.observe(thread, address)
        if thread.released is None:
            return
        now, base = thread.released
        vector = self.vectors[base].copy()
        vector[thread.index] = now
        before = self._locations.get(address)
        self._locations[address] = vector if before is None else np.maximum(before, vector)

    def _merge(self, bases: set[int]) -> Vector:
        first, *others = bases
        vector = self.vectors[first].copy()
        for other in others:
            np.maximum(vector, self.vectors[other], out=vector)
        return vector
