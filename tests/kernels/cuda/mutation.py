"""Mutation test of everything that orders: without any one of its barriers, fences and waits a kernel must fail.

A wait for asynchronous copies must not be weaker either: waiting for one group less must fail too.
"""

from __future__ import annotations

import ast
import copy
import linecache
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ferrule_server.kernels.cuda.specialise import Constant, Specialised, specialise

__all__ = ["EQUIVALENT", "SYNCHRONISING", "Mutation", "SurvivingMutants", "check_mutants", "mutate", "mutations"]

SYNCHRONISING = (
    "barrier",
    "copy_async_commit",
    *(f"copy_async_wait_{groups}" for groups in range(8)),
    "fence",
    "grid_wait",
    "warp_barrier",
)
"""Instructions that only order."""

EQUIVALENT = "# unprovable here:"
"""A line with this comment is left alone; what follows says why a GPU needs it and the simulator cannot tell."""


class SurvivingMutants(AssertionError):
    """A kernel works without some of its synchronisation: it is superfluous, or the test does not reach it."""


@dataclass(frozen=True, slots=True, order=True)
class Mutation:
    """All calls of one instruction that one place of the source gives, however often it was written out.

    They are deleted, or call ``instead``.
    """

    path: str
    line: int
    column: int
    name: str
    instead: str = ""

    def __str__(self) -> str:
        weaker = f" (as {self.instead})" if self.instead else ""
        return f"{self.name}{weaker} on line {self.line} of {Path(self.path).name}"


def mutations(specialised: Specialised) -> list[Mutation]:
    """Return what can be deleted or weakened of a kernel, by file name and place: the same wherever the files lie."""
    found = {made for node in ast.walk(specialised.tree) if (made := _mutation(node)) is not None}
    found |= {replace(one, instead=_weaker(one.name)) for one in found if "_wait_" in one.name}
    provable = (one for one in found if EQUIVALENT not in linecache.getline(one.path, one.line))
    return sorted(provable, key=lambda one: (Path(one.path).name, one))


def mutate(specialised: Specialised, mutation: Mutation) -> Specialised:
    """Return the kernel without the calls of one mutation; its own tree is left as it is."""
    return replace(specialised, tree=ast.Module(_without(specialised.tree.body, mutation), []))


def check_mutants(
    kernel: Callable[..., None], constants: Mapping[str, Constant], run: Callable[[Specialised], None]
) -> list[Mutation]:
    """Run a kernel as it is, then without each of its synchronising calls, and return the mutations.

    Args:
        kernel: The kernel.
        constants: Its keyword-only parameters.
        run: Simulates what it is given on fresh memory and asserts that the result is right.

    Raises:
        SurvivingMutants: ``run`` found nothing wrong with some mutants.
    """
    specialised = specialise(kernel, constants)
    run(specialised)
    found = mutations(specialised)
    survivors = [mutation for mutation in found if not _fails(run, mutate(specialised, mutation))]
    if survivors:
        raise SurvivingMutants(f"{specialised.name} passes without {'; '.join(map(str, survivors))}")
    return found


def _fails(run: Callable[[Specialised], None], mutant: Specialised) -> bool:
    try:
        run(mutant)
    except Exception:  # noqa: BLE001  (whatever goes wrong shows that the call was needed)
        return True
    return False


def _mutation(node: ast.AST) -> Mutation | None:
    match node:
        case ast.Expr(value=ast.Call(func=ast.Name(id=name)) as call) if name in SYNCHRONISING:
            return Mutation(getattr(call, "path", ""), call.lineno, call.col_offset, name)
    return None


def _weaker(wait: str) -> str:
    name, _, groups = wait.rpartition("_")
    return f"{name}_{int(groups) + 1}"


def _without(body: list[ast.stmt], mutation: Mutation) -> list[ast.stmt]:
    written: list[ast.stmt] = []
    for node in body:
        if _mutation(node) == replace(mutation, instead=""):
            called = ast.Call(ast.Name(mutation.instead, ast.Load()), [], [])
            other = ast.Expr(called) if mutation.instead else ast.Pass()
            written.append(ast.fix_missing_locations(ast.copy_location(other, node)))
        elif isinstance(node, ast.FunctionDef | ast.If | ast.While):
            made = copy.copy(node)
            made.body = _without(node.body, mutation)
            if not isinstance(made, ast.FunctionDef):
                made.orelse = _without(made.orelse, mutation)
            written.append(made)
        else:
            written.append(node)
    return written
