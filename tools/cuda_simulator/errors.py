"""What the simulator finds wrong with a kernel, one class per hazard."""

from __future__ import annotations

__all__ = [
    "Deadlock",
    "Divergence",
    "Misaligned",
    "OutOfBounds",
    "PromiseBroken",
    "Race",
    "ReadBeforeWait",
    "ReadOnly",
    "SimulationError",
    "Uninitialised",
    "WaitMissing",
    "WroteBeforeWait",
]


class SimulationError(Exception):
    """A kernel did something that is wrong on a GPU, whether or not it would show there every time."""


class OutOfBounds(SimulationError):
    """An access outside every allocation, or outside the shared memory that was asked for."""


class Misaligned(SimulationError):
    """An address that is no multiple of the size of the access."""


class ReadOnly(SimulationError):
    """A store to immutable memory, or a streaming load of memory that somebody may write."""


class Uninitialised(SimulationError):
    """A load of bytes that nobody has written."""


class Race(SimulationError):
    """Two accesses of two threads to the same bytes, one a store, that nothing puts in order."""


class Divergence(SimulationError):
    """Not all threads that a barrier or a warp instruction names arrive at it."""


class Deadlock(SimulationError):
    """Threads wait and nothing can wake them."""


class WaitMissing(SimulationError):
    """A thread did not execute ``grid_wait`` exactly once, or ended while copies of its own were under way."""


class ReadBeforeWait(SimulationError):
    """A load above ``grid_wait`` that is not the streaming load of immutable memory."""


class WroteBeforeWait(SimulationError):
    """A store above ``grid_wait``."""


class PromiseBroken(SimulationError, OverflowError):
    """A value does not fit the width that ``i32``, ``u32`` or an intrinsic's argument promises."""
