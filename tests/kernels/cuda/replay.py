"""Replays: runs in memory as the run before left it, which is what a captured step does all its life.

What the run before wrote must not stand in for what this one forgets to write, so outputs begin as they were placed;
counters must be left at 0, or the next run never sees the last CTA arrive.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ferrule_server.kernels.cuda.specialise import Constant, Specialised, specialise
from tools.cuda_simulator import Launch, Memory, run

__all__ = ["replay", "without_wrapping"]


def replay(
    memory: Memory, launches: Sequence[Launch], *, outputs: Sequence[str], counters: Sequence[str] = (), seed: int = 0
) -> None:
    """Run in memory that was run in before, of which only the outputs are put back to what they were.

    Args:
        memory: With everything placed.
        launches: One after another.
        outputs: What the launches write and nobody reads: poisoned, or with a mark of the test.
        counters: Must be 0 when the launches have ended.
        seed: Of the order of turns.
    """
    memory.reset(*outputs)
    run(memory, launches, seed=seed)
    for name in counters:
        assert not memory.get(name).any(), f"{name} must be 0 for the next run, is {memory.get(name).ravel().tolist()}"


def without_wrapping(kernel: Callable[..., None], constants: Mapping[str, Constant]) -> Specialised:
    """Return a kernel whose tickets count on and on: right once, never again in the same memory."""
    made = specialise(kernel, constants)
    tree = copy.deepcopy(made.tree)
    tickets = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _is_ticket(node)]
    assert tickets, f"{made.name} has no ticket"
    for call in tickets:
        call.args[1] = ast.copy_location(ast.Constant(0xFFFFFFFF), call.args[1])
    return replace(made, tree=tree)


def _is_ticket(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Name) and call.func.id == "atomic_increment_wrapping"
