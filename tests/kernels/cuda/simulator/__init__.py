"""A GPU in Python, for tests: runs kernels thread by thread and raises at what a GPU may or may not get wrong.

memory = Memory()
x = memory.put("x", np.arange(64, dtype=np.float32))
y = memory.empty("y", 64, np.float32)
run(memory, [Launch(double, {"UNROLL": 2}, (x, y, 64), grid=2, num_threads=32, shared_bytes=0)], seed=1)
assert (memory.get("y") == 2 * memory.get("x")).all()
"""

from tests.kernels.cuda.simulator.errors import (
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
from tests.kernels.cuda.simulator.launch import Launch, run
from tests.kernels.cuda.simulator.memory import Memory
from tests.kernels.cuda.simulator.numbers import PURE, from_bf16, to_bf16

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
