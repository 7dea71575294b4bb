"""A GPU in Python, for tests: runs kernels thread by thread and raises at what a GPU may or may not get wrong.

    memory = Memory()
    x = memory.put("x", np.arange(64, dtype=np.float32))
    y = memory.empty("y", 64, np.float32)
    run(memory, [Launch(double, {"UNROLL": 2}, (x, y, 64), grid=2, num_threads=32, shared_bytes=0)], seed=1)
    assert (memory.get("y") == 2 * memory.get("x")).all()

How it works. A kernel, specialised as for the compiler, becomes a Python generator per thread (:mod:`translate`); all
CTAs are resident, and a thread may lose its turn at every access to global memory (:mod:`grid`). A CTA sees global
memory through a view of its own, which fences renew; its stores leave it at fences and at its end. Launches of one run
are a chain: each runs as far as ``grid_wait`` before the one before it begins what it may write.

What is checked does not depend on the order of turns: every access to mutable memory is logged with a vector clock, and
after a launch all pairs that conflict must be ordered by barriers or by fences around atomics (:mod:`clocks`,
:mod:`races`). That, not luck, is why a deleted barrier is noticed.

What is not modelled: time; CTAs that wait for a place on a multiprocessor, so that a loop that waits for another CTA
ends here and may hang a GPU (no kernel may have one); banks and coalescing; reordering that no race is needed for (none
is possible if all conflicting accesses are ordered); the error of ``ex2.approx`` and its like, which are exact here;
rounding inside one expression, which is float64 (:mod:`rounding`); integers of 64 bits do not wrap but fail as
addresses or in a cast.
"""

from tools.cuda_simulator.errors import (
    Deadlock,
    Divergence,
    Misaligned,
    OutOfBounds,
    PromiseBroken,
    Race,
    ReadBeforeWait,
    ReadOnly,
    SimulationError,
    Uninitialised,
    WaitMissing,
    WroteBeforeWait,
)
from tools.cuda_simulator.launch import Launch, run
from tools.cuda_simulator.memory import Memory
from tools.cuda_simulator.numbers import PURE, from_bf16, to_bf16

__all__ = [
    "Deadlock",
    "Divergence",
    "Launch",
    "Memory",
    "Misaligned",
    "OutOfBounds",
    "PURE",
    "PromiseBroken",
    "Race",
    "ReadBeforeWait",
    "ReadOnly",
    "SimulationError",
    "Uninitialised",
    "WaitMissing",
    "WroteBeforeWait",
    "from_bf16",
    "run",
    "to_bf16",
]
