"""Kernels that let the next one start late: the same code without the trigger computes the same, and still waits."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from ferrule_server.kernels.cuda.catalog import shipped_kernels
from ferrule_server.kernels.cuda.copy_blocks import copy_blocks
from ferrule_server.kernels.cuda.spec import KernelSpec
from ferrule_server.kernels.cuda.specialise import Specialised, specialise
from tools.cuda_simulator import Launch, Memory, run

KERNELS = {spec.kernel.__name__: spec for spec in reversed(shipped_kernels())}
"""One set of constants for each kernel of the catalog."""


def _is_call(node: ast.AST, name: str) -> bool:
    match node:
        case ast.Expr(value=ast.Call(func=ast.Name(id=called))):
            return called == name
    return False


def _calls(tree: ast.AST, name: str) -> Iterator[ast.AST]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == name)


def _without_trigger(specialised: Specialised) -> Specialised:
    (function,) = specialised.tree.body
    assert isinstance(function, ast.FunctionDef)
    body = [node for node in function.body if not _is_call(node, "grid_launch_dependents")]
    late = ast.FunctionDef(**{**dict(ast.iter_fields(function)), "body": body})
    return replace(specialised, tree=ast.Module([ast.copy_location(late, function)], []))


@pytest.mark.parametrize("spec", KERNELS.values(), ids=KERNELS)
def test_every_kernel_triggers_and_waits_once_in_every_thread(spec: KernelSpec) -> None:
    """Both calls stand outside of all branches and loops and nothing returns before, so no thread goes round them.

    What is left without the trigger is the rest, statement by statement, with the wait in it.
    """
    specialised = specialise(spec.kernel, dict(spec.constants))
    (function,) = specialised.tree.body
    assert isinstance(function, ast.FunctionDef)
    for name in ("grid_launch_dependents", "grid_wait"):
        assert sum(_is_call(node, name) for node in function.body) == 1
        assert len(list(_calls(function, name))) == 1
    assert not [node for node in ast.walk(function) if isinstance(node, ast.Return)]
    (late,) = _without_trigger(specialised).tree.body
    assert isinstance(late, ast.FunctionDef)
    rest = [ast.dump(node) for node in function.body if not _is_call(node, "grid_launch_dependents")]
    assert [ast.dump(node) for node in late.body] == rest
    assert len(late.body) == len(function.body) - 1


def test_a_chain_without_triggers_computes_the_same() -> None:
    """Copies of copies, with and without."""
    constants = {"PARTS": 2, "U": 2, "THREADS": 32}
    late = _without_trigger(specialise(copy_blocks, constants))
    found = []
    for specialised in (None, late):
        memory = Memory()
        pool = memory.put("pool", np.arange(4 * 512, dtype=np.uint32), mutable=True)
        chain = []
        for name, pair in (("first", (1, 2)), ("second", (2, 3))):
            pairs = memory.put(name, np.array([pair], np.int32), mutable=True)
            arguments = (pool, 2048, 1024, pairs, 1, 2, 512)
            chain.append(Launch(copy_blocks, constants, arguments, 3, 32, specialised=specialised))
        run(memory, chain, seed=5)
        found.append(memory.get("pool"))
    assert (found[0].reshape(4, -1)[3] == np.arange(512, 1024)).all()
    np.testing.assert_array_equal(found[0], found[1])
